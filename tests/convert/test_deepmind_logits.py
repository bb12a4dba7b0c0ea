"""DeepMind's layout judged by DeepMind's own model: its reader, its flax forward pass.

``GEMMA_PYTHON`` names the Python of an environment with ``gemma`` (CONTRIBUTING.md); without it
these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.jobs import convert
from gemma_convert.convert.layouts import DEEPMIND, DEEPMIND_STACKED, Layout
from gemma_convert.convert.readers import open_safetensors
from gemma_convert.convert.tensor import Array
from gemma_convert.convert.writers.orbax import write_orbax
from gemma_convert.convert.writers.orbax_tree import form_of
from tests import tiny
from tests.tiny_cases import CASES

PYTHON = os.environ.get("GEMMA_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="GEMMA_PYTHON names no Python with gemma")

BOUND = 1e-4
"""Most that two float32 forwards may differ; these models' own float32 error is below 1e-5."""

FORWARD = Path(__file__).parents[1] / "deepmind_forward.py"

KEYS = (
    *("num_embed", "embed_dim", "hidden_dim", "num_heads", "head_dim", "num_kv_heads"),
    *("sliding_window_size", "final_logit_softcap", "attn_logits_soft_cap"),
    *("use_post_attn_norm", "use_post_ffw_norm"),
    *("local_base_frequency", "global_base_frequency"),
    *("global_key_size", "k_eq_v_global", "num_global_kv_heads"),
    *("per_layer_input_dim", "frac_shared_layers", "override_kv_shared_ffw_hidden"),
    *("enable_moe", "num_experts", "expert_dim"),
)
"""Keys of the library's config that Tunix's has too."""

OWN: dict[str, dict[str, Any]] = {
    "gemma1": {"transpose_gating_einsum": False},
    "gemma2": {"transpose_gating_einsum": True},
    "gemma3": {
        "transpose_gating_einsum": True,
        "use_qk_norm": True,
        "use_post_attn_norm": True,
        "use_post_ffw_norm": True,
        "final_logit_softcap": None,
    },
    "gemma4": {
        "use_post_attn_norm": True,
        "use_post_ffw_norm": True,
        "final_logit_softcap": 30.0,
        "global_rope_proportion": 0.25,
        "local_rope_proportion": 1.0,
    },
}
"""What the library's config of a family says beside its sizes (``gm/nn/_gemma.py``)."""


MODELS = [case for case in CASES if CASES[case].family in OWN]


def repeats(layers: str) -> bool:
    """Whether layers come in equal blocks that end with a global one: only these are stacked."""
    block = layers[: layers.index("G") + 1]
    return layers == (block * len(layers))[: len(layers)]


RUNS = [
    (case, layout)
    for case in MODELS
    for layout in (DEEPMIND, DEEPMIND_STACKED)
    # Its load_params of git 7691fd4 takes a key too many from the router of a stacked tree.
    if layout is DEEPMIND or (repeats(CASES[case].layers) and case != "gemma4-moe")
]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """The tiny models of transformers."""
    return {case: tiny.hf_model(case) for case in MODELS}


@pytest.fixture(scope="module")
def logits(
    models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Array]:
    """Logits of the library's models after its own reader loaded what we wrote, in one process."""
    root = tmp_path_factory.mktemp("deepmind")
    directories = {}
    for case, model in models.items():
        model.save_pretrained(root / case / "hf")
    for case, layout in RUNS:
        directory = root / case / layout.name
        directory.mkdir()
        target = convert(open_safetensors(root / case / "hf"), layout).plan.target
        write_orbax(target, directory / "checkpoint", form=form_of(layout, target))
        (directory / "request.json").write_text(json.dumps(request(case, directory)))
        directories[case, layout.name] = directory
    words = [PYTHON, "-W", "ignore", FORWARD, *(d / "request.json" for d in directories.values())]
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(words, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    made = {key: directory / "LOGITS.npy" for key, directory in directories.items()}
    return {key: np.load(path) for key, path in made.items() if path.exists()}


def request(case: str, directory: Path) -> dict[str, Any]:
    """What `FORWARD` is asked: a checkpoint, the library's config of it, and ids."""
    known = CASES[case].tunix_config
    config = {key: known[key] for key in KEYS if key in known} | OWN[CASES[case].family]
    if known.get("enable_moe"):
        config |= {"top_k_experts": known["num_experts_per_tok"]}
        config |= {"moe_dense_hidden_dim": known["hidden_dim"]}
    return {
        "family": CASES[case].family,
        "checkpoint": str(directory / "checkpoint"),
        "config": config,
        "layers": CASES[case].layers,
        "ids": tiny.IDS,
    }


@pytest.mark.parametrize(("case", "layout"), RUNS, ids=lambda value: getattr(value, "name", value))
def test_its_logits_are_those_of_transformers(
    case: str, layout: Layout, models: dict[str, Any], logits: dict[tuple[str, str], Array]
) -> None:
    if CASES[case].family == "gemma4" and (case, layout.name) not in logits:
        pytest.skip("this gemma has no Gemma 4")
    found, expected = logits[case, layout.name], tiny.hf_logits(models[case])
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < BOUND
