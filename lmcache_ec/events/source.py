# SPDX-License-Identifier: Apache-2.0
"""The publisher's copy of what LocalCPU holds, and the numbered batches that describe its changes."""

from __future__ import annotations

import secrets
import time
from typing import NamedTuple

from lmcache_ec.channel import CpuChanges
from lmcache_ec.events.batch import AllEntriesCleared, EntriesAdmitted, EntriesEvicted, Event, EventBatch, encode


class Numbered(NamedTuple):
    """A batch as it is sent."""

    number: int
    payload: bytes


class Source:
    """One session. Belongs to the publisher's thread; no socket, no wait.

    A change gets a number even if it can be sent to no subscriber: one that missed it sees the gap.
    """

    def __init__(self, rank: int, namespace: str) -> None:
        self.session = secrets.token_hex(8)
        self.number = 0
        self._rank = rank
        self._namespace = namespace
        self._entries: dict[str, int] = {}  # identifier -> length in bytes

    def __len__(self) -> int:
        return len(self._entries)

    def take(self, changes: CpuChanges) -> Numbered:
        """Apply the changes, and make the batch that describes them."""
        events: list[Event] = []
        if changes.anew:
            self._entries.clear()
            events.append(AllEntriesCleared())
        if changes.evicted:
            for identifier in changes.evicted:
                self._entries.pop(identifier, None)
            events.append(EntriesEvicted(changes.evicted))
        if changes.admitted:
            self._entries.update(changes.admitted)
            events.append(EntriesAdmitted([one for one, _ in changes.admitted], [size for _, size in changes.admitted]))
        self._namespace = changes.namespace
        return self._next(events)

    def clear(self) -> Numbered:
        """The engine has ended, and its memory with it."""
        self._entries.clear()
        return self._next([AllEntriesCleared()])

    def beat(self) -> Numbered:
        """A batch without events."""
        return self._next([])

    def snapshot(self) -> Numbered:
        """All that is held, as of the last batch: well under a microsecond per entry."""
        admitted = EntriesAdmitted(list(self._entries), list(self._entries.values()))
        return Numbered(self.number, self._encoded([AllEntriesCleared(), admitted]))

    def _next(self, events: list[Event]) -> Numbered:
        self.number += 1
        return Numbered(self.number, self._encoded(events))

    def _encoded(self, events: list[Event]) -> bytes:
        return encode(EventBatch(time.time(), events, self._rank, self.session, self._namespace))
