"""A limit as an option takes it: a number that can be compared with."""

from __future__ import annotations

import math
from typing import Any

import click


class Limit(click.ParamType[float]):
    """A number of 0 or more; infinity is no limit.

    Args:
        most: The largest that makes sense; None for any.
    """

    name = "number"

    def __init__(self, most: float | None = None) -> None:
        self.most = most

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Parse ``value``; nothing is beyond a limit of NaN, so that is none."""
        try:
            number = float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number", param, ctx)
        if math.isnan(number) or number < 0 or (self.most is not None and number > self.most):
            span = "0 or more" if self.most is None else f"from 0 to {self.most:g}"
            self.fail(f"{value!r} is not a number {span}", param, ctx)
        return number
