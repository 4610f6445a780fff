# SPDX-License-Identifier: Apache-2.0
"""What happens in the tiers: counted, and a line for whoever keeps the log."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

Report = Callable[[str, str], None]
"""Takes the kind of an event, by which its lines are rate-limited, and one line of text. From any thread."""


class Journal:
    """Counts of everything, and reports of what deserves a line. Any thread may call it.

    Both are named after the tier: `redis_hits` counts, `redis-read` is reported.
    """

    def __init__(self, report: Report) -> None:
        self.counts: Counter[str] = Counter()
        self.report = report
        self._lock = threading.Lock()

    def count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self.counts[name] += number
