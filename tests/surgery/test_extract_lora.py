"""``surgery extract-lora``: what changed, as factors; the rest listed or saved whole (F29)."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from gemma_convert.convert.jobs import hf_to_orbax
from gemma_convert.convert.readers import open_orbax, open_safetensors
from gemma_convert.convert.tensor import Array
from tests import lora_oracle, peft_oracle, tiny, tiny_towers
from tests.checkpoints import (
    CONFIGS,
    F32,
    GEMMA3,
    USUAL_PREFIX,
    arrays,
    base_arrays,
    factor_arrays,
    read_hf,
    run_cli,
    snapshot,
    write_base,
    write_run,
)
from tests.logits_pairs import spoilt

pytestmark = [
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:(tunix|qwix)\."),
    pytest.mark.filterwarnings("ignore:'sharding' is deprecated:DeprecationWarning"),
]

BOUND = 1e-4
"""Most that two float32 forwards may differ; these models' own float32 error is below 1e-5."""

Q = "model.layers.1.self_attn.q_proj"
UP = "model.layers.0.mlp.up_proj"
NORM, EMBEDDING = "model.layers.0.input_layernorm", "model.embed_tokens"
LEFT, RIGHT = (np.random.default_rng(9).normal(0, 0.3, shape) for shape in ((42, 2), (2, 10)))
DELTA = (LEFT @ RIGHT).astype(F32)


def extract(directory: Path, *options: Any, tuned: str = "tuned", out: str = "adapter") -> int:
    words = ["surgery", "extract-lora", directory / tuned, directory / "base"]
    return run_cli(*words, "--out", directory / out, "--quiet", *options)


