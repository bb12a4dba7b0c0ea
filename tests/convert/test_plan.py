"""The proof that a plan accounts for every source tensor exactly once."""

from __future__ import annotations

import numpy as np
import pytest

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import LayoutError
from gemma_convert.convert.plan import make_plan
from gemma_convert.convert.tensor import ArrayTensor, cast
from gemma_convert.surgery.delta import Merged
from tests.checkpoints import BF16, F32, memory

SOURCE = memory({name: np.ones((2, 3), F32) for name in "abc"}, source="run")


def target(*names: str) -> Checkpoint:
    return SOURCE.replace(tensors={name: SOURCE[name] for name in names})


def test_all_read() -> None:
    plan = make_plan(target("a", "b", "c"), [SOURCE])
    assert plan.actions == dict.fromkeys("abc", "copied")
    assert plan.counts == {"copied": 3, "dropped": 0}


def test_read_or_dropped() -> None:
    plan = make_plan(target("a", "b"), [SOURCE], {id(SOURCE["c"]): "not wanted"})
    assert plan.dropped == {"c": "not wanted"}
    assert plan.counts == {"copied": 2, "dropped": 1}


def test_a_tensor_that_nobody_reads() -> None:
    with pytest.raises(LayoutError) as caught:
        make_plan(target("a", "c"), [SOURCE])
    assert str(caught.value) == (
        "run: b [2, 3] would be neither read nor dropped; nothing was written; please report this"
    )


def test_a_tensor_both_read_and_dropped() -> None:
    with pytest.raises(LayoutError, match=r"run: c \[2, 3\] would be both read and dropped"):
        make_plan(target("a", "b", "c"), [SOURCE], {id(SOURCE["c"]): "not wanted"})


def test_every_source_is_accounted_for() -> None:
    other = memory({"x": np.ones(1, F32)}, source="base")
    with pytest.raises(LayoutError, match=r"base: x \[1\] would be neither"):
        make_plan(target("a", "b", "c"), [SOURCE, other])


def test_a_name_that_two_sources_have() -> None:
    """One is read, the other left out: told apart by what they are, not by what they are called."""
    other = memory({name: np.ones((2, 3), F32) for name in "cd"}, source="base")
    reasons = {id(tensor): "not wanted" for tensor in other.values()}
    plan = make_plan(target("a", "b", "c"), [SOURCE, other], reasons)
    assert plan.dropped == {"c of base": "not wanted", "d": "not wanted"}
    with pytest.raises(LayoutError, match=r"base: c \[2, 3\] would be neither"):
        make_plan(target("a", "b", "c"), [SOURCE, other], {id(other["d"]): "not wanted"})


def test_reading_goes_through_all_steps_and_the_greatest_change_names_the_action() -> None:
    delta = cast(SOURCE["b"], BF16)
    merged = Merged(cast(SOURCE["a"], BF16), (delta,), BF16)
    made = SOURCE.replace(tensors={"m": merged, "c": SOURCE["c"]})
    plan = make_plan(made, [SOURCE])
    assert plan.actions == {"m": "merged", "c": "copied"}
    made = SOURCE.replace(tensors={"x": cast(SOURCE["a"], BF16), "b": SOURCE["b"]})
    with pytest.raises(LayoutError, match="run: c"):
        make_plan(made, [SOURCE])


def test_a_tensor_of_the_same_values_is_not_the_same_tensor() -> None:
    copy = SOURCE.replace(tensors={**SOURCE.tensors, "c": ArrayTensor(np.ones((2, 3), F32))})
    with pytest.raises(LayoutError, match="run: c"):
        make_plan(copy, [SOURCE])
