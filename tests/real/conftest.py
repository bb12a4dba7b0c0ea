"""The shared fixtures of the tests on real weights."""

from tests.real.fixtures import (  # noqa: F401
    base,
    lora,
    merged_bfloat16,
    merged_float32,
    prompts,
    tokenize,
    tunix,
)
