"""The language-model head: written once where it is the embedding, never lost where it is not."""

from __future__ import annotations

from typing import Any

import pytest

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import ConfigError, LayoutError
from gemma_convert.convert.jobs import hf_to_orbax, orbax_to_hf
from gemma_convert.convert.tensor import Array
from tests.checkpoints import (
    ALPHA,
    BF16,
    F32,
    FORMS,
    GEMMA3,
    base_arrays,
    factor_arrays,
    memory,
    tunix_arrays,
)

HEAD = {
    "model.": "lm_head.weight",
    "language_model.model.": "language_model.lm_head.weight",
    "model.language_model.": "lm_head.weight",
}


def run(values: dict[str, Array]) -> Checkpoint:
    return memory(values, source="run", format="orbax")


@pytest.mark.parametrize(("config", "prefix"), FORMS)
def test_a_head_that_is_the_embedding_is_written_once(config: dict[str, Any], prefix: str) -> None:
    """F21."""
    values = base_arrays(config, prefix)
    with_head = {**values, HEAD[prefix]: values[f"{prefix}embed_tokens.weight"].copy()}
    ours = memory(with_head, config=config, source="base")
    job = orbax_to_hf(run(factor_arrays(config)), ours, alpha=ALPHA)
    assert job.plan.dropped == {HEAD[prefix]: "tied to the embedding: written once"}
    assert set(job.plan.target) == set(values)
    assert set(hf_to_orbax(ours).plan.dropped) == {HEAD[prefix]}


@pytest.mark.parametrize("change", ["value", "shape", "dtype"])
def test_a_head_that_differs_from_the_embedding_is_refused(change: str) -> None:
    values = base_arrays(GEMMA3, "model.")
    head = values["model.embed_tokens.weight"].copy()
    if change == "value":
        head[22, 9] += 1
    elif change == "shape":
        head = head[:-1]
    else:
        head = head.astype(F32)
    ours = memory({**values, "lm_head.weight": head}, config=GEMMA3, source="base")
    with pytest.raises(LayoutError, match=r"^base: lm_head.weight differs from the embedding, but"):
        orbax_to_hf(run(factor_arrays(GEMMA3)), ours, alpha=ALPHA)


def test_a_tied_head_without_its_embedding() -> None:
    values = base_arrays(GEMMA3, "model.")
    values["lm_head.weight"] = values.pop("model.embed_tokens.weight")
    ours = memory(values, config=GEMMA3, source="base")
    with pytest.raises(LayoutError, match=r"not model.embed_tokens.weight, to which config"):
        orbax_to_hf(run(factor_arrays(GEMMA3)), ours, alpha=ALPHA)


def test_a_head_of_its_own_is_carried_or_refused_never_lost() -> None:
    config = {**GEMMA3, "tie_word_embeddings": False}
    values = base_arrays(GEMMA3, "model.")
    values["lm_head.weight"] = values["model.embed_tokens.weight"] + BF16.type(1)
    ours = memory(values, config=config, source="base")
    job = orbax_to_hf(run(factor_arrays(GEMMA3)), ours, alpha=ALPHA)
    assert job.plan.target["lm_head.weight"] is ours["lm_head.weight"]
    for make in (
        lambda: hf_to_orbax(ours),
        lambda: orbax_to_hf(run(tunix_arrays(GEMMA3)), ours),
        lambda: orbax_to_hf(run(tunix_arrays(GEMMA3)), ours.replace(tensors={})),
    ):
        with pytest.raises(ConfigError, match="tie_word_embeddings is false, but Tunix's models"):
            make()
