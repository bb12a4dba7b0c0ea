"""Where a tensor stands in the model, told from its name: the layer and the kind of module."""

from __future__ import annotations

import re

_LAYER = re.compile(r"(?:^|[./_])layers?[._/]([0-9]{1,9})[./]")
# What the last keys of a name say about how values are stored, not about which module it is.
_LEAVES = ("weight", "kernel", "scale", "w", "value")


def place(name: str) -> tuple[str, int | None]:
    """Module and layer of a tensor.

    Returns:
        The module as it is called inside a layer, such as ``self_attn.q_proj``, and the layer's
        index, None outside the layers.
    """
    found = _LAYER.search(name)
    short = name[found.end() :] if found else name
    keys = short.replace("/", ".").split(".")
    while len(keys) > 1 and keys[-1] in _LEAVES:
        keys.pop()
    return ".".join(keys), int(found[1]) if found else None
