"""The layouts judged from outside: transformers' forward against Tunix's, on the same ids.

No mistake that our two directions share survives this: one side is written by transformers and
the other read by Tunix's own CheckpointManager, or the other way round.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.jobs import hf_to_orbax, orbax_to_hf
from gemma_convert.convert.readers import open_base, open_orbax, open_safetensors
from gemma_convert.convert.tensor import Array
from gemma_convert.convert.writers.hf import write_hf
from gemma_convert.convert.writers.orbax import write_orbax
from tests import tiny
from tests.tiny_cases import CASES, WINDOW

# Tunix 0.1.7 calls deprecated parts of jax 0.10 and flax 0.12.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:tunix\."),
    pytest.mark.filterwarnings("ignore:'sharding' is deprecated:DeprecationWarning"),
]

BOUND = 1e-4
"""Most that two float32 forwards may differ; these models' own float32 error is below 1e-5."""

SEEN = 100 * BOUND
"""Least that a mistake must move the logits for the bound to see it."""


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    """The model under test."""
    return str(request.param)


@pytest.fixture(scope="module")
def hf(case: str) -> Any:
    """The tiny model of transformers."""
    return tiny.hf_model(case)


@pytest.fixture(scope="module")
def tunix(case: str) -> Any:
    """Tunix's tiny model, to be overwritten by each test: building one takes seconds."""
    return tiny.tunix_model(case)


@pytest.fixture(scope="module")
def hf_directory(hf: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``hf`` as transformers saves it."""
    directory = tmp_path_factory.mktemp("hf")
    hf.save_pretrained(directory)
    return directory


def difference(a: Array, b: Array) -> float:
    """Largest absolute difference; NaN counts as a difference."""
    assert np.isfinite(a).all()
    assert np.isfinite(b).all()
    return float(np.abs(a - b).max())


def through_tunix(checkpoint: Checkpoint, tunix: Any, root: Path) -> Array:
    """Logits of Tunix's model after its manager restored what we wrote; it forgets all else."""
    root.mkdir()
    write_orbax(checkpoint, root)
    tiny.randomise_tunix(tunix, seed=99)
    tiny.tunix_restore(tunix, root)
    return tiny.tunix_logits(tunix)


def test_the_yardstick(hf: Any) -> None:
    """The models are well conditioned: their own rounding stays far below the bound."""
    logits = tiny.hf_logits(hf)
    assert difference(logits, tiny.hf_logits(hf, double=True)) < BOUND / 10
    assert 0.1 < logits.std() < 10


def test_the_ids_reach_beyond_the_window() -> None:
    assert len(tiny.IDS) > 2 * WINDOW


def test_every_weight_counts(case: str, hf: Any) -> None:
    """Each stored tensor, its values shifted by one place, moves the logits: none is neutral.

    But for the scalar of the last layer: it scales all that the final norm then divides by its
    size. No forward can see it, so only test_relayout.py tells that it is carried.
    """
    expected = tiny.hf_logits(hf)
    unseen = [
        name
        for name, weight in tiny.hf_weights(hf)
        if difference(_logits_without(hf, weight), expected) < SEEN
    ]
    last = f"model.layers.{len(CASES[case].layers) - 1}.layer_scalar"
    assert unseen == ([last] if CASES[case].family == "gemma4" else [])
    assert difference(tiny.hf_logits(hf), expected) == 0


def _logits_without(hf: Any, weight: Any) -> Array:
    """Logits of ``hf`` with the values of ``weight`` shifted by one place, a scalar by a tenth."""
    import torch

    kept = weight.detach().clone()
    with torch.no_grad():
        weight.copy_(kept.flatten().roll(1).view_as(kept) if kept.numel() > 1 else 1.1 * kept)
        logits = tiny.hf_logits(hf)
        weight.copy_(kept)
    return logits


def test_hf_to_tunix(case: str, hf: Any, hf_directory: Path, tunix: Any, tmp_path: Path) -> None:
    """Saved by transformers, converted and written by us, restored and run by Tunix."""
    target = hf_to_orbax(open_safetensors(hf_directory)).plan.target
    logits = through_tunix(target, tunix, tmp_path / "orbax")
    assert difference(logits, tiny.hf_logits(hf)) < BOUND
    # transformers stores no keys and values that nothing reads; Tunix has them
    assert len(target.notes) == CASES[case].hf.get("num_kv_shared_layers", 0) // 2


def test_tunix_to_hf(case: str, tunix: Any, tmp_path: Path) -> None:
    """Saved by Tunix, converted and written by us, loaded by transformers without a remark."""
    tiny.randomise_tunix(tunix, seed=3)
    tiny.tunix_save(tunix, tmp_path / "tunix", step=4)
    tiny.hf_config(case).save_pretrained(tmp_path / "base")
    base = open_base(tmp_path / "base")
    target = orbax_to_hf(open_orbax(tmp_path / "tunix"), base).plan.target
    out = tmp_path / "hf"
    out.mkdir()
    write_hf(target, out, max_shard_bytes=100_000, progress=lambda _: None)
    assert difference(tiny.hf_logits(tiny.hf_loaded(out)), tiny.tunix_logits(tunix)) < BOUND


def interleaved(array: Array) -> Array:
    """(n, d, h) of a weight whose rows were taken for (h n) instead of (n h)."""
    n, d, h = array.shape
    return array.transpose(0, 2, 1).reshape(h, n, d).transpose(1, 2, 0)


MISTAKES: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "key and value swapped": ("layers.1.attn.kv_einsum.w", lambda w: w[::-1]),
    "query and key swapped": ("layers.1.attn.qkv_einsum.w", lambda w: w[[1, 0, 2]]),
    "heads inside instead of outside": ("layers.2.attn.q_einsum.w", interleaved),
    "norm off by one": ("layers.2.pre_ffw_norm.scale", lambda w: w + 1),
    "norm of gemma2 off by one": ("layers.2.post_attn_norm.scale", lambda w: w + 1),
    "scalar lost": ("layers.0.skip_scale", np.ones_like),
    "global key heads swapped": ("layers.5.attn.k_einsum.w", lambda w: w[::-1]),
    "global key lost": ("layers.2.attn.k_einsum.w", np.zeros_like),
    "gate and up of experts swapped": ("layers.1.moe.gating_einsum", lambda w: w[:, ::-1]),
    "experts in another order": ("layers.1.moe.linear", lambda w: w[::-1]),
    "router in another order": ("layers.1.moe.router_logits", lambda w: w[:, ::-1]),
    "norm of experts off by one": ("layers.1.moe_pre_ffw_norm.scale", lambda w: w + 1),
    "embeddings of another layer": (
        "embedder.per_layer_input_embedding",
        lambda w: w[:, ::-1],
    ),
    "projections of another layer": (
        "embedder.per_layer_model_projection.w",
        lambda w: w[:, ::-1],
    ),
    "shared keys are not read": ("layers.2.attn.kv_einsum.w", np.zeros_like),
}
"""Tensor in Tunix's spelling and what a wrong converter would make of it."""

