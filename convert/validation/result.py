"""What a check found: a verdict, findings that name a tensor or layer, and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VALIDATION_NAME = "validation.json"
"""File of an output in which the verdicts of its checks are kept; a model card tells them."""

REPORT_NAME = "report.html"
"""File of a rejected output that shows what its checks found."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        where: The tensor, layer, file or prompt.
        what: What was expected and what was found there.
    """

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True)
class Result:
    """The outcome of one check.

    Attributes:
        check: ``roundtrip``, ``merged``, ``logits`` or ``diff``.
        title: What was checked, in words.
        findings: What is wrong; none if the check passed.
        summary: Label and text, for people.
        data: Everything measured, ready for JSON.
        notes: What a reader should know, though nothing is wrong with it.
    """

    check: str
    title: str
    findings: tuple[Finding, ...]
    summary: tuple[tuple[str, str], ...]
    data: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def json(self) -> dict[str, Any]:
        """The outcome for machines."""
        return {**self.verdict(), **self.data}

    def verdict(self) -> dict[str, Any]:
        """The outcome without what was measured of single tensors and positions."""
        return {
            "check": self.check,
            "title": self.title,
            "passed": self.passed,
            "findings": [{"where": f.where, "what": f.what} for f in self.findings],
            "summary": dict(self.summary),
            "notes": list(self.notes),
        }
