"""What lies at a path, told from headers alone: format, layout, model, adapters, disagreements."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from gemma_convert.convert import dtypes
from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import AdapterError, ConfigError, InputError
from gemma_convert.convert.fit import disagreements
from gemma_convert.convert.infer import guess, weight_shape
from gemma_convert.convert.inspect_towers import towers
from gemma_convert.convert.layouts import Spelling
from gemma_convert.convert.model import Model, read_model, text_config
from gemma_convert.convert.registry import explain, families, recognise
from gemma_convert.surgery.adapters.adapter import Adapter, Pair
from gemma_convert.surgery.adapters.describe import (
    alpha_differs,
    describe,
    describe_pairs,
    module_of,
    read,
)
from gemma_convert.surgery.adapters.norms import relative_norms
from gemma_convert.surgery.adapters.qwix import split_factors, stored_alpha
from gemma_convert.surgery.quantised import Dequantised
from gemma_convert.surgery.trained_on import stored_scheme


def inspect(
    checkpoint: Checkpoint, base: Checkpoint | None = None, alpha: float | None = None
) -> dict[str, Any]:
    """Describe ``checkpoint`` as plain data, ready for JSON.

    Args:
        checkpoint: Only its headers are looked at, unless there is a base.
        base: The base of the adapter in ``checkpoint``: deltas are compared with its weights.
        alpha: LoRA alpha, where the checkpoint does not say it.
    """
    weights, pairs, problems = _factors(checkpoint)
    factors = {name: pair.b for name, pair in pairs.items()}
    evidence = explain(weights or factors)
    if not evidence and factors:  # a training state's step beside the factors
        weights = weights.replace(tensors={})
        evidence = explain(factors)
    report: dict[str, Any] = {
        "path": checkpoint.source,
        "format": checkpoint.format,
        "tensors": len(checkpoint),
        "parameters": sum(tensor.size for tensor in checkpoint.values()),
        "bytes": checkpoint.nbytes,
        "dtypes": _by_dtype(checkpoint),
        "layout": None,
        "model": None,
        "towers": [],
        "quantised": _quantised(weights),
        "adapter": None,
        "steps": _steps(checkpoint),
        "side_files": sorted(checkpoint.files),
        "disagreements": problems,
        "notes": list(checkpoint.notes),
        "not_read": dict(checkpoint.dropped),
    }
    if evidence:
        best = evidence[0]
        report["layout"] = {
            "name": best.spelling.layout.name,
            "prefix": best.spelling.prefix,
            "evidence": str(best),
        }
        report["model"] = _model(checkpoint, weights, pairs, best.spelling, problems)
        report["towers"] = towers(weights, best.spelling, problems) if weights else []
    if pairs or "adapter_config" in checkpoint.metadata:
        report["adapter"] = _adapter(checkpoint, pairs, problems, base, alpha)
    return report


def tensor_list(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Name, dtype and shape of every tensor."""
    return [
        {"name": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape)}
        for name, tensor in checkpoint.items()
    ]


def _factors(checkpoint: Checkpoint) -> tuple[Checkpoint, dict[str, Pair], list[str]]:
    try:
        weights, pairs = split_factors(checkpoint)
    except (AdapterError, InputError) as error:
        return checkpoint, {}, [str(error)]
    return weights, pairs, []


def _quantised(weights: Checkpoint) -> list[dict[str, Any]]:
    """The schemes by which weights are stored as codes, with the modules that have each."""
    modules: dict[tuple[str, str, int | None], Counter[str]] = {}
    for name, tensor in weights.items():
        if isinstance(tensor, Dequantised):
            scheme = (str(tensor.codes.dtype), str(tensor.scale.dtype), tensor.tile)
            modules.setdefault(scheme, Counter())[module_of(name)] += 1
    return [
        {"codes": codes, "scales": scales, "tile": tile, "modules": dict(counted)}
        for (codes, scales, tile), counted in modules.items()
    ]


def _by_dtype(checkpoint: Checkpoint) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for tensor in checkpoint.values():
        counted[str(tensor.dtype)] += tensor.size
    return dict(counted.most_common())


def _steps(checkpoint: Checkpoint) -> dict[str, Any] | None:
    if checkpoint.format != "orbax":
        return None
    return {key: checkpoint.metadata.get(key) for key in ("step", "steps", "item", "items")}


