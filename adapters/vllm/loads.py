# SPDX-License-Identifier: Apache-2.0
"""The loads that vLLM counts on, from the pass that allocated room for them until a step executes them.

In between, a load holds the pin of its promise. It is dropped if vLLM no longer wants the item, and it waits while the
step has no request that could have the item encoded if the load fails.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, NamedTuple

from lmcache_ec.entry import TensorSpec, room

from .item import Memo, items_of
from .orders import Load, Orders

if TYPE_CHECKING:
    from lmcache_ec.cache import EncoderCache
    from lmcache_ec.place import Place

    from .decisions import Decisions

_NOTHING = TensorSpec(0, 0, "U8")


class Promised(NamedTuple):
    """A load that vLLM counts on: of the pinned place, for (request, index).

    If its weights are `outdated`, it is loaded only for a request that carries nothing to encode: vLLM would die of a
    missing item. `staged` is the number under which every rank's device already has it; 0: not staged.
    """

    place: Place
    item: tuple[str, int]
    outdated: bool = False
    staged: int = 0


class Loads:
    """One per engine, on its scheduler side. Runs on the scheduler's thread only; no lock, no I/O.

    `memos` are the requests that the scheduler side remembers, `decisions` counts the loads sent.
    """

    def __init__(self, cache: EncoderCache, memos: Mapping[str, Memo], decisions: Decisions) -> None:
        self.waiting: dict[str, Promised] = {}
        """Waiting loads, by identifier."""
        self._cache = cache
        self._memos = memos
        self._decisions = decisions

    def add(self, identifier: str, place: Place, item: tuple[str, int]) -> None:
        """vLLM has allocated room for a promised item. Takes over the promise's pin."""
        self.waiting[identifier] = Promised(place, item, staged=self._cache.staging.take(place, item[0]))

    def drop(self, identifier: str) -> None:
        """No step will execute this load."""
        promised = self.waiting.pop(identifier, None)
        if promised is not None:
            self._cache.book.unpin(promised.place)
            self._cache.staging.unspent(promised.staged)

    def outdate(self) -> None:
        """The ranks have other weights: waiting items are encoded if they can be."""
        self.waiting = {identifier: promised._replace(outdated=True) for identifier, promised in self.waiting.items()}

    def bearers(self, scheduled: Container[str]) -> dict[str, tuple[str, int]]:
        """The loads that can be sent with this step, each with its bearer: an item of a scheduled request, which is
        encoded if the load fails. Without a bearer nothing could replace a failed load, since vLLM counts the item as
        cached; so the load waits for a step that has one (its own request was preempted, or the step had no tokens)."""
        bearers = (
            (identifier, self._bearer(identifier, load.item, scheduled)) for identifier, load in self.waiting.items()
        )
        return {identifier: bearer for identifier, bearer in bearers if bearer is not None}

    def _bearer(self, identifier: str, own: tuple[str, int], scheduled: Container[str]) -> tuple[str, int] | None:
        """The bearer of a load, preferably one that carries something to encode."""
        if own[0] in scheduled and self._encodes(own):
            return own
        others = [
            (memo.request_id, memo.items.index(memo.named[identifier]))
            for memo in self._memos.values()
            if identifier in memo.named and memo.request_id in scheduled
        ]
        encoding = next((other for other in others if self._encodes(other)), None)
        return encoding or (own if own[0] in scheduled else next(iter(others), None))

    def _encodes(self, bearer: tuple[str, int]) -> bool:
        request_id, index = bearer
        items = items_of(self._memos, request_id)
        return index >= len(items) or (items[index].encodable and not items[index].dropped)

    def send(self, step: int, bearers: Mapping[str, tuple[str, int]]) -> list[Load]:
        """The load orders of `step`, recorded in the book. The loads stay here until they are `sent`."""
        orders = []
        for identifier, bearer in bearers.items():
            promised = self.waiting[identifier]
            orders.append(load := self.order(identifier, bearer, promised.outdated))
            if load.place:
                self._count(promised.place, bearer)
                self._cache.book.send_load(promised.place, step)
            else:
                self._cache.book.unpin(promised.place)
        return orders

    def order(self, identifier: str, bearer: tuple[str, int], void: bool) -> Load:
        """The order to load a promised item. If `void`, the item is encoded instead, if the bearer can."""
        promised, encodes = self.waiting[identifier], self._encodes(bearer)
        place = promised.place
        if place.spec is None or (void and encodes):
            self._cache.staging.unspent(promised.staged)
            return Load(0, 0, identifier, _NOTHING, bearer)
        offset = place.offset + room(place.identifier)
        return Load(place.id, offset, identifier, place.spec, bearer, encodes, promised.staged)

    def sent(self, orders: Orders) -> None:
        """The step has been handed to vLLM: its loads no longer wait."""
        for load in orders.loads:
            self.waiting.pop(load.identifier, None)

    def _count(self, place: Place, bearer: tuple[str, int]) -> None:
        request_id, index = bearer
        items = items_of(self._memos, request_id)
        if index < len(items):
            item = items[index]
            place.modality = item.modality
            self._decisions.loaded(place, item.modality, self._cache.policy.encode_s([(item.modality, item.rows)]))
