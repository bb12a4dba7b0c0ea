"""adapter_config.json: scales and ranks as PEFT resolves them, and what is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.readers import open_checkpoint
from gemma_convert.surgery.adapters.peft import read_peft
from gemma_convert.surgery.adapters.peft_config import PeftConfig, read_peft_config
from gemma_convert.surgery.adapters.peft_write import alpha_for
from tests import peft_oracle, tiny
from tests.checkpoints import run_cli
from tests.peft_files import factors, in_memory

KEYS = json.loads((Path(__file__).parents[1] / "data" / "peft_config_keys.json").read_text())
"""Version of PEFT to the keys that LoraConfig got since the version before it."""

MODULE = "model.layers.3.self_attn.q_proj"


def config(**values: Any) -> PeftConfig:
    return read_peft_config({"peft_type": "LORA", "r": 8, "lora_alpha": 16, **values}, "run")


def test_scale_of_rank_stabilised_lora() -> None:
    """F06."""
    assert config().scale(MODULE, 8) == 2.0
    assert config(use_rslora=True).scale(MODULE, 8) == pytest.approx(5.6569, abs=5e-5)


def test_rank_and_alpha_by_module() -> None:
    """F07: the two patterns resolve separately."""
    own = config(
        rank_pattern={"layers.3.self_attn.q_proj": 32},
        alpha_pattern={"layers.3.self_attn.q_proj": 128, "v_proj": 4},
    )
    assert (own.ranks_of(MODULE)[0], own.scale(MODULE, 32)) == (32, 4.0)
    other = MODULE.replace("3", "13")
    assert (own.ranks_of(other)[0], own.scale(other, 8)) == (8, 2.0)
    value = MODULE.replace("q_proj", "v_proj")
    assert (own.ranks_of(value)[0], own.scale(value, 8)) == (8, 0.5)
    by_rank_alone = config(rank_pattern={"q_proj": 32}, alpha_pattern={"v_proj": 4})
    assert by_rank_alone.scale(MODULE, 32) == 0.5


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("q_proj", True),
        ("self_attn.q_proj", True),
        (MODULE, True),
        (f"^{MODULE}", True),
        (r".*\.3\..*", True),
        (r"layers\.(2|3)\.self_attn\.[qk]_proj", True),
        ("proj", False),
        ("^layers.3.self_attn.q_proj", False),
        ("q_proj.weight", False),
        ("layers.3", False),
    ],
)
def test_patterns_match_as_in_peft(pattern: str, fits: bool) -> None:
    from peft.utils.other import get_pattern_key

    assert (get_pattern_key([pattern], MODULE) == pattern) == fits
    assert config(rank_pattern={pattern: 5}).ranks_of(MODULE)[0] == (5 if fits else 8)


def test_the_first_pattern_that_fits_counts() -> None:
    assert config(rank_pattern={"q_proj": 3, MODULE: 5}).ranks_of(MODULE)[0] == 3
    assert config(rank_pattern={MODULE: 5, "q_proj": 3}).ranks_of(MODULE)[0] == 5


def test_a_rank_that_disagrees_with_the_factors() -> None:
    values = factors(MODULE, 10, 42, rank=3)
    with pytest.raises(AdapterError, match=f"{MODULE}: the factors have rank 3.*json says 2"):
        read_peft(in_memory(values))
    scale = read_peft(in_memory(values, rank_pattern={"q_proj": 3})).scales
    assert list(scale.values()) == [5 / 3]


OVERLAP = {
    "rank_pattern": {"q_proj": 3, "mlp.(gate|up)_proj": 5},
    "alpha_pattern": {"self_attn.q_proj": 12, "down_proj|gate_proj": 20, "q_proj": 9},
}
"""Of rank 2 and alpha 5 elsewhere; PEFT's versions differ in what they make of these."""

BY_VERSION = {
    # one key for both patterns: q_proj, mlp.(gate|up)_proj
    "0.13.2": {"self_attn.q_proj": 9, "mlp.gate_proj": 5, "mlp.down_proj": 20},
    # each pattern by itself, but a "gate_proj" behind "|" has nothing before it
    "0.14.0": {"self_attn.q_proj": 12, "mlp.gate_proj": 5, "mlp.down_proj": 20},
    "0.15.0": {"self_attn.q_proj": 12, "mlp.gate_proj": 20, "mlp.down_proj": 20},
}


