# SPDX-License-Identifier: Apache-2.0
"""A producer's scheduler side over a real cache, store process and rank: which items are encoded and announced."""

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed.core import stopped
from benchmarks.testbed.servers.redis import redis_server
from benchmarks.testbed.stand_ins import PATIENCE_S, SILENT, Clock, Request, Served, digest, request
from benchmarks.testbed.waiting import wait_until
from lmcache_ec.adapters.vllm import scheduler as module
from lmcache_ec.adapters.vllm.identifiers import Naming, client_name
from lmcache_ec.cli.status import engines

X, Y, Z = digest("x"), digest("y"), digest("z")
UUID, OTHER_UUID = client_name("a client's own name"), client_name("another")

Produce = Callable[..., Served]


class Items:
    """Stands in for vLLM's function that collects the items' metadata."""

    def announce(self, asked: Request, stored: Callable[[str], bool], namespace: str) -> dict[str, bool]:
        return {feature.identifier: stored(feature.identifier) for feature in asked.mm_features}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "entries"


@pytest.fixture
def producer_on(folder: Path) -> Iterator[Produce]:
    """Producers on one folder; each must hold nothing at the end."""
    running: list[Served] = []

    def start(**changes: Any) -> Served:
        running.append(Served(folder, consumer=False, announcer=Items(), **changes).ready())
        return running[-1]

    yield start
    try:
        for served in running:
            assert served.held() == {}
    finally:
        for served in running:
            served.close()


def produce(producer: Served, asking: Request) -> tuple[int, dict[str, bool]]:
    """A whole request: how many of its items the ranks encoded, and its announcement once all are written."""
    before = len(producer.runner.encoded)
    producer.schedule(asking)
    producer.settle()
    announced: Any = producer.side.request_finished(asking)
    return len(producer.runner.encoded) - before, announced


def evict(producer: Served, *identifiers: str) -> None:
    """vLLM's own encoder cache evicts the items."""
    producer.vllm.evict(*identifiers)
    producer.step()


def forget(producer: Served, identifier: str) -> None:
    """The arena evicts an entry."""
    place = producer.cache.book.live(identifier)
    assert place is not None
    producer.cache.book.forget(place)


def count(producer: Served, name: str) -> int:
    return producer.side.snapshot()[name]


def stored(folder: Path) -> int:
    return len(list(folder.rglob("*.safetensors")))


def store_pid(producer: Served) -> int:
    [pid] = [engine["pid"] for engine in engines() if engine["engine"] == producer.name]
    return int(pid)


def lose(folder: Path) -> None:
    """Remove the folder atomically, whatever the store process is doing there."""
    folder.rename(folder.with_name(f"{folder.name} lost {uuid.uuid4().hex}"))


def test_only_what_a_tier_has_is_announced_as_stored(producer_on: Produce) -> None:
    """An entry under a client's own name stays in memory."""
    assert produce(producer_on(), request("asking", X, UUID)) == (2, {X: True, UUID: False})


def test_stored_items_are_not_encoded_and_nothing_is_moved_to_find_out(producer_on: Produce) -> None:
    """Whether this producer or another stored them, even after a restart, and if vLLM's own cache has lost them."""
    first = producer_on()
    assert produce(first, request("first", X)) == (1, {X: True})
    for producer in (first, producer_on()):
        for number in range(2):
            evict(producer, X)
            assert produce(producer, request(f"again {number}", X)) == (0, {X: True})
        assert produce(producer, request("counted as cached", X)) == (0, {X: True})
        assert count(producer, "fills") == 0


def test_a_request_with_nothing_to_encode_is_served_if_its_item_is_stored_and_fails_alone_if_not(
    producer_on: Produce,
) -> None:
    produce(producer_on(), request("first", X))
    producer = producer_on()
    assert produce(producer, request("known", X, data=None)) == (0, {X: True})
    unknown = request("unknown", Y, data=None)
    assert producer.vllm.offer(unknown) is None
    assert producer.side.take_unavailable_requests() == {"unknown"}
    producer.step()
    producer.side.request_finished(unknown)


def test_a_read_only_remote_counts_only_if_no_other_remote_is_written(producer_on: Produce, tmp_path: Path) -> None:
    """It never gets new entries; consumers find those that it already has."""
    with redis_server(tmp_path / "written") as written, redis_server(tmp_path / "read") as read:
        for identifier, server, remotes in (
            (X, written, [written.url, f"{read.url}?read_only=true"]),
            (Y, read, [read.url]),
        ):
            producer = producer_on(remotes=remotes)
            encoded, _ = produce(producer, request("first", identifier))
            assert encoded == 1
            wait_until("it is written", partial(server.client().keys, "*.safetensors"))
            evict(producer, identifier)
            assert produce(producer, request("again", identifier)) == (0, {identifier: True})
        producer = producer_on(remotes=[f"{read.url}?read_only=true"])
        assert produce(producer, request("there", Y, Z)) == (1, {Y: True, Z: False})


