# SPDX-License-Identifier: Apache-2.0
"""The loads that vLLM counts on, from the pass that gave them room until a step carries them out.

Between the two a load holds the pin of its promise. It is dropped if vLLM no longer wants the item, and it waits while
no request of the step could have the item encoded, should the load fail.
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

    One of `outdated` weights is loaded only for a request that carries nothing to encode: vLLM dies of an item that
    never comes. `staged` is the number under which every rank's device has it already; 0: none has.
    """

    place: Place
    item: tuple[str, int]
    outdated: bool = False
    staged: int = 0


class Loads:
    """One engine's, on its scheduler side, on the scheduler's thread alone; no lock, no I/O.

    `memos` are the requests that the scheduler side remembers, `decisions` counts what goes out.
    """

    def __init__(self, cache: EncoderCache, memos: Mapping[str, Memo], decisions: Decisions) -> None:
        self.waiting: dict[str, Promised] = {}
        """By identifier."""
        self._cache = cache
        self._memos = memos
        self._decisions = decisions

    def add(self, identifier: str, place: Place, item: tuple[str, int]) -> None:
        """vLLM has given a promised item room. Takes over the promise's pin."""
        self.waiting[identifier] = Promised(place, item, staged=self._cache.staging.take(place, item[0]))

    def drop(self, identifier: str) -> None:
        """No step will carry it out."""
        promised = self.waiting.pop(identifier, None)
        if promised is not None:
            self._cache.book.unpin(promised.place)
            self._cache.staging.unspent(promised.staged)

    def outdate(self) -> None:
        """The ranks have other weights: what waits is encoded, if it can be."""
        self.waiting = {identifier: promised._replace(outdated=True) for identifier, promised in self.waiting.items()}

    def bearers(self, scheduled: Container[str]) -> dict[str, tuple[str, int]]:
        """The loads that can go out with this step, and who has each encoded if it fails: an item of a request that the
        step schedules. A load that fails without a bearer could not be made up for, since vLLM takes the item for
        cached; so it waits for the step of one who bears it (its own request was preempted, or the step had no
        tokens)."""
        bearers = (
            (identifier, self._bearer(identifier, load.item, scheduled)) for identifier, load in self.waiting.items()
        )
        return {identifier: bearer for identifier, bearer in bearers if bearer is not None}

    def _bearer(self, identifier: str, own: tuple[str, int], scheduled: Container[str]) -> tuple[str, int] | None:
        """Preferably one that carries something to encode."""
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
        """The orders of `step`, which the book knows from now on. The loads stay until they are `sent`."""
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
        """The order to load what was promised. One that is void has it encoded, if the bearer can."""
        promised, encodes = self.waiting[identifier], self._encodes(bearer)
        place = promised.place
        if place.spec is None or (void and encodes):
            self._cache.staging.unspent(promised.staged)
            return Load(0, 0, identifier, _NOTHING, bearer)
        offset = place.offset + room(place.identifier)
        return Load(place.id, offset, identifier, place.spec, bearer, encodes, promised.staged)

    def sent(self, orders: Orders) -> None:
        """The step is vLLM's: its loads wait no longer."""
        for load in orders.loads:
            self.waiting.pop(load.identifier, None)

    def _count(self, place: Place, bearer: tuple[str, int]) -> None:
        request_id, index = bearer
        items = items_of(self._memos, request_id)
        if index < len(items):
            item = items[index]
            place.modality = item.modality
            self._decisions.loaded(place, item.modality, self._cache.policy.encode_s([(item.modality, item.rows)]))
