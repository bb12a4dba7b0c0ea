"""Whole jobs on lazy checkpoints: what is merged, copied, dropped or refused before any writing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import (
    AdapterError,
    GemmaConvertError,
    InputError,
    LayoutError,
)
from gemma_convert.convert.job import Job
from gemma_convert.convert.jobs import hf_to_orbax, orbax_to_hf
from gemma_convert.convert.tensor import Array
from tests import lora_oracle
from tests.checkpoints import (
    ALPHA,
    BF16,
    CONFIGS,
    F32,
    FORMS,
    GEMMA3,
    GEMMA4,
    USUAL_PREFIX,
    arrays,
    assert_same_bits,
    base_arrays,
    factor_arrays,
    memory,
    tunix_arrays,
)


def base(family: str, prefix: str | None = None, **changes: Any) -> Checkpoint:
    config = CONFIGS[family]
    values = base_arrays(config, prefix or USUAL_PREFIX[family])
    return memory(values, config=config, source="base").replace(**changes)


def run(values: dict[str, Array], **fields: Any) -> Checkpoint:
    return memory(values, source="run", format="orbax", **fields)


def produced(job: Job) -> dict[str, Array]:
    return arrays(job.plan.target)


def rounded(values: dict[str, Array]) -> dict[str, Array]:
    return {
        name: lora_oracle.rounded_to_bfloat16(array) if array.dtype == np.float64 else array
        for name, array in values.items()
    }


@pytest.mark.parametrize(("config", "prefix"), FORMS)
def test_factors_alone_are_merged_into_the_base(config: dict[str, Any], prefix: str) -> None:
    ours = memory(base_arrays(config, prefix), config=config, source="base")
    factors = factor_arrays(config)
    job = orbax_to_hf(run(factors), ours, alpha=ALPHA)
    expected = lora_oracle.merged(arrays(ours), prefix, factors, ALPHA)
    assert_same_bits(produced(job), rounded(expected))
    assert list(job.plan.target) == list(ours)
    (adapter,) = job.adapters
    assert len(adapter.pairs) == len(factors) / 2
    merged = [name for name, action in job.plan.actions.items() if action == "merged"]
    assert sorted(merged) == sorted(prefix + n for n in lora_oracle.deltas(factors, ALPHA))
    assert {a for n, a in job.plan.actions.items() if n not in merged} == {"copied"}
    assert job.plan.counts == {
        "copied": len(ours) - len(merged),
        "merged": len(merged),
        "dropped": 0,
    }


@pytest.mark.parametrize("family", CONFIGS)
def test_a_full_tree_with_factors_is_merged_from_itself(family: str) -> None:
    """The base's weights are another model's here, so that any use of them would show."""
    config, prefix = CONFIGS[family], USUAL_PREFIX[family]
    tree, factors = tunix_arrays(config, seed=7), factor_arrays(config)
    plain = produced(orbax_to_hf(run(tree), base(family)))
    job = orbax_to_hf(run({**tree, **factors}), base(family), alpha=ALPHA)
    expected = lora_oracle.merged(plain, prefix, factors, ALPHA)
    assert_same_bits(produced(job), rounded(expected))
    assert set(job.plan.dropped.values()) == {"of the base: the checkpoint has its own weights"}
    assert set(job.plan.dropped) == set(base(family))


@pytest.mark.parametrize(("family", "prefix"), [*USUAL_PREFIX.items()])
def test_a_full_tree_needs_no_weights_in_the_base(family: str, prefix: str) -> None:
    """Names are then those of the Hub: nested for a config with text_config."""
    tree, factors = tunix_arrays(CONFIGS[family], seed=7), factor_arrays(CONFIGS[family])
    with_weights = orbax_to_hf(run({**tree, **factors}), base(family), alpha=ALPHA)
    job = orbax_to_hf(run({**tree, **factors}), base(family, tensors={}), alpha=ALPHA)
    assert_same_bits(produced(job), produced(with_weights))
    assert all(name.startswith(prefix) for name in job.plan.target)
    assert not job.plan.dropped
    assert [source.source for source in job.plan.sources] == ["run", "base"]


@pytest.mark.parametrize("family", CONFIGS)
def test_a_full_tree_without_factors(family: str) -> None:
    """Each array by hand, from section 2 of the layouts' law."""
    tree = tunix_arrays(CONFIGS[family], seed=7)
    job = orbax_to_hf(run(tree), base(family, tensors={}))
    assert job.adapters == ()
    found, prefix = produced(job), USUAL_PREFIX[family]
    for name, array in tree.items():
        module = name.split(".", 2)[-1]
        for hf_module, share in lora_oracle.HF_MODULES.get(module, {}).items():
            layer = name.split(".")[1]
            hf = found.pop(f"{prefix}layers.{layer}.{hf_module}.weight")
            assert hf.tobytes() == np.ascontiguousarray(share(array)).tobytes(), name
    vectors = [array for name, array in tree.items() if array.ndim == 1]
    embedding = found.pop(f"{prefix}embed_tokens.weight")
    assert embedding.tobytes() == tree["embedder.input_embedding"].tobytes()
    assert sorted(a.tobytes() for a in found.values()) == sorted(a.tobytes() for a in vectors)


