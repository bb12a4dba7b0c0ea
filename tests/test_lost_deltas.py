"""Numbers that a merge must not get wrong: one rounding, honest counts, no NaN."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.jobs import orbax_to_hf
from gemma_convert.convert.ledger import make_ledger
from gemma_convert.convert.tensor import Array, ArrayTensor
from gemma_convert.surgery.adapters.adapter import Pair
from gemma_convert.surgery.delta import Merged
from tests import lora_oracle
from tests.checkpoints import (
    ALPHA,
    BF16,
    F32,
    GEMMA3,
    base_arrays,
    factor_arrays,
    memory,
    read_hf,
    run_cli,
    snapshot,
    write_base,
    write_run,
)

Q = "layers.1.attn.q_einsum.w"
HF_Q = "model.layers.1.self_attn.q_proj.weight"
SHAPE = (42, 10)


def refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def strict(text: str) -> dict[str, Any]:
    """JSON as the standard has it: no NaN, no Infinity."""
    value: dict[str, Any] = json.loads(text, parse_constant=refuse_constant)
    return value


def ledger_of(out: Path) -> dict[str, Any]:
    return strict((out / "conversion.json").read_text(encoding="utf-8"))


def q_factors(delta: float, dtype: np.dtype[Any] = F32) -> dict[str, Array]:
    """Factors that add ``delta`` to every weight of the second layer's queries at alpha 2."""
    a, b = np.ones((10, 2), dtype), np.zeros((2, 6, 7), dtype)
    b[0] = delta
    return {f"{Q}_lora_a": a, f"{Q}_lora_b": b}


def write(
    directory: Path, base: dict[str, Array], factors: dict[str, Array], metadata: Any = None
) -> list[Any]:
    """The inputs, and the words that merge them."""
    write_base(directory / "base", GEMMA3, base)
    write_run(directory / "run", factors, metadata)
    words = ["orbax-to-hf", directory / "run", "--base", directory / "base"]
    return [*words, "--out", directory / "out"]


def told(capsys: pytest.CaptureFixture[str], message: str) -> None:
    captured = capsys.readouterr()
    assert re.fullmatch(f"error: [^\n]*{message}[^\n]*\n", captured.err), captured.err
    assert captured.out == ""


def test_a_weight_that_only_the_cast_moved_did_not_change() -> None:
    """The first weight moves with its delta, the second by the cast to bfloat16 alone."""
    weight = np.array([1 + 2**-9, 1 + 2**-9, 1.0], F32)
    delta = np.array([0.5, 2**-20, 2**-20], F32)
    merged = Merged(ArrayTensor(weight), (ArrayTensor(delta),), BF16)
    assert merged.numpy().tolist() == [1.5, 1.0, 1.0]
    assert (merged.survival.changed, merged.survival.size) == (1, 3)


def test_a_cast_alone_is_not_counted_in_the_ledger(tmp_path: Path) -> None:
    base = base_arrays(GEMMA3, "model.", F32)
    base[HF_Q] = np.full(SHAPE, 1 + 2**-9, F32)
    words = write(tmp_path, base, {**factor_arrays(GEMMA3, F32), **q_factors(2**-20)})
    options = ["--alpha", 2, "--dtype", "bfloat16", "--allow-unchanged", "--quiet"]
    assert run_cli(*words, *options) == 0
    ledger = ledger_of(tmp_path / "out")
    (adapter,) = ledger["adapters"]
    assert ledger["survival_by_tensor"][HF_Q]["weights_changed"] == 0
    assert adapter["unchanged"] == [Q]
    assert adapter["pairs_changed"] == adapter["pairs_found"] - 1


def test_one_rounding_when_the_output_is_narrower() -> None:
    """Rounded to bfloat16 before the sum, the weight would lose the 2^-9 that decides."""
    weight = np.array([1 + 2**-9, -1 - 2**-9, 3 + 2**-8], F32)
    delta = np.array([2**-9 + 2**-10, -(2**-9) - 2**-10, 2**-8 + 2**-9], F32)
    exact = lora_oracle.rounded_to_bfloat16(weight.astype(np.float64) + delta)
    early = lora_oracle.rounded_to_bfloat16(
        weight.astype(BF16).astype(np.float64) + delta.astype(np.float64)
    )
    assert (exact != early).all()
    found = Merged(ArrayTensor(weight), (ArrayTensor(delta),), BF16).numpy()
    assert found.dtype == BF16
    assert found.tobytes() == exact.tobytes()


def test_one_rounding_through_the_command_line(tmp_path: Path) -> None:
    base = base_arrays(GEMMA3, "model.", F32)
    base[HF_Q] = np.full(SHAPE, 1 + 2**-9, F32)
    words = write(tmp_path, base, q_factors(2**-9 + 2**-10))
    assert run_cli(*words, "--alpha", 2, "--dtype", "bfloat16", "--quiet") == 0
    found = read_hf(tmp_path / "out")[HF_Q]
    assert found.dtype == BF16
    assert (found.astype(F32) == 1 + 2**-7).all()


@pytest.fixture
def vanishing(tmp_path: Path) -> list[Any]:
    """Words of a merge in which the queries' delta is far below a unit of the weights."""
    base = base_arrays(GEMMA3, "model.")
    base[HF_Q] = np.ones(SHAPE, BF16)
    factors = {**factor_arrays(GEMMA3), **q_factors(2**-20, BF16)}
    return [*write(tmp_path, base, factors), "--alpha", 2]


