"""Talking to the Hub: one client, and its errors as one line each, without the token in them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from gemma_convert.convert.errors import GemmaConvertError, InputError, RemoteError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_Value = TypeVar("_Value")

_PAUSES = (1.0, 3.0, 9.0)
"""Seconds between attempts."""

_LOGIN = "run `hf auth login`, or set HF_TOKEN, with a token that may write"
_AGAIN = "run the same command again: what has arrived is not sent again"

_BY_STATUS = {
    401: ("the Hub does not accept the token", _LOGIN),
    402: ("the Hub asks for payment", "see the billing page of the account"),
    403: ("the token has no right to do this", "use a token with write access there"),
    404: (
        "there is no such repository or revision, or the token may not see it",
        "check the name; for a gated or private one log in with `hf auth login`",
    ),
    409: ("the name is taken, or another upload is under way", "choose another name, or wait"),
    412: ("it was changed by someone else meanwhile; nothing was committed", _AGAIN),
    413: ("the Hub says that this is too large", "use a smaller --max-shard-size"),
    429: ("the Hub's rate limit is reached", "wait some minutes, then " + _AGAIN),
}


class PassingError(RemoteError):
    """A failure that may pass by itself: the network, a rate limit, a fault of the server."""


class OfflineError(RemoteError):
    """The network must not be used."""


def hub_api() -> HfApi:
    """A client for the Hub, or for the server that ``HF_ENDPOINT`` names."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import logging

    from gemma_convert import __version__

    if "HF_HUB_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()  # what fails for good is said here, in one line
    return HfApi(
        endpoint=os.environ.get("HF_ENDPOINT"),
        library_name="gemma-convert",
        library_version=__version__,
    )


def require_token() -> None:
    """Refuse to go on without a token in the environment or in the Hub's own cache.

    Raises:
        RemoteError: There is none.
    """
    if _token() is None:
        raise RemoteError("there is no token for the Hub", _LOGIN)


@contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Turn whatever the Hub's client raises into a `RemoteError`.

    Args:
        what: What the message begins with, such as ``org/name``.
    """
    try:
        yield
    except Exception as error:
        # The client wraps what happens in its upload threads in a RuntimeError.
        inner = error.__cause__ if type(error) is RuntimeError and error.__cause__ else error
        told = _translated(what, inner) if isinstance(inner, Exception) else None
        if told is None:
            raise
        raise told from _chain(error)


def _translated(what: str, error: Exception) -> GemmaConvertError | None:
    """The error to raise instead; None for what is neither the Hub's nor the network's."""
    import httpx
    from huggingface_hub import errors

    if isinstance(error, errors.RevisionResolutionError) and isinstance(error.__cause__, Exception):
        return _translated(what, error.__cause__)
    if isinstance(error, errors.LocalEntryNotFoundError):
        cause = error.__cause__
        if isinstance(cause, errors.OfflineModeIsEnabled):
            told = f"{what}: it is not in the cache, and HF_HUB_OFFLINE forbids the network"
            return OfflineError(told, "unset it")
        why = _translated(what, cause) if isinstance(cause, Exception) else None
        return why or _failed(f"{what}: it cannot be fetched and is not in the cache", error)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return OfflineError(f"{what}: HF_HUB_OFFLINE forbids the network", "unset it")
    if isinstance(error, errors.HFValidationError):
        return InputError(f"{what}: {gist(error)}", "give it as ORG/NAME")
    if isinstance(error, errors.GatedRepoError):
        return RemoteError(
            f"{what}: the model is gated (HTTP {error.response.status_code}), and whoever asks has "
            "not accepted its terms",
            "accept them on its page, then log in with `hf auth login`, or set HF_TOKEN",
        )
    if isinstance(error, errors.HfHubHTTPError):
        return _refused(what, error)
    if isinstance(error, httpx.HTTPError | ConnectionError | TimeoutError):
        return _failed(f"{what}: the Hub cannot be reached", error)
    if isinstance(error, RuntimeError) and "client has been closed" in str(error):
        # By another thread, as the Hub's client does where it cannot connect.
        return _failed(f"{what}: the Hub cannot be reached", error)
    if isinstance(error, ValueError):  # what the client says of an answer it does not understand
        return _failed(f"{what}: the Hub refused", error)
    return None


def _refused(what: str, error: Any) -> RemoteError:
    status = error.response.status_code
    if status in _BY_STATUS:
        why, remedy = _BY_STATUS[status]
    elif status >= 500:
        why, remedy = "the Hub has a fault of its own", "wait a little, then " + _AGAIN
    else:
        why, remedy = gist(error), "check the name and the token"
    said = f": {redacted(error.server_message)}" if error.server_message else ""
    kind = PassingError if status == 429 or status >= 500 else RemoteError
    return kind(f"{what}: {why} (HTTP {status}{said})", remedy)


def _failed(why: str, error: Exception) -> RemoteError:
    return PassingError(f"{why} ({gist(error)})", "check the network, then " + _AGAIN)


@contextmanager
def bars_on_terminals(*, quiet: bool = False) -> Iterator[None]:
    """Let the Hub's client draw its progress bars on a terminal, and nowhere else."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    drawn = sys.stderr.isatty() and not quiet
    if drawn or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def patiently(call: Callable[[], _Value]) -> _Value:
    """``call()``, a few times more where a `PassingError` says that it may pass."""
    for pause in _PAUSES:
        try:
            return call()
        except PassingError:
            time.sleep(pause)
    return call()


def gist(error: Exception) -> str:
    """The first line of what an error says."""
    text = str(error).strip() or type(error).__name__
    return redacted(text.splitlines()[0])


def redacted(text: str) -> str:
    """``text`` in one line, the token taken out should it be in there."""
    token = _token()
    if token:
        text = text.replace(token, "<token>")
    return " ".join(text.split())


def _chain(error: Exception) -> Exception | None:
    """The cause that ``--debug`` may show: none where it would show the token."""
    token = _token()
    seen: BaseException | None = error
    while token and seen is not None:
        if token in repr(seen) or token in str(seen):
            return None
        seen = seen.__cause__ or seen.__context__
    return error


def _token() -> str | None:
    from huggingface_hub import get_token

    return get_token()
