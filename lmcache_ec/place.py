# SPDX-License-Identifier: Apache-2.0
"""A place, the extent of the arena that it owns, and the states it goes through.

Data only: `book.py` decides what a place is for, `space.py` which bytes it gets. Both run on the scheduler side's one
thread, as does all code that holds a place.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lmcache_ec.entry import TensorSpec

ALIGNMENT = 4096
"""Places start and end on 4 KiB pages. If the kernel's pages are larger (64 KiB on some ARM hosts), two places may
share one; this only affects how closely memory use follows what is stored."""


def aligned(length: int) -> int:
    """`length` bytes rounded up to whole pages."""
    return -(-length // ALIGNMENT) * ALIGNMENT


class State(enum.Enum):
    __hash__ = object.__hash__  # Enum's own is slow Python code, and the book counts by state

    RESERVED = "reserved"
    WRITING = "writing"
    SEALING = "sealing"
    FILLING = "filling"
    LIVE = "live"
    ORPHANED = "orphaned"
    FREE = "free"


@dataclass(slots=True, eq=False)
class Extent:
    """A run of bytes of the arena, free or owned by a place.

    Linked to its neighbours in address order. `place` is None while it is free. Offset and length are in bytes.
    """

    offset: int
    length: int
    place: Place | None = None
    before: Extent | None = None
    after: Extent | None = None


@dataclass(slots=True, eq=False)
class Place:
    """A run of the arena that holds one entry, or will. `length` is the entry's length, in bytes."""

    id: int
    identifier: str
    length: int
    extent: Extent
    state: State
    spec: TensorSpec | None
    persist: bool = False
    dirty: bool = False
    tiers: int = 0
    """The tiers that have it, a bit each in their order, as far as the store process has reported."""
    lacks: int = 0
    """The tiers that should have it and have neither taken nor refused it."""
    owed: int = 0
    """The tiers that it must be written to again, see `Rewrites`."""
    rewriting: int = 0
    """The tiers that it is being written to again."""
    checked: int = 0
    """Number of the last news about the tiers that it was checked against."""
    origin: str = ""
    """The tier that filled it; empty for an encoder's own output."""
    incarnation: int = 0
    """The store process that it was last handed to."""
    pins: int = 0
    lessees: int = 0
    forgotten: bool = False
    priority: float = 0.0
    """Priority as of its last unpin: the place with the lowest is evicted first."""
    modality: str = ""
    """The modality of its item; empty as long as no item has asked for it."""

    @property
    def offset(self) -> int:
        return self.extent.offset
