"""Which weights adapters are merged into where training had quantised them, or full precision.

Two versions of the same weights may be at hand: those that a QLoRA run saw, stored as codes or
quantised anew from the base, and the base's own. One is used; the other is compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.layouts import Spelling
from gemma_convert.convert.model import Model
from gemma_convert.convert.parts import Parts
from gemma_convert.convert.relayout import relayout
from gemma_convert.convert.tensor import Tensor, ancestry, cast
from gemma_convert.convert.vocabulary import as_stored
from gemma_convert.surgery.adapters.adapter import Adapter
from gemma_convert.surgery.compare import Compared
from gemma_convert.surgery.quantise import Scheme
from gemma_convert.surgery.quantised import Dequantised, is_quantised, tiles_of
from gemma_convert.surgery.training_base import (
    NATIVE,
    Choice,
    as_trained,
    assumed,
    completed,
    of_qwix,
    resolve,
)

FULL = "full precision"


@dataclass(frozen=True)
class Bases:
    """Onto what is merged.

    Attributes:
        donor: Whose weights are used, quantised anew if `scheme` says so.
        rival: Whose weights are compared with them, if those are another checkpoint's.
        scheme: How the run quantised the donor's weights, where they are not.
        trained: Whether the version that training saw is the one used.
        used: The version used, for people; empty where nothing was quantised.
        other: The version that it is compared with.
        notes: What a user should know about the choice.
    """

    donor: Parts
    rival: Parts | None = None
    scheme: Scheme | None = None
    trained: bool = False
    used: str = ""
    other: str = ""
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, str] | None:
        """`used` and `other`, where there are two versions or a quantised one."""
        return (self.used, self.other) if self.used else None

    def unused(self) -> dict[int, str]:
        """Identities of tensors of the rival that nothing reads, each with the reason."""
        left = self.rival.text.values() if self.rival and not self.trained else ()
        reason = "merged onto the base's full-precision weights instead"
        return {id(step): reason for tensor in left for step in ancestry(tensor)}

    def compared(
        self, target: Checkpoint, model: Model, spelling: Spelling, adapters: Sequence[Adapter]
    ) -> Checkpoint:
        """``target`` in the version that is used, its quantised weights compared with the other.

        Args:
            target: The donor's weights, in ``spelling``.
            model: Their dimensions.
            spelling: How ``target`` is spelled.
            adapters: What is merged; see `as_trained`.

        Raises:
            GemmaConvertError: If the other version does not fit.
        """
        second = self._second(model, spelling, adapters)
        if second is None:
            return target
        used, other = (second, target) if self.scheme and self.trained else (target, second)
        tensors: dict[str, Tensor] = dict(target)
        for name, tensor in target.items():
            if name in second and (is_quantised(tensor) or is_quantised(second[name])):
                tensors[name] = Compared(cast(used[name], tensor.dtype), other[name])
        return target.replace(tensors=tensors)

    def _second(
        self, model: Model, spelling: Spelling, adapters: Sequence[Adapter]
    ) -> Mapping[str, Tensor] | None:
        """The version that is not the donor's as it is, in ``spelling``."""
        parts = self.donor if self.scheme else self.rival
        if parts is None or parts.spelling is None:
            return None
        text, own = parts.text, parts.spelling
        known = as_stored(model, text, own)
        if self.scheme:
            text, own = as_trained(text, known, own, adapters, self.scheme), NATIVE
        return relayout(text, known, own, spelling, partial=True)


