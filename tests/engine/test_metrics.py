# SPDX-License-Identifier: Apache-2.0
"""vLLM's /metrics is right, whichever process serves it and whatever happened to the store process."""

import math
import os
import re
import signal
import urllib.request
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.dashboard import draw, without_variables
from benchmarks.testbed.engine_env import vllm_version
from benchmarks.testbed.servers.openai import OpenAIServer, image_part
from benchmarks.testbed.servers.prometheus import Prometheus
from benchmarks.testbed.servers.redis import redis_server
from benchmarks.testbed.waiting import wait_until
from lmcache_ec.adapters.vllm.versions import shows_metrics
from tests.unit.test_dashboard import ALERTS, QUERIES, RULES

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not shows_metrics(vllm_version()), reason="this vLLM asks no connector for metrics"),
]

BESIDE = {"LMCACHE_EC_LOAD_DEADLINE_MS": "30000", "LMCACHE_EC_START_TIMEOUT_S": "60"}


def served(folder: Path, disk: Path, **arguments: Any) -> OpenAIServer:
    keys = {"remote_url": url} if (url := arguments.pop("remote_url", None)) else {}
    return OpenAIServer(
        "qwen3vl",
        folder,
        connector={
            "ec_connector": "ECLMCacheConnector",
            "ec_role": "ec_both",
            "ec_connector_extra_config": {"local_disk": str(disk), **keys},
        },
        environment={**BESIDE, **arguments.pop("environment", {})},
        **arguments,
    )


Series = tuple[str, tuple[str, ...]]
"""A name without the prefix, and its label values in the order of the label names, without vLLM's own labels."""


