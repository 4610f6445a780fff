# SPDX-License-Identifier: Apache-2.0
"""An arena whose memory a device registers: what is registered when, what allocates its pages, and how it is released.

Real scheduler side, store process and workers; `torch.cuda` is replaced by a stand-in with its rules (`tests.cuda`).
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import lmcache_ec.rank
from benchmarks.gpu_check.card import Card
from benchmarks.gpu_check.payload import difference, output, spec_of
from benchmarks.gpu_check.rig import MIB, Rig
from benchmarks.testbed.waiting import wait_until
from lmcache_ec.adapters.vllm import copier
from lmcache_ec.arena import GRANULE_BYTES
from lmcache_ec.channel import Segment
from tests.cuda import OUT_OF_MEMORY, PATIENCE_S, Cuda, OnDevice

SPEC = spec_of(2.75)
LINGER_S = 3600.0


@pytest.fixture
def cuda() -> Iterator[Cuda]:
    cuda = Cuda(running=True, device_bytes=256 * MIB)
    with OnDevice(cuda):
        yield cuda
    cuda.check()
    assert cuda.faults == []


@pytest.fixture
def card(cuda: Cuda) -> Card:
    return Card(torch.device("cuda", 0), cuda, "", {})


def store(rig: Rig, card: Card, *names: str) -> None:
    for name in names:
        rig.save({name: output(card, name, SPEC)})
        rig.rank.cache.clear()
    rig.settle()


def grown(rig: Rig) -> None:
    """Wait until nothing is being registered."""
    rig.until("the arena has grown", lambda: rig.cache._ranks.growth._segment is None)


def served(rig: Rig, *names: str) -> bool:
    """Whether a step that loads them gets the stored bytes."""
    rig.rank.cache.clear()
    rig.load(names)
    return not any(difference(rig.rank.loaded(name), name, SPEC) for name in names)


def registered(cuda: Cuda) -> int:
    return sum(each.length for each in cuda.registered)


# ---- how it grows


def test_the_first_granule_is_there_before_the_first_pass_and_no_more(cuda: Cuda, card: Card) -> None:
    """Whatever the largest entry may be: the rig sets 8 GiB, as for the largest models."""
    with Rig.local(card, 1024 * MIB) as rig:
        assert rig.cache.ready
        assert registered(cuda) == rig.resident == GRANULE_BYTES
        for _ in range(20):
            rig.drain()
        assert registered(cuda) == GRANULE_BYTES


def test_what_is_registered_follows_what_is_stored(cuda: Cuda, card: Card) -> None:
    names = [f"image {number}" for number in range(24)]
    with Rig.local(card, 1024 * MIB) as rig:
        for name in names:
            store(rig, card, name)
            grown(rig)
            assert registered(cuda) == rig.cache.snapshot()["opened_bytes"] == rig.resident
            assert registered(cuda) <= 2.5 * rig.cache.snapshot()["used_bytes"] + GRANULE_BYTES
        assert registered(cuda) >= 24 * SPEC.nbytes
        assert served(rig, *names)
    assert cuda.registered == []
    assert cuda.stalls == 0, "every copy ran beside its caller"


def test_the_store_process_makes_the_pages_before_the_device_registers_them(cuda: Cuda, card: Card) -> None:
    with Rig.local(card, 256 * MIB) as rig:
        store(rig, card, *(f"image {number}" for number in range(16)))
        assert len(cuda.registered) > 1
        assert all(each.was_resident for each in cuda.registered)


def test_steps_go_on_while_a_granule_is_being_registered(cuda: Cuda, card: Card) -> None:
    going_on, entered = threading.Event(), threading.Event()

    def slow(address: int, length: int) -> int:
        entered.set()
        assert going_on.wait(PATIENCE_S)
        return 0

    with Rig.local(card, 256 * MIB) as rig:
        store(rig, card, "first")
        cuda.refuse = slow
        store(rig, card, *(f"image {number}" for number in range(6)))
        wait_until("more is being registered", entered.is_set, doing=rig.drain)
        before = registered(cuda)
        store(rig, card, "meanwhile")
        assert served(rig, "first", "meanwhile")
        assert registered(cuda) == before
        going_on.set()
        wait_until("more is registered", lambda: registered(cuda) > before, doing=rig.drain)


def test_a_store_process_that_dies_holds_up_no_growth(cuda: Cuda, card: Card) -> None:
    with Rig.local(card, 256 * MIB) as rig:
        store(rig, card, "first")
        rig.cache._store.process.kill()
        rig.until("another one serves", lambda: rig.cache._store.number == 2 and rig.cache._store.process.introduced)
        names = [f"image {number}" for number in range(16)]
        store(rig, card, *names)
        assert registered(cuda) > GRANULE_BYTES
        assert served(rig, "first", *names)


def test_where_nothing_is_registered_the_whole_arena_is_in_use_and_costs_nothing(cuda: Cuda) -> None:
    host = Card(torch.device("cpu"), cuda, "", {})
    with Rig.local(host, 1024 * MIB, copier=copier.HostCopier()) as rig:
        assert rig.cache.snapshot()["opened_bytes"] == 1024 * MIB
        assert rig.resident == 0
        store(rig, host, "image")
        assert rig.resident < 2 * SPEC.nbytes


# ---- what is refused


def test_a_device_that_registers_nothing_is_served_over_pageable_memory(
    cuda: Cuda, card: Card, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.refuse = lambda address, length: OUT_OF_MEMORY
    with Rig.local(card, 256 * MIB) as rig:
        store(rig, card, "image", "other")
        assert served(rig, "image", "other")
        assert rig.cache.snapshot()["opened_bytes"] == 256 * MIB
        assert rig.resident == GRANULE_BYTES, "no pages are made ahead where no device asks for them"
    assert cuda.stalls == 4
    [line] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "pageable memory" in line
    assert f"status {OUT_OF_MEMORY}" in line


def test_a_refusal_later_on_ends_the_growth_and_keeps_what_is_there(
    cuda: Cuda, card: Card, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"image {number}" for number in range(30)]
    with Rig.local(card, 1024 * MIB) as rig:
        store(rig, card, *names[:10])
        kept = registered(cuda)
        cuda.refuse = lambda address, length: OUT_OF_MEMORY
        for name in names[10:]:
            store(rig, card, name)
            assert served(rig, name)
        assert rig.cache.snapshot()["opened_bytes"] == rig.cache.snapshot()["capacity_bytes"] >= kept
        assert rig.cache.snapshot()["evictions"] > 0
        assert not rig.cache.inert
    assert cuda.registered == []
    [line] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "rank 0 can use no more of LocalCPU" in line


# ---- how it is released


def test_a_worker_that_ends_unregisters_before_it_unmaps(cuda: Cuda, card: Card) -> None:
    rig = Rig.local(card, 256 * MIB)
    store(rig, card, "image")
    rig.close()
    assert cuda.registered == []


@pytest.mark.parametrize("way", ["its scheduler side has ended", "a hook has failed", "its link thread has failed"])
def test_a_worker_that_serves_on_loads_what_was_promised_and_then_gives_everything_back(
    cuda: Cuda, card: Card, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next mapping can reuse the addresses."""
    passed_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s[0])
    monkeypatch.setattr(lmcache_ec.rank, "time", clock)
    rig = Rig.local(card, 256 * MIB, linger_s=LINGER_S)
    store(rig, card, "image")
    rank = rig.rank.worker._rank
    assert rank is not None

    def let_time_pass() -> None:
        passed_s[0] += 2 * LINGER_S
        os.eventfd_write(rank._wake, 1)

    promised = rig.load_orders(["image"])
    if way == "a hook has failed":
        rig.rank.worker.abandon()
    elif way == "its link thread has failed":
        monkeypatch.setattr(rank, "_take", lambda *_: 1 / 0)
        rig.cache._ranks.links[0].send(Segment(0, 0))
    if way != "its scheduler side has ended":
        wait_until("its link is closed", lambda: rank._link is None)
        rig.step(promised, {})
        assert not difference(rig.rank.loaded("image"), "image", SPEC)
    rig.cache.close()
    wait_until("its link is closed", lambda: rank._link is None)
    assert rank.memory is not None
    wait_until("it is given back", lambda: rank.memory is None and not cuda.registered, doing=let_time_pass)
    cuda.check()
    rig.rank.close()


def test_one_engine_after_another_in_one_process_can_register(cuda: Cuda, card: Card) -> None:
    """Addresses are reused: if one were still registered, the next registration would be refused."""
    for _ in range(4):
        with Rig.local(card, 512 * MIB) as rig:
            store(rig, card, "image")
            assert served(rig, "image")
    assert cuda.refusals == []


def test_a_registration_that_hangs_does_not_keep_its_worker_from_ending(
    cuda: Cuda, card: Card, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lmcache_ec.rank, "_END_S", 0.2)
    rig, going_on, entered = Rig.local(card, 256 * MIB), threading.Event(), threading.Event()

    def slow(address: int, length: int) -> int:
        entered.set()
        return int(not going_on.wait(PATIENCE_S))

    cuda.refuse = slow
    store(rig, card, *(f"image {number}" for number in range(8)))
    wait_until("more is being registered", entered.is_set, doing=rig.drain)
    began = time.monotonic()
    rig.close()
    assert time.monotonic() - began < PATIENCE_S / 2, "it waits for the device"
    assert "does not respond" in caplog.text
    going_on.set()
    wait_until("it is given back", lambda: not cuda.registered)
