"""Adapters from Tunix to PEFT and back: bit for bit, and by what PEFT and Tunix compute."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from gemma_convert.convert.readers import open_orbax
from gemma_convert.convert.tensor import Array
from tests import peft_oracle, tiny
from tests.checkpoints import (
    BF16,
    CONFIGS,
    F32,
    GEMMA3,
    arrays,
    assert_same_bits,
    factor_arrays,
    run_cli,
    write_base,
    write_run,
)
from tests.peft_files import factors, write

pytestmark = [
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:(tunix|qwix)\."),
    pytest.mark.filterwarnings("ignore:'sharding' is deprecated:DeprecationWarning"),
]

BOUND = 1e-4
"""Most that two float32 forwards may differ; these models' own float32 error is below 1e-5."""

Q, KV, K = (f"layers.1.attn.{name}_einsum.w" for name in ("q", "kv", "k"))
FULL = {**GEMMA3, "num_key_value_heads": 6}


def stored(directory: Path) -> dict[str, Array]:
    with safe_open(directory / "adapter_model.safetensors", framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def config_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "adapter_config.json").read_text())
    return found


def to_peft(directory: Path, run: Path, *options: Any, out: str = "peft") -> Path:
    words = ["orbax-to-peft", run, "--base", directory / "base", "--out", directory / out]
    assert run_cli(*words, "--quiet", *options) == 0
    return directory / out


def to_orbax(directory: Path, adapter: Path, out: str = "orbax") -> Path:
    words = ["peft-to-orbax", adapter, "--base", directory / "base", "--out", directory / out]
    assert run_cli(*words, "--quiet") == 0
    return directory / out


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("family", [*CONFIGS, "fused"])
def test_there_and_back_bit_for_bit(family: str, dtype: Any, tmp_path: Path) -> None:
    config = {**CONFIGS, "fused": FULL}[family]
    write_base(tmp_path / "base", config, {})
    values = factor_arrays(config, dtype)
    random = np.random.default_rng(4)
    values[f"{Q}_lora_a" if family != "fused" else "layers.1.attn.qkv_einsum.w_lora_a"] = (
        random.normal(size=(10, 5)).astype(dtype)
    )
    b = f"{Q}_lora_b" if family != "fused" else "layers.1.attn.qkv_einsum.w_lora_b"
    values[b] = random.normal(size=(5, *values[b].shape[1:])).astype(dtype)
    run = write_run(tmp_path / "run", values, {"lora": {"alpha": 7}})
    back = open_orbax(to_orbax(tmp_path, to_peft(tmp_path, run)))
    assert_same_bits(arrays(back), values)
    lora = back.metadata["custom_metadata"]["lora"]
    assert lora["alpha"] == 7
    assert sorted(rule["rank"] for rule in lora["rules"]) == [2, 5]


def test_what_peft_gets(tmp_path: Path) -> None:
    """F05 and F07: k and v with the same A and their own half of B; what differs is said."""
    write_base(tmp_path / "base", GEMMA3, {})
    values = factor_arrays(GEMMA3)
    values[f"{Q}_lora_a"] = np.ones((10, 3), BF16)
    values[f"{Q}_lora_b"] = np.ones((3, 6, 7), BF16)
    run = write_run(tmp_path / "run", values)
    out = to_peft(tmp_path, run, "--alpha", 8, "--base-id", "google/gemma-3-270m")
    found, config = stored(out), config_of(out)
    stem = "base_model.model.model.layers.1.self_attn"
    a, b = values[f"{KV}_lora_a"], values[f"{KV}_lora_b"]
    for half, name in enumerate(("k_proj", "v_proj")):
        assert np.array_equal(found[f"{stem}.{name}.lora_A.weight"], a.T)
        expected = b[:, half].reshape(2, 21).T
        assert np.array_equal(found[f"{stem}.{name}.lora_B.weight"], expected)
    q = "model.layers.1.self_attn.q_proj"
    assert len(config["target_modules"]) == 14 == len(found) / 2
    assert (config["r"], config["lora_alpha"]) == (3, 8)
    assert q in config["target_modules"]
    assert config["rank_pattern"].keys() == {*config["target_modules"]} - {q}
    assert {*config["rank_pattern"].values()} == {2}
    assert config["alpha_pattern"] == {}
    assert config["base_model_name_or_path"] == "google/gemma-3-270m"
    assert {array.dtype for array in found.values()} == {BF16}


