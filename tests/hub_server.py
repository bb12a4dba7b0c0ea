"""A server on loopback that speaks the part of the Hub's HTTP API that pushing and fetching use.

Written from the requests that huggingface_hub 1.33 makes (its ``hf_api``, ``_commit_api``, ``lfs``
and ``file_download``). It checks what a real one checks: the token, the digest of every LFS object,
the parent of a commit, and that an LFS object was sent before a commit names it. Faults are
injected by request: a status, or a connection closed halfway.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from typing import Any

TOKEN = "hf_" + "SecretTokenOfTheTests0123456789"

LFS_SUFFIXES = (".safetensors", "tokenizer.json")


@dataclass
class Repo:
    """A repository: its files at each commit, the newest last."""

    private: bool = True
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)

    @property
    def head(self) -> str:
        return self.commits[-1][0]

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1][1]

    def commit(self, files: dict[str, bytes]) -> str:
        text = f"{len(self.commits)} " + " ".join(f"{n} {_sha256(b)}" for n, b in files.items())
        self.commits.append((hashlib.sha1(text.encode()).hexdigest(), dict(files)))
        return self.head

    def at(self, revision: str) -> dict[str, bytes] | None:
        if revision == "main":
            return self.files
        return dict(self.commits).get(revision)


@dataclass
class Fault:
    """What goes wrong with the first ``times`` requests that match."""

    method: str
    path: str
    status: int = 0
    """0: the connection is closed; -1: the request is carried out, its answer is lost."""

    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Hub:
    """The state of the server; tests look at it and change it."""

    endpoint: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    lfs: dict[str, bytes] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    ranges: list[tuple[str, str]] = field(default_factory=list)
    cards: dict[str, dict[str, Any]] = field(default_factory=dict)
    sends: dict[str, bytes] = field(default_factory=dict)
    """Files of which other content is sent than is listed."""

    knows_ranges: bool = True
    xet: bool = False
    """Whether large files are announced as Xet's, whose storage this server is not."""

    cut_off: SimpleQueue[str] = field(default_factory=SimpleQueue)
    """Paths of answers that the client did not read to their end."""

    on_request: Callable[[str, str], None] = lambda method, path: None
    foreign: set[str] = field(default_factory=lambda: {"others"})
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, files: dict[str, bytes], *, private: bool = True) -> Repo:
        repo = Repo(private)
        repo.commit(files)
        self.repos[name] = repo
        return repo

    def sent(self, method: str, pattern: str) -> list[str]:
        """Paths of the requests made."""
        return [p for m, p in self.requests if m == method and re.search(pattern, p)]

    def fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times and fault.method == method and re.search(fault.path, path):
                    fault.times -= 1
                    return fault
        return None


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A server on a free port."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def git_blob(data: bytes) -> str:
    """The name that git gives a blob."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _is_lfs(name: str) -> bool:
    return name.endswith(LFS_SUFFIXES)


class _Refused(Exception):  # noqa: N818 - an answer
    def __init__(self, status: int, text: str = "", code: str = "") -> None:
        super().__init__(text)
        self.status, self.text, self.code = status, text, code


class _Closed(Exception):  # noqa: N818 - an event
    pass


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            self._answer()

        do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

        def _answer(self) -> None:
            path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
            hub.requests.append((self.command, path))
            hub.on_request(self.command, path)
            try:
                self._answer_to(path)
            except (BrokenPipeError, ConnectionResetError):
                hub.cut_off.put(path)
            except _Closed:
                return

        def _answer_to(self, path: str) -> None:
            fault = hub.fault(self.command, path)
            length = int(self.headers.get("Content-Length") or 0)
            if fault is not None and fault.status == 0:
                self.rfile.read(length // 2)
                self._close()
            body = self.rfile.read(length)
            if fault is not None and fault.status > 0:
                self._reply(fault.status, b'{"error": "injected"}', fault.headers)
                return
            try:
                status, data, headers = self._route(path, body)
            except _Refused as error:
                status, data = error.status, json.dumps({"error": error.text}).encode()
                told = {"X-Error-Code": error.code, "X-Error-Message": error.text}
                headers = {name: text for name, text in told.items() if text}
            else:
                if fault is not None:
                    self._close()
            self._reply(status, data, headers)

        def _close(self) -> None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            raise _Closed

        def _reply(self, status: int, data: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if "Content-Length" not in headers:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def _route(self, path: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
            for pattern, function in routes:
                found = re.fullmatch(pattern, f"{self.command} {path}")
                if found:
                    return function(self, body, **found.groupdict())
            raise _Refused(404, f"no route {self.command} {path}")

        def require_token(self) -> None:
            given = self.headers.get("Authorization", "")
            if given != f"Bearer {TOKEN}":
                raise _Refused(401, f"Invalid credentials in Authorization header {given}".strip())

        def repo(self, name: str) -> Repo:
            repo = hub.repos.get(name)
            allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            if repo is None or (repo.private and not allowed):
                raise _Refused(404, "Repository not found", "RepoNotFound")
            return repo

        def files(self, name: str, revision: str) -> tuple[str, dict[str, bytes]]:
            repo = self.repo(name)
            files = repo.at(revision)
            if files is None:
                raise _Refused(404, "Invalid rev id", "RevisionNotFound")
            return (repo.head if revision == "main" else revision), files

        def whoami(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
            self.require_token()
            return _json({"name": "me", "type": "user", "orgs": [{"name": "org"}]})

        def create(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
            self.require_token()
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if asked["organization"] in hub.foreign:
                raise _Refused(403, "You don't have the rights to create a model here")
            if name in hub.repos:
                raise _Refused(409, "You already created this model repo")
            hub.add(name, {".gitattributes": b"*.safetensors filter=lfs\n"})
            hub.repos[name].private = asked.get("visibility") == "private"
            return _json({"url": f"{hub.endpoint}/{name}"})

        def info(
            self, body: bytes, repo: str, revision: str = "main"
        ) -> tuple[int, bytes, dict[str, str]]:
            commit, files = self.files(repo, revision or "main")
            return _json(
                {
                    "id": repo,
                    "sha": commit,
                    "private": hub.repos[repo].private,
                    "siblings": [{"rfilename": name} for name in files],
                    "cardData": hub.cards.get(repo),
                }
            )

        def tree(self, body: bytes, repo: str, revision: str) -> tuple[int, bytes, dict[str, str]]:
            _, files = self.files(repo, revision)
            entries: list[dict[str, Any]] = [{"type": "directory", "path": "x", "oid": "0" * 40}]
            for name, data in sorted(files.items()):
                entry = {"type": "file", "path": name, "size": len(data), "oid": git_blob(data)}
                if _is_lfs(name):
                    entry["oid"] = git_blob(b"pointer" + data)
                    entry["lfs"] = {"oid": _sha256(data), "size": len(data), "pointerSize": 134}
                entries.append(entry)
            return _json(entries)

        def preupload(
            self, body: bytes, repo: str, revision: str
        ) -> tuple[int, bytes, dict[str, str]]:
            self.require_token()
            self.repo(repo)
            ignored = hub.repos[repo].files.get(".gitignore", b"").decode().split()
            answer = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if _is_lfs(file["path"]) else "regular",
                    "shouldIgnore": file["path"] in ignored,
                }
                for file in json.loads(body)["files"]
            ]
            return _json({"files": answer})

        def batch(self, body: bytes, repo: str) -> tuple[int, bytes, dict[str, str]]:
            self.require_token()
            objects = []
            for wanted in json.loads(body)["objects"]:
                answer = {"oid": wanted["oid"], "size": wanted["size"]}
                if wanted["oid"] not in hub.lfs:
                    answer["actions"] = {"upload": {"href": f"{hub.endpoint}/lfs/{wanted['oid']}"}}
                objects.append(answer)
            return _json({"transfer": "basic", "objects": objects})

        def put(self, body: bytes, oid: str) -> tuple[int, bytes, dict[str, str]]:
            if "Authorization" in self.headers:
                raise _Refused(400, "the store of large files must not see the token")
            if _sha256(body) != oid:
                raise _Refused(422, "digest mismatch")
            hub.lfs[oid] = body
            return 200, b"", {}

        def commit(
            self, body: bytes, repo: str, revision: str
        ) -> tuple[int, bytes, dict[str, str]]:
            self.require_token()
            target = self.repo(repo)
            files = dict(target.files)
            for line in map(json.loads, body.splitlines()):
                key, value = line["key"], line["value"]
                if key == "header" and value.get("parentCommit") != target.head:
                    raise _Refused(412, "A commit has happened since")
                if key == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif key == "lfsFile":
                    if value["oid"] not in hub.lfs:
                        raise _Refused(400, f"object {value['oid']} was not uploaded")
                    files[value["path"]] = hub.lfs[value["oid"]]
                elif key == "deletedFile":
                    del files[value["path"]]
            oid = target.commit(files)
            url = f"{hub.endpoint}/{repo}/commit/{oid}"
            return _json({"commitUrl": url, "commitOid": oid})

        def resolve(
            self, body: bytes, repo: str, revision: str, file: str
        ) -> tuple[int, bytes, dict[str, str]]:
            commit, files = self.files(repo, revision)
            if file not in files:
                raise _Refused(404, "Entry not found", "EntryNotFound")
            data = files[file]
            digest = _sha256(data) if _is_lfs(file) else git_blob(data)
            headers = {"X-Repo-Commit": commit, "ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
            if hub.xet and self.command == "HEAD" and _is_lfs(file):
                headers["X-Xet-Hash"] = digest
                headers["X-Xet-Refresh-Route"] = f"{hub.endpoint}/xet-token"
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if self.command == "GET":
                data = hub.sends.get(file, data)
            if asked is None or self.command == "HEAD" or not hub.knows_ranges:
                return 200, data, headers | {"Content-Length": str(len(data))}
            hub.ranges.append((file, self.headers["Range"]))
            start, stop = int(asked[1]), int(asked[2] or len(data) - 1) + 1
            headers["Content-Range"] = f"bytes {start}-{min(stop, len(data)) - 1}/{len(data)}"
            return 206, data[start:stop], headers

        def xet_token(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
            token = {
                "Access-Token": "x",
                "Token-Expiration": "99999999999",
                "Cas-Url": hub.endpoint,
            }
            return 200, b"", {f"X-Xet-{name}": value for name, value in token.items()}

        def validate(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
            return _json({"errors": [], "warnings": []})

    model = r"/api/models/(?P<repo>[^/]+/[^/]+)"
    routes: list[tuple[str, Callable[..., tuple[int, bytes, dict[str, str]]]]] = [
        (r"GET /api/whoami-v2", Handler.whoami),
        (r"POST /api/repos/create", Handler.create),
        (r"GET /xet-token", Handler.xet_token),
        (r"POST /api/validate-yaml", Handler.validate),
        (rf"GET {model}(?:/revision/(?P<revision>[^/]+))?", Handler.info),
        (rf"GET {model}/tree/(?P<revision>[^/]+)", Handler.tree),
        (rf"POST {model}/preupload/(?P<revision>[^/]+)", Handler.preupload),
        (rf"POST {model}/commit/(?P<revision>[^/]+)", Handler.commit),
        (r"POST /(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", Handler.batch),
        (r"PUT /lfs/(?P<oid>[0-9a-f]{64})", Handler.put),
        (
            r"(?:GET|HEAD) /(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)",
            Handler.resolve,
        ),
    ]
    return Handler


def _json(value: Any) -> tuple[int, bytes, dict[str, str]]:
    return 200, json.dumps(value).encode(), {"Content-Type": "application/json"}
