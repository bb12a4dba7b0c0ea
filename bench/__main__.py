"""Measure the conversions next to the limit of the disk, tensorstore and other tools.

    python -m bench --dir /some/disk --layers 6 --write docs/benchmarks.md

Makes its inputs in ``--dir`` (three times the base: 24 GB for 6 layers) unless they are there, runs
every case in turn, and prints medians and ratios.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import cases, table
from bench.measure import PYTHON, measure


def main() -> None:
    """Make inputs, measure, print."""
    options = arguments()
    inputs = options.dir.resolve() / f"{options.layers}-layers"
    subprocess.run(
        [PYTHON, "-m", "bench.inputs", str(inputs), "--layers", str(options.layers)], check=True
    )
    used = measure(cases.start_up(), max(5, options.rounds))
    used |= measure(cases.conversions(inputs), options.rounds)
    sections = {f"{options.layers} layers, {size(inputs / 'base')}": used}
    if options.full_header:
        full = options.dir.resolve() / "full-header"
        subprocess.run([PYTHON, "-m", "bench.sparse", str(full)], check=True)
        listed = cases.full_header(full / "base")
        sections["All 60 layers, headers alone"] = measure(listed, max(5, options.rounds))
    if options.peers:
        small = options.dir.resolve() / "peers"
        subprocess.run([PYTHON, "-m", "bench.peers", "inputs", str(small)], check=True)
        found = measure(cases.peers(small), options.rounds)
        sections[f"Gemma 3 270M, {size(small / 'base')}"] = found
    report(options, sections)


def report(options: Any, sections: dict[str, table.Used]) -> None:
    """Print the results, and write them into a document if asked to."""
    limits = (*cases.LIMITS, *cases.PEER_LIMITS)
    machine = table.machine(options.dir.resolve())
    text = f"{machine}\n\nMedians of {options.rounds} rounds, all cases in turn."
    values: dict[str, Any] = {"machine": machine, "rounds": options.rounds}
    for title, used in sections.items():
        text += f"\n\n**{title}**\n\n{table.usages(used)}"
        found = table.ratio_values(used, limits)
        if found:
            text += f"\n\n{table.ratios(used, limits)}"
        runs = {name: [asdict(one) for one in listed] for name, listed in used.items()}
        values[title] = {"runs": runs, "ratios": found}
    print(json.dumps(values, indent=2) if options.json else text)
    if options.write is not None:
        document = options.write.read_text(encoding="utf-8")
        options.write.write_text(table.replace_between(document, text), encoding="utf-8")


def size(directory: Path) -> str:
    """The bytes of the files in a directory, for people."""
    return f"{sum(path.stat().st_size for path in directory.iterdir()) / 1e9:.2f} GB"


def arguments() -> Any:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--dir", type=Path, required=True, help="where inputs and outputs lie")
    parser.add_argument("--layers", type=int, default=6, help="of the base (default 6; 60 is all)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each case (default 3)")
    parser.add_argument("--full-header", action="store_true", help="plan and inspect 1188 tensors")
    parser.add_argument("--peers", action="store_true", help="Tunix and PEFT on Gemma 3 270M")
    parser.add_argument("--json", action="store_true", help="print every run as JSON")
    parser.add_argument("--write", type=Path, metavar="DOC", help="write the tables into DOC")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
