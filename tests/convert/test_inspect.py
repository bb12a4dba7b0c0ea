"""What inspect says of checkpoints, complete, guessed, damaged and hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.inspect import inspect, tensor_list
from gemma_convert.convert.readers import open_checkpoint
from tests.checkpoints import (
    BF16,
    CONFIGS,
    F32,
    GEMMA3,
    GEMMA4,
    PREFIXES,
    base_arrays,
    factor_arrays,
    memory,
    run_cli,
    tunix_arrays,
    write_base,
    write_run,
)
from tests.peft_files import factors, write

SAMPLES = Path(__file__).parents[1] / "data" / "orbax_samples"
SIZES = {
    "gemma3": {"v": [23], "d": [10], "n": [6], "k": [3], "h": [7], "f": [11]},
    "gemma4": {"v": [23], "d": [10], "n": [6], "k": [2, 3], "h": [7, 13], "f": [11]},
}

LOCAL = {"theta": 10000.0, "scaling": "default", "factor": 1.0, "partial": 1.0}
PARTIAL = {"theta": 1e6, "scaling": "proportional", "factor": 1.0, "partial": 0.25}
ROPE = {
    "gemma3": {"full_attention": {**LOCAL, "theta": 1e6}, "sliding_attention": LOCAL},
    "gemma4": {"full_attention": PARTIAL, "sliding_attention": LOCAL},
}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_base_with_its_config(family: str, prefix: str) -> None:
    values = base_arrays(CONFIGS[family], prefix)
    report = inspect(memory(values, config=CONFIGS[family], source="base", format="safetensors"))
    assert report["layout"]["name"] == "hf"
    assert report["layout"]["prefix"] == prefix
    assert report["layout"]["evidence"].startswith(f"{len(values)} of {len(values)} names")
    assert report["model"]["family"] == family
    assert report["model"]["layers"] == {"gemma3": 2, "gemma4": 3}[family]
    assert report["model"]["sizes"] == SIZES[family]
    assert report["model"]["rope"] == ROPE[family]
    assert report["model"]["name"] is None
    assert "config.json: model_type" in report["model"]["evidence"]
    assert report["tensors"] == len(values)
    assert report["parameters"] == sum(array.size for array in values.values())
    assert report["bytes"] == sum(array.nbytes for array in values.values())
    assert report["dtypes"] == {"bfloat16": report["parameters"]}
    assert report["disagreements"] == []
    assert report["adapter"] is report["steps"] is None


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("factors", [False, True])
def test_a_tree_is_guessed_from_names_and_shapes(family: str, factors: bool) -> None:
    values = tunix_arrays(CONFIGS[family])
    pairs = factor_arrays(CONFIGS[family]) if factors else {}
    report = inspect(memory({**values, **pairs}))
    assert report["layout"]["name"] == "tunix"
    assert report["model"]["family"] == family
    assert report["model"]["layers"] == {"gemma3": 2, "gemma4": 3}[family]
    assert report["model"]["sizes"] == SIZES[family]
    assert "a guess from names and shapes" in report["model"]["evidence"]
    assert (report["adapter"] is not None) == factors


def test_factors_alone() -> None:
    factors = factor_arrays(GEMMA4)
    factors["layers.0.attn.q_einsum.w_lora_a"] = np.ones((10, 5), BF16)
    factors["layers.0.attn.q_einsum.w_lora_b"] = np.ones((5, 6, 7), BF16)
    metadata = {"custom_metadata": {"lora": {"alpha": 16}}}
    report = inspect(memory(factors, metadata=metadata))
    pairs = len(factors) // 2
    assert report["model"]["family"] == "gemma4"
    assert report["model"]["sizes"] == {a: s for a, s in SIZES["gemma4"].items() if a != "v"}
    assert report["adapter"]["pairs"] == pairs
    assert report["adapter"]["ranks"] == {"2": pairs - 1, "5": 1}
    assert report["adapter"]["alpha"] == 16
    assert report["adapter"]["rank_by_module"]["layers.0.attn.q_einsum.w"] == 5


@pytest.mark.parametrize(
    ("custom", "alpha"),
    [
        (None, None),
        ({}, None),
        ({"lora_alpha": 8}, 8),
        ({"lora": "yes"}, None),
        ({"lora": []}, None),
    ],
)
def test_stored_alpha(custom: Any, alpha: float | None) -> None:
    report = inspect(memory(factor_arrays(GEMMA3), metadata={"custom_metadata": custom}))
    assert report["adapter"]["alpha"] == alpha


def test_a_public_model_is_named() -> None:
    """The true sizes of Gemma 3 270M, in arrays that take no memory."""
    dims = {"vocab_size": 262144, "hidden_size": 640, "intermediate_size": 2048, "head_dim": 256}
    dims |= {"num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1}
    config = {"model_type": "gemma3_text", **dims}
    f, d, v = 2048, 640, 262144
    shapes = {"embedder.input_embedding": (v, d), "final_norm.scale": (d,)}
    for i in range(18):
        of_layer = {
            "attn.q_einsum.w": (4, d, 256),
            "attn.kv_einsum.w": (2, 1, d, 256),
            "attn.attn_vec_einsum.w": (4, 256, d),
            "attn._query_norm.scale": (256,),
            "attn._key_norm.scale": (256,),
            "mlp.gate_proj.kernel": (d, f),
            "mlp.up_proj.kernel": (d, f),
            "mlp.down_proj.kernel": (f, d),
            **{f"{x}_norm.scale": (d,) for x in ("pre_attention", "post_attention")},
            **{f"{x}_norm.scale": (d,) for x in ("pre_ffw", "post_ffw")},
        }
        shapes |= {f"layers.{i}.{name}": shape for name, shape in of_layer.items()}
    values = {n: np.broadcast_to(np.zeros((), BF16), shape) for n, shape in shapes.items()}
    assert inspect(memory(values))["model"]["name"] == "gemma-3-270m"
    report = inspect(memory(values, config=config))
    assert report["model"]["name"] == "gemma-3-270m"
    assert report["parameters"] == 268_098_176
    assert report["disagreements"] == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {**GEMMA3, "hidden_size": 12},
            "expected v d = 23 12 by config.json, found shape [23, 10]",
        ),
        ({**GEMMA3, "torch_dtype": "float32"}, "says dtype float32, the tensors are bfloat16"),
        ({"model_type": "llama"}, "model_type 'llama' is not a family known here"),
        ({**GEMMA3, "head_dim": -7}, "head_dim is -7, expected a positive whole number"),
        ({**GEMMA3, "attention_bias": True}, "attention biases are not supported yet"),
    ],
)
def test_where_config_and_tensors_disagree(config: dict[str, Any], message: str) -> None:
    report = inspect(memory(base_arrays(GEMMA3, "model."), config=config))
    assert any(message in text for text in report["disagreements"]), report["disagreements"]


def test_missing_and_unknown_tensors_are_listed() -> None:
    values = base_arrays(GEMMA3, "model.")
    del values["model.layers.1.mlp.up_proj.weight"]
    values["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, F32)
    report = inspect(memory(values, config=GEMMA3))
    found = "\n".join(report["disagreements"])
    assert "model.layers.1.mlp.up_proj.weight: missing (gate_up of layer 1)" in found
    assert "model.layers.0.self_attn.rotary_emb.inv_freq: no parameter of a gemma3" in found


@pytest.mark.parametrize(
    ("leaf", "missing"), [("_lora_a", "_lora_b"), (".array.qvalue", ".array.scale")]
)
def test_half_a_pair_and_codes_without_scales_are_told_not_raised(leaf: str, missing: str) -> None:
    values = {f"layers.0.attn.q_einsum.w{leaf}": np.ones((10, 2), F32)}
    assert f"w{missing} is missing" in inspect(memory(values))["disagreements"][0]


@pytest.mark.parametrize(("bits", "tile"), [(8, None), (4, 8)])
def test_quantised_weights(bits: int, tile: int | None) -> None:
    report = inspect(open_checkpoint(SAMPLES / f"qlora_int{bits}_full"))
    modules = ("attn_vec_einsum", "kv_einsum", "q_einsum")
    names = [f"attn.{m}" for m in modules] + [f"mlp.{m}_proj" for m in ("down", "gate", "up")]
    assert report["quantised"] == [
        {
            "codes": f"int{bits}",
            "scales": "bfloat16",
            "tile": tile,
            "modules": dict.fromkeys(names, 2),
        }
    ]
    assert not report["disagreements"]
    assert report["model"]["sizes"]["d"] == [32]
    assert report["adapter"]["pairs"] == 12
    assert not inspect(open_checkpoint(SAMPLES / "full_with_lora"))["quantised"]


def test_how_training_quantised_the_base() -> None:
    lora = {"alpha": 3, "weight_qtype": "nf4", "tile_size": 16}
    values = factor_arrays(GEMMA3)
    report = inspect(memory(values, metadata={"custom_metadata": {"lora": lora}}))
    assert report["adapter"]["base_quantization"] == "nf4, tile 16"
    assert not report["disagreements"]
    lora["weight_qtype"] = "fp7"
    report = inspect(memory(values, metadata={"custom_metadata": {"lora": lora}}))
    assert report["adapter"]["base_quantization"] is None
    assert "says weight_qtype 'fp7', tile_size 16" in report["disagreements"][0]


def test_names_of_no_known_layout() -> None:
    report = inspect(memory({"transformer.h.0.attn.weight": np.ones((2, 3), F32)}))
    assert report["layout"] is report["model"] is None


def test_a_peft_adapter(tmp_path: Path) -> None:
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    values = {
        f"{prefix}.lora_A.weight": np.ones((4, 10), F32),
        f"{prefix}.lora_B.weight": np.ones((42, 4), F32),
    }
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 32}
    report = inspect(memory(values, metadata={"adapter_config": config}))
    assert report["adapter"] == {
        "kind": "PEFT LoRA",
        "pairs": 1,
        "ranks": {"4": 1},
        "alpha": 32,
        "alpha_differs": False,
        "rank_by_module": {"layers.0.self_attn.q_proj.weight": 4},
        "modules": {"self_attn.q_proj": 1},
        "scales": [8.0],
        "scale_by_module": {"layers.0.self_attn.q_proj.weight": 8.0},
        "replaced": [],
        "base_quantization": None,
    }


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal in which no row is folded."""
    monkeypatch.setenv("COLUMNS", "200")


