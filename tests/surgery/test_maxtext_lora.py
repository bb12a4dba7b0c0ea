"""MaxText's LoRA checkpoints: merged and exported, against numpy in MaxText's own axes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.jobs import convert
from gemma_convert.convert.layouts import HF, MAXTEXT, MAXTEXT_UNSCANNED, Layout
from gemma_convert.convert.model import read_model
from gemma_convert.convert.registry import families
from gemma_convert.convert.tensor import Array
from gemma_convert.surgery.adapters.open import adapter_source
from gemma_convert.surgery.exchange import to_peft
from tests.checkpoints import arrays, base_arrays, memory, read_hf, run_cli, write_base
from tests.convert.test_maxtext import CASES, LEAD, PREFIX, hf, regular
from tests.maxtext_law import maxtext_tree
from tests.maxtext_lora import ALPHA, Lora, Style, lora

STYLES: tuple[Style, ...] = ("native", "qwix-1", "qwix-0")
KINDS = [
    (kind, layout, style)
    for kind in CASES
    for layout in (MAXTEXT, MAXTEXT_UNSCANNED)
    for style in STYLES
]


def law(kind: str, layout: Layout, weights: dict[str, Array] | None = None) -> dict[str, Array]:
    """Weights of Hugging Face, by default those of `hf`, as MaxText has them."""
    config = regular(kind, CASES[kind])
    return maxtext_tree(weights or arrays(hf(kind)), PREFIX, config, scanned=layout is MAXTEXT)


def run(made: Lora, **fields: Any) -> Checkpoint:
    """The factors as an opened checkpoint."""
    return memory(made.factors, source="run", format="orbax", **fields)


def merged(kind: str, adapter: Checkpoint, alpha: float | None = ALPHA) -> dict[str, Array]:
    """`hf` with the adapter merged."""
    job = convert(hf(kind), HF, adapters=[adapter_source(adapter)], alpha=alpha)
    return arrays(job.plan.target)


@pytest.mark.parametrize(("kind", "layout", "style"), KINDS)
def test_a_merge_adds_what_maxtext_adds(kind: str, layout: Layout, style: Style) -> None:
    """The merged weights, as MaxText stores them, are its kernels with scale * A.B added."""
    made = lora(law(kind, layout), style, lead=LEAD)
    before, after = law(kind, layout), law(kind, layout, merged(kind, run(made)))
    assert made.deltas
    for name, kernel in before.items():
        expected = kernel.astype(np.float64) + made.deltas.get(name, 0)
        # float32: a product of rank 5 at most, a sum, and one factor there and back for queries
        bound = 1e-6 * np.abs(expected).max()
        np.testing.assert_allclose(after[name], expected, rtol=0, atol=bound, err_msg=name)


@pytest.mark.parametrize("lead", ["base/", ""])
def test_names_of_nnx(lead: str) -> None:
    made = lora(law("gemma3", MAXTEXT), "qwix-1", lead=lead)
    expected = merged("gemma3", run(lora(law("gemma3", MAXTEXT), "qwix-1", lead=LEAD)))
    found = merged("gemma3", run(made))
    assert all(found[name].tobytes() == array.tobytes() for name, array in expected.items())


@pytest.mark.parametrize(("kind", "layout", "style"), [k for k in KINDS if k[1] is MAXTEXT])
def test_what_peft_gets(kind: str, layout: Layout, style: Style) -> None:
    """PEFT's alpha / r * B.A of every module is the change that the merge makes."""
    made = run(lora(law(kind, layout), style, lead=LEAD))
    config = regular(kind, CASES[kind])
    exchange = to_peft(adapter_source(made), read_model(config, families()), config, alpha=ALPHA)
    tensors, beside = arrays(exchange.job.plan.target), exchange.beside
    base, after = arrays(hf(kind)), merged(kind, made)
    changed = {name for name, array in base.items() if (array != after[name]).any()}
    stems = {name.removesuffix(".lora_A.weight") for name in tensors if "lora_A" in name}
    assert {stem.removeprefix("base_model.model.") + ".weight" for stem in stems} == changed
    for stem in stems:
        module = stem.removeprefix("base_model.model.")
        a, b = (tensors[f"{stem}.lora_{side}.weight"].astype(np.float64) for side in "AB")
        alpha = beside["alpha_pattern"].get(module, beside["lora_alpha"])
        assert len(a) == beside["rank_pattern"].get(module, beside["r"])
        weight = f"{module}.weight"
        expected = after[weight].astype(np.float64) - base[weight]
        bound = 1e-6 * np.abs(after[weight]).max()  # the merge rounds to float32
        np.testing.assert_allclose(alpha / len(a) * b @ a, expected, rtol=0, atol=bound)


