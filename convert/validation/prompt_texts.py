"""The texts of the built-in prompts. Data, and a long text that does not repeat itself."""

from __future__ import annotations

from itertools import count, product

TEXTS = {
    "short": "Water boils at",
    "code": (
        "def merge(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:\n"
        '    """Merge overlapping intervals."""\n'
        "    merged: list[tuple[int, int]] = []\n"
        "    for start, stop in sorted(intervals):\n"
        "        if merged and start <= merged[-1][1]:\n"
        "            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))\n"
        "        else:\n"
    ),
    "languages": (
        "The night train leaves at nine. Der Nachtzug fährt um neun ab. Le train de nuit part à "
        "neuf heures. El tren nocturno sale a las nueve. Ночной поезд отправляется в девять. "
        "夜行列車は九時に出発します。夜班火车九点发车。야간 열차는 아홉 시에 출발합니다. "
        "يغادر قطار الليل في التاسعة. रात की ट्रेन नौ बजे निकलती है। Treni ya usiku huondoka saa tatu. "
        "1,234.5 kg * 3 = 3.703,5 kg ≈ 8165 lb 🚂"
    ),
}
"""Name to text."""

CHAT = [
    {"role": "user", "content": "Name two rivers of Europe."},
    {"role": "assistant", "content": "The Danube and the Rhine."},
    {"role": "user", "content": "Which of them is longer?"},
]
"""A chat for the tokenizer's template."""

_WHO = ("The keeper", "A fisherman", "The youngest pilot", "Her brother", "The ship's cook")
_DID = ("noted", "doubted", "reported", "painted", "remembered", "sold", "repaired")
_WHAT = ("a broken lamp", "two grey seals", "the old chart", "a letter from Bergen", "salt", "rope")
_WHEN = ("before dawn", "in the rain", "after supper", "at low tide", "while the bell rang")


def long_text(tokens: int) -> str:
    """A log of at least ``tokens`` words, no sentence twice."""
    sentences: list[str] = []
    words = 0
    days = product(_WHEN, _WHAT, _DID, _WHO)
    for day, (when, what, did, who) in zip(count(1), days, strict=False):
        # neighbours in the product differ in one word: the day makes each line its own
        sentences.append(f"Day {day * 37 % 1009}, wind {day * 7 % 32}: {who} {did} {what} {when}.")
        words += len(sentences[-1].split())
        if words >= tokens:
            break
    return "\n".join(sentences)