def test_factors_alone_need_the_weights_of_the_base() -> None:
    with pytest.raises(InputError, match=r"^base: no weights, and run holds LoRA factors alone"):
        orbax_to_hf(run(factor_arrays(GEMMA3)), base("gemma3", tensors={}), alpha=ALPHA)


@pytest.mark.parametrize("metadata", [{"lora": {"alpha": ALPHA}}, {"lora_alpha": ALPHA}])
def test_alpha_from_the_checkpoint(metadata: dict[str, Any]) -> None:
    factors = factor_arrays(GEMMA3)
    stored = run(factors, metadata={"custom_metadata": metadata})
    given = orbax_to_hf(run(factors), base("gemma3"), alpha=ALPHA)
    assert_same_bits(produced(orbax_to_hf(stored, base("gemma3"))), produced(given))
    with pytest.raises(AdapterError, match="metadata says alpha 5, --alpha says 6"):
        orbax_to_hf(stored, base("gemma3"), alpha=6.0)


def test_alpha_without_factors_is_no_merge_and_says_so() -> None:
    with pytest.raises(AdapterError, match="run: it holds no LoRA factors that --alpha 5 could"):
        orbax_to_hf(run(tunix_arrays(GEMMA3)), base("gemma3"), alpha=ALPHA)


def test_towers_are_copied_and_come_back_in_order() -> None:
    """Names outside the text model, before and after it, of dtypes of their own."""
    prefix = "model.language_model."
    before = {"model.embed_vision.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}
    after = {"model.vision_tower.layers.0.self_attn.q_proj.weight": np.arange(5).astype(BF16)}
    after["model.vision_tower.count"] = np.arange(3)
    ours = memory({**before, **base_arrays(GEMMA4, prefix), **after}, config=GEMMA4)
    job = orbax_to_hf(run(factor_arrays(GEMMA4)), ours, alpha=ALPHA)
    assert list(job.plan.target) == list(ours)
    for name, array in {**before, **after}.items():
        assert job.plan.actions[name] == "copied"
        assert job.plan.target[name] is ours[name]
        assert job.plan.target[name].numpy().tobytes() == array.tobytes()
    full = orbax_to_hf(run(tunix_arrays(GEMMA4)), ours)
    assert all(full.plan.target[name] is ours[name] for name in (*before, *after))
    wide = orbax_to_hf(run(factor_arrays(GEMMA4)), ours, alpha=ALPHA, dtype=F32)
    assert {n: t.dtype for n, t in wide.plan.target.items() if t.dtype != F32} == {
        "model.vision_tower.count": np.dtype(np.int64)
    }


def test_a_wider_dtype_is_not_rounded_on_the_way() -> None:
    factors = factor_arrays(GEMMA3)
    job = orbax_to_hf(run(factors), base("gemma3"), alpha=ALPHA, dtype=F32)
    expected = lora_oracle.merged(arrays(base("gemma3")), "model.", factors, ALPHA)
    for name, array in produced(job).items():
        assert array.dtype == F32
        # float32's own rounding of sums below 1 in size, not bfloat16's, which is 2**-9 of them
        assert np.allclose(array, expected[name].astype(np.float64), rtol=0, atol=2.0**-22)
    counts = job.plan.counts
    assert counts["cast"] == len(base("gemma3")) - counts["merged"]


@pytest.mark.parametrize("dtype", [None, F32])
def test_hf_to_orbax_and_back_is_bit_exact(dtype: np.dtype[Any] | None) -> None:
    for family, config in CONFIGS.items():
        there = hf_to_orbax(base(family), dtype=dtype)
        tree = arrays(there.plan.target)
        assert {name: a.shape for name, a in tree.items()} == {
            name: a.shape for name, a in tunix_arrays(config).items()
        }
        back = orbax_to_hf(run(tree), base(family, tensors={}), dtype=BF16)
        assert_same_bits(produced(back), arrays(base(family)))


def test_hf_to_orbax_tells_what_it_leaves_out() -> None:
    tower = {"model.vision_tower.weight": np.ones(3, np.float32)}
    ours = memory({**base_arrays(GEMMA4, "model.language_model."), **tower}, config=GEMMA4)
    reason = "not part of the text model, nor of a tower known here that config.json describes"
    assert hf_to_orbax(ours).plan.dropped == {"model.vision_tower.weight": reason}


@pytest.mark.parametrize(
    ("checkpoint", "changes", "message"),
    [
        ({"format": "safetensors"}, {}, "run: safetensors already; give an Orbax checkpoint"),
        ({}, {"config": {}}, "base: no config.json; give the base model's"),
        ({}, {"config": {"model_type": "llama"}}, "model_type 'llama' is not a family known here"),
        ({}, {"config": GEMMA4}, "base: model.layers.*expected|base: .*missing"),
        ({}, {"config": {**GEMMA3, "hidden_size": 12}}, "expected v d = 23 12 by config.json"),
        ({}, {"config": {**GEMMA3, "num_hidden_layers": 3}}, "layer_types has 2 entries"),
    ],
)
def test_refusals(checkpoint: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    given = run(factor_arrays(GEMMA3)).replace(**checkpoint)
    with pytest.raises(GemmaConvertError, match=message):
        orbax_to_hf(given, base("gemma3").replace(**changes), alpha=ALPHA)


def test_a_base_that_is_a_tunix_tree() -> None:
    ours = base("gemma3").replace(tensors=run(tunix_arrays(GEMMA3)).tensors)
    with pytest.raises(LayoutError, match="the base is in layout tunix"):
        orbax_to_hf(run(factor_arrays(GEMMA3)), ours, alpha=ALPHA)


def test_factors_of_another_family() -> None:
    values = {n: a for n, a in factor_arrays(GEMMA4).items() if "k_einsum" in n}
    with pytest.raises(AdapterError, match=r"k_einsum.w: the base \(gemma3, 2 layers\) has no"):
        orbax_to_hf(run(values), base("gemma3"), alpha=ALPHA)


@pytest.mark.parametrize("missing", ["final_norm.scale", "layers.1.attn.kv_einsum.w"])
def test_a_tree_with_a_gap(missing: str) -> None:
    tree = tunix_arrays(GEMMA3)
    del tree[missing]
    with pytest.raises(LayoutError, match=f"^run: {missing}: missing"):
        orbax_to_hf(run(tree), base("gemma3"))
