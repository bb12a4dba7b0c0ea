"""A bucket of fake-gcs-server, used by its bare HTTP API and not by the code under test."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@contextmanager
def running_storage(binary: Path, port: int) -> Iterator[str]:
    """A server that keeps its buckets in memory; yields its URL."""
    where = f"127.0.0.1:{port}"
    options: dict[str, Any] = {
        "backend": "memory",
        "scheme": "http",
        "host": "127.0.0.1",
        "port": port,
        "public-host": where,
        "external-url": f"http://{where}",
    }
    words = [word for name, value in options.items() for word in (f"-{name}", str(value))]
    process = subprocess.Popen(
        [str(binary), *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait(f"http://{where}/storage/v1/b")
        yield f"http://{where}"
    finally:
        process.terminate()
        process.wait()


@dataclass(frozen=True)
class Bucket:
    """A bucket, as a client of nothing but HTTP sees it."""

    server: str
    name: str

    def url(self, path: str) -> str:
        return f"gs://{self.name}/{path}"

    def put(self, name: str, data: bytes) -> None:
        query = urllib.parse.urlencode({"uploadType": "media", "name": name})
        self.ask("POST", f"/upload/storage/v1/b/{self.name}/o?{query}", data)

    def put_tree(self, directory: Path, prefix: str) -> str:
        """Upload a directory; returns its URL."""
        for path in sorted(p for p in directory.rglob("*") if p.is_file()):
            self.put(f"{prefix}/{path.relative_to(directory).as_posix()}", path.read_bytes())
        return self.url(prefix)

    def delete(self, name: str) -> None:
        self.ask("DELETE", f"/storage/v1/b/{self.name}/o/{urllib.parse.quote(name, safe='')}")

    def names(self, prefix: str = "") -> list[str]:
        query = urllib.parse.urlencode({"prefix": prefix})
        listed = json.loads(self.ask("GET", f"/storage/v1/b/{self.name}/o?{query}"))
        return [item["name"] for item in listed.get("items", ())]

    def files(self, prefix: str) -> dict[str, bytes]:
        """Every object below ``prefix``, by its name relative to it."""
        return {
            name[len(prefix) + 1 :]: self.ask(
                "GET", f"/storage/v1/b/{self.name}/o/{urllib.parse.quote(name, safe='')}?alt=media"
            )
            for name in self.names(f"{prefix}/")
        }

    def ask(self, method: str, path: str, data: bytes | None = None) -> bytes:
        headers = {"Content-Type": "application/octet-stream"}
        request = urllib.request.Request(self.server + path, data, headers, method=method)
        with _OPENER.open(request, timeout=20) as response:
            answer: bytes = response.read()
            return answer


def _wait(url: str, within_s: float = 20) -> None:
    deadline = time.monotonic() + within_s
    while True:
        try:
            _OPENER.open(url, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
