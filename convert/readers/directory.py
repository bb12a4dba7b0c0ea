"""Open whatever lies at a path: the format is told by the files there, never by the path's name."""

from __future__ import annotations

from pathlib import Path

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers.jsonfile import LFS_POINTER, refuse_lfs_pointer
from gemma_convert.convert.readers.orbax import open_orbax
from gemma_convert.convert.readers.orbax_steps import TEMPORARY, is_orbax
from gemma_convert.convert.readers.regular_file import open_regular
from gemma_convert.convert.readers.remote import open_remote
from gemma_convert.convert.readers.safetensors import open_safetensors
from gemma_convert.convert.readers.side_files import WEIGHT_SUFFIXES

_GGUF = (
    "GGUF holds quantised weights under names of its own: give the model that it was made from, "
    "or load it with transformers' from_pretrained(DIR, gguf_file=...) and save that"
)


def open_checkpoint(path: str | Path, step: int | None = None) -> Checkpoint:
    """Open a safetensors file, a Hugging Face or PEFT directory, or an Orbax checkpoint.

    Args:
        path: A local file or directory, or what `remote_path` takes for a remote one.
        step: For an Orbax root, the step wanted; by default the newest finished one.

    Raises:
        InputError: Nothing there that can be read; the message says what to give instead.
    """
    if (remote := open_remote(path, step)) is not None:
        return remote
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path} does not exist", "check the path; a Hub id is ORG/NAME")
    if not path.is_dir():
        return _open_file(path, step)
    names = sorted(child.name for child in path.iterdir())
    if not names:
        raise InputError(f"{path} is an empty directory", "give the directory with the weights")
    if _holds_safetensors(names):
        _refuse_step(path, step)
        return open_safetensors(path)
    if TEMPORARY in path.name or is_orbax(path) or any(TEMPORARY in name for name in names):
        return open_orbax(path, step)
    gguf = next((name for name in names if name.endswith(".gguf")), None)
    if gguf:
        raise InputError(f"{path} holds no safetensors, only {gguf}", _GGUF)
    inner = [child for child in sorted(path.iterdir()) if _is_checkpoint(child)]
    if inner:
        raise InputError(
            f"{path} is not a checkpoint itself", f"give {' or '.join(map(str, inner))}"
        )
    if any(name.endswith(WEIGHT_SUFFIXES) for name in names):
        return open_safetensors(path)
    raise InputError(
        f"{path} holds neither safetensors nor an Orbax checkpoint, but {_some(names)}",
        "give the directory with the weights",
    )


def open_headers(path: str | Path, step: int | None = None) -> Checkpoint:
    """Open a checkpoint whose tensors will not be read: of a remote model only headers are fetched.

    Raises:
        InputError: See `open_checkpoint`.
    """
    remote = open_remote(path, step, headers_only=True)
    return open_checkpoint(path, step) if remote is None else remote


def _open_file(path: Path, step: int | None) -> Checkpoint:
    with open_regular(path) as file:
        start = file.read(len(LFS_POINTER))
    refuse_lfs_pointer(start, str(path))
    if path.suffix == ".gguf" or start.startswith(b"GGUF"):
        raise InputError(f"{path} is a GGUF file", _GGUF)
    if path.suffix != ".safetensors":
        raise InputError(
            f"{path} is not a safetensors file",
            "give a .safetensors file, or the directory of the checkpoint; nothing is unpickled",
        )
    _refuse_step(path, step)
    return open_safetensors(path)


def _refuse_step(path: Path, step: int | None) -> None:
    if step is not None:
        raise InputError(f"{path} is safetensors, it has no step {step}", "leave the step out")


def _holds_safetensors(names: list[str]) -> bool:
    return any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names)


def _is_checkpoint(path: Path) -> bool:
    if not path.is_dir():
        return False
    return is_orbax(path) or _holds_safetensors([child.name for child in path.iterdir()])


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