def test_queries_of_gemma2_have_a_scale_of_their_own() -> None:
    """MaxText's query kernel is 24 ** -0.5 of Hugging Face's: so is what the factors add to it."""
    config = regular("gemma2", CASES["gemma2"])
    made = run(lora(law("gemma2", MAXTEXT), "native", lead=LEAD))
    model = read_model(config, families())
    scales = to_peft(adapter_source(made), model, config, alpha=ALPHA).adapter.scales
    for name, scale in scales.items():
        assert scale == pytest.approx(ALPHA / 2 * (24**0.5 if "q_proj" in name else 1), rel=1e-12)


def save(root: Path, made: Lora, config: dict[str, Any] | None) -> Path:
    """A decode checkpoint as MaxText's ``generate_param_only_checkpoint.py`` leaves it."""
    import orbax.checkpoint as ocp

    tree: dict[str, Any] = {"step": 0, "opt_state": {}, "params": {}}
    for name, array in made.factors.items():
        *keys, last = name.removesuffix(".kernel").split(".")
        node = tree
        for key in keys:
            node = node.setdefault(key, {})
        node[f"{last}.kernel"] = array
    ocp.PyTreeCheckpointer().save((root / "0" / "items").resolve(), tree)
    if config is not None:
        (root / "adapter_config.json").write_text(json.dumps(config))
    return root


CONFIG = {"r": 2, "lora_alpha": ALPHA, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}


def on_disk(tmp_path: Path, config: dict[str, Any] | None) -> tuple[Path, Path]:
    """A base and an adapter in MaxText's own names."""
    made = lora(law("gemma3", MAXTEXT), "native", lead=LEAD)
    base = write_base(tmp_path / "base", regular("gemma3", 14), arrays(hf("gemma3")))
    return base, save(tmp_path / "style", made, config)


