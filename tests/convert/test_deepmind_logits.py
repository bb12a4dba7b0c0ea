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
from gemma_convert.convert.writers.orbax_tree import FORMS
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
}
"""What the library's config of a family says beside its sizes (``gm/nn/_gemma.py``)."""


MODELS = [case for case in CASES if CASES[case].family in OWN]
LAYOUTS = (DEEPMIND, DEEPMIND_STACKED)


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
        for layout in LAYOUTS:
            directory = root / case / layout.name
            directory.mkdir()
            target = convert(open_safetensors(root / case / "hf"), layout).plan.target
            write_orbax(target, directory / "checkpoint", form=FORMS[layout.name])
            (directory / "request.json").write_text(json.dumps(request(case, directory)))
            directories[case, layout.name] = directory
    words = [PYTHON, "-W", "ignore", FORWARD, *(d / "request.json" for d in directories.values())]
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(words, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {key: np.load(directory / "LOGITS.npy") for key, directory in directories.items()}


def request(case: str, directory: Path) -> dict[str, Any]:
    """What `FORWARD` is asked: a checkpoint, the library's config of it, and ids."""
    known = CASES[case].tunix_config
    return {
        "checkpoint": str(directory / "checkpoint"),
        "config": {key: known[key] for key in KEYS if key in known} | OWN[CASES[case].family],
        "layers": CASES[case].layers,
        "ids": tiny.IDS,
    }


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("case", MODELS)
def test_its_logits_are_those_of_transformers(
    case: str, layout: Layout, models: dict[str, Any], logits: dict[tuple[str, str], Array]
) -> None:
    found, expected = logits[case, layout.name], tiny.hf_logits(models[case])
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < BOUND
