"""Names and shapes of the towers of public models, from their configs alone, against other lists.

``tests/data/manifests/towers/<layout>/<model>.json.gz`` holds name: [dtype, shape] of the states of
Tunix 0.1.7 (Gemma 3) and of git c7d8950 (Gemma 4), of DeepMind's nested trees (git 7691fd4), and of
what MaxText's mapping (git e591f30) makes of the Hub's tensors. Hugging Face's lists are those of
test_manifests.
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
from gemma_convert.convert.jobs import convert
from gemma_convert.convert.layouts import HF, LAYOUTS
from gemma_convert.convert.registry import families
from gemma_convert.convert.tensor import Array, Box, Tensor

DATA = Path(__file__).parents[1] / "data" / "manifests"
LISTS = sorted(
    (path.parent.name, path.name.removesuffix(".json.gz"))
    for path in (DATA / "towers").glob("*/*.json.gz")
)
GEMMA4 = [name for layout, name in LISTS if layout == "tunix-head"]
TEXT = ("language_model.", "model.language_model.")

Shapes = dict[str, tuple[int, ...]]


class Header(Tensor):
    """A tensor of which only the header exists; clip bounds and rows that are dropped are read."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.dtype = np.dtype(ml_dtypes.bfloat16)

    def read(self, box: Box) -> Array:
        assert not self.shape or box[0] == (262144, 262208), "planning must not read values"
        return np.zeros([stop - start for start, stop in box], self.dtype)


@cache
def manifest(place: str, name: str) -> Shapes:
    """Name to shape of a list."""
    table = json.loads(gzip.decompress((DATA / place / f"{name}.json.gz").read_bytes()))
    return {tensor: tuple(shape) for tensor, (_, shape) in table.items()}


def config(name: str) -> dict[str, Any]:
    """The whole config.json of a public model."""
    return next(f for f in families().values() if name.lower() in f.models).config(name.lower())


def headers(shapes: Shapes, **fields: Any) -> Checkpoint:
    """A checkpoint of headers."""
    return Checkpoint({name: Header(shape) for name, shape in shapes.items()}, **fields)


def towers(layout: str, name: str) -> Shapes:
    """A list of towers, names with the prefix that is written."""
    ours = "" if layout == "maxtext" else LAYOUTS[layout].default_prefix
    return {ours + n: shape for n, shape in manifest(f"towers/{layout}", name).items()}


def tree(layout: str, name: str) -> Checkpoint:
    """A whole JAX checkpoint: the text that is made of the Hub's, and the towers of the list."""
    source = headers(manifest("hf", name), config=config(name))
    text = convert(source, LAYOUTS[layout]).plan.target
    listed = towers(layout, name)
    shapes = {n: t.shape for n, t in text.items() if n not in listed} | listed
    return headers(shapes, source="tree", format="orbax")


@pytest.mark.parametrize(("layout", "name"), LISTS)
def test_from_hf(layout: str, name: str) -> None:
    """Every tensor of the towers, no other, each of the right shape."""
    source = headers(manifest("hf", name), config=config(name))
    target = convert(source, LAYOUTS[layout]).plan.target
    words = ("vision", "audio", "mm_")
    made = {n: t.shape for n, t in target.items() if any(word in n for word in words)}
    assert made == towers(layout, name)
    dropped = {n for n in source if ".v_proj." in n or ".up_proj." in n}
    assert set(target.dropped) <= {n for n in dropped if n.endswith(("_min", "_max"))}


@pytest.mark.parametrize(("layout", "name"), LISTS)
def test_to_hf_by_the_public_name_alone(layout: str, name: str) -> None:
    """The Hub's list, whole, of a tree without any config."""
    target = convert(tree(layout, name), HF, model=name).plan.target
    listed = manifest("hf", name)
    made = {n: t.shape for n, t in target.items()}
    assert {n: s for n, s in made.items() if not n.startswith(TEXT)} == {
        n: s for n, s in listed.items() if not n.startswith(TEXT)
    }
    assert made == listed


@pytest.mark.parametrize("name", GEMMA4)
def test_between_the_jax_layouts_by_the_public_name_alone(name: str) -> None:
    there = convert(tree("tunix-head", name), LAYOUTS["deepmind"], model=name).plan.target
    assert towers("deepmind", name).items() <= {n: t.shape for n, t in there.items()}.items()
    shapes = {n: t.shape for n, t in there.items()}
    back = convert(headers(shapes, source="tree"), LAYOUTS["tunix-head"], model=name).plan.target
    assert towers("tunix-head", name).items() <= {n: t.shape for n, t in back.items()}.items()


def test_there_is_a_list_of_every_tower() -> None:
    assert len(LISTS) == 12
    parts = {tower.part for family in families().values() for tower in family.towers}
    assert parts == {"vision", "audio"}
    assert any("audio_encoder" in name for name in manifest("towers/deepmind", "gemma-4-E2B"))
