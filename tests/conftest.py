"""Settings of all tests."""

import os

import pytest
from hypothesis import settings

# The same examples every time, so that a failure is the change's and not the day's; no deadline,
# because the first example often imports or compiles something.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Have jax compile fast where models are tiny: what it compiles here runs once."""
    if "not real" in config.getoption("markexpr"):
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
