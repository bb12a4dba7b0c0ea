"""Measurements as Markdown tables, and the machine that they were made on."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.cases import Limit
from bench.measure import Usage, median

Used = Mapping[str, Sequence[Usage]]

LIBRARIES = ("jax", "numpy", "orbax-checkpoint", "safetensors", "tensorstore")

BEGIN, END = "<!-- written by python -m bench -->", "<!-- to here -->"


def machine(directory: Path) -> str:
    """The machine, its load and the libraries, in one paragraph."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = os.getloadavg()[0]
    libraries = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    return (
        f"{date.today()}, {_processor()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, "
        f"{_file_system(directory)}; load average at the end {load:.1f}. "
        f"Python {platform.python_version()}, {libraries}."
    )


def usages(used: Used) -> str:
    """A row a case: medians of the times, the largest resident set."""
    rows = [["", "wall", "CPU", "largest resident set"]]
    for name, runs in used.items():
        one = median(runs)
        rows.append([name, seconds(one.wall), seconds(one.cpu), f"{one.rss / 1e6:.0f} MB"])
    return _table(rows)


def ratios(used: Used, limits: Iterable[Limit]) -> str:
    """A row a limit: the times of a case divided by those that it is compared with."""
    rows = [["", "compared with", "wall", "CPU", "aim (wall)"]]
    for found in ratio_values(used, limits):
        aim = f"<= {found['aim']}" if found["aim"] else ""
        against = " + ".join(found["against"])
        rows.append([found["case"], against, f"{found['wall']:.2f}", f"{found['cpu']:.2f}", aim])
    return _table(rows)


def ratio_values(used: Used, limits: Iterable[Limit]) -> list[dict[str, Any]]:
    """The ratios as JSON values: medians of the ratios of each round."""
    return [
        {
            "case": limit.case,
            "against": limit.against,
            "wall": _ratio(used, limit, "wall"),
            "cpu": _ratio(used, limit, "cpu"),
            "aim": limit.most,
        }
        for limit in limits
        if limit.case in used
    ]


def _ratio(used: Used, limit: Limit, what: str) -> float:
    rounds = zip(used[limit.case], *(used[name] for name in limit.against), strict=True)
    found = sorted(
        getattr(case, what) / sum(getattr(one, what) for one in against)
        for case, *against in rounds
    )
    return float(found[len(found) // 2] + found[(len(found) - 1) // 2]) / 2


def replace_between(text: str, new: str) -> str:
    """``text`` with what is between the two marks replaced by ``new``.

    Raises:
        ValueError: If the marks are not there.
    """
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"no lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{new}\n\n{END}{after}"


def seconds(value: float) -> str:
    """A time, to three digits at most."""
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *rest])


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _file_system(directory: Path) -> str:
    found = max(
        (line.split() for line in Path("/proc/mounts").read_text().splitlines()),
        key=lambda words: len(words[1]) if directory.is_relative_to(words[1]) else 0,
    )
    return f"{found[2]} on a {'virtual ' if 'vd' in found[0] else ''}disk"
