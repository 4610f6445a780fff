# SPDX-License-Identifier: Apache-2.0
"""Engines on one folder: what one stores the other finds long before it lists the folder again, and a miss still sends
no request. For the several looks per second see `tests/tiers/test_stack.py`."""

import os
import random
import signal
import time
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from benchmarks.testbed.core import Bench, names, path_of, stopped, stored
from benchmarks.testbed.waiting import wait_until

IMAGES = names("image", 8)


def fetches(bench: Bench) -> int:
    return bench.snapshot()["fetches"]


def asks(bench: Bench, identifier: str) -> bool:
    """Whether it may be on disk, as far as is known by now. If so, it is fetched."""
    return bench.cache.fetch(identifier, 0, time.monotonic())


def finds(bench: Bench, identifier: str) -> None:
    """Check that an entry on disk is asked for and served."""
    bench.until(f"{identifier} is asked for", partial(asks, bench, identifier))
    bench.until("it has come", lambda: not bench.snapshot()["fetches_under_way"])
    assert bench.serves(identifier)


def test_a_neighbours_new_entry_is_found_before_the_next_listing_and_a_miss_asks_nobody(tmp_path: Path) -> None:
    with Bench(tmp_path) as one, Bench(tmp_path) as two:
        one.scanned()
        two.scanned()
        for identifier in IMAGES:
            assert not two.fetch(identifier)
            one.encode([identifier])
            one.settle()
            finds(two, identifier)
        assert not any(bench.fetch(name) for bench in (one, two) for name in names("first-seen", 200))
        assert (fetches(one), two.snapshot()["fetch_misses"]) == (0, 0)
        assert two.snapshot()["filtered"] >= 200 + len(IMAGES)
        assert [bench.status()["tiers"][0]["entries"] for bench in (one, two)] == [len(IMAGES)] * 2
        two.encode(["of two"])
        two.settle()
        finds(one, "of two")


def test_an_entry_that_a_neighbour_stores_while_an_engine_starts_is_found_too(tmp_path: Path) -> None:
    """Before, during or after the listing, at random: each entry is either listed or announced as news."""
    with Bench(tmp_path) as one:
        for number in range(5):
            with Bench(tmp_path) as two:
                new = names(f"start {number}", 20)
                for identifier in new:
                    one.encode([identifier])
                    one.settle()
                two.scanned()
                for identifier in new:
                    finds(two, identifier)


def some_of(folder: Path, identifiers: list[str], some: int) -> bool:
    return sum(path_of(folder, identifier).exists() for identifier in identifiers) >= some


def test_entries_written_before_a_store_process_was_killed_are_found_before_the_next_listing(tmp_path: Path) -> None:
    """It is killed in the middle of writing. At most one entry can have its name but no news yet; the next listing
    finds it."""
    moments, found, unheard, kills, later = random.Random(0), 0, 0, 0, count()
    with Bench(tmp_path) as two, Bench(tmp_path) as third:
        two.scanned()

        def all_news_is_read() -> None:
            """All earlier news is known once news is known that was sent after a look had begun."""
            for _ in range(2):
                third.encode([marker := f"later-{next(later)}"])
                third.settle()
                finds(two, marker)

        while kills < 5:
            kills += 1
            new, some = names(f"kill {kills}", 40), moments.randrange(1, 30)
            with Bench(tmp_path) as one:
                pid = one.serving()
                one.encode(new)
                written = partial(some_of, tmp_path, new, some)
                wait_until(f"{some} are written", written, pause_s=0.0005)
                os.kill(pid, signal.SIGKILL)
            all_news_is_read()
            for identifier in sorted(stored(tmp_path).intersection(new)):
                if asks(two, identifier):
                    finds(two, identifier)
                    found += 1
                else:
                    unheard += 1
    assert unheard <= kills
    assert found > kills


@pytest.mark.fault("another engine on the folder is stopped, or loses it", "LocalDisk", "its entries are found again")
def test_the_news_of_a_neighbour_that_was_stopped_or_has_lost_the_folder_is_read_again(tmp_path: Path) -> None:
    with Bench(tmp_path / "disk") as one, Bench(tmp_path / "disk") as two:
        two.scanned()
        one.encode(["before"])
        one.settle()
        finds(two, "before")
        with stopped(two.serving()):
            one.encode(["stopped"])
            one.settle()
        finds(two, "stopped")
        (tmp_path / "disk").rename(tmp_path / "away")
        one.encode(["after"])
        one.settle()
        finds(two, "after")


@pytest.mark.slow  # it waits for the next listing
def test_a_deleted_entry_is_no_longer_looked_up_after_the_next_listing(tmp_path: Path) -> None:
    with Bench(tmp_path) as one:
        one.encode(IMAGES)
        one.settle()
    with Bench(tmp_path) as one:
        one.scanned()
        for identifier in IMAGES[1:]:
            path_of(tmp_path, identifier).unlink()
        wait_until("it is listed again", lambda: one.status()["tiers"][0]["entries"] == 1, 40)
        assert not any(one.fetch(identifier) for identifier in IMAGES[1:])
        assert fetches(one) == 0
        assert one.serves(IMAGES[0])
