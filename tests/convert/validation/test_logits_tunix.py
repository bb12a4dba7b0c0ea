"""Tunix's model, with and without Qwix's factors, against transformers on the same ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.jobs import hf_to_orbax
from gemma_convert.convert.layouts import LAYOUTS, TUNIX, Spelling
from gemma_convert.convert.model import read_model
from gemma_convert.convert.random_model import random_factors
from gemma_convert.convert.readers import open_safetensors
from gemma_convert.convert.registry import families
from gemma_convert.convert.tensor import Array
from gemma_convert.convert.writers.orbax import write_orbax
from tests import lora_oracle, tiny_towers
from tests.checkpoints import arrays, write_run
from tests.logits_pairs import compared, save, spoilt, wheres
from tests.tiny_cases import CASES

# Tunix 0.1.7 calls deprecated parts of jax 0.10 and flax 0.12.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:tunix\."),
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:qwix\."),
    pytest.mark.filterwarnings("ignore:'sharding' is deprecated:DeprecationWarning"),
]


# Gemma 3 is below, with factors
@pytest.mark.parametrize("case", ["gemma1-mqa", "gemma2", "gemma4-12b", "gemma4-e2b"])
def test_tunix_agrees_with_transformers(case: str, few: Path, tmp_path: Path) -> None:
    hf = save(CASES[case], tmp_path / "hf")
    run = tmp_path / "run"
    run.mkdir()
    write_orbax(hf_to_orbax(open_safetensors(hf)).plan.target, run)
    result = compared(run, hf, few, base=hf)
    assert result.passed, result.findings
    layers = result.data["prompts"][0]["layers"]
    assert len(layers) == len(CASES[case].layers) + 1
    # the embedding is the same numbers, what follows is float32's own error
    assert layers[0] < 1e-6
    assert 0 < max(layers) < 1e-4


@pytest.mark.parametrize("case", ["gemma3", "gemma4-e2b"])
def test_tunix_runs_the_text_of_a_model_with_towers(case: str, few: Path, tmp_path: Path) -> None:
    """The tree has the towers too; the text model is what both run."""
    base = tiny_towers.save(case, tmp_path / "base")
    target = hf_to_orbax(open_safetensors(base), layout=LAYOUTS["tunix-head"]).plan.target
    assert any("vision_encoder" in name for name in target)
    run = write_run(tmp_path / "run", arrays(target))
    result = compared(run, base, few, base=base)
    assert result.passed, result.findings
    assert (result.data["a"]["kind"], result.data["b"]["kind"]) == ("tunix", "transformers")


def test_tunix_0_1_7_is_not_asked_about_experts(experts: Path, few: Path, tmp_path: Path) -> None:
    from gemma_convert.convert.errors import ConfigError

    run = tmp_path / "run"
    run.mkdir()
    write_orbax(hf_to_orbax(open_safetensors(experts)).plan.target, run)
    with pytest.raises(ConfigError, match="feeds the router of experts otherwise"):
        compared(run, experts, few, base=experts)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Gemma 3 of Tunix's layers, and a run with LoRA factors of two ranks."""
    root = tmp_path_factory.mktemp("adapted")
    base = save(CASES["gemma3"], root / "base")
    model = read_model(json.loads((base / "config.json").read_text()), families())
    native, kind = Spelling(TUNIX, ""), np.dtype(np.float32)
    factors = arrays(random_factors(model, native, 2, kind, seed=1))
    other = arrays(random_factors(model, native, 3, kind, seed=2))
    chosen = {n: other[n] if ".mlp." in n else array for n, array in factors.items()}
    return base, write_run(root / "run", chosen)


def merged(adapted: tuple[Path, Path], out: Path, alpha: float) -> Path:
    """The merge in float64 by hand, stored in float32."""
    from gemma_convert.convert.readers import open_orbax

    base, run = adapted
    factors = arrays(open_orbax(run))

    def change(weights: dict[str, Array]) -> None:
        wide = {name: array.astype(np.float64) for name, array in weights.items()}
        for name, array in lora_oracle.merged(wide, "model.", factors, alpha).items():
            weights[name] = array.astype(np.float32)

    return spoilt(base, out, change)


def test_factors_applied_by_qwix_are_the_merge(
    adapted: tuple[Path, Path], few: Path, tmp_path: Path
) -> None:
    base, run = adapted
    right = merged(adapted, tmp_path / "right", 5.0)
    result = compared(run, right, few, base=base, alpha=5.0)
    assert result.passed, result.findings
    assert result.data["limits"]["dtype"] == "float32"


def test_modules_with_an_alpha_of_their_own(
    adapted: tuple[Path, Path], few: Path, tmp_path: Path
) -> None:
    """As adapters of PEFT with alpha patterns are kept in a Tunix checkpoint."""
    from gemma_convert.convert.readers import open_orbax

    base, run = adapted
    factors = arrays(open_orbax(run))
    mlp = [name.removesuffix("_lora_a") for name in factors if ".mlp." in name and "_a" in name]
    lora = {"alpha": 5.0, "alpha_by_module": dict.fromkeys(mlp, 2.0)}
    own = write_run(tmp_path / "own", factors, {"lora": lora})

    def change(weights: dict[str, Array]) -> None:
        for inside, alpha in ((True, 2.0), (False, 5.0)):
            some = {name: a for name, a in factors.items() if (".mlp." in name) == inside}
            wide = {name: array.astype(np.float64) for name, array in weights.items()}
            for name, array in lora_oracle.merged(wide, "model.", some, alpha).items():
                weights[name] = array.astype(np.float32)

    right = spoilt(base, tmp_path / "right", change)
    assert compared(own, right, few, base=base).passed
    assert not compared(run, right, few, base=base, alpha=5.0).passed


def test_an_adapter_applied_twice_is_located(
    adapted: tuple[Path, Path], few: Path, tmp_path: Path
) -> None:
    wrong = merged(adapted, tmp_path / "wrong", 2 * 5.0)
    found = compared(adapted[1], wrong, few, base=adapted[0], alpha=5.0)
    assert wheres(found) == ["prompt few, layer 0"]


def test_without_a_base_an_orbax_checkpoint_is_an_error(
    adapted: tuple[Path, Path], few: Path
) -> None:
    with pytest.raises(InputError, match=r"no config.json; give the base model's"):
        compared(adapted[1], adapted[0], few)
