# SPDX-License-Identifier: Apache-2.0
"""A subscriber's copy of one replica's state, from the batches and snapshots that reached it."""

from __future__ import annotations

import time
from collections import deque

from lmcache_ec.events.batch import MEDIUM_CPU, AllEntriesCleared, EntriesAdmitted, EventBatch, decode

_EARLY_BATCHES = 1024


class Mirror:
    """Belongs to the subscriber's thread; others may read `entries`, which is replaced as a whole or changed singly.

    In step after a snapshot, as long as each batch is the next one of its session. Batches that arrive out of step are
    kept and applied after the snapshot. At most `most` entries are kept: a missing entry is a miss.
    """

    def __init__(self, most: int) -> None:
        self.entries: dict[str, int] = {}
        """Identifier -> length in bytes. While out of step, the last known state."""
        self.namespace = ""
        self.rank = 0
        self.session = ""
        self.in_step = False
        self.confirmed = -float("inf")
        """When (monotonic seconds) it was last known to match what the replica holds."""
        self.heard = -float("inf")
        """When a batch last arrived."""
        self.gaps = self.left_out = self.unreadable = 0
        self._most = most
        self._number = 0
        self._early: deque[tuple[int, EventBatch]] = deque(maxlen=_EARLY_BATCHES)

    def take_batch(self, number: int, payload: bytes) -> None:
        """Take a batch as received. One that cannot be read counts as lost."""
        self.heard = time.monotonic()
        batch = self._decoded(payload)
        if batch is None:
            self._fall_out()
        else:
            self._follow(number, batch)

    def take_snapshot(self, number: int, payload: bytes) -> None:
        """Take a snapshot of all that is held; one that is older than the known state changes nothing."""
        batch = self._decoded(payload)
        if batch is None:
            return
        if self.in_step and batch.session == self.session and number <= self._number:
            if number == self._number:
                self.confirmed = time.monotonic()
            return
        self.entries, self.left_out = {}, 0
        self.session, self._number, self.in_step = batch.session, number, True
        self._apply(batch)
        early, self._early = self._early, deque(maxlen=_EARLY_BATCHES)
        for later, missed in early:
            if missed.session == self.session:
                self._follow(later, missed)

    def _follow(self, number: int, batch: EventBatch) -> None:
        same = batch.session == self.session
        if self.in_step and same and number <= self._number:
            return  # the snapshot has it
        if self.in_step and same and number == self._number + 1:
            self._number = number
            self._apply(batch)
            return
        self._fall_out()
        if not same and self.session:
            self.entries, self.session = {}, ""  # another publisher: perhaps another engine, which holds nothing
        self._early.append((number, batch))

    def _fall_out(self) -> None:
        self.gaps += self.in_step
        self.in_step = False

    def _apply(self, batch: EventBatch) -> None:
        self.namespace, self.rank = batch.namespace, batch.data_parallel_rank
        for event in batch.events:
            if event.medium != MEDIUM_CPU:
                continue
            if isinstance(event, AllEntriesCleared):
                self.entries, self.left_out = {}, 0
            elif isinstance(event, EntriesAdmitted):
                for identifier, length in zip(event.identifiers, event.bytes, strict=True):
                    self._admit(identifier, length)
            else:
                for identifier in event.identifiers:
                    self.entries.pop(identifier, None)
        self.confirmed = time.monotonic()

    def _admit(self, identifier: str, length: int) -> None:
        if len(self.entries) < self._most or identifier in self.entries:
            self.entries[identifier] = length
        else:
            self.left_out += 1

    def _decoded(self, payload: bytes) -> EventBatch | None:
        try:
            return decode(payload)
        except ValueError:
            self.unreadable += 1
            return None