def inspected(path: Path, capsys: Any, *options: Any) -> list[str]:
    """The rows ``adapter`` and ``scale`` of what people are shown."""
    capsys.readouterr()
    assert run_cli("inspect", path, *options) == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    return [row[2].strip() for row in rows if row[1].strip() in ("adapter", "scale")]


PEFT_ALPHAS: list[tuple[dict[str, Any], str, str]] = [
    ({"lora_alpha": 6}, "alpha 6", "2, 3"),
    ({"lora_alpha": 6.5, "use_rslora": True}, "alpha 6.5", "3.75278, 4.59619"),
    ({"lora_alpha": 6, "alpha_pattern": {"k_proj": 10}}, "alpha 6, of some modules others", "2, 5"),
    ({}, "alpha not stored", "2.66667, 4"),  # PEFT's own default is 8
]


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize(("config", "alpha", "scales"), PEFT_ALPHAS)
def test_alpha_and_scale_of_a_peft_adapter(
    config: dict[str, Any], alpha: str, scales: str, tmp_path: Path, capsys: Any
) -> None:
    stem = "model.layers.0.self_attn"
    values = factors(f"{stem}.q_proj", 10, 42, rank=3) | factors(f"{stem}.k_proj", 10, 21)
    path = write(tmp_path / "adapter", values, rank_pattern={"q_proj": 3}, **config)
    told = "2 pairs, 1 of rank 2, 1 of rank 3"
    if "lora_alpha" not in config:
        file = path / "adapter_config.json"
        stated = json.loads(file.read_text())
        file.write_text(json.dumps({k: v for k, v in stated.items() if k != "lora_alpha"}))
    assert inspected(path, capsys) == [
        f"PEFT LoRA: {told}; {alpha}",
        f"A.B is multiplied by {scales}",
    ]


