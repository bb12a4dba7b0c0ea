"""Name templates: how the name of a tensor spells some of its axes.

``layers.{i}.self_attn.{s:k_proj,v_proj}.weight`` spells axis i by its number and axis s by one of
two words. The same template writes names and reads them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

_NUMBER = "0|[1-9][0-9]{0,8}"  # bounded: int() refuses thousands of digits
_FIELD = re.compile(r"\{(?P<axis>\w+)(?::(?P<words>[\w,]+))?\}")


@dataclass(frozen=True)
class Template:
    """A parsed name template.

    Attributes:
        text: As written.
        words: The axes spelled by words, each with its words in order; numbered axes are absent.
    """

    text: str
    words: Mapping[str, tuple[str, ...]] = field(compare=False)

    def format(self, index: Mapping[str, int]) -> str:
        """The name at ``index``: axis to position."""

        def spell(field: re.Match[str]) -> str:
            axis = field["axis"]
            return self.words[axis][index[axis]] if axis in self.words else str(index[axis])

        return _FIELD.sub(spell, self.text)

    def match(self, name: str) -> dict[str, int] | None:
        """The index at which this template gives ``name``, or None."""
        found = _regex(self.text).fullmatch(name)
        if found is None:
            return None
        return {
            axis: self.words[axis].index(text) if axis in self.words else int(text)
            for axis, text in found.groupdict().items()
        }


@cache
def parse(text: str) -> Template:
    """Parse a name template."""
    words = {f["axis"]: tuple(f["words"].split(",")) for f in _FIELD.finditer(text) if f["words"]}
    return Template(text, words)


@cache
def _regex(text: str) -> re.Pattern[str]:
    parts: list[str] = []
    end = 0
    for found in _FIELD.finditer(text):
        parts.append(re.escape(text[end : found.start()]))
        choices = found["words"].replace(",", "|") if found["words"] else _NUMBER
        parts.append(f"(?P<{found['axis']}>{choices})")
        end = found.end()
    parts.append(re.escape(text[end:]))
    return re.compile("".join(parts))
