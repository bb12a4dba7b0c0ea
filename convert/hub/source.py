"""A directory as it will be published: which files, the card, and JSON without local paths."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import InputError
from gemma_convert.convert.hub.front_matter import read_front_matter
from gemma_convert.convert.hub.local_files import PushFile, hash_file, in_memory, list_files
from gemma_convert.convert.hub.model_card import CARD_NAME, Card, stated_license
from gemma_convert.convert.hub.names import SCHEME, is_repo_id, parse_hub_path
from gemma_convert.convert.hub.public import public_config, public_ledger
from gemma_convert.convert.ledger import LEDGER_NAME
from gemma_convert.convert.readers import open_checkpoint
from gemma_convert.convert.readers.jsonfile import parse_object, read_bytes, refuse_many_values
from gemma_convert.convert.readers.provenance import read_ledger
from gemma_convert.convert.readers.typed import fits
from gemma_convert.convert.registry import explain
from gemma_convert.convert.validation.result import VALIDATION_NAME

_CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json", "adapter_config.json")
_LAST = (".index.json", "config.json", LEDGER_NAME, CARD_NAME)

_VERDICT = {"check": str, "title": str, "passed": bool, "summary": {}}
"""What a card tells of each check in validation.json; it says nothing of a file with others."""


@dataclass(frozen=True)
class Source:
    """A directory to push, read but for its weights.

    Attributes:
        directory: Where it lies.
        paths: Name to file of all that is sent as it is.
        written: Name to content of what is sent in another form: ledgers and configs.
        card: What the card will say.
        readme: The user's own README.md, if there is one.
        digests: sha256 of the files that conversion.json describes.
        notes: What a user should know.
    """

    directory: Path
    paths: Mapping[str, Path]
    written: Mapping[str, bytes]
    card: Card
    readme: str | None
    digests: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the files that are sent as they are."""
        return sum(path.stat().st_size for path in self.paths.values())

    def hashed(self, progress: Callable[[int], None]) -> list[PushFile]:
        """All files but the card, in the order of the upload: weights first, what names them last.

        Raises:
            InputError: A file cannot be read, changes meanwhile, or is not the one that
                conversion.json describes.
        """
        files = [hash_file(name, path, progress) for name, path in self.paths.items()]
        for file in files:
            expected = self.digests.get(file.name)
            if file.name.endswith(".safetensors") and expected not in (None, file.sha256):
                raise InputError(
                    f"{file.path} is not what {LEDGER_NAME} describes: expected "
                    f"sha256:{expected}, found sha256:{file.sha256}",
                    f"convert again, or push without {LEDGER_NAME}",
                )
        files += [in_memory(name, data) for name, data in self.written.items()]
        return sorted(files, key=lambda file: _rank(file.name))


