# SPDX-License-Identifier: Apache-2.0
"""The engine knows all counts of its store process, whatever happens to that: none is lost, none is counted twice."""

import os
import signal
from functools import partial
from pathlib import Path

from benchmarks.testbed.core import MIB, Bench, names, path_of, stored
from benchmarks.testbed.waiting import wait_until
from lmcache_ec.histogram import LATENCY_NS, names_of
from lmcache_ec.tally import STATES


def histogram_of(totals: dict[str, int], name: str) -> tuple[int, int]:
    """The number of its values, and their sum."""
    counts = [totals[name] for name in names_of(name, LATENCY_NS)]
    return sum(counts[::2]), sum(counts[1::2])


def lost(bench: Bench, processes: int) -> bool:
    return bench.snapshot()["store_losses"] == processes


def test_a_kill_loses_no_count_that_was_not_sent_yet(tmp_path: Path) -> None:
    """Each life of the store process writes, and is killed before the scheduler side gets another message from it."""
    with Bench(tmp_path) as bench:
        for life in range(2):
            pid, identifiers = bench.serving(), names(f"life{life}", 4)
            written = 4 * (life + 1)
            bench.encode(identifiers)
            wait_until("it counts them", lambda: bench.status()["store"].get("disk_writes") == 4)
            os.kill(pid, signal.SIGKILL)
            bench.until("it has ended", partial(lost, bench, life + 1))
            totals = bench.cache.tallies.totals()
            assert totals["disk_writes"] == written
            assert histogram_of(totals, "disk_write_ns")[0] == written
        bench.serving()
        bench.settle()
        totals = bench.cache.tallies.totals()
        assert len(stored(tmp_path)) == 8
        assert totals["disk_writes"] == 8
        assert totals["sealed"] == 8
        sizes = sum(path_of(tmp_path, name).stat().st_size for name in stored(tmp_path))
        assert totals["disk_written_bytes"] == sizes


def test_reads_misses_and_entries_that_do_not_verify_are_counted_by_tier(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        bench.encode(["a", "b"])
        bench.settle()
    torn = path_of(tmp_path, "b")
    torn.write_bytes(torn.read_bytes()[:-1] + b"!")
    with Bench(tmp_path) as bench:
        bench.scanned()
        assert bench.serves("a")
        assert not bench.serves("b")
        totals = bench.cache.tallies.totals()
        assert (totals["disk_hits"], totals["disk_corrupt"]) == (1, 1)
        assert totals["disk_read_bytes"] == path_of(tmp_path, "a").stat().st_size
        reads, took_ns = histogram_of(totals, "disk_read_ns")
        assert reads == 2
        assert took_ns > 0


def test_the_state_of_the_disk_is_known_within_a_ping(tmp_path: Path) -> None:
    limit = 8 * MIB
    with Bench(tmp_path, max_local_disk_size=limit / (1 << 30)) as bench:
        bench.encode(names("large", 6), rows=2 * MIB // 128)
        bench.settle()

        def stands() -> bool:
            totals = bench.cache.tallies.totals()
            return totals["disk_held_bytes"] == sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))

        bench.until("it is weighed", stands)
        totals = bench.cache.tallies.totals()
        assert STATES[totals["disk_state"]] == "serving"
        assert totals["disk_limit_bytes"] == limit
        assert totals["disk_evictions"] == 6 - len(stored(tmp_path)) > 0
        assert totals["disk_evicted_bytes"] == totals["disk_written_bytes"] - totals["disk_held_bytes"]
        assert totals["jobs"] == totals["disk_queued_writes"] == totals["disk_queued_bytes"] == 0
