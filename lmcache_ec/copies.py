# SPDX-License-Identifier: Apache-2.0
"""How much time of a rank's forward passes the copies between the arena and its device have taken."""

from __future__ import annotations

from lmcache_ec.histogram import LATENCY_NS, Histogram


class CopyTimes:
    """The copy times of one rank, as reported step by step. Runs on the scheduler's thread."""

    def __init__(self) -> None:
        self._loads = Histogram("step_load_ns", LATENCY_NS)
        self._saves = Histogram("step_save_ns", LATENCY_NS)

    def add(self, load_ns: int, save_ns: int) -> None:
        if load_ns:
            self._loads.add(load_ns)
        if save_ns:
            self._saves.add(save_ns)

    def counts(self) -> dict[str, int]:
        return {**dict(self._loads.counts()), **dict(self._saves.counts())}
