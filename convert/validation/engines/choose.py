"""Which engine runs what a user names: told by what lies there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers import open_base, open_checkpoint
from gemma_convert.convert.readers.side_files import side_files
from gemma_convert.convert.validation.engines.base import About, Source
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
    if name.startswith(("http://", "https://")):
        return connect(name, options.api_key, options.dtype or "bfloat16")
    path = Path(name)
    checkpoint = open_checkpoint(path, options.step)
    if "adapter_config" in checkpoint.metadata:
        base = _base(name, options)
        about = _about(str(path), "peft", open_base(base), options, base)
        return HuggingFace(replace(about, adapted=True), base, path, options.low_memory)
    if checkpoint.format == "safetensors" and checkpoint.config:
        about = _about(str(path), "transformers", checkpoint, options, path)
        return HuggingFace(about, path, low_memory=options.low_memory)
    directory = _base(name, options)
    base_model = open_base(directory)
    adapted = any("_lora_" in key for key in checkpoint)
    has_weights = any("_lora_" not in key for key in checkpoint)
    weights = checkpoint if has_weights else base_model
    if options.dtype not in (None, "float32"):
        raise InputError(f"{name}: Tunix's model runs in float32 here", "leave its dtype out")
    about = _about(str(path), "tunix", weights, options, directory)
    return Tunix(replace(about, adapted=adapted), checkpoint, base_model, options.alpha)


def _base(name: str, options: Options) -> Path:
    if options.base is None:
        raise InputError(
            f"{name}: no config.json", "give the base model's Hugging Face directory with --base"
        )
    return options.base


def _about(name: str, kind: str, weights: Checkpoint, options: Options, directory: Path) -> About:
    has_tokenizer = any("tokenizer" in file for file in side_files(directory))
    return About(
        name,
        kind,
        dtype=options.dtype or "float32",
        stored=main_dtype(weights),
        tokenizer=directory if has_tokenizer else None,
    )
