# SPDX-License-Identifier: Apache-2.0
"""The store process's counts, in memory that the scheduler side reads: no messages, and no counts lost with a kill.

A memfd holds an aligned 8-byte word for each count. The store process creates and writes it, the scheduler side maps it
read-only. With messages, a SIGKILL would lose what was counted since the last one; the memory outlives the process.
Ownership, and when it may be freed:

1. Each store process has its own tally, from its first message on. Only its threads write it, under the lock of its
   `Journal`, one word at a time: a reader sees each count as it was before or after, never in between.
2. The scheduler side keeps the tally of a lost process mapped until that *process* has ended: until then it may count.
   Then its last values are added to those of all that ended before (`Tallies`), and it is unmapped.
3. So a total is what ended processes have counted plus what is mapped: each event is in exactly one of these, and no
   total ever falls.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from lmcache_ec.histogram import LATENCY_NS, names_of

TIER_COUNTS = (
    *("hits", "misses", "read_bytes", "read_errors", "corrupt", "forged", "other_version"),
    *("writes", "present", "replaced", "written_bytes", "write_errors", "writes_dropped", "evictions", "evicted_bytes"),
)
TIER_HISTOGRAMS = ("read_ns", "write_ns")
TIER_GAUGES = ("state", "listed", "held_bytes", "limit_bytes", "queued_writes", "queued_bytes")
"""`held_bytes` and `limit_bytes` are -1 if unknown."""
STORE_COUNTS = ("sealed", "fills_late", "promotions_dropped")
STORE_GAUGES = ("jobs",)
STATES = ("serving", "read_only", "resting", "unreachable")
"""States of a tier; the gauge `state` is an index into these."""


class Tally:
    """One store process's counts, under the names used by its `Journal`; other names are ignored."""

    def __init__(self, fd: int, tiers: Sequence[str], write: bool = False) -> None:
        """`fd` stays the caller's. ValueError if it is not a tally over these tiers."""
        self.tiers = list(tiers)
        self.counts = [*STORE_COUNTS, *(f"{tier}_{name}" for tier in tiers for name in TIER_COUNTS)]
        for tier in tiers:
            for name in TIER_HISTOGRAMS:
                self.counts += names_of(f"{tier}_{name}", LATENCY_NS)
        self.gauges = [*STORE_GAUGES, *(f"{tier}_{name}" for tier in tiers for name in TIER_GAUGES)]
        self._slots = {name: slot for slot, name in enumerate((*self.counts, *self.gauges))}
        size = 8 * len(self._slots)
        if write:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        elif os.fstat(fd).st_size != size:
            raise ValueError(f"no tally over {self.tiers} at this descriptor")
        self._map = mmap.mmap(fd, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if write else 0))
        self._words = memoryview(self._map).cast("q")

    @staticmethod
    def memory() -> int:
        """A descriptor for a new tally."""
        return os.memfd_create("lmcache-ec-tally", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    def add(self, name: str, number: int) -> None:
        slot = self._slots.get(name)
        if slot is not None:
            self._words[slot] += number

    def observe(self, name: str, value: int) -> None:
        """Add a value to a histogram with the bounds `LATENCY_NS`."""
        bucket = bisect_left(LATENCY_NS, value)
        self.add(f"{name}_n{bucket}", 1)
        self.add(f"{name}_s{bucket}", value)

    def set(self, name: str, value: int) -> None:
        self._words[self._slots[name]] = value

    def values(self) -> dict[str, int]:
        """All counts, and the gauges as last set."""
        return dict(zip(self._slots, self._words.tolist(), strict=True))

    def close(self) -> None:
        self._words.release()
        self._map.close()


class Tallies:
    """The tallies of an engine's store processes, by number. Runs on the scheduler side's one thread; no I/O."""

    def __init__(self) -> None:
        self.tiers: list[str] = []
        """All tiers ever counted."""
        self._ended: Counter[str] = Counter()
        self._mapped: dict[int, Tally] = {}

    def adopt(self, number: int, fd: int, tiers: Sequence[str]) -> None:
        """Adopt the tally of the process of this number; `fd` is ours from here on."""
        try:
            self._mapped[number] = Tally(fd, tiers)
        finally:
            os.close(fd)
        self.tiers += [tier for tier in tiers if tier not in self.tiers]

    def ended(self, number: int) -> None:
        """That process has ended and counts nothing more."""
        tally = self._mapped.pop(number, None)
        if tally is not None:
            values = tally.values()
            self._ended.update({name: values[name] for name in tally.counts})
            tally.close()

    def totals(self) -> dict[str, int]:
        """The sums over all tallies; gauges are those of the newest one."""
        totals: dict[str, int] = dict(self._ended)
        for _, tally in sorted(self._mapped.items()):
            values = tally.values()
            for name in tally.counts:
                values[name] += totals.get(name, 0)
            totals.update(values)
        return totals

    def close(self) -> None:
        for tally in self._mapped.values():
            tally.close()
        self._mapped.clear()
