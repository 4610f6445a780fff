# SPDX-License-Identifier: Apache-2.0
"""A tier as its stack drives it: its own threads, and whether it is asked at all."""

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
from lmcache_ec.recent import Recent
from lmcache_ec.signing import SigningKey
from lmcache_ec.tally import STATES
from lmcache_ec.tiers.base import Tier, TierError, TierUnreachable, WritesRefused
from lmcache_ec.tiers.catalog import Catalog
from lmcache_ec.tiers.health import NEVER as NEVER
from lmcache_ec.tiers.health import ReadHealth, WriteHealth, shortened
from lmcache_ec.tiers.remote import Lookup

_T = TypeVar("_T")
_SMOOTHING = 0.25

_PROBES = 3
"""Look-ups with which a tier that failed once can show that it answers."""

_LOOK_UPS = 3
"""Per survey: the quickest one measures the tier, the others only how busy this machine is."""

_REMEASURED_S = 5.0
"""How often a tier that was found slow is measured again."""

_DOUBTED_S = 60.0
"""How long an entry that did not verify counts as absent where it would be recognized by its name alone."""

_QUEUED_ITEMS = 4096
_QUEUED_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Habits:
    """How a tier is treated.

    `slow_s`: with AUTO, a tier whose answers take longer on average is not asked about what it has not listed.
    `refresh_s`: the longest time between two listings, randomly shortened by up to a tenth; but at most a twentieth of
    the time is spent on listing.
    `local`: a look-up is so cheap that it is always asked, and a fault concerns one file, not the tier.
    """

    lookup: Lookup
    refresh_s: float
    slow_s: float = 0.025
    local: bool = False


def lane_names(tiers: Sequence[str]) -> list[str]:
    """Names of tiers in counters and lists: a second one of a kind gets its position in the order appended, `s3_2`."""
    return [name if tiers.index(name) == index else f"{name}_{index}" for index, name in enumerate(tiers)]


