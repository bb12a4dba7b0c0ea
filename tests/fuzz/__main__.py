"""A longer hunt: ``python -m tests.fuzz --seed 7 --times 20 [TARGET ...]`` prints every failure."""

from __future__ import annotations

import argparse
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from tests.fuzz.guard import HangError, bounded_memory
from tests.fuzz.targets import TARGETS, Fuzzed


def hunt(name: str, seed: int, times: float) -> Counter[str]:
    """Try inputs of one target; failures by where they were raised."""
    failures: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as directory:
        fuzzed = Fuzzed(name, Path(directory))
        count, accepted, start = int(TARGETS[name].count * times), 0, time.monotonic()
        with bounded_memory():
            for number in range(count):
                try:
                    accepted += fuzzed.try_input(number, seed)
                except (Exception, HangError) as error:
                    frame = traceback.extract_tb(error.__traceback__)[-1]
                    mine = [
                        f
                        for f in traceback.extract_tb(error.__traceback__)
                        if "gemma_convert" in f.filename
                    ]
                    at = mine[-1] if mine else frame
                    where = (
                        f"{type(error).__name__} at {at.filename}:{at.lineno}: {str(error)[:150]}"
                    )
                    if where not in failures:
                        print(f"{name} --seed {seed} #{number}: {where}", flush=True)
                    failures[where] += 1
        took = time.monotonic() - start
    failed = sum(failures.values())
    print(f"{name}: {count} inputs, {accepted} accepted, {failed} failed, {took:.1f} s", flush=True)
    return failures


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", help=", ".join(TARGETS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--times", type=float, default=1.0)
    given = parser.parse_args()
    for name in given.targets or TARGETS:
        hunt(name, given.seed, given.times)


main()
