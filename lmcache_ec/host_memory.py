# SPDX-License-Identifier: Apache-2.0
"""How much memory the arena may take: what the control groups leave, and what the process's limits (`ulimit`) allow.

Pages are allocated as entries are written, so an arena larger than what its control group leaves would get the engine
killed, long after the start. So it takes less: what the tightest group above leaves at the start, minus a reserve for
other growth. Before it grows, this is checked again.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lmcache_ec.host import Memory, group_rooms
from lmcache_ec.place import ALIGNMENT
from lmcache_ec.sizes import rounded_size

_LEAST_RESERVE = 64 << 20
_LEAST_ARENA = 1 << 20
"""Size of the arena if nothing is left: hardly room for an entry, but every engine starts."""
_UNLIMITED = 1 << 50
"""Bytes; without a limit, version 1 reports a number beyond this."""
_FRESH_S, _USABLE_S = 2.0, 60.0
"""An answer is requested anew after `_FRESH_S`, and remains usable until `_USABLE_S`."""


@dataclass(frozen=True, slots=True)
class Fit:
    """How many bytes the arena takes; `message` explains why that is less than configured, empty if it is not."""

    bytes: int
    message: str = ""


def fitting(wanted_bytes: int, root: Path = Path("/")) -> Fit:
    """How much of `wanted_bytes` may be taken. `root` is the root of the kernel's files (/proc, /sys)."""
    tightest = min(_left(root), key=lambda room: room.available_bytes, default=None)
    if tightest is None or tightest.available_bytes >= wanted_bytes:
        return Fit(wanted_bytes)
    taken = max(_LEAST_ARENA, tightest.available_bytes // ALIGNMENT * ALIGNMENT)
    if taken >= wanted_bytes:
        return Fit(wanted_bytes)
    wanted, gets = rounded_size(wanted_bytes), rounded_size(taken)
    return Fit(taken, f"LocalCPU gets {gets} instead of {wanted}: {tightest.limited_by} leaves no room for more")


def _left(root: Path) -> Iterator[Memory]:
    """What each limit leaves for the arena."""
    for room in group_rooms(root):
        yield Memory(room.available_bytes - max(_LEAST_RESERVE, room.available_bytes // 8), room.limited_by)
    largest_file, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if largest_file != resource.RLIM_INFINITY:
        yield Memory(largest_file, "RLIMIT_FSIZE (ulimit -f)")
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        yield Memory((addresses - pages * resource.getpagesize()) // 2, "RLIMIT_AS (ulimit -v)")


class Growing:
    """Whether the arena may grow. Called on the scheduler's thread, which never waits: the kernel's files are read on a
    separate thread, and a later pass gets the answer.

    Always true if no control group has a limit at the start.
    """

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self._clock = root, clock
        self.limited = any(room.available_bytes < _UNLIMITED for room in group_rooms(root))
        """Whether a control group has a limit, so that the answer changes."""
        self._answer: tuple[float, Memory | None] = (float("-inf"), None)  # one value, so that no lock is needed
        self._reader: threading.Thread | None = None
        self.refusal = ""
        """Why the arena may not grow, by the last answer; empty if it may, or there is no answer yet."""

    def allows(self, more_bytes: int) -> bool:
        """Whether `more_bytes` may be written beyond what is resident; False while this is not known."""
        if not self.limited:
            return True
        answered_at, room = self._answer
        age = self._clock() - answered_at
        if age > _FRESH_S:
            self._ask()
        if age > _USABLE_S:
            return False
        fits = room is None or room.available_bytes - _LEAST_RESERVE >= more_bytes
        self.refusal = "" if fits or room is None else f"{room.limited_by} leaves {rounded_size(room.available_bytes)}"
        return fits

    def _ask(self) -> None:
        if self._reader is None or not self._reader.is_alive():
            self._reader = threading.Thread(target=self._read, name="memory-left", daemon=True)
            self._reader.start()

    def _read(self) -> None:
        room = min(group_rooms(self._root), key=lambda one: one.available_bytes, default=None)
        self._answer = (self._clock(), room)
