"""What orbax-to-hf makes: shards, index, config, side files; and transformers loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from gemma_convert.convert.tensor import Array
from tests import lora_oracle
from tests.checkpoints import (
    ALPHA,
    BF16,
    F32,
    GEMMA3,
    GEMMA4,
    base_arrays,
    factor_arrays,
    read_hf,
    run_cli,
    write_base,
    write_run,
)

PREFIX = "model.language_model."
INDEX = "model.safetensors.index.json"
SIDE_FILES = {
    "generation_config.json": '{"eos_token_id": [1, 106],\n "top_k": 64}',
    "chat_template.jinja": "{{ bos_token }}{% for m in messages %}…{% endfor %}\n",
    "preprocessor_config.json": '{"image_processor_type": "Gemma3ImageProcessor"}',
    "processor_config.json": "{}",
    "tokenizer.json": '{"version": "1.0"}',
    "tokenizer_config.json": '{"bos_token": "<bos>"}',
    "special_tokens_map.json": "{}",
    "added_tokens.json": "{}",
    "additional_chat_templates/tool.jinja": "{{ tools }}",
}


def convert(
    directory: Path, config: dict[str, Any], base: dict[str, Array], *options: Any, **more: Any
) -> Path:
    write_base(directory / "base", config, base, **more)
    write_run(directory / "run", factor_arrays(config))
    words = ["orbax-to-hf", directory / "run", "--base", directory / "base", "--quiet"]
    assert run_cli(*words, "--out", directory / "out", "--alpha", ALPHA, *options) == 0
    return directory / "out"


def test_side_files_are_carried_untouched(tmp_path: Path) -> None:
    """F22, and nothing that belongs to the base's own page or weights."""
    left = {"README.md": "the base's card", ".gitattributes": "*.safetensors lfs"}
    left["training_args.bin"] = left["model.gguf"] = "weights of another kind"
    base = base_arrays(GEMMA3, "model.")
    out = convert(tmp_path, GEMMA3, base, files={**SIDE_FILES, **left})
    for name, text in SIDE_FILES.items():
        assert (out / name).read_bytes() == text.encode(), name
    made = {"config.json", "conversion.json", "model.safetensors"}
    there = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    assert there == made | SIDE_FILES.keys()


def test_config_is_the_bases_with_its_dtype(tmp_path: Path) -> None:
    """F22: quantization_config gone, dtype updated, at the top and nested; the rest as it was."""
    quantised = {"quantization_config": {"bits": 4}}
    text = {
        **GEMMA4["text_config"],
        **quantised,
        "rope_parameters": {"full_attention": {"rope_theta": 1e6}},
    }
    vision = {"hidden_size": 1152, "dtype": "float16", **quantised}
    config = {**GEMMA4, **quantised, "text_config": text, "vision_config": vision, "z": None}
    out = convert(tmp_path, config, base_arrays(GEMMA4, PREFIX), "--dtype", "float32")
    found = json.loads((out / "config.json").read_text())
    for nested in (config, text, vision):
        del nested["quantization_config"]
        nested["dtype"] = "float32"
    assert found == config
    assert list(found) == list(config)


def test_torch_dtype_stays_torch_dtype(tmp_path: Path) -> None:
    out = convert(tmp_path, GEMMA3, base_arrays(GEMMA3, "model."), "--dtype", "float16")
    assert json.loads((out / "config.json").read_text()) == {**GEMMA3, "torch_dtype": "float16"}


def test_shards_of_a_base_with_leftovers(tmp_path: Path) -> None:
    """F18: the index is made anew, and a file that the base's index does not name is ignored."""
    base = base_arrays(GEMMA4, PREFIX)
    write_base(tmp_path / "base", GEMMA4, base, shards=3)
    old = (tmp_path / "base" / "model-00001-of-00003.safetensors").read_bytes()
    (tmp_path / "base" / "model-00001-of-00002.safetensors").write_bytes(old)
    write_run(tmp_path / "run", factor_arrays(GEMMA4))
    words = ["orbax-to-hf", tmp_path / "run", "--base", tmp_path / "base", "--alpha", ALPHA]
    out = tmp_path / "out"
    assert run_cli(*words, "--out", out, "--quiet", "--max-shard-size", "2kB") == 0
    index = json.loads((out / INDEX).read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    count = len(files)
    assert count > 4
    assert files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert sorted(set(index["weight_map"].values())) == files
    total = 0
    for name in files:
        with safe_open(out / name, framework="numpy") as file:
            assert file.metadata() == {"format": "pt"}
            assert set(file.keys()) == {n for n, f in index["weight_map"].items() if f == name}
            sizes = [file.get_tensor(key).nbytes for key in file.keys()]  # noqa: SIM118
        assert len(sizes) == 1 or sum(sizes) <= 2000
        total += sum(sizes)
    assert index["metadata"]["total_size"] == total == sum(a.nbytes for a in base.values())
    assert index["weight_map"].keys() == base.keys()


def test_towers_byte_for_byte(tmp_path: Path) -> None:
    """Names outside the text model, with bytes that no arithmetic would return: NaN payloads."""
    random = np.random.default_rng(9)
    towers = {
        "model.vision_tower.encoder.layers.0.mlp.fc1.weight": np.frombuffer(
            random.bytes(2 * 33), BF16
        ).reshape(3, 11),
        "model.embed_vision.embedding_projection.weight": np.frombuffer(random.bytes(4 * 10), F32),
        "model.audio_tower.position_ids": np.arange(5),
    }
    out = convert(tmp_path, GEMMA4, {**base_arrays(GEMMA4, PREFIX), **towers}, shards=2)
    found = read_hf(out)
    for name, array in towers.items():
        assert found[name].dtype == array.dtype
        assert found[name].tobytes() == array.tobytes(), name


def test_float32_of_a_bfloat16_base(tmp_path: Path) -> None:
    """The weights on the disk are the oracle's, not the oracle's rounded to bfloat16."""
    base = base_arrays(GEMMA3, "model.")
    found = read_hf(convert(tmp_path, GEMMA3, base, "--dtype", "float32"))
    expected = lora_oracle.merged(base, "model.", factor_arrays(GEMMA3), ALPHA)
    for name, array in expected.items():
        # float32's own rounding of values below 2; that of bfloat16 is 2**-8 of them
        assert np.abs(found[name] - array.astype(np.float64)).max() <= 2.0**-22, name
    changed = [name for name, array in expected.items() if array.dtype == np.float64]
    lost = [np.count_nonzero(found[n] != found[n].astype(BF16).astype(F32)) for n in changed]
    assert min(lost) > 0


@pytest.mark.filterwarnings("default::DeprecationWarning")
def test_transformers_loads_the_shards(tmp_path: Path) -> None:
    """Every key found, none left over, and the tensors that it holds are those of the oracle."""
    from transformers import AutoModelForCausalLM

    config = {
        **GEMMA3,
        "hidden_size": 18,  # transformers wants a multiple of the number of heads
        "head_dim": 14,
        "sliding_window": 5,
        "max_position_embeddings": 64,
    }
    base = base_arrays(config, "model.")
    out = convert(tmp_path, config, base, "--max-shard-size", "3kB", "--dtype", "float32")
    assert len(list(out.glob("model-*.safetensors"))) > 3
    model, report = AutoModelForCausalLM.from_pretrained(
        out, dtype="auto", output_loading_info=True
    )
    assert not any(report.values()), report
    state = model.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    found = read_hf(out)
    assert found.keys() == state.keys() - {"lm_head.weight"}
    for name, array in found.items():
        assert np.array_equal(state[name].numpy(), array), name