TUNIX_ALPHAS: list[tuple[dict[str, Any], list[Any], str, list[str]]] = [
    ({"lora": {"alpha": 3}}, [], "alpha 3", ["1.5"]),
    ({}, [], "alpha not stored", []),
    ({}, ["--alpha", 5], "alpha not stored", ["2.5"]),
    ({"lora": {"alpha_by_module": {"layers.0.attn.q_einsum.w": 4}}}, [], "alpha by module", []),
    (
        {"lora": {"alpha": 3, "alpha_by_module": {"layers.0.attn.q_einsum.w": 4}}},
        [],
        "alpha 3, of some modules others",
        ["1.5, 2"],
    ),
]


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize(("custom", "options", "alpha", "scales"), TUNIX_ALPHAS)
def test_alpha_and_scale_of_a_tunix_adapter(
    custom: Any, options: Any, alpha: str, scales: list[str], tmp_path: Path, capsys: Any
) -> None:
    values = factor_arrays(GEMMA3)
    run = write_run(tmp_path / "run", values, custom)
    found = inspected(run, capsys, *options)
    assert found[0] == f"Qwix LoRA: {len(values) // 2} pairs, {len(values) // 2} of rank 2; {alpha}"
    assert found[1:] == [f"A.B is multiplied by {scale}" for scale in scales]


