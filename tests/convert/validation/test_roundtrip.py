"""Round trips in memory: exact through every layout, and what is not exact is told."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import InputError
from gemma_convert.convert.job import Job
from gemma_convert.convert.jobs import convert
from gemma_convert.convert.layouts import LAYOUTS
from gemma_convert.convert.tensor import Array, Box, Tensor
from gemma_convert.convert.validation import roundtrip
from gemma_convert.convert.validation.roundtrip import validate_roundtrip
from tests.checkpoints import (
    BF16,
    CONFIGS,
    F32,
    GEMMA3,
    GEMMA4,
    USUAL_PREFIX,
    arrays,
    base_arrays,
    factor_arrays,
    memory,
    run_cli,
    tunix_arrays,
    write_base,
)
from tests.planted_faults import CONFIG

TREES = [
    ("deepmind", "transformer/", "transformer/"),
    ("deepmind", "transformer/", ""),
    ("maxtext", "params/params/", "params/params/"),
    ("maxtext", "params/params/", "base/"),
]
"""Layout, and the prefix that is written here, and the one that a tree may have."""

OTHERS = [name for name in LAYOUTS if name != "hf"]


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("family", CONFIGS)
def test_every_layout_is_exact(family: str, dtype: np.dtype[np.generic]) -> None:
    config = CONFIGS[family]
    source = memory(base_arrays(config, USUAL_PREFIX[family], dtype), config=config)
    result = validate_roundtrip(source)
    assert result.passed, result.findings
    assert [*result.data["via"]] == OTHERS
    by_via = {via: {t["name"] for t in result.data["tensors"] if t["via"] == via} for via in OTHERS}
    assert all(names == set(source) for names in by_via.values())


def test_digests_are_those_of_the_values() -> None:
    values = base_arrays(GEMMA3, "model.")
    result = validate_roundtrip(memory(values, config=GEMMA3), ["tunix"])
    for row in result.data["tensors"]:
        expected = hashlib.sha256(values[row["name"]].tobytes()).hexdigest()
        assert (row["sha256"], row["sha256_back"]) == (expected, expected)


def test_experts_and_a_source_in_another_layout() -> None:
    source = memory(tunix_arrays(CONFIG))
    config = memory({}, config=CONFIG, source="base")
    result = validate_roundtrip(source, ["hf", "deepmind"], base=config)
    assert result.passed, result.findings
    assert len(result.data["tensors"]) == 2 * len(source)


@pytest.mark.parametrize(("layout", "old", "new"), TREES)
def test_names_as_a_tree_on_the_disk_has_them(layout: str, old: str, new: str) -> None:
    """Separators of keys, and other prefixes than the ones written here."""
    source = memory(base_arrays(GEMMA3, "model."), config=GEMMA3)
    made = arrays(convert(source, LAYOUTS[layout], computed_dtype=F32).plan.target)
    tree = {(new + name.removeprefix(old)).replace("/", "."): a for name, a in made.items()}
    config = memory({}, config=GEMMA3, source="base")
    result = validate_roundtrip(memory(tree), ["hf"], base=config)
    assert result.passed, result.findings
    assert len(result.data["tensors"]) == len(tree)


def test_factors_are_left_out() -> None:
    source = memory({**tunix_arrays(GEMMA3), **factor_arrays(GEMMA3)})
    result = validate_roundtrip(source, ["hf"], base=memory({}, config=GEMMA3, source="base"))
    assert result.passed
    assert result.notes[0] == "12 LoRA pairs are left out"


def spoiling(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[..., Job]:
    """A conversion that changes tensors on the way there."""

    def wrong(source: Any, to: Any, **options: Any) -> Job:
        job = convert(source, to, **options)
        if to.name != "hf":
            changed = job.plan.target.replace(tensors=change(dict(job.plan.target.tensors)))
            object.__setattr__(job.plan, "target", changed)
        return job

    return wrong


class ThereAndBack(Tensor):
    """A norm to which 1 was added and taken away again, in bfloat16."""

    action = "cast"

    def __init__(self, parent: Tensor) -> None:
        self.parent, self.shape, self.dtype = parent, parent.shape, parent.dtype

    @property
    def parents(self) -> tuple[Tensor, ...]:
        return (self.parent,)

    def read(self, box: Box) -> Array:
        return there_and_back(self.parent.read(box))


def there_and_back(values: Array) -> Array:
    return (values + BF16.type(1)) - BF16.type(1)


def test_an_offset_rounded_in_bfloat16_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "layers.1.pre_ffw_norm.scale"

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**tensors, name: ThereAndBack(tensors[name])}

    monkeypatch.setattr(roundtrip, "convert", spoiling(change))
    values = base_arrays(GEMMA3, "model.")
    result = validate_roundtrip(memory(values, config=GEMMA3), ["tunix"])
    (finding,) = result.findings
    norm = values[finding.where]
    lost = np.abs(there_and_back(norm).astype(np.float64) - norm.astype(np.float64))
    assert finding.where == "model.layers.1.pre_feedforward_layernorm.weight"
    assert f"{np.count_nonzero(lost)} of 10 values differ by up to {lost.max():.4g}" in finding.what
    assert finding.what.endswith("(on the way: cast, copied)")


def test_a_tensor_of_another_layer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"layers.{i}.attn.q_einsum.w" for i in (0, 1)]

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**tensors, names[0]: tensors[names[1]], names[1]: tensors[names[0]]}

    monkeypatch.setattr(roundtrip, "convert", spoiling(change))
    result = validate_roundtrip(memory(base_arrays(GEMMA3, "model."), config=GEMMA3), ["tunix"])
    assert [finding.where for finding in result.findings] == [
        f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1)
    ]


def test_values_that_a_layout_stores_otherwise() -> None:
    """MaxText's norms and embedding: exact through float32, told where bfloat16 loses some."""
    source = memory(base_arrays(GEMMA3, "model."), config=GEMMA3)
    assert validate_roundtrip(source, ["maxtext"]).passed
    lossy = validate_roundtrip(source, ["maxtext"], computed_dtype=None)
    told = {finding.where: finding.what for finding in lossy.findings}
    assert "model.norm.weight" in told
    assert "computed" in told["model.norm.weight"]
    assert all("norm" in name or "embed" in name for name in told)
    assert any("--computed-dtype float32" in note for note in lossy.notes)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."))
    assert run_cli("validate", "roundtrip", base, "--via", "tunix,deepmind") == 0
    assert "PASSED" in capsys.readouterr().out
    assert run_cli("validate", "roundtrip", base, "--via", "tunix", "--json") == 0
    assert json.loads(capsys.readouterr().out)["passed"]
    assert run_cli("validate", "roundtrip", base, "--via", "keras") == 2
    assert "--via keras: the layouts are hf, tunix" in capsys.readouterr().err