def stored(directory: Path) -> dict[str, Array]:
    with safe_open(directory / "adapter_model.safetensors", framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def read(directory: Path, name: str = "conversion.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / name).read_text())
    return found


def product(directory: Path, module: str) -> Array:
    """What PEFT adds to a module, float64, by adapter_config.json."""
    config, values = read(directory, "adapter_config.json"), stored(directory)
    a, b = (values[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
    rank = config["rank_pattern"].get(module, config["r"])
    alpha = config["alpha_pattern"].get(module, config["lora_alpha"])
    assert len(a) == rank
    return np.asarray(alpha / rank * (b.astype(np.float64) @ a))


def relative(found: Array, expected: Array) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.fixture
def grown(tmp_path: Path) -> tuple[dict[str, Array], dict[str, Array]]:
    """F29: base and tuned = base + a rank 2 delta on q, another norm, one more token; on the disk.

    Up changes by a matrix of full rank, all of its singular values equal.
    """
    base = base_arrays(GEMMA3, "model.", F32)
    turn = np.linalg.qr(np.random.default_rng(8).normal(size=(11, 10)))[0].astype(F32)
    tuned = {
        **base,
        f"{Q}.weight": base[f"{Q}.weight"] + DELTA,
        f"{UP}.weight": base[f"{UP}.weight"] + turn,
        f"{NORM}.weight": base[f"{NORM}.weight"] * F32.type(1.25),
        f"{EMBEDDING}.weight": np.vstack([base[f"{EMBEDDING}.weight"], np.full((1, 10), 0.7, F32)]),
    }
    write_base(tmp_path / "base", GEMMA3, base)
    write_base(tmp_path / "tuned", {**GEMMA3, "vocab_size": 24}, tuned)
    return base, tuned


def test_low_rank_is_recovered_and_the_rest_listed(tmp_path: Path, grown: Any, capsys: Any) -> None:
    words = ["surgery", "extract-lora", tmp_path / "tuned", tmp_path / "base", "--rank", 2]
    assert run_cli(*words, "--out", tmp_path / "adapter") == 0
    assert relative(product(tmp_path / "adapter", Q), DELTA) < 1e-5
    config, ledger = read(tmp_path / "adapter", "adapter_config.json"), read(tmp_path / "adapter")
    assert config["target_modules"] == [Q]
    assert (config["r"], config["lora_alpha"], config["modules_to_save"]) == (2, 2, None)
    assert stored(tmp_path / "adapter").keys() == {
        f"base_model.model.{Q}.lora_{side}.weight" for side in "AB"
    }
    told = ledger["modules"][f"{Q}.weight"]
    assert (told["rank"], told["shape"]) == (2, [42, 10])
    assert told["relative_error"] < 1e-5
    assert np.isclose(told["energy"], 1, rtol=0, atol=1e-10)
    # 8 of 10 equal singular values are missing: sqrt(0.8) = 89 %
    assert {entry["name"]: entry["reason"] for entry in ledger["rest"]} == {
        f"{EMBEDDING}.weight": "23 rows became 24",
        f"{NORM}.weight": "a norm or a scalar",
        f"{UP}.weight": "at rank 2 89% of the change is missing",
    }
    assert not any(entry["saved"] for entry in ledger["rest"])
    assert "note: 3 tensors changed that the adapter does not hold, such as" in (
        capsys.readouterr().err
    )


def test_the_rest_is_saved_whole(tmp_path: Path, grown: Any) -> None:
    assert extract(tmp_path, "--rank", 2, "--save-rest") == 0
    config, values = read(tmp_path / "adapter", "adapter_config.json"), stored(tmp_path / "adapter")
    assert config["target_modules"] == [Q]
    assert config["modules_to_save"] == sorted([EMBEDDING, NORM, UP])
    assert config["ensure_weight_tying"] is True
    for module in (EMBEDDING, NORM, UP):
        expected = grown[1][f"{module}.weight"]
        assert np.array_equal(values[f"base_model.model.{module}.weight"], expected)
    assert all(entry["saved"] for entry in read(tmp_path / "adapter")["rest"])
    assert read(tmp_path / "adapter")["notes"] == [
        f"{EMBEDDING}.weight: 23 rows became 24: resize the base's before loading the adapter"
    ]


def test_saved_modules_and_factors_merge_to_what_was_tuned(tmp_path: Path, grown: Any) -> None:
    base, tuned = grown
    tuned = {**tuned, f"{EMBEDDING}.weight": base[f"{EMBEDDING}.weight"] + F32.type(0.1)}
    write_base(tmp_path / "same size", GEMMA3, tuned)
    assert extract(tmp_path, "--rank", 2, "--save-rest", tuned="same size") == 0
    words = ["surgery", "merge-lora", tmp_path / "base", tmp_path / "adapter"]
    assert run_cli(*words, "--out", tmp_path / "merged", "--quiet") == 0
    merged = read_hf(tmp_path / "merged")
    assert merged.keys() == tuned.keys()
    assert np.allclose(merged.pop(f"{Q}.weight"), tuned.pop(f"{Q}.weight"), rtol=0, atol=1e-6)
    for name, array in merged.items():
        assert np.array_equal(array, tuned[name]), name


LAYOUTS = ["hf", "tunix", "deepmind", "maxtext"]


@pytest.mark.parametrize("form", ["peft", "orbax"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", CONFIGS)
def test_extracted_and_merged_again(family: str, layout: str, form: str, tmp_path: Path) -> None:
    """Tuned in any layout: every matrix changed by rank 2, k and v with one A."""
    config, prefix = CONFIGS[family], USUAL_PREFIX[family]
    base, factors = base_arrays(config, prefix, F32), factor_arrays(config, F32)
    tuned = {n: np.asarray(a, F32) for n, a in merged(base, prefix, factors).items()}
    write_base(tmp_path / "base", config, base)
    write_base(tmp_path / "hf", config, tuned)
    if layout != "hf":
        words = ["convert", tmp_path / "hf", "--to", layout, "--out", tmp_path / layout]
        assert run_cli(*words, "--quiet") == 0
    assert extract(tmp_path, "--rank", 2, "--format", form, tuned=layout) == 0
    words = ["surgery", "merge-lora", tmp_path / "base", tmp_path / "adapter"]
    assert run_cli(*words, "--out", tmp_path / "merged", "--quiet") == 0
    found = read_hf(tmp_path / "merged")
    ledger = read(tmp_path / "adapter")
    worst = max(module["relative_error"] for module in ledger["modules"].values())
    assert worst < 1e-5
    for name, array in tuned.items():
        assert np.allclose(found[name], array, rtol=0, atol=2e-6), name
    assert ledger["rest"] == []


def merged(
    base: Mapping[str, Array], prefix: str, factors: Mapping[str, Array]
) -> dict[str, Array]:
    return lora_oracle.merged(base, prefix, factors, 3.0)


def test_orbax_output_has_one_pair_for_key_and_value(tmp_path: Path) -> None:
    base, factors = base_arrays(GEMMA3, "model.", F32), factor_arrays(GEMMA3, F32)
    tuned = {n: np.asarray(a, F32) for n, a in merged(base, "model.", factors).items()}
    write_base(tmp_path / "base", GEMMA3, base)
    write_base(tmp_path / "tuned", GEMMA3, tuned)
    assert extract(tmp_path, "--rank", 2, "--format", "orbax") == 0
    opened = open_orbax(tmp_path / "adapter")
    found = arrays(opened)
    assert {n: a.shape for n, a in found.items()} == {n: a.shape for n, a in factors.items()}
    assert opened.metadata["custom_metadata"]["lora"]["alpha"] == 2
    for name, delta in lora_oracle.deltas(factors, 3.0).items():
        assert relative(lora_oracle.deltas(found, 2.0)[name], delta) < 1e-5


def test_ranks_by_energy(tmp_path: Path) -> None:
    """Singular values 2, 1 and 0.5 on q and one on up: 0.9 of the energy is rank 2, and rank 1."""
    base = base_arrays(GEMMA3, "model.", F32)
    random = np.random.default_rng(7)
    u, v = (np.linalg.qr(random.normal(size=(size, 3)))[0] for size in (42, 10))
    wide = (u * [2, 1, 0.5]) @ v.T
    single = np.outer(u[:11, 0], v[:, 0])
    tuned = {**base, f"{Q}.weight": (base[f"{Q}.weight"] + wide).astype(F32)}
    tuned[f"{UP}.weight"] = (base[f"{UP}.weight"] + single).astype(F32)
    write_base(tmp_path / "base", GEMMA3, base)
    write_base(tmp_path / "tuned", GEMMA3, tuned)
    assert extract(tmp_path, "--energy", 0.9) == 0
    config, ledger = read(tmp_path / "adapter", "adapter_config.json"), read(tmp_path / "adapter")
    assert (config["r"], config["rank_pattern"], config["alpha_pattern"]) == (2, {UP: 1}, {UP: 1})
    told = ledger["modules"][f"{Q}.weight"]
    lost = 0.25 / 5.25
    assert np.isclose(told["energy"], 1 - lost, rtol=1e-6, atol=0)
    assert np.isclose(told["relative_error"], np.sqrt(lost), rtol=1e-5, atol=0)
    assert np.isclose(relative(product(tmp_path / "adapter", Q), wide), np.sqrt(lost), rtol=1e-5)
    assert ledger["notes"] == []


def test_an_energy_that_the_largest_rank_does_not_reach(tmp_path: Path) -> None:
    """Singular values 2, 1 and 0.5: of rank 1 and 0.9 one keeps 4 / 5.25, and that is said."""
    base = base_arrays(GEMMA3, "model.", F32)
    random = np.random.default_rng(7)
    u, v = (np.linalg.qr(random.normal(size=(size, 3)))[0] for size in (42, 10))
    changed = base[f"{Q}.weight"] + (u * [2, 1, 0.5]) @ v.T
    write_base(tmp_path / "base", GEMMA3, base)
    write_base(tmp_path / "tuned", GEMMA3, {**base, f"{Q}.weight": changed.astype(F32)})
    options = ["--energy", 0.9, "--max-rank", 1, "--max-error", 1]
    assert extract(tmp_path, *options) == 0
    assert read(tmp_path / "adapter")["notes"] == [
        "1 pairs keep less than the energy 0.9 asked for, since --max-rank is 1: the least 0.7619, "
        f"{Q}.weight"
    ]


def test_factors_are_balanced_and_the_dtype_is_asked_for(tmp_path: Path, grown: Any) -> None:
    assert extract(tmp_path, "--rank", 2) == 0
    a, b = stored(tmp_path / "adapter").values()
    assert a.dtype == F32
    assert np.isclose(np.linalg.norm(a), np.linalg.norm(b), rtol=1e-5, atol=0)
    assert extract(tmp_path, "--rank", 2, "--dtype", "bfloat16", out="narrow") == 0
    told = read(tmp_path / "narrow")["modules"][f"{Q}.weight"]["relative_error"]
    # each factor is off by up to 2^-9 of its values
    assert 1e-4 < told < 2 * 2**-8
    assert np.isclose(relative(product(tmp_path / "narrow", Q), DELTA), told, rtol=1e-3, atol=0)


def test_dry_run_tells_and_writes_nothing(tmp_path: Path, grown: Any, capsys: Any) -> None:
    before = snapshot(tmp_path)
    assert extract(tmp_path, "--rank", 2, "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["modules"][f"{Q}.weight"]["rank"] == 2
    assert len(plan["rest"]) == 3
    assert extract(tmp_path, "--rank", 2, "--dry-run") == 0
    assert "1, rank 2, alpha = rank" in capsys.readouterr().out
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ([], 2, "Give --rank or --energy."),
        (["--rank", 2, "--energy", 0.9], 2, "Give --rank or --energy."),
        (["--rank", 2, "--max-rank", 256], 2, "--max-rank goes with --energy"),
        (["--rank", 2, "--format", "orbax", "--save-rest"], 2, "--save-rest needs --format peft"),
        (
            ["--rank", 2, "--max-error", 1e-9],
            1,
            "4 tensors differ from .*base, and none is a matrix "
            "whose change is of low rank, such as .* \\(.*\\); are these",
        ),
    ],
)
def test_refusals(
    options: list[Any], code: int, message: str, tmp_path: Path, grown: Any, capsys: Any
) -> None:
    import re

    assert extract(tmp_path, *options) == code
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "adapter").exists()


def test_the_same_checkpoint_twice_has_no_adapter(tmp_path: Path, grown: Any, capsys: Any) -> None:
    write_base(tmp_path / "again", GEMMA3, grown[0])
    assert extract(tmp_path, "--rank", 2, tuned="again") == 1
    error = capsys.readouterr().err
    assert "again: all weights are those of" in error
    assert "base; give a base and what was trained from it" in error


def test_unmerged_factors_are_refused(tmp_path: Path, grown: Any, capsys: Any) -> None:
    write_run(tmp_path / "run", factor_arrays(GEMMA3, F32))
    assert extract(tmp_path, "--rank", 2, tuned="run") == 1
    assert (
        "model_params: it holds LoRA factors, where weights are compared" in capsys.readouterr().err
    )


def test_values_that_are_not_finite_are_refused(tmp_path: Path, grown: Any, capsys: Any) -> None:
    values = grown[1][f"{Q}.weight"].copy()
    values[3, 4] = np.nan
    write_base(tmp_path / "diverged", GEMMA3, {**grown[0], f"{Q}.weight": values})
    assert extract(tmp_path, "--rank", 2, tuned="diverged") == 1
    assert f"{Q}.weight: the change has values that are NaN or infinite" in capsys.readouterr().err


def test_towers_are_compared_where_both_have_them(tmp_path: Path) -> None:
    config = CONFIGS["gemma4"]
    prefix, tower = USUAL_PREFIX["gemma4"], "model.vision_tower.patch_embedder.input_proj.weight"
    base = base_arrays(config, prefix, F32)
    name = f"{prefix}layers.1.self_attn.q_proj.weight"
    tuned = {**base, name: base[name] + DELTA}
    write_base(tmp_path / "text", config, tuned)
    words = ["convert", tmp_path / "text", "--to", "tunix", "--out", tmp_path / "tunix"]
    assert run_cli(*words, "--quiet") == 0
    pixels = {tower: np.full((5, 7), 0.3, F32)}
    write_base(tmp_path / "base", config, base | pixels)
    assert extract(tmp_path, "--rank", 2, tuned="tunix") == 0
    ledger = read(tmp_path / "adapter")
    assert (list(ledger["modules"]), ledger["rest"]) == ([name], [])
    assert ledger["dropped"][tower] == "only one of the two has it"
    write_base(tmp_path / "seen", config, {**tuned, tower: np.full((5, 7), 0.4, F32)})
    assert extract(tmp_path, "--rank", 2, "--save-rest", tuned="seen", out="both") == 0
    assert read(tmp_path / "both")["rest"] == [
        {
            "name": tower.removeprefix("model."),
            "reason": "outside the text model",
            "saved": False,
        }
    ]


def test_what_no_layer_reads_is_not_compared(tmp_path: Path) -> None:
    """Tunix's models carry keys and values of layers that share another's: there they are zeros."""
    base = tiny.hf_model("gemma4-e2b")
    base.save_pretrained(tmp_path / "base")
    config = {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj"]}
    tuned = peft_oracle.peft_model(base, **config).merge_and_unload()
    tuned.save_pretrained(tmp_path / "hf")
    words = ["convert", tmp_path / "hf", "--to", "tunix", "--out", tmp_path / "tunix"]
    assert run_cli(*words, "--quiet") == 0
    assert extract(tmp_path, "--rank", 3, "--format", "orbax", tuned="tunix") == 0
    ledger = read(tmp_path / "adapter")
    assert list(ledger["modules"]) == [f"layers.{i}.attn.q_einsum.w" for i in range(5)]
    assert ledger["rest"] == []


def test_a_tower_that_changed_is_told_across_layouts(tmp_path: Path) -> None:
    """Tunix's names of SigLIP are not Hugging Face's; what changed there is no low rank."""
    base = tiny_towers.save("gemma3", tmp_path / "base")
    target = hf_to_orbax(open_safetensors(base)).plan.target
    values = {name: array.copy() for name, array in arrays(target).items()}
    kernel, tower = "layers.0.mlp.gate_proj.kernel", "layers.0.mlp.fc1.weight"
    values[kernel] += np.outer(*(np.ones(n, F32) for n in values[kernel].shape))
    (fc1,) = [n for n in values if "siglip" in n and n.endswith("blocks.0.mlp.fc1.kernel")]
    values[fc1] += 1
    write_run(tmp_path / "tuned", values)
    assert extract(tmp_path, "--rank", 2) == 0
    (rest,) = read(tmp_path / "adapter")["rest"]
    assert rest["name"].endswith(f"vision_tower.encoder.{tower}")
    assert rest["reason"] == "outside the text model"


def test_a_weight_that_tunix_scales(tmp_path: Path) -> None:
    """per_layer_model_projection: the delta of Tunix's factors is one of the scaled weight."""
    base = tiny.hf_model("gemma4-e2b")
    base.save_pretrained(tmp_path / "base")
    random = np.random.default_rng(4)

    def change(weights: dict[str, Any]) -> None:
        (name,) = [name for name in weights if "per_layer_model_projection" in name]
        rows, columns = weights[name].shape
        weights[name] += random.normal(size=(rows, 2)) @ random.normal(size=(2, columns))

    spoilt(tmp_path / "base", tmp_path / "tuned", change)
    assert extract(tmp_path, "--rank", 2, "--format", "orbax") == 0
    words = ["orbax-to-hf", tmp_path / "adapter", "--base", tmp_path / "base"]
    assert run_cli(*words, "--out", tmp_path / "merged", "--quiet") == 0
    tuned, merged = (
        load_file(tmp_path / name / "model.safetensors") for name in ("tuned", "merged")
    )
    for name, array in tuned.items():  # values up to 8, of an SVD in float32
        np.testing.assert_allclose(merged[name], array, rtol=0, atol=1e-5)


def test_peft_loads_it_and_computes_what_was_tuned(tmp_path: Path) -> None:
    """A model with one more token, another norm, a matrix of full rank and many of rank 3."""
    import torch
    from peft import PeftModel

    base = tiny.hf_model("gemma3")
    base.save_pretrained(tmp_path / "base")
    config = {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    tuned = peft_oracle.peft_model(base, **config).merge_and_unload()
    tuned.resize_token_embeddings(510, mean_resizing=False)
    with torch.no_grad():
        tuned.model.layers[1].input_layernorm.weight.mul_(1.25)
        tuned.model.embed_tokens.weight[7].add_(0.1)
        tuned.model.layers[0].mlp.up_proj.weight.add_(
            0.1 * torch.randn(88, 60, generator=torch.Generator().manual_seed(2))
        )
    tuned.save_pretrained(tmp_path / "tuned")
    expected = tiny.hf_logits(tuned)
    assert extract(tmp_path, "--rank", 3, "--save-rest") == 0
    resized = tiny.hf_model("gemma3")
    resized.resize_token_embeddings(510, mean_resizing=False)
    assert np.abs(tiny.hf_logits(resized) - expected).max() > 0.1
    found = tiny.hf_logits(PeftModel.from_pretrained(resized, tmp_path / "adapter").eval())
    assert np.abs(found - expected).max() < BOUND


def test_a_head_that_came_apart_from_the_embedding(tmp_path: Path) -> None:
    """Saved as a module, PEFT gives the base's tied head what the tuned one has."""
    import torch
    from peft import PeftModel

    base = tiny.hf_model("gemma3")
    base.save_pretrained(tmp_path / "base")
    tuned = peft_oracle.peft_model(base, r=3, target_modules=["q_proj"]).merge_and_unload()
    noise = torch.randn(509, 60, generator=torch.Generator().manual_seed(3))
    tuned.lm_head.weight = torch.nn.Parameter(tuned.lm_head.weight.detach() + 0.1 * noise)
    tuned.config.tie_word_embeddings = False
    tuned.save_pretrained(tmp_path / "tuned")
    expected = tiny.hf_logits(tuned)
    assert extract(tmp_path, "--rank", 3) == 0
    rest = {"name": "lm_head.weight", "reason": "a head of its own", "saved": False}
    assert read(tmp_path / "adapter")["rest"] == [rest]
    assert extract(tmp_path, "--rank", 3, "--save-rest", "--force") == 0
    model = tiny.hf_model("gemma3")
    assert np.abs(tiny.hf_logits(model) - expected).max() > 0.1
    with warnings.catch_warnings():  # PEFT remarks that head and embedding were tied
        warnings.simplefilter("ignore")
        found = PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    assert np.abs(tiny.hf_logits(found) - expected).max() < BOUND


def test_tunix_restores_it(tmp_path: Path) -> None:
    import qwix
    from flax import nnx
    from tunix.sft.checkpoint_manager import CheckpointManager

    base = tiny.hf_model("gemma4-12b")
    base.save_pretrained(tmp_path / "base")
    config = {"r": 3, "lora_alpha": 7, "target_modules": peft_oracle.ALL_LINEAR}
    tuned = peft_oracle.peft_model(base, **config).merge_and_unload()
    tuned.save_pretrained(tmp_path / "tuned")
    expected = tiny.hf_logits(tuned)
    assert extract(tmp_path, "--rank", 6, "--format", "orbax") == 0  # k's 3 and v's 3

    words = ["hf-to-orbax", tmp_path / "base", "--layout", "tunix", "--out", tmp_path / "weights"]
    assert run_cli(*words, "--quiet") == 0
    model = tiny.tunix_model("gemma4-12b", seed=8)
    tiny.tunix_restore(model, tmp_path / "weights")
    lora = open_orbax(tmp_path / "adapter").metadata["custom_metadata"]["lora"]
    provider = qwix.LoraProvider([qwix.LoraRule(**rule) for rule in lora["rules"]])
    adapted = qwix.apply_lora_to_model(model, provider, **model.get_model_input(), rngs=nnx.Rngs(0))
    manager = CheckpointManager(str(tmp_path / "adapter"))
    manager.maybe_restore(adapted, restore_only_lora_params=True)
    manager.close()
    assert np.abs(tiny.tunix_logits(adapted) - expected).max() < BOUND
