# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of `make bench-engine`, and a check that a short run measures all that it reports."""

import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.engine.client import Timing
from benchmarks.engine.paired import ratio
from benchmarks.engine.report import bars, rows
from benchmarks.testbed.models import ROOT


def timings(*first_token_s: float) -> dict[tuple[int, int], Timing]:
    return {(seed, 0): Timing(first, 0.002, first + 0.03, (1,) * 16) for seed, first in enumerate(first_token_s)}


def test_a_ratio_compares_what_was_measured_side_by_side() -> None:
    drifting = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]  # a machine that slows down affects both sides alike
    found = ratio([1.5 * each for each in drifting], drifting)
    assert (found.median, found.low, found.high) == (1.5, 1.5, 1.5)


def test_an_interval_covers_the_true_median_as_often_as_it_claims() -> None:
    chance = random.Random(3)
    covered = 0
    for _ in range(2000):
        found = ratio([chance.lognormvariate(0, 1) for _ in range(25)], [1.0] * 25)
        covered += found.low <= 1 <= found.high
    assert 0.94 <= covered / 2000 <= 0.985


def test_too_few_pairs_have_no_interval_and_meet_no_bar() -> None:
    few = {"off": timings(1.0, 1.0), "miss": timings(1.0, 1.0)}
    [bar] = bars({"gemma3": rows(few)})
    assert not bar.met
    many = {"off": timings(*[1.0] * 20), "miss": timings(*[1.01] * 20)}
    [bar] = bars({"gemma3": rows(many)})
    assert bar.met


def test_a_hit_is_held_against_a_hit_in_the_cache_of_vllm_for_the_same_pictures() -> None:
    measured = {"disk": timings(0.5, 0.7, 0.9), "disk own": timings(0.5, 0.7, 0.9), "off": timings(3.0, 3.0, 3.0)}
    by_kind = {row.kind: row for row in rows(measured)}
    assert by_kind["disk"].beside_floor is not None
    assert by_kind["disk"].beside_floor.median == 1
    assert by_kind["off"].beside_floor is None
    assert by_kind["off"].first_token_ms == pytest.approx(statistics.median([3000.0] * 3))


def test_rounds_that_a_floor_lacks_are_not_compared_with_it() -> None:
    once = timings(0.5, 0.7)
    twice = once | {(seed, 1): timing for (seed, _), timing in timings(5.0, 7.0).items()}
    measured = {"LocalCPU": twice, "LocalCPU own": twice, "off own": once}
    by_kind = {row.kind: row.beside_floor for row in rows(measured)}
    assert [found and found.pairs for found in by_kind.values()] == [None, 2, 4]


def test_only_the_time_to_the_first_token_counts_for_rounds_with_few_tokens() -> None:
    short = Timing(0.5, 9.0, 9.5, (1, 1))
    timings_of_all = timings(0.5) | {(0, number): short for number in range(1, 9)}
    for row in rows({"LocalCPU": timings_of_all, "LocalCPU own": timings_of_all, "off own": timings(0.5)}):
        assert row.between_tokens_ms == 2.0
        assert row.requests_per_s == pytest.approx(1 / 0.53, abs=0.001)


def test_the_interval_of_a_miss_includes_the_difference_between_servers_of_one_kind() -> None:
    pairs, slower = 8, [1.00, 1.02, 1.04, 1.06, 1.08, 1.10, 1.12, 1.14]  # constant for each pair of servers
    off = timings(*[1.0] * 400)
    measured = {"off": off, "nothing": off, "miss": timings(*[slower[seed % pairs] for seed in range(400)])}
    miss = next(row for row in rows(measured, pairs) if row.kind == "miss")
    assert miss.beside_floor is not None
    assert miss.by_servers is not None
    assert miss.beside_floor.half_width < 0.02 < miss.by_servers.half_width
    assert (miss.by_servers.low, miss.by_servers.high, miss.by_servers.pairs) == (1.0, 1.14, pairs)
    assert miss.by_servers.median == pytest.approx(1.07)
    assert miss.beside_nothing == miss.by_servers
    assert all(row.by_servers is None for row in rows(measured))


@pytest.mark.slow  # nine servers, one after another
@pytest.mark.timeout(1500)
def test_a_short_run_measures_every_kind_of_request(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.engine", "--model", "gemma3", "--parts", "hits", "mixed", "throughput"]
    sizes = ["--pictures", "8", "--requests", "8", "--results", str(tmp_path)]
    done = subprocess.run([*command, *sizes], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads((tmp_path / "engine.json").read_text())
    kinds = [row["kind"] for row in figures["rows"]["gemma3"]]
    assert {"off", "miss", "off own", "LocalCPU", "disk", "Redis", "S3", "ECExample"} <= set(kinds)
    assert {batch["party"] for batch in figures["mixed"]} == {"off", "cache"}
    assert (tmp_path / "engine-hits.svg").exists()
    assert (tmp_path / "engine-throughput.svg").exists()
