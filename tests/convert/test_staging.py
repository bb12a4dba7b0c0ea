"""Outputs appear whole or not at all, and what a run finished is there for the next one."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gemma_convert.convert.errors import OutputError
from gemma_convert.convert.writers import staging as module
from gemma_convert.convert.writers.journal import Journal
from gemma_convert.convert.writers.lock import locked
from gemma_convert.convert.writers.staging import already_made, staged_bytes, staging
from gemma_convert.convert.writers.swap import swap
from tests.checkpoints import snapshot

RUN = {"inputs": {"base": {"a": "sha256:1"}}, "settings": {"size": 5}}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """An output of an earlier run."""
    out = tmp_path / "out"
    (out / "folder").mkdir(parents=True)
    (out / "folder" / "file").write_text("old")
    return out


@contextmanager
def made(out: Path, *, force: bool = False) -> Iterator[Path]:
    """`staging` without a journal; ``file`` is the seal."""
    with staging(out, RUN, seal="file", force=force) as (directory, _):
        yield directory


def test_the_name_appears_when_all_is_written(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    with made(out) as directory:
        (directory / "folder").mkdir()
        (directory / "folder" / "file").write_text("new")
        (directory / "file").write_text("seal")
        assert directory.stat().st_dev == out.parent.stat().st_dev
        assert not out.exists()
    assert snapshot(tmp_path) == {
        "new": None,
        "new/out": None,
        "new/out/file": b"seal",
        "new/out/folder": None,
        "new/out/folder/file": b"new",
    }


def broken_run(
    out: Path, error: BaseException, *, finish: bool, identity: dict[str, Any] = RUN
) -> None:
    """A run that may finish a piece, ``one``, and then ends with ``error``."""
    with staging(out, identity, seal="file", force=True) as (directory, journal):
        if finish:
            (directory / "one").write_text("first")
            journal.finish("one", {"nbytes": 5, "digest": "ü"})
        (directory / "file").write_text("half")
        raise error


@pytest.mark.parametrize("error", [RuntimeError(), SystemExit(), OutputError("bad", "mend")])
@pytest.mark.parametrize("finished", [False, True])
def test_an_error_leaves_nothing(tmp_path: Path, error: BaseException, finished: bool) -> None:
    with pytest.raises(type(error)):
        broken_run(tmp_path / "out", error, finish=finished)
    assert snapshot(tmp_path) == {}


FULL = OSError(errno.ENOSPC, "No space left on device", "file")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyboardInterrupt(), "nothing was finished, so nothing is kept"),
        (FULL, "written: No space left on device (file); see to the free space and permissions "),
    ],
)
def test_an_interrupt_before_anything_is_finished_leaves_nothing(
    tmp_path: Path, error: BaseException, message: str
) -> None:
    with pytest.raises((KeyboardInterrupt, OutputError)) as caught:
        broken_run(tmp_path / "out", error, finish=False)
    assert message in told(caught.value)
    assert snapshot(tmp_path) == {}


def told(error: BaseException) -> str:
    """What the command line shows of an error."""
    return "; ".join([str(error), *getattr(error, "__notes__", [])])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), FULL])
def test_what_was_finished_is_there_for_the_next_run(tmp_path: Path, error: BaseException) -> None:
    out = tmp_path / "out"
    with pytest.raises((KeyboardInterrupt, OutputError)) as caught:
        broken_run(out, error, finish=True)
    assert "run the same command again, it goes on from there" in told(caught.value)
    assert not out.exists()
    assert staged_bytes(out) == len("first" + "half")
    with staging(out, RUN, seal="file", changed=fail) as (directory, journal):
        assert journal.pieces == {"one": {"nbytes": 5, "digest": "ü"}}
        assert (directory / "one").read_text() == "first"
        (directory / "file").write_text("whole")
    assert snapshot(tmp_path) == {"out": None, "out/file": b"whole", "out/one": b"first"}
    assert staged_bytes(out) == 0


def fail(before: Any) -> None:
    raise AssertionError(before)


def test_another_run_begins_anew_and_is_told(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        broken_run(tmp_path / "out", KeyboardInterrupt(), finish=True)
    seen: list[Any] = []
    other = {**RUN, "settings": {"size": 6}}
    with staging(tmp_path / "out", other, seal="file", changed=seen.append) as staged:
        assert staged[1].pieces == {}
        assert list(staged[0].iterdir()) == []
        (staged[0] / "file").write_text("whole")
    assert seen == [RUN]
    assert snapshot(tmp_path) == {"out": None, "out/file": b"whole"}


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_journal_that_was_cut_off(tmp_path: Path, cut: int) -> None:
    """A line that is not whole says nothing; what comes next is written over it."""
    path = tmp_path / "journal"
    journal = Journal(path, RUN)
    journal.finish("one", {"a": 1})
    journal.close()
    length = path.stat().st_size
    journal = Journal(path, RUN)
    journal.finish("two", {"b": [2, 3]})
    journal.close()
    os.truncate(path, max(length, path.stat().st_size - cut))
    journal = Journal(path, RUN)
    assert journal.pieces == {"one": {"a": 1}}
    journal.finish("three", {})
    journal.close()
    assert Journal.peek(path).pieces == {"one": {"a": 1}, "three": {}}
    assert Journal.peek(path).before == RUN


@pytest.mark.parametrize("swaps", [True, False])
def test_an_old_output_is_replaced_as_a_whole(
    old: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool
) -> None:
    if not swaps:
        monkeypatch.setattr(module, "swap", lambda one, other: False)
    with made(old, force=True) as directory:
        (directory / "file").write_text("new")
        assert (old / "folder" / "file").read_text() == "old"
    assert snapshot(old.parent) == {"out": None, "out/file": b"new"}


def test_an_error_keeps_the_old_output(old: Path) -> None:
    before = snapshot(old.parent)
    with pytest.raises(RuntimeError):
        broken_run(old, RuntimeError(), finish=True)
    assert snapshot(old.parent) == before


@pytest.mark.parametrize("swaps", [True, False])
@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_failing_rename_keeps_the_old_output(
    old: Path, monkeypatch: pytest.MonkeyPatch, failing: int, swaps: bool
) -> None:
    before, rename, calls = snapshot(old), Path.rename, iter(range(1, 9))

    def broken(self: Path, target: Path) -> Path:
        if next(calls) == failing:
            raise OSError(errno.EIO, "no")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", broken)
        if not swaps:
            patch.setattr(module, "swap", lambda one, other: False)
        elif failing > 1:
            return  # one rename and the swap
        with pytest.raises(OutputError, match=r"written: no; .*run the same command"):
            write(old)
    assert snapshot(old) == before
    assert not already_made(old, RUN, seal="file")
    write(old)
    assert snapshot(old.parent) == {"out": None, "out/file": b"new"}


def write(out: Path, *, force: bool = True) -> None:
    with made(out, force=force) as directory:
        (directory / "file").write_text("new")


class Killed(BaseException):
    """What stands for the end of the process: nothing is tidied up after it."""


POINTS = ("sync_tree", "sync", "swap", "_remove")


@pytest.mark.parametrize("swaps", [True, False])
@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("point", range(1, 30))
def test_the_end_of_the_process_while_the_output_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: int, exists: bool, swaps: bool
) -> None:
    """Before each step, one after the other: ``out`` is the old or the new one, or comes back."""
    out = tmp_path / "out"
    if exists:
        out.mkdir()
        (out / "file").write_text("old")
    steps = iter(range(1, 99))

    def step(function: Any) -> Any:
        def stepped(*args: Any, **kwargs: Any) -> Any:
            if next(steps) == point:
                raise Killed
            return function(*args, **kwargs)

        return stepped

    with monkeypatch.context() as patch:
        patch.setattr(module, "_leave", lambda place, journal, error: None)
        patch.setattr(module, "swap", (lambda one, other: False) if not swaps else swap)
        for name in POINTS:
            patch.setattr(module, name, step(getattr(module, name)))
        patch.setattr(Path, "rename", step(Path.rename))
        patch.setattr(Journal, "finish", step(Journal.finish))
        try:
            write(out)
        except Killed:
            pass
        else:
            assert point > 7, "there are fewer steps than there should be"
    if out.exists():
        assert (out / "file").read_text() in ("old", "new")
    elif exists:
        assert not swaps
    if already_made(out, RUN, seal="file"):
        assert (out / "file").read_text() == "new"
    else:
        assert not exists or (out / "file").is_file()
        write(out)
    assert snapshot(tmp_path) == {"out": None, "out/file": b"new"}


def test_another_output_in_place_of_the_one_that_was_made(tmp_path: Path) -> None:
    """Killed before it tidied up, and then someone changed the result: nothing is taken for it."""
    out = tmp_path / "out"
    write(out)
    with locked(tmp_path / ".out.partial"):
        journal = Journal(tmp_path / ".out.partial" / "journal", RUN)
        journal.finish("sealed", {"sha256": "0" * 64})
        journal.close()
    assert not already_made(out, RUN, seal="file")
    with pytest.raises(OutputError, match="was made by something else while this ran"):
        write(out, force=False)
    assert snapshot(tmp_path) == {"out": None, "out/file": b"new"}


def test_two_runs_exclude_each_other(tmp_path: Path) -> None:
    with made(tmp_path / "out") as directory:
        (directory / "file").write_text("first")
        message = rf"\.out\.partial: another run is writing there \(process {os.getpid()}\); wait"
        for function in (write, lambda out: already_made(out, RUN, seal="file")):
            with pytest.raises(OutputError, match=message):
                function(tmp_path / "out")
        write(tmp_path / "other")
    assert (tmp_path / "out" / "file").read_text() == "first"
    write(tmp_path / "out")


def test_a_lock_vanishes_with_its_process(tmp_path: Path) -> None:
    root = tmp_path / ".out.partial"
    root.mkdir()
    (root / "lock").write_text("12345")
    write(tmp_path / "out")
    assert snapshot(tmp_path) == {"out": None, "out/file": b"new"}


def test_a_lock_whose_directory_is_removed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last holder tidies up between our opening the file and locking it."""
    from gemma_convert.convert.writers import lock as lock_module

    flock, calls = lock_module.fcntl.flock, iter((True, False))

    def late(descriptor: int, operation: int) -> None:
        if next(calls):
            (tmp_path / "root" / "lock").unlink()
            (tmp_path / "root").rmdir()
        flock(descriptor, operation)

    monkeypatch.setattr(lock_module.fcntl, "flock", late)
    with locked(tmp_path / "root"):
        assert (tmp_path / "root" / "lock").read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_something_else_in_the_way(tmp_path: Path, kind: str) -> None:
    root = tmp_path / ".out.partial"
    (tmp_path / "elsewhere").mkdir()
    if kind == "file":
        root.write_text("mine")
    elif kind == "link":
        root.symlink_to("elsewhere")
    else:
        root.mkdir()
        (root / "mine").touch()
    before = snapshot(tmp_path)
    with pytest.raises(OutputError, match=r"\.out\.partial is in the way: .*; move it elsewhere"):
        write(tmp_path / "out")
    assert snapshot(tmp_path) == before


def test_a_link_is_replaced_and_what_it_points_to_is_kept(old: Path) -> None:
    link = old.parent / "link"
    link.symlink_to(old)
    write(link)
    assert not link.is_symlink()
    assert (link / "file").read_text() == "new"
    assert (old / "folder" / "file").read_text() == "old"


def test_swapping_exchanges_two_names(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").touch()
    (tmp_path / "b").write_text("b")
    if not swap(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this system cannot exchange two names in one step")
    assert snapshot(tmp_path) == {"a": b"b", "b": None, "b/x": b""}
    with pytest.raises(FileNotFoundError):
        swap(tmp_path / "a", tmp_path / "c")


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_modes_follow_the_umask(tmp_path: Path, mask: int) -> None:
    os.umask(mask)
    write(tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~mask
    assert (tmp_path / "out" / "file").stat().st_mode & 0o777 == 0o666 & ~mask
    assert os.umask(mask) == mask
