# SPDX-License-Identifier: Apache-2.0
"""The address space of the arena: extents, best fit, and windows that eviction may clear.

Nothing here touches memory; offsets and lengths are bytes within the arena, which is opened from its start onwards.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import NamedTuple

from lmcache_ec.place import Extent, Place


class Joinable(NamedTuple):
    """An extent that a window may include: its priority, its owned bytes, and the loss of evicting it."""

    priority: float
    extent: Extent
    owned: int
    lost: float


class Window(NamedTuple):
    """Adjacent extents, and the loss of evicting those that are owned."""

    lost: float
    extents: list[Extent]


class Space:
    """Which bytes of the arena are free or owned. Runs on the scheduler side's one thread; no lock, no I/O.

    Best fit, lowest address first among equals, so that unused pages stay untouched.
    """

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []  # (length, offset), sorted
        self._extents: dict[int, Extent] = {}  # free extents by offset
        self._last: Extent | None = None
        self.opened_bytes = 0
        self.free_bytes = 0

    def open(self, length: int) -> None:
        """Add the next `length` bytes. A place may span bytes opened at different times."""
        extent = Extent(self.opened_bytes, length, None, self._last)
        if self._last is not None:
            self._last.after = extent
        self._last = extent
        self.opened_bytes += length
        self.give(extent)

    @property
    def tail_bytes(self) -> int:
        """How many bytes are free at the end of the open part: the next bytes opened join them."""
        return self._last.length if self._last is not None and self._last.place is None else 0

    def take(self, length: int) -> Extent | None:
        """The smallest free extent of at least `length` bytes, cut to `length`; None if there is none."""
        index = bisect_left(self._free, (length, 0))
        if index == len(self._free):
            return None
        return self.cut(self._extents[self._free[index][1]], length)

    def cut(self, extent: Extent, length: int) -> Extent:
        """Take the first `length` bytes of a free extent; the rest stays free."""
        self._drop_free(extent)
        if extent.length > length:
            rest = Extent(extent.offset + length, extent.length - length, None, extent, extent.after)
            self._link(rest, extent.after)
            extent.after = rest
            extent.length = length
            self._put_free(rest)
        self.free_bytes -= length
        return extent

    def give(self, extent: Extent) -> Extent:
        """Free an extent. Returns the free extent that it is now part of."""
        self.free_bytes += extent.length
        extent.place = None
        before, after = extent.before, extent.after
        if after is not None and after.place is None:
            self._drop_free(after)
            extent.length += after.length
            self._link(extent, after.after)
        if before is not None and before.place is None:
            self._drop_free(before)
            before.length += extent.length
            self._link(before, extent.after)
            extent = before
        self._put_free(extent)
        return extent

    def window(
        self,
        start: Extent,
        length: int,
        loss: Callable[[Place], float | None],
        least: float,
        steps: Iterator[int],
    ) -> Window | None:
        """Adjacent extents around `start`, free or evictable, of at least `length` bytes together.

        `loss` is the loss of evicting a place, None if it cannot be evicted. At most `2 * length` bytes may be owned,
        the loss must be below `least`, and each neighbour joined uses up one of `steps`; None if there is no such
        window. Free neighbours are joined first, then those with the lowest priority.
        """

        def neighbour(extent: Extent | None) -> Joinable | None:
            if extent is None:
                return None
            place = extent.place
            if place is None:
                return Joinable(-1.0, extent, 0, 0.0)
            lost = loss(place)
            return None if lost is None else Joinable(place.priority, extent, extent.length, lost)

        first = neighbour(start)
        if first is None:
            return None
        extents, most = [start], 2 * length
        total, owned, lost = start.length, first.owned, first.lost
        below, above = neighbour(start.before), neighbour(start.after)
        while owned <= most and lost < least:
            if total >= length:
                return Window(lost, extents)
            if next(steps, None) is None:
                return None
            if below is not None and (above is None or below.priority <= above.priority):
                joined, below = below, neighbour(below.extent.before)
            elif above is not None:
                joined, above = above, neighbour(above.extent.after)
            else:
                return None
            extents.append(joined.extent)
            total += joined.extent.length
            owned += joined.owned
            lost += joined.lost
        return None

    def _link(self, extent: Extent, after: Extent | None) -> None:
        extent.after = after
        if after is not None:
            after.before = extent
        else:
            self._last = extent

    def _put_free(self, extent: Extent) -> None:
        insort(self._free, (extent.length, extent.offset))
        self._extents[extent.offset] = extent

    def _drop_free(self, extent: Extent) -> None:
        del self._free[bisect_left(self._free, (extent.length, extent.offset))]
        del self._extents[extent.offset]
