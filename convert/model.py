"""A model's dimensions, read from config.json.

Keys that config.json leaves out take the value that transformers assumes for that ``model_type``.
``text_config`` wins over the top level, but for ``tie_word_embeddings``. What the tensors say is
checked against this when a plan is made; nothing is inferred silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gemma_convert.convert.errors import ConfigError
from gemma_convert.convert.network import Network
from gemma_convert.convert.rope import Rope, read_rope
from gemma_convert.convert.rows import Family, Layer
from gemma_convert.convert.sizes import layer_count, positive
from gemma_convert.convert.towers import TowerConfig, read_towers


@dataclass(frozen=True)
class Model(Network):
    """A family at the dimensions of one config.

    Attributes:
        tied: Whether the head is the embedding.
        name: The public model of these dimensions, if it is one.
        rope: Layer type to its rotary position embedding.
        towers: Its vision and audio parts, as far as their rows are known here.
    """

    family: Family
    tied: bool
    name: str | None
    rope: Mapping[str, Rope]
    towers: tuple[TowerConfig, ...] = ()

    def with_vocabulary(self, size: int) -> Model:
        """This model with another number of rows in the embedding."""
        return replace(self, common=replace(self.common, sizes={**self.common.sizes, "v": size}))


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json that describes the text model."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def read_model(config: Mapping[str, Any], families: Mapping[str, Family]) -> Model:
    """Read the dimensions of a model from ``config`` (a parsed config.json).

    Raises:
        ConfigError: If its model_type is not known, a dimension or a number of RoPE is not
            positive, or it asks for parameters that the family's rows do not have yet.
    """
    family = _family(config, families)
    text = text_config(config)
    model_type = text.get("model_type") or config.get("model_type")
    own = family.own_defaults.get(model_type, {}) if isinstance(model_type, str) else {}
    defaults = {**family.defaults, **own}
    values = {**defaults, **text}
    for key, what in family.unsupported.items():
        if values.get(key):
            raise ConfigError(
                f"config.json: {key} = {values[key]}: {what} are not supported yet",
                f"models that work: {', '.join(family.models)}",
            )
    common = _common(values)
    kinds = _layer_types(values)
    layers = tuple(_layer(i, kind, values, common) for i, kind in enumerate(kinds))
    return Model(
        family=family,
        layers=layers,
        common=common,
        tied=bool(config.get("tie_word_embeddings", values["tie_word_embeddings"])),
        name=_public_name(family, values),
        rope=read_rope(text, defaults),
        towers=read_towers(config, family, common.sizes["d"]),
    )


def _family(config: Mapping[str, Any], families: Mapping[str, Family]) -> Family:
    found = [config.get("model_type"), text_config(config).get("model_type")]
    for family in families.values():
        if any(model_type in family.model_types for model_type in found):
            return family
    known = ", ".join(t for family in families.values() for t in family.model_types)
    raise ConfigError(
        f"config.json: model_type {found[0]!r} is not a family known here",
        f"known: {known}",
    )


# Axis to the config key of its size. Axes of parts that a model does not have are left out.
_SIZES = {
    "d": "hidden_size",
    "n": "num_attention_heads",
    "k": "num_key_value_heads",
    "h": "head_dim",
    "f": "intermediate_size",
}
_MOE_SIZES = {"e": "num_experts", "m": "moe_intermediate_size"}
_PLE_SIZES = {
    "p": "hidden_size_per_layer_input",
    "w": "vocab_size_per_layer_input",
    "l": "num_hidden_layers",
}


def _common(values: Mapping[str, Any]) -> Layer:
    """What all layers have in common, as a layer that is none of the special ones."""
    is_moe = bool(values.get("enable_moe_block"))
    has_ple = bool(values.get("hidden_size_per_layer_input"))
    keys = {"v": "vocab_size", **_SIZES}
    keys |= _MOE_SIZES if is_moe else {}
    keys |= _PLE_SIZES if has_ple else {}
    return Layer(
        index=-1,
        is_global=False,
        value_is_key=False,
        shares_kv=False,
        is_moe=is_moe,
        has_ple=has_ple,
        query_scale=_query_scale(values),
        sizes={axis: positive(values, key) for axis, key in keys.items()},
    )


def _query_scale(values: Mapping[str, Any]) -> float:
    """``query_pre_attn_scalar ** -0.5``; the head dimension stands in where there is none."""
    scalar = values.get("query_pre_attn_scalar") or positive(values, "head_dim")
    if isinstance(scalar, bool) or not isinstance(scalar, int | float) or not scalar > 0:
        raise ConfigError(f"config.json: query_pre_attn_scalar is {scalar!r}, expected a number")
    return float(scalar**-0.5)


def _layer(index: int, kind: str, values: Mapping[str, Any], common: Layer) -> Layer:
    """One layer; Gemma 4's have dimensions of their own (modeling_gemma4.py)."""
    is_global = kind == "full_attention"
    value_is_key = is_global and bool(values.get("attention_k_eq_v"))
    shared = positive(values, "num_kv_shared_layers") if values.get("num_kv_shared_layers") else 0
    shares_kv = index >= positive(values, "num_hidden_layers") - shared
    sizes = dict(common.sizes)
    if is_global and values.get("global_head_dim"):
        sizes["h"] = positive(values, "global_head_dim")
    if value_is_key and values.get("num_global_key_value_heads"):
        sizes["k"] = positive(values, "num_global_key_value_heads")
    if shares_kv and values.get("use_double_wide_mlp"):
        sizes["f"] *= 2
    return replace(
        common,
        index=index,
        is_global=is_global,
        value_is_key=value_is_key,
        shares_kv=shares_kv,
        sizes=sizes,
    )


def _layer_types(values: Mapping[str, Any]) -> list[str]:
    count = layer_count(values)
    kinds = values.get("layer_types")
    if kinds is None:
        # Of Gemma's configs in transformers, Gemma 3's alone reads a period from config.json.
        fixed = "layers_per_global" in values
        period = positive(values, "layers_per_global" if fixed else "sliding_window_pattern")
        kinds = [
            "sliding_attention" if (i + 1) % period else "full_attention" for i in range(count)
        ]
    if not isinstance(kinds, list):
        raise ConfigError(f"config.json: layer_types is {kinds!r}, expected a list")
    if len(kinds) != count:
        raise ConfigError(
            f"config.json: num_hidden_layers is {count} but layer_types has {len(kinds)} entries",
            "repair the one that is wrong",
        )
    unknown = {str(kind) for kind in kinds if kind not in ("sliding_attention", "full_attention")}
    if unknown:
        raise ConfigError(f"config.json: unknown layer_types {sorted(unknown)}")
    if values.get("last_layer_is_global"):  # whatever layer_types says of it
        return [*kinds[:-1], "full_attention"]
    return list(kinds)


def _public_name(family: Family, values: Mapping[str, Any]) -> str | None:
    for name, dims in family.models.items():
        if all(values.get(key) == value for key, value in dims.items()):
            return name
    return None
