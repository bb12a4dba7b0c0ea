"""A connection to Ray: to the cluster that the environment names, or to one on this machine."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from gemma_convert.convert.errors import ClusterError, InputError

ADDRESS = "RAY_ADDRESS"
"""Environment variable that names a cluster: ``HOST:PORT``, or ``auto`` on one of its machines."""

_STORE_BYTES = 100 << 20  # no tensor passes through Ray's object store; it wants 75 MiB at least

_KNOCK_SECONDS = 10.0


@contextmanager
def connected() -> Iterator[Any]:
    """The module ``ray``, connected; what was connected or started here is ended here.

    Raises:
        InputError: If Ray is not installed.
        ClusterError: If the cluster that ``RAY_ADDRESS`` names cannot be used.
    """
    with _signals_kept():
        ray = _ray()
        ours = not ray.is_initialized()
        if ours:
            _connect(ray, os.environ.get(ADDRESS))
    try:
        with redirect_stdout(sys.stderr):  # where a machine dies, Ray tells that on stdout
            yield ray
    finally:
        if ours:
            ray.shutdown()


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise InputError(
            "--engine ray needs the package ray", "pip install 'gemma-convert[ray]'"
        ) from error
    return ray


def _connect(ray: Any, address: str | None) -> None:
    if address is not None and "://" in address:
        raise ClusterError(
            f"{ADDRESS}={address}: Ray Client is not supported",
            f"run on a machine of the cluster, with {ADDRESS}=auto",
        )
    options: dict[str, Any] = {"address": address}
    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options = {"address": "local", "include_dashboard": False}
        options["object_store_memory"] = _STORE_BYTES
    try:
        _knock(address or "")
        ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        where = f"{ADDRESS}={address}" if address is not None else "Ray on this machine"
        raise ClusterError(
            f"{where}: no cluster that can be used: {error}",
            f"see `ray status`, or unset {ADDRESS} to use this machine alone"
            if address is not None
            else "see Ray's logs below /tmp/ray",
        ) from error


def _knock(address: str) -> None:
    """See that somebody listens at ``HOST:PORT``: Ray goes on trying for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_KNOCK_SECONDS).close()


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray ends the process at SIGTERM; whoever handled it before goes on doing so."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is not before:
            signal.signal(signal.SIGTERM, before)
