# SPDX-License-Identifier: Apache-2.0
"""From counts to metrics: differences that add up, gauges, names that Prometheus accepts."""

import re
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.registry import REGISTRY
from prometheus_client.utils import floatToGoString

from benchmarks.testbed.models import ROOT
from lmcache_ec.adapters.vllm.collector import Collector
from lmcache_ec.adapters.vllm.decisions import MISS_REASONS, Decisions
from lmcache_ec.adapters.vllm.metric_table import METRICS, Kind, markdown
from lmcache_ec.adapters.vllm.metrics import PromMetrics, Stats
from lmcache_ec.histogram import LATENCY_NS, SIZE_BYTES
from lmcache_ec.histogram import Histogram as Buckets
from lmcache_ec.tally import Tallies, Tally


class Side:
    """A scheduler side whose counts the test sets."""

    def __init__(self) -> None:
        self.decisions = Decisions()
        self.counts: dict[str, int] = {}
        self.cache = SimpleNamespace(tallies=Tallies())
        self.cache.tallies.tiers = ["disk", "s3", "s3_2"]

    def measures(self) -> dict[str, int]:
        return {**self.counts, **self.decisions.counts()}


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def collector(side: Side) -> Collector:
    return Collector(side, SimpleNamespace(exception=lambda *_: pytest.fail("it failed")))  # type: ignore[arg-type]


def prom(engines: int = 1) -> PromMetrics:
    types: dict[Any, Any] = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    keys = {"local_disk": "/d", "remotes": ["s3://bucket/a?region=x", "s3://bucket/b?region=x"]}
    config: Any = SimpleNamespace(ec_transfer_config=SimpleNamespace(ec_connector_extra_config=keys))
    return PromMetrics(config, types, ["model_name", "engine"], {i: ["m", str(i)] for i in range(engines)})


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"lmcache_ec_{name}", {"model_name": "m", "engine": "0", **labels})


def test_names_and_labels_follow_the_conventions() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert set(metric.labels) <= {"tier", "reason", "modality", "result", "state", "kind", "decision"}
        if metric.kind is Kind.HISTOGRAM:
            assert metric.name.endswith(("_seconds", "_bytes"))
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_payloads_add_up_to_the_counts_whichever_front_end_gets_them(clock: Clock) -> None:
    side = Side()
    handing, proms = collector(side), prom()
    for counted in range(1, 4):
        side.counts = {"saves": counted, "disk_hits": 10 * counted, "loads_s3_2": counted, "capacity_bytes": counted}
        side.decisions.encoded("image", "new")
        side.decisions.waited(0.02 * counted)
        clock.now += 1.0
        payload = handing.collect()
        assert payload is not None
        proms.observe(msgspec.msgpack.decode(msgspec.msgpack.encode(payload)), 0)
    assert value("saves_total") == 3
    assert value("tier_hits_total", tier="disk") == 30
    assert value("hits_total", tier="s3_2") == 3
    assert value("lookups_total", modality="image", result="miss") == 3
    assert value("misses_total", reason="new") == 3
    assert value("memory_limit_bytes") == 3
    assert value("deferred_seconds_count") == 3
    assert value("deferred_seconds_sum") == pytest.approx(0.12)
    assert value("deferred_seconds_bucket", le="0.025") == 1


def test_counts_are_handed_over_once_a_second_and_as_soon_as_the_last_request_has_ended(clock: Clock) -> None:
    side = Side()
    handing = collector(side)
    side.counts["saves"] = 1
    assert handing.collect() is not None
    side.counts["saves"] = 2
    clock.now += 0.9
    assert handing.collect() is None
    side.decisions.ended = True
    assert handing.collect() is not None
    clock.now += 1.1
    assert handing.collect() is None  # nothing is new
    side.counts["saves"] = 3
    clock.now += 1.1
    assert handing.collect() == {"counters": {"saves_total": 1}, "histograms": {}, "gauges": {}}


def test_a_series_begins_at_zero(clock: Clock) -> None:
    """Otherwise its first increase is lost: to Prometheus, a series that appears with a value has not changed."""
    proms = prom(2)
    for reason in MISS_REASONS:
        assert value("misses_total", reason=reason) == 0
    assert value("store_restarts_total") == value("deferred_seconds_count") == 0
    assert value("tier_read_seconds_count", tier="s3_2") == 0
    payload = collector(Side()).collect()
    assert payload is not None
    proms.observe(payload)
    assert value("tier_corrupt_total", tier="s3") == value("hits_total", tier="cpu") == 0
    assert value("tier_hits_total", tier="cpu") is None


