"""Whether tensors are those of a model: every name, every shape, one dtype a parameter."""

from __future__ import annotations

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import LayoutError
from gemma_convert.convert.layouts import Spelling
from gemma_convert.convert.network import Network, Parameter
from gemma_convert.convert.stack import unstacked


def require_fit(
    checkpoint: Checkpoint, model: Network, spelling: Spelling, *, partial: bool = False
) -> None:
    """Refuse tensors that are not those of ``model``; the arguments are `disagreements`'s.

    Raises:
        LayoutError: If a tensor is missing, left over, or has another shape than ``model`` says.
    """
    problems = disagreements(checkpoint, model, spelling, partial=partial)
    if problems:
        more = f" (and {len(problems) - 1} more like it)" if len(problems) > 1 else ""
        raise LayoutError(
            f"{checkpoint.source}: {problems[0]}{more}",
            f"{model.origin} and tensors belong to different models, or the checkpoint is "
            "incomplete",
        )


def disagreements(
    checkpoint: Checkpoint, model: Network, spelling: Spelling, *, partial: bool = False
) -> list[str]:
    """Where the tensors of ``checkpoint`` are not those of ``model``, a sentence each.

    Args:
        checkpoint: Tensors spelled in ``spelling``.
        model: The dimensions they must have.
        spelling: How they are spelled.
        partial: Whether parameters may be absent altogether.
    """
    wrong: list[str] = []
    known: set[str] = set()
    try:
        checkpoint = unstacked(checkpoint, model, spelling)
    except LayoutError as error:
        return [error.what]
    for parameter in model.parameters():
        names = [name for name, _ in stored_names(parameter, spelling)]
        known.update(names)
        found = {name: checkpoint[name] for name in names if name in checkpoint}
        if not partial and (found or not parameter.unread):
            wrong += [f"{name}: missing ({parameter})" for name in names if name not in found]
        pattern = parameter.row.cell(spelling.layout).pattern
        wrong += [
            f"{name}: expected {pattern.describe(parameter.sizes)} by {model.origin}, "
            f"found shape {list(tensor.shape)}"
            for name, tensor in found.items()
            if tensor.shape != pattern.shape(parameter.sizes)
        ]
        if len({tensor.dtype for tensor in found.values()}) > 1:
            kinds = ", ".join(f"{name} {tensor.dtype}" for name, tensor in found.items())
            wrong.append(f"{parameter} has several dtypes: {kinds}")
    what = f"{model.family.name} of {len(model.layers)} layers in layout {spelling.layout.name}"
    wrong += [f"{name}: no parameter of a {what}" for name in checkpoint if name not in known]
    return wrong


def stored_names(parameter: Parameter, spelling: Spelling) -> list[tuple[str, dict[str, int]]]:
    """Full names of the tensors that hold ``parameter``, with their places on spelled axes."""
    return [(spelling.prefix + s, at) for s, at in parameter.parts(spelling.layout)]
