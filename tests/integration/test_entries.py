# SPDX-License-Identifier: Apache-2.0
"""Items encoded once are found again: in the arena, in the folder, by a new engine and by a neighbour."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.testbed import core
from benchmarks.testbed.core import (
    LARGEST,
    MIB,
    NAMESPACE,
    VERSIONS,
    Bench,
    Step,
    length,
    names,
    of_another_version,
    own_arenas,
    path_of,
    payload,
    stopped,
    store_processes,
    stored,
    stuck,
    temporaries,
)
from benchmarks.testbed.waiting import DEADLINE_S
from lmcache_ec.config import ConfigError

IMAGES = names("image", 8)


def kept(folder: Path, identifiers: list[str]) -> None:
    """An engine that encodes, stores and ends."""
    with Bench(folder) as bench:
        bench.encode(identifiers)
        bench.settle()


def fetches(bench: Bench) -> int:
    return bench.snapshot()["fetches"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_saved_entry_is_loaded_from_the_arena_and_by_a_new_engine_from_disk(tmp_path: Path, ranks: int) -> None:
    sizes = dict(zip(IMAGES, (0, 1, 16, 31, 32, 33, 1000, 8192), strict=True))
    with Bench(tmp_path, ranks) as bench:
        for identifier, rows in sizes.items():
            bench.encode([identifier], rows)
        bench.settle()
        assert all(bench.serves(identifier, rows) for identifier, rows in sizes.items())
        assert fetches(bench) == 0
        bench.settle()
    assert stored(tmp_path) == set(IMAGES)
    with Bench(tmp_path, ranks) as bench:
        assert all(bench.serves(identifier, rows) for identifier, rows in sizes.items())
        bench.settle()
        assert bench.snapshot()["loads_disk"] == len(sizes)
    assert not temporaries(tmp_path)


def test_an_entry_of_unknown_length_is_fetched_and_one_that_is_nowhere_is_a_miss(tmp_path: Path) -> None:
    kept(tmp_path, IMAGES[:2])
    with Bench(tmp_path) as bench:
        assert bench.fetch(IMAGES[0], size=0)
        assert bench.fetch(IMAGES[1], size=length(IMAGES[1], 5))  # a wrong guess is not a miss
        assert bench.read(IMAGES[:2]) == {identifier: payload(identifier) for identifier in IMAGES[:2]}
        assert not bench.fetch(IMAGES[2], size=0)
        bench.settle()


# ---- the folder changes behind the engine's back


def _truncated(path: Path, _: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _emptied(path: Path, _: Path) -> None:
    path.write_bytes(b"")


def _flipped(path: Path, _: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _swapped(path: Path, other: Path) -> None:
    shutil.copy(other, path)


def _longer(path: Path, _: Path) -> None:
    path.write_bytes(path.read_bytes() * 2)


def _deleted(path: Path, _: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    "damage", [_truncated, _emptied, _flipped, _swapped, _longer, _deleted], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("known", [True, False], ids=["known length", "unknown length"])
def test_a_damaged_file_is_a_miss_and_the_next_save_replaces_it(
    tmp_path: Path, damage: Callable[[Path, Path], None], known: bool
) -> None:
    victim, other = IMAGES[:2]
    kept(tmp_path, [victim, other])
    with Bench(tmp_path) as bench:
        damage(path_of(tmp_path, victim), path_of(tmp_path, other))
        assert not bench.fetch(victim, size=None if known else 0)
        bench.settle()
        assert bench.snapshot()["fetch_misses"] == 1
        bench.until("the file is removed", lambda: not path_of(tmp_path, victim).exists())
        bench.encode([victim])
        bench.settle()
        assert bench.serves(victim)
        bench.settle()
    assert stored(tmp_path) == {victim, other}
    with Bench(tmp_path) as bench:
        assert bench.serves(victim)


def test_an_entry_too_large_for_this_arena_is_left_for_engines_with_larger_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour with a larger arena and longer prompts has stored it; it is valid under its name."""
    rows = MIB // 128
    with Bench(tmp_path) as bench:
        bench.encode(["long"], rows)
        bench.settle()
    monkeypatch.setattr(core, "LARGEST", MIB // 2)
    with Bench(tmp_path, arena_bytes=MIB // 4) as small:
        assert not small.fetch("long", rows)
        small.encode(IMAGES[:1])
        small.settle()
        small.until("its jobs are done", lambda: small.status()["jobs"] == 0)
    assert stored(tmp_path) == {"long", IMAGES[0]}


@pytest.mark.parametrize("known", [True, False], ids=["known length", "unknown length"])
def test_a_file_longer_than_any_entry_here_keeps_its_name_and_nobody_waits_for_it_twice(
    tmp_path: Path, known: bool
) -> None:
    kept(tmp_path, IMAGES[:1])
    with path_of(tmp_path, IMAGES[0]).open("r+b") as file:
        file.truncate(LARGEST + 1)
    with Bench(tmp_path) as bench:
        for _ in range(3):
            assert not bench.fetch(IMAGES[0], size=None if known else 0)
            bench.settle()
        assert fetches(bench) == 1
        bench.encode(IMAGES[:1])
        bench.settle()
        assert bench.serves(IMAGES[0])
    assert path_of(tmp_path, IMAGES[0]).stat().st_size == LARGEST + 1


@pytest.mark.parametrize("how", VERSIONS)
def test_a_file_of_another_version_is_a_miss_and_is_left_as_it_is(tmp_path: Path, how: str) -> None:
    """During a rolling update, engines of both versions use one folder."""
    kept(tmp_path, IMAGES[:2])
    path = path_of(tmp_path, IMAGES[0])
    other = of_another_version(path.read_bytes(), how)
    path.write_bytes(other)
    for number in range(2):
        with Bench(tmp_path) as bench:
            for _ in range(3):
                assert not bench.fetch(IMAGES[0], size=0 if number else None)
                bench.settle()
            assert fetches(bench) <= 2, "what it is is remembered"
            assert bench.serves(IMAGES[1])
            bench.encode(IMAGES[:1])
            bench.settle()
            assert bench.serves(IMAGES[0])
            store = bench.status()["store"]
            assert (store.get("disk_corrupt", 0), store["disk_other_version"]) == (0, 1)
        assert path.read_bytes() == other


# ---- the presence filter


def questions(bench: Bench) -> dict[str, int]:
    """Counts of requests to the tiers, except the periodic checks whether one was emptied."""
    return {name: count for name, count in bench.status()["store"].items() if not name.endswith("_looks")}


def test_a_first_seen_image_costs_no_message_once_the_folder_is_scanned(tmp_path: Path) -> None:
    kept(tmp_path, IMAGES)
    with Bench(tmp_path) as bench:
        bench.scanned()
        store = questions(bench)
        assert not any(bench.fetch(identifier) for identifier in names("first-seen", 100))
        bench.settle()
        assert (fetches(bench), bench.snapshot()["filtered"]) == (0, 100)
        assert questions(bench) == store
        assert all(bench.serves(identifier) for identifier in IMAGES)
        assert (fetches(bench), bench.snapshot()["fetch_misses"]) == (len(IMAGES), 0)


def test_before_the_folder_is_scanned_every_entry_is_looked_up_and_found(tmp_path: Path) -> None:
    kept(tmp_path, IMAGES)
    with stuck(tmp_path / NAMESPACE / ".tmp" / "stuck"), Bench(tmp_path) as bench:
        assert not bench.status()["scan_complete"]
        assert all(bench.serves(identifier) for identifier in IMAGES)
        assert not bench.fetch("nowhere")
        assert fetches(bench) == len(IMAGES) + 1
        bench.settle()


# ---- neighbours


def test_two_engines_share_a_folder_and_no_arena(tmp_path: Path) -> None:
    both = IMAGES[:4]
    with Bench(tmp_path) as one, Bench(tmp_path) as two:
        assert one.arena != two.arena
        assert not set(store_processes(one.arena)) & set(store_processes(two.arena))
        one.encode([*both, "of one"])
        two.encode([*both, "of two"])
        one.settle()
        two.settle()
        assert one.serves("of one")
        assert two.serves("of two")
    assert stored(tmp_path) == {*both, "of one", "of two"}
    with Bench(tmp_path) as one:
        assert one.serves("of two")
        assert one.serves("of one")


# ---- the folder cannot be used


def test_a_path_that_cannot_be_a_folder_is_named_at_start(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("in the way")
    for path in (in_the_way, in_the_way / "below", Path("/proc/1/no-such-folder")):
        before = own_arenas()
        with pytest.raises(ConfigError, match=f"local_disk: {path}"):
            Bench(path, start_timeout_s=60.0)
        assert own_arenas() == before


def test_a_folder_that_refuses_every_write_costs_the_writes_and_nothing_else() -> None:
    with Bench(Path("/proc/tty")) as bench:
        bench.encode(IMAGES)
        bench.settle()
        assert bench.snapshot()["writes_failed"] == len(IMAGES)
        assert all(bench.serves(identifier) for identifier in IMAGES)
        assert not bench.fetch("nowhere")
        bench.settle()


def test_without_a_folder_entries_live_in_the_arena_and_no_tier_is_asked() -> None:
    with Bench(None) as bench:
        bench.encode(IMAGES)
        bench.settle()
        assert all(bench.serves(identifier) for identifier in IMAGES)
        assert not bench.fetch("nowhere")
        assert fetches(bench) == 0
        bench.settle()


def test_entries_of_another_namespace_are_not_found(tmp_path: Path) -> None:
    kept(tmp_path, IMAGES[:1])
    (tmp_path / NAMESPACE).rename(tmp_path / "another-0123456789abcdef")
    with Bench(tmp_path) as bench:
        assert not bench.fetch(IMAGES[0])
    # ... nor under this one: the entry itself names its namespace.
    (tmp_path / "another-0123456789abcdef").rename(tmp_path / NAMESPACE)
    with Bench(tmp_path) as bench:
        assert bench.fetch(IMAGES[0])


def test_fetches_beyond_the_budget_of_fills_wait_for_their_turn_and_none_is_a_miss(tmp_path: Path) -> None:
    """Forty entries of 1 MiB go through an arena of 8 MiB, of which fills may hold 2."""
    rows = MIB // 128
    many = names("large", 40)
    with Bench(tmp_path, arena_bytes=64 * MIB) as bench:
        for identifier in many:
            bench.encode([identifier], rows)
            bench.settle()
    with Bench(tmp_path, arena_bytes=8 * MIB) as bench:
        bench.scanned()
        for identifier in many:
            assert bench.cache.fetch(identifier, length(identifier, rows), time.monotonic())
        bench.until("all have been there", lambda: not bench.snapshot()["fetches_under_way"])
        counts = bench.snapshot()
        assert (counts["fills"], counts["fetch_misses"]) == (len(many), 0)
        bench.settle()


# ---- a producer that waits


def flushed(bench: Bench, step: Step, wait_s: float = DEADLINE_S) -> set[str]:
    """What a producer's saving rank knows to be durable when its step ends, waiting for at most `wait_s`."""
    worker = bench.workers[0]
    outcomes, _ = worker.copy(step)
    handed = {save.place: worker.rank.hand_over(replace(save, flush=True)) for save in step.saves}
    names = {save.place: save.identifier for save in step.saves}
    durable = worker.rank.await_durable(set(names), time.monotonic() + wait_s)
    worker.report(step, outcomes, handed)
    return {names[place] for place in durable}


def test_a_producer_knows_what_is_durable_without_a_pass_of_the_scheduler(tmp_path: Path) -> None:
    """The scheduler side is itself waiting for the step."""
    with Bench(tmp_path) as bench:
        assert flushed(bench, bench.save(IMAGES)) == set(IMAGES)
        assert stored(tmp_path) == set(IMAGES)
        bench.settle()


def test_the_writes_a_producer_waited_for_are_known_to_the_scheduler_side_when_the_step_ends(tmp_path: Path) -> None:
    """Its answer announces what is stored, without a pass in between."""
    with Bench(tmp_path) as bench:
        for number in range(50):
            identifier = f"image-{number}"
            assert flushed(bench, bench.save([identifier])) == {identifier}
            bench.drain()
            place = bench.cache.book.live(identifier)
            assert place is not None, number
            assert bench.cache.below.covers(place.tiers), number


def test_a_producer_learns_of_failed_writes_and_waits_no_longer_than_it_may(tmp_path: Path) -> None:
    with Bench(Path("/proc/tty")) as bench:  # a folder that refuses every write
        assert flushed(bench, bench.save(IMAGES)) == set()
        bench.settle()
    with Bench(tmp_path) as bench, stopped(bench.serving()):
        assert flushed(bench, bench.save(IMAGES), wait_s=0.05) == set()
    with Bench(tmp_path / "killed") as bench:
        pid = bench.serving()
        with stopped(pid):
            step = bench.save(IMAGES)
            os.kill(pid, signal.SIGKILL)
            assert flushed(bench, step) == set()
        bench.settle()
