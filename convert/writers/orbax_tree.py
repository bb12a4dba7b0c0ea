"""How each JAX layout nests its parameters in an Orbax checkpoint. Data, but for the nesting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gemma_convert.convert.errors import OutputError
from gemma_convert.convert.layouts import DEEPMIND, SIGLIP_FLAT, SIGLIP_WRITTEN, Layout
from gemma_convert.convert.tensor import Tensor

CHUNK_BYTES = 16 << 20
"""Most bytes of one chunk on the disk: of what a reader decodes at once."""


@dataclass(frozen=True)
class TreeForm:
    """The form of a layout's checkpoints on the disk.

    Attributes:
        keys: A parameter's name to the keys of its leaf.
        item: The item of step 0 that holds the tree; None where the directory is the tree itself.
    """

    keys: Callable[[str], tuple[str, ...]]
    item: str | None


def _nnx_keys(name: str) -> tuple[str, ...]:
    """``layers.0.attn.q_einsum.w``: one key a word, then flax nnx's last key."""
    return (*name.split("."), "value")


def _flat_keys(name: str) -> tuple[str, ...]:
    """``transformer/layer_0/attn/q_einsum/w``: the path, then the leaf, ``w`` in an MLP.

    The vision tower stands beside ``transformer``, under a name of its own.

    So are the checkpoints that Google publishes; DeepMind's ``load_params`` and Tunix read them.
    """
    if name.startswith(SIGLIP_WRITTEN):
        name = SIGLIP_FLAT + name.removeprefix(SIGLIP_WRITTEN)
    path, _, leaf = name.rpartition("/")
    if path.endswith("/mlp") and leaf in ("gating_einsum", "linear"):
        return (name, "w")
    return (path, leaf)


def _nested_keys(name: str) -> tuple[str, ...]:
    """``params/params/decoder/decoder_norm/scale``: one key a word, as flax's linen has them."""
    return tuple(name.split("/"))


FORMS: Mapping[str, TreeForm] = {
    "tunix": TreeForm(_nnx_keys, "model_params"),
    "tunix-head": TreeForm(_nnx_keys, "model_params"),
    "deepmind": TreeForm(_flat_keys, None),
    "deepmind-stacked": TreeForm(_flat_keys, None),
    "maxtext": TreeForm(_nested_keys, "items"),
    "maxtext-unscanned": TreeForm(_nested_keys, "items"),
}
"""Layout name to the form in which it is written."""


def _unwrapped_keys(name: str) -> tuple[str, ...]:
    """``layer_0/attn/q_einsum/w``: one key a word, nothing around the transformer."""
    return tuple(name.removeprefix(DEEPMIND.default_prefix).split("/"))


def form_of(layout: Layout, names: Iterable[str]) -> TreeForm:
    """The form in which tensors of these names are written.

    DeepMind's with experts are nested: ``load_params`` (gemma git 7691fd4) takes a last key ``w``
    from all that stands under ``mlp`` in a flat tree, but the model wants that of the router.
    """
    if layout is DEEPMIND and any("/mlp/router_logits/" in name for name in names):
        return TreeForm(_unwrapped_keys, None)
    return FORMS[layout.name]


def make_tree(tensors: Mapping[str, Tensor], form: TreeForm) -> dict[str, Any]:
    """Nest ``tensors`` by the keys of their names.

    Raises:
        OutputError: If a tensor is empty, or one's keys lead into or through another.
    """
    tree: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if tensor.size == 0:
            raise OutputError(f"{name} has shape {tensor.shape}", "Orbax stores no empty arrays")
        *path, leaf = form.keys(name)
        node = tree
        for key in path:
            node = node.setdefault(key, {})
            if isinstance(node, Tensor):
                raise OutputError(f"{name} lies inside another tensor", "rename one of the two")
        if leaf in node:
            raise OutputError(f"{name} ends inside another tensor", "rename one of the two")
        node[leaf] = tensor
    return tree
