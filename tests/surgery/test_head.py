"""Head and embedding of a tied model under several adapters, by hand; F13."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.job import Job
from gemma_convert.convert.jobs import convert
from gemma_convert.convert.layouts import HF
from gemma_convert.convert.tensor import Array
from gemma_convert.surgery.adapters.open import adapter_source
from tests.checkpoints import F32, GEMMA3, GEMMA4, base_arrays, memory
from tests.peft_files import factors, in_memory

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
STEM = "base_model.model."


def merge(*adapters: dict[str, Array], config: Any = GEMMA3, **options: Any) -> Job:
    prefix = "model." if config is GEMMA3 else "model.language_model."
    base = memory(base_arrays(config, prefix, F32), config=config, source="base")
    sources = [adapter_source(in_memory(values, **options)) for values in adapters]
    return convert(base, HF, adapters=sources)


def values(seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=(23, 10)).astype(F32)


def base_embedding() -> Array:
    return base_arrays(GEMMA3, "model.", F32)[EMBEDDING]


def test_copies_that_differ_are_both_written_and_both_configs_untied() -> None:
    saved = {f"{STEM}model.embed_tokens.weight": values(1), f"{STEM}lm_head.weight": values(2)}
    target = merge(saved, config=GEMMA4, modules_to_save=["embed_tokens", "lm_head"]).plan.target
    assert np.array_equal(target["model.language_model.embed_tokens.weight"].numpy(), values(1))
    assert np.array_equal(target[HEAD].numpy(), values(2))
    assert target.config["tie_word_embeddings"] is False
    assert target.config["text_config"]["tie_word_embeddings"] is False


def test_equal_copies_stay_tied() -> None:
    saved = {f"{STEM}model.embed_tokens.weight": values(1), f"{STEM}lm_head.weight": values(1)}
    job = merge(saved, modules_to_save=["embed_tokens", "lm_head"])
    assert HEAD not in job.plan.target
    assert np.array_equal(job.plan.target[EMBEDDING].numpy(), values(1))
    assert job.plan.target.config["tie_word_embeddings"] is True
    assert job.plan.dropped[f"{STEM}lm_head.weight"] == "tied to the embedding's"


def test_a_copy_of_the_embedding_leaves_the_head() -> None:
    saved = {f"{STEM}model.embed_tokens.weight": values(1)}
    target = merge(saved, modules_to_save=["embed_tokens"]).plan.target
    assert np.array_equal(target[HEAD].numpy(), base_embedding())
    assert np.array_equal(target[EMBEDDING].numpy(), values(1))


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_the_base_weight_of_both_stays_one(name: str) -> None:
    """As PEFT saves with save_embedding_layers: loading it changes the tied tensor itself."""
    target = merge({f"{STEM}{name}": values(1)}).plan.target
    assert HEAD not in target
    assert np.array_equal(target[EMBEDDING].numpy(), values(1))


def test_a_head_of_a_replaced_base_weight_starts_from_it() -> None:
    adapter = {f"{STEM}model.embed_tokens.weight": values(1), **factors("lm_head", 10, 23)}
    a, b = [*adapter.values()][1:]
    target = merge(adapter).plan.target
    assert np.array_equal(target[EMBEDDING].numpy(), values(1))
    # |values| < 10, a few float32 operations
    assert np.allclose(target[HEAD].numpy(), values(1) + 2.5 * (b @ a), rtol=0, atol=1e-5)


def test_two_adapters_of_the_head_are_summed() -> None:
    one, two = factors("lm_head", 10, 23), factors("lm_head", 10, 23, seed=1)
    target = merge(one, two).plan.target
    expected = base_embedding().astype(np.float64)
    for a, b in (one.values(), two.values()):
        expected = expected + 2.5 * (b.astype(np.float64) @ a)
    assert np.allclose(target[HEAD].numpy(), expected, rtol=0, atol=1e-5)
    assert np.array_equal(target[EMBEDDING].numpy(), base_embedding())


def test_a_tied_and_an_untied_change_do_not_go_together() -> None:
    base = memory(base_arrays(GEMMA3, "model.", F32), config=GEMMA3, source="base")
    tied = in_memory(
        {f"{STEM}model.embed_tokens.weight": values(1)},
        modules_to_save=["embed_tokens"],
        ensure_weight_tying=True,
    )
    untied = in_memory(factors("lm_head", 10, 23)).replace(source="other")
    with pytest.raises(AdapterError, match="changes head and embedding alike, other does not"):
        convert(base, HF, adapters=[adapter_source(tied), adapter_source(untied)])


def test_an_untied_base_keeps_its_own_head() -> None:
    config = {**GEMMA3, "tie_word_embeddings": False}
    weights = {**base_arrays(GEMMA3, "model.", F32), HEAD: values(5)}
    base = memory(weights, config=config, source="base")
    pair = factors("lm_head", 10, 23)
    target = convert(base, HF, adapters=[adapter_source(in_memory(pair))]).plan.target
    a, b = pair.values()
    assert np.allclose(target[HEAD].numpy(), values(5) + 2.5 * (b @ a), rtol=0, atol=1e-5)
    assert np.array_equal(target[EMBEDDING].numpy(), weights[EMBEDDING])


def test_an_embedding_with_more_tokens_than_the_base() -> None:
    more = np.ones((29, 10), F32)
    with pytest.raises(AdapterError) as error:
        merge({f"{STEM}model.embed_tokens.weight": more}, modules_to_save=["embed_tokens"])
    assert str(error.value).endswith(
        ": it saved the embedding of 29 tokens, the base has 23: tokens were added in "
        "training; resize the base first, with transformers' resize_token_embeddings(29)"
    )