def test_there_is_no_way_through_its_own_layout() -> None:
    source = memory(base_arrays(GEMMA3, "model."), config=GEMMA3, source="x")
    with pytest.raises(InputError, match=r"^x: in the layout hf already, .*; name others: tunix,"):
        validate_roundtrip(source, ["tunix", "hf"])


@pytest.mark.parametrize("computed", [np.dtype(np.float64), None])
def test_what_a_conversion_says_of_its_output_is_not_said(
    computed: np.dtype[Any] | None,
) -> None:
    """Of dtypes that differ, and of zeros for what nothing reads: nothing is written here."""
    text = {**GEMMA4["text_config"], "attention_k_eq_v": False, "num_kv_shared_layers": 2}
    shared = {**GEMMA4, "text_config": text}
    values = base_arrays(shared, "model.language_model.")
    unread = [
        f"layers.{i}.self_attn.{name}." for i in (1, 2) for name in ("k_proj", "v_proj", "k_norm")
    ]
    live = {n: a for n, a in values.items() if not any(dead in n for dead in unread)}
    assert len(live) < len(values)
    norm = "model.language_model.norm.weight"
    live[norm] = live[norm].astype(F32)
    result = validate_roundtrip(memory(live, config=shared), computed_dtype=computed)
    assert {"tunix", "deepmind", "deepmind-stacked", "maxtext"} <= set(result.data["via"])
    # that MaxText stores other values is told where they are rounded on the way
    assert ["store other values" in note for note in result.notes] == [True] * (
        0 if computed else 2
    )
    tunix = arrays(convert(memory(live, config=shared), LAYOUTS["tunix"]).plan.target)
    base = memory({}, config=shared, source="base")
    assert validate_roundtrip(memory(tunix), ["hf"], base=base, computed_dtype=computed).notes == ()


def test_a_layout_named_twice_is_gone_through_once() -> None:
    source = memory(base_arrays(GEMMA3, "model."), config=GEMMA3)
    result = validate_roundtrip(source, ["tunix", "deepmind", "tunix"])
    assert result.data["via"] == ["tunix", "deepmind"]
    assert len(result.data["tensors"]) == 2 * len(source)


@pytest.mark.parametrize(
    "run",
    [
        memory(factor_arrays(GEMMA3), source="run"),
        memory(
            {"x.lora_A.weight": np.ones((1, 2), BF16)},
            source="run",
            metadata={"adapter_config": {}},
        ),
    ],
)
def test_factors_alone_have_no_way_through_a_layout(run: Checkpoint) -> None:
    with pytest.raises(InputError) as caught:
        validate_roundtrip(run)
    assert str(caught.value) == (
        "run: LoRA factors alone, no weights that could go through a layout; give the base, or a "
        "checkpoint that they are merged into"
    )
