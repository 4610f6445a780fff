# SPDX-License-Identifier: Apache-2.0
"""Copies, seals and writes that are held while their places are needed again: every file holds its own picture."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.testbed.core import stopped, stuck
from benchmarks.testbed.engine_runner import Call, Forget
from tests.faults.harness import NAMESPACE, Served, Truth

ROOM = 4
"""Entries that fit into the arena."""


@pytest.fixture(scope="module")
def served(truth: Truth, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("small")
    with Served(truth, folder, arena_entries=ROOM, store_timeout_s=600) as served:
        yield served.ready()


@pytest.mark.fault(
    "a copy is delayed, and its request aborted",
    "worker",
    "its place in the arena is not reused",
    recovery="nothing is held",
    engine="alive",
)
def test_a_place_is_not_reused_while_its_copy_is_held_even_if_the_request_is_aborted(served: Served) -> None:
    """The store process is stopped, too: it sees a place only after all holders of that place have copied."""
    before = served.settle()
    with stopped(served.store_pid()):
        with served.copies_held():
            assert served.engine.do(Call("tests.faults.inside:abort_after_first_token", {"seed": 1})).value
            wanted = range(2, 2 + 2 * ROOM)
            assert served.ask(*wanted) == set(wanted)
            assert served.ask(1) == {1}
        assert served.ask(20) == {20}
    after = served.settle()
    assert served.truth.names([1]) <= served.stored() <= served.truth.names([1, *wanted, 20])
    assert after["saves"] - before["saves"] >= ROOM - 1
    assert after["saves_dropped"] > before["saves_dropped"]


@pytest.mark.fault(
    "the arena is full of unwritten entries",
    "LocalCPU",
    "saves are dropped",
    recovery="its write is over",
    engine="alive",
)
def test_an_arena_full_of_unsealed_entries_costs_no_more_than_saves(served: Served) -> None:
    """No place is sealed yet: requests are served correctly, and saves are dropped, counted and done later."""
    pictures = range(30, 30 + 3 * ROOM)
    before = served.settle()
    with stopped(served.store_pid()):
        assert served.ask(*pictures) == set(pictures)
        assert served.ask(*pictures, together=True) == set(pictures)
    after = served.settle()
    assert after["saves_dropped"] - before["saves_dropped"] >= len(pictures) - ROOM
    assert after["pins"] == 0
    for seed in pictures:
        served.ask(seed)
        served.until("its write is over", lambda book, _: not book["unwritten"] and not book["dirty_bytes"])
    assert served.truth.names(pictures) <= served.stored()


@pytest.mark.fault(
    "hangs while the arena's contents are replaced",
    "LocalDisk",
    "each file holds the bytes of its own entry",
    engine="alive",
)
def test_a_disk_that_hangs_while_the_arena_turns_over_gets_each_entry_s_own_bytes(truth: Truth, tmp_path: Path) -> None:
    """Entries beyond the budget of unwritten ones are evicted: no write may still be pending from their places."""
    obstacle = tmp_path / "disk" / NAMESPACE / ".tmp" / "stuck"
    pictures = range(1, 1 + 6 * ROOM)
    with Served(truth, tmp_path, arena_entries=ROOM, store_timeout_s=600) as served:
        with stuck(obstacle):
            for seed in pictures:
                assert served.ask(seed, forget=False) == {seed}
            served.until("all are sealed", lambda _, store: store.get("sealed", 0) >= len(pictures))
            served.until("places were reused", lambda book, _: book["evictions"] > len(pictures) // 2)
            assert not served.stored()
        served.settle()
        assert served.stored()
        status = served.status()
        assert status is not None
        assert not status["store"].get("disk_write_errors")


@pytest.mark.fault(
    "vLLM frees tensors that were still to be saved",
    "worker",
    "those saves are dropped",
    recovery="nothing is owed",
    engine="alive",
)
def test_pending_saves_of_tensors_that_vllm_has_dropped_are_forgotten(truth: Truth, tmp_path: Path) -> None:
    """vLLM's cache was emptied: there is nothing left to copy, and no pass may retry or evict for it."""
    with Served(truth, tmp_path, arena_entries=ROOM, store_timeout_s=600) as served:
        with stopped(served.store_pid()):
            served.ask(*range(1, 1 + 3 * ROOM), together=True)
        served.engine.do(Forget())
        served.until("nothing is owed", lambda book, _: not book["unsaved"])
        served.settle()
