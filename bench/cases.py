"""What is measured, and what it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.measure import PYTHON, Case

CONVERT = (PYTHON, "-m", "gemma_convert")


@dataclass(frozen=True)
class Limit:
    """An aim: ``case`` takes at most ``most`` times the sum of what ``against`` take."""

    case: str
    against: tuple[str, ...]
    most: float | None = None


COPY, READ, WRITE = "cp + fsync of the base", "tensorstore reads the tree", "tensorstore writes"
MERGE, TO_HF, TO_ORBAX = "merge a LoRA", "orbax-to-hf of all weights", "hf-to-orbax"

LIMITS = (
    Limit(MERGE, (COPY,), 1.3),
    Limit(TO_HF, (READ, COPY), 1.3),
    Limit(TO_ORBAX, (WRITE,), 1.3),
)


def conversions(inputs: Path) -> list[Case]:
    """The cases on the inputs that `bench.inputs` makes."""
    base, run, tree, out = (str(inputs / name) for name in ("base", "run", "tree", "out"))
    write = ("--base", base, "--out", out, "--quiet")
    cases: list[tuple[str, Sequence[str]]] = [
        (COPY, copy(base, out)),
        (MERGE, (*CONVERT, "orbax-to-hf", run, "--alpha", "64", *write)),
        (READ, (PYTHON, "-m", "bench.raw", "read", tree)),
        (TO_HF, (*CONVERT, "orbax-to-hf", tree, *write)),
        (WRITE, (PYTHON, "-m", "bench.raw", "write", base, out)),
        (
            TO_ORBAX,
            (*CONVERT, "hf-to-orbax", base, "--layout", "tunix", "--out", out, "--quiet"),
        ),
    ]
    return [Case(name, command, Path(out)) for name, command in cases]


def copy(source: str, target: str) -> tuple[str, ...]:
    """Copy a directory and bring its files to the disk."""
    return ("sh", "-c", 'cp -r "$0" "$1" && sync "$1"/*', source, target)


HELP, PLAN, INSPECT = "`--help`", "plan of 1188 tensors", "inspect of 1188 tensors"


def start_up() -> list[Case]:
    """What a user waits for before anything happens."""
    return [Case(HELP, (*CONVERT, "--help"))]


def full_header(base: Path) -> list[Case]:
    """Plan the conversion of the whole model, and inspect it; only headers are read."""
    return [
        Case(PLAN, (PYTHON, "-m", "bench.plan", str(base))),
        Case(INSPECT, (*CONVERT, "inspect", str(base))),
    ]


PEER_OURS, PEER_TUNIX, PEER_PEFT = "gemma-convert", "Tunix's saver", "PEFT's merge_and_unload"

PEER_LIMITS = (Limit(PEER_TUNIX, (PEER_OURS,)), Limit(PEER_PEFT, (PEER_OURS,)))


def peers(inputs: Path) -> list[Case]:
    """The same merge of the real Gemma 3 270M by others; see `bench.peers`."""
    base, run, peft, out = (str(inputs / name) for name in ("base", "run", "peft", "out"))
    ours = (*CONVERT, "orbax-to-hf", run, "--base", base, "--out", out, "--alpha", "16", "--quiet")
    peer = (PYTHON, "-m", "bench.peers")
    cases = [
        (PEER_OURS, ours),
        (PEER_TUNIX, (*peer, "tunix", base, run, out)),
        (PEER_PEFT, (*peer, "peft", base, peft, out)),
    ]
    return [Case(name, command, Path(out)) for name, command in cases]