def _model(
    checkpoint: Checkpoint,
    weights: Checkpoint,
    pairs: dict[str, Pair],
    spelling: Spelling,
    problems: list[str],
) -> dict[str, Any] | None:
    if not checkpoint.config:
        return _guessed(recognise(weights)[0] if weights else weights, pairs, spelling)
    try:
        model = read_model(checkpoint.config, families())
    except ConfigError as error:
        problems.append(str(error))
        return None
    text = {n: t for n, t in weights.items() if n.startswith(spelling.prefix)}
    problems += disagreements(checkpoint.replace(tensors=text), model, spelling)
    problems += _dtype_disagreement(checkpoint)
    return {
        "family": model.family.name,
        "name": model.name,
        "layers": len(model.layers),
        "sizes": _sizes(model),
        "rope": {kind: asdict(rope) for kind, rope in model.rope.items()},
        "evidence": f"config.json: model_type {checkpoint.config.get('model_type')}",
    }


def _guessed(
    weights: Checkpoint, pairs: dict[str, Pair], spelling: Spelling
) -> dict[str, Any] | None:
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    for name, pair in pairs.items():
        shape = weight_shape(name, pair.a.shape, pair.b.shape, spelling, families())
        if shape is not None:
            shapes.setdefault(name, shape)
    if not shapes:
        return None  # factors alone, whose shapes tell no weight's
    found = guess(shapes, spelling, families())
    return {
        "family": " or ".join(found.families),
        "name": " or ".join(found.models) or None,
        "layers": found.layers,
        "sizes": {axis: list(values) for axis, values in found.sizes.items()},
        "evidence": f"a guess from names and shapes ({len(shapes)} parameters)",
    }


def _sizes(model: Model) -> dict[str, list[int]]:
    sizes: dict[str, set[int]] = {axis: {size} for axis, size in model.common.sizes.items()}
    for layer in model.layers:
        for axis, size in layer.sizes.items():
            sizes.setdefault(axis, set()).add(size)
    return {axis: sorted(values) for axis, values in sizes.items()}


def _dtype_disagreement(checkpoint: Checkpoint) -> list[str]:
    config = text_config(checkpoint.config)
    stated = config.get("dtype", config.get("torch_dtype"))
    found = {str(t.dtype) for t in checkpoint.values() if dtypes.is_float(t.dtype)}
    if isinstance(stated, str) and found and stated not in found:
        return [f"config.json says dtype {stated}, the tensors are {', '.join(sorted(found))}"]
    return []


def _alpha(checkpoint: Checkpoint) -> float | None:
    if "adapter_config" in checkpoint.metadata:
        value: float | None = checkpoint.metadata["adapter_config"].get("lora_alpha")
        return value
    try:
        return stored_alpha(checkpoint.metadata)
    except AdapterError:
        return None  # told already


def _adapter(
    checkpoint: Checkpoint,
    pairs: dict[str, Pair],
    problems: list[str],
    base: Checkpoint | None,
    alpha: float | None,
) -> dict[str, Any]:
    adapter = read(checkpoint, pairs, alpha, problems)
    told = {
        "alpha": _alpha(checkpoint),
        "alpha_differs": alpha_differs(checkpoint),
        "base_quantization": _base_quantization(checkpoint, problems),
    }
    if adapter is None:
        config = checkpoint.metadata.get("adapter_config", {})
        kind = "Qwix LoRA" if pairs else f"PEFT {config.get('peft_type', '?')}"
        return {**describe_pairs(kind, pairs), **told}
    report = {**describe(adapter), **told}
    if base is not None:
        report["relative_norm_by_module"] = _norms(adapter, base)
    return report


def _base_quantization(checkpoint: Checkpoint, problems: list[str]) -> str | None:
    """How training quantised the base, if the checkpoint's metadata says it."""
    try:
        scheme = stored_scheme(checkpoint.metadata)
    except AdapterError as error:
        problems.append(str(error))
        return None
    return str(scheme) if scheme is not None else None


def _norms(adapter: Adapter, base: Checkpoint) -> dict[str, float]:
    """Norm of each delta relative to its weight."""
    if not base.config:
        raise InputError(f"{base.source}: no config.json", "give a Hugging Face directory")
    named, spelling = recognise(base)
    return relative_norms(adapter, read_model(base.config, families()), named, spelling)