def test_steps_of_an_orbax_root() -> None:
    report = inspect(open_checkpoint(SAMPLES / "lora_only"))
    items = ["model_params", "optimizer_state"]
    assert report["steps"] == {"step": 10, "steps": [10], "item": items[0], "items": items}
    assert report["notes"] == ["read the item model_params; left alone: optimizer_state"]
    assert report["adapter"]["ranks"] == {"4": 12}


def test_a_report_is_plain_data_and_reads_no_tensor() -> None:
    checkpoint = open_checkpoint(SAMPLES / "full_with_lora")
    for tensor in checkpoint.values():
        tensor.read = None  # type: ignore[method-assign, assignment]
    report = {**inspect(checkpoint), "tensor_list": tensor_list(checkpoint)}
    assert json.loads(json.dumps(report))["tensors"] == 50
    assert report["tensor_list"][0] == {
        "name": "embedder.input_embedding",
        "dtype": "bfloat16",
        "shape": [64, 32],
    }


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_base(
        tmp_path / "base",
        {
            **GEMMA3,
            "hidden_size": 12,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        base_arrays(GEMMA3, "model."),
        shards=2,
        files={"tokenizer.json": "{}"},
    )
    assert run_cli("inspect", base, "--tensors") == 0
    text = capsys.readouterr().out
    rope = "full_attention: theta 1,000,000, linear, factor 8"
    for words in ("hf, prefix model.", "gemma3, 2 layers", rope, "tokenizer.json", "DISAGREES"):
        assert words in text
    assert "\nmodel.layers.1.self_attn.v_proj.weight  bfloat16  [21, 10]\n" in text
    assert run_cli("inspect", base, "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["side_files"] == ["tokenizer.json"]
    assert captured.err == ""
    assert run_cli("inspect", base, "--quiet") == 0
    assert capsys.readouterr() == ("", "")
