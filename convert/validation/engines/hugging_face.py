"""transformers as an engine: a directory, or a base with a PEFT adapter."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np

from gemma_convert.convert.errors import ConfigError, InputError
from gemma_convert.convert.readers.jsonfile import read_object
from gemma_convert.convert.readers.safetensors import CONFIG_NAME
from gemma_convert.convert.validation.engines.base import About, Logits
from gemma_convert.convert.validation.engines.packages import require_packages
from gemma_convert.convert.validation.engines.peft_adapter import adapted

# The attention of transformers that caps the scores of Gemma 2, and the experts that work in
# every dtype and size: other kernels sum in other orders, or leave the cap out.
_EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


@dataclass(frozen=True)
class HuggingFace:
    """A directory that transformers loads.

    Attributes:
        about: What a report says of it.
        directory: The model, or the base of ``adapter``.
        adapter: A PEFT adapter's directory.
        low_memory: Whether the layers stay on the disk, each read when it is run.
    """

    about: About
    directory: Path
    adapter: Path | None = None
    low_memory: bool = False

    def require_runnable(self) -> None:
        """See `Source.require_runnable`."""
        path = self.directory / CONFIG_NAME
        require_model(read_object(path), str(path), self.adapter)

    def load(self) -> Loaded:
        """Load it.

        Raises:
            InputError: If transformers finds weights missing, or more than the model has, or the
                adapter does not fit.
        """
        with ExitStack() as undo:
            model = self._model(undo)
            engine = Loaded(self.about, model.eval())
            finalize(engine, undo.pop_all().close)
        return engine

    def _model(self, undo: ExitStack) -> Any:
        """The model; what must be undone when it is gone, or was not loaded, goes to ``undo``."""
        import torch
        from transformers import AutoModelForCausalLM

        placed: dict[str, Any] = {}
        if self.low_memory:
            placed = _layers_on_disk(self.directory)
            undo.callback(shutil.rmtree, placed["offload_folder"], ignore_errors=True)
        with _silent():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self.directory,
                dtype=getattr(torch, self.about.dtype),
                output_loading_info=True,
                **_EAGER,
                **placed,
            )
        model, report = loaded
        wrong = {problem: sorted(map(str, names)) for problem, names in report.items() if names}
        if wrong:
            problem, names = next(iter(wrong.items()))
            raise InputError(
                f"{self.directory}: transformers says {problem.replace('_', ' ')}: {names[0]}"
                + (f" and {len(names) - 1} more" if len(names) > 1 else ""),
                "config.json and tensors belong to different models",
            )
        if self.adapter is not None:
            model = adapted(model, self.adapter)
        return model


class Loaded:
    """A model of transformers in memory."""

    def __init__(self, about: About, model: Any) -> None:
        self.about = about
        self._model = model

    def run(self, ids: list[int], keep: list[int], *, layers: bool) -> Logits:
        """See `Engine.run`."""
        import torch

        device = self._model.get_input_embeddings().weight.device
        tokens = torch.tensor([ids], device=device)
        kept = torch.tensor(keep, device=device)
        states: list[Any] = []
        hooks = self._hooks(states, kept) if layers else []
        try:
            with torch.inference_mode():
                found = self._model(tokens, use_cache=False, logits_to_keep=kept).logits[0]
        finally:
            for hook in hooks:
                hook.remove()
        hidden = np.stack([s.float().cpu().numpy() for s in states]) if layers else None
        return Logits(found.float().cpu().numpy(), hidden)

    def _hooks(self, states: list[Any], kept: Any) -> list[Any]:
        """Have what enters the first layer and what leaves each appended to ``states``."""
        _, layers = _decoder_layers(self._model)

        def enters(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states.append((args[0] if args else kwargs["hidden_states"])[0, kept])

        def leaves(module: Any, args: tuple[Any, ...], output: Any) -> None:
            states.append((output[0] if isinstance(output, tuple) else output)[0, kept])

        first = layers[0].register_forward_pre_hook(enters, with_kwargs=True)
        return [first, *(layer.register_forward_hook(leaves) for layer in layers)]


@contextmanager
def _silent() -> Iterator[None]:
    """Without bars and warnings of transformers; what it finds wrong is an error here."""
    import transformers

    logging: Any = transformers.utils.logging
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def require_model(
    config: Mapping[str, Any], name: str = CONFIG_NAME, adapter: Path | None = None
) -> None:
    """Refuse a config.json of which transformers makes no model; none of its weights are made.

    Args:
        config: As parsed.
        name: What it is, for messages.
        adapter: Directory of a PEFT adapter that must fit it.

    Raises:
        InputError: If packages are missing, or the adapter does not fit.
        ConfigError: With what transformers says.
    """
    packages = ("torch", "transformers", *(("peft",) if adapter is not None else ()))
    require_packages("transformers", packages, "validate")
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    make: Any = AutoModelForCausalLM.from_config
    try:
        with torch.device("meta"):
            model = make(CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)), **_EAGER)
    except Exception as error:
        raise ConfigError(
            f"{name}: transformers makes no model of it: {type(error).__name__}: {error}",
            "compare with another engine",
        ) from error
    if adapter is not None:
        adapted(model, adapter)


def _layers_on_disk(directory: Path) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that leave the text model's layers on the disk."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = make(AutoConfig.from_pretrained(directory))
    name, layers = _decoder_layers(model)
    places = {f"{name}.{i}": "disk" for i in range(len(layers))}
    # Every module beside the path to the layers, so that no key holds another.
    steps = name.split(".")
    for depth, step in enumerate(steps):
        path = ".".join(steps[:depth])
        beside = (child for child, _ in model.get_submodule(path).named_children())
        places |= {".".join([*steps[:depth], child]): "cpu" for child in beside if child != step}
    folder = tempfile.mkdtemp(prefix="gemma-convert-layers-")
    return {"device_map": places, "offload_folder": folder}


def _decoder_layers(model: Any) -> tuple[str, Any]:
    """Name and modules of the text model's list of layers, in whatever wrappers."""
    import torch

    count = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if (
            isinstance(module, torch.nn.ModuleList)
            and name.rpartition(".")[2] == "layers"
            and not any(tower in name for tower in ("vision", "audio"))
            and len(module) == count
        ):
            return name, module
    raise InputError(f"{type(model).__name__} has no list of {count} layers", "leave --layers out")
