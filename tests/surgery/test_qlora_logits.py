"""QLoRA judged from outside: Tunix with Qwix runs it, transformers runs what was merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.inputs import model_of
from gemma_convert.convert.jobs import convert, orbax_to_hf
from gemma_convert.convert.layouts import HF
from gemma_convert.convert.readers import open_base, open_orbax
from gemma_convert.convert.tensor import Array
from gemma_convert.convert.writers.hf import write_hf
from gemma_convert.surgery.adapters.open import adapter_source, opened
from gemma_convert.surgery.quantise import Scheme
from gemma_convert.surgery.quantised import Dequantised
from gemma_convert.surgery.training_base import as_trained
from tests import tiny
from tests.checkpoints import NATIVE, arrays, assert_same_bits, memory

# Tunix 0.1.7 and Qwix 0.1.8 call deprecated parts of jax 0.10 and flax 0.12.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:(tunix|qwix)\."),
    pytest.mark.filterwarnings("ignore:'sharding' is deprecated:DeprecationWarning"),
]

CASE = "gemma3"
BOUND = 1e-4
"""Most that two float32 forwards may differ; this model's own float32 error is below 1e-5."""

SEEN = 100 * BOUND
"""Least by which the quantised and the full base must differ for the bound to tell them apart."""

RANK, ALPHA = 4, 6.0
MODULES = ".*(q_einsum|kv_einsum|attn_vec_einsum|gate_proj|up_proj|down_proj)"
SCHEMES = (Scheme("int8"), Scheme("int4", 2), Scheme("nf4", 2))


def trained(base: Any, scheme: Scheme) -> Any:
    """``base`` as Qwix prepares it for QLoRA, with factors as if they had been trained."""
    import jax.numpy as jnp
    import qwix
    from flax import nnx

    provider = qwix.LoraProvider(
        module_path=MODULES,
        rank=RANK,
        alpha=ALPHA,
        weight_qtype=scheme.qtype,
        tile_size=scheme.tile,
    )
    model = qwix.apply_lora_to_model(base, provider, **base.get_model_input(), rngs=nnx.Rngs(0))
    random = np.random.default_rng(5)
    state = nnx.state(model, nnx.LoRAParam)
    for path, leaf in nnx.to_flat_state(state):
        assert str(path[-1]).endswith(("_lora_a", "_lora_b"))
        values = random.normal(0, 0.15, leaf.shape).astype(np.float32)
        leaf.set_value(jnp.asarray(values))
    nnx.update(model, state)
    return model


@pytest.fixture(scope="module")
def base() -> Any:
    """Tunix's model before it was quantised."""
    return tiny.tunix_model(CASE)


@pytest.fixture(scope="module")
def directory(base: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base`` as a Hugging Face directory, float32."""
    root = tmp_path_factory.mktemp("base")
    tiny.tunix_save(base, root / "tunix", step=1)
    tiny.hf_config(CASE).save_pretrained(root / "config")
    return written(orbax_to_hf(open_orbax(root / "tunix"), open_base(root / "config")), root / "hf")


@pytest.fixture(scope="module", params=SCHEMES, ids=str)
def run(request: pytest.FixtureRequest, base: Any, tmp_path_factory: Any) -> Any:
    """A scheme, the logits of its run, a checkpoint of all it holds, and one of its factors."""
    from tunix.sft.checkpoint_manager import CheckpointManager

    scheme = request.param
    model = trained(base, scheme)
    root = tmp_path_factory.mktemp("run")
    if scheme.qtype != "nf4":  # tensorstore has no uint4
        tiny.tunix_save(model, root / "all", step=2)
    manager = CheckpointManager(str(root / "factors"))
    manager.save(2, model, save_only_lora_params=True, force=True)
    manager.close()
    return scheme, tiny.tunix_logits(model), root / "all", root / "factors"


def written(job: Any, out: Path) -> Path:
    out.mkdir()
    write_hf(job.plan.target, out, max_shard_bytes=100_000, progress=lambda _: None)
    return out


def logits(job: Any, out: Path) -> Array:
    """Logits of a merge, by transformers."""
    return tiny.hf_logits(tiny.hf_loaded(written(job, out)))


def difference(a: Array, b: Array) -> float:
    assert np.isfinite(a).all()
    assert np.isfinite(b).all()
    return float(np.abs(a - b).max())


def test_factors_onto_the_base_quantised_anew(run: Any, directory: Path, tmp_path: Path) -> None:
    scheme, expected, _, factors = run
    checkpoint, hf = open_orbax(factors), open_base(directory)
    job = orbax_to_hf(checkpoint, hf, alpha=ALPHA, base_quantization=scheme)
    assert difference(logits(job, tmp_path / "trained"), expected) < BOUND
    full = orbax_to_hf(checkpoint, hf, alpha=ALPHA)
    assert difference(logits(full, tmp_path / "full"), expected) > SEEN


def test_an_adapter_beside_the_base(run: Any, directory: Path) -> None:
    """What ``surgery merge-lora`` does: the same weights."""
    scheme, _, _, factors = run
    checkpoint, hf = open_orbax(factors), open_base(directory)
    expected = orbax_to_hf(checkpoint, hf, alpha=ALPHA, base_quantization=scheme).plan.target
    adapters = [adapter_source(checkpoint)]
    job = convert(hf, HF, alpha=ALPHA, adapters=adapters, base_quantization=scheme)
    assert_same_bits(arrays(job.plan.target), arrays(expected))


def test_a_tree_of_codes(run: Any, directory: Path, tmp_path: Path) -> None:
    scheme, expected, tree, _ = run
    if scheme.qtype == "nf4":
        assert not tree.exists()
        return
    tiny.hf_config(CASE).save_pretrained(tmp_path / "config")
    job = orbax_to_hf(open_orbax(tree), open_base(tmp_path / "config"), alpha=ALPHA)
    assert difference(logits(job, tmp_path / "trained"), expected) < BOUND
    hf = open_base(directory)
    full = orbax_to_hf(open_orbax(tree), hf, alpha=ALPHA, base_quantization="none")
    assert difference(logits(full, tmp_path / "full"), expected) > SEEN


def test_the_codes_are_those_that_qwix_saved(run: Any, base: Any) -> None:
    """Through Tunix's own modules, whose einsums tell Qwix which axes are contracted."""
    scheme, _, tree, factors = run
    if scheme.qtype == "nf4":
        assert not tree.exists()
        return
    config = tiny.hf_config(CASE).to_dict()
    weights = {
        name.removesuffix(".value"): values for name, values in tiny.tunix_arrays(base).items()
    }
    model = model_of(memory({}, config=config), None)
    adapter = opened(adapter_source(open_orbax(factors)), ALPHA)
    found = as_trained(memory(weights), model, NATIVE, [adapter], scheme)
    saved = arrays(open_orbax(tree))
    quantised = {name: t for name, t in found.items() if isinstance(t, Dequantised)}
    assert len(quantised) == 6 * len(model.layers)
    for name, tensor in quantised.items():
        for part, leaf in ((tensor.codes, "qvalue"), (tensor.scale, "scale")):
            values = saved[f"{name}.array.{leaf}"]
            assert (part.dtype, part.shape) == (values.dtype, values.shape)
            assert part.numpy().tobytes() == values.tobytes(), f"{name} {leaf}"
