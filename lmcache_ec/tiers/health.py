# SPDX-License-Identifier: Apache-2.0
"""Whether a tier is asked to read, and whether it is asked to write: the health of each is tracked separately.

Only errors that mean the *tier* cannot be used count (`TierUnreachable`, `WritesRefused`); those about one entry do
not. Any success ends a rest.

- *Reads* pause at the first such failure, so that no caller waits for a store that may be dead, and a probe is sent at
  once: it tries a few times in a row, and one answer ends the pause, within milliseconds if the failure concerned only
  one request. Without an answer the tier rests, longer each time, and each rest ends with one probe.
- *Writes* rest after a few failures in a row. A rest ends with one probe, if the tier has one that changes nothing;
  then writes are sent one at a time until one succeeds, and one that fails begins a longer rest. A store that refuses
  them twice is *read only*: it is probed less often, and still serves reads.
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
        """When to probe the tier (monotonic seconds)."""
        self._rests = 0
        self._failed_at = 0.0

    @property
    def rests(self) -> bool:
        """Whether a probe has gone unanswered, too."""
        return self.paused and self._rests > 0

    def failed(self, error: Exception) -> bool:
        """A read failed. Whether reads pause from now on."""
        if self.paused or not isinstance(error, TierUnreachable):
            return False
        self.paused, self._failed_at = True, time.monotonic()
        self.probe_at = self._failed_at
        return True

    def probe_failed(self) -> None:
        self.probe_at = time.monotonic() + varied(_REST_S[min(self._rests, len(_REST_S) - 1)])
        self._rests += 1

    def succeeded(self) -> float:
        """There was an answer. For how many seconds the tier had been resting, 0 if it was not."""
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
        """When to test whether the tier takes writes (monotonic seconds)."""
        self._in_a_row = 0
        self._rests = 0

    @property
    def on_trial(self) -> bool:
        """Whether it has rested, and no write has succeeded since."""
        return self._rests > 0 and not self.rests

    def failed(self, error: Exception) -> None:
        """A write failed."""
        if self.rests or not isinstance(error, (TierUnreachable, WritesRefused)):
            return
        self._in_a_row += 1
        if self._in_a_row >= _WRITE_FAILURES:
            self._rest(error)
        elif isinstance(error, WritesRefused):
            self.probe_at = time.monotonic()  # was only this entry refused, or would any be?

    def probe_failed(self, error: TierError) -> None:
        """As `failed`, for a probe: a single failure is enough."""
        self._rest(error)

    def probe_passed(self, certain: bool) -> None:
        """Writes may resume, perhaps only as a trial. The next one that fails begins a longer rest."""
        if self.rests:
            self._in_a_row = _WRITE_FAILURES - 1
        self.rests, self.probe_at = False, NEVER
        if certain:
            self.refusal = ""

    def succeeded(self) -> bool:
        """A write succeeded. Whether the store had been resting, or was read only."""
        ended = self._rests > 0
        self.rests, self.probe_at, self.refusal = False, NEVER, ""
        self._in_a_row = self._rests = 0
        return ended

    def _rest(self, error: Exception) -> None:
        refused = isinstance(error, WritesRefused)
        lengths = _READ_ONLY_S if refused else _REST_S
        self.rests = True
        if refused and self._rests:  # the first time it may have been full only for a moment
            self.refusal = message(error)
        self.probe_at = time.monotonic() + varied(lengths[min(self._rests, len(lengths) - 1)])
        self._rests += 1


def varied(seconds: float) -> float:
    """`seconds`, plus or minus a fifth: replicas that were refused at the same moment do not return at the same one."""
    return seconds * _chance.uniform(1 - _JITTER, 1 + _JITTER)


def shortened(seconds: float) -> float:
    """`seconds`, or up to a tenth less: replicas that were started at the same moment get out of step, and the
    documented time is never exceeded."""
    return seconds * _chance.uniform(1 - _SOONER, 1)