def test_a_failure_costs_metrics_and_nothing_else(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    side, logged = Side(), list[str]()
    handing = Collector(side, SimpleNamespace(exception=logged.append))  # type: ignore[arg-type]
    side.cache = None  # type: ignore[assignment]
    assert [handing.collect() for _ in range(3)] == [None] * 3
    assert len(logged) == 1
    prom().observe({"counters": {"unheard_of": 1}}, 0)


def test_a_second_engine_in_a_process_registers_its_metrics_again() -> None:
    prom()
    prom()


def test_the_tally_of_an_ended_process_is_kept_and_its_gauges_are_not() -> None:
    tallies = Tallies()
    for number, writes in ((1, 3), (2, 4)):
        fd = Tally.memory()
        tally = Tally(fd, ["disk"], write=True)
        tallies.adopt(number, fd, ["disk"])
        tally.add("disk_writes", writes)
        tally.set("jobs", number)
        tally.observe("disk_read_ns", LATENCY_NS[0])
        assert tallies.totals()["jobs"] == number
    assert tallies.totals()["disk_writes"] == 7
    tally.add("disk_writes", 10)
    tallies.ended(2)
    assert tallies.totals()["disk_writes"] == 17
    assert tallies.totals()["jobs"] == 1
    tallies.ended(1)
    assert tallies.totals()["disk_writes"] == 17
    assert tallies.totals()["disk_read_ns_n0"] == 2
    assert tallies.tiers == ["disk"]


def test_a_value_on_a_bound_belongs_to_the_bucket_that_it_closes() -> None:
    """As in Prometheus, even if each bucket's mean is observed instead."""
    buckets, proms = Buckets("save_bytes", SIZE_BYTES), prom()
    for size in (*SIZE_BYTES, SIZE_BYTES[0], SIZE_BYTES[-1] + 1):
        buckets.add(size)
    counts = [count for _, count in buckets.counts()]
    proms.observe({"counters": {}, "gauges": {}, "histograms": {"save_size_bytes": counts}})
    assert value("save_size_bytes_bucket", le=floatToGoString(SIZE_BYTES[0])) == 2
    assert value("save_size_bytes_bucket", le=floatToGoString(SIZE_BYTES[-1])) == len(SIZE_BYTES) + 1
    assert value("save_size_bytes_sum") == sum(SIZE_BYTES) + SIZE_BYTES[0] + SIZE_BYTES[-1] + 1


def test_the_line_in_the_log_adds_up_engines_and_payloads(clock: Clock) -> None:
    stats, first = Stats(), Stats()
    assert stats.is_empty()
    for number in range(2):
        side = Side()
        side.counts = {"loads_disk": 3, "saves": 1, "saved_bytes": 2_000_000, "disk_corrupt": 1}
        side.decisions.encoded("image", "new")
        payload = collector(side).collect()
        assert payload is not None
        first = first if number else Stats.of(payload)
        before = msgspec.msgpack.encode(payload)
        stats = stats.aggregate(Stats.of(payload))
        assert number == 0 or first.aggregate(Stats.of(payload)).reduce() == stats.reduce()
        assert msgspec.msgpack.encode(payload) == before  # vLLM gives it to several loggers
    assert not stats.is_empty()
    line = stats.reduce()
    assert line["Hit rate (%)"] == 75.0
    assert (line["Loaded"], line["Encoded"], line["Saved (MB)"], line["Errors"]) == (6, 2, 4.0, 2)
    stats.reset()
    assert stats.is_empty()


def test_every_metric_is_made_of_something_that_is_counted() -> None:
    """The code uses all names of counts in the table."""
    source = "".join(path.read_text() for top in ("lmcache_ec", "adapters") for path in (ROOT / top).rglob("*.py"))
    table = (ROOT / "adapters/vllm/metric_table.py").read_text()
    source = source.replace(table, "")
    for metric in METRICS:
        for count in metric.of.values() if isinstance(metric.of, dict) else [metric.of]:
            stem = re.sub(r"^\{\w+\}_|_\{.*|^policy_", "", count)
            assert re.search(rf"\b{stem}\b|[\"_}}]{stem}[\"_{{:]", source), (metric.name, stem)


def test_the_table_in_the_documentation_is_the_one_that_the_code_makes() -> None:
    assert markdown() in (ROOT / "docs/metrics.md").read_text()
