"""Outputs appear whole or not at all, and never at the cost of something that was there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gemma_convert.convert.errors import OutputError
from gemma_convert.convert.writers.directory import SPARE_BYTES, check_output, fresh_directory
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


def test_the_name_appears_when_all_is_written(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    with fresh_directory(out) as directory:
        (directory / "folder").mkdir()
        (directory / "folder" / "file").write_text("new")
        assert directory.parent == out.parent
        assert not out.exists()
    assert snapshot(tmp_path) == {
        "new": None,
        "new/out": None,
        "new/out/folder": None,
        "new/out/folder/file": b"new",
    }


def break_in_the_middle(directory: Path, error: type[BaseException]) -> None:
    (directory / "file").write_text("half")
    raise error


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_error_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), fresh_directory(tmp_path / "out") as directory:
        break_in_the_middle(directory, error)
    assert snapshot(tmp_path) == {}


def test_an_old_output_is_replaced_as_a_whole(old: Path) -> None:
    with fresh_directory(old, force=True) as directory:
        (directory / "file").write_text("new")
        assert (old / "folder" / "file").read_text() == "old"
    assert snapshot(old.parent) == {"out": None, "out/file": b"new"}


def test_an_error_keeps_the_old_output(old: Path) -> None:
    before = snapshot(old.parent)
    with pytest.raises(RuntimeError), fresh_directory(old, force=True) as directory:
        break_in_the_middle(directory, RuntimeError)
    assert snapshot(old.parent) == before


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failing_rename_keeps_the_old_output(
    old: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    before, rename, calls = snapshot(old.parent), Path.rename, iter(range(1, 9))

    def broken(self: Path, target: Path) -> Path:
        if next(calls) == failing:
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", broken)
    with pytest.raises(OSError, match="no"), fresh_directory(old, force=True) as directory:
        (directory / "file").write_text("new")
    assert snapshot(old.parent) == before


def test_a_link_is_replaced_and_what_it_points_to_is_kept(old: Path) -> None:
    link = old.parent / "link"
    link.symlink_to(old)
    with fresh_directory(link, force=True) as directory:
        (directory / "file").write_text("new")
    assert not link.is_symlink()
    assert (link / "file").read_text() == "new"
    assert (old / "folder" / "file").read_text() == "old"


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_modes_follow_the_umask(tmp_path: Path, mask: int) -> None:
    os.umask(mask)
    with fresh_directory(tmp_path / "out") as directory:
        (directory / "file").write_text("new")
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~mask
    assert (tmp_path / "out" / "file").stat().st_mode & 0o777 == 0o666 & ~mask
    assert os.umask(mask) == mask
