"""What the tests of pushing share: where to, side files, how a card is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.checkpoints import snapshot

REPO = "org/tuned"
SIDE = {
    "tokenizer.json": '{"a": 1}',
    "chat_template.jinja": "{{ x }}",
    "generation_config.json": "{}",
}


def metadata(readme: bytes) -> dict[str, Any]:
    value: dict[str, Any] = yaml.safe_load(readme.decode().split("---\n")[1])
    return value


def contents(directory: Path) -> dict[str, bytes]:
    return {name: data for name, data in snapshot(directory).items() if data is not None}
