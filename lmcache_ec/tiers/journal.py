# SPDX-License-Identifier: Apache-2.0
"""What happens in the tiers: counted, and a line for whoever keeps the log."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from lmcache_ec.histogram import NS
from lmcache_ec.tally import Tally

Report = Callable[[str, str], None]
"""Takes the kind of an event, by which its lines are rate-limited, and one line of text. From any thread."""


class Journal:
    """Counts of everything, and reports of what deserves a line. Any thread may call it.

    Both are named after the tier: `redis_hits` counts, `redis-read` is reported.
    """

    def __init__(self, report: Report) -> None:
        self.counts: Counter[str] = Counter()
        self.report = report
        self._tally: Tally | None = None
        self._lock = threading.Lock()

    def share(self, tally: Tally) -> None:
        """From now on whoever maps the tally sees these counts, as far as it keeps them."""
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
        """Something, `redis_read_ns`, took so long: for a histogram, which only a tally keeps."""
        with self._lock:
            if self._tally is not None:
                self._tally.observe(name, int(seconds * NS))