class Lane:
    """One tier, its threads, and what is known of how it responds; a stuck tier blocks nothing but itself.

    Its "complete" flag in the presence filter means to the scheduler side: do not wait for this tier for what the
    filter does not hold. So it is set when a listing is complete, while a tier is slow, and while it is not asked
    because it failed. Methods may be called from any thread; `_lock` guards the numbers and is never held across I/O.
    """

    def __init__(self, tier: Tier, name: str, presence: PresenceWriter, habits: Habits) -> None:
        self.tier = tier
        self.name = name
        self.habits = habits
        self.listed = 0
        self._notice = tier.notice
        self._due_at = 0.0
        self._reading, self._writing = ReadHealth(), WriteHealth()
        if not habits.local:
            self._writing.probe_at = 0.0  # whether it takes writes is tested once at the start
        self._readers = 4 if habits.local else 8
        self.reads = ThreadPoolExecutor(self._readers, f"{name}-read")
        self.writes = ThreadPoolExecutor(1 if habits.local else 4, f"{name}-write")
        self.scans = ThreadPoolExecutor(1, f"{name}-scan")
        self.probes = ThreadPoolExecutor(1, f"{name}-probe")  # not behind a listing
        self._presence = presence
        self.signing: SigningKey | None = None
        """The key that signs entries and a tier's catalog."""
        self._lists = habits.local or habits.lookup is Lookup.CATALOG
        self._follows = False
        self._list_at = 0.0
        self._moved_to = ""  # the namespace to list, if it is no longer the first one
        self._known = False  # if set, no caller waits for a healthy tier for what its listing lacks
        self._answer_s = 0.0
        self._doubted: Recent[bytes] = Recent(_DOUBTED_S)
        self._queued_items = self._queued_bytes = 0
        self._lock = threading.Lock()

    # ---- whether to ask it

    @property
    def rests(self) -> bool:
        """Whether it is not called for now, because it cannot be reached."""
        return self._reading.rests

    @property
    def read_only(self) -> bool:
        """Whether it takes no writes, as configured or because its store refuses them."""
        return self.tier.read_only or bool(self._writing.refusal)

    @property
    def takes_writes(self) -> bool:
        """Whether a write is worth trying now."""
        return not (self._reading.rests or self._writing.rests)

    @property
    def state(self) -> int:
        """An index into `tally.STATES`."""
        if self.rests:
            return STATES.index("unreachable")
        return STATES.index("read_only" if self.read_only else "serving" if self.takes_writes else "resting")

    @property
    def queued(self) -> tuple[int, int]:
        """Writes that are queued or in progress, and their bytes."""
        with self._lock:
            return self._queued_items, self._queued_bytes

    @property
    def new_notice(self) -> bool:
        """Whether the tier's notice has changed since the last call. The first one is reported when it is opened."""
        new = self.tier.notice not in ("", self._notice)
        self._notice = self.tier.notice
        return new

    def asks(self, digest: bytes, insist: bool = False) -> bool:
        """Whether to ask the tier for the entry of this key; `insist`: even if its listing lacks it."""
        if self.habits.local:
            return True
        if self._reading.paused:
            return False
        return insist or not self._presence.complete(self.name) or self._presence.may_contain(digest, self.name)

    def read(self, seconds: float | None = None) -> float:
        """It answered; a look-up without payload took `seconds`. How long it had been resting, else 0."""
        with self._lock:
            away_s = self._recovered()
            if seconds is None:
                return away_s
            spike = 1 / _SMOOTHING * self.habits.slow_s  # one alone does not make a tier slow: this process may be busy
            self._answer_s += (min(seconds, spike) - self._answer_s) * _SMOOTHING
            if self.habits.lookup is Lookup.AUTO and not self._lists and self._answer_s > self.habits.slow_s:
                self._lists = self._known = True
                self._list_at = self._due_at = 0.0
                self._publish()
        return away_s

    def read_failed(self, error: Exception) -> None:
        """It did not answer. If that concerns more than one entry, no caller asks it or waits for it for now."""
        if self.habits.local:
            return
        with self._lock:
            if self._reading.failed(error):
                self._publish()

    def leave_alone(self) -> None:
        """It could not be reached just now: treat it as after an unanswered probe."""
        if self.habits.local:
            return
        with self._lock:
            self._reading.failed(TierUnreachable())
            self._reading.probe_failed()
            self._publish()

    def wrote(self) -> bool:
        """It took a write. Whether its writes had been resting."""
        with self._lock:
            return self._writing.succeeded()

    def write_failed(self, error: Exception) -> None:
        """It did not take a write."""
        if self.habits.local:
            return
        with self._lock:
            self._writing.failed(error)

    @property
    def probe_at(self) -> float:
        """When `probe_reads` or `probe_writes` is due (monotonic seconds)."""
        return min(self._reading.probe_at, self._writing.probe_at)

    def due_probes(self) -> tuple[bool, bool]:
        """Whether it is time to probe reads, and writes. The caller has to run the probes that are due."""
        now = time.monotonic()
        with self._lock:
            if self.tier.read_only:
                self._writing.probe_at = NEVER  # it is never written to
            reads = self._reading.probe_at <= now
            writes = self._writing.probe_at <= now
            if reads:
                self._reading.probe_at = NEVER
            if writes:
                self._writing.probe_at = NEVER
        return reads, writes

    def probe_reads(self, namespace: str) -> float:
        """Test whether a tier that failed answers. How long it had been resting, 0 if there was only that one failure.
        Raises whatever the tier raises, and lets it rest for a while."""
        for left in reversed(range(_PROBES)):
            try:
                self._timed_look_up(namespace)
            except Exception:
                if left and self._reading.paused:
                    continue
                with self._lock:
                    if self._reading.paused:
                        self._reading.probe_failed()
                raise
            break
        with self._lock:
            return self._recovered()

    def probe_writes(self) -> str | None:
        """Test whether the tier takes writes: why not, "" if it does now, None if nothing has changed."""
        certain = False
        try:
            certain = self.tier.check_writes()
        except WritesRefused as error:
            with self._lock:
                known = self._writing.refusal
                self._writing.probe_failed(error)
                return None if known else self._writing.refusal or None
        except Exception as error:
            with self._lock:
                if self._writing.rests and isinstance(error, TierError):
                    self._writing.probe_failed(error)
                    return None
        with self._lock:
            rested = self._writing.rests
            self._writing.probe_passed(certain)
        return "" if rested else None

    def _recovered(self) -> float:
        if not self._reading.paused:
            return 0.0
        away_s = self._reading.succeeded()
        self._due_at = 0.0
        if away_s or self._writing.rests:
            self._writing.probe_at = 0.0
        self._publish()
        return away_s

    def _publish(self) -> None:
        self._presence.set_complete(self.name, self._reading.paused or self._known)

    # ---- what it holds

    @property
    def due_at(self) -> float:
        """When `survey` is due (monotonic seconds); not before a tier that failed has answered."""
        return NEVER if self._reading.paused else self._due_at

    @due_at.setter
    def due_at(self, moment: float) -> None:
        self._due_at = moment

    def survey(self, namespace: str) -> None:
        """Measure how fast it answers, and list it if its listing decides whether it is asked. On its scan thread.

        Raises whatever the tier raises; it is then surveyed again later.
        """
        self._due_at = NEVER
        began = time.monotonic()
        try:
            if not self.habits.local:
                self._measured(min(self._timed_look_up(namespace) for _ in range(_LOOK_UPS)))
            if self._lists and began >= self._list_at:
                again_s = self._list(namespace) or self.habits.refresh_s
                self.tier.maintain()
                again_s = max(shortened(min(again_s, self.habits.refresh_s)), 20 * (time.monotonic() - began))
                self._list_at = time.monotonic() + again_s
        except Exception as error:
            self._due_at = time.monotonic() + shortened(self.habits.refresh_s)
            self.read_failed(error)
            raise
        with self._lock:
            if self._has_moved(namespace):
                self._list_at = self._due_at = 0.0
                return
            self._known = self._lists
            self._publish()
            if self._lists:
                remeasured = self.habits.lookup is Lookup.AUTO and not self.habits.local
                measured_at = time.monotonic() + shortened(_REMEASURED_S)
                self._due_at = min(self._list_at, measured_at) if remeasured else self._list_at

    def _list(self, namespace: str) -> float | None:
        """Learn what the tier holds, and forget what it no longer holds. In how many seconds there is more to learn."""
        self._take_news(namespace)  # so that what is written from here on is listed, or is news
        self._follows = True
        catalog = self.tier.catalog(namespace, self.signing)
        if catalog is None:
            self._list_all(namespace)
        else:
            self._read(catalog)
        with self._lock:
            if not self._has_moved(namespace):
                self._known = True
                self._publish()
        return None if catalog is None else catalog.again_s

    def _list_all(self, namespace: str) -> None:
        listed = 0
        with self._presence.listing(self.name) as add:
            for listed, entry in enumerate(self.tier.list(namespace), 1):
                add(entry.digest)
                self.listed = max(self.listed, listed)
        self.listed = listed

    def _read(self, catalog: Catalog) -> None:
        if catalog.shards is not None:
            listed = 0
            with self._presence.laying(self.name, catalog.longest) as lay:
                for shard in catalog.shards:
                    lay(*shard)
                    listed += shard.entries
                for digest in catalog.digests:  # into both, like whatever is written meanwhile
                    listed += self._presence.add(self.name, digest)
            self.listed = listed
        else:
            self.listed += sum(self._presence.add(self.name, digest) for digest in catalog.digests)

    def _has_moved(self, namespace: str) -> bool:
        """Whether another namespace is in use by now, which has yet to be listed. Under the lock."""
        return self._moved_to not in ("", namespace)

    def follow(self, namespace: str) -> None:
        """Take in recent writes of neighbours, once a listing has begun. Never during another call of this method."""
        if self._follows:
            self._take_news(namespace)

    def _take_news(self, namespace: str) -> None:
        for digest in self.tier.news(namespace):
            if self._presence.add(self.name, digest):
                self._count_listed()

    def has(self, digest: bytes, new: bool) -> None:
        """The tier has this entry; `new`: it was written just now."""
        self.trust(digest)
        if self.habits.lookup is Lookup.PROBE:
            return  # it is always asked, whatever is known
        unheard = self._presence.add(self.name, digest)  # a neighbour may have written it first
        if (new or unheard) and self.habits.local:
            self._count_listed()

    def lost(self) -> None:
        """An entry that did not verify was deleted. For a remote, only its next listing counts."""
        if self.habits.local:
            with self._lock:
                self.listed = max(0, self.listed - 1)

    def doubt(self, digest: bytes) -> None:
        """What the tier has under this name did not verify, and stays until it is replaced."""
        with self._lock:
            self._doubted.add(digest, time.monotonic())

    def trust(self, digest: bytes) -> None:
        """The entry did verify, or was written here."""
        if len(self._doubted):
            with self._lock:
                self._doubted.discard(digest)

    def doubts(self, digest: bytes) -> bool:
        """Whether the entry there recently did not verify."""
        with self._lock:
            return self._doubted.holds(digest, time.monotonic())

    def _count_listed(self) -> None:
        with self._lock:
            self.listed += 1  # the next listing shows what was evicted for it

    def relist(self, namespace: str) -> None:
        """From now on this namespace is in use, and another was listed: list anew, and ask until that is done."""
        with self._lock:
            self._moved_to = namespace
            self._list_at = self._due_at = 0.0
            if self._lists:
                self._known = False
                self._publish()

    def _timed_look_up(self, namespace: str) -> float:
        began = time.monotonic()
        self.tier.contains(EncoderCacheKey(namespace, f"nobody's {os.urandom(16).hex()}"))
        return time.monotonic() - began

    def _measured(self, seconds: float) -> None:
        """A survey measured this: the only way to find a slow tier quick again, and, if nothing else asks it, a quick
        one slow."""
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
        """What to ask for, in parts for one thread each; a part has several if the tier requests them in one batch."""
        if not self.tier.batches or len(asked) <= self._readers:
            return [[one] for one in asked]
        return [asked[start :: self._readers] for start in range(self._readers)]

    # ---- queued writes

    def enqueue(self, length: int, job: Callable[[], None]) -> bool:
        """Queue a write of `length` bytes on the tier's threads. False if the queue is full, or it takes none now."""
        with self._lock:
            full = self._queued_items >= _QUEUED_ITEMS or self._queued_bytes + length > _QUEUED_BYTES
            tried = self._writing.on_trial and self._queued_items  # one at a time
            if (full and self._queued_items) or tried or not self.takes_writes:
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
