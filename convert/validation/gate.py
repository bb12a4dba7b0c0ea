"""Checks that an output must pass before it takes its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import OutputError
from gemma_convert.convert.readers import open_checkpoint
from gemma_convert.convert.validation.engines.choose import Options
from gemma_convert.convert.validation.merged import validate_merged
from gemma_convert.convert.validation.report import write_report
from gemma_convert.convert.validation.result import Result
from gemma_convert.convert.validation.roundtrip import validate_roundtrip
from gemma_convert.convert.validation.setup_logits import Request, compare_logits

CHECKS = ("roundtrip", "merged", "logits")
REPORT_NAME = "report.html"

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Gate:
    """What an output is checked against.

    Attributes:
        checks: Names out of `CHECKS`.
        source: The checkpoint that was converted, opened.
        base: Its base, opened.
        source_path: Where the user said it is.
        base_path: Where the user said the base is.
        alpha: LoRA alpha as given.
        step: As given.
    """

    checks: tuple[str, ...]
    source: Checkpoint
    base: Checkpoint
    source_path: Path
    base_path: Path
    alpha: float | None
    step: int | None

    def run(self, directory: Path, tell: Tell = lambda text: None) -> list[Result]:
        """Run the checks on a written Hugging Face directory."""
        return [getattr(self, f"_{check}")(directory, tell) for check in self.checks]

    def refuse_unless_right(
        self, directory: Path, out: Path, command: Sequence[str], tell: Tell
    ) -> None:
        """Run the checks; an output that fails is moved beside ``out``, with a report.

        Args:
            directory: What was written.
            out: The name it is to take.
            command: The command line, for the report.
            tell: Called with a line for each check.

        Raises:
            OutputError: If a check fails.
        """
        results = self.run(directory, tell)
        for result in results:
            tell(f"{result.check}: {'passed' if result.passed else 'FAILED'}")
        findings = [finding for result in results for finding in result.findings]
        if not findings:
            return
        write_report(directory / REPORT_NAME, results, command)
        rejected = _free_name(out)
        directory.rename(rejected)
        more = f" and {len(findings) - 1} more" if len(findings) > 1 else ""
        raise OutputError(
            f"{out} was not made, it failed its validation: {findings[0]}{more}",
            f"what was written is {rejected}; look at {rejected / REPORT_NAME}",
        )

    def _roundtrip(self, directory: Path, tell: Tell) -> Result:
        return validate_roundtrip(open_checkpoint(directory))

    def _merged(self, directory: Path, tell: Tell) -> Result:
        written = open_checkpoint(directory)
        return validate_merged(written, self.source, self.base, alpha=self.alpha)

    def _logits(self, directory: Path, tell: Tell) -> Result:
        options = Options(base=self.base_path, alpha=self.alpha, step=self.step)
        request = Request(str(self.source_path), str(directory), options, Options())
        return compare_logits(request, tell)


def _free_name(out: Path) -> Path:
    """``OUT.rejected``, or with a number if that is taken: nothing is overwritten."""
    parent = out.parent.resolve()
    number, candidate = 1, parent / f"{out.name}.rejected"
    while candidate.exists() or candidate.is_symlink():
        number += 1
        candidate = parent / f"{out.name}.rejected-{number}"
    return candidate
