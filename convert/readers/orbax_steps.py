"""Where the tree to read lies: the checkpoint's root, its steps, and the items of a step.

The words are Orbax's. A root holds steps (``10/``, ``step_10/``, ``prefix_000010/``), a step holds
items (``model_params/``, ``optimizer_state/``), an item is one tree of arrays with a ``_METADATA``
file. A tree may also stand alone, or be the whole of a step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers.jsonfile import read_object

TREE_FILE = "_METADATA"
STEP_FILE = "_CHECKPOINT_METADATA"
COMMIT_FILE = "commit_success.txt"
TEMPORARY = ".orbax-checkpoint-tmp"
"""What the name of an unfinished save holds (orbax 0.12.8, _src/path/atomicity_types.py)."""

FIRST_ITEM = "model_params"
OTHER_ITEMS = ("params", "items", "default", "state", "model")
"""The item read when none is asked for: the first, else the only one there of the others."""

_STEP_NAME = re.compile(r"(?:.*_)?([0-9]{1,18})")


@dataclass(frozen=True)
class Location:
    """A tree to read.

    Attributes:
        tree: The directory with `TREE_FILE`.
        holder: The step's directory, which may hold `STEP_FILE`; the tree itself if it stands
            alone.
        step: The step's number, if it has one.
        item: The item's name; empty for a tree that stands alone.
        items: The step's items, sorted.
        steps: The finished steps that were there to choose from.
        notes: What was passed over.
    """

    tree: Path
    holder: Path
    step: int | None = None
    item: str = ""
    items: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def is_orbax(path: Path) -> bool:
    """Whether ``path`` is a root, a step or a tree, finished or not."""
    return _is_tree(path) or (path / STEP_FILE).is_file() or bool(_items(path) or _steps(path)[0])


def find_tree(path: Path, step: int | None = None, item: str | None = None) -> Location:
    """Find the tree meant by a root, step or tree directory.

    Args:
        path: The directory.
        step: The step wanted; by default a root's newest finished one.
        item: The item wanted; by default see `FIRST_ITEM`.

    Raises:
        InputError: Unfinished, missing or ambiguous; the message lists what is there.
    """
    _refuse_unfinished(path)
    if _is_tree(path):
        return _alone(path, step, item)
    if not (path / STEP_FILE).is_file():
        steps, unfinished = _steps(path)
        if steps or unfinished:
            return _in_root(path, steps, unfinished, step, item)
    return _in_step(path, _own_step(path, step), item)


def is_finished(path: Path) -> bool:
    """Whether Orbax finished writing ``path``, an existing directory.

    Orbax 0.12.8 decides by the name on a local disk, where finishing is a rename, and by
    `COMMIT_FILE` in a bucket. A save copied from a bucket has only the second sign, and not every
    local save has that file; but both write the commit time into `STEP_FILE`. So: the name (the
    directory's own and its holder's), and either of the two signs wherever there is a `STEP_FILE`.
    """
    if any(TEMPORARY in name for name in path.resolve().parts[-2:]):
        return False
    if not (path / STEP_FILE).is_file() or (path / COMMIT_FILE).is_file():
        return True
    return read_object(path / STEP_FILE).get("commit_timestamp_nsecs") is not None


def _in_root(
    root: Path, steps: dict[int, Path], unfinished: list[str], step: int | None, item: str | None
) -> Location:
    there = f"finished steps there: {_listed(sorted(steps))}"
    skipped = f"unfinished: {', '.join(unfinished)}" if unfinished else ""
    if not steps:
        raise InputError(f"{root} holds no finished step; {skipped}", "save it again")
    if step is not None and step not in steps:
        raise InputError(
            f"{root} has no finished step {step}; {there}" + (f"; {skipped}" if skipped else ""),
            "give one of these",
        )
    chosen = max(steps) if step is None else step
    found = _in_step(steps[chosen], chosen, item)
    notes = (f"skipped {skipped} in {root}",) if skipped else ()
    return replace(found, step=chosen, steps=tuple(sorted(steps)), notes=notes + found.notes)


def _in_step(path: Path, step: int | None, item: str | None) -> Location:
    steps = () if step is None else (step,)
    if _is_tree(path):
        return _whole(path, step, item)
    items = _items(path)
    if not items:
        raise _no_tree(path)
    if item is None:
        item = _default_item(path, items)
    if item not in items:
        raise InputError(
            f"{path} has no item {item!r}; items there: {_listed(items)}", "give one of these"
        )
    others = [name for name in items if name != item]
    notes = (f"read the item {item}; left alone: {', '.join(others)}",) if others else ()
    return Location(path / item, path, step, item, tuple(items), steps, notes)


def _alone(path: Path, step: int | None, item: str | None) -> Location:
    """A tree given by its own path: an item of a step, or one that belongs to no step."""
    holder = path.resolve().parent
    if not (holder / STEP_FILE).is_file():
        return _whole(path, _own_step(path, step), item)
    _refuse_unfinished(holder)
    name = path.resolve().name
    if item not in (None, name):
        raise _no_items(path, item)
    return replace(_in_step(holder, _own_step(holder, step), name), tree=path, notes=())


def _whole(path: Path, step: int | None, item: str | None) -> Location:
    """A tree that stands alone or is the whole of a step."""
    if item is not None:
        raise _no_items(path, item)
    return Location(path, path, step, steps=() if step is None else (step,))


def _no_items(path: Path, item: str | None) -> InputError:
    return InputError(
        f"{path} is one tree, it has no item {item!r}", "leave the item out, or give the step"
    )


def _refuse_unfinished(path: Path) -> None:
    if not is_finished(path):
        raise InputError(
            f"{path} is an unfinished Orbax save", "give a finished step, or save it again"
        )


def _default_item(path: Path, items: list[str]) -> str:
    if FIRST_ITEM in items:
        return FIRST_ITEM
    known = [name for name in OTHER_ITEMS if name in items]
    if len(known) != 1:
        raise InputError(
            f"{path} has no single item of weights; items there: {_listed(items)}",
            f"give the path of the one to read, such as {path / items[0]}",
        )
    return known[0]


def _no_tree(path: Path) -> InputError:
    names = sorted(child.name for child in path.iterdir()) if path.is_dir() else []
    if any(TEMPORARY in name for name in names):
        return InputError(
            f"{path} is unfinished: it holds only {', '.join(names)}", "give another step"
        )
    if "manifest.ocdbt" in names or "checkpoint" in names:
        return InputError(
            f"{path} holds Orbax data but no {TREE_FILE}: it was cut short while copying, or is of "
            "a format older than Orbax 0.5",
            "copy it again, or restore and save it again with orbax-checkpoint",
        )
    return InputError(
        f"{path} holds no Orbax tree: no {TREE_FILE} in it or in a folder of it",
        "give the checkpoint's root, a step or an item",
    )


def _own_step(path: Path, wanted: int | None) -> int | None:
    """The number of a step's own directory, which must be the step wanted, if one is."""
    name = path.resolve().name
    # A tree that stands alone may be called gemma_2: only a bare number is a step for sure.
    sure = name.isdecimal() or ((path / STEP_FILE).is_file() and not _is_tree(path))
    match = _STEP_NAME.fullmatch(name) if sure else None
    number = int(match[1]) if match else None
    if wanted is not None and wanted != number:
        raise InputError(
            f"{path} is not step {wanted}", "give the checkpoint's root, or leave the step out"
        )
    return number


def _is_tree(path: Path) -> bool:
    return (path / TREE_FILE).is_file()


def _items(path: Path) -> list[str]:
    if not path.is_dir():
        return []
    return sorted(
        child.name for child in path.iterdir() if _is_tree(child) and TEMPORARY not in child.name
    )


def _steps(root: Path) -> tuple[dict[int, Path], list[str]]:
    """A root's finished steps by number, and the names of its unfinished ones."""
    steps: dict[int, Path] = {}
    unfinished: list[str] = []
    for child in sorted(root.iterdir()) if root.is_dir() else []:
        match = _STEP_NAME.fullmatch(child.name.split(TEMPORARY)[0])
        if not match or not child.is_dir():
            continue
        if not is_finished(child):
            unfinished.append(child.name)
        elif _is_tree(child) or (child / STEP_FILE).is_file() or _items(child):
            if int(match[1]) in steps:
                raise InputError(
                    f"{root} holds step {int(match[1])} twice: {steps[int(match[1])].name} and "
                    f"{child.name}",
                    "give the one to read",
                )
            steps[int(match[1])] = child
    return steps, unfinished


def _listed(values: list[int] | list[str]) -> str:
    return ", ".join(map(str, values)) or "none"
