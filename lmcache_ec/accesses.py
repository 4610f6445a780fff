# SPDX-License-Identifier: Apache-2.0
"""What requests need, reported to the store process while a client records it (`lmcache-ec status --record`)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from lmcache_ec.channel import Access, Accessed
from lmcache_ec.eviction import Below, restore_s

_WAITING = 8192
"""Maximum number waiting for room on the link."""

_MESSAGE_BYTES = 64 << 10
_MESSAGES_A_PASS = 4
_ACCESS_BYTES = 40
"""Maximum size of an access in a message, without its name."""


class _Waiting(NamedTuple):
    access: Access
    guessed: bool


class Accesses:
    """One per recording. The caller has the scheduler side's turn: no digest, no file, no blocking send."""

    def __init__(self, send: Callable[[Accessed], bool]) -> None:
        """`send` returns False if there is no room."""
        self._send = send
        self._waiting: deque[_Waiting] = deque()
        self._lost = 0

    def add(self, now: float, name: str, length: int, encode_s: float, rows: int) -> None:
        """A request needs the entry `name` of `length` bytes (0: unknown yet; it counts as lost), whose encode takes
        `encode_s`; infinite: it was not measured, and is guessed from `rows`."""
        if len(self._waiting) >= _WAITING or not length:
            self._lost += 1
            return
        guessed = math.isinf(encode_s)
        seconds = restore_s(Below.NOTHING, length, rows) if guessed else encode_s
        self._waiting.append(_Waiting((now, name, length, seconds), guessed))

    def hand_over(self) -> None:
        """Send waiting accesses, as far as a pass has time and the link has room. Call at the end of each pass."""
        for _ in range(_MESSAGES_A_PASS):
            if not (self._waiting or self._lost):
                return
            batch, size = list[_Waiting](), 0
            for each in self._waiting:
                size += _ACCESS_BYTES + 4 * len(each.access[1])
                if batch and size > _MESSAGE_BYTES:
                    break
                batch.append(each)
            message = Accessed([each.access for each in batch], sum(each.guessed for each in batch), self._lost)
            if not self._send(message):
                return
            self._lost = 0
            for _ in batch:
                self._waiting.popleft()
