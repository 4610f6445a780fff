# SPDX-License-Identifier: Apache-2.0
"""The address space of the arena: extents, best fit, and windows that eviction may clear.

Nothing here touches memory; offsets and lengths are bytes within the arena, which is opened from its start onwards.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from lmcache_ec.place import Extent, Place


class Space:
    """Who holds which bytes of the arena. Runs on the scheduler side's one thread; no lock, no I/O.

    Best fit, lowest address first among equals, so that pages never used stay untouched.
    """

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []  # (length, offset), sorted
        self._extents: dict[int, Extent] = {}  # free extents by offset
        self._last: Extent | None = None
        self.opened_bytes = 0
        self.free_bytes = 0

    def open(self, length: int) -> None:
        """Add the next `length` bytes. A place may lie across what was opened at different times."""
        extent = Extent(self.opened_bytes, length, None, self._last)
        if self._last is not None:
            self._last.after = extent
        self._last = extent
        self.opened_bytes += length
        self.give(extent)

    @property
    def tail_bytes(self) -> int:
        """How many bytes are free at the end of what is open: what is opened next joins them."""
        return self._last.length if self._last is not None and self._last.place is None else 0

    def take(self, length: int) -> Extent | None:
        """The smallest free extent of at least `length` bytes, cut to `length`; None if there is none."""
        index = bisect_left(self._free, (length, 0))
        if index == len(self._free):
            return None
        return self.cut(self._extents[self._free[index][1]], length)

    def cut(self, extent: Extent, length: int) -> Extent:
        """Take the first `length` bytes of a free extent; what is left over stays free."""
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
        """Give an extent back. Returns the free extent that it is now part of."""
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
        self, start: Extent, length: int, evictable: Callable[[Place], bool], steps: Iterator[int]
    ) -> list[Extent] | None:
        """Adjoining extents around `start`, free or evictable, of at least `length` bytes together.

        At most `2 * length` bytes of them are owned, and each neighbour joined uses up one of `steps`: None if that
        does not do. Free neighbours are joined first, then the one that is evicted first.
        """
        window = [start]
        low, high = start, start
        total = owned = start.length
        while total < length:
            if owned > 2 * length or next(steps, None) is None:
                return None
            below = low.before if low.before and (not low.before.place or evictable(low.before.place)) else None
            above = high.after if high.after and (not high.after.place or evictable(high.after.place)) else None
            if below is None and above is None:
                return None
            if below is not None and (above is None or _priority(below) <= _priority(above)):
                low = chosen = below
            elif above is not None:
                high = chosen = above
            window.append(chosen)
            total += chosen.length
            owned += chosen.length if chosen.place else 0
        return window if owned <= 2 * length else None

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


def _priority(extent: Extent) -> float:
    """Order of joining a window: free first, then what is evicted first."""
    return extent.place.priority if extent.place else -1.0
