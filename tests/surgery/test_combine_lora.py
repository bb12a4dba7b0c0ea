"""``surgery combine-lora``: against PEFT's ``add_weighted_adapter``, and by hand in float64."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from gemma_convert.convert.readers import open_orbax
from gemma_convert.convert.tensor import Array
from gemma_convert.surgery.task_arithmetic import drop, ties, trim
from tests import lora_oracle, peft_oracle, tiny
from tests.checkpoints import (
    F32,
    GEMMA3,
    arrays,
    base_arrays,
    factor_arrays,
    run_cli,
    snapshot,
    write_base,
)
from tests.checkpoints import write_run as write_orbax_run
from tests.peft_files import factors, write

WEIGHTS = (0.7, -1.5)
Q, UP, V = (
    f"model.layers.{name}" for name in ("1.self_attn.q_proj", "0.mlp.up_proj", "0.self_attn.v_proj")
)
SIZES = {Q: (10, 42), UP: (10, 11), V: (10, 21)}


def combine(directory: Path, *options: Any, names: Any = ("one", "two"), out: str = "out") -> int:
    words = ["surgery", "combine-lora", *(directory / name for name in names)]
    weights = [word for weight in WEIGHTS for word in ("--weight", weight)]
    return run_cli(*words, *weights, "--out", directory / out, "--quiet", *options)


def stored(directory: Path) -> dict[str, Array]:
    with safe_open(directory / "adapter_model.safetensors", framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def config_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "adapter_config.json").read_text())
    return found


def product(values: dict[str, Array], module: str) -> Array:
    a, b = (values[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
    return np.asarray(b.astype(np.float64) @ a)


CONFIGS: tuple[dict[str, Any], ...] = (
    {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj", "up_proj"]},
    {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"], "use_rslora": True},
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters of one model as PEFT saves them; they share q alone, their scales differ."""
    directory = tmp_path_factory.mktemp("pair")
    for seed, (name, config) in enumerate(zip(("one", "two"), CONFIGS, strict=True)):
        made = peft_oracle.peft_model(tiny.hf_model("gemma2"), seed=seed, **config)
        peft_oracle.save(made, directory / name)
    return directory


PEFTS: dict[str, dict[str, Any]] = {
    "cat": {},
    "svd": {},
    "svd --rank 2": {"svd_rank": 2},
    "linear": {},
    "ties --density 0.6": {"density": 0.6},
    "ties --density 1": {"density": 1.0},
}


@pytest.mark.filterwarnings("ignore:The density 1.0 is greater than or equal to 1:UserWarning")
@pytest.mark.parametrize("method", PEFTS)
def test_as_peft_combines(method: str, pair: Path, tmp_path: Path) -> None:
    """Every module's delta, in PEFT, of our output and of its own combination."""
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    model = PeftModel.from_pretrained(tiny.hf_model("gemma2"), pair / "one", adapter_name="one")
    model.load_adapter(pair / "two", adapter_name="two")
    kind = method.split()[0]
    model.add_weighted_adapter(
        ["one", "two"], list(WEIGHTS), "theirs", combination_type=kind, **PEFTS[method]
    )
    out = tmp_path / "out"
    words = ["surgery", "combine-lora", pair / "one", pair / "two", "--quiet", "--out", out]
    weights = ["--weight", WEIGHTS[0], "--weight", WEIGHTS[1]]
    assert run_cli(*words, *weights, "--method", *method.split()) == 0
    model.load_adapter(out, adapter_name="ours")
    seen = 0
    for module in model.modules():
        if isinstance(module, LoraLayer):
            ours, theirs = (
                module.get_delta_weight(name).numpy(force=True) for name in ("ours", "theirs")
            )
            assert np.abs(theirs).max() > 1e-2
            # sums of at most 6 products of numbers below 3, in float32 there
            assert np.allclose(ours, theirs, rtol=0, atol=2e-6)
            seen += 1
    assert seen == 4 * 4  # layers, modules of the union