def test_a_baked_scale_is_alpha_equal_to_rank(tmp_path: Path) -> None:
    """F06: what a server that knows one scale applies is right for every module."""
    write_base(tmp_path / "base", GEMMA3, {})
    values = factor_arrays(GEMMA3, F32)
    values[f"{Q}_lora_a"], values[f"{Q}_lora_b"] = np.ones((10, 4), F32), np.ones((4, 6, 7), F32)
    run = write_run(tmp_path / "run", values)
    plain = stored(to_peft(tmp_path, run, "--alpha", 6, out="plain"))
    out = to_peft(tmp_path, run, "--alpha", 6, "--bake-scale", out="baked")
    config = config_of(out)
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 4, False)
    assert config["alpha_pattern"] == config["rank_pattern"]
    for name, array in stored(out).items():
        rank = 4 if "layers.1.self_attn.q_proj" in name else 2
        factor = 6 / rank if "lora_B" in name else 1
        assert np.array_equal(array, plain[name] * F32.type(factor))


def test_scales_that_differ_are_told(tmp_path: Path, capsys: Any) -> None:
    write_base(tmp_path / "base", GEMMA3, {})
    values = factor_arrays(GEMMA3)
    values[f"{Q}_lora_a"], values[f"{Q}_lora_b"] = np.ones((10, 4), BF16), np.ones((4, 6, 7), BF16)
    run = write_run(tmp_path / "run", values)
    words = ["orbax-to-peft", run, "--base", tmp_path / "base", "--out", tmp_path / "out"]
    assert run_cli(*words, "--alpha", 6, "--dry-run") == 0
    assert "vLLM applies one scale to all; for vLLM write it with --bake-scale" in (
        " ".join(capsys.readouterr().err.split())
    )
    assert not (tmp_path / "out").exists()


def test_target_modules_are_met_once_and_no_tower_is_hit(tmp_path: Path) -> None:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    nested = {"model_type": "gemma3", "text_config": {**GEMMA3}, "vision_config": {"x": 1}}
    write_base(tmp_path / "base", nested, {})
    run = write_run(tmp_path / "run", factor_arrays(GEMMA3), {"lora_alpha": 4})
    config = LoraConfig(**config_of(to_peft(tmp_path, run)))
    assert len(config.target_modules) == 14
    text = "model.language_model.layers.1.self_attn.q_proj"
    assert check_target_module_exists(config, text)
    for path in (
        "model.vision_tower.vision_model.encoder.layers.1.self_attn.q_proj",
        "model.vision_tower.encoder.layers.1.self_attn.q_proj",
        "model.language_model.layers.11.self_attn.q_proj",
        f"{text}.base_layer",
        "lm_head",
    ):
        assert not check_target_module_exists(config, path)


def in_dtype(values: dict[str, Array], dtype: Any) -> dict[str, Array]:
    return {name: array.astype(dtype) for name, array in values.items()}


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_unequal_factors_of_key_and_value_are_stacked(dtype: Any, tmp_path: Path) -> None:
    """Ranks 2 and 3, scales 2.5 and 4: k's delta and v's, each with its own, in one pair.

    Multiplied by 1.6, factors of 16 bits are no longer such.
    """
    key = in_dtype(factors("model.layers.0.self_attn.k_proj", 10, 21), dtype)
    value = in_dtype(factors("model.layers.0.self_attn.v_proj", 10, 21, rank=3), dtype)
    patterns = {"rank_pattern": {"v_proj": 3}, "alpha_pattern": {"v_proj": 12}}
    write_base(tmp_path / "base", GEMMA3, {})
    write(tmp_path / "adapter", {**key, **value}, **patterns)
    root = to_orbax(tmp_path, tmp_path / "adapter")
    found = in_dtype(arrays(open_orbax(root)), F32)
    kv = "layers.0.attn.kv_einsum.w_lora_"
    assert found.keys() == {f"{kv}a", f"{kv}b"}
    assert (found[f"{kv}a"].shape, found[f"{kv}b"].shape) == ((10, 5), (5, 2, 3, 7))
    delta = 2.5 * np.einsum("dr,rskh->skhd", found[f"{kv}a"], found[f"{kv}b"]).reshape(2, 21, 10)
    for half, (scale, pair) in enumerate(((2.5, key), (4.0, value))):
        a, b = in_dtype(pair, F32).values()
        assert np.allclose(delta[half], scale * (b @ a), rtol=0, atol=1e-5)  # |delta| < 10
    ledger = json.loads((root / "conversion.json").read_text())
    assert ledger["notes"] == [
        "layers.0.attn.kv_einsum.w: its parts have different A's, stacked to rank 2 + 3 = 5"
    ]


def test_factors_of_several_dtypes_are_stacked_in_float32(tmp_path: Path) -> None:
    key = in_dtype(factors("model.layers.0.self_attn.k_proj", 10, 21), BF16)
    value = factors("model.layers.0.self_attn.v_proj", 10, 21)
    write_base(tmp_path / "base", GEMMA3, {})
    write(tmp_path / "adapter", {**key, **value})
    found = arrays(open_orbax(to_orbax(tmp_path, tmp_path / "adapter")))
    kv = "layers.0.attn.kv_einsum.w_lora_"
    assert {array.dtype for array in found.values()} == {np.dtype(F32)}
    delta = np.einsum("dr,rskh->skhd", found[f"{kv}a"], found[f"{kv}b"]).reshape(2, 21, 10)
    for half, pair in enumerate((key, value)):
        a, b = in_dtype(pair, F32).values()
        assert np.allclose(delta[half], b @ a, rtol=0, atol=1e-5)  # |delta| < 10


