# SPDX-License-Identifier: Apache-2.0
"""How the arena grows.

If no device registers memory, as on a CPU, and no control group limits it, the whole arena is opened as soon as every
rank has mapped it: pages are allocated as entries are written. Under a limit it grows segment by segment, as far as the
limit leaves room (`host_memory`). A device that copies concurrently with the model must register pages first
(`cudaHostRegister`), which makes them resident; so registration follows what is stored, one segment of one or more
granules at a time:

1. The store process allocates the pages. Nothing waits for that, and it is most of the work.
2. Each rank has its device register them, granule by granule, on the rank's own thread. Whether a driver's lock delays
   the model's launches meanwhile is not documented; so a granule is small.
3. The book opens the bytes once every rank has answered.

A device that refuses ends the growth; what is open stays open. One that refuses the very first segment copies from
unregistered memory, which is slower: the forward pass waits for each copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmcache_ec.book import Book
from lmcache_ec.channel import Populate, Segment, SegmentReady
from lmcache_ec.complaints import Complaints
from lmcache_ec.host_memory import Growing
from lmcache_ec.link import Link, LinkClosed


class Growth:
    """One segment after another, at most one under way. Runs on the scheduler side's one thread; sends, never waits."""

    def __init__(
        self,
        book: Book,
        ranks: int,
        populate: Callable[[Populate], bool],
        complaints: Complaints,
        memory: Growing,
    ) -> None:
        """`populate` sends an order to the store process; False if it cannot be sent now."""
        self._book = book
        self._ranks = ranks
        self._populate = populate
        self._complaints = complaints
        self._memory = memory
        self._attached: set[int] = set()
        self._registering: set[int] = set()
        self._segment: Segment | None = None
        self._asked = self._populated = False
        self._unsent: set[int] = set()
        self._unanswered: set[int] = set()
        self._usable = 0

    @property
    def attached(self) -> bool:
        """Whether every rank has mapped the arena."""
        return len(self._attached) == self._ranks

    def rank_attached(self, rank: int, registers: bool) -> None:
        self._attached.add(rank)
        if registers:
            self._registering.add(rank)

    def populated(self, offset: int) -> None:
        self._populated |= self._segment is not None and self._segment.offset == offset

    def store_replaced(self) -> None:
        """Ask the new store process for what the last one was asked for."""
        self._asked = False

    def answered(self, rank: int, answer: SegmentReady) -> None:
        segment = self._segment
        if segment is None or answer.offset != segment.offset or rank not in self._unanswered:
            return
        self._unanswered.discard(rank)
        self._usable = min(self._usable, answer.length)
        if answer.problem and answer.length == segment.length:
            self._registering.discard(rank)
            self._warn(rank, f"copies more slowly, over pageable memory: {answer.problem}")
        elif answer.problem:
            self._warn(rank, f"can use no more of LocalCPU: {answer.problem}")
        if not self._unanswered:
            self._finish(segment)

    def advance(self, links: Sequence[Link]) -> None:
        """Do the next step that is possible. `links` are those to the ranks, by number."""
        segment = self._segment or self._begin()
        if segment is None:
            return
        self._asked = self._asked or self._populate(Populate(segment.offset, segment.length))
        if self._populated:
            self._unsent = {rank for rank in self._unsent if not _sent(links[rank], segment)}

    def _begin(self) -> Segment | None:
        """The segment that is due, if any. Without registration, bytes are opened at once."""
        if not self.attached:
            return None
        if not self._registering and not self._memory.limited:
            self._book.open_all()
            return None
        due = self._book.next_segment()
        if due is None or not self._has_memory(*due):
            return None
        if not self._registering:
            self._book.open(*due)
            return None
        self._segment = Segment(*due)
        self._asked = self._populated = False
        self._unsent, self._unanswered = set(self._registering), set(self._registering)
        self._usable = self._segment.length
        return self._segment

    def _has_memory(self, offset: int, length: int) -> bool:
        """Whether there is memory for the segment. Always true for the first one."""
        if not offset or self._memory.allows(self._book.unused_bytes + length):
            return True
        if self._memory.refusal:
            self._complaints.warn("memory", f"LocalCPU stays as large as it is: {self._memory.refusal}")
        return False

    def _warn(self, rank: int, text: str) -> None:
        self._complaints.warn(f"memory-{rank}", f"rank {rank} {text}")

    def _finish(self, segment: Segment) -> None:
        self._segment = None
        self._book.open(segment.offset, self._usable)
        if self._usable < segment.length:
            self._book.end_growth()


def _sent(link: Link, segment: Segment) -> bool:
    try:
        return link.send(segment)
    except LinkClosed:
        return True  # noticed and handled by the next drain
