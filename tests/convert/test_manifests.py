"""Names and shapes of public models, from their configs alone, against lists made elsewhere.

``tests/data/manifests/<layout>/<model>.json.gz`` holds name: [dtype, shape]. The Hugging Face
lists are of what transformers 5.12.1 saves for the public configs (the 31B's with its vision
tower; its number of tensors and bytes are those of the Hub), Tunix's are the state of Tunix 0.1.7's
models. Dtypes are left out: Tunix's depend on the run.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.jobs import hf_to_orbax, orbax_to_hf
from gemma_convert.convert.model import read_model
from gemma_convert.convert.registry import families
from gemma_convert.convert.tensor import Array, Box, Tensor

DATA = Path(__file__).parents[1] / "data" / "manifests"
MODELS = {
    "gemma-3-270m": ("gemma3", "model."),
    "gemma-3-1b": ("gemma3", "model."),
    "gemma-4-31B": ("gemma4", "model.language_model."),
}
"""Public model to its family and to what stands before its text parameters on the Hub."""

Shapes = dict[str, tuple[int, ...]]


class Header(Tensor):
    """A tensor of which only the header exists."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.dtype = np.dtype(ml_dtypes.bfloat16)

    def read(self, box: Box) -> Array:
        raise AssertionError("planning must not read values")


@cache
def manifest(layout: str, name: str) -> Shapes:
    """Name to shape of every tensor of a public model."""
    table = json.loads(gzip.decompress((DATA / layout / f"{name}.json.gz").read_bytes()))
    return {tensor: tuple(shape) for tensor, (_, shape) in table.items()}


def headers(shapes: Shapes, **fields: Any) -> Checkpoint:
    """A checkpoint of headers."""
    return Checkpoint({name: Header(shape) for name, shape in shapes.items()}, **fields)


def shapes_of(checkpoint: Checkpoint) -> Shapes:
    """Name to shape."""
    return {name: tensor.shape for name, tensor in checkpoint.items()}


def config(name: str) -> dict[str, Any]:
    """config.json of a public model, as far as dimensions go; nested as on the Hub."""
    family, prefix = families()[MODELS[name][0]], MODELS[name][1]
    plain, nested = family.model_types
    text = {"model_type": plain, **family.models[name.lower()]}
    return text if prefix == "model." else {"model_type": nested, "text_config": text}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", ["hf", "tunix"])
def test_parameters_are_those_of_the_public_model(layout: str, name: str) -> None:
    """Every text tensor, no other, each of the right shape."""
    prefix = MODELS[name][1] if layout == "hf" else ""
    made = {
        prefix + short: parameter.row.cells[layout].pattern.shape(parameter.sizes)
        for parameter in read_model(config(name), families()).parameters()
        for short, _ in parameter.parts(layout)
    }
    listed = manifest(layout, name)
    assert made == {n: shape for n, shape in listed.items() if n.startswith(prefix)}


@pytest.mark.parametrize("name", MODELS)
def test_hf_to_tunix_is_planned_from_headers(name: str) -> None:
    """What is made is Tunix's list; what is left out is what is not text."""
    source, prefix = manifest("hf", name), MODELS[name][1]
    target = hf_to_orbax(headers(source, config=config(name))).plan.target
    assert shapes_of(target) == manifest("tunix", name)
    assert set(target.dropped) == {n for n in source if not n.startswith(prefix)}


@pytest.mark.parametrize("name", MODELS)
def test_tunix_to_hf_is_planned_from_headers(name: str) -> None:
    """What is made is the Hub's list, towers included, in the base's order."""
    base = headers(manifest("hf", name), config=config(name))
    target = orbax_to_hf(headers(manifest("tunix", name)), base).plan.target
    assert list(shapes_of(target).items()) == list(manifest("hf", name).items())


@pytest.mark.parametrize("name", MODELS)
def test_a_config_of_its_own_suffices_for_the_names(name: str) -> None:
    """Without a base's weights the text is spelled as the Hub does for such a config."""
    base = headers({}, config=config(name))
    target = orbax_to_hf(headers(manifest("tunix", name)), base).plan.target
    listed, prefix = manifest("hf", name), MODELS[name][1]
    assert shapes_of(target) == {n: s for n, s in listed.items() if n.startswith(prefix)}


def test_the_lists_are_complete() -> None:
    """Tensors and bytes (bfloat16) of the 31B are the public numbers."""
    listed = manifest("hf", "gemma-4-31B")
    nbytes = 2 * sum(int(np.prod(shape)) for shape in listed.values())
    assert (len(listed), nbytes) == (1188, 62_546_177_752)


@pytest.mark.parametrize("name", MODELS)
def test_the_public_name_is_recognised(name: str) -> None:
    assert read_model(config(name), families()).name == name.lower()
    other = read_model({**families()["gemma3"].defaults, "model_type": "gemma3"}, families())
    assert other.name is None
