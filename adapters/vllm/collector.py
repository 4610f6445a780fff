# SPDX-License-Identifier: Apache-2.0
"""The scheduler side's counts, handed to vLLM after a step, at most once a second.

vLLM (v1/core/sched/scheduler.py, `update_from_output`) asks after each step and sends the result to one of its front
ends, any that is due a response to a request. So counts are handed over as differences: each is added once, wherever it
arrives, and Prometheus' client sums over the front ends. Gauges are absolute values; the last one wins.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple

from lmcache_ec.histogram import names_of

from .metric_table import FIXED, METRICS, Kind, Metric

if TYPE_CHECKING:
    from .scheduler import SchedulerSide

_INTERVAL_S = 1.0

Payload = dict[str, dict[str, int] | dict[str, list[int]]]
"""`counters`, `histograms` (differences since the last payload), `gauges`: each value by "metric|label|label"."""


class _Source(NamedTuple):
    """A series, and the counts that make it up."""

    key: str
    counts: list[str]


class Collector:
    """One per scheduler side. Runs on the scheduler's thread: no I/O, no lock, no JSON; it only reads the clock unless
    a second has passed or the last request has ended."""

    def __init__(self, side: SchedulerSide, logger: logging.Logger) -> None:
        self._side = side
        self._logger = logger
        self._due_at = 0.0
        self._known: tuple[tuple[str, ...], int] | None = None  # tiers, number of modalities
        self._sources: dict[Kind, list[_Source]] = {}
        self._states: list[tuple[str, str, int]] = []  # series, count, the count's value for this state
        self._handed: dict[str, int] = {}
        self._gauges: dict[str, int] = {}

    def collect(self) -> Payload | None:
        """What is new since the last payload; None: too early, or nothing is new. Never raises."""
        now, decisions = time.monotonic(), self._side.decisions
        if now < self._due_at and not decisions.ended:
            return None
        self._due_at, decisions.ended = now + _INTERVAL_S, False
        try:
            return self._collect()
        except Exception:
            self._due_at = float("inf")
            self._logger.exception("encoder cache: metrics cannot be collected, and will not be from now on")
            return None

    def _collect(self) -> Payload | None:
        cache = self._side.cache
        tiers, modalities = tuple(cache.tallies.tiers), self._side.decisions.modalities
        unheard = self._known != (tiers, len(modalities))
        if unheard:
            self._known = tiers, len(modalities)
            self._resolve(tiers, modalities)
        counts = self._side.measures()
        counters = {  # a series begins at zero
            source.key: new
            for source in self._sources[Kind.COUNTER]
            if (new := self._new(counts, source.counts[0])) or unheard
        }
        histograms = {}
        for source in self._sources[Kind.HISTOGRAM]:
            new_counts = [self._new(counts, name) for name in source.counts]
            if any(new_counts):
                histograms[source.key] = new_counts
        gauges = {
            source.key: value
            for source in self._sources[Kind.GAUGE]
            if (value := counts.get(source.counts[0], -1)) >= 0
        }
        gauges |= {key: int(counts[name] == state) for key, name, state in self._states if name in counts}
        self._handed = counts
        if not (counters or histograms) and gauges == self._gauges:
            return None
        self._gauges = gauges
        return {"counters": counters, "histograms": histograms, "gauges": gauges}

    def _new(self, counts: dict[str, int], name: str) -> int:
        return max(0, counts.get(name, 0) - self._handed.get(name, 0))

    def _resolve(self, tiers: tuple[str, ...], modalities: list[str]) -> None:
        """Determine the series, now that the tiers and the modalities are known."""
        self._sources = {kind: [] for kind in Kind}
        self._states = []
        for metric in METRICS:
            for labels, count in metric.sources(tiers, modalities):
                key = "|".join((metric.name, *labels))
                if metric.state:
                    self._states += [(f"{key}|{state}", count, i) for i, state in enumerate(FIXED[metric.state])]
                else:
                    self._sources[metric.kind].append(_Source(key, _counts(metric, count)))


def _counts(metric: Metric, count: str) -> list[str]:
    return names_of(count, metric.bounds) if metric.kind is Kind.HISTOGRAM else [count]
