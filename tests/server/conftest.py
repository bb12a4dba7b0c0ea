"""The shared fixtures of the tests on real weights."""

from tests.real.fixtures import base, lora, merged_bfloat16, tokenize  # noqa: F401
