# SPDX-License-Identifier: Apache-2.0
"""Faults are counted; a line about one kind of them is logged once in a while."""

from __future__ import annotations

import logging
import time

_INTERVAL_S = 60.0


class Complaints:
    """One log line a kind and minute. Each instance belongs to one thread."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._silent_until: dict[str, float] = {}
        self._withheld: dict[str, int] = {}

    def warn(self, kind: str, text: str) -> None:
        now = time.monotonic()
        if now < self._silent_until.get(kind, 0.0):
            self._withheld[kind] = self._withheld.get(kind, 0) + 1
            return
        self._silent_until[kind] = now + _INTERVAL_S
        withheld = self._withheld.pop(kind, 0)
        more = f" ({withheld} more of this kind since the last such line)" if withheld else ""
        self._logger.warning("encoder cache: %s%s", text, more)
