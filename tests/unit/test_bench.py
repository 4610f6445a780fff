# SPDX-License-Identifier: Apache-2.0
"""The benchmark's arithmetic, and a check that a whole run still works with the code that it measures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bench.churn import Utilisation, churn
from benchmarks.bench.result import Bar, Collected, bars
from benchmarks.bench.table import RESULTS, excerpt
from benchmarks.testbed.models import ROOT

FULL = Utilisation(least=0.9, mean=0.95)


def taken(**milliseconds: list[float]) -> Collected:
    """Samples named `<row>__<party>`, for entries of 2.75 MB."""
    collected = Collected()
    named = {tuple(name.split("__")): [each / 1e3 for each in values] for name, values in milliseconds.items()}
    collected.add({(name, whose): values for (name, whose), values in named.items()}, 2_752_512)
    return collected


def bar(collected: Collected, start: str) -> Bar:
    [found] = [bar for bar in bars(collected.rows(), FULL) if bar.text.startswith(start)]
    return found


def test_a_row_has_the_median_of_all_rounds_and_its_quartiles() -> None:
    collected = taken(disk_get__ours=[5, 1, 3], disk_get__floor=[2])
    collected.add({("disk_get", "ours"): [0.002, 0.004]}, 2_752_512)
    [row] = collected.rows()
    assert (row.ours_ms, row.floor_ms, row.peer_ms, row.samples) == (3, 2, None, 5)
    assert row.quartiles_ms == {"ours": (2, 4), "floor": (2, 2)}
    assert row.times_floor == 1.5


@pytest.mark.parametrize(("ours", "met"), [([1.1, 1.1, 9], True), ([1.2, 1.2, 1], False)])
def test_a_bar_over_a_floor_is_held_against_the_medians(ours: list[float], met: bool) -> None:
    assert bar(taken(load_cpu__ours=ours, load_cpu__floor=[1, 1, 1]), "load_cpu").met is met


def test_a_bar_is_shown_beside_the_least_that_is_possible() -> None:
    collected = taken(disk_get__ours=[3], disk_get__floor=[2], disk_get_least__ours=[2.5], disk_get_least__floor=[2])
    assert bar(collected, "disk_get") == Bar(
        "disk_get <= 1.3 x (read + xxh3)", "1.50 (2.75 MB); the least: 1.25", False
    )


def test_the_worst_size_decides() -> None:
    collected = taken(save__ours=[1], save_busy__ours=[1.5])
    assert bar(collected, "save_busy").met is True
    collected.add({("save", "ours"): [0.010]}, 134_000_000)
    collected.add({("save_busy", "ours"): [0.021]}, 134_000_000)
    assert bar(collected, "save_busy") == Bar("save_busy <= 2 x idle", "1.50 (2.75 MB), 2.10 (134 MB)", False)


def test_a_bar_that_was_not_measured_is_neither_met_nor_missed() -> None:
    assert bar(taken(save__ours=[1]), "has_cache_item").met is None
    assert bar(taken(save__ours=[1]), "disk_get").met is None


def test_an_arena_that_is_mostly_empty_misses_its_bar() -> None:
    [found] = [bar for bar in bars([], Utilisation(0.84, 0.99)) if bar.text.startswith("arena")]
    assert found.met is False
    assert 0.5 < churn(entries=600).least <= churn(entries=600).mean <= 1


def test_the_page_of_benchmarks_shows_the_figures_of_the_run_that_is_kept() -> None:
    kept = excerpt(json.loads((RESULTS / "latest.json").read_text()))
    assert kept in (ROOT / "docs" / "benchmarks.md").read_text(), (
        "put in what `python -m benchmarks.bench.table` prints"
    )


@pytest.mark.slow  # half a minute: three processes import vLLM or LMCache
def test_a_short_run_measures_every_row_beside_its_peers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.bench", "--rounds", "1", "--sizes", "0.5", "2.75"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path), "--results", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "latest.json").read_text())
    rows = {(row["name"], row["size_bytes"]): row for row in figures["rows"]}
    for name in ("load_cpu", "save", "disk_get", "disk_put", "fetch_to_live", "save_to_written"):
        for size in (505_344, 2_752_512):
            for row in (rows[name, size], rows[f"{name}_busy", size]):
                assert row["ours_ms"] > 0
                assert row["peer_ms"] > 0
    assert rows["load_in_engine", 505_344]["ours_ms"] > 0
    assert rows["load_in_engine_busy", 2_752_512]["example_ms"] > 0
    for name in ("has_cache_item", "ensure_idle_step", "hook_p99_promoting"):
        assert rows[name, 0]["ours_ms"] > 0
    assert all(bar["met"] is not None for bar in figures["bars"])
    assert (tmp_path / "latest.svg").stat().st_size > 10_000
    assert not list(tmp_path.glob("lmcache-ec-bench-*")), "what was measured is left behind"
