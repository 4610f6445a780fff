# SPDX-License-Identifier: Apache-2.0
"""The tiers that the storage plugin stores in, in the order in which they are asked."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial

from lmcache.logging import init_logger

from lmcache_ec.complaints import Complaints
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.lane import NEVER, Habits, Lane, Lookup
from lmcache_ec.presence import PresenceWriter
from lmcache_ec.tiers.base import Tier, TierAway
from lmcache_ec.tiers.disk import DiskTier
from lmcache_ec.tiers.remote import AwaitedTier, lane_names, open_remote, tier_name

from .settings import GIB, PluginSettings, remote_options

_KNOWN_LENGTHS = 8192
_DISK_RESCAN_S = 600.0
_TICK_S = 1.0

_logger = init_logger(__name__)


class Tiers:
    """Lanes, what is counted of them, and a thread that has them listed. ValueError for one that cannot be used.

    Any thread may call it. `_lock` guards the numbers, and `_complaining` the log; neither is held across other I/O.
    """

    def __init__(self, settings: PluginSettings, extra_config: Mapping[str, object], namespace: str) -> None:
        self.namespace = namespace
        self.counts: Counter[str] = Counter()
        self.lanes = _open_lanes(settings, extra_config)
        self._lock, self._complaining = threading.Lock(), threading.Lock()
        self._complaints = Complaints(_logger)
        self._lengths: OrderedDict[EncoderCacheKey, int] = OrderedDict()  # of entries lately found
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep_house, name="entry-tiers", daemon=True)
        self._keeper.start()

    def hold(self, key: EncoderCacheKey) -> bool:
        """Whether one of them has the entry, as far as they can be asked."""
        for lane in self.lanes:
            if not lane.asks(key.digest):
                continue
            try:
                length = self._ask(lane, key)
            except Exception as error:
                self.complain(f"{lane.name}_read_errors", f"{lane.name}: {error}")
                lane.failed()
                continue
            if length is not None:
                with self._lock:
                    self._lengths[key] = length
                    if len(self._lengths) > _KNOWN_LENGTHS:
                        self._lengths.popitem(last=False)
                return True
        return False

    def length(self, lane: Lane, key: EncoderCacheKey) -> int | None:
        """The length of an entry, in bytes: of one that was just found by `hold`, as it was then, and of others as
        the tier says. Raises what the tier raises."""
        with self._lock:
            known = self._lengths.pop(key, None)
        return known or self._ask(lane, key)

    def delete(self, lane: Lane, key: EncoderCacheKey) -> None:
        try:
            lane.tier.delete(key)
        except Exception as error:
            self.complain(f"{lane.name}_delete_errors", f"{lane.name}: {error}")
            lane.failed()

    def count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def complain(self, kind: str, text: str) -> None:
        """Count it, and log a line of this kind once in a while."""
        self.count(kind)
        if not self._closing.is_set():
            with self._complaining:
                self._complaints.warn(kind, f"storage plugin: {text}")

    def close(self) -> None:
        """Let go of the tiers. What is still under way fails, or ends with the process."""
        self._closing.set()
        self._keeper.join()
        for lane in self.lanes:
            for pool in (lane.reads, lane.writes, lane.scans):
                pool.shutdown(wait=False, cancel_futures=True)
            lane.tier.close()

    def _ask(self, lane: Lane, key: EncoderCacheKey) -> int | None:
        began = time.monotonic()
        length = lane.tier.contains(key)
        lane.answered(time.monotonic() - began)
        return length

    def _keep_house(self) -> None:
        """Have the lanes listed that are due for it, on threads of theirs."""
        while not self._closing.is_set():
            for lane in self.lanes:
                if lane.due_at <= time.monotonic():
                    lane.due_at = NEVER
                    lane.scans.submit(self._survey, lane)
            self._closing.wait(_TICK_S)

    def _survey(self, lane: Lane) -> None:
        try:
            lane.survey(self.namespace)
        except Exception as error:
            self.complain(f"{lane.name}_survey_errors", f"{lane.name}: {error}")


def _open_lanes(settings: PluginSettings, extra_config: Mapping[str, object]) -> Sequence[Lane]:
    """The tiers in order. A remote that is merely away is tried again later."""
    tiers: list[tuple[Tier, Habits]] = []
    if settings.local_disk is not None:
        size, free = int(settings.max_local_disk_size * GIB), int(settings.min_free_disk_size * GIB)
        tiers.append((DiskTier(settings.local_disk, size, free), Habits(Lookup.CATALOG, _DISK_RESCAN_S, local=True)))
    options = remote_options(settings, extra_config)
    for url in settings.remotes:
        name = tier_name(url)
        lookup = Lookup.CATALOG if (name, settings.remote_lookup) == ("s3", "auto") else Lookup(settings.remote_lookup)
        opener = partial(open_remote, url, options)
        try:
            tier = opener()
        except TierAway as error:
            _logger.warning("storage plugin: %s; tried again in the background", error.strerror)
            tier = AwaitedTier(name, opener)
        tiers.append((tier, Habits(lookup, settings.catalog_refresh_s)))
    names = lane_names([tier.name for tier, _ in tiers])
    presence = PresenceWriter.create(names)
    os.close(presence.fd)  # nobody else is to map it
    lanes = [Lane(tier, name, presence, habits) for (tier, habits), name in zip(tiers, names, strict=True)]
    for lane in lanes:
        if lane.tier.notice:
            _logger.warning("storage plugin: %s", lane.tier.notice)
        if isinstance(lane.tier, AwaitedTier):
            lane.failed()
    return lanes