def _of_peft(version: str, module: str) -> float:
    """Alpha as the code of that version finds it (``_create_and_replace``, ``get_pattern_key``)."""
    ranks, alphas = OVERLAP["rank_pattern"], OVERLAP["alpha_pattern"]
    if version == "0.15.0":
        keys, fits = list(alphas), lambda key: re.match(rf"(.*\.)?({key})$", module)
    else:
        keys = [*ranks, *alphas] if version == "0.13.2" else list(alphas)
        fits = lambda key: re.match(rf".*\.{key}$", module)  # noqa: E731
    return alphas.get(next(filter(fits, keys), module), 5)


@pytest.mark.parametrize("version", BY_VERSION)
def test_patterns_that_overlap_by_version(version: str) -> None:
    own = config(r=2, lora_alpha=5, peft_version=version, **OVERLAP)
    for name, alpha in BY_VERSION[version].items():
        module = f"model.layers.3.{name}"
        rank = own.ranks_of(module)[0]
        assert own.alphas_of(module, rank)[0] == _of_peft(version, module) == alpha


def test_keys_of_the_file_tell_the_rule() -> None:
    since = {
        rule.since for key in ("eva_config", "corda_config") for rule in config(**{key: None}).rules
    }
    assert since == {(0, 14), (0, 15)}
    assert [rule.since for rule in config(target_parameters=None).rules] == [(0, 15)]
    assert len(config().rules) == 3


def test_ranks_tell_the_rule_where_the_file_does_not() -> None:
    """Before 0.15 nothing stood behind "gate_proj": those modules kept the rank of the others."""
    gate, ranks = "model.layers.3.mlp.gate_proj", {"down_proj|gate_proj": 4}
    for rank in (2, 4):
        values = factors(gate, 10, 11, rank=rank)
        assert read_peft(in_memory(values, rank_pattern=ranks)).scales == {weight(gate): 5 / rank}
    alphas = {"down_proj|gate_proj": 12, "self_attn.q_proj": 7}
    patterns = {"rank_pattern": {**ranks, "q_proj": 3}, "alpha_pattern": alphas}
    values = factors(MODULE, 10, 42, rank=3) | factors(gate, 10, 11, rank=4)
    scales = read_peft(in_memory(values, **patterns)).scales
    assert scales == {weight(MODULE): 7 / 3, weight(gate): 3.0}
    values |= factors(gate, 10, 11)  # of rank 2: by 0.13 or by 0.14
    with pytest.raises(AdapterError, match=r"q_proj: .* is 5 in PEFT before 0\.14 and 7 since"):
        read_peft(in_memory(values, **patterns))


def weight(module: str) -> str:
    return f"{module.removeprefix('model.')}.weight"


def test_keys_are_sorted_on_the_way_to_the_file(tmp_path: Path) -> None:
    """What training took first may come second: the factors tell the rank, and a note the alpha."""
    patterns = {
        "rank_pattern": {"self_attn.q_proj": 3, "q_proj": 4},
        "alpha_pattern": {"self_attn.q_proj": 12, "q_proj": 9},
    }
    made = peft_oracle.peft_model(
        tiny.hf_model("gemma2"), r=2, lora_alpha=5, target_modules=["q_proj", "up_proj"], **patterns
    )
    directory = peft_oracle.save(made, tmp_path / "adapter")
    read = read_peft(open_checkpoint(directory))
    assert read.ranks == [2, 3]
    assert {read.scales[name] for name in read.pairs if "q_proj" in name} == {9 / 3}
    note = (
        f"{directory}: model.layers.0.self_attn.q_proj: alpha_pattern says alpha 9 and 12 (and so "
        "for 3 more): PEFT sorts its keys when it saves and takes the first when it loads, 9, as "
        "is done here; training may have used another"
    )
    assert read.notes == (note,)
    tiny.hf_model("gemma2").save_pretrained(tmp_path / "base")
    words = ["surgery", "merge-lora", tmp_path / "base", directory, "--out", tmp_path / "out"]
    assert run_cli(*words, "--quiet") == 0
    assert note in json.loads((tmp_path / "out" / "conversion.json").read_text())["notes"]
    until_013 = config(peft_version="0.13.2", r=2, lora_alpha=5, **patterns)
    assert [until_013.alphas_of(MODULE, rank)[0] for rank in (3, 4)] == [12, 9]


