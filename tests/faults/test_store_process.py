# SPDX-License-Identifier: Apache-2.0
"""The store process held, killed, or failing on its disk, while the engine runs on: no loss, no mix-up."""

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.testbed.core import process_state, stopped, stuck, temporaries
from tests.faults.harness import NAMESPACE, Served, Truth, wait_until

KNOWN = range(1, 7)
"""Pictures that an earlier engine left on disk."""

MANY = range(11, 61)
"""Fifty new pictures."""


@pytest.fixture(scope="module")
def served(truth: Truth, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("patient")
    truth.store(folder / "disk", KNOWN)
    with Served(truth, folder, load_deadline_ms=3000, store_timeout_s=600) as served:
        yield served.ready()


def written(served: Served) -> None:
    served.until("all is written", lambda book, _: not book["unwritten"] and not book["dirty_bytes"])


@pytest.mark.fault(
    "stopped, under a real engine",
    "store process",
    "a bounded wait, then encodes; all is back when it resumes",
    recovery="nothing is held",
    engine="alive",
)
def test_a_stopped_store_process_costs_a_bounded_wait_and_all_works_again_once_it_resumes(served: Served) -> None:
    first, *others = KNOWN
    with stopped(served.store_pid()):
        assert served.ask(first) == {first}  # asked for, waited for, encoded
        assert served.ask(others[0]) == {others[0]}
        assert served.ask(first, others[0]) == {first, others[0]}
        assert served.status() is None  # the asker gives up, which the store process finds out later
    served.settle()
    assert served.ask(*others[1:]) == set()
    assert served.ask(first, others[0]) == set()
    assert served.settle()["store_losses"] == 0


@pytest.mark.fault(
    "stopped for two seconds, under a real engine",
    "store process",
    "fifty saves are sealed and written when it resumes",
    recovery="all is written",
    engine="alive",
)
def test_sealing_held_for_two_seconds_with_fifty_saves_behind_it(served: Served) -> None:
    until = time.monotonic() + 2
    before = served.settle()["saves"]
    with stopped(served.store_pid()):
        assert served.ask(*MANY) == set(MANY)
        while time.monotonic() < until:
            served.idle()
    assert served.settle()["saves"] - before == len(MANY)
    written(served)
    assert served.truth.names(MANY) <= served.stored()
    assert served.ask(*MANY) == set()


@contextmanager
def full(store: int) -> Iterator[None]:
    """A full file system: files of the process `store` may only grow to half an entry."""
    limits = resource.prlimit(store, resource.RLIMIT_FSIZE)
    resource.prlimit(store, resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(store, resource.RLIMIT_FSIZE, limits)


@contextmanager
def no_folder(disk: Path) -> Iterator[None]:
    aside = disk.with_name("aside")
    disk.rename(aside)
    disk.touch()
    try:
        yield
    finally:
        disk.unlink()
        aside.rename(disk)


@pytest.mark.fault(
    "fills up or disappears while in use",
    "LocalDisk",
    "writes fail; entries stay in memory",
    recovery="all is written",
    engine="alive",
)
def test_a_disk_that_fills_up_or_disappears_costs_only_the_writes(served: Served) -> None:
    written(served)
    before = served.settle()["writes_failed"]
    with full(served.store_pid()):
        assert served.ask(61, 62, 63) == {61, 62, 63}
        served.until("writes have failed", lambda book, _: book["writes_failed"] == before + 3)
        assert not temporaries(served.disk)
    with no_folder(served.disk):
        assert served.ask(64) == {64}
        served.until("another has failed", lambda book, _: book["writes_failed"] == before + 4)
    assert served.ask(61, 62, 63, 64) == set(), "they are in memory"
    assert not served.truth.names([61, 62, 63, 64]) & served.stored()
    assert len(served.log_lines("could not write")) == 1
    assert served.ask(65) == {65}
    written(served)
    assert served.truth.names([65]) <= served.stored()


@pytest.mark.fault(
    "killed or left stopped, under a real engine",
    "store process",
    "replaced; pending writes are made, and nothing is encoded twice",
    recovery="it is killed and replaced",
    engine="alive",
)
def test_a_store_process_killed_or_left_stopped_is_replaced_and_pending_entries_are_written(
    truth: Truth, tmp_path: Path
) -> None:
    """Nothing is encoded twice because of it: unsealed entries are copied again, from vLLM's own cache."""
    with Served(truth, tmp_path, store_timeout_s=2) as served:
        with stuck(served.disk / NAMESPACE / ".tmp" / "stuck"):
            assert served.ask(1) == {1}
            served.until("it is sealed", lambda book, store: store.get("sealed") and book["places_live"])
            assert not served.stored()
            first = served.store_pid()
            os.kill(first, signal.SIGKILL)
            wait_until("it has ended", lambda: process_state(first) == "Z")
        assert served.ask(2, forget=False) == {2}
        served.until("its loss is counted", lambda book, _: book["store_losses"])
        eventually_stored(served, {1, 2})

        second = served.store_pid()
        assert second != first
        with stopped(second):
            assert served.ask(3, forget=False) == {3}
            served.until("it is killed and replaced", lambda book, _: book["store_losses"] >= 2)
            assert process_state(second) == "Z"
        assert served.ask(4, forget=False) == {4}
        eventually_stored(served, {1, 2, 3, 4})
        assert served.ask(1, 2, 3, 4) == set()
        served.settle()


def eventually_stored(served: Served, seeds: set[int]) -> None:
    served.until(f"{seeds} are stored", lambda *_: served.truth.names(seeds) <= served.stored())