@pytest.fixture
def two(tmp_path: Path) -> list[dict[str, Array]]:
    """Adapters of unequal ranks, module sets and scales (2.5 and 1.5), and their values."""
    one = factors(Q, *SIZES[Q]) | factors(UP, *SIZES[UP])
    other = factors(Q, *SIZES[Q], rank=5, seed=1) | factors(V, *SIZES[V], rank=4, seed=1)
    write(tmp_path / "one", one)
    write(tmp_path / "two", other, r=5, lora_alpha=7.5, rank_pattern={"v_proj": 4})
    return [one, other]


def expected(two: list[dict[str, Array]]) -> dict[str, Array]:
    """The weighted sums of the deltas, float64."""
    one, other = two
    first, second = WEIGHTS[0] * 5 / 2, WEIGHTS[1] * 7.5
    return {
        Q: first * product(one, Q) + second / 5 * product(other, Q),
        UP: first * product(one, UP),
        V: second / 4 * product(other, V),
    }


def test_concatenation_is_exact(tmp_path: Path, two: list[dict[str, Array]]) -> None:
    assert combine(tmp_path) == 0
    values, config = stored(tmp_path / "out"), config_of(tmp_path / "out")
    assert (config["r"], config["lora_alpha"]) == (7, 7)
    assert config["rank_pattern"] == config["alpha_pattern"] == {UP: 2, V: 4}
    for module, delta in expected(two).items():
        # A was multiplied by weight and scale in float64 and rounded once to float32
        assert np.allclose(product(values, module), delta, rtol=0, atol=1e-7 * np.abs(delta).max())
    stem = f"base_model.model.{Q}.lora_B.weight"
    assert np.array_equal(values[stem], np.hstack([values_[stem] for values_ in two]))


def test_svd_is_the_best_of_its_rank(tmp_path: Path, two: list[dict[str, Array]]) -> None:
    assert combine(tmp_path, "--method", "svd", "--rank", 3) == 0
    values = stored(tmp_path / "out")
    for module, delta in expected(two).items():
        u, s, vt = np.linalg.svd(delta)
        best = (u[:, :3] * s[:3]) @ vt[:3]
        assert np.allclose(product(values, module), best, rtol=0, atol=1e-6 * s[0])
    assert config_of(tmp_path / "out")["r"] == 3


def test_more_than_two(tmp_path: Path, two: list[dict[str, Array]]) -> None:
    write(tmp_path / "three", factors(UP, *SIZES[UP], seed=2))
    words = [tmp_path / name for name in ("one", "two", "three")]
    assert run_cli("surgery", "combine-lora", *words, "--out", tmp_path / "out", "--quiet") == 0
    found = product(stored(tmp_path / "out"), UP)
    delta = 2.5 * (product(two[0], UP) + product(factors(UP, *SIZES[UP], seed=2), UP))
    assert np.allclose(found, delta, rtol=0, atol=1e-6)


def orbax(directory: Path) -> dict[str, Array]:
    values = factor_arrays(GEMMA3, F32)
    write_orbax_run(directory / "run", values, {"lora": {"alpha": 3}})
    write_base(directory / "base", GEMMA3, {})
    return values


@pytest.mark.parametrize("form", ["peft", "orbax"])
def test_formats_mix(form: str, tmp_path: Path, two: list[dict[str, Array]]) -> None:
    values = orbax(tmp_path)
    options = ["--format", form, "--base", tmp_path / "base"]
    assert combine(tmp_path, *options, names=("one", "run")) == 0
    deltas = {name: WEIGHTS[1] * d for name, d in lora_oracle.deltas(values, 3.0).items()}
    for module in (Q, UP):
        name = module.removeprefix("model.") + ".weight"
        deltas[name] = deltas[name] + WEIGHTS[0] * 2.5 * product(two[0], module)
    if form == "orbax":
        opened = open_orbax(tmp_path / "out")
        found = arrays(opened)
        lora = opened.metadata["custom_metadata"]["lora"]
        assert sorted(rule["rank"] for rule in lora["rules"]) == [2, 4]
        assert all(rule["rank"] == rule["alpha"] for rule in lora["rules"])
        by_module = {}
        for name in [name for name in found if name.endswith("_lora_a")]:
            both = {n: found[n] for n in (name, f"{name[:-1]}b")}
            by_module |= lora_oracle.deltas(both, found[name].shape[-1])  # the scale is 1
    else:
        peft = stored(tmp_path / "out")
        by_module = {
            name: product(peft, f"model.{name.removesuffix('.weight')}") for name in deltas
        }
    assert by_module.keys() == deltas.keys()
    for name, delta in deltas.items():
        assert np.allclose(by_module[name], delta, rtol=0, atol=1e-6), name


