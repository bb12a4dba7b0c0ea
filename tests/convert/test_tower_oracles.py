"""Towers against the libraries that read them: transformers, and Tunix's SigLIP.

Tunix 0.1.7's loader forgets the first axis of SigLIP's position table and then refuses it; it is
given that axis here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.jobs import convert
from gemma_convert.convert.layouts import HF, LAYOUTS, TUNIX
from gemma_convert.convert.readers import open_checkpoint
from gemma_convert.convert.registry import families
from gemma_convert.convert.writers.hf import write_hf
from gemma_convert.convert.writers.orbax import write_orbax
from tests import tiny_towers
from tests.checkpoints import F32, arrays, assert_same_bits, memory
from tests.tiny import EAGER, tunix_arrays, tunix_class, tunix_restore

# Tunix 0.1.7 calls deprecated parts of jax 0.10 and flax 0.12.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:tunix\."),
    pytest.mark.filterwarnings("ignore:'sharding' is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`flax.nnx.State` will be:DeprecationWarning"),
]

POSITIONS = r"vision_tower\.vision_model\.embeddings\.position_embedding\.weight"


@pytest.fixture(scope="module")
def siglip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 3 with SigLIP, saved by transformers."""
    return tiny_towers.save("gemma3", tmp_path_factory.mktemp("siglip") / "hf")


def written(tensors: Any, directory: Path) -> Path:
    directory.mkdir()
    write_hf(tensors, directory, max_shard_bytes=10**9, progress=lambda *_: None)
    return directory


def tunix_gemma3() -> tuple[Any, Any]:
    """Tunix's class, and its config with the tiny SigLIP."""
    import dataclasses

    from tunix.models.gemma3.vision import SigLIPConfig

    model_class, config = tunix_class("gemma3")
    own = tiny_towers.SIGLIP
    vision = SigLIPConfig(
        num_mm_tokens_per_image_prepool=9,
        num_mm_tokens_per_image=1,
        image_height=own["image_size"],
        image_width=own["image_size"],
        patch_size=(own["patch_size"],) * 2,
        width=own["hidden_size"],
        depth=own["num_hidden_layers"],
        mlp_dim=own["intermediate_size"],
        num_heads=own["num_attention_heads"],
    )
    return model_class, dataclasses.replace(config, vision_config=vision)


def abstract_tunix() -> Any:
    from flax import nnx

    model_class, config = tunix_gemma3()
    return nnx.eval_shape(lambda: model_class(config, rngs=nnx.Rngs(0)))


def restored(tree: Any, root: Path) -> Any:
    """Tunix's model with ``tree``, by Tunix's own manager."""
    root.mkdir()
    write_orbax(tree, root)
    model = abstract_tunix()
    tunix_restore(model, root)
    return model


def test_tunix_loads_the_same_from_the_hubs_names(
    siglip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Tunix makes of Hugging Face's tensors is what is made here, bit for bit."""
    from tunix.models.gemma3 import params_safetensors as loader

    mapping = loader._get_key_and_transform_mapping

    def mended(config: Any) -> Any:
        found = mapping(config)
        target, _ = found[POSITIONS]
        found[POSITIONS] = (target, (None, (1, 9, tiny_towers.SIGLIP["hidden_size"])))
        return found

    monkeypatch.setattr(loader, "_get_key_and_transform_mapping", mended)
    ours = convert(open_checkpoint(siglip), TUNIX).plan.target
    tree = memory(arrays(ours), config=ours.config, source="tree")
    directory = written(convert(tree, HF).plan.target, tmp_path / "hub")
    _, config = tunix_gemma3()
    model = loader.create_model_from_safe_tensors(str(directory), config, mode="original")
    assert_same_bits(tunix_arrays(model), arrays(ours))


def test_tunix_restores_and_sees_the_same(siglip: Path, tmp_path: Path) -> None:
    """An image through transformers' tower and projection, and through Tunix's, in float32."""
    import jax
    import jax.numpy as jnp
    import torch
    from transformers import Gemma3ForConditionalGeneration

    target = convert(open_checkpoint(siglip), TUNIX, dtype=F32).plan.target
    ours = restored(target, tmp_path / "run")
    assert_same_bits(tunix_arrays(ours), arrays(target))
    theirs = Gemma3ForConditionalGeneration.from_pretrained(
        siglip, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    image = np.random.default_rng(3).normal(0, 1, (1, 6, 6, 3)).astype(np.float32)
    with torch.inference_mode():
        pixels = torch.from_numpy(image.transpose(0, 3, 1, 2))
        patches = theirs.model.vision_tower(pixels).last_hidden_state.numpy()
        tokens = theirs.model.multi_modal_projector(torch.from_numpy(patches)).numpy()
    with jax.default_matmul_precision("highest"):
        seen = ours.vision_encoder(jnp.asarray(image)[:, None])
        found_patches = np.asarray(ours.vision_encoder.siglip_encoder(jnp.asarray(image)))
        found_tokens = np.asarray(ours.embedder.encode_vision(seen))[:, 0]
    assert patches.shape == (1, 9, 35)
    assert tokens.shape == (1, 1, 60)
    # float32 rounds values of size two to 2**-23 each time, in sums of 35 and through three layers
    np.testing.assert_allclose(found_patches, patches, rtol=0, atol=5e-6)
    np.testing.assert_allclose(found_tokens, tokens, rtol=0, atol=5e-6)


@pytest.mark.parametrize(
    ("case", "name", "like"),
    [
        ("gemma3", "tunix", "gemma-3-4b"),
        ("gemma3", "deepmind", "gemma-3-4b"),
        ("gemma4", "tunix-head", "gemma-4-31b"),
        ("gemma4-e2b", "deepmind", "gemma-4-e2b"),
    ],
)
def test_transformers_loads_what_is_made_of_a_jax_tree_alone(
    case: str, name: str, like: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No base, a public name: class, nesting and names are those of the model with towers."""
    import torch
    from transformers import AutoModelForImageTextToText

    source = open_checkpoint(tiny_towers.save(case, tmp_path / "hf"))
    know_tiny(monkeypatch, source.config, like)
    tree = memory(arrays(convert(source, LAYOUTS[name]).plan.target), source="tree")
    job = convert(tree, HF, model="tiny")
    loaded, report = AutoModelForImageTextToText.from_pretrained(
        written(job.plan.target, tmp_path / "out"),
        dtype=torch.bfloat16,
        output_loading_info=True,
        **EAGER,
    )
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    assert all("language_model.layers" in key for key in report["unexpected_keys"])
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16)
    state = loaded.state_dict()
    assert type(loaded) is type(again)
    for key, weight in again.state_dict().items():
        assert torch.equal(state[key], weight), key


def know_tiny(monkeypatch: pytest.MonkeyPatch, config: Any, like: str) -> None:
    """Know a public model ``tiny``: ``like`` in the sizes of ``config``."""
    from dataclasses import replace

    family = next(f for f in families().values() if like in f.presets)
    preset = family.presets[like]
    parts = {key: config.get(key) for key in ("vision_config", "audio_config") if config.get(key)}
    tiny = replace(preset, sizes=config["text_config"], wrapper={**preset.wrapper, **parts})
    for table, entry in ((family.presets, tiny), (family.models, tiny.sizes)):
        assert isinstance(table, dict)
        monkeypatch.setitem(table, "tiny", entry)