def test_stacked_ranks_come_apart_again(tmp_path: Path) -> None:
    """Each part gets its own factors back, bit for bit, and Orbax is the same once more."""
    key = factors("model.layers.0.self_attn.k_proj", 10, 21)
    value = factors("model.layers.0.self_attn.v_proj", 10, 21, rank=3)
    write_base(tmp_path / "base", GEMMA3, {})
    # alpha / r is the same: no B is multiplied
    patterns = {"rank_pattern": {"v_proj": 3}, "alpha_pattern": {"v_proj": 7.5}}
    write(tmp_path / "adapter", {**key, **value}, **patterns)
    root = to_orbax(tmp_path, tmp_path / "adapter", out="stacked")
    back = to_peft(tmp_path, root)
    assert_same_bits(stored(back), {**key, **value})
    assert {config_of(back)["r"], *config_of(back)["rank_pattern"].values()} == {2, 3}
    again = to_orbax(tmp_path, back, out="again")
    assert_same_bits(arrays(open_orbax(again)), arrays(open_orbax(root)))


@pytest.mark.parametrize("values", ["equal A's", "a rank of both", "none of v", "wrong order"])
def test_what_is_not_stacked_stays_whole(values: str, tmp_path: Path) -> None:
    write_base(tmp_path / "base", GEMMA3, {})
    tensors = {name: array for name, array in factor_arrays(GEMMA3, F32).items() if KV in name}
    a = tensors[f"{KV}_lora_a"] = np.arange(50, dtype=F32).reshape(10, 5)
    b = tensors[f"{KV}_lora_b"] = np.ones((5, 2, 3, 7), F32)
    b[:2, 1] = b[2:, 0] = 0
    if values == "equal A's":
        a, b = a[:, :4], b[:4]
        a[:, 2:] = a[:, :2]
    elif values == "a rank of both":
        b[2, 0, 1, 3] = -0.0
    elif values == "none of v":
        b[:, 1] = 0
    else:
        b = b[:, ::-1]
    tensors |= {f"{KV}_lora_a": a, f"{KV}_lora_b": np.ascontiguousarray(b)}
    run = write_run(tmp_path / "run", tensors, {"lora": {"alpha": 7}})
    adapter = to_peft(tmp_path, run)
    shapes = {array.shape for name, array in stored(adapter).items() if "lora_A" in name}
    assert shapes == {(b.shape[0], 10)}
    assert_same_bits(arrays(open_orbax(to_orbax(tmp_path, adapter))), tensors)


def test_a_key_without_a_value_leaves_the_value_alone(tmp_path: Path) -> None:
    values = factors("model.layers.0.self_attn.k_proj", 10, 21)
    write_base(tmp_path / "base", GEMMA3, {})
    root = to_orbax(tmp_path, write(tmp_path / "adapter", values))
    b = arrays(open_orbax(root))["layers.0.attn.kv_einsum.w_lora_b"]
    assert b.shape == (2, 2, 3, 7)
    assert not b[:, 1].any()
    assert np.array_equal(b[:, 0].reshape(2, 21).T, [*values.values()][1])


