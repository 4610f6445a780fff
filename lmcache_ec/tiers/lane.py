# SPDX-License-Identifier: Apache-2.0
"""A tier as the store process drives it: threads of its own, and whether it is asked at all."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.presence import PresenceWriter
from lmcache_ec.tiers.base import Tier
from lmcache_ec.tiers.remote import Lookup

NEVER = float("inf")
_T = TypeVar("_T")
_SMOOTHING = 0.25
_REST_S = (1.0, 2.0, 5.0, 15.0, 30.0)
"""How long a tier that failed is left alone: longer each time in a row."""

_LOOK_UPS = 3
"""Of a survey: the quickest of them says how the tier answers, the others how busy this machine is."""

_REMEASURED_S = 5.0
"""A tier that was found slow is measured again so often."""

_QUEUED_ITEMS = 4096
_QUEUED_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Habits:
    """How a tier is treated.

    `slow_s`: with AUTO, one whose answers take longer on average is not asked about what it has not listed.
    `refresh_s` between two listings, and never more than a twentieth of the time spent on them.
    `local`: a look-up is so cheap that it is always asked, and a fault is one file's, not the tier's.
    """

    lookup: Lookup
    refresh_s: float
    slow_s: float = 0.025
    local: bool = False


def lane_names(tiers: Sequence[str]) -> list[str]:
    """Names of tiers as they are counted and listed: a second one of a kind gets its position in the order, `s3_2`."""
    return [name if tiers.index(name) == index else f"{name}_{index}" for index, name in enumerate(tiers)]


class Lane:
    """One tier, its threads, and what is known of how it answers; a stuck tier holds up nothing but itself.

    Its "complete" flag in the presence filter says to the scheduler side: do not wait for this tier about what the
    filter does not hold. So it is set when a listing is complete, while a tier is slow, and while it is left alone
    because it failed. Methods may be called from any thread of the store process; `_lock` guards the numbers and is
    never held across I/O.
    """

    def __init__(self, tier: Tier, name: str, presence: PresenceWriter, habits: Habits) -> None:
        self.tier = tier
        self.name = name
        self.habits = habits
        self.listed = 0
        self.due_at = 0.0
        """When `survey` is due (monotonic seconds)."""
        self._readers = 4 if habits.local else 8
        self.reads = ThreadPoolExecutor(self._readers, f"{name}-read")
        self.writes = ThreadPoolExecutor(1 if habits.local else 4, f"{name}-write")
        self.scans = ThreadPoolExecutor(1, f"{name}-scan")
        self._presence = presence
        self._lists = habits.local or habits.lookup is Lookup.CATALOG
        self._follows = False
        self._list_at = 0.0
        self._moved_to = ""  # the namespace to list, if that is not the first any more
        self._answer_s = 0.0
        self._failures = 0
        self._rests_until = 0.0
        self._failed_at = 0.0  # the first time since it last served
        self._queued_items = self._queued_bytes = 0
        self._lock = threading.Lock()

    # ---- whether to ask it

    @property
    def rests(self) -> bool:
        """Whether it is left alone for now, because it failed."""
        return time.monotonic() < self._rests_until

    def asks(self, digest: bytes, insist: bool = False) -> bool:
        """Whether the tier is worth asking for the entry of this key; `insist`: even if its listing lacks it."""
        if self.habits.local:
            return True
        listed = insist or not self._presence.complete(self.name) or self._presence.may_contain(digest, self.name)
        return listed and not self.rests

    def answered(self, seconds: float) -> None:
        """A look-up that moved no payload took so long."""
        with self._lock:
            self._failures = 0
            spike = 1 / _SMOOTHING * self.habits.slow_s  # one alone does not make a tier slow: this process may be busy
            self._answer_s += (min(seconds, spike) - self._answer_s) * _SMOOTHING
            slow = self.habits.lookup is Lookup.AUTO and not self._lists and self._answer_s > self.habits.slow_s
            if slow:
                self._lists = True
                self._list_at = self.due_at = 0.0
        if slow:
            self._presence.set_complete(self.name)

    def failed(self) -> None:
        """It did not do what was asked: leave it alone for a while, and have nobody wait for it."""
        if self.habits.local:
            return
        with self._lock:
            if not self.rests:
                self._rests_until = time.monotonic() + _REST_S[min(self._failures, len(_REST_S) - 1)]
                self._failures += 1
                self._failed_at = self._failed_at or time.monotonic()
                self.due_at = self._rests_until
        self._presence.set_complete(self.name)

    def survey(self, namespace: str) -> float:
        """Measure how it answers, and list what it holds where that decides whether it is asked. On its scan thread.

        Returns for how many seconds it had been left alone, 0 if it was not. Raises whatever the tier raises; it is
        then left alone, and surveyed again later.
        """
        self.due_at = NEVER
        began = time.monotonic()
        try:
            if not self.habits.local:
                self._measured(min(self._timed_look_up(namespace) for _ in range(_LOOK_UPS)))
            if self._lists and began >= self._list_at:
                self._list(namespace)
                self.tier.maintain()
                self._list_at = time.monotonic() + max(self.habits.refresh_s, 20 * (time.monotonic() - began))
        except Exception:
            self.due_at = time.monotonic() + self.habits.refresh_s
            self.failed()
            raise
        with self._lock:
            away = time.monotonic() - self._failed_at if self._failed_at else 0.0
            self._rests_until = self._failed_at = 0.0
            if self._has_moved(namespace):
                self._list_at = self.due_at = 0.0
                return away
            self._presence.set_complete(self.name, self._lists)
            if self._lists:
                remeasured = self.habits.lookup is Lookup.AUTO and not self.habits.local
                self.due_at = min(self._list_at, time.monotonic() + _REMEASURED_S) if remeasured else self._list_at
        return away

    def _list(self, namespace: str) -> None:
        """Know what the tier holds, and forget what it holds no longer."""
        self._take_news(namespace)  # so that what is written from here on is listed, or news
        self._follows = True
        listed = 0
        with self._presence.listing(self.name) as add:
            for listed, entry in enumerate(self.tier.list(namespace), 1):
                add(entry.digest)
                self.listed = max(self.listed, listed)
        self.listed = listed
        with self._lock:
            if not self._has_moved(namespace):
                self._presence.set_complete(self.name)

    def _has_moved(self, namespace: str) -> bool:
        """Whether another namespace is asked for by now, which has yet to be listed. Under the lock."""
        return self._moved_to not in ("", namespace)

    def follow(self, namespace: str) -> None:
        """Take in what neighbours have written lately, once a listing has begun. Never during another call of it."""
        if self._follows:
            self._take_news(namespace)

    def _take_news(self, namespace: str) -> None:
        for digest in self.tier.news(namespace):
            if self._presence.add(self.name, digest):
                self._count_listed()

    def has(self, digest: bytes, new: bool) -> None:
        """The tier has this entry; `new` if it was written just now."""
        if self.habits.lookup is Lookup.PROBE:
            return  # it is asked, whatever is known
        unheard = self._presence.add(self.name, digest)  # a neighbour may have been quicker to write it
        if (new or unheard) and self.habits.local:
            self._count_listed()

    def _count_listed(self) -> None:
        with self._lock:
            self.listed += 1  # the next listing sees what was evicted for it

    def relist(self, namespace: str) -> None:
        """This namespace is asked for from now on, another was listed: list anew, and ask until that is done."""
        with self._lock:
            self._moved_to = namespace
            self._list_at = self.due_at = 0.0
            if self._lists:
                self._presence.set_complete(self.name, False)

    def _timed_look_up(self, namespace: str) -> float:
        began = time.monotonic()
        self.tier.contains(EncoderCacheKey(namespace, f"nobody's {os.urandom(16).hex()}"))
        return time.monotonic() - began

    def _measured(self, seconds: float) -> None:
        """What a survey found: the one way in which a tier that was slow is seen to be quick again, and the other way
        round where nothing else asks it."""
        with self._lock:
            if self.habits.lookup is not Lookup.AUTO:
                return
            slow = self._lists
            if seconds > self.habits.slow_s:
                self._lists = True
            elif seconds < self.habits.slow_s / 2:
                self._lists, self._answer_s = False, 0.0
            if self._lists and not slow:
                self._list_at = 0.0

    def shares(self, asked: Sequence[_T]) -> list[Sequence[_T]]:
        """What to ask for, in parts for one thread each; several in a part where the tier asks for them at once."""
        if not self.tier.batches or len(asked) <= self._readers:
            return [[one] for one in asked]
        return [asked[start :: self._readers] for start in range(self._readers)]

    # ---- what waits to be written

    def enqueue(self, length: int, job: Callable[[], None]) -> bool:
        """Have a write of `length` bytes done by the tier's own threads. False if too many wait, or the tier rests."""
        with self._lock:
            full = self._queued_items >= _QUEUED_ITEMS or self._queued_bytes + length > _QUEUED_BYTES
            if (full and self._queued_items) or self.rests:
                return False
            self._queued_items += 1
            self._queued_bytes += length

        def run() -> None:
            try:
                job()
            finally:
                with self._lock:
                    self._queued_items -= 1
                    self._queued_bytes -= length

        try:
            self.writes.submit(run)
        except RuntimeError:  # closed meanwhile
            return False
        return True
