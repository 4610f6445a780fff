# SPDX-License-Identifier: Apache-2.0
"""What a tier lacks and the arena still has, to be written again: the hottest first.

Who decides, and on what evidence:

1. The store process reports facts about a tier: it *took* an entry, *refused* it, or *failed*; it is *back* after it
   was left alone; it was *emptied* from outside as a whole (see `Tier.born`). Nothing else makes an entry due.
2. *Back* makes due what the tier failed to take, or never answered about. *Emptied* makes due all that is live.
   An entry that the tier took once and has no longer (evicted, expired, deleted, its namespace removed) is never due:
   none of these is news of the tier.
3. News costs the scheduler side no look at the whole arena: at most `_AT_ONCE` entries, the most recently used, are
   looked at when it comes, any other the next time that it was used.
4. A place that is due may be evicted like any other, and is then due no more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_ec.book import Place

_AT_ONCE = 4096


class Rewrites:
    """The places that are due, with the tiers that are to have them in `Place.owed`. Runs on the book's one thread.

    Sets of tiers are bits, in the order of the tiers.
    """

    def __init__(self) -> None:
        self._due: OrderedDict[int, Place] = OrderedDict()
        self._news = 0
        self._emptied: dict[int, int] = {}  # tier's bit -> the number of the news
        self._back: dict[int, int] = {}

    def published(self, place: Place) -> None:
        """A new entry: no news concerns it yet."""
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
        """Make a live place due if there was news that concerns it since it was last looked at."""
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
        """The place that is to be written next, unless it is being written already."""
        place = next(iter(self._due.values()), None)
        return None if place is None or place.dirty else place

    def all(self) -> list[Place]:
        return list(self._due.values())

    def drop(self, place: Place) -> None:
        """It is not due, or not any more."""
        self._due.pop(place.id, None)

    def __len__(self) -> int:
        return len(self._due)
