"""A family of one's own, registered from outside: Llama 3, ported in one short file."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert import registry
from gemma_convert.convert.errors import ConfigError, LayoutError
from gemma_convert.convert.jobs import convert, hf_to_orbax, orbax_to_hf
from gemma_convert.convert.layouts import DEEPMIND
from gemma_convert.convert.readers import open_base, open_orbax
from gemma_convert.convert.writers.orbax import write_orbax

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama.py"


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Registers what an entry point of an installed package would name."""

    def forget() -> None:
        registry.families.cache_clear()
        registry._ranks_in.cache_clear()

    def enter(loaded: object) -> None:
        entry = SimpleNamespace(name="llama3", value="llama:FAMILY", load=lambda: loaded)
        monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
        forget()

    yield enter
    monkeypatch.undo()
    forget()


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A tiny random Llama, saved by transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=30,
        intermediate_size=44,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=14,
        tie_word_embeddings=True,
        # What Tunix 0.1.7 uses whatever its own config says (apply_rope is called without it).
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5 if parameter.ndim == 1 else 0.0, 0.2)
    model.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def test_the_port_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 60


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Tunix's Llama uses several old names
def test_llama_logits(register: Any, llama: Path, tmp_path: Path) -> None:
    import jax
    import jax.numpy as jnp
    import torch
    from flax import nnx
    from transformers import LlamaForCausalLM
    from tunix.models.llama3.model import Llama3, ModelConfig
    from tunix.sft.checkpoint_manager import CheckpointManager

    register(runpy.run_path(str(EXAMPLE))["FAMILY"])
    target = hf_to_orbax(open_base(llama)).plan.target
    write_orbax(target, tmp_path / "run")
    config = ModelConfig(
        num_layers=3,
        vocab_size=101,
        embed_dim=30,
        hidden_dim=44,
        num_heads=6,
        head_dim=14,
        num_kv_heads=3,
        rope_theta=1_000_000,
        norm_eps=1e-6,
        weight_tying=True,
    )
    model = Llama3(config, rngs=nnx.Rngs(0))
    CheckpointManager(str(tmp_path / "run")).maybe_restore(model)
    ids = np.array([[1, 7, 42, 99, 5, 63, 8]])
    count = ids.shape[1]
    mask = jnp.tril(jnp.ones((1, count, count), bool))
    with jax.default_matmul_precision("highest"):
        found, _ = model(jnp.asarray(ids), jnp.arange(count)[None], None, mask)
    with torch.no_grad():
        expected = LlamaForCausalLM.from_pretrained(llama)(torch.tensor(ids)).logits.numpy()
    # float32 forward passes of two libraries; a swap of k and v moves the logits by more than 0.1
    assert np.abs(np.asarray(found) - expected).max() < 1e-4

    back = orbax_to_hf(open_orbax(tmp_path / "run"), open_base(llama)).plan.target
    base = open_base(llama)
    assert back.keys() == base.keys()
    assert all(np.array_equal(back[name].numpy(), base[name].numpy()) for name in base)


def test_a_layout_that_the_family_lacks(register: Any, llama: Path) -> None:
    register(runpy.run_path(str(EXAMPLE))["FAMILY"])
    with pytest.raises(LayoutError, match="llama3 has no names in layout deepmind"):
        convert(open_base(llama), DEEPMIND)


def test_an_entry_point_that_is_no_family(register: Any) -> None:
    register("not a family")
    with pytest.raises(ConfigError, match="entry point llama3 = llama:FAMILY is not a family"):
        registry.families()
