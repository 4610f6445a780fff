# SPDX-License-Identifier: Apache-2.0
"""Entries that a tier lacks and the arena still has, to be written again: most valuable first.

How a rewrite is decided:

1. The store process reports facts about a tier: it *took* an entry, *refused* it, or *failed*; it is *back* after it
   was left alone; it was *emptied* from outside as a whole (see `Tier.born`). Nothing else makes an entry due.
2. *Back* makes entries due that the tier failed to take, or never answered about. *Emptied* makes all live ones due.
   An entry that the tier took once and no longer has (evicted, expired, deleted, its namespace removed) is never due:
   none of these events is reported.
3. News does not make the scheduler side scan the whole arena: at most `_AT_ONCE` entries, those that would be evicted
   last, are checked at once, any other after its next use.
4. A due place may be evicted like any other; it is then no longer due.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from lmcache_ec.place import Place

_AT_ONCE = 4096


class Rewrites:
    """The places that are due, with the tiers to write them to in `Place.owed`. Runs on the book's one thread.

    Sets of tiers are bit masks, in the order of the tiers.
    """

    def __init__(self) -> None:
        self._due: OrderedDict[int, Place] = OrderedDict()
        self._news = 0
        self._emptied: dict[int, int] = {}  # tier's bit -> the number of the news
        self._back: dict[int, int] = {}

    def published(self, place: Place) -> None:
        """Note a new entry: no earlier news concerns it."""
        place.checked = self._news

    def emptied(self, tier: int, hottest: Iterable[Place]) -> None:
        self._hear(self._emptied, tier, hottest)

    def back(self, tier: int, hottest: Iterable[Place]) -> None:
        self._hear(self._back, tier, hottest)

    def _hear(self, kind: dict[int, int], tier: int, hottest: Iterable[Place]) -> None:
        self._news += 1
        kind[1 << tier] = self._news
        for place in islice(hottest, _AT_ONCE):
            self.check(place)

    def check(self, place: Place) -> None:
        """Make a live place due if any news since its last check concerns it."""
        if place.checked == self._news:
            return
        emptied = sum(bit for bit, number in self._emptied.items() if number > place.checked)
        back = sum(bit for bit, number in self._back.items() if number > place.checked)
        place.checked = self._news
        place.tiers &= ~emptied
        self.owe(place, emptied | back & place.lacks)

    def owe(self, place: Place, tiers: int, first: bool = False) -> None:
        """Make a place due for `tiers`; `first`: before all others."""
        if tiers and place.persist and not place.forgotten:
            place.owed |= tiers
            self._due[place.id] = place
            self._due.move_to_end(place.id, last=not first)

    def due(self, place: Place) -> bool:
        return place.id in self._due

    def next(self) -> Place | None:
        """The place to write next; None if it is already being written."""
        place = next(iter(self._due.values()), None)
        return None if place is None or place.dirty else place

    def all(self) -> list[Place]:
        return list(self._due.values())

    def drop(self, place: Place) -> None:
        """The place is not due, or no longer."""
        self._due.pop(place.id, None)

    def __len__(self) -> int:
        return len(self._due)
