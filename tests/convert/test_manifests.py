"""Names and shapes of public models, from their configs alone, against lists made elsewhere.

``tests/data/manifests/<layout>/<model>.json.gz`` holds name: [dtype, shape]. The Hugging Face
lists are of what transformers 5.12.1 saves for the public configs, spelled as on the Hub, towers
included; Tunix's are the states of Tunix 0.1.7's models, DeepMind's the nested trees of its
library (gemma, git 7691fd4) and MaxText's what its mappings to Hugging Face make (git e591f30),
text alone. Dtypes are left out: those of the JAX trees depend on the run.
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
from gemma_convert.convert.errors import ConfigError, LayoutError
from gemma_convert.convert.jobs import convert
from gemma_convert.convert.layouts import HF, LAYOUTS, Spelling
from gemma_convert.convert.model import read_model
from gemma_convert.convert.registry import families, named_model
from gemma_convert.convert.stack import stacked
from gemma_convert.convert.tensor import Array, Box, Tensor
from gemma_convert.convert.vocabulary import vocabulary

DATA = Path(__file__).parents[1] / "data" / "manifests"
NESTED = {
    "gemma-3-4b": "language_model.model.",
    "gemma-3-27b": "language_model.model.",
    "gemma-4-31B": "model.language_model.",
    "gemma-4-26B-A4B": "model.language_model.",
    "gemma-4-E2B": "model.language_model.",
}
"""What stands before the text parameters on the Hub, where it is not ``model.``."""

LISTS = sorted((p.parent.name, p.name.removesuffix(".json.gz")) for p in DATA.glob("*/*.json.gz"))
WRONG = ("tunix", "gemma-2-9b")
"""Tunix 0.1.7 says 28672 for the feed-forward size of the 9b; the checkpoint has 14336."""

MODELS = [name for layout, name in LISTS if layout == "hf"]
JAX_LISTS = [(layout, name) for layout, name in LISTS if layout != "hf"]

Shapes = dict[str, tuple[int, ...]]


class Header(Tensor):
    """A tensor of which only the header exists, and the rows that one layout drops."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.dtype = np.dtype(ml_dtypes.bfloat16)

    def read(self, box: Box) -> Array:
        kept = {262208: 262144, 256128: 256000}.get(self.shape[0], self.shape[0])
        assert box[0] == (kept, self.shape[0]), "planning must not read values"
        return np.zeros([stop - start for start, stop in box], self.dtype)


@cache
def manifest(layout: str, name: str) -> Shapes:
    """Name to shape of every tensor of a public model."""
    table = json.loads(gzip.decompress((DATA / layout / f"{name}.json.gz").read_bytes()))
    return {tensor: tuple(shape) for tensor, (_, shape) in table.items()}


def text_of(layout: str, name: str) -> Shapes:
    """The text part of a list."""
    prefix = prefix_of(name) if layout == "hf" else ""
    return {n: shape for n, shape in manifest(layout, name).items() if n.startswith(prefix)}


def prefix_of(name: str) -> str:
    """What stands before text parameters on the Hub."""
    return NESTED.get(name, "model.")


def headers(shapes: Shapes, **fields: Any) -> Checkpoint:
    """A checkpoint of headers."""
    return Checkpoint({name: Header(shape) for name, shape in shapes.items()}, **fields)


def shapes_of(checkpoint: Checkpoint) -> Shapes:
    """Name to shape."""
    return {name: tensor.shape for name, tensor in checkpoint.items()}


def config(name: str) -> dict[str, Any]:
    """config.json of a public model, as far as dimensions go; nested as on the Hub."""
    family = next(f for f in families().values() if name.lower() in f.models)
    text = {"model_type": family.model_types[0], **family.models[name.lower()]}
    if name not in NESTED:
        return text
    return {"model_type": family.model_types[1], "text_config": text}


def made(layout: str, name: str) -> Shapes:
    """Names and shapes by our rows and the public config."""
    model = read_model(config(name), families())
    model = model.with_vocabulary(vocabulary(model, LAYOUTS[layout]))
    prefix = prefix_of(name) if layout == "hf" else ""
    shapes = {
        prefix + short: parameter.shape(LAYOUTS[layout])
        for parameter in model.parameters()
        for short, _ in parameter.parts(LAYOUTS[layout])
    }
    return shapes_of(stacked(headers(shapes), model, Spelling(LAYOUTS[layout], prefix)))


@pytest.mark.parametrize(("layout", "name"), [pair for pair in LISTS if pair != WRONG])
def test_parameters_are_those_of_the_public_model(layout: str, name: str) -> None:
    """Every text tensor, no other, each of the right shape."""
    assert made(layout, name) == text_of(layout, name)


def test_the_one_list_that_is_wrong() -> None:
    """Nothing but the feed-forward size differs, and it is Hugging Face's and DeepMind's."""
    ours, theirs = made(*WRONG), manifest(*WRONG)
    assert ours.keys() == theirs.keys()
    differ = {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]}
    assert len(differ) == 3 * 42
    for name, (right, wrong) in differ.items():
        assert name.split(".")[3] in ("gate_proj", "up_proj", "down_proj")
        assert tuple({14336: 28672}.get(size, size) for size in right) == wrong


