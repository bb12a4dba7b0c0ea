"""Other tools that merge a LoRA of the real Gemma 3 270M, each as its documentation says.

    python -m bench.peers inputs DIR
    python -m bench.peers tunix BASE RUN OUT
    python -m bench.peers peft BASE ADAPTER OUT

Only these read a base of one file or an adapter of their own form, so ``inputs`` makes both, of
the adapter that the tests train with Tunix (tests/real). The time of a peer includes that of
loading its model, without which it cannot merge.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from bench.cases import CONVERT


def inputs(directory: Path) -> None:
    """Make ``base``, ``run`` and ``peft`` in ``directory``, unless they are there."""
    from gemma_convert.convert.readers.safetensors import open_safetensors
    from gemma_convert.convert.writers.hf import write_hf
    from tests.real.gemma_270m import hf_directory
    from tests.real.tunix_lora import checkpoint

    if (directory / "base").exists():
        return
    (directory / "base").mkdir(parents=True)
    checkpoint_of_base = open_safetensors(hf_directory())
    base, run = directory / "base", directory / "run"
    write_hf(checkpoint_of_base, base, max_shard_bytes=10**10, progress=lambda _: None)
    run.symlink_to(checkpoint())
    to_peft = ("orbax-to-peft", str(run), "--base", str(base), "--alpha", "16", "--quiet")
    subprocess.run([*CONVERT, *to_peft, "--out", str(directory / "peft")], check=True)


def tunix(base: Path, run: Path, out: Path) -> None:
    """Tunix 0.1.7: restore into its model, then `save_lora_merged_model_as_safetensors`."""
    from tunix.models.gemma3.params import save_lora_merged_model_as_safetensors

    from tests.real.tunix_lora import ALPHA, RANK, restored_model

    model = restored_model(base, run.resolve())
    save_lora_merged_model_as_safetensors(str(base), str(out), model, RANK, ALPHA)


def peft(base: Path, adapter: Path, out: Path) -> None:
    """PEFT: `merge_and_unload`, then `save_pretrained`."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out)


def main() -> None:
    """Make the inputs, or merge."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("inputs", "tunix", "peft"))
    parser.add_argument("paths", type=Path, nargs="+")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    {"inputs": inputs, "tunix": tunix, "peft": peft}[options.what](*options.paths)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
