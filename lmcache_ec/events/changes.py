# SPDX-License-Identifier: Apache-2.0
"""Changes in LocalCPU that have yet to be sent to the store process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from lmcache_ec.channel import CpuChanges

_ENTRIES_A_MESSAGE = 1024
_MESSAGE_BYTES = 64 << 10
"""Of identifiers. The one that exceeds it is included: the longest that is ever stored has 4 KiB."""
_MESSAGES_A_PASS = 4
_NOTED = 65536
"""More changes than this plus twice the live entries are not recorded: everything is sent anew."""


class Changes:
    """The latest change of each identifier. Runs on the scheduler side's one thread: no lock, no I/O.

    So changes are sent in any order, and an entry admitted and evicted in between is a superfluous eviction.
    """

    def __init__(self, live: Callable[[], Iterable[tuple[str, int]]]) -> None:
        """`live` returns all entries that can currently be promised: identifier, length in bytes."""
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
        """The store process's state is void, or it is a new process. Takes a microsecond for each live entry."""
        self._anew = True
        self._noted = dict(self._live())
        self._most = _NOTED + 2 * len(self._noted)

    def hand(self, namespace: str, send: Callable[[CpuChanges], bool]) -> None:
        """Send what was recorded: as much as a pass has time for, and the link takes."""
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
