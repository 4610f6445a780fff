# SPDX-License-Identifier: Apache-2.0
"""Checks periodically whether a tier was emptied as a whole (see `Tier.born`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmcache_ec.tiers.health import shortened
from lmcache_ec.tiers.journal import Journal
from lmcache_ec.tiers.lane import NEVER, Lane
from lmcache_ec.tiers.remote import Lookup


@dataclass(slots=True)
class _Look:
    """When a tier is checked next, and the last known name of its content."""

    number: int
    lane: Lane
    every_s: float
    due_at: float = 0.0
    born: str | None = None


class Looks:
    """Checks every `every_s` seconds, or a little sooner; where a request is not free, as often as it is listed.

    `changed` is called with a tier's number and the name of its content, when that is first known and when it
    changes; `wake` when `due_at` may have changed. Both are called from the tiers' threads.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        every_s: float,
        journal: Journal,
        changed: Callable[[int, str], None],
        wake: Callable[[], None],
    ) -> None:
        self._journal = journal
        self._changed = changed
        self._wake = wake
        self._looks = [_Look(number, lane, _interval(lane, every_s)) for number, lane in enumerate(lanes)]

    @property
    def due_at(self) -> float:
        """When `look_due` has something to do (monotonic seconds)."""
        return min((look.due_at for look in self._looks), default=NEVER)

    def look_due(self) -> None:
        for look in self._looks:
            if look.due_at <= time.monotonic():
                look.due_at = NEVER
                look.lane.scans.submit(self._look, look)

    def _look(self, look: _Look) -> None:
        """A tier that cannot answer is asked again: a fault shows in the calls that need the tier."""
        lane = look.lane
        try:
            born = None if lane.rests else lane.tier.born()
            self._journal.count(f"{lane.name}_looks")
        except Exception:
            born = None
        if born not in (None, look.born):
            look.born = born
            self._changed(look.number, born)
        look.due_at = time.monotonic() + shortened(look.every_s)
        self._wake()


def _interval(lane: Lane, every_s: float) -> float:
    habits = lane.habits
    return habits.refresh_s if habits.lookup is Lookup.CATALOG and not habits.local else every_s
