# SPDX-License-Identifier: Apache-2.0
"""The engine's processes killed, or never complete: entries handed over are stored, and nothing else is left."""

import mmap
import os
import signal
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.testbed.core import (
    MIB,
    Bench,
    Remote,
    Scheduler,
    Step,
    Worker,
    abstract_sockets,
    length,
    names,
    path_of,
    payload,
    process_state,
    stopped,
    store_processes,
    stored,
    stuck,
    temporaries,
)
from benchmarks.testbed.waiting import wait_until
from lmcache_ec.channel import Attach, Attached, Message, StoreLink
from lmcache_ec.entry import room
from lmcache_ec.link import Link, rank_address
from lmcache_ec.rank import Rank

IMAGES = names("image", 10)
DRAIN_S = 20.0


class Engine:
    """A scheduler side and a rank, each in its own process that can be killed."""

    def __init__(self, folder: Path) -> None:
        self.name = str(uuid.uuid4())
        self.rank = Remote(Worker, self.name)
        self.scheduler = Remote(Scheduler, folder, self.name, drain_s=DRAIN_S)
        self.scheduler.call("ready")
        self.store: int = self.scheduler.call("serving")
        self.arena: int = self.scheduler.call("arena_inode")

    def copied(self, identifiers: list[str]) -> None:
        """Encoded, copied into the arena and handed over; not yet reported."""
        step: Step = self.scheduler.call("save", identifiers)
        self.rank.call("run", step, report=False)

    def kill(self, *victims: str) -> None:
        """SIGKILL all at once, as far as one process can."""
        pids = {"scheduler": self.scheduler.process.pid, "rank": self.rank.process.pid, "store": self.store}
        for victim in victims:
            os.kill(pids[victim] or 0, signal.SIGKILL)

    def end(self) -> None:
        self.scheduler.kill()
        self.rank.kill()

    def nothing_left(self) -> bool:
        """Whether the host shows no trace of it: no process, memory or socket."""
        processes = process_state(self.store) != "Z" or store_processes(self.arena)
        address = rank_address(self.name, 0)[1:]
        return not processes and not abstract_sockets(address, f"status-{self.store}-")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    started = Engine(tmp_path)
    yield started
    started.end()


@pytest.mark.parametrize(
    "victims", [["scheduler"], ["rank"], ["scheduler", "rank"], ["rank", "scheduler"]], ids="+".join
)
@pytest.mark.fault(
    "killed right after a save was handed over",
    "engine's processes",
    "the entry is written; nothing is left behind",
    recovery="nothing is left",
)
def test_an_entry_handed_over_right_before_a_kill_is_written_and_nothing_is_left(
    engine: Engine, tmp_path: Path, victims: list[str]
) -> None:
    engine.copied(IMAGES)
    engine.kill(*victims)
    wait_until("the entries are on disk", lambda: all(path_of(tmp_path, name).exists() for name in IMAGES), DRAIN_S)
    if victims == ["scheduler"]:
        wait_until("the store process has ended", lambda: process_state(engine.store) == "Z", DRAIN_S)
    engine.end()
    wait_until("nothing is left", engine.nothing_left, DRAIN_S)
    assert stored(tmp_path) == set(IMAGES)
    assert not temporaries(tmp_path)
    with Bench(tmp_path) as successor:
        assert all(successor.serves(name) for name in IMAGES)


@pytest.mark.fault(
    "killed before the store process has read anything",
    "engine's processes",
    "saves already handed over are written",
    recovery="nothing is left",
)
def test_entries_handed_over_before_the_store_process_has_read_anything_survive_a_kill(
    engine: Engine, tmp_path: Path
) -> None:
    """The links hold everything that was handed over, and unread answers."""
    engine.copied(IMAGES[:5])
    wait_until("it has answered", lambda: all(path_of(tmp_path, name).exists() for name in IMAGES[:5]))
    with stopped(engine.store):
        engine.copied(IMAGES[5:])
        engine.kill("scheduler", "rank")
        engine.end()
    wait_until("nothing is left", engine.nothing_left, DRAIN_S)
    assert stored(tmp_path) == set(IMAGES)
    assert not temporaries(tmp_path)


@pytest.mark.fault(
    "killed before a rank has handed over its saves",
    "scheduler side",
    "the store process waits for the rank; its entries are written",
    recovery="the store process has ended",
)
def test_a_rank_that_hands_over_after_the_scheduler_side_was_killed_is_waited_for(tmp_path: Path) -> None:
    """Simulated over the bare links: a `Rank` would close them as soon as it notices."""
    name = str(uuid.uuid4())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as address:
        address.bind(rank_address(name, 0))
        address.listen()
        scheduler = Remote(Scheduler, tmp_path, name, drain_s=DRAIN_S, start_timeout_s=1.0)
        link = Link(address.accept()[0])
        received = dict(link_messages(link, Attach, StoreLink))
        link.send(Attached(0))
        scheduler.call("ready")
        store: int = scheduler.call("serving")
        step: Step = scheduler.call("save", IMAGES)
        scheduler.kill()
        with mmap.mmap(received[Attach], 0) as memory:
            for save in step.saves:
                memory[save.offset + room(save.identifier) : save.offset + save.length] = payload(save.identifier)
        saver = Link(socket.socket(fileno=received[StoreLink]))
        for save in step.saves:
            assert saver.send(save)
        wait_until(
            "the entries are on disk", lambda: len(list(tmp_path.rglob("*.safetensors"))) == len(IMAGES), DRAIN_S
        )
        assert process_state(store) != "Z"
        saver.close()
        link.close()
        os.close(received[Attach])
    wait_until("the store process has ended", lambda: process_state(store) == "Z", DRAIN_S)
    assert stored(tmp_path) == set(IMAGES)


