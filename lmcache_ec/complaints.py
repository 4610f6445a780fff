# SPDX-License-Identifier: Apache-2.0
"""Rate-limited log lines about faults: repeated lines of a kind are counted and logged once in a while."""

from __future__ import annotations

import logging
import time

_INTERVAL_S = 60.0


class Complaints:
    """One log line per kind and minute. Each instance belongs to one thread.

    A kind is `<topic>-<what>`, or a topic alone. Withheld lines are not lost: the last line of a topic is logged once
    its minute is over (`report_withheld`), so that the log never ends on an outdated state.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._silent_until: dict[str, float] = {}
        self._withheld: dict[str, tuple[str, str, int]] = {}  # topic -> kind and text of the last line, how many

    def warn(self, kind: str, text: str) -> None:
        topic = kind.rpartition("-")[0] or kind
        _, _, withheld = self._withheld.pop(topic, ("", "", 0))
        if time.monotonic() < self._silent_until.get(kind, 0.0):
            self._withheld[topic] = (kind, text, withheld + 1)
        else:
            self._log(kind, text, withheld)

    def report_withheld(self) -> None:
        """Log lines that have been withheld long enough. Call now and then; costs nothing if none were withheld."""
        for topic, (kind, text, withheld) in list(self._withheld.items()):
            if time.monotonic() >= self._silent_until[kind]:
                del self._withheld[topic]
                self._log(kind, text, withheld - 1)

    def _log(self, kind: str, text: str, withheld: int) -> None:
        self._silent_until[kind] = time.monotonic() + _INTERVAL_S
        more = f" ({withheld} more line{'' if withheld == 1 else 's'} of this kind since the last)" if withheld else ""
        self._logger.warning("encoder cache: %s%s", text, more)