def test_an_alpha_that_depends_on_the_version_is_refused() -> None:
    values = factors(MODULE, 10, 42, rank=3)
    with pytest.raises(AdapterError) as caught:
        read_peft(in_memory(values, **OVERLAP))
    assert str(caught.value) == (
        f"run: {MODULE}: by alpha_pattern its alpha is 9 in PEFT before 0.14 and 12 since, and "
        "adapter_config.json does not say which version trained it; write that into it, such as "
        '"peft_version": "0.13.2"'
    )
    told = read_peft(in_memory(values, peft_version="0.13.2", **OVERLAP))
    assert list(told.scales.values()) == [3.0]


@pytest.mark.parametrize("version", KEYS)
def test_configs_of_every_version_are_read(version: str) -> None:
    """All keys of a version, each with the value that PEFT gives one that is not used."""
    order = list(KEYS)
    keys = [key for v in order[: order.index(version) + 1] for key in KEYS[v]]
    from peft import LoraConfig

    unused = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"]).to_dict()
    values = {key: unused.get(key) for key in keys} | {"peft_type": "LORA"}
    values["target_modules"] = ["q_proj"]
    read = read_peft_config(json.loads(json.dumps(values)), "run")
    assert (read.rank, read.alpha) == (4, 6)


def test_the_installed_version_is_read(tmp_path: Path) -> None:
    from peft import LoraConfig

    LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"]).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "adapter_config.json").read_text())
    read = read_peft_config(values, "run")
    assert read.version is not None
    assert (read.rank, read.alpha, read.version >= (0, 18)) == (4, 6, True)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("layer_replication", [[0, 4], [2, 5]], "layers are repeated"),
        ("lora_bias", True, "B has a bias"),
        ("alora_invocation_tokens", [1, 2], "some tokens only"),
        ("use_qalora", True, "inputs are pooled"),
        ("arrow_config", {"top_k": 3}, "a router chooses"),
        ("use_bdlora", {"nblocks": 2}, "block-diagonal"),
        ("kasa_config", {"beta": 1e-4}, "singular values are removed"),
        ("monteclora_config", {"num_samples": 4}, "sampled"),
        ("trainable_token_indices", [7], "rows of the embedding"),
        ("use_something_new", True, "a key that is not known here"),
    ],
)
def test_what_changes_the_meaning_is_refused_by_name(key: str, value: Any, why: str) -> None:
    with pytest.raises(AdapterError, match=f"run: adapter_config.json: {key} = .*{why}") as caught:
        config(**{key: value})
    assert caught.value.remedy == "merge it with PEFT itself"
    assert config(**{key: None}).rank == 8


@pytest.mark.parametrize("how", ["pissa", "pissa_niter_4", "olora", "corda", "lora_ga", "loftq"])
def test_adapters_of_a_moved_base_are_refused(how: str) -> None:
    with pytest.raises(AdapterError, match=f"init_lora_weights = '{how}': PEFT changed the base"):
        config(init_lora_weights=how)


def test_an_unknown_start_is_refused() -> None:
    """It may have moved the base, as half of those that are known do."""
    with pytest.raises(AdapterError, match="init_lora_weights = 'loralpha': a start that is not"):
        config(init_lora_weights="loralpha")


@pytest.mark.parametrize(
    "how", [None, True, False, "Gaussian", "gaussian", "eva", "orthogonal", "mica"]
)
def test_other_initialisations_do_not_matter(how: Any) -> None:
    assert config(init_lora_weights=how).scale(MODULE, 8) == 2.0


def test_other_methods_are_refused() -> None:
    with pytest.raises(AdapterError, match="peft_type is 'LOHA', expected 'LORA'"):
        config(peft_type="LOHA")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("r", 0),
        ("r", 2.5),
        ("r", "8"),
        ("lora_alpha", float("nan")),
        ("lora_alpha", True),
        ("rank_pattern", {"q_proj": None}),
        ("rank_pattern", ["q_proj"]),
        ("alpha_pattern", {"(": 3}),
        ("modules_to_save", "lm_head"),
        ("target_parameters", [1]),
        ("use_rslora", "false"),
        ("use_dora", "no"),
        ("ensure_weight_tying", [True]),
    ],
)
def test_values_of_another_kind_are_refused(key: str, value: Any) -> None:
    with pytest.raises(AdapterError, match=f"adapter_config.json: {key} is .*, expected"):
        config(**{key: value})


def test_alpha_gives_the_scale_back_bit_for_bit() -> None:
    random = np.random.default_rng(0)
    for rank in (1, 3, 7, 48, 49):
        for alpha in (1, 2, 5, 7, 0.1, 11.2, *random.uniform(0.1, 64, 50)):
            assert alpha_for(alpha / rank, rank) / rank == alpha / rank
    assert isinstance(alpha_for(7 / 3, 3), int)