@pytest.mark.parametrize(
    ("path", "shapes", "config", "message"),
    [
        (
            "model.embed_tokens",
            (10, 23),
            {"peft_version": "0.21.2"},
            "factors of an embedding or of experts, which cannot be written for Qwix",
        ),
        ("lm_head", (10, 23), {}, "it changes lm_head.weight, outside the text model, which an"),
        (
            "model.vision_tower.encoder.layers.0.self_attn.q_proj",
            (5, 5),
            {},
            r"changes \S+q_proj.weight, outside the text model, which an adapter of Qwix has",
        ),
    ],
)
def test_what_tunix_cannot_hold_is_refused(
    path: str, shapes: tuple[int, int], config: Any, message: str, tmp_path: Path, capsys: Any
) -> None:
    values = factors(path, *shapes)
    if "embed" in path:
        renamed = [name.replace("lora_", "lora_embedding_")[:-7] for name in values]
        a = np.ones((2, 23), F32)
        values = dict(zip(renamed, (a, np.ones((10, 2), F32)), strict=True))
    write_base(tmp_path / "base", GEMMA3, {})
    adapter = write(tmp_path / "adapter", values, **config)
    words = ["peft-to-orbax", adapter, "--base", tmp_path / "base", "--out", tmp_path / "out"]
    assert run_cli(*words) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_an_alpha_that_contradicts_the_stored_one(tmp_path: Path, capsys: Any) -> None:
    write_base(tmp_path / "base", GEMMA3, {})
    run = write_run(tmp_path / "run", factor_arrays(GEMMA3), {"lora": {"alpha": 7}})
    values = factors("model.layers.0.self_attn.q_proj", 10, 42)
    peft = write(tmp_path / "peft", values)
    stored = "the checkpoint's metadata says alpha 7, --alpha says 8; leave --alpha out"
    file = "--alpha 8: its adapter_config.json says the scale; leave --alpha out"
    for command, adapter, message in (
        (["orbax-to-peft", run, "--base", tmp_path / "base"], run, stored),
        (["surgery", "resize-lora", run, "--rank", 3], run, stored),
        (["surgery", "resize-lora", peft, "--rank", 3], peft, file),
        (["surgery", "combine-lora", run, run, "--force"], run, stored),
        (["surgery", "combine-lora", peft, peft, "--force"], peft, file),
    ):
        assert run_cli(*command, "--alpha", 8, "--out", tmp_path / "out") == 1, command
        assert re.match(f"error: {adapter}\\S*: {re.escape(message)}", capsys.readouterr().err)


def test_dora_and_saved_modules_do_not_go_to_tunix(tmp_path: Path, capsys: Any) -> None:
    write_base(tmp_path / "base", GEMMA3, {})
    values = factors("model.layers.0.self_attn.q_proj", 10, 42)
    magnitude = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"
    write(tmp_path / "dora", {**values, magnitude: np.ones(42, F32)}, use_dora=True)
    saved = {**values, "base_model.model.model.norm.weight": np.ones(10, F32)}
    write(tmp_path / "saved", saved, modules_to_save=["norm"])
    for name, message in (
        ("dora", "a DoRA magnitude"),
        ("saved", "replaces norm.weight as a whole"),
    ):
        words = ["peft-to-orbax", tmp_path / name, "--base", tmp_path / "base"]
        assert run_cli(*words, "--out", tmp_path / "out") == 1
        text = capsys.readouterr().err
        assert message in text
        assert "merge it: gemma-convert surgery merge-lora" in text


_PER_LAYER = ["per_layer_model_projection", "per_layer_input_gate", "per_layer_projection"]


@pytest.mark.parametrize(("case", "more"), [("gemma4-12b", []), ("gemma4-e2b", _PER_LAYER)])
def test_peft_and_tunix_compute_the_same(case: str, more: list[str], tmp_path: Path) -> None:
    """An adapter made by PEFT, run by Tunix; what comes back from there, run by PEFT again.

    Ranks and scales differ by module, those of k and v too: Tunix gets the rules of the metadata.
    """
    import qwix
    from flax import nnx
    from tunix.sft.checkpoint_manager import CheckpointManager

    tiny.hf_model(case).save_pretrained(tmp_path / "base")
    config = {
        "r": 3,
        "lora_alpha": 7,
        "target_modules": [*peft_oracle.ALL_LINEAR, *more],
        "rank_pattern": {"layers.1.self_attn.k_proj": 5, "up_proj": 2},
        "alpha_pattern": {"layers.1.self_attn.v_proj": 11},
    }
    peft = peft_oracle.peft_model(tiny.hf_model(case), **config)
    expected = tiny.hf_logits(peft)
    root = to_orbax(tmp_path, peft_oracle.save(peft, tmp_path / "adapter"))

    words = ["hf-to-orbax", tmp_path / "base", "--layout", "tunix", "--out", tmp_path / "weights"]
    assert run_cli(*words, "--quiet") == 0
    model = tiny.tunix_model(case, seed=8)
    tiny.tunix_restore(model, tmp_path / "weights")
    rules = open_orbax(root).metadata["custom_metadata"]["lora"]["rules"]
    provider = qwix.LoraProvider([qwix.LoraRule(**rule) for rule in rules])
    lora = qwix.apply_lora_to_model(model, provider, **model.get_model_input(), rngs=nnx.Rngs(0))
    manager = CheckpointManager(str(root))
    manager.maybe_restore(lora, restore_only_lora_params=True)
    manager.close()
    assert np.abs(tiny.tunix_logits(lora) - expected).max() < BOUND

    again = to_peft(tmp_path, root)
    found = peft_oracle.loaded_logits(tiny.hf_model(case), again)
    assert np.abs(found - expected).max() < BOUND

    words = ["orbax-to-hf", root, "--base", tmp_path / "base", "--out", tmp_path / "merged"]
    assert run_cli(*words, "--dtype", "float32", "--quiet") == 0
    assert np.abs(tiny.hf_logits(tiny.hf_loaded(tmp_path / "merged")) - expected).max() < BOUND
