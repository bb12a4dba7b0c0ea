"""Text from files that are not trusted, as it may stand on a terminal or in a line of a log."""

from __future__ import annotations


def one_line(text: str, limit: int | None = None) -> str:
    """``text`` with every character that is not printable written as its escape.

    So a name cannot end the line, colour or clear the terminal, or turn the direction of writing.

    Args:
        text: Anything.
        limit: Most characters kept; the middle of a longer text is left out.
    """
    if limit is not None and len(text) > limit:
        head, tail = limit * 3 // 4, limit // 4
        text = f"{text[:head]} ... {text[-tail:]}"
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def counted(count: int, what: str) -> str:
    """``1 tensor``, ``2 tensors``."""
    return f"{count} {what}" + ("" if count == 1 else "s")