def link_messages(link: Link, *kinds: type[Message]) -> list[tuple[type[Message], int]]:
    """Wait for one message of each kind, in this order. Returns kinds and descriptors."""
    found: list[tuple[type[Message], int]] = []

    def all_came() -> bool:
        received = link.receive()
        if received is not None:
            assert type(received[0]) is kinds[len(found)]
            found.append((type(received[0]), received[1][0] if received[1] else -1))
        return len(found) == len(kinds)

    wait_until(f"{kinds} have come", all_came)
    return found


@pytest.mark.fault(
    "killed together with the store process",
    "engine's processes",
    "nothing is left behind; no partial entry is served",
    recovery="nothing is left",
)
def test_processes_that_are_all_killed_together_leave_nothing_behind_and_serve_no_part_of_an_entry(
    engine: Engine, tmp_path: Path
) -> None:
    engine.copied([*IMAGES])
    step = engine.scheduler.call("save", ["big"], 32 * MIB // 128)
    engine.rank.call("run", step, report=False)

    def half_written() -> bool:
        try:
            return any(path.stat().st_size > MIB for path in temporaries(tmp_path))
        except FileNotFoundError:
            return False  # a small one has just been renamed

    wait_until("a file is half written", half_written)
    engine.kill("store", "scheduler", "rank")
    engine.end()
    wait_until("nothing is left", engine.nothing_left)
    assert stored(tmp_path) == set(IMAGES)
    with Bench(tmp_path) as successor:
        successor.scanned()
        assert not temporaries(tmp_path)
        assert not successor.fetch("big", 32 * MIB // 128)
        assert all(successor.serves(name) for name in IMAGES)


@pytest.mark.fault(
    "hangs when the engine ends",
    "LocalDisk",
    "the store process exits after drain_s",
    recovery="it has ended all the same",
)
def test_a_disk_that_hangs_keeps_the_store_process_no_longer_than_the_drain(tmp_path: Path) -> None:
    name = str(uuid.uuid4())
    with stuck(tmp_path / "bench-0123456789abcdef" / ".tmp" / "stuck"):
        with Bench(tmp_path, engine=name, drain_s=0.5) as bench:
            bench.encode(IMAGES)
            bench.until("it is sealed", lambda: all(map(bench.live, IMAGES)))
            pid, arena = bench.serving(), bench.arena
        wait_until("it has ended all the same", lambda: process_state(pid) == "Z")
        assert not store_processes(arena)
        assert not stored(tmp_path)


# ---- missing ranks


def nothing_is_promised(bench: Scheduler) -> bool:
    bench.drain()
    wanted = [bench.cache.fetch(name, length(name), 0.0) or bench.live(name) for name in IMAGES]
    return not any(wanted) and not bench.save(["another"]).saves


def kept(folder: Path) -> None:
    with Bench(folder) as bench:
        bench.encode(IMAGES)
        bench.settle()


@pytest.mark.fault("exits", "rank", "the cache becomes inert")
def test_a_rank_that_ends_makes_the_cache_inert_for_good(tmp_path: Path) -> None:
    kept(tmp_path)
    name = str(uuid.uuid4())
    others = Remote(Worker, name, 1)
    own = Worker(name, 0)
    scheduler = Scheduler(tmp_path, name, ranks=2)
    try:
        scheduler.ready()
        assert scheduler.fetch(IMAGES[0])
        assert not scheduler.cache.inert
        others.kill()
        scheduler.until("the cache is inert", lambda: scheduler.cache.inert)
        assert not scheduler.cache.fetch(IMAGES[1], length(IMAGES[1]), 0.0)
        scheduler.drain()
        assert scheduler.cache.inert
    finally:
        scheduler.close()
        own.close()


@pytest.mark.fault("cannot be reached", "rank", "the cache becomes inert at once")
def test_a_rank_that_cannot_be_reached_makes_the_cache_inert_at_once(tmp_path: Path) -> None:
    kept(tmp_path)
    scheduler = Scheduler(tmp_path, str(uuid.uuid4()))
    try:
        assert "rank 0" in scheduler.cache.inert
        assert nothing_is_promised(scheduler)
        assert not scheduler.cache.ready
    finally:
        scheduler.close()


@pytest.mark.fault("has not mapped the arena yet", "rank", "no load is promised")
def test_nothing_is_promised_until_every_rank_has_mapped_the_arena(tmp_path: Path) -> None:
    kept(tmp_path)
    name = str(uuid.uuid4())
    worker = Worker(name, 0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(rank_address(name, 1))
        silent.listen()
        scheduler = Scheduler(tmp_path, name, ranks=2, start_timeout_s=1.0)
        try:
            wait_until("the other rank is there", lambda: worker.rank.arena_id)
            assert nothing_is_promised(scheduler)
            assert not scheduler.cache.ready
        finally:
            scheduler.close()
            worker.close()


@pytest.mark.fault("gets orders for another arena", "rank", "it copies nothing")
def test_a_rank_copies_nothing_for_an_arena_that_is_not_its_own(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench, Bench(tmp_path) as other:
        step = bench.save(IMAGES)
        bench.workers[0].run(Step(other.cache.arena_id, step.number, step.saves))
        bench.until("it is reported", lambda: not bench.cache.book.outstanding())
        bench.settle()
        assert not any(map(bench.live, IMAGES))
        assert bench.snapshot()["saves_void"] == len(IMAGES)
    assert not stored(tmp_path)


def test_an_address_serves_one_rank() -> None:
    name = str(uuid.uuid4())
    first = Worker(name)
    with pytest.raises(OSError, match="in use"):
        Rank(name, 0)
    first.close()
    Worker(name).close()