@pytest.mark.parametrize(("layout", "name"), [pair for pair in JAX_LISTS if pair != WRONG])
def test_from_hf_is_planned_from_headers(layout: str, name: str) -> None:
    """What is made is the JAX list; what is left out is what is not text."""
    source, prefix = manifest("hf", name), prefix_of(name)
    target = convert(headers(source, config=config(name)), LAYOUTS[layout]).plan.target
    ours = LAYOUTS[layout].default_prefix
    assert shapes_of(target) == {ours + n: shape for n, shape in manifest(layout, name).items()}
    assert set(target.dropped) == {n for n in source if not n.startswith(prefix)}


@pytest.mark.parametrize(("layout", "name"), [pair for pair in JAX_LISTS if pair != WRONG])
def test_to_hf_is_planned_from_headers(layout: str, name: str) -> None:
    """What is made is the Hub's list, towers included, in the base's order."""
    base = headers(manifest("hf", name), config=config(name))
    target = convert(headers(manifest(layout, name)), HF, base=base).plan.target
    assert list(shapes_of(target).items()) == list(manifest("hf", name).items())


@pytest.mark.parametrize(("layout", "name"), [pair for pair in JAX_LISTS if pair != WRONG])
def test_a_config_of_its_own_suffices_for_the_names(layout: str, name: str) -> None:
    """Without a base's weights the text is spelled as the Hub does for such a config."""
    base = headers({}, config=config(name))
    target = convert(headers(manifest(layout, name)), HF, base=base).plan.target
    assert shapes_of(target) == text_of("hf", name)


@pytest.mark.parametrize(("layout", "name"), [pair for pair in JAX_LISTS if pair != WRONG])
def test_a_public_name_suffices_between_the_jax_layouts(layout: str, name: str) -> None:
    """One becomes each of the others for which there is a list, without any config."""
    source = headers(manifest(layout, name))
    for other in [found for found, listed in JAX_LISTS if listed == name and found != layout]:
        target = convert(source, LAYOUTS[other], model=name).plan.target
        ours = LAYOUTS[other].default_prefix
        shapes = manifest(other, name) if (other, name) != WRONG else made(other, name)
        assert shapes_of(target) == {ours + n: shape for n, shape in shapes.items()}


def test_a_tree_of_the_wrong_width_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"layers\.0\.mlp\.gate_proj\.kernel: expected d f"):
        convert(headers(manifest(*WRONG)), LAYOUTS["deepmind"], model="gemma-2-9b")


@pytest.mark.parametrize(
    ("name", "tensors", "nbytes"),
    [
        ("gemma-4-31B", 1188, 62_546_177_752),
        ("gemma-4-26B-A4B", 1013, 51_611_872_412),
        ("gemma-4-E2B", 2011, 10_246_357_958),
        ("gemma-3-27b", None, 54_864_813_280),
        ("gemma-3-4b", None, 8_600_158_944),
    ],
)
def test_the_lists_are_complete(name: str, tensors: int | None, nbytes: int) -> None:
    """Tensors and bytes (bfloat16) are the public numbers."""
    listed = manifest("hf", name)
    assert 2 * sum(int(np.prod(shape)) for shape in listed.values()) == nbytes
    assert tensors in (None, len(listed))


def test_there_is_a_list_of_every_family() -> None:
    listed = {name.lower() for _, name in LISTS}
    assert (len(MODELS), len(JAX_LISTS)) == (11, 26)
    for family in families().values():
        assert listed & set(family.models)
    assert listed <= {name for family in families().values() for name in family.models}


@pytest.mark.parametrize("name", [name for family in families().values() for name in family.models])
def test_the_public_name_is_recognised(name: str) -> None:
    assert named_model(name).name == name
    assert named_model(name.upper()).name == name
    for repository in (f"google/{name}", f"google/{name}-it", f"{name}-pt", f"google/{name}@main"):
        found = named_model(repository)
        assert (found.name, found.origin) == (name, f"--model {repository}")
        assert {tower.origin for tower in found.towers} <= {found.origin}


@pytest.mark.parametrize(
    "name", ["somebody/gemma-3-1b", "google/gemma-3-1b-it-it", "google/", "-it"]
)
def test_another_repository_is_no_public_model(name: str) -> None:
    with pytest.raises(ConfigError, match=f"no public model '{name}' is known; known: gemma-2b, "):
        named_model(name)


@pytest.mark.parametrize("name", MODELS)
def test_the_public_name_is_recognised_in_a_config(name: str) -> None:
    assert read_model(config(name), families()).name == name.lower()


def test_other_sizes_have_no_public_name() -> None:
    other = read_model({**families()["gemma3"].defaults, "model_type": "gemma3"}, families())
    assert other.name is None
