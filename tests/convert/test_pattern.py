"""Axis patterns: parsing, and the covers that turn boxes into ranges and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemma_convert.convert.errors import LayoutError
from gemma_convert.convert.pattern import Pattern, Ranges, Sizes, parse
from gemma_convert.convert.tensor import Box, extent
from tests.strategies import boxes

PATTERNS = ("d", "(k h) d", "d (n h)", "s k d h", "(s k h) d", "(s k) (d h)", "1 d", "d ()")


@st.composite
def sized(draw: st.DrawFn) -> tuple[Pattern, dict[str, int]]:
    """A pattern and sizes of its axes, one among them at times."""
    pattern = parse(draw(st.sampled_from(PATTERNS)))
    return pattern, {axis: draw(st.integers(1, 5)) for axis in pattern.axes}


@st.composite
def sized_box(draw: st.DrawFn) -> tuple[Pattern, dict[str, int], Box]:
    pattern, sizes = draw(sized())
    return pattern, sizes, draw(boxes(pattern.shape(sizes)))


@st.composite
def sized_ranges(draw: st.DrawFn) -> tuple[Pattern, dict[str, int], Ranges]:
    pattern, sizes = draw(sized())
    listed = draw(boxes(tuple(sizes[axis] for axis in pattern.axes)))
    return pattern, sizes, dict(zip(pattern.axes, listed, strict=True))


def element_axes(pattern: Pattern, sizes: Sizes) -> dict[str, np.ndarray]:
    """For each axis an array of the stored shape that holds every element's index on it."""
    shape = pattern.shape(sizes)
    indices = np.indices([sizes[axis] for axis in pattern.axes])
    return {axis: index.reshape(shape) for axis, index in zip(pattern.axes, indices, strict=True)}


@given(sized_box())
def test_ranges_are_the_smallest_that_cover_a_box(
    case: tuple[Pattern, dict[str, int], Box],
) -> None:
    """By brute force: least and greatest index of the box's elements on every axis."""
    pattern, sizes, box = case
    inside = tuple(slice(*pair) for pair in box)
    found = {axis: index[inside] for axis, index in element_axes(pattern, sizes).items()}
    expected = {axis: (index.min(), index.max() + 1) for axis, index in found.items()}
    assert pattern.ranges(box, sizes) == expected


@given(sized_ranges())
def test_a_box_is_the_smallest_that_covers_ranges(
    case: tuple[Pattern, dict[str, int], Ranges],
) -> None:
    pattern, sizes, ranges = case
    inside = np.ones(pattern.shape(sizes), bool)
    for axis, index in element_axes(pattern, sizes).items():
        inside &= (index >= ranges[axis][0]) & (index < ranges[axis][1])
    expected = tuple((int(found.min()), int(found.max()) + 1) for found in np.nonzero(inside))
    assert pattern.box(ranges, sizes) == expected


@given(sized_box())
def test_the_cover_of_a_cover_grows_no_further(
    case: tuple[Pattern, dict[str, int], Box],
) -> None:
    pattern, sizes, box = case
    ranges = pattern.ranges(box, sizes)
    outer = pattern.box(ranges, sizes)
    assert all(a <= c and d <= b for (a, b), (c, d) in zip(outer, box, strict=True))
    assert pattern.ranges(outer, sizes) == ranges


def test_shape_and_axes() -> None:
    pattern = parse("s (k h) 1 d")
    sizes = {"s": 2, "k": 3, "h": 7, "d": 10}
    assert pattern.axes == ("s", "k", "h", "d")
    assert pattern.groups == (("s",), ("k", "h"), (), ("d",))
    assert pattern.shape(sizes) == (2, 21, 1, 10)


def test_whole_heads_are_exact_and_parts_of_two_heads_are_covered() -> None:
    pattern, sizes = parse("(k h) d"), {"k": 3, "h": 7, "d": 10}
    assert pattern.ranges(((7, 14), (0, 10)), sizes) == {"k": (1, 2), "h": (0, 7), "d": (0, 10)}
    covered = pattern.ranges(((6, 8), (2, 3)), sizes)
    assert covered == {"k": (0, 2), "h": (0, 7), "d": (2, 3)}
    assert extent(pattern.box(covered, sizes)) == (14, 1)


def test_describe_gives_symbols_and_numbers() -> None:
    assert parse("(k h) d").describe({"k": 3, "h": 7, "d": 10}) == "(k h) d = (3 7) 10"
    assert parse("1 d").describe({"d": 10}) == "1 d = 1 10"
    assert parse("").describe({}) == "a scalar"


def test_a_pattern_is_parsed_once() -> None:
    assert parse("n d h") is parse("n d h")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("... d", "axis pattern '... d' has an ellipsis; name every axis"),
        ("2 d", "axis pattern '2 d' has a number for an axis; name every axis"),
        (
            "d d",
            "axis pattern 'd d': Indexing expression contains duplicate dimension \"d\"; "
            "use einops' syntax",
        ),
        ("k h) d", "axis pattern 'k h) d': Brackets are not balanced; use einops' syntax"),
        ("k-h", "axis pattern 'k-h': Unknown character '-'; use einops' syntax"),
    ],
)
def test_what_is_no_pattern_is_refused(text: str, message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        parse(text)
    assert str(caught.value) == message