def test_adapters_of_several_bases_are_remarked(tmp_path: Path, capsys: Any) -> None:
    values = factors("model.layers.0.self_attn.q_proj", 10, 42)
    for number, name in enumerate(("google/gemma-3-1b-it", "google/gemma-3-1b-pt")):
        scaled = {key: array * (1 + number) for key, array in values.items()}
        write(tmp_path / name[-2:], scaled, base_model_name_or_path=name, revision=f"r{number}")
    words = ["surgery", "combine-lora", tmp_path / "it", tmp_path / "pt"]
    assert run_cli(*words, "--out", tmp_path / "both") == 0
    told = "the adapters name several bases, google/gemma-3-1b-it, google/gemma-3-1b-pt: are they"
    assert told in capsys.readouterr().err
    config = json.loads((tmp_path / "both" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("google/gemma-3-1b-it", "r0")


def test_tunix_adapters_need_no_base(tmp_path: Path) -> None:
    values = orbax(tmp_path)
    write_orbax_run(tmp_path / "other", factor_arrays(GEMMA3, F32, seed=4), {"lora_alpha": 5})
    assert combine(tmp_path, names=("run", "other")) == 0
    found = lora_oracle.deltas(arrays(open_orbax(tmp_path / "out")), 4.0)  # rank 4, scale 1
    other = lora_oracle.deltas(factor_arrays(GEMMA3, F32, seed=4), 5.0)
    for name, delta in lora_oracle.deltas(values, 3.0).items():
        total = WEIGHTS[0] * delta + WEIGHTS[1] * other[name]
        assert np.allclose(found[name], total, rtol=0, atol=1e-6), name


@pytest.mark.parametrize("method", ["dare-linear", "dare-ties"])
def test_dare_depends_on_its_seed_alone(method: str, tmp_path: Path, pair: Path) -> None:
    words = ["surgery", "combine-lora", pair / "one", pair / "two", "--quiet", "--density", 0.5]
    for out, seed in (("a", 3), ("b", 3), ("c", 4)):
        options = ["--method", method, "--seed", seed, "--out", tmp_path / out]
        assert run_cli(*words, *options) == 0
    a, b, c = (stored(tmp_path / out) for out in "abc")
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert not any(np.array_equal(a[name], c[name]) for name in a)


def test_dare_linear_keeps_the_factors_on_average(tmp_path: Path) -> None:
    """A share of the values, each divided by it: the law of one adapter, alone in its module."""
    values = factors(UP, 1009, 11)
    write(tmp_path / "one", values)
    write(tmp_path / "two", factors(Q, *SIZES[Q]))
    assert combine(tmp_path, "--method", "dare-linear", "--density", 0.25) == 0
    found = stored(tmp_path / "out")
    root = np.sqrt(WEIGHTS[0] * 2.5)
    a = f"base_model.model.{UP}.lora_A.weight"
    kept = found[a] != 0
    assert np.allclose(found[a][kept], (root * values[a] / 0.25)[kept], rtol=1e-6, atol=0)
    # 2018 chances of 0.25: the deviation of the share is 0.01
    assert abs(kept.mean() - 0.25) < 4 * np.sqrt(0.25 * 0.75 / kept.size)


def test_drop_is_unbiased() -> None:
    values = np.array([3.0, -2.0, 0.5])
    random = np.random.default_rng(0)
    runs = np.stack([drop(values, 0.4, random) for _ in range(4000)])
    assert np.allclose(np.unique(runs[:, 0]), [0, 7.5], rtol=1e-15, atol=0)
    # the mean of 4000, each of deviation |value| sqrt(1 / 0.4 - 1)
    bound = 4 * np.abs(values) * np.sqrt(1.5 / 4000)
    assert (np.abs(runs.mean(axis=0) - values) < bound).all()


def test_ties_by_hand() -> None:
    one, other = np.array([4.0, -1.0, 2.0, 0.5]), np.array([-3.0, -2.0, 1.0, -0.1])
    assert trim(one, 0.5).tolist() == [4, 0, 2, 0]
    assert trim(one, 0.8).tolist() == [4, -1, 2, 0]  # int(3.2) values
    assert trim(one, 1.0).tolist() == one.tolist()
    # signs + - + +: of the first and last, other's value is outvoted
    assert ties([one, other], [2, 3]).tolist() == [8, (-2 - 6) / 2, (4 + 3) / 2, 1]
    assert ties([trim(one, 0.5), trim(other, 0.5)], [2, 3]).tolist() == [8, -6, 4, 0]


def test_an_adapter_is_summed_once(tmp_path: Path, two: Any, capsys: Any) -> None:
    """The same file twice, or its other form; --force adds it twice."""
    write_base(tmp_path / "base", GEMMA3, {})
    copytree(tmp_path / "one", tmp_path / "copy")
    words = ["peft-to-orbax", tmp_path / "one", "--base", tmp_path / "base"]
    assert run_cli(*words, "--out", tmp_path / "tunix", "--quiet") == 0
    words = ["surgery", "resize-lora", tmp_path / "one", "--rank", 3]
    assert run_cli(*words, "--out", tmp_path / "wide", "--quiet") == 0
    base = ["--base", tmp_path / "base"]
    capsys.readouterr()
    for other in ("one", "copy", "tunix", "wide"):
        assert combine(tmp_path, *base, names=("one", other)) == 1
        error = capsys.readouterr().err
        assert "holds the same factors; leave it out, or add it a second time with --force" in error
        assert not (tmp_path / "out").exists()
    assert combine(tmp_path, *base, "--force", names=("one", "copy")) == 0
    found = product(stored(tmp_path / "out"), UP)
    delta = sum(WEIGHTS) * 2.5 * product(two[0], UP)
    assert np.allclose(found, delta, rtol=0, atol=1e-6)


def test_its_parts_are_merged_with_it(tmp_path: Path, two: Any, capsys: Any) -> None:
    """One of them again, after it, before it or beside it, in a second sum, in another form."""
    write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."))

    def merge(base: str, *names: str, out: str = "refused") -> int:
        words = ["surgery", "merge-lora", *(tmp_path / name for name in (base, *names))]
        return run_cli(*words, "--out", tmp_path / out, "--quiet")

    assert combine(tmp_path, out="both") == 0
    words = ["peft-to-orbax", tmp_path / "both", "--base", tmp_path / "base"]
    assert run_cli(*words, "--out", tmp_path / "tunix", "--quiet") == 0
    for both in ("both", "tunix"):
        assert merge("base", both, out=f"after-{both}") == 0
        capsys.readouterr()
        for part in ("one", "two", "both"):
            assert merge(f"after-{both}", part) == 1
            assert f"{part}: it is merged into" in capsys.readouterr().err
    assert merge("base", "one", out="before") == 0
    capsys.readouterr()
    assert merge("before", "both") == 1
    assert "both: it is merged into" in capsys.readouterr().err
    assert merge("base", "two", "both") == 1
    assert "two holds the same factors; leave it out" in capsys.readouterr().err
    assert combine(tmp_path, names=("both", "one"), out="refused") == 1
    assert "both holds the same factors; leave it out" in capsys.readouterr().err
    assert merge("base", "one", "two", out="apart") == 0


@pytest.mark.parametrize("method", ["linear", "ties --density 0.6", "dare-ties --density 0.5"])
def test_the_stacked_ranks_of_tunix_add_to_those_of_peft(method: str, tmp_path: Path) -> None:
    """K and v of an adapter and of its own Tunix form, where their ranks are stacked."""
    key = V.replace("v_proj", "k_proj")
    values = factors(key, 10, 21) | factors(V, *SIZES[V], rank=4)
    patterns = {"rank_pattern": {"k_proj": 2}, "alpha_pattern": {"k_proj": 5}}  # one scale, 2.5
    write(tmp_path / "one", values, r=4, lora_alpha=10, **patterns)
    write_base(tmp_path / "base", GEMMA3, {})
    base = ["--base", tmp_path / "base"]
    words = ["peft-to-orbax", tmp_path / "one", *base, "--out", tmp_path / "tunix", "--quiet"]
    assert run_cli(*words) == 0
    options = ["--method", *method.split(), "--force"]
    copytree(tmp_path / "one", tmp_path / "copy")
    assert combine(tmp_path, *options, names=("one", "copy"), out="peft") == 0
    assert combine(tmp_path, *options, *base, names=("one", "tunix")) == 0
    expected, found = stored(tmp_path / "peft"), stored(tmp_path / "out")
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(found[name], array), name


def test_stacked_ranks_have_no_sum_with_others_in_tunix(tmp_path: Path, capsys: Any) -> None:
    orbax(tmp_path)
    values = factors(V, *SIZES[V]) | factors(V.replace("v_proj", "k_proj"), 10, 21)
    write(tmp_path / "one", values)
    options = ["--method", "linear", "--base", tmp_path / "base"]
    assert combine(tmp_path, *options, names=("run", "one")) == 1
    assert (
        "layers.0.attn.kv_einsum.w: ranks 2 and 4, but linear adds factor to factor; use svd or "
        "cat, or --format peft if only stacked ranks differ, or bring" in capsys.readouterr().err
    )
    assert combine(tmp_path, *options, "--format", "peft", names=("run", "one")) == 0


def test_dry_run(tmp_path: Path, two: Any, capsys: Any) -> None:
    before = snapshot(tmp_path)
    words = ["surgery", "combine-lora", tmp_path / "one", tmp_path / "two"]
    assert run_cli(*words, "--out", tmp_path / "out", "--dry-run") == 0
    assert "2 adapters by cat" in capsys.readouterr().out
    assert run_cli(*words, "--out", tmp_path / "out", "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert {m["rank"] for m in plan["modules"].values()} == {7, 2, 4}
    assert [entry["modules"] for entry in plan["combined"]] == [2, 2]
    assert plan["recipe"] == {"method": "cat", "rank": None, "density": 1.0, "seed": 0}
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--method", "linear"], 1, "ranks 2 and 5, but linear adds factor to factor; use svd"),
        (["--method", "ties", "--density", 0.5], 1, "ranks 2 and 5, but ties adds factor to"),
        (["--method", "ties"], 2, "--density is needed with ties"),
        (["--density", 0.5], 2, "--density is not used with cat"),
        (["--rank", 2], 2, "--rank is not used with cat"),
        (["--format", "orbax"], 1, "one: a PEFT LoRA, to be written as Qwix's; give"),
    ],
)
def test_refusals(
    options: list[Any], code: int, message: str, tmp_path: Path, two: Any, capsys: Any
) -> None:
    assert combine(tmp_path, *options) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_has_no_sum_is_refused(tmp_path: Path, two: Any, capsys: Any) -> None:
    values = factors(Q, *SIZES[Q])
    norm = {"base_model.model.model.norm.weight": np.ones(10, F32)}
    write(tmp_path / "saved", {**values, **norm}, modules_to_save=["norm"])
    magnitude = {f"base_model.model.{Q}.lora_magnitude_vector": np.ones(42, F32)}
    write(tmp_path / "dora", {**values, **magnitude}, use_dora=True)
    for name, message in (("saved", "norm.weight: a module saved whole"), ("dora", "magnitude")):
        words = ["surgery", "combine-lora", tmp_path / "one", tmp_path / name]
        assert run_cli(*words, "--out", tmp_path / "out") == 1
        assert f"{message}, of which there is no sum; merge the adapters" in capsys.readouterr().err
    assert run_cli("surgery", "combine-lora", tmp_path / "one", "--out", tmp_path / "out") == 2
