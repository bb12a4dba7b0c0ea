"""``surgery resize-lora``: down by singular values, up by zeros, the applied scale kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from gemma_convert.convert.readers import open_checkpoint, open_orbax
from gemma_convert.convert.tensor import Array
from gemma_convert.surgery.adapters.adapter import Adapter, digest
from gemma_convert.surgery.adapters.peft import read_peft
from tests import lora_oracle, peft_oracle, tiny
from tests.checkpoints import (
    BF16,
    F32,
    GEMMA3,
    arrays,
    base_arrays,
    factor_arrays,
    run_cli,
    snapshot,
    write_base,
    write_run,
)
from tests.peft_files import factors, write

Q, UP = (
    "model.language_model.layers.1.self_attn.q_proj",
    "model.language_model.layers.0.mlp.up_proj",
)
TOWER = "model.vision_tower.encoder.layers.0.mlp.fc1"
SIZES = {Q: (10, 42), UP: (10, 11), TOWER: (7, 13)}
RANKS = {Q: 5, UP: 3, TOWER: 4}
CONFIG: dict[str, Any] = {
    "r": 5,
    "lora_alpha": 8,
    "rank_pattern": {"up_proj": 3, "fc1": 4},
    "alpha_pattern": {"up_proj": 3},
    "base_model_name_or_path": "google/gemma-3-4b",
    "revision": "main",
}


def resize(directory: Path, *options: Any, adapter: str = "adapter", out: str = "out") -> int:
    words = ["surgery", "resize-lora", directory / adapter, "--out", directory / out]
    return run_cli(*words, "--quiet", *options)


def config_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "adapter_config.json").read_text())
    return found


def ledger(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "conversion.json").read_text())
    return found


def deltas(directory: Path) -> dict[str, Array]:
    """What PEFT adds by module, by its own reading of adapter_config.json; float64."""
    from peft import LoraConfig
    from peft.utils.other import get_pattern_key

    config, found = LoraConfig.from_pretrained(directory), {}
    with safe_open(directory / "adapter_model.safetensors", framework="numpy") as file:
        values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name in [name for name in values if name.endswith(".lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern, module), config.r)
        alphas = config.alpha_pattern
        alpha = alphas.get(get_pattern_key(alphas, module), config.lora_alpha)
        a, b = values[name], values[name.replace("lora_A", "lora_B")]
        assert (a.shape[0], b.shape[1]) == (rank, rank)
        scale = alpha / (np.sqrt(rank) if config.use_rslora else rank)
        found[module] = scale * (b.astype(np.float64) @ a)
    return found


@pytest.fixture(params=[False, True], ids=["lora", "rslora"])
def adapter(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Array]:
    """An adapter of unequal ranks and scales, of a tower too, and its deltas."""
    values: dict[str, Array] = {}
    for path, sizes in SIZES.items():
        values |= factors(path, *sizes, rank=RANKS[path])
    write(tmp_path / "adapter", values, use_rslora=request.param, **CONFIG)
    return deltas(tmp_path / "adapter")


def best(delta: Array, rank: int) -> Array:
    """The best approximation of a rank, and what is lost, by LAPACK."""
    u, s, vt = np.linalg.svd(delta)
    return np.asarray((u[:, :rank] * s[:rank]) @ vt[:rank])


def test_down_is_the_best_of_its_rank(tmp_path: Path, adapter: dict[str, Array]) -> None:
    assert resize(tmp_path, "--rank", 2) == 0
    found, told = deltas(tmp_path / "out"), ledger(tmp_path / "out")["modules"]
    assert found.keys() == adapter.keys()
    for module, delta in adapter.items():
        expected = best(delta, 2)
        assert np.allclose(found[module], expected, rtol=0, atol=1e-6)  # float32 factors
        lost = np.linalg.norm(delta - expected) / np.linalg.norm(delta)
        name = f"{module}.weight".removeprefix("model.language_model.").removeprefix("model.")
        assert (told[name]["rank_before"], told[name]["rank"]) == (RANKS[module], 2)
        assert np.isclose(told[name]["relative_error"], lost, rtol=1e-5, atol=0)
        assert np.isclose(told[name]["energy"], 1 - lost**2, rtol=1e-6, atol=0)
    config = config_of(tmp_path / "out")
    assert (config["r"], config["rank_pattern"], config["use_rslora"]) == (2, {}, False)
    assert (config["base_model_name_or_path"], config["revision"]) == ("google/gemma-3-4b", "main")


def test_up_is_exact(tmp_path: Path, adapter: dict[str, Array]) -> None:
    assert resize(tmp_path, "--rank", 9) == 0
    found = deltas(tmp_path / "out")
    for module, delta in adapter.items():
        # the factors are the same bits; alpha is a decimal number
        assert np.allclose(found[module], delta, rtol=1e-14, atol=1e-15)
    assert config_of(tmp_path / "out")["r"] == 9
    assert all(m["relative_error"] == 0 for m in ledger(tmp_path / "out")["modules"].values())


def test_more_rank_is_the_same_adapter(tmp_path: Path, capsys: Any) -> None:
    """Merged once is enough, in whatever format or dtype that holds it; fewer ranks are another."""
    write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model.", BF16))
    values = factors("model.layers.1.self_attn.q_proj", 10, 42, rank=3)
    values |= factors("model.layers.0.mlp.up_proj", 10, 11, rank=3)
    narrow = {name: array.astype(BF16) for name, array in values.items()}
    write(tmp_path / "adapter", narrow, r=3)
    assert resize(tmp_path, "--rank", 5, out="wide") == 0
    assert resize(tmp_path, "--rank", 3, "--dtype", "float32", out="float32") == 0
    assert resize(tmp_path, "--rank", 7, adapter="wide", out="wider") == 0
    orbax = ["--format", "orbax", "--base", tmp_path / "base"]
    assert resize(tmp_path, "--rank", 4, *orbax, out="orbax") == 0
    assert resize(tmp_path, "--rank", 2, out="small") == 0
    write(tmp_path / "exact", values, r=3)
    assert resize(tmp_path, "--rank", 4, "--dtype", "bfloat16", adapter="exact", out="rough") == 0
    base, out = tmp_path / "base", tmp_path / "merged"
    capsys.readouterr()
    for name in ("wide", "float32", "wider", "orbax"):
        words = ["surgery", "merge-lora", base, tmp_path / "adapter", tmp_path / name]
        assert run_cli(*words, "--out", out) == 1
        assert "adapter holds the same factors; leave it out" in capsys.readouterr().err
    for name in ("small", "rough"):
        assert "same_as" not in ledger(tmp_path / name)
    assert sorted(ledger(tmp_path / "wider")["same_as"]) == sorted(
        {*ledger(tmp_path / "wide")["same_as"], digest(open_peft(tmp_path / "wide"))}
    )


def open_peft(directory: Path) -> Adapter:
    return read_peft(open_checkpoint(directory))


@pytest.mark.parametrize("form", ["peft", "orbax"])
def test_into_the_other_format(form: str, tmp_path: Path) -> None:
    """The deltas that Tunix's and PEFT's form of the same adapter have."""
    write_base(tmp_path / "base", GEMMA3, {})
    values = factor_arrays(GEMMA3, F32)
    expected = lora_oracle.deltas(values, 3.0)
    write_run(tmp_path / "adapter", values, {"lora": {"alpha": 3.0}})
    base = ["--base", tmp_path / "base"]
    assert resize(tmp_path, "--rank", 5, "--format", "peft", *base, out="peft") == 0
    if form == "orbax":
        options = ["--rank", 7, "--format", "orbax", *base]
        assert resize(tmp_path, *options, adapter="peft") == 0
        opened = open_orbax(tmp_path / "out")
        found = lora_oracle.deltas(
            arrays(opened), opened.metadata["custom_metadata"]["lora"]["alpha"]
        )
    else:
        found = {
            f"{module.removeprefix('model.')}.weight": delta
            for module, delta in deltas(tmp_path / "peft").items()
        }
    assert found.keys() == expected.keys()
    for name, delta in expected.items():
        # the factors are the same bits; alpha is a decimal number
        assert np.allclose(found[name], delta, rtol=1e-13, atol=1e-14), name


def test_down_and_up_again_loses_nothing_more(tmp_path: Path, adapter: dict[str, Array]) -> None:
    assert resize(tmp_path, "--rank", 2) == 0
    assert resize(tmp_path, "--rank", 5, adapter="out", out="again") == 0
    one, two = deltas(tmp_path / "out"), deltas(tmp_path / "again")
    for module, delta in one.items():
        assert np.allclose(two[module], delta, rtol=1e-14, atol=1e-15)


def test_each_pair_gets_the_rank_of_its_energy(tmp_path: Path, adapter: dict[str, Array]) -> None:
    assert resize(tmp_path, "--energy", 0.8) == 0
    found = deltas(tmp_path / "out")
    for module, delta in adapter.items():
        share = np.cumsum(np.square(np.linalg.svd(delta)[1]))
        rank = int(np.argmax(share >= 0.8 * share[-1])) + 1
        assert np.linalg.matrix_rank(found[module], tol=1e-5) == rank
        assert np.allclose(found[module], best(delta, rank), rtol=0, atol=1e-6)


def test_an_equal_rank_is_the_same_bits(tmp_path: Path) -> None:
    values = {n: a.astype(BF16) for n, a in factors(Q, 10, 42, rank=3).items()}
    write(tmp_path / "adapter", values, r=3)
    assert resize(tmp_path, "--rank", 3) == 0
    with safe_open(tmp_path / "out" / "adapter_model.safetensors", framework="numpy") as file:
        for name, array in values.items():
            assert file.get_tensor(name).tobytes() == array.tobytes()


def test_a_tunix_adapter_stays_one(tmp_path: Path) -> None:
    values = factor_arrays(GEMMA3, F32)
    write_run(tmp_path / "adapter", values, {"lora": {"alpha": 3.0}})
    assert resize(tmp_path, "--rank", 5) == 0
    assert resize(tmp_path, "--rank", 1, out="small") == 0
    wide, small = (open_orbax(tmp_path / name) for name in ("out", "small"))
    loras = [opened.metadata["custom_metadata"]["lora"] for opened in (wide, small)]
    assert [(lora["rank"], lora["alpha"]) for lora in loras] == [(5, 7.5), (1, 1.5)]
    expected = lora_oracle.deltas(values, 3.0)
    for name, delta in lora_oracle.deltas(arrays(wide), 7.5).items():
        assert np.allclose(delta, expected[name], rtol=0, atol=1e-14)
    kv = "layers.1.attn.kv_einsum.w_lora_"
    assert {n: a.shape for n, a in arrays(small).items() if n.startswith(kv)} == {
        f"{kv}a": (10, 1),
        f"{kv}b": (1, 2, 3, 7),
    }
    joint = [f"layers.1.self_attn.{name}_proj.weight" for name in "kv"]
    found = np.vstack([lora_oracle.deltas(arrays(small), 1.5)[name] for name in joint])
    both = np.vstack([expected[name] for name in joint])
    assert np.allclose(found, best(both, 1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dora", [False, True])
def test_peft_computes_the_same_after_more_rank(dora: bool, tmp_path: Path) -> None:
    """Magnitudes and saved modules go along."""
    config = {"r": 2, "lora_alpha": 7, "rank_pattern": {"k_proj": 3}, "use_dora": dora}
    modules = {"target_modules": peft_oracle.ALL_LINEAR, "modules_to_save": ["input_layernorm"]}
    peft = peft_oracle.peft_model(tiny.hf_model("gemma2"), **config, **modules)
    expected = tiny.hf_logits(peft)
    peft_oracle.save(peft, tmp_path / "adapter")
    assert resize(tmp_path, "--rank", 5) == 0
    found = peft_oracle.loaded_logits(tiny.hf_model("gemma2"), tmp_path / "out")
    assert np.abs(found - expected).max() < 1e-4  # two float32 forwards


def test_dry_run(tmp_path: Path, adapter: Any, capsys: Any) -> None:
    before = snapshot(tmp_path)
    words = ["surgery", "resize-lora", tmp_path / "adapter", "--rank", 2, "--out", tmp_path / "out"]
    assert run_cli(*words, "--dry-run") == 0
    assert "3 pairs, rank 3 to 5 -> 2" in capsys.readouterr().out
    assert run_cli(*words, "--dry-run", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["modules"]) == 3
    assert snapshot(tmp_path) == before


def test_refusals(tmp_path: Path, adapter: Any, capsys: Any) -> None:
    assert resize(tmp_path) == 2
    assert resize(tmp_path, "--rank", 2, "--energy", 0.5) == 2
    a, b = factors("model.embed_tokens", 10, 23).values()
    stem = "base_model.model.model.embed_tokens.lora_embedding_"
    write(tmp_path / "embedding", {f"{stem}A": b.T, f"{stem}B": a.T}, peft_version="0.21.2")
    capsys.readouterr()
    assert resize(tmp_path, "--rank", 1, adapter="embedding") == 1
    assert "embed_tokens.weight: factors of an embedding, which cannot be written" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()
