# SPDX-License-Identifier: Apache-2.0
"""The metrics in vLLM's front ends: payloads from engines (`collector.py`) go into vLLM's /metrics and its log."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats
from vllm.logger import init_logger

from .metric_table import METRICS, PREFIX, Kind, Metric

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.lmcache_ec")

_registered: list[Any] = []
"""This process's, for its last engine: a second one would find the names taken (vLLM unregisters only its own)."""


class Stats(ECConnectorStats):
    """The payloads of one or more engines since the last log line."""

    @classmethod
    def of(cls, payload: dict[str, Any]) -> Stats:
        """From a payload, which is not modified: vLLM's other loggers get the same one."""
        return cls({part: dict(values) for part, values in payload.items()})

    def aggregate(self, other: ECConnectorStats) -> ECConnectorStats:
        for key, new in other.data.get("counters", {}).items():
            counters = self.data.setdefault("counters", {})
            counters[key] = counters.get(key, 0) + new
        for key, new in other.data.get("histograms", {}).items():
            histograms = self.data.setdefault("histograms", {})
            known = histograms.get(key, [0] * len(new))
            histograms[key] = [before + more for before, more in zip(known, new, strict=True)]
        self.data["gauges"] = {**self.data.get("gauges", {}), **other.data.get("gauges", {})}
        return self

    def reset(self) -> None:
        self.data.clear()

    def is_empty(self) -> bool:
        """Whether there is nothing to log: gauges alone do not count."""
        return not (any(self.data.get("counters", {}).values()) or self.data.get("histograms"))

    def reduce(self) -> dict[str, int | float]:
        """The figures for one log line per interval."""
        hits, misses = self._sum("hits_total"), self._sum("misses_total")
        waits = self.data.get("histograms", {}).get("deferred_seconds", [])
        return {
            "Hit rate (%)": round(100 * hits / (hits + misses), 1) if hits + misses else 0.0,
            "Loaded": hits,
            "Loaded (MB)": round(self._sum("loaded_bytes_total") / 1e6, 1),
            "Encoded": misses,
            "Saved": self._sum("saves_total"),
            "Saved (MB)": round(self._sum("saved_bytes_total") / 1e6, 1),
            "Deferred (s)": round(sum(waits[1::2]) / 1e9, 3),
            "Dropped": self._sum("saves_dropped_total") + self._sum("tier_writes_dropped_total"),
            "Errors": sum(
                self._sum(f"tier_{what}_total") for what in ("read_errors", "write_errors", "corrupt", "forged")
            )
            + self._sum("load_failures_total"),
        }

    def _sum(self, name: str) -> int:
        return sum(n for key, n in self.data.get("counters", {}).items() if key.partition("|")[0] == name)


class PromMetrics(ECConnectorPromMetrics):
    """Registers every metric in a front end's process, and adds each engine's payloads to them.

    Uses only those parts of Prometheus' client that vLLM's wrappers for Ray also have.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _unregister()
        make: dict[Kind, Callable[..., Any]] = {
            Kind.COUNTER: metric_types[Counter],
            Kind.GAUGE: metric_types[Gauge],
            Kind.HISTOGRAM: metric_types[Histogram],
        }
        self._metrics: dict[str, tuple[Metric, Any]] = {}
        self._series: dict[tuple[str, int], Any] = {}
        self._failed = False
        for metric in METRICS:
            more: dict[str, Any] = {}
            if metric.kind is Kind.GAUGE:
                more["multiprocess_mode"] = "mostrecent"
            elif metric.kind is Kind.HISTOGRAM:
                more["buckets"] = [bound / metric.unit for bound in metric.bounds]
            made = make[metric.kind](
                name=PREFIX + metric.name,
                documentation=f"{metric.help}.",
                labelnames=[*labelnames, *metric.labels],
                **more,
            )
            _registered.append(made)
            self._metrics[metric.name] = metric, made
        self._begin_at_zero(_tiers(vllm_config))

    def _begin_at_zero(self, tiers: list[str]) -> None:
        """Create all series known to exist before anything is counted: to Prometheus, a series that first appears with
        a value has not increased."""
        for metric in METRICS:
            if metric.kind is not Kind.GAUGE:
                for labels, _ in metric.sources(tiers, ()):
                    for engine in self.per_engine_labelvalues:
                        self._child("|".join((metric.name, *labels)), engine)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        try:
            self._observe(transfer_stats_data, engine_idx)
        except Exception:
            if not self._failed:
                logger.exception(
                    "encoder cache: metrics of engine %d are lost; later losses are not logged", engine_idx
                )
            self._failed = True

    def _observe(self, data: dict[str, Any], engine: int) -> None:
        for key, new in data["counters"].items():
            self._child(key, engine).inc(new / self._metric(key).unit)
        for key, value in data["gauges"].items():
            self._child(key, engine).set(value)
        for key, counts in data["histograms"].items():
            child, unit = self._child(key, engine), self._metric(key).unit
            bounds = self._metric(key).bounds
            for bucket, (number, total) in enumerate(zip(counts[::2], counts[1::2], strict=True)):
                for _ in range(number):
                    child.observe(min([total / number, *bounds[bucket : bucket + 1]]) / unit)

    def _metric(self, key: str) -> Metric:
        return self._metrics[key.partition("|")[0]][0]

    def _child(self, key: str, engine: int) -> Any:
        child = self._series.get((key, engine))
        if child is None:
            name, *labels = key.split("|")
            child = self._metrics[name][1].labels(*self.per_engine_labelvalues[engine], *labels)
            self._series[key, engine] = child
        return child


def _tiers(vllm_config: VllmConfig) -> list[str]:
    """The tiers in the configuration; none if it is invalid, which the engine itself reports."""
    from lmcache_ec.config import ConfigError, load_config
    from lmcache_ec.tiers.kinds import kind_of
    from lmcache_ec.tiers.lane import lane_names

    try:
        config = load_config(vllm_config.ec_transfer_config.ec_connector_extra_config)
    except ConfigError:
        return []
    disk = ["disk"] if config.local_disk else []
    return lane_names([*disk, *(kind_of(url).name for url in config.remotes)])


def _unregister() -> None:
    for metric in _registered:
        try:
            REGISTRY.unregister(metric)
        except (KeyError, AttributeError):
            pass  # its registry was replaced, or is not one of Prometheus' own
    _registered.clear()
