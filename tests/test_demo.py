"""The demo is the main job, and its own check of the result can fail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from gemma_convert.convert.demo import PREFIX, check_merge
from tests.checkpoints import read_hf, run_cli


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo") / "new" / "demo"
    assert run_cli("demo", "--out", directory) == 0
    return directory


def test_it_shows_the_commands_and_checks_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run_cli("demo", "--out", out) == 0
    text = capsys.readouterr().out
    for command in ("inspect", "orbax-to-hf", "hf-to-orbax"):
        assert f"$ python -m gemma_convert {command} {out}" in text
    assert "checked: 223,440 of 223,440 merged weights" in text
    assert "42 found, 42 applied, 42 changed" in text
    assert "hf, as it was" in text  # the weights are the base's
    assert "hf to tunix" in text
    assert sorted(path.name for path in out.iterdir()) == ["back", "base", "merged", "run"]
    assert len(list((out / "base").glob("model-*.safetensors"))) > 2


def test_its_check_covers_every_merged_weight(demo: Path) -> None:
    base, merged = read_hf(demo / "base"), read_hf(demo / "merged")
    changed = [name for name in merged if merged[name].tobytes() != base[name].tobytes()]
    assert sum(merged[name].size for name in changed) == check_merge(demo)[1]


def test_its_check_can_fail(demo: Path) -> None:
    """One weight one step off in a file of its own, whose index is taken away."""
    name = f"{PREFIX}layers.6.self_attn.k_proj.weight"
    merged = read_hf(demo / "merged")
    assert check_merge(demo)[0] == 0
    merged[name][1, 2] = np.nextafter(merged[name][1, 2], merged[name].dtype.type(9))
    for path in (demo / "merged").glob("model*"):
        path.unlink()
    save_file(merged, demo / "merged" / "model.safetensors")
    assert check_merge(demo)[0] == 1


def test_a_failed_check_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gemma_convert.convert.demo.check_merge", lambda directory: (3, 100))
    assert run_cli("demo", "--out", tmp_path / "out") == 1
    captured = capsys.readouterr()
    assert "checked: 97 of 100 merged weights" in captured.out
    assert captured.err == "error: 3 merged weights are wrong; please report this\n"


def test_a_folder_in_use_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    assert run_cli("demo", "--out", tmp_path) == 1
    assert capsys.readouterr().err == f"error: {tmp_path} is not empty; choose another --out\n"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
