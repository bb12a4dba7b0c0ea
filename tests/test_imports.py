"""Light commands stay light: none of the heavy libraries is imported before it is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import GEMMA3, base_arrays, factor_arrays, write_base, write_run

HEAVY = {"jax", "jaxlib", "torch", "transformers", "flax", "tunix", "qwix", "orbax", "peft"}
HEAVY |= {"huggingface_hub", "gcsfs", "httpx", "ray"}
SAMPLES = Path(__file__).parent / "data" / "orbax_samples"

PROBE = """
import json, sys
{code}
print(json.dumps(sorted(name for name in {heavy} if name in sys.modules)), file=sys.stderr)
"""


def imported(code: str) -> list[str]:
    """The heavy libraries that a fresh interpreter has after ``code``."""
    text = PROBE.format(code=code, heavy=sorted(HEAVY))
    command = [sys.executable, "-c", text]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    found: list[str] = json.loads(result.stderr.splitlines()[-1])
    return found


def cli(*words: object) -> str:
    arguments = [str(word) for word in words]
    return f"from gemma_convert.cli import main; assert main({arguments!r}) == 0"


@pytest.mark.parametrize(
    "code",
    [
        "import gemma_convert",
        "import gemma_convert.convert.readers, gemma_convert.convert.jobs, gemma_convert.cli",
        "import gemma_convert.convert.writers.hf, gemma_convert.convert.writers.orbax",
        cli("--help"),
        cli("orbax-to-hf", "--help"),
        cli("hf-to-orbax", "--help"),
        cli("push", "--help"),
        cli("surgery", "extract-lora", "--help"),
        "import gemma_convert.surgery.extract_lora, gemma_convert.surgery.combine_lora",
        "import gemma_convert.convert.validation.gate, gemma_convert.convert.commands.validate",
        cli("diff", "--help"),
        cli("validate", "logits", "--help"),
        cli("inspect", SAMPLES / "lora_only"),
        cli("inspect", SAMPLES / "full_base", "--json", "--tensors"),
    ],
)
def test_nothing_heavy(code: str) -> None:
    assert imported(code) == []


def test_safetensors_are_inspected_and_merged_without_anything_heavy(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."), shards=2)
    run = write_run(tmp_path / "run", factor_arrays(GEMMA3))
    merge = ["orbax-to-hf", run, "--base", base, "--out", tmp_path / "out", "--alpha", 4]
    assert imported(f"{cli('inspect', base)}\n{cli(*merge)}") == []
    assert (tmp_path / "out" / "model.safetensors").is_file()
    proof = ["--base", base, "--adapter", run, "--alpha", 4, "--report", tmp_path / "r.html"]
    checks = [cli("validate", "merged", tmp_path / "out", *proof)]
    checks += [cli("validate", "roundtrip", base), cli("diff", base, tmp_path / "out")]
    assert imported("\n".join(checks)) == []


def test_this_test_can_fail(tmp_path: Path) -> None:
    """A stub of that name is enough, and so is an import made inside a function."""
    (tmp_path / "torch.py").touch()
    path = f"sys.path.insert(0, {str(tmp_path)!r})"
    assert imported(f"{path}\nimport gemma_convert\nimport torch") == ["torch"]
    base = write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."))
    words = ["hf-to-orbax", base, "--layout", "tunix", "--out", tmp_path / "out", "--quiet"]
    assert {"jax", "orbax"} <= set(imported(cli(*words)))
