"""A stand-in for a server with OpenAI's API, on loopback: it answers as it is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODELS = {"data": [{"id": "tiny", "max_model_len": 13}]}

Answer = Callable[[dict[str, Any]], tuple[int, Any]]
"""What is asked to status and answer: JSON, or bytes that are sent as they are."""

Serve = Callable[..., str]
"""Starts a server and gives its address; see `serving`."""


@contextmanager
def serving() -> Iterator[Serve]:
    """A function that starts servers, which end with the block.

    Its arguments are an `Answer`, what ``/models`` answers, more headers, and a list that takes in
    the ``Authorization`` of each request.
    """
    running: list[ThreadingHTTPServer] = []

    def start(
        answer: Answer,
        models: Any = MODELS,
        *,
        status: int = 200,
        headers: Mapping[str, str] = {},
        keys: list[str | None] | None = None,
    ) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(status, models if self.path.endswith("/models") else {})

            def do_POST(self) -> None:
                assert self.path == "/v1/completions"
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._send(*answer(body))

            def _send(self, status: int, value: Any) -> None:
                if keys is not None:
                    keys.append(self.headers.get("Authorization"))
                data = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                sent = {"Content-Length": str(len(data)), **headers}
                for name, text in sent.items():
                    self.send_header(name, text)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    try:
        yield start
    finally:
        for server in running:
            server.shutdown()
            server.server_close()
