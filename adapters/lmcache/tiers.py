# SPDX-License-Identifier: Apache-2.0
"""The tiers that the storage plugin stores in, as LMCache asks for them."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping

from lmcache.logging import init_logger

from lmcache_ec.complaints import Complaints
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.sizes import GIB
from lmcache_ec.tiers.journal import Journal
from lmcache_ec.tiers.opening import Opening, opened
from lmcache_ec.tiers.stack import Stack

from .settings import PluginSettings, remote_tiers

_KNOWN_LENGTHS = 8192
_DISK_RESCAN_S = 600.0
_TICK_S = 1.0

_logger = init_logger(__name__)


class Tiers:
    """The stack of tiers, its log, and a thread that has it surveyed. ValueError for a tier that cannot be used.

    Any thread may call it. `_lock` guards the lengths, and `_complaining` the log; neither is held across other I/O.
    """

    def __init__(self, settings: PluginSettings, extra_config: Mapping[str, object], namespace: str) -> None:
        self.journal = Journal(self._report)
        self._lock, self._complaining = threading.Lock(), threading.Lock()
        self._complaints = Complaints(_logger)
        self._lengths: OrderedDict[EncoderCacheKey, int] = OrderedDict()  # of entries lately found
        self._closing = threading.Event()
        openings: list[Opening] = []
        if settings.local_disk is not None:
            size, free = int(settings.max_local_disk_size * GIB), int(settings.min_free_disk_size * GIB)
            openings.append(Opening.of_disk(settings.local_disk, size, free, _DISK_RESCAN_S))
        openings += map(Opening.of_remote, remote_tiers(settings, extra_config))
        tiers = opened(openings, self._report, _refuse)
        copied_bytes = int(settings.max_pending_size * GIB) // 2
        self.stack = Stack(tiers, self.journal, namespace, copied_bytes=copied_bytes)
        os.close(self.stack.presence.fd)  # nobody else is to map it
        self._keeper = threading.Thread(target=self._keep_house, name="entry-tiers", daemon=True)
        self._keeper.start()

    def hold(self, key: EncoderCacheKey) -> bool:
        """Whether one of them has the entry, as far as they can be asked."""
        number = self.stack.worth_asking(key)
        while number is not None:
            (length,) = self.stack.lengths(number, [key])
            if length is not None:
                with self._lock:
                    self._lengths[key] = length
                    if len(self._lengths) > _KNOWN_LENGTHS:
                        self._lengths.popitem(last=False)
                return True
            number = self.stack.worth_asking(key, number + 1)
        return False

    def length(self, number: int, key: EncoderCacheKey) -> int | None:
        """The length of an entry, in bytes: of one that was just found by `hold`, as it was then, and of others as
        the tier says; None if it has none, or cannot say."""
        with self._lock:
            known = self._lengths.pop(key, None)
        return known or self.stack.lengths(number, [key])[0]

    def complain(self, kind: str, text: str) -> None:
        """Count it, and log a line of this kind once in a while."""
        self.journal.count(kind)
        self._report(kind, text)

    def close(self) -> None:
        """Let go of the tiers. What is still under way fails, or ends with the process."""
        self._closing.set()
        self._keeper.join()
        self.stack.close()

    def _report(self, kind: str, text: str) -> None:
        if not self._closing.is_set():
            with self._complaining:
                self._complaints.warn(kind, f"storage plugin: {text}")

    def _keep_house(self) -> None:
        """Have the tiers surveyed that are due for it."""
        while not self._closing.is_set():
            self.stack.survey_due()
            self._closing.wait(_TICK_S)


def _refuse(problem: str) -> None:
    raise ValueError(f"storage plugin: {problem}")
