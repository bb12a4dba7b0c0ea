"""JSON from a server that is not trusted: what is wrong with an answer is told in one line."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException, HTTPMessage
from typing import IO, Any
from urllib.parse import urlsplit

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers.jsonfile import parse_object

ANSWER_LIMIT = 1 << 30
"""Longest answer read, in bytes; a position of a prompt takes some 2 kB."""

_SECONDS = 600
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PORTS = {"http": 80, "https": 443}
_SHOWN = 500
"""Bytes of a refusal that are told."""


def call(url: str, body: Mapping[str, Any] | None, api_key: str | None) -> dict[str, Any]:
    """POST ``body`` as JSON, or GET if None.

    A redirect is followed on the same server alone: the key is not for any other.

    Raises:
        InputError: If nothing answers, or not with one JSON object.
    """
    headers = {"Content-Type": "application/json"}
    if api_key:
        if not (api_key.isascii() and api_key.isprintable()):
            raise InputError(
                f"{url}: the API key holds characters that cannot be sent, such as a line's end",
                "give it as it was made",
            )
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        # what runs on this machine is not behind the proxy that the environment names
        local = urlsplit(url).hostname in _LOOPBACK
        proxies = [urllib.request.ProxyHandler({})] if local else []
        opener = urllib.request.build_opener(_SameServer, *proxies)
        request = urllib.request.Request(url, data=data, headers=headers)
        with opener.open(request, timeout=_SECONDS) as response:
            answer = response.read(ANSWER_LIMIT + 1)
            kind = response.headers.get_content_type()
    except urllib.error.HTTPError as error:
        raise InputError(f"{url}: {error.code} {error.reason}: {_refusal(error)}") from error
    except (OSError, ValueError, HTTPException) as error:
        told = str(error) or type(error).__name__
        raise InputError(f"{url}: {told}", "is the server running there?") from error
    if len(answer) > ANSWER_LIMIT:
        raise InputError(f"{url}: the answer has more than {ANSWER_LIMIT} bytes", "shorter prompts")
    try:
        what = f"{url}: the answer ({kind}, {len(answer)} bytes)"
        return parse_object(answer, what, values=None)  # a prompt's may well have millions
    except InputError as error:
        raise InputError(error.what, "is it OpenAI's API?") from error


def same_server(url: str, other: str) -> bool:
    """Whether two addresses are of one server: scheme, host and port.

    Raises:
        ValueError: If one is no address.
    """
    return _server(url) == _server(other)


def _server(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)


class _SameServer(urllib.request.HTTPRedirectHandler):
    """Follows where the same server asks to look instead; urllib takes the key along anywhere."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        fp.close()
        if req.data is not None or not same_server(req.full_url, newurl):
            raise InputError(
                f"{req.full_url}: it redirects to {newurl}, which is not followed",
                "give that server's address, if it is the one you mean",
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        return error.read(_SHOWN).decode(errors="replace")
    except (OSError, HTTPException):
        return ""