def read_source(
    directory: Path, repo: str, *, base_model: str | None = None, license: str | None = None
) -> Source:
    """Look at a directory that is to be pushed.

    Args:
        directory: A Hugging Face model, a PEFT adapter or an Orbax checkpoint.
        repo: Where it goes.
        base_model: Hub id of the base; by default from the ledger or the adapter's config.
        license: Licence as the Hub names it; by default that of the base.

    Raises:
        InputError: No checkpoint, or files that must not be sent; see `list_files`.
    """
    if not directory.is_dir():
        raise InputError(f"{directory} is not a directory", "give the directory to push")
    checkpoint = open_checkpoint(directory)
    paths, hidden = list_files(directory)
    ignored = _ignored(checkpoint, paths)
    ledger = read_ledger(paths[LEDGER_NAME]) if LEDGER_NAME in paths else {}
    adapter_config = checkpoint.metadata.get("adapter_config", {})
    base_model = base_model or _base_model(ledger, adapter_config)
    written = {
        name: public_config(_read_config(paths[name]), base_model)
        for name in _CONFIGS
        if name in paths
    }
    verdicts: list[Any] = []
    if VALIDATION_NAME in paths:
        validation = _read_validation(paths[VALIDATION_NAME])
        written[VALIDATION_NAME] = _json(validation)
        verdicts = validation if isinstance(validation, list) else [validation]
    if ledger:
        written[LEDGER_NAME] = _json(public_ledger(ledger))
    card = Card(
        repo=repo,
        config=checkpoint.config,
        adapter_config=adapter_config,
        ledger=public_ledger(ledger),
        validation=verdicts if fits(verdicts, [_VERDICT]) else [],
        base_model=base_model,
        license={"license": license} if license else _license(ledger),
        layout=_layout(checkpoint),
    )
    readme = None
    if CARD_NAME in paths:
        readme = decoded(read_bytes(paths[CARD_NAME]), str(paths[CARD_NAME]))
    notes = [*checkpoint.notes] if checkpoint.format == "safetensors" else []
    notes += [f"left out {name}: it is hidden" for name in hidden]
    return Source(
        directory,
        {n: p for n, p in paths.items() if n not in {*ignored, *written, CARD_NAME}},
        written,
        card,
        readme,
        {
            name: f.get("sha256", "")
            for name, f in ledger.get("output", {}).get("files", {}).items()
        },
        tuple(notes),
    )


def _rank(name: str) -> tuple[int, str]:
    """Where a file stands in the upload."""
    if name.endswith(".safetensors"):
        return 0, name
    return (2 if name.endswith(_LAST) else 1), name


def _ignored(checkpoint: Checkpoint, paths: Mapping[str, Path]) -> list[str]:
    """Weights at the top that the index does not name; see `open_safetensors`."""
    if checkpoint.format != "safetensors":
        return []
    return [
        name
        for name in paths
        if "/" not in name and name.endswith(".safetensors") and name not in checkpoint.fingerprint
    ]


def _layout(checkpoint: Checkpoint) -> str:
    if checkpoint.format == "safetensors":
        return ""
    evidence = explain(checkpoint)
    return evidence[0].spelling.layout.name if evidence else "its training library"


def _base_model(ledger: Mapping[str, Any], adapter_config: Mapping[str, Any]) -> str | None:
    """The base's Hub id, where ledger or adapter name one for sure."""
    stated = adapter_config.get("base_model_name_or_path")
    if isinstance(stated, str) and is_repo_id(stated) and not Path(stated).exists():
        return stated
    for source in ledger.get("inputs", ()):
        path = source.get("path", "")
        if source.get("format") == "safetensors" and path.startswith(SCHEME):
            return parse_hub_path(path).repo
    return None


def _license(ledger: Mapping[str, Any]) -> dict[str, Any]:
    """What the README of a base on this disk says of its licence."""
    for source in ledger.get("inputs", ()):
        readme = Path(source.get("path", "")) / CARD_NAME
        # Path.is_file raises of a name that is too long.
        if source.get("format") == "safetensors" and os.path.isfile(readme):
            text = read_bytes(readme).decode("utf-8", errors="replace")
            return stated_license(read_front_matter(text, str(readme)))
    return {}


def _read_config(path: Path) -> bytes:
    data = read_bytes(path)
    refuse_many_values(data, str(path))
    return data


def decoded(text: bytes, what: str) -> str:
    """The text of a README.

    Raises:
        InputError: It is not UTF-8.
    """
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{what} is not UTF-8 from byte {error.start} on",
            "save it as UTF-8, as the Hub wants it",
        ) from error


def _read_validation(path: Path) -> Any:
    """One result or a list of them, without local paths."""
    data = read_bytes(path)
    if not data.lstrip().startswith(b"["):
        return public_ledger(parse_object(data, str(path)))
    # A list is parsed as the one value of an object, with the same checks.
    parsed = parse_object(b'{"results": ' + data + b"}", str(path))
    return public_ledger(parsed)["results"]


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
