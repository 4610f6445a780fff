# SPDX-License-Identifier: Apache-2.0
"""Requests of the scheduler side to the tiers: fetch an entry into the arena, or find out which tiers have one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lmcache_ec.book import Book
from lmcache_ec.channel import Fill, Locate, NotFilled
from lmcache_ec.key import identifier_digest
from lmcache_ec.load_policy import LoadPolicy
from lmcache_ec.recent import Recent
from lmcache_ec.supervisor import Supervisor

MISFIT_REMEMBERED_S = 60.0
"""How long an entry that exists but cannot be used here is not requested again."""

_MISS_REMEMBERED_S = 2.0

_ASKED_AGAIN_S = 0.05
"""Interval between two requests for an entry that a producer has announced."""

_AT_ONCE = 4096
"""Limit on outstanding requests, for a tier that counts as alive but does not answer."""


@dataclass(slots=True, eq=False)
class Probe:
    """A query for the tiers that have an entry, made at `asked_at` (monotonic seconds); `held`: the answer, as bits."""

    asked_at: float
    held: int | None = None


@dataclass(slots=True, eq=False)
class Asked:
    """An entry requested from the store process, first at `at` (monotonic seconds) and `times` times in all.

    `tiers` are those that it may ask (a bit each, 0: all); `first` is the one expected to have the entry.
    """

    length: int
    tiers: int
    first: int
    at: float
    times: int = 0
    late: bool = False


class Fetches:
    """Runs only while the caller has the scheduler side's turn; no call waits.

    Single-flight: an identifier is requested once at a time, in `namespace`. A miss is remembered for two seconds.
    Entries of more than `largest` bytes are not accepted. `candidates` maps a key's digest to the tiers that may have
    it, in the order in which they are asked. `policy` learns from each answer.
    """

    def __init__(
        self,
        book: Book,
        store: Supervisor,
        namespace: str,
        largest: int,
        candidates: Callable[[bytes], Sequence[int]],
        policy: LoadPolicy,
    ) -> None:
        self.counts = {"filtered": 0, "fetches": 0, "fetch_misses": 0, "probes": 0}
        self._book = book
        self._store = store
        self._namespace = namespace
        self._largest = largest
        self._candidates = candidates
        self._policy = policy
        self._under_way: dict[str, Asked] = {}
        self._waiting: dict[int, int] = {}  # tier -> entries under way that it is expected to have
        self._put_off: deque[tuple[str, Asked]] = deque()  # known to exist, waiting for the budget of fills
        self._misses: Recent[str] = Recent(_MISS_REMEMBERED_S)
        self._unusable: Recent[str] = Recent(MISFIT_REMEMBERED_S)
        self._probes: dict[int, tuple[str, int, Probe]] = {}  # not yet answered
        self._probed = 0

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._under_way

    def __len__(self) -> int:
        return len(self._under_way)

    # ---- entries

    def fetch(
        self,
        identifier: str,
        length: int,
        now: float,
        announced: bool,
        encode_s: Callable[[], float] | None = None,
        early: bool = False,
    ) -> bool:
        """See `EncoderCache.fetch`."""
        if len(self._under_way) >= _AT_ONCE or length > self._book.capacity or self._unusable.holds(identifier, now):
            return False
        tiers = self._candidates(identifier_digest(identifier))
        if announced:
            just_missed = self._misses.age(identifier, now) < _ASKED_AGAIN_S
            return just_missed or self._begin(identifier, length, now, tiers, insist=True)
        if self._misses.holds(identifier, now):
            return False
        if not tiers:
            self.counts["filtered"] += 1
            return False
        if encode_s is None:
            return self._begin(identifier, length, now, tiers)
        seconds = encode_s()
        decision = self._policy.decide(tiers, length, seconds, self._waiting)
        if early and not decision.tiers:
            return False  # the request's first pass decides and counts
        decision = self._policy.settle(decision, tiers, length, seconds, now)
        if early and not decision.tiers:
            self._misses.add(identifier, now)  # it is going to be encoded: the request's first pass must not ask again
        if decision.measure is not None:
            self._begin(identifier, length, now, [decision.measure], only=1 << decision.measure)
        return bool(decision.tiers) and self._begin(identifier, length, now, tiers, only=decision.tiers)

    def _begin(
        self, identifier: str, length: int, now: float, tiers: Sequence[int], *, only: int = 0, insist: bool = False
    ) -> bool:
        first = next((tier for tier in tiers if not only or only >> tier & 1), -1)
        return self._ask(identifier, Asked(length, only, first, now), certain=False, insist=insist)

    def filled(self, identifier: str, tier: int, seconds: float, now: float) -> None:
        """An entry has arrived; `tier` took `seconds` for it."""
        asked = self._end(identifier)
        if asked is not None and seconds > 0:
            self._policy.delivered(tier, asked.length, seconds, now)

    def late(self, identifier: str, now: float) -> None:
        """A request has waited in vain for as long as an encode takes."""
        asked = self._under_way.get(identifier)
        if asked is not None and not asked.late and asked.first >= 0:
            asked.late = True
            self._policy.late(asked.first, asked.length, now - asked.at)

    def _end(self, identifier: str) -> Asked | None:
        asked = self._under_way.pop(identifier, None)
        if asked is not None:
            self._waiting[asked.first] -= 1
        return asked

    def not_filled(self, answer: NotFilled, now: float) -> None:
        """A miss, or an entry of another length than guessed: the latter is fetched once more.

        An entry that is too large here, or is of another version, keeps its name: it may serve other engines.
        """
        self._book.filled(answer.place, None)
        if answer.namespace != self._namespace:
            return  # no request waits for it any more
        plausible = 0 < answer.length <= self._largest
        asked = self._under_way.get(answer.identifier)
        if plausible and asked is not None and asked.times == 1:
            asked.length = answer.length
            self._put_off.append((answer.identifier, asked))
            return
        if answer.length > self._largest or answer.kept:
            self._unusable.add(answer.identifier, now)
        self._miss(answer.identifier, now)

    def ask_again(self, now: float) -> None:
        """Fetch entries that are known to exist, by their length, as far as the budget of fills goes; the rest wait."""
        while self._put_off:
            identifier, asked = self._put_off[0]
            if self._book.live(identifier) is not None or self._book.under_way(identifier):
                self._end(identifier)  # encoded and saved meanwhile
            elif not self._ask(identifier, asked, certain=True, insist=True):
                if self._book.filling or self._book.growing:
                    return
                self._miss(identifier, now)
            self._put_off.popleft()

    def _ask(self, identifier: str, asked: Asked, certain: bool, insist: bool = False) -> bool:
        """Ask the store process for an entry, with a place for it if its length is known."""
        length = asked.length
        place = self._book.reserve_fill(identifier, length, self._store.number, certain) if length else None
        if place is None and length and certain:
            return False  # if not `certain`, ask without a place: room may be made once the entry is known to exist
        fill = (place.id, place.offset, place.length) if place else (0, 0, 0)
        sent = self._store.send(Fill(*fill, self._namespace, identifier, insist, asked.tiers))
        if sent:
            self.counts["fetches"] += 1
            asked.times += 1
            if identifier not in self._under_way:
                self._under_way[identifier] = asked
                self._waiting[asked.first] = self._waiting.get(asked.first, 0) + 1
        elif place is not None:
            self._book.filled(place.id, None)
        return sent

    def _miss(self, identifier: str, now: float) -> None:
        self._end(identifier)
        self.counts["fetch_misses"] += 1
        self._misses.add(identifier, now)

    # ---- which tiers have one

    def probe(self, identifier: str, length: int, tiers: int, now: float) -> Probe:
        """See `EncoderCache.probe`. `tiers` are the tiers to ask, a bit each."""
        probe, number = Probe(now), self._probed + 1
        if not self._candidates(identifier_digest(identifier)):
            self.counts["filtered"] += 1
            return self._answer(identifier, tiers, probe, 0)
        question = Locate(number, self._namespace, identifier, length, tiers)
        if len(self._probes) >= _AT_ONCE or not self._store.send(question):
            return self._answer(identifier, tiers, probe, 0)
        self.counts["probes"] += 1
        self._probed = number
        self._probes[number] = (identifier, tiers, probe)
        return probe

    def in_none(self, identifier: str, tiers: int, now: float) -> Probe:
        """A probe answered with "in none of `tiers`", for tiers that cannot be asked."""
        return self._answer(identifier, tiers, Probe(now), 0)

    def located(self, number: int, held: int) -> None:
        """A probe's answer; the caller may no longer be waiting for it."""
        if number in self._probes:
            self._answer(*self._probes.pop(number), held)

    def _answer(self, identifier: str, tiers: int, probe: Probe, held: int) -> Probe:
        probe.held = held
        self._book.located(identifier, tiers, held)
        return probe

    # ---- all of them

    def lost(self, identifiers: Iterable[str], now: float) -> None:
        """The store process was lost, with its unfinished fills, `identifiers`: all open requests count as misses."""
        for identifier in identifiers:
            self._miss(identifier, now)
        self._put_off.clear()
        for asked in self._probes.values():
            self._answer(*asked, 0)
        self._probes.clear()
        for identifier in list(self._under_way):
            self._miss(identifier, now)

    def forget(self, namespace: str) -> None:
        """From now on request entries in this namespace; forget everything about the previous one."""
        self._namespace = namespace
        for known in (self._under_way, self._waiting, self._put_off, self._misses, self._unusable, self._probes):
            known.clear()