@pytest.mark.parametrize("options", [[], ["--quiet"], ["--json"]])
def test_a_pair_that_vanishes_is_refused(
    tmp_path: Path, vanishing: list[Any], options: list[str], capsys: Any
) -> None:
    before = snapshot(tmp_path)
    assert run_cli(*vanishing, *options) == 1
    message = (
        rf"run/0/model_params: {re.escape(Q)}: the delta vanishes in the rounding to the stored "
        r"dtype \(11 of 12 pairs change the weights\); nothing was kept; merge with "
        "--dtype float32, or accept it with --allow-unchanged"
    )
    told(capsys, message)
    assert snapshot(tmp_path) == before


def test_a_pair_that_vanishes_can_be_allowed(
    tmp_path: Path, vanishing: list[Any], capsys: Any
) -> None:
    assert run_cli(*vanishing, "--allow-unchanged") == 0
    warning = "warning: 1 pairs change no weight; what vanished in the rounding "
    assert warning in capsys.readouterr().err
    assert ledger_of(tmp_path / "out")["adapters"][0]["unchanged"] == [Q]
    assert run_cli(*vanishing, "--allow-unchanged", "--json", "--force") == 0
    captured = capsys.readouterr()
    assert warning in captured.err
    assert strict(captured.out)["adapters"][0]["unchanged"] == [Q]
    assert strict(captured.out) == ledger_of(tmp_path / "out")


def test_a_pair_that_vanishes_survives_in_float32(tmp_path: Path, vanishing: list[Any]) -> None:
    assert run_cli(*vanishing, "--dtype", "float32", "--quiet") == 0
    adapter = ledger_of(tmp_path / "out")["adapters"][0]
    assert (adapter["unchanged"], adapter["pairs_changed"]) == ([], 12)


@pytest.mark.parametrize(("alpha", "scale"), [("1e-45", "5e-46"), ("1e39", r"5e\+38")])
def test_an_alpha_whose_scale_is_no_float32(
    tmp_path: Path, alpha: str, scale: str, capsys: Any
) -> None:
    """The one becomes 0 there, the other infinite."""
    words = write(tmp_path, base_arrays(GEMMA3, "model."), q_factors(1.0))
    before = snapshot(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_cli(*words, "--alpha", alpha) == 1
    message = f"{re.escape(Q)}: alpha / r = {scale} is no float32; pass the alpha of the training"
    told(capsys, message)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("options", [[], ["--dtype", "float32"], ["--quiet"]])
def test_results_that_are_no_numbers(tmp_path: Path, options: list[str], capsys: Any) -> None:
    """Scale 5e37, factors up to 100: the delta is beyond float32."""
    words = write(tmp_path, base_arrays(GEMMA3, "model."), q_factors(100.0))
    before = snapshot(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_cli(*words, "--alpha", "1e38", *options) == 1
    told(capsys, f"{re.escape(HF_Q)}: 420 merged values are NaN or infinite; is alpha right, and")
    assert snapshot(tmp_path) == before


def test_a_base_that_is_no_numbers(tmp_path: Path, capsys: Any) -> None:
    base = base_arrays(GEMMA3, "model.")
    base[HF_Q][3, 4] = np.nan
    words = write(tmp_path, base, factor_arrays(GEMMA3))
    before = snapshot(tmp_path)
    assert run_cli(*words, "--alpha", 5) == 1
    told(capsys, f"{re.escape(HF_Q)}: 1 merged values are NaN or infinite; .* the base's own value")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("alpha", ["5", "1e30"])
def test_the_ledger_is_strict_json(tmp_path: Path, alpha: str, capsys: Any) -> None:
    """Squares of the larger alpha's deltas are beyond float32, the deltas are not."""
    words = write(tmp_path, base_arrays(GEMMA3, "model."), factor_arrays(GEMMA3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_cli(*words, "--alpha", alpha, "--quiet") == 0, capsys.readouterr().err
    assert 0 < ledger_of(tmp_path / "out")["survival"]["relative_error"] < 0.5
    assert capsys.readouterr().err == ""


def test_a_delta_lost_altogether_is_an_error_of_one(tmp_path: Path) -> None:
    """Its squares are below float32, which must not look like no error at all."""
    base = base_arrays(GEMMA3, "model.")
    words = write(tmp_path, base, q_factors(2.0**-100))
    assert run_cli(*words, "--alpha", 2, "--allow-unchanged", "--quiet") == 0
    ledger = ledger_of(tmp_path / "out")
    assert ledger["adapters"][0]["unchanged"] == [Q]
    assert ledger["survival"]["relative_error"] == 1.0


def test_pairs_applied_are_counted() -> None:
    """A pair that no target reads is found, and neither applied nor changed."""
    base = memory(base_arrays(GEMMA3, "model."), config=GEMMA3, source="base")
    run = memory(factor_arrays(GEMMA3), source="run", format="orbax")
    job = orbax_to_hf(run, base, alpha=ALPHA)
    (adapter,) = job.adapters
    idle = Pair(ArrayTensor(np.ones((10, 2), F32)), ArrayTensor(np.ones((2, 10), F32)))
    pairs, scales = {**adapter.pairs, "idle": idle}, {**adapter.scales, "idle": 1.0}
    job = replace(job, adapters=(replace(adapter, pairs=pairs, scales=scales),))
    for tensor in job.plan.target.values():
        tensor.numpy()
    (found,) = make_ledger(job, [], 1.0)["adapters"]
    assert [found[f"pairs_{x}"] for x in ("found", "applied", "changed")] == [13, 12, 12]
    assert found["unchanged"] == ["idle"]