def test_a_skipped_item_that_is_lost_is_encoded_again_though_vllm_counts_it_as_cached(
    producer_on: Produce, folder: Path
) -> None:
    produce(producer_on(), request("first", X))
    producer = producer_on()
    assert produce(producer, request("skipped", X)) == (0, {X: True})
    lose(folder)
    assert produce(producer, request("flushed", X)) == (1, {X: True})
    assert stored(folder) == 1
    assert produce(producer, request("there again", X)) == (0, {X: True})


def test_items_that_are_encoded_again_keep_to_the_encoders_budget(producer_on: Produce, folder: Path) -> None:
    """An item beyond the budget is announced without metadata, and encoded for the next request."""
    produce(producer_on(), request("first", X, Y))
    producer = producer_on(encoder_budget=7)
    assert produce(producer, request("skipped", X, Y)) == (0, {X: True, Y: True})
    lose(folder)
    assert produce(producer, request("flushed", X, Y)) == (1, {X: True, Y: False})
    assert produce(producer, request("once more", X, Y)) == (1, {X: True, Y: True})


@pytest.mark.parametrize("in_memory", [True, False], ids=["in memory", "in vLLM's cache alone"])
def test_a_lost_item_that_is_still_held_is_stored_again_without_an_encode(
    producer_on: Produce, folder: Path, in_memory: bool
) -> None:
    producer = producer_on()
    assert produce(producer, request("first", X)) == (1, {X: True})
    lose(folder)
    if not in_memory:
        forget(producer, X)
    assert produce(producer, request("second", X)) == (0, {X: True})
    assert stored(folder) == 1


def test_an_encode_that_vllm_took_back_is_done_for_the_next_request(producer_on: Produce) -> None:
    """vLLM nevertheless counts the item as cached."""
    producer = producer_on()
    preempted = request("preempted", X)
    producer.vllm.offer(preempted)
    producer.vllm.preempt(preempted)
    producer.step()
    producer.side.request_finished(preempted)
    assert produce(producer, request("next", X)) == (1, {X: True})


def test_an_entry_that_is_lost_while_its_request_runs_is_not_announced(
    producer_on: Produce, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(producer_on(), request("first", X))
    producer = producer_on(window=4)
    clock = Clock(module, monkeypatch)
    long = request("long", X, Y)
    assert producer.schedule(long) == "load encode"
    producer.settle()
    lose(folder)
    clock.now += 2.0
    assert producer.side.ensure_cache_available(long, 2)
    producer.step(long)
    wait_until(
        "its probes are answered", lambda: (producer.settle(), not producer.cache._fetches._probes)[1], PATIENCE_S
    )
    assert producer.side.request_finished(long) == {X: False, Y: False}


def test_an_item_whose_name_another_length_has_is_encoded_and_not_announced_as_stored(
    producer_on: Produce, folder: Path
) -> None:
    """Another item's entry has the name, and keeps it."""
    produce(producer_on(naming=Naming(persist_client_ids=True)), request("first", UUID))
    producer = producer_on(naming=Naming(persist_client_ids=True))
    assert produce(producer, request("longer", UUID, rows=9)) == (1, {UUID: False})
    forget(producer, UUID)
    evict(producer, UUID)
    assert produce(producer, request("first again", UUID)) == (0, {UUID: True})
    evict(producer, UUID)
    assert stored(folder) == 1


def test_nobody_waits_for_the_tiers_longer_than_the_deadline(
    producer_on: Produce, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(producer_on(), request("first", X))
    producer = producer_on(deadline_s=3.0)
    with stopped(store_pid(producer)):
        clock, asking = Clock(module, monkeypatch), request("asking", X)
        for passed_s in (0.0, 2.9):
            clock.now += passed_s
            assert producer.vllm.offer(asking) is None
            producer.step()
        clock.now += 0.2
        assert producer.vllm.offer(asking) == "encode"
        producer.step(asking)
        assert producer.side.request_finished(asking) == {X: False}
    assert count(producer, "timeouts") == 1
    assert produce(producer, request("next", X)) == (0, {X: True})


def test_a_producer_whose_store_process_is_dead_goes_on_encoding_and_serving(producer_on: Produce) -> None:
    produce(producer_on(), request("first", X))
    producer = producer_on(deadline_s=60.0)
    with stopped(pid := store_pid(producer)):
        asking = request("asking", X)
        assert producer.vllm.offer(asking) is None
        producer.step()
        os.kill(pid, signal.SIGKILL)
    assert producer.schedule(asking) == "encode"
    producer.side.request_finished(asking)
    assert produce(producer, request("next", X)) == (0, {X: True})


@pytest.mark.parametrize("vouching", [False, True])
def test_a_producer_logs_a_warning_if_names_keep_its_entries_from_consumers(
    vouching: bool, producer_on: Produce, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(SILENT, "warning", lambda text, *given: lines.append(text % given))
    producer = producer_on(naming=Naming(persist_client_ids=vouching))

    def encode(asking: Request) -> None:
        produce(producer, asking)

    encode(request("content", X))
    assert lines == []
    encode(request("named", UUID))
    encode(request("named again", OTHER_UUID))
    assert ["persist_client_ids" in line for line in lines] == ([] if vouching else [True])
