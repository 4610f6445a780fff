# SPDX-License-Identifier: Apache-2.0
"""Events in the tiers: counted, and reported as lines for the log."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from lmcache_ec.histogram import NS
from lmcache_ec.tally import Tally

Report = Callable[[str, str], None]
"""Takes the kind of an event, by which its lines are rate-limited, and one line of text. From any thread."""


_ERRORS = ("read", "write", "corrupt", "delete", "copy", "scan", "open")
"""The kinds of reports that concern failures."""


class Times(NamedTuple):
    """How many calls took how long in total."""

    calls: int = 0
    seconds: float = 0.0


class LastError(NamedTuple):
    """When something last failed (Unix), and what."""

    at: float
    text: str


class Journal:
    """Counts of everything, and reports of what deserves a log line. Any thread may call it.

    Both are named after the tier: `redis_hits` is a count, `redis-read` a report.
    """

    def __init__(self, report: Report) -> None:
        self.counts: Counter[str] = Counter()
        self.times: dict[str, Times] = {}
        self._report = report
        self._errors: dict[str, LastError] = {}
        self._tally: Tally | None = None
        self._lock = threading.Lock()

    def share(self, tally: Tally) -> None:
        """From now on every process that maps the tally sees these counts, as far as it keeps them."""
        with self._lock:
            self._tally = tally
            for name, number in self.counts.items():
                tally.add(name, number)

    def count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self.counts[name] += number
            if self._tally is not None:
                self._tally.add(name, number)

    def took(self, name: str, seconds: float) -> None:
        """Something, such as `redis_read_ns`, took `seconds`. Only the tally keeps histograms."""
        with self._lock:
            calls, total_s = self.times.get(name, Times())
            self.times[name] = Times(calls + 1, total_s + seconds)
            if self._tally is not None:
                self._tally.observe(name, int(seconds * NS))

    def report(self, kind: str, text: str) -> None:
        self._errors[kind] = LastError(time.time(), text)
        self._report(kind, text)

    def last_error(self, tier: str) -> LastError | None:
        """The last reported error of a tier."""
        return max((found for kind in _ERRORS if (found := self._errors.get(f"{tier}-{kind}"))), default=None)
