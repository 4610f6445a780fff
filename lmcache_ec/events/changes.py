# SPDX-License-Identifier: Apache-2.0
"""What has changed in LocalCPU and has yet to go to the store process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from lmcache_ec.channel import CpuChanges

_ENTRIES_A_MESSAGE = 1024
_MESSAGE_BYTES = 64 << 10
"""Of identifiers. The one that goes beyond goes with it: the longest that is ever stored has 4 KiB."""
_MESSAGES_A_PASS = 4
_NOTED = 65536
"""More than this, and more than is live twice over, is not recorded: everything is sent anew."""


class Changes:
    """The latest change of each identifier. Runs on the scheduler side's one thread: no lock, no I/O.

    So changes go in any order, and an entry that came and left in between is an eviction that nobody needed.
    """

    def __init__(self, live: Callable[[], Iterable[tuple[str, int]]]) -> None:
        """`live` are all entries that can be promised now: identifier, length in bytes."""
        self._live = live
        self._noted: dict[str, int] = {}  # identifier -> length in bytes; 0: evicted
        self._anew = False
        self._most = _NOTED

    def admit(self, identifier: str, length: int) -> None:
        self._note(identifier, length)

    def evict(self, identifier: str) -> None:
        self._note(identifier, 0)

    def _note(self, identifier: str, length: int) -> None:
        self._noted[identifier] = length
        if len(self._noted) > self._most:
            self.begin_anew()

    def begin_anew(self) -> None:
        """What the store process knows is void, or it is another one. A microsecond for each live entry."""
        self._anew = True
        self._noted = dict(self._live())
        self._most = _NOTED + 2 * len(self._noted)

    def hand(self, namespace: str, send: Callable[[CpuChanges], bool]) -> None:
        """Send what was recorded: as much as a pass has time for, and as the link takes."""
        for _ in range(_MESSAGES_A_PASS):
            if not self._noted and not self._anew:
                return
            some = self._some()
            admitted = [(identifier, length) for identifier, length in some.items() if length]
            evicted = [identifier for identifier, length in some.items() if not length]
            if not send(CpuChanges(namespace, self._anew, admitted, evicted)):
                return
            self._anew = False
            for identifier in some:
                del self._noted[identifier]

    def _some(self) -> dict[str, int]:
        some, size = {}, 0
        for identifier, length in islice(self._noted.items(), _ENTRIES_A_MESSAGE):
            some[identifier] = length
            size += len(identifier) if identifier.isascii() else len(identifier.encode())
            if size >= _MESSAGE_BYTES:
                break
        return some
