# SPDX-License-Identifier: Apache-2.0
"""Serves the status of a store process and its engine, as JSON, to this user's processes."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable

from lmcache_ec.link import same_user, status_address
from lmcache_ec.tally import STATES
from lmcache_ec.tiers.journal import Journal, Times
from lmcache_ec.tiers.lane import Lane
from lmcache_ec.tiers.stack import Stack

Status = dict[str, object]


class StatusServer:
    """Listens at this process's address. Runs on the store process's main thread, and never waits."""

    def __init__(self, status: Callable[[], Status | None]) -> None:
        """`status` is called for each connection; it returns None if it is too early to answer."""
        self._status = status
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(status_address(os.getpid()))
        self._socket.listen(8)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def answer(self) -> None:
        """Answer one client. It may have given up, or not read: that must not end this process."""
        try:
            connection, _ = self._socket.accept()
            with connection:
                status = self._status() if same_user(connection) else None
                if status is not None:
                    connection.setblocking(False)
                    connection.sendall(json.dumps(status).encode())
        except OSError:
            pass


def tier_statuses(stack: Stack, journal: Journal, disk_bytes: int) -> list[Status]:
    """The status of each tier, in order: what it holds and has done."""
    return [_tier_status(lane, journal, stack.writes.held.get(lane.name), disk_bytes) for lane in stack.lanes]


def _tier_status(lane: Lane, journal: Journal, held: int | None, disk_bytes: int) -> Status:
    def count(what: str) -> int:
        return journal.counts.get(f"{lane.name}_{what}", 0)

    def mean_ms(what: str) -> float | None:
        calls, seconds = journal.times.get(f"{lane.name}_{what}_ns", Times())
        return 1000 * seconds / calls if calls else None

    backlog, backlog_bytes = lane.queued
    error = journal.last_error(lane.name)
    return {
        "name": lane.name,
        "entries": lane.listed if lane.habits.local or lane.listed else None,
        "bytes": held,
        "limit_bytes": disk_bytes if lane.habits.local else None,
        "state": STATES[lane.state],
        "rests": lane.rests,
        "read_only": lane.read_only,
        "notice": lane.tier.notice,
        "hits": count("hits"),
        "misses": count("misses"),
        "writes": count("writes"),
        "errors": count("read_errors") + count("write_errors") + count("corrupt"),
        "read_bytes": count("read_bytes"),
        "read_ms": mean_ms("read"),
        "written_bytes": count("written_bytes"),
        "write_ms": mean_ms("write"),
        "backlog": backlog,
        "backlog_bytes": backlog_bytes,
        "last_error": None if error is None else error._asdict(),
        "forged": count("forged"),
    }
