# SPDX-License-Identifier: Apache-2.0
"""Whether a tier is asked to read, and whether it is asked to write: each has a health of its own.

Only what says that the *tier* cannot be used counts (`TierUnreachable`, `WritesRefused`); what it answers about one
entry does not. Any success ends a rest.

- *Reads* pause at the first such failure, so that nobody waits for a store that may be dead, and a probe goes out at
  once: it tries a few times in a row, and one answer ends the pause, within milliseconds where the failure was one
  request's. Without an answer the tier rests, longer each time, and each rest ends with one probe.
- *Writes* rest after a few failures in a row. A rest ends with one probe, where the tier has one that changes nothing;
  then writes go out one at a time until one is taken, and one that fails begins a longer rest. A store that refuses
  them twice is *read only*, is asked again less often, and is read all the while.
"""

from __future__ import annotations

import time
from random import SystemRandom

from lmcache_ec.tiers.base import TierError, TierUnreachable, WritesRefused, message

NEVER = float("inf")
_REST_S = (1.0, 2.0, 5.0, 15.0, 30.0)
_READ_ONLY_S = (0.2, 1.0, 5.0, 15.0, 60.0)
_JITTER = 0.2
_SOONER = 0.1

_WRITE_FAILURES = 3
_chance = SystemRandom()
"""Not `random`'s own generator, which vLLM seeds alike on all replicas."""


class ReadHealth:
    """The lane's lock guards it."""

    def __init__(self) -> None:
        self.paused = False
        self.probe_at = NEVER
        """When the tier is to be probed (monotonic seconds)."""
        self._rests = 0
        self._failed_at = 0.0

    @property
    def rests(self) -> bool:
        """Whether a probe has had no answer, either."""
        return self.paused and self._rests > 0

    def failed(self, error: Exception) -> bool:
        """A read failed. Whether the tier pauses from now on."""
        if self.paused or not isinstance(error, TierUnreachable):
            return False
        self.paused, self._failed_at = True, time.monotonic()
        self.probe_at = self._failed_at
        return True

    def probe_failed(self) -> None:
        self.probe_at = time.monotonic() + varied(_REST_S[min(self._rests, len(_REST_S) - 1)])
        self._rests += 1

    def succeeded(self) -> float:
        """Something was answered. For how many seconds the tier had been left alone, 0 if it was not."""
        rested_s = time.monotonic() - self._failed_at if self.rests else 0.0
        self.paused, self.probe_at, self._rests = False, NEVER, 0
        return rested_s


class WriteHealth:
    """The lane's lock guards it."""

    def __init__(self) -> None:
        self.rests = False
        self.refusal = ""
        """Why the store is read only; empty if it is not."""
        self.probe_at = NEVER
        """When the tier is to be asked whether it takes writes (monotonic seconds)."""
        self._in_a_row = 0
        self._rests = 0

    @property
    def on_trial(self) -> bool:
        """Whether it has rested, and no write was taken since."""
        return self._rests > 0 and not self.rests

    def failed(self, error: Exception) -> None:
        """A write failed."""
        if self.rests or not isinstance(error, (TierUnreachable, WritesRefused)):
            return
        self._in_a_row += 1
        if self._in_a_row >= _WRITE_FAILURES:
            self._rest(error)
        elif isinstance(error, WritesRefused):
            self.probe_at = time.monotonic()  # is it this entry that was refused, or would any be?

    def probe_failed(self, error: TierError) -> None:
        """As `failed`, of a probe: that one is believed at once."""
        self._rest(error)

    def probe_passed(self, certain: bool) -> None:
        """Writes may go on, perhaps only to see whether they do. The next one that fails begins a longer rest."""
        if self.rests:
            self._in_a_row = _WRITE_FAILURES - 1
        self.rests, self.probe_at = False, NEVER
        if certain:
            self.refusal = ""

    def succeeded(self) -> bool:
        """A write was taken. Whether the store had been left alone, or was read only."""
        ended = self._rests > 0
        self.rests, self.probe_at, self.refusal = False, NEVER, ""
        self._in_a_row = self._rests = 0
        return ended

    def _rest(self, error: Exception) -> None:
        refused = isinstance(error, WritesRefused)
        lengths = _READ_ONLY_S if refused else _REST_S
        self.rests = True
        if refused and self._rests:  # the first time it may have been full for a moment
            self.refusal = message(error)
        self.probe_at = time.monotonic() + varied(lengths[min(self._rests, len(lengths) - 1)])
        self._rests += 1


def varied(seconds: float) -> float:
    """As long, give or take a fifth: a fleet that was refused at one moment does not come back at one moment."""
    return seconds * _chance.uniform(1 - _JITTER, 1 + _JITTER)


def shortened(seconds: float) -> float:
    """At most as long, and up to a tenth less: a fleet that was started at one moment gets out of step, and nobody
    waits longer than was promised."""
    return seconds * _chance.uniform(1 - _SOONER, 1)
