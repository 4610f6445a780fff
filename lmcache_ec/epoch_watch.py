# SPDX-License-Identifier: Apache-2.0
"""Follows the epoch of an engine's folder, which an operator may raise while the engine runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from lmcache_ec.tiers.base import Tier
from lmcache_ec.tiers.disk_epoch import EpochError, read_epoch
from lmcache_ec.tiers.journal import Report

_LOOK_S = 1.0


class EpochWatch:
    """Checks once a second, in the store process, on its own thread: a folder that hangs blocks nothing else.

    The epoch never falls: a missing or unreadable file, or a lower epoch in it, has no effect until the next start.
    """

    def __init__(self, folder: Path, epoch: int, begun: Callable[[int], None], report: Report) -> None:
        """`epoch` is the engine's current one. `begun` is called with each later one, on the thread."""
        self._epoch = self._reported = epoch
        self._folder = folder
        self._begun = begun
        self._report = report
        self._problem = ""

    def opening(self, tier: Callable[[], Tier], strict: bool) -> Tier:
        """Open the folder's tier and check for the first time. ValueError if `strict` and the file holds no epoch."""
        opened = tier()
        if strict:
            self._epoch = max(self._epoch, read_epoch(self._folder))
        else:
            self._look()
        return opened

    def start(self) -> int:
        """Start checking periodically. Returns the epoch known so far."""
        self._reported = self._epoch
        threading.Thread(target=self._watch, name="epoch", daemon=True).start()
        return self._reported

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            self._look()
            if self._epoch > self._reported:
                self._reported = self._epoch
                self._begun(self._reported)

    def _look(self) -> None:
        problem = ""
        try:
            self._epoch = max(self._epoch, read_epoch(self._folder))
        except EpochError as error:
            problem = str(error)
        if problem and problem != self._problem:
            self._report("epoch", f"{problem}. This engine stays in epoch {self._epoch}")
        self._problem = problem
