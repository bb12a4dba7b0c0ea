"""The layouts: one ecosystem's spelling of the parameters of a model.

A family's rows give names relative to the text model. What stands before them differs between
wrappers of one layout, so a layout lists its prefixes, the most specific first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True, eq=False)
class Layout:
    """One ecosystem's spelling of parameter names and axis orders.

    Attributes:
        name: As typed on the command line.
        prefixes: What may stand before a text parameter's name.
        default_prefix: The one written when no base says otherwise.
        vocabulary: Rows of the embedding where they differ from config.json's vocab_size.
        unread: Whether its models have the parameters that nothing reads (`Row.unread`): they want
            them, they carry them where they are there, or they have none.
        separator: What stands between the keys of a name in the templates.
        optional_leaf: A last key that some trees of the layout have and others leave out.
        unstacked: The layout of the same names that keeps each layer by itself.
        like: The layout whose cells it uses where a row has none of its own.
        aliases: What names may begin with, and with what the templates begin them instead.
        towers: What the names of a vision or audio part, or of a head, begin with, where the
            text's prefix does not tell them apart.
    """

    name: str
    prefixes: tuple[str, ...]
    default_prefix: str
    vocabulary: Mapping[int, int] = field(default_factory=dict)
    unread: Literal["wanted", "carried", "absent"] = "carried"
    separator: str = "."
    optional_leaf: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    towers: tuple[str, ...] = ()
    unstacked: str = ""
    like: str = ""


@dataclass(frozen=True)
class Spelling:
    """A layout with one of its prefixes."""

    layout: Layout
    prefix: str

    def __str__(self) -> str:
        return f"{self.layout.name} ({self.prefix}*)" if self.prefix else self.layout.name


IN_MEMORY = "model.language_model."
"""Read by every class with towers since transformers 4.52; Gemma 4 has it on the Hub too."""

HEADLESS = ("language_model.", "")
"""Before the names that classes without a head save, such as Gemma4Model and Gemma3TextModel."""

HF = Layout(
    "hf",
    (
        IN_MEMORY,
        "language_model.model.",  # Gemma 3 4b and larger on the Hub
        "model.",  # text-only models
        *HEADLESS,
    ),
    "model.",
    towers=(
        "vision_",
        "audio_",
        "multi_modal_projector.",
        "embed_vision.",
        "embed_audio.",
        "lm_head",
    ),
)
# The embeddings of the JAX world: padded for Gemma 1 and 2, without the 64 last rows, which no
# token uses, for the multimodal Gemma 3.
_JAX_VOCABULARY = {256000: 256128, 262208: 262144}

_JAX_TOWERS = ("vision_encoder", "audio_encoder", "embedder.mm_", "embedder.audio_input")

TUNIX = Layout("tunix", ("",), "", vocabulary=_JAX_VOCABULARY, unread="wanted", towers=_JAX_TOWERS)

# The vision tower of a flat tree (gemma git 7691fd4, gm/ckpts/_checkpoint.py).
SIGLIP_FLAT, SIGLIP_WRITTEN = "SigLiPFromPatches_0/", "transformer/vision_encoder/"

# A nested tree has the keys layer_0, attn, q_einsum, w; a flat one, as on Google's bucket, has
# transformer/layer_0/attn/q_einsum and w. Flat trees give the arrays of an MLP a last key w too.
DEEPMIND = Layout(
    "deepmind",
    ("", "transformer/"),
    "transformer/",
    vocabulary=_JAX_VOCABULARY,
    unread="wanted",
    separator="/",
    optional_leaf="w",
    aliases={SIGLIP_FLAT: SIGLIP_WRITTEN},
    towers=tuple(tower.replace(".", "/") for tower in _JAX_TOWERS),
)


# Tunix after 0.1.7 (git c7d8950) keeps the arrays of the per-layer embeddings two-dimensional.
TUNIX_HEAD = replace(TUNIX, name="tunix-head", like="tunix")

# The library's STACKED trees: the layers of one position in the block, along the first axis.
DEEPMIND_STACKED = replace(DEEPMIND, name="deepmind-stacked", like="deepmind", unstacked="deepmind")

# Linen's names stand behind params twice, once for the state and once for the collection; nnx has
# none of it after fine-tuning, and base after reinforcement learning.
MAXTEXT_UNSCANNED = Layout(
    "maxtext-unscanned",
    ("params/params/", "params/", "base/", ""),
    "params/params/",
    vocabulary=_JAX_VOCABULARY,
    unread="absent",
    separator="/",
    towers=("vision_encoder",),
    like="maxtext",
)
MAXTEXT = replace(MAXTEXT_UNSCANNED, name="maxtext", like="", unstacked="maxtext-unscanned")

LAYOUTS = {
    layout.name: layout
    for layout in (
        HF,
        TUNIX,
        TUNIX_HEAD,
        DEEPMIND,
        DEEPMIND_STACKED,
        MAXTEXT,
        MAXTEXT_UNSCANNED,
    )
}
