"""Where an output may be written: never at the cost of something that is there."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from gemma_convert.convert.errors import OutputError
from gemma_convert.convert.writers.directory import SPARE_BYTES, check_output
from tests.checkpoints import snapshot


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """An output of an earlier run."""
    out = tmp_path / "out"
    (out / "folder").mkdir(parents=True)
    (out / "folder" / "file").write_text("old")
    return out


@pytest.mark.parametrize(
    ("out", "given"),
    [
        ("base", "base"),
        ("base/merged", "base"),
        ("base/new/merged", "base"),
        (".", "base"),
        ("base/../base", "base"),
        ("link", "base"),
        ("link/merged", "base"),
        ("base", "link"),
        ("base/model.safetensors", "base/model.safetensors"),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_an_output_must_lie_outside_the_inputs(
    tmp_path: Path, out: str, given: str, force: bool
) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model.safetensors").write_text("weights")
    (tmp_path / "link").symlink_to("base")
    with pytest.raises(OutputError, match=r"are the same directory or one holds the other"):
        check_output(tmp_path / out, [tmp_path / given], 0, force=force)


@pytest.mark.parametrize("out", ["out", "base-merged", "new/out", "empty", "other/out"])
def test_good_outputs(tmp_path: Path, out: str) -> None:
    for name in ("base", "empty", "other"):
        (tmp_path / name).mkdir()
    before = snapshot(tmp_path)
    check_output(tmp_path / out, [tmp_path / "base"], 1, force=False)
    assert snapshot(tmp_path) == before


def test_an_output_that_holds_something_needs_force(old: Path) -> None:
    with pytest.raises(OutputError, match=r"exists and is not empty; .*replace it with --force"):
        check_output(old, [], 0, force=False)
    check_output(old, [], 0, force=True)


@pytest.mark.parametrize("force", [False, True])
def test_an_output_that_is_a_file(old: Path, force: bool) -> None:
    with pytest.raises(OutputError, match="exists and is a file; choose another --out"):
        check_output(old / "folder" / "file", [], 0, force=force)


@pytest.mark.parametrize(("nbytes", "fits"), [(10**9, True), (10**9 + 1, False)])
def test_room_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, fits: bool
) -> None:
    asked: list[Path] = []

    def usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(free=10**9 + SPARE_BYTES)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    if fits:
        check_output(tmp_path / "new" / "out", [], nbytes, force=False)
    else:
        with pytest.raises(OutputError, match=r"needs 1\.07 GB, the disk has 1\.07 GB free; free"):
            check_output(tmp_path / "new" / "out", [], nbytes, force=False)
    assert asked == [tmp_path.resolve()]