def choose(
    own: Parts, base: Parts | None, choice: Choice, adapters: Sequence[Adapter]
) -> Bases | None:
    """Onto what adapters are merged; None where there are no weights.

    Args:
        own: The source.
        base: The Hugging Face directory beside it, if there is one.
        choice: As asked for.
        adapters: What is merged: they may say how training quantised the base.

    Raises:
        AdapterError: If the choice does not fit the inputs.
    """
    full = base if base is not None and base.text else None
    codes = _schemes(own)
    if codes:
        return _of_codes(own, full, choice, codes)
    donor = own if own.text else full
    if donor is None:
        return None
    if not isinstance(choice, Scheme):
        return _onto_full(donor, choice, adapters)
    if own.pairs and donor is own:
        raise AdapterError(
            f"{own.text.source}: --base-quantization {choice.qtype}, but the checkpoint holds its "
            "own weights beside the factors, and they are not quantised",
            "leave it out: they are what training saw",
        )
    scheme = completed(resolve(choice, _stored(choice, adapters)), adapters)
    notes: tuple[str, ...] = ()
    if choice.dtype is None and (unsaid := assumed(adapters)):
        notes = (
            f"{', '.join(unsaid)}: the dtype of the base in training is not stored: "
            f"{scheme.dtype} was assumed, that of the factors; --base-dtype says another",
        )
    return Bases(donor, scheme=scheme, trained=True, used=str(scheme), other=FULL, notes=notes)


def _onto_full(donor: Parts, choice: Choice, adapters: Sequence[Adapter]) -> Bases:
    """Onto full precision; compared with the base that training saw, where that is known."""
    stored = _stored(choice, adapters)
    if not stored:
        return Bases(donor)
    known, remedy = None, "no base is what training saw"
    if len(stored) == 1:
        known, remedy = _known(stored[0], adapters)
    told = " and to ".join(map(str, stored))
    note = f"training quantised the base to {told}; this merges onto full precision, and {remedy}"
    notes = (note,) if choice is None else ()
    if known is None:
        return Bases(donor, notes=notes)
    return Bases(donor, scheme=known, used=FULL, other=str(known), notes=notes)


def _known(scheme: Scheme, adapters: Sequence[Adapter]) -> tuple[Scheme | None, str]:
    """``scheme`` if the base can be quantised by it, and how to merge onto that."""
    onto = f"--base-quantization {scheme.qtype}"
    if not of_qwix(adapters):
        form = "the Tunix checkpoint that training wrote"
        return None, f"{form}, with {onto}, onto what training saw"
    try:
        return completed(scheme, adapters), f"{onto} onto what training saw"
    except AdapterError:  # of several dtypes
        return None, f"{onto} --base-dtype with the base's dtype in training onto what that saw"


def _of_codes(own: Parts, full: Parts | None, choice: Choice, codes: str) -> Bases:
    """The choice where the source holds quantised weights."""
    source = own.text.source
    if isinstance(choice, Scheme):
        raise AdapterError(
            f"{source}: --base-quantization {choice.qtype}, but the checkpoint holds quantised "
            f"weights of its own ({codes})",
            "leave it out to merge onto them, or pass none to merge onto the base's",
        )
    if choice is None:
        return Bases(own, rival=full, trained=True, used=codes, other=FULL if full else "")
    if full is None or not own.pairs:
        what = "the base has no weights" if full is None else "there are no LoRA factors to merge"
        raise AdapterError(
            f"{source}: --base-quantization none, but {what}",
            "leave it out: the checkpoint's own weights are dequantised",
        )
    return Bases(full, rival=own, used=FULL, other=codes)


def _schemes(parts: Parts) -> str:
    """The schemes of quantised weights, for people; empty if there are none."""
    found = [tensor for tensor in parts.text.values() if isinstance(tensor, Dequantised)]
    schemes = (
        str(Scheme(str(codes), tile))
        for codes in dict.fromkeys(tensor.codes.dtype for tensor in found)
        for tile in tiles_of(tensor for tensor in found if tensor.codes.dtype == codes)
    )
    return " and ".join(schemes)


def _stored(choice: Choice, adapters: Sequence[Adapter]) -> list[Scheme]:
    """The schemes that ``adapters`` say, dtypes apart; of no matter for full precision."""
    try:
        found = [adapter.trained_on.scheme() for adapter in adapters]
    except AdapterError:
        if choice == "none":
            return []
        raise
    return list(dict.fromkeys(replace(scheme, dtype=None) for scheme in found if scheme))
