# SPDX-License-Identifier: Apache-2.0
"""Ask every store process of this user on this host for its engine's counts."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from lmcache_ec.channel import STATUS_PREFIX, same_user

_TIMEOUT_S = 2.0


def engines() -> list[dict[str, Any]]:
    """One object an engine: `pid` of its store process, `engine`, `namespace`, `store` and `book` counts, and more.

    `book` is what the scheduler side handed over at the end of its last pass in which anything changed.
    """
    lines = Path("/proc/net/unix").read_text().splitlines()
    names = {line.split("@", 1)[1] for line in lines if f"@{STATUS_PREFIX}" in line}
    return [answer for name in sorted(names) if (answer := _ask(name)) is not None]


def _ask(name: str) -> dict[str, Any] | None:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect("\0" + name)
            if not same_user(connection):
                return None
            answer: dict[str, Any] = json.loads(b"".join(iter(lambda: connection.recv(65536), b"")))
            return answer
    except (OSError, ValueError):
        return None  # ended meanwhile, or not answering
