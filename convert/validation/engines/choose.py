"""Which engine runs what a user names: told by what lies there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers import open_base, open_checkpoint
from gemma_convert.convert.readers.remote import remote_path
from gemma_convert.convert.validation.engines.base import About, Source
from gemma_convert.convert.validation.engines.http import same_server
from gemma_convert.convert.validation.engines.hugging_face import HuggingFace
from gemma_convert.convert.validation.engines.server import connect
from gemma_convert.convert.validation.engines.tunix import Tunix
from gemma_convert.convert.writers.hf import main_dtype


@dataclass(frozen=True)
class Options:
    """What a user may say of an engine.

    Attributes:
        base: HF directory of what has no config, tokenizer or weights of its own.
        alpha: LoRA alpha, where the checkpoint does not say it.
        dtype: In which to compute, or in which a server does.
        step: Of an Orbax root.
        api_key: Of a server.
        low_memory: Whether transformers reads the layers from the disk as it runs them.
    """

    base: Path | None = None
    alpha: float | None = None
    dtype: str | None = None
    step: int | None = None
    api_key: str | None = None
    low_memory: bool = False


def choose(name: str, options: Options) -> Source:
    """The engine for ``name``: a path or the address of a server.

    Raises:
        InputError: If nothing is there that can run.
    """
    if is_address(name):
        return connect(name, options.api_key, options.dtype or "bfloat16")
    path = Path(name)
    checkpoint = open_checkpoint(path, options.step)
    if "adapter_config" in checkpoint.metadata:
        base = _base(name, options)
        opened = open_base(base)
        about = _about(str(path), "peft", opened, options, opened)
        adapted_by = replace(about, adapted=True)
        if options.low_memory:  # PEFT renames tensors in the very files that layers are read from
            raise InputError(
                f"{path}: --low-memory does not go with an adapter: PEFT would rewrite the base's "
                "files",
                "merge it first (surgery merge-lora), or leave --low-memory out",
            )
        return HuggingFace(adapted_by, _local(base), _local(path))
    if checkpoint.format == "safetensors" and checkpoint.config:
        about = _about(str(path), "transformers", checkpoint, options, checkpoint)
        return HuggingFace(about, _local(path), low_memory=options.low_memory)
    base_model = open_base(_base(name, options))
    adapted = any("_lora_" in key for key in checkpoint)
    has_weights = any("_lora_" not in key for key in checkpoint)
    weights = checkpoint if has_weights else base_model
    if options.dtype not in (None, "float32"):
        raise InputError(f"{name}: Tunix's model runs in float32 here", "leave its dtype out")
    about = _about(str(path), "tunix", weights, options, base_model)
    return Tunix(replace(about, adapted=adapted), checkpoint, base_model, options.alpha)


def key_of_second(first: str, second: str, key: str | None, own: str | None) -> str | None:
    """The API key for ``second``: that of ``first`` if it is no other server, or ``own``.

    Args:
        first: Path or address.
        second: Path or address.
        key: Of the first of them that is a server.
        own: Of the second.

    Raises:
        InputError: If one is no address.
    """
    try:
        other = is_address(first) and is_address(second) and not same_server(first, second)
    except ValueError as error:
        raise InputError(f"{first} and {second}: {error}", "give addresses of servers") from error
    return own or (None if other else key)


def is_address(name: str) -> bool:
    """Whether ``name`` is the address of a server."""
    return name.startswith(("http://", "https://"))


def _base(name: str, options: Options) -> Path:
    if options.base is None:
        raise InputError(
            f"{name}: no config.json", "give the base model's Hugging Face directory with --base"
        )
    return options.base


def _local(path: Path) -> Path:
    """``path``, if it is a directory of this machine, as transformers wants it."""
    if remote_path(path) is not None:
        raise InputError(
            f"{path}: transformers runs what lies on a local disk", "download it and give that path"
        )
    return path


def _about(
    name: str, kind: str, weights: Checkpoint, options: Options, reference: Checkpoint
) -> About:
    """What to say of an engine whose tokenizer lies beside ``reference``."""
    return About(
        name,
        kind,
        dtype=options.dtype or "float32",
        stored=main_dtype(weights),
        tokenizer=tokenizer_directory(reference),
        vocabulary=_vocabulary(reference),
    )


def _vocabulary(reference: Checkpoint) -> int | None:
    """Rows of the embedding of a Hugging Face directory."""
    found = (t.shape for name, t in reference.items() if name.endswith("embed_tokens.weight"))
    return next((shape[0] for shape in found if shape), None)


def tokenizer_directory(checkpoint: Checkpoint) -> Path | None:
    """Where the tokenizer lies that travels along with ``checkpoint``."""
    files = checkpoint.files.items()
    return next((path.parent for name, path in files if "tokenizer" in name), None)
