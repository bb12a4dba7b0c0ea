"""Telling the format of what lies at a path."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers import open_checkpoint
from tests.orbax_files import SAMPLES, TREES, copy


def test_detects_safetensors(tmp_path: Path) -> None:
    save_file({"w": np.arange(3.0)}, tmp_path / "model.safetensors")
    for path in (tmp_path, str(tmp_path), tmp_path / "model.safetensors"):
        assert open_checkpoint(path).format == "safetensors"
        with pytest.raises(InputError, match="is safetensors, it has no step 3; leave the step"):
            open_checkpoint(path, step=3)


@pytest.mark.parametrize("sample", ["full_base", "full_base/10", *TREES])
def test_detects_orbax(sample: str) -> None:
    assert open_checkpoint(SAMPLES / sample).format == "orbax"


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere does not exist; check the path; a Hub id is"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(InputError, match="is an empty directory; give the directory with the"):
        open_checkpoint(tmp_path)
    with pytest.raises(InputError, match="s3://bucket/x: paths of s3:// are not read"):
        open_checkpoint("s3://bucket/x")


def test_files_of_other_kinds(tmp_path: Path) -> None:
    pointer = tmp_path / "weights"
    pointer.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(InputError, match=r"is a Git LFS pointer, .* run `git lfs pull`"):
        open_checkpoint(pointer)
    (tmp_path / "x.gguf").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(InputError, match="is a GGUF file; GGUF holds quantised weights under"):
        open_checkpoint(tmp_path / "x.gguf")
    with pytest.raises(InputError, match=r"no safetensors, only x\.gguf; GGUF holds"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.pt").write_bytes(b"cos\nsystem\n")
    with pytest.raises(InputError, match=r"is not a safetensors file; .* nothing is unpickled"):
        open_checkpoint(tmp_path / "model.pt")


def test_checkpoint_one_level_down(tmp_path: Path) -> None:
    copy("full_base", tmp_path / "run" / "orbax")
    with pytest.raises(InputError, match=f"not a checkpoint itself; give {tmp_path}/run/orbax$"):
        open_checkpoint(tmp_path / "run")
    (tmp_path / "run" / "hf").mkdir()
    save_file({"w": np.arange(3.0)}, tmp_path / "run" / "hf" / "model.safetensors")
    with pytest.raises(InputError, match=r"give .*/run/hf or .*/run/orbax$"):
        open_checkpoint(tmp_path / "run")


def test_directory_of_something_else(tmp_path: Path) -> None:
    for i in range(7):
        (tmp_path / f"{i}.txt").write_text("x")
    with pytest.raises(
        InputError,
        match=r"holds neither safetensors nor an Orbax checkpoint, but 0\.txt, 1\.txt, 2\.txt, "
        r"3\.txt, 4\.txt and 2 more; give the directory",
    ):
        open_checkpoint(tmp_path)
