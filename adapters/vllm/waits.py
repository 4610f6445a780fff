# SPDX-License-Identifier: Apache-2.0
"""What a request waits for before it is scheduled, and for how long: the standing of its items, and leases."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

from lmcache_ec.staging import Readiness

from .item import Item, Memo, Standing

if TYPE_CHECKING:
    from lmcache_ec.cache import EncoderCache

    from .decisions import Decisions
    from .lookups import LookUps
    from .producer import Producer


class Waits:
    """One per engine, on its scheduler side. Runs on the scheduler's thread only; no lock, no I/O.

    `producer` is None in other roles. `cached` is what vLLM's own encoder cache holds, updated by the scheduler side.
    Times are monotonic seconds.
    """

    def __init__(
        self,
        cache: EncoderCache,
        look_ups: LookUps,
        producer: Producer | None,
        cached: Set[str],
        decisions: Decisions,
    ) -> None:
        self._cache = cache
        self._look_ups = look_ups
        self._producer = producer
        self._cached = cached
        self._decisions = decisions

    def end(self, memo: Memo, now: float) -> None:
        """The request no longer waits."""
        if memo.waiting_since is not None:
            waited_s = now - memo.waiting_since
            memo.waited_s += waited_s
            memo.waiting_since = None
            self._decisions.waited(waited_s)

    def waited(self, memo: Memo, pending: Sequence[Item], now: float) -> bool:
        """Whether the request has waited as long as it may, all its waits together."""
        if memo.waiting_since is None:
            memo.waiting_since = now
        longest_s = (
            memo.deadline_s if self._producer is not None else self._look_ups.patience_s(memo.deadline_s, pending)
        )
        return memo.waited_s + now - memo.waiting_since >= longest_s

    def standing(self, memo: Memo, item: Item, among: Sequence[Item], now: float) -> Standing:
        """The standing of an item, after leasing it or starting to fetch it.

        An item that carries nothing to encode needs a lease until the request holds it: vLLM may evict its own copy
        before that."""
        identifier = item.identifier
        if item.held_at is not None and memo.computed > item.held_at[0] and memo.preemptions == item.held_at[1]:
            if self._producer is not None:
                self._producer.refresh(item, self._look_ups.sought(item), now)
            return Standing.SETTLED
        if self._producer is not None and self._look_ups.usable(item):
            place, cached = self._look_ups.find(item), identifier in self._cached
            return self._producer.standing(memo.request_id, item, self._look_ups.sought(item), place, cached, now)
        leased = identifier in memo.leases and self._look_ups.serves(item)
        if leased or (item.encodable and identifier in self._cached):
            return self._staged(memo, item, now)
        place = self._look_ups.find(item)
        if place is not None and self._cache.book.lease(place):
            memo.leases[identifier] = place
            item.missed = False
            return self._staged(memo, item, now)
        if place is not None:  # over the budget of leases: promised if it is still there when vLLM asks for it
            return Standing.SETTLED if item.encodable else Standing.PENDING
        item.missed = item.missed or not self._look_ups.can_come(item, among)
        item.awaited |= not item.missed
        return Standing.MISSED if item.missed else Standing.PENDING

    def _staged(self, memo: Memo, item: Item, now: float) -> Standing:
        """Whether a leased item can be scheduled. One that carries nothing to encode must first be staged, after which
        its load cannot fail: if staging fails, its request fails and not the engine."""
        if item.encodable:
            return Standing.SETTLED
        match self._cache.staging.ask(memo.leases[item.identifier], memo.request_id):
            case Readiness.FAILED:
                item.missed = True
                return Standing.MISSED
            case Readiness.PENDING:
                return Standing.PENDING
            case Readiness.NO_ROOM:  # no failure of the device: in the end the step loads it
                return Standing.SETTLED if self.waited(memo, [item], now) else Standing.PENDING
        return Standing.SETTLED

    def release(self, memo: Memo) -> None:
        """End all leases of a request."""
        for identifier in list(memo.leases):
            self.end_lease(memo, identifier)

    def end_lease(self, memo: Memo, identifier: str) -> None:
        place = memo.leases.pop(identifier)
        self._cache.staging.release(place, memo.request_id)
        self._cache.book.release(place)
