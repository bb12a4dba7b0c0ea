"""Outcomes of every check, some failed, for tests of the report."""

from __future__ import annotations

import numpy as np

from gemma_convert.convert.validation.diff import diff
from gemma_convert.convert.validation.engines.base import Logits
from gemma_convert.convert.validation.metrics import compare
from gemma_convert.convert.validation.result import Finding, Result
from gemma_convert.convert.validation.roundtrip import validate_roundtrip
from tests.checkpoints import GEMMA3, base_arrays, memory
from tests.planted_faults import CONFIG, FAULTS


def results() -> list[Result]:
    """One of each check, some failed."""
    right = base_arrays(CONFIG, "model.")
    wrong = FAULTS["k and v swapped in one layer"].spoil(right)
    random = np.random.default_rng(0)
    a, b = (Logits(random.normal(size=(9, 31)), random.normal(size=(4, 9, 5))) for _ in "ab")
    comparison = compare("short <b>", [2, *range(5, 13)], list(range(9)), a, b)
    logits = Result(
        "logits",
        "A against B",
        (Finding("prompt short, layer 0", "mean KL 1 & more <script>alert(1)</script>"),),
        (("A", "x"),),
        {"prompts": [comparison.json()]},
    )
    merged = Result(
        "merged",
        "out",
        (),
        (("merged", "2 tensors"),),
        {
            "tensors": {
                f"model.layers.{i}.self_attn.q_proj.weight": {"relative_error": 0.1 * (i + 1)}
                for i in range(2)
            }
        },
    )
    hf = memory(base_arrays(GEMMA3, "model."), config=GEMMA3)
    return [diff(memory(right), memory(wrong)), merged, validate_roundtrip(hf), logits]