SHARED = ("key and value swapped", "heads inside instead of outside", "norm off by one")
PER_LAYER = (
    *SHARED,
    "scalar lost",
    "embeddings of another layer",
    "projections of another layer",
    "shared keys are not read",
)
POSSIBLE: dict[str, tuple[str, ...]] = {
    "gemma1-mqa": (*SHARED, "shared keys are not read"),
    "gemma1-mha": ("query and key swapped", "norm off by one"),
    "gemma2": (*SHARED, "norm of gemma2 off by one", "shared keys are not read"),
    "gemma3": (*SHARED, "shared keys are not read"),
    "gemma3-mha": ("query and key swapped", "norm off by one"),
    "gemma4": (*SHARED, "scalar lost", "global key heads swapped", "shared keys are not read"),
    "gemma4-12b": (*SHARED, "scalar lost", "global key lost"),
    "gemma4-moe": (
        *SHARED,
        "scalar lost",
        "global key lost",
        "gate and up of experts swapped",
        "experts in another order",
        "router in another order",
        "norm of experts off by one",
    ),
    "gemma4-e2b": PER_LAYER,
    "gemma4-e4b": PER_LAYER,
}
"""The mistakes that a case can show."""


def test_mistakes_are_seen(
    case: str, hf: Any, hf_directory: Path, tunix: Any, tmp_path: Path
) -> None:
    """The comparison above can fail."""
    target = hf_to_orbax(open_safetensors(hf_directory)).plan.target
    expected = tiny.hf_logits(hf)
    assert difference(through_tunix(target, tunix, tmp_path / "orbax"), expected) < BOUND
    assert {m for m, (name, _) in MISTAKES.items() if name in target} == {*POSSIBLE[case]}
    for mistake in POSSIBLE[case]:
        name, wrong = MISTAKES[mistake]
        right = target[name].numpy()
        tiny.tunix_set(tunix, {name: wrong(right)})
        assert difference(tiny.tunix_logits(tunix), expected) > SEEN, mistake
        tiny.tunix_set(tunix, {name: right})
    i = min(3, len(CASES[case].layers) - 1)
    gate, up = (f"layers.{i}.mlp.{name}_proj.kernel" for name in ("gate", "up"))
    tiny.tunix_set(tunix, {gate: target[up].numpy(), up: target[gate].numpy()})
    assert difference(tiny.tunix_logits(tunix), expected) > SEEN
