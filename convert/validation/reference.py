"""Which engine runs what a conversion was made of, factors applied and not merged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import InputError
from gemma_convert.convert.job import Job
from gemma_convert.convert.layouts import HF
from gemma_convert.convert.readers import open_checkpoint
from gemma_convert.convert.validation.engines.base import About, Source
from gemma_convert.convert.validation.engines.choose import Options, choose, tokenizer_directory
from gemma_convert.convert.validation.engines.tunix import Tunix
from gemma_convert.convert.writers.hf import main_dtype
from gemma_convert.surgery.adapters.open import adapter_source
from gemma_convert.surgery.delta import Merged

_COMPARE = "leave logits out, or compare the output by `gemma-convert validate logits`"


def reference(
    job: Job,
    source: Path,
    options: Options,
    adapters: Sequence[Path] = (),
    *,
    requantised: bool = False,
) -> Source:
    """The engine that says what the output of ``job`` must predict.

    Args:
        job: What makes the output.
        source: The checkpoint that is converted, as the user named it.
        options: How to open it.
        adapters: Those that are merged as well.
        requantised: Whether the base is another than lies there, quantised as training had it.

    Raises:
        InputError: If no engine runs that.
    """
    if not adapters and not requantised:
        return choose(str(source), options)
    if len(job.adapters) != 1 or job.adapters[0].weight != 1:
        raise InputError(
            f"no engine applies {len(job.adapters)} adapters, or one with a weight", _COMPARE
        )
    opened = open_checkpoint(source, options.step)
    if not requantised and opened.format == "safetensors":
        own = Options(base=source, alpha=options.alpha)
        return choose(str(adapters[0]), own)
    if job.layout is not HF or job.adapters[0].kind != "Qwix LoRA":
        what = "a quantised base" if requantised else "an Orbax checkpoint"
        raise InputError(f"no engine applies a {job.adapters[0].kind} to {what} here", _COMPARE)
    factors = open_checkpoint(adapters[0]) if adapters else opened
    return _tunix(job, factors, options)


def _tunix(job: Job, factors: Checkpoint, options: Options) -> Source:
    """Tunix's model of the weights that ``job`` merges onto, with Qwix's factors."""
    target = job.plan.target
    weights = {n: t.weight if isinstance(t, Merged) else t for n, t in target.items()}
    source = target.source or job.plan.sources[0].source
    base = target.replace(tensors=weights, dropped={}, source=source)
    about = About(
        name=factors.source,
        kind="tunix",
        dtype="float32",
        stored=main_dtype(weights),
        adapted=True,
        tokenizer=tokenizer_directory(target),
    )
    return Tunix(about, adapter_source(factors).checkpoint, base, options.alpha)
