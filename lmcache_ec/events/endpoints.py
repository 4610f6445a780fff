# SPDX-License-Identifier: Apache-2.0
"""Where a replica publishes: addresses of events and of snapshots, and those of data-parallel engines."""

from __future__ import annotations

import errno
import os
import re
import socket
from contextlib import suppress
from ipaddress import ip_address
from typing import NamedTuple

import msgspec

SNAPSHOT_PORTS_ABOVE = 1000
"""How far, by default, the port of snapshots is above that of events."""

ACCEPTED = (
    "must be tcp://ADDRESS:PORT, where ADDRESS is * or a numeric address of this host, or ipc:///path, or null; "
    "for example tcp://*:5757"
)

_HIGHEST_PORT = 65535 - SNAPSHOT_PORTS_ABOVE

_IPC_PATH_BYTES = 90
"""The kernel takes 107; the suffixes for snapshots and data-parallel engines have to fit, too."""


class Publishing(msgspec.Struct, frozen=True):
    """Where one engine publishes: already its own addresses, if it is one of several data-parallel engines."""

    events: str
    snapshots: str
    topic: str
    rank: int


def check_endpoint(text: str) -> str:
    """Return `text` if an engine can listen there, else ValueError with what is accepted."""
    if text.startswith("ipc://"):
        path = text.removeprefix("ipc://")
        if not path.startswith("/") or len(path.encode()) > _IPC_PATH_BYTES:
            raise ValueError(f"must be ipc:// and an absolute path of at most {_IPC_PATH_BYTES} bytes")
        return text
    address, port = _host_and_port(text)
    if address != "*":
        try:
            ip_address(address.removeprefix("[").removesuffix("]") if address.startswith("[") else address)
        except ValueError:
            raise ValueError(ACCEPTED) from None
        if (":" in address) != address.startswith("["):
            raise ValueError(ACCEPTED)
    if not 0 < port <= _HIGHEST_PORT:
        raise ValueError(f"must have a port from 1 to {_HIGHEST_PORT}, to leave room for that of snapshots")
    return text


def snapshots_of(events: str) -> str:
    """The default address of snapshots."""
    if events.startswith("ipc://"):
        return f"{events}.snapshots"
    address, port = _host_and_port(events)
    return f"tcp://{address}:{port + SNAPSHOT_PORTS_ABOVE}"


def of_rank(endpoint: str, rank: int) -> str:
    """Where a data-parallel engine listens in place of `endpoint`: as for vLLM's KV events, `rank` ports above."""
    if not rank:
        return endpoint
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{rank}"
    address, port = _host_and_port(endpoint)
    return f"tcp://{address}:{port + rank}"


class Replica(NamedTuple):
    """The addresses of one replica, as a subscriber reaches it. Its name is that of its events."""

    events: str
    snapshots: str

    @classmethod
    def parse(cls, text: str) -> Replica:
        """`tcp://host:5757`, optionally with a comma and the address of snapshots, if it is not the default.

        ValueError with what is accepted for anything else.
        """
        parts = [part.strip() for part in text.split(",")]
        if len(parts) > 2:
            raise ValueError(f"{text!r}: must be one address, or two separated by a comma: of events, of snapshots")
        for part in parts:
            if not part.startswith("ipc:///"):
                try:
                    address, port = _host_and_port(part)
                except ValueError:
                    address, port = "", 0
                if not address or address == "*" or not 0 < port <= (_HIGHEST_PORT if len(parts) == 1 else 65535):
                    raise ValueError(
                        f"{part!r}: must be tcp://HOST:PORT or ipc:///path, for example tcp://10.0.0.7:5757"
                    )
        return cls(parts[0], parts[-1] if len(parts) == 2 else snapshots_of(parts[0]))


def is_answered(endpoint: str) -> bool:
    """Whether a process listens at the path of an `ipc://` endpoint; False for any other endpoint."""
    if not endpoint.startswith("ipc://"):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(0.1)
        try:
            asking.connect(endpoint.removeprefix("ipc://"))
        except TimeoutError:
            return True  # it is too busy to accept
        except OSError:
            return False
    return True


def remove_path(endpoint: str) -> None:
    """Remove the socket of an `ipc://` endpoint, which ZeroMQ leaves there; does nothing for any other endpoint."""
    if endpoint.startswith("ipc://"):
        with suppress(OSError):
            os.unlink(endpoint.removeprefix("ipc://"))


def why_unusable(endpoint: str) -> str:
    """Why it is impossible to listen there now, as the system's error text; else empty. It is free again afterwards."""
    if endpoint.startswith("ipc://"):
        folder = os.path.dirname(endpoint.removeprefix("ipc://"))
        if is_answered(endpoint):
            return os.strerror(errno.EADDRINUSE)
        return "" if os.access(folder, os.W_OK) else f"{folder} does not exist or is not writable"
    address, port = _host_and_port(endpoint)
    family = socket.AF_INET6 if address.startswith("[") else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trying:
        trying.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trying.bind(("" if address == "*" else address.strip("[]"), port))
            trying.listen(1)
        except OSError as error:
            return error.strerror or str(error)
    return ""


def _host_and_port(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"tcp://(\*|\[[^\[\]\s/@]+\]|[^\[\]\s/@:*]+):([0-9]{1,5})", text)
    if match is None:
        raise ValueError(ACCEPTED)
    return match[1], int(match[2])