def scraped(server: OpenAIServer, by_engine: bool = False) -> dict[Series, float]:
    """Values summed over engines, or per engine, with its number as the first label."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    sums: defaultdict[Series, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("lmcache_ec_") and not sample.name.endswith("_created"):
                own = [value for name, value in sorted(sample.labels.items()) if name not in ("engine", "model_name")]
                engine = [sample.labels["engine"]] if by_engine else []
                sums[sample.name.removeprefix("lmcache_ec_"), (*engine, *own)] += sample.value
    return dict(sums)


def total(series: dict[Series, float], name: str) -> float:
    return sum(value for (other, _), value in series.items() if other == name)


def settled(server: OpenAIServer, **expected: float) -> dict[Series, float]:
    """All values, once these totals are reached. An engine reports what happened since its last step with its next."""
    seen: dict[Series, float] = {}

    def reported() -> bool:
        server.ask(text="go on", max_tokens=1)
        seen.clear()
        seen.update(scraped(server))
        return all(total(seen, name) == value for name, value in expected.items())

    try:
        wait_until(f"{expected} is scraped", reported, 20, pause_s=0.3)
    except AssertionError:
        raise AssertionError({name: (total(seen, name), value) for name, value in expected.items()}) from None
    return seen


def sizes(disk: Path) -> list[int]:
    return [path.stat().st_size for path in disk.rglob("*.safetensors")]


def ask_all(server: OpenAIServer, seeds: Iterable[int]) -> int:
    """Ask one after another. Returns how many were encoded."""
    for seed in seeds:
        server.ask(image_part(seed))
    return server.encoded()


def kill_store(server: OpenAIServer) -> None:
    os.kill(server.status()["pid"], signal.SIGKILL)


@pytest.mark.slow
def test_scraped_metrics_match_what_has_happened_even_if_the_store_process_is_killed(
    tmp_path: Path,
) -> None:
    disk = tmp_path / "disk"
    often = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOG_STATS_INTERVAL": "1"}
    with served(tmp_path / "server", disk, environment=often) as server:
        began = scraped(server)
        assert ("misses_total", ("new",)) in began
        assert total(began, "misses_total") == 0

        assert ask_all(server, range(3)) == 3
        seen = settled(server, misses_total=3, saves_total=3, tier_writes_total=3)
        assert seen["misses_total", ("new",)] == 3
        assert seen["lookups_total", ("image", "miss")] == 3
        assert seen["saved_bytes_total", ()] == sum(sizes(disk)) == seen["tier_written_bytes_total", ("disk",)]
        assert seen["save_size_bytes_count", ()] == 3
        assert seen["save_size_bytes_sum", ()] == pytest.approx(sum(sizes(disk)))
        assert seen["tier_write_seconds_count", ("disk",)] == 3

        server.forget()
        assert ask_all(server, range(3)) == 0
        seen = settled(server, hits_total=3, misses_total=3)
        assert seen["hits_total", ("cpu",)] == 3
        assert seen["lookups_total", ("image", "hit")] == 3
        assert seen["loaded_bytes_total", ("cpu",)] == sum(sizes(disk))
        assert seen["step_load_seconds_count", ()] == 3
        assert 0 < seen["step_load_seconds_sum", ()] < 3

        kill_store(server)
        assert ask_all(server, range(3, 6)) == 3
        settled(server, store_restarts_total=1, misses_total=6, saves_total=6, tier_writes_total=6)
        assert len(sizes(disk)) == 6

        server.kill()
        server.start()  # counters restart at 0, which Prometheus detects
        assert ask_all(server, range(6)) == 0
        seen = settled(server, hits_total=6, tier_hits_total=6)
        assert seen["hits_total", ("disk",)] == 6
        assert total(seen, "misses_total") == 0
        assert seen["tier_read_bytes_total", ("disk",)] == sum(sizes(disk)) == seen["loaded_bytes_total", ("disk",)]
        assert seen["fetches_total", ()] == 6
        states = {labels: value for (name, labels), value in seen.items() if name == "tier_state"}
        assert states[("serving", "disk")] == 1
        assert sum(states.values()) == 1
        assert seen["tier_entries", ("disk",)] == 6
        assert seen["tier_held_bytes", ("disk",)] == sum(sizes(disk))
        assert seen["memory_entries", ()] == 6

        def logged() -> bool:
            """Ask first: vLLM logs nothing for an interval without requests."""
            ask_all(server, range(6))
            return "EC Transfer metrics: Hit rate (%)=" in server.log.read_text()

        wait_until("a line is logged", logged, 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [{"api_server_count": 3}, {"data_parallel_size": 2, "api_server_count": 2}], ids=["front ends", "engines"]
)
def test_several_front_ends_and_engines_count_everything_once(layout: dict[str, int], tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with served(tmp_path / "server", disk, **layout) as server, ThreadPoolExecutor(8) as clients:
        asked = 0
        for start in (0, 32, 0):
            list(clients.map(lambda seed: server.ask(image_part(seed)), range(start, start + 32)))
            asked += 32
            server.forget()
        encoded = server.encoded()
        seen = settled(server, lookups_total=asked, misses_total=encoded, hits_total=asked - encoded)
        assert total(seen, "saves_total") <= encoded
        engines = {labels[0] for name, labels in scraped(server, by_engine=True) if name == "misses_total"}
        assert engines == {str(number) for number in range(layout.get("data_parallel_size", 1))}


@pytest.mark.slow
def test_under_load_every_query_of_the_dashboard_and_of_the_alerts_has_an_answer(tmp_path: Path) -> None:
    """In a real Prometheus, for an engine with a disk and a Redis; the engine is started twice."""
    with (
        redis_server(tmp_path / "redis") as redis,
        served(tmp_path / "server", tmp_path / "disk", remote_url=redis.url) as server,
        Prometheus(tmp_path / "prometheus", [server.url.removeprefix("http://")], ALERTS) as prometheus,
        ThreadPoolExecutor(4) as clients,
    ):
        ask_all(server, range(8))
        settled(server, tier_writes_total=16)
        server.kill()
        server.start()
        wait_until("its zeros are scraped", lambda: prometheus.values("lmcache_ec_tier_hits_total"))
        queries = [without_variables(query) for query in QUERIES]
        queries += [re.sub(r"\s(>|==)\s[\d.]+$", "", rule["expr"]) for rule in RULES]
        unanswered = set(queries)

        def answered() -> bool:
            """Ask for repeated and for new seeds, then run the queries."""
            turn = next(turns)
            list(clients.map(lambda seed: server.ask(image_part(seed)), [*range(8), 100 + turn]))
            server.forget()
            for query in list(unanswered):
                values = prometheus.values(query)
                if not all(map(math.isnan, values)):  # no value, or only those of tiers that did nothing
                    unanswered.discard(query)
            return not unanswered

        turns = count()
        try:
            wait_until("every query has an answer", answered, 90, pause_s=0.2)
        except AssertionError:
            raise AssertionError(f"without an answer: {unanswered}") from None
        draw(prometheus, 60, picture := tmp_path / "dashboard.svg")  # as in docs/metrics.md
        assert picture.exists()
        assert all(target["health"] == "up" for target in prometheus.ask("targets")["activeTargets"])
        rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
        assert [rule["health"] for rule in rules] == ["ok"] * len(RULES)
        assert not any(rule["state"] == "firing" for rule in rules)
