"""Checks that an output must pass before it takes its name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gemma_convert.convert import hf_config
from gemma_convert.convert.errors import InputError, OutputError
from gemma_convert.convert.job import Job
from gemma_convert.convert.layouts import HF
from gemma_convert.convert.readers import open_base, open_checkpoint
from gemma_convert.convert.readers.jsonfile import read_object
from gemma_convert.convert.readers.provenance import LEDGER_NAME
from gemma_convert.convert.validation.engines.base import Source
from gemma_convert.convert.validation.engines.choose import Options, tokenizer_directory
from gemma_convert.convert.validation.engines.hugging_face import require_model
from gemma_convert.convert.validation.engines.tunix import Tunix
from gemma_convert.convert.validation.merged import validate_merged
from gemma_convert.convert.validation.report import write_report
from gemma_convert.convert.validation.result import REPORT_NAME, VALIDATION_NAME, Finding, Result
from gemma_convert.convert.validation.roundtrip import validate_roundtrip
from gemma_convert.convert.validation.setup_logits import Request, compare_logits, require_tokenizer
from gemma_convert.convert.writers.hf import main_dtype

CHECKS = ("roundtrip", "merged", "logits")

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Gate:
    """What an output is checked against.

    Attributes:
        checks: Names out of `CHECKS`.
        job: What made the output.
        reference: Says what the output must predict, for ``logits``.
        source: The checkpoint that was converted, as the user named it.
        base: Where an output without a config.json has it from.
        command: The command line, for the report.
        tell: Called with a line for each check.
    """

    checks: tuple[str, ...]
    job: Job
    reference: Source | None
    source: Path
    base: Path | None
    command: Sequence[str] = ()
    tell: Tell = lambda text: None

    def __call__(self, directory: Path, out: Path) -> None:
        """Run the checks; an output that fails is moved beside ``out``, with a report.

        The verdicts are kept in the output, where `VALIDATION_NAME` says. A report that cannot be
        written leaves the output where it is, for the next run to go on with.

        Args:
            directory: The output, whole.
            out: The name it is to take.

        Raises:
            OutputError: If a check fails or cannot be run.
        """
        (directory / REPORT_NAME).unlink(missing_ok=True)  # of a run that came no further
        results = []
        for check in self.checks:
            result = _renamed(self._run(check, directory), str(directory), str(out))
            self.tell(f"{check}: {'passed' if result.passed else 'FAILED'}")
            results.append(result)
        verdicts = json.dumps([result.verdict() for result in results], indent=2, allow_nan=False)
        (directory / VALIDATION_NAME).write_text(verdicts + "\n", encoding="utf-8")
        findings = [finding for result in results for finding in result.findings]
        if not findings:
            return
        write_report(directory / REPORT_NAME, results, self.command)
        rejected = _rejected(out)
        directory.rename(rejected)
        more = f" and {len(findings) - 1} more" if len(findings) > 1 else ""
        raise OutputError(
            f"{out} was not made, it failed its validation: {findings[0]}{more}",
            f"what was written is {rejected}; look at {rejected / REPORT_NAME}",
        )

    def _run(self, check: str, directory: Path) -> Result:
        run: Callable[[Path], Result] = getattr(self, f"_{check}")
        try:
            return run(directory)
        except Exception as error:
            # What was written may be right and have taken hours: it is kept, but not as OUT.
            what = f"could not be run: {type(error).__name__}: {error}"
            return Result(check, f"{check} of {directory}", (Finding(check, what),), ())

    def require_runnable(self) -> None:
        """Refuse, before any work is done, checks that could not be run at its end.

        Raises:
            GemmaConvertError: If packages or the tokenizer are missing, or an engine has no such
                model.
        """
        if "logits" not in self.checks:
            return
        assert self.reference is not None
        self.reference.require_runnable()
        target = self.job.plan.target
        if self.job.layout is HF:
            require_model(hf_config.updated(target.config, main_dtype(target.tensors)))
        elif self.base is None:
            raise InputError(
                f"--validate logits: an output in the layout {self.job.layout.name} has no "
                "config.json",
                "give the base's directory with --base",
            )
        else:
            Tunix(self.reference.about, target, open_base(self.base), None).require_runnable()
        tokenizer = self.reference.about.tokenizer or tokenizer_directory(target)
        require_tokenizer(tokenizer, target.config)

    def _roundtrip(self, directory: Path) -> Result:
        base = open_base(self.base) if self.base is not None else None
        name = self.job.model.name if self.job.model is not None else None
        written = open_checkpoint(directory)
        return validate_roundtrip(written, base=None if written.config else base, model=name)

    def _merged(self, directory: Path) -> Result:
        return validate_merged(open_checkpoint(directory), self.job)

    def _logits(self, directory: Path) -> Result:
        options = Options(base=self.base)
        request = Request(str(self.source), str(directory), options, options)
        return compare_logits(request, self.tell, a=self.reference)


def _renamed(result: Result, old: str, new: str) -> Result:
    """``result`` with the name that the output is to take, wherever it names its directory."""

    def renamed(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace(old, new)
        if isinstance(value, Mapping):
            return {key: renamed(item) for key, item in value.items()}
        return type(value)(map(renamed, value)) if isinstance(value, list | tuple) else value

    return replace(
        result,
        title=renamed(result.title),
        findings=tuple(Finding(renamed(f.where), renamed(f.what)) for f in result.findings),
        summary=renamed(result.summary),
        data=renamed(result.data),
        notes=renamed(result.notes),
    )


def _rejected(out: Path) -> Path:
    """``OUT.rejected``; what an earlier run left there is removed, of anything else nothing is.

    Where something else stands there, a number is added.
    """
    parent = out.parent.resolve()
    number, candidate = 1, parent / f"{out.name}.rejected"
    while os.path.lexists(candidate):
        if _is_rejected(candidate, out):
            shutil.rmtree(candidate)
            break
        number += 1
        candidate = parent / f"{out.name}.rejected-{number}"
    return candidate


def _is_rejected(directory: Path, out: Path) -> bool:
    """Whether ``directory`` is what a run to ``out`` wrote and rejected, no file more or less."""
    if directory.is_symlink() or not (directory / LEDGER_NAME).is_file():
        return False
    try:
        output = read_object(directory / LEDGER_NAME)["output"]
        told = {name: entry["bytes"] for name, entry in output["files"].items()}
        path = output["path"]
    except (InputError, LookupError, TypeError, AttributeError):
        return False
    paths = [path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir()]
    found = {str(path.relative_to(directory)): path.lstat().st_size for path in paths}
    about = [found.pop(name, None) for name in (LEDGER_NAME, VALIDATION_NAME, REPORT_NAME)]
    return path == str(out) and None not in about and found == told