def test_the_config_beside_the_steps_gives_the_scale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter = on_disk(tmp_path, CONFIG)
    words = ["surgery", "merge-lora", base, adapter, "--out", tmp_path / "out", "--quiet"]
    assert run_cli(*words) == 0
    made = lora(law("gemma3", MAXTEXT), "native", lead=LEAD)
    expected = merged("gemma3", run(made))
    found = read_hf(tmp_path / "out")
    assert all(found[name].tobytes() == array.tobytes() for name, array in expected.items())
    capsys.readouterr()
    assert run_cli("inspect", adapter, "--base", base, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["layout"]["name"] == "maxtext"
    assert report["adapter"]["kind"] == "MaxText LoRA"
    assert report["adapter"]["scales"] == [ALPHA / 2]
    assert set(report["adapter"]["modules"]) == {
        f"self_attention.{name}" for name in ("query", "key", "value", "out")
    }
    norms = report["adapter"]["relative_norm_by_module"]
    assert len(norms) == 4 * 14
    name = "params/params/decoder/layers_13/self_attention/query/kernel"
    kernel = "decoder/layers_remainder/layers_1/self_attention/query/kernel"
    weight = law("gemma3", MAXTEXT)[kernel]
    expected_norm = np.linalg.norm(made.deltas[kernel]) / np.linalg.norm(weight)
    assert norms[name] == pytest.approx(expected_norm, rel=1e-6)


def test_orbax_to_peft_of_a_checkpoint_on_the_disk(tmp_path: Path) -> None:
    base, adapter = on_disk(tmp_path, CONFIG)
    words = ["orbax-to-peft", adapter, "--base", base, "--out", tmp_path / "peft", "--quiet"]
    assert run_cli(*words) == 0
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["alpha_pattern"]) == (2, ALPHA, {})


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (None, "alpha is not stored in the checkpoint"),
        ({**CONFIG, "r": 3}, "the factors have rank 2, the checkpoint's metadata says 3"),
        ({**CONFIG, "use_rslora": True}, "has use_rslora set, which MaxText ignores"),
        ({**CONFIG, "alpha_pattern": {"q_proj": 3}}, "has alpha_pattern set, which MaxText"),
    ],
)
def test_configs_that_are_refused(
    config: dict[str, Any] | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter = on_disk(tmp_path, config)
    words = ["surgery", "merge-lora", base, adapter, "--out", tmp_path / "out", "--quiet"]
    assert run_cli(*words) == 1
    assert told in capsys.readouterr().err


def refused(kind: str, factors: dict[str, Array]) -> str:
    with pytest.raises(AdapterError) as error:
        merged(kind, memory(factors, source="run", format="orbax"))
    return str(error.value)


def test_factors_as_the_source_of_a_conversion(tmp_path: Path) -> None:
    """The step that MaxText saves beside them is no weight."""
    base, adapter = on_disk(tmp_path, CONFIG)
    words = ["orbax-to-hf", adapter, "--base", base, "--out", tmp_path / "out", "--quiet"]
    assert run_cli(*words) == 0
    words = ["surgery", "merge-lora", base, adapter, "--out", tmp_path / "merged", "--quiet"]
    assert run_cli(*words) == 0
    found, expected = read_hf(tmp_path / "out"), read_hf(tmp_path / "merged")
    assert all(found[name].tobytes() == array.tobytes() for name, array in expected.items())


QUERY = "params.params.decoder.layers_1.self_attention.query"


def test_modules_that_maxtext_does_not_adapt_are_named() -> None:
    name = "params.params.decoder.layers_1.mlp.wi_0"
    values = {f"{name}.lora_{s}.kernel": np.ones((10, 10), np.float32) for s in "ab"}
    assert f"{name}.kernel: MaxText's own LoRA has query, key" in refused("gemma3", values)
    name = "params.params.decoder.layers_1.mlp.gate.kernel"
    values = {f"{name}_lora_{side}": np.ones((10, 10), np.float32) for side in "ab"}
    told = refused("gemma3", values)
    assert "params/params/decoder/layers_1/mlp/gate/kernel: the base" in told
    assert "has no such module" in told


def test_two_kinds_of_factors_of_one_module() -> None:
    values = {
        f"{QUERY}.{n}": np.ones((10, 10), np.float32)
        for n in ("lora_a.kernel", "lora_b.kernel", "kernel_lora_a", "kernel_lora_b")
    }
    assert "has factors by MaxText and by Qwix" in refused("gemma3", values)


def test_another_number_of_layers() -> None:
    made = lora(law("gemma2", MAXTEXT), "native", lead=LEAD)
    name = "params.params.decoder.layers.self_attention_local.query.lora_a.kernel"
    short = {**made.factors, name: made.factors[name][:, :1]}
    assert "of [2] layers of A [" in refused("gemma2", short)
    assert "fits neither way" in refused("gemma2", short)


def test_layers_that_may_lie_on_either_axis() -> None:
    """As many layers as inputs, and as the rank is: no shape tells which axis is which."""
    config = {**regular("gemma1-mqa", 10), "layer_types": ["full_attention"] * 10}
    base = base_of(config)
    model = read_model(config, families())
    d, n, h = (model.common.sizes[axis] for axis in "dnh")
    assert d == 10
    stem = "params.params.decoder.layers.self_attention.query.kernel"
    values = {
        f"{stem}_lora_a": np.ones((10, 10, 10), np.float32),
        f"{stem}_lora_b": np.ones((10, 10, n * h), np.float32),
    }
    with pytest.raises(AdapterError, match="fits with the layers on axis 0 and on axis 1 alike"):
        convert(
            base,
            HF,
            adapters=[adapter_source(memory(values, source="run", format="orbax"))],
            alpha=ALPHA,
        )


def base_of(config: dict[str, Any]) -> Checkpoint:
    return memory(base_arrays(config, PREFIX), config=config, source="base")
