# SPDX-License-Identifier: Apache-2.0
"""The scheduler side over a real cache, store process and rank, called as by vLLM's scheduler, in the same order.

Every scenario ends with nothing held: no pin, lease, order, place in transition, fetch or remembered request.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.testbed.stand_ins import (
    PATIENCE_S,
    WIDTH,
    Clock,
    Feature,
    Position,
    Request,
    Served,
    digest,
    embedding,
    request,
)
from benchmarks.testbed.waiting import wait_until
from lmcache_ec.adapters.vllm import scheduler as module
from lmcache_ec.adapters.vllm.identifiers import Naming, client_name, counter_name

PLACE_BYTES = 8192  # size of an entry in these tests: 4096 before the payload, and a page for the payload
X, Y, Z = digest("x"), digest("y"), digest("z")
UUID, OTHER_UUID = client_name("a client's own name"), client_name("another")

Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Engines on one folder, one after another or side by side; each must hold nothing at the end."""
    running: list[Served] = []

    def start(**changes: Any) -> Served:
        changes.setdefault("folder", tmp_path / "entries")
        running.append(Served(**changes).ready())
        return running[-1]

    yield start
    try:
        for served in running:
            if not served.cache.inert:
                assert served.held() == {}
    finally:
        for served in running:
            served.close()


def finish(served: Served, *requests: Request) -> None:
    for each in requests:
        served.side.request_finished(each)


def offer(served: Served, asking: Request) -> None:
    """A pass in which the request is offered, and its step."""
    served.vllm.offer(asking)
    served.step()


def forget(served: Served, identifier: str) -> None:
    """The arena evicts an entry."""
    place = served.cache.book.live(identifier)
    assert place is not None
    served.cache.book.forget(place)


def refused(served: Served, asking: Request) -> None:
    """Run passes until the request fails."""
    wait_until(
        "its request fails",
        served.side.take_unavailable_requests,
        PATIENCE_S,
        doing=lambda: offer(served, asking),
    )


def count(served: Served, name: str) -> int:
    return served.side.snapshot()[name]


# ---- the common case


def test_an_item_is_encoded_once_and_loaded_ever_after_also_by_the_next_engine(serve: Serve) -> None:
    first = serve()
    first.store(X, Y)
    assert first.runner.encoded == [X, Y]
    again = request("again", X, Y)
    assert first.schedule(again) == "load load"
    finish(first, again)

    second = serve()
    restarted = request("restarted", X, Y, Z)
    assert second.schedule(restarted) == "load load encode"
    finish(second, restarted)
    assert second.runner.encoded == [Z]
    for engine in (first, second):
        for identifier in (X, Y):
            assert torch.equal(engine.runner.cache[identifier], embedding(identifier))
    assert count(second, "loads_disk") == 2


def test_a_first_seen_item_waits_for_nothing(serve: Serve) -> None:
    serve().store(X)
    served = serve()
    new = request("new", Y)
    assert served.vllm.offer(new) == "encode"
    served.step(new)
    finish(served, new)
    assert (count(served, "deferred_passes"), count(served, "fetches"), count(served, "filtered")) == (0, 0, 1)


def test_two_requests_in_one_pass_share_a_load_and_a_save(serve: Serve) -> None:
    served = serve()
    served.store(X)
    one, two = request("one", X, Y), request("two", Y, X)
    assert (served.vllm.offer(one), served.vllm.offer(two)) == ("load encode", "")
    output = served.vllm.end_pass()
    assert [load.identifier for load in output.ec_connector_metadata.loads] == [X]
    assert list(output.ec_connector_metadata.saves) == [Y]
    served.runner.run(output, one, two)
    finish(served, one, two)


# ---- what vLLM's own cache may drop


def test_restoring_an_item_costs_a_read_of_the_nearest_tier_that_has_it(serve: Serve) -> None:
    """An unsealed entry may still be lost, so it does not count."""
    served = serve()
    served.cache.policy.encode_s = lambda items: 0.05  # type: ignore[method-assign]

    def cost(identifier: str) -> float:
        return served.side.restore_s(identifier, "image", 100)

    served.store(X, Y)
    forget(served, Y)
    assert cost(X) < cost(Y) < cost(Z)
    encode = request("encode", Z)
    assert served.vllm.offer(encode) == "encode"
    output = served.vllm.end_pass()
    unsaved = cost(Z)
    served.runner.run(output, encode)
    finish(served, encode)
    served.settle()
    assert cost(X) == cost(Z) < unsaved == cost("nobody has it")


@pytest.mark.parametrize("identifier", ["", "\ud800", "x" * 5000])
def test_restoring_an_item_that_can_have_no_entry_costs_its_encode(serve: Serve, identifier: str) -> None:
    served = serve()
    assert served.side.restore_s(identifier, "image", 100) == served.side.restore_s(Z, "image", 100)


def test_restoring_an_item_that_is_never_loaded_costs_its_encode(serve: Serve) -> None:
    served = serve(consumer=False)
    served.store(X)
    assert served.side.restore_s(X, "image", 100) == served.side.restore_s(Z, "image", 100)


def test_restoring_an_item_costs_its_encode_once_the_cache_has_given_up(serve: Serve) -> None:
    served = serve()
    served.store(X)
    served.cache.inert = "set by the test"
    assert served.side.restore_s(X, "image", 100) == served.side.restore_s(Z, "image", 100)


# ---- promises


def test_a_promise_that_finds_no_room_in_the_kv_cache_lasts_only_for_its_pass(serve: Serve) -> None:
    served = serve()
    served.store(X)
    waiting = request("waiting", X)
    for _ in range(20):
        assert served.vllm.offer(waiting, blocks=False) == "load"
        served.step()
        assert (count(served, "pins"), count(served, "leases")) == (1, 1)  # the waiting request's lease
    assert served.schedule(waiting) == "load"
    finish(served, waiting)


def test_an_aborted_request_gives_its_leases_back(serve: Serve) -> None:
    served = serve()
    served.store(X, Y)
    aborted = request("aborted", X, Y)
    served.vllm.offer(aborted, blocks=False)
    served.step()
    assert count(served, "leases") == 2
    finish(served, aborted)
    assert (count(served, "leases"), count(served, "pins")) == (0, 0)


def test_no_entry_serves_an_item_of_another_length(serve: Serve) -> None:
    """A client gives one name to pictures of different sizes. The engine dies with too few rows, errs with too many."""
    served = serve()
    for name, rows, how in (("small", 4, "encode"), ("large", 9, "encode"), ("small again", 4, "load")):
        asking = request(name, UUID, rows=rows)
        assert served.schedule(asking) == how
        finish(served, asking)
        assert len(served.runner.cache[UUID]) == rows
        served.settle()
        served.vllm.evict(UUID)
        served.step()


@pytest.mark.parametrize("kept", [True, False], ids=["in memory", "evicted each time"])
def test_a_name_used_for_two_lengths_in_turn_costs_the_encodes_of_one_and_no_writes(
    serve: Serve, tmp_path: Path, kept: bool
) -> None:
    """Ten requests each. The first entry stays as it is, and no request waits for it in vain a second time."""
    served = serve(naming=Naming(persist_client_ids=True))
    for number in range(20):
        asking = request(f"request {number}", UUID, rows=(4, 9)[number % 2])
        assert served.schedule(asking) == ("load" if number and not number % 2 else "encode")
        finish(served, asking)
        served.settle()
        served.vllm.evict(UUID)
        served.step()
        if number == 0:
            [path] = (tmp_path / "entries").rglob("*.safetensors")
            before = path.read_bytes()
        if not kept and (place := served.cache.book.live(UUID)) is not None:
            served.cache.book.forget(place)
    assert [len(served.runner.cache.get(UUID, ())), served.runner.encoded] == [0, [UUID] * 11]
    counts = served.side.snapshot()
    assert (counts["writes"], counts["misfits"], counts["timeouts"]) == (1, 1, 0)
    assert counts["fills"] <= (1 if kept else 10)
    assert path.read_bytes() == before
    served.vllm.evict(UUID)


def test_a_metadata_only_request_for_another_length_fails_alone_and_takes_nothing_from_others(
    serve: Serve, tmp_path: Path
) -> None:
    """Any client may send one, even to a consumer, which never writes."""
    serve().store(X)
    [path] = (tmp_path / "entries").rglob("*.safetensors")
    consumer = serve(producer=False, widths={})
    for number in range(3):
        wrong, right = metadata_only(f"wrong {number}", X, rows=9), metadata_only(f"right {number}", X)
        refused(consumer, wrong)
        assert consumer.schedule(right) == "load"
        finish(consumer, wrong, right)
        consumer.vllm.evict(X)
        consumer.step()
    assert path.exists()


def test_a_name_given_twice_in_one_prompt_is_not_promised_for_the_wrong_one(serve: Serve) -> None:
    """vLLM asks only by name, so a promise has to fit every item with that name."""
    served = serve()
    twice = Request("twice", [Feature(UUID, Position(0, 4)), Feature(UUID, Position(10, 9))])
    served.store(UUID)
    served.vllm.offer(twice, blocks=False)
    served.step()
    assert served.side.ensure_cache_available(twice, 8)  # the prefix cache has the first one by now
    assert not served.side.has_cache_item(UUID)
    served.step()
    finish(served, twice)


class Counted(str):
    """A name that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_a_question_about_one_item_costs_no_look_at_the_others(serve: Serve) -> None:
    """A prompt may have thousands of items, and vLLM asks about all items of a pass, on the scheduler's thread."""
    served = serve(folder=None, arena_bytes=200 * PLACE_BYTES, window=10_000)
    images = [Counted(digest(f"image {number}")) for number in range(100)]
    served.store(*map(str.lower, images))
    many = request("many", *images)
    assert served.side.ensure_cache_available(many, 0)
    Counted.compared = 0
    assert all(served.side.has_cache_item(identifier) for identifier in images)
    assert Counted.compared < 20 * len(images)
    served.step()
    finish(served, many)


# ---- vLLM's own encoder cache


def test_an_item_that_vllm_holds_is_neither_fetched_nor_waited_for(serve: Serve) -> None:
    served = serve()
    first, second = request("first", X), request("second", X)
    served.schedule(first)
    served.settle()
    forget(served, X)
    assert served.vllm.offer(second) == ""
    served.step()
    finish(served, first, second)
    assert (count(served, "fetches"), count(served, "deferred_passes")) == (0, 0)


def test_a_question_about_an_item_that_vllm_held_means_that_vllm_has_emptied_its_cache(serve: Serve) -> None:
    served = serve()
    first = request("first", X, Y)
    served.schedule(first)
    served.settle()
    served.vllm.cached.clear()
    again = request("again", X)
    assert served.vllm.offer(again) == "load"
    served.step(again)
    forget(served, Y)
    other = request("other", Y)
    assert served.schedule(other) == "load"  # fetched, though vLLM never reported it as freed
    finish(served, first, again, other)
    assert count(served, "mirror_resets") == 1


def test_an_item_evicted_and_asked_for_in_one_pass_is_no_sign_of_an_emptied_cache(serve: Serve) -> None:
    """vLLM evicts for one request what the next in the same pass needs, and reports that only at the pass's end."""
    served = serve()
    first = request("first", X, Y)
    served.schedule(first)
    served.settle()
    forget(served, Y)
    served.vllm.evict(X)
    again, other = request("again", X), request("other", Y)
    assert served.vllm.offer(again) == "load"
    served.step(again)
    assert served.vllm.offer(other) == ""
    served.step(other)
    finish(served, first, again, other)
    assert (count(served, "mirror_resets"), count(served, "fetches")) == (0, 0)


def test_an_item_evicted_and_given_room_again_in_one_pass_is_no_sign_of_an_emptied_cache(serve: Serve) -> None:
    """vLLM 0.32 does not report such an item at the end (`EncoderCacheManager.get_freed_mm_hashes`)."""
    served = serve()
    first = request("first", X, Y)
    served.schedule(first)
    served.settle()
    forget(served, Y)
    larger, again, other = request("larger", Z), request("again", X), request("other", Y)
    served.vllm.cached.discard(X)  # evicted for the next request's item
    assert served.vllm.offer(larger) == "encode"
    assert served.vllm.offer(again) == "load"
    served.step(larger, again)
    assert served.vllm.offer(other) == ""
    served.step(other)
    finish(served, first, larger, again, other)
    assert (count(served, "mirror_resets"), count(served, "fetches")) == (0, 0)


# ---- steps that never run


def test_a_step_without_tokens_drops_reservations_and_keeps_loads(serve: Serve) -> None:
    served = serve()
    served.store(X)
    new, stored = request("new", Y), request("stored", X)
    assert (served.vllm.offer(new), served.vllm.offer(stored)) == ("encode", "load")
    for each in (new, stored):
        served.vllm.preempt(each)
    output = served.vllm.end_pass()
    assert output.ec_connector_metadata.step == 0
    assert (count(served, "places_reserved"), count(served, "pins")) == (0, 1)
    served.runner.run(output)
    served.vllm.cached.discard(Y)
    served.step(text=1)
    assert served.runner.cache == {}
    assert served.vllm.offer(stored) == ""  # vLLM believes that it holds the item
    served.step(stored)
    assert torch.equal(served.runner.cache[X], embedding(X))
    finish(served, new, stored)


def test_a_load_goes_out_with_a_step_that_could_encode_the_item_in_its_place(serve: Serve) -> None:
    """Its own request was preempted in the pass that promised it. From then on vLLM counts the item as cached: if a
    load failed in a step without a request that can encode it, the next request to gather it would end the engine."""
    served = serve()
    served.store(X)
    preempted, text, other = request("preempted", X), request("text"), request("other", Y, X)
    assert served.vllm.offer(preempted) == "load"
    served.vllm.preempt(preempted)
    assert served.vllm.offer(text) == ""
    output = served.vllm.end_pass()
    assert output.ec_connector_metadata.loads == []
    served.runner.run(output, text)
    finish(served, preempted)
    assert served.vllm.offer(other) == "encode"
    output = served.vllm.end_pass()
    [load] = output.ec_connector_metadata.loads
    assert load.item == ("other", 1)
    output.ec_connector_metadata.loads = [replace(load, offset=1 << 30)]
    served.runner.encoded.clear()
    served.runner.run(output, other)
    assert sorted(served.runner.encoded) == sorted([X, Y])
    assert torch.equal(served.runner.cache[X], embedding(X))
    finish(served, text, other)


def test_a_load_that_waits_is_given_up_when_vllm_empties_its_cache(serve: Serve) -> None:
    served = serve()
    served.store(X, Y)
    preempted, held = request("preempted", X), request("held", Y)
    assert served.vllm.offer(held) == "load"
    assert served.vllm.offer(preempted) == "load"
    served.vllm.preempt(preempted)
    served.step(held)
    assert set(served.side._loads.waiting) == {X}
    served.vllm.cached.clear()
    again = request("again", Y)
    assert served.vllm.offer(again) == "load"
    served.step(again)
    assert not served.side._loads.waiting
    finish(served, preempted, held, again)


def test_if_a_shared_load_fails_the_item_is_encoded_for_the_request_that_carries_it(serve: Serve) -> None:
    served = serve()
    served.store(X)
    without, with_media = metadata_only("without", X), request("with", X)
    served.stage(without)
    assert (served.vllm.offer(without), served.vllm.offer(with_media)) == ("load", "")
    output = served.vllm.end_pass()
    [load] = output.ec_connector_metadata.loads
    assert load.item == ("with", 0)
    served.runner.run(output, without, with_media)
    finish(served, without, with_media)


def test_an_item_that_vllm_has_taken_back_from_its_workers_is_not_promised(serve: Serve) -> None:
    """0.33's V2 runner drops an item's pixels once it is computed. After a rollback and an eviction, no encode could
    replace a failed load; an encode that vLLM schedules comes with the pixels."""

    def updates(payload: Any) -> None:
        served.vllm._output.scheduled_new_reqs = []
        served.vllm._output.encoder_input_updates = {"asking": {0: payload}}

    served = serve()
    served.store(X)
    asking = request("asking", X)
    assert served.schedule(asking) == "load"
    updates(None)
    served.vllm.evict(X)
    served.step()
    assert served.vllm.offer(asking) == "encode"
    updates("pixels")
    served.step(asking)
    served.vllm.evict(X)
    served.step()
    assert served.vllm.offer(asking) == "load"
    served.step(asking)
    finish(served, asking)


def test_a_postponed_load_that_vllm_no_longer_wants_is_dropped(serve: Serve) -> None:
    served = serve()
    served.store(X)
    stored = request("stored", X)
    served.vllm.offer(stored)
    served.vllm.preempt(stored)
    served.runner.run(served.vllm.end_pass())
    served.vllm.evict(X)
    output = served.vllm.end_pass(text=1)
    assert output.ec_connector_metadata.loads == []
    served.runner.run(output)
    finish(served, stored)


def test_an_encode_taken_back_by_a_preemption_leaves_no_place(serve: Serve) -> None:
    served = serve()
    new = request("new", X)
    served.vllm.offer(new)
    served.vllm.preempt(new)
    output = served.vllm.end_pass(text=1)
    assert output.ec_connector_metadata.saves == {}
    served.runner.run(output)
    finish(served, new)
    assert count(served, "used_bytes") == 0


# ---- saves


def test_a_save_that_found_no_room_is_done_later_while_vllm_holds_the_item(serve: Serve) -> None:
    served = serve(arena_bytes=2 * PLACE_BYTES)
    requests = [request(name, digest(name)) for name in ("a", "b", "late")]
    outputs = []
    for each in requests:
        served.vllm.offer(each)
        outputs.append(served.vllm.end_pass())
    assert count(served, "unsaved") == 1
    for output in outputs:
        served.runner.run(output, *requests)
    wait_until("nothing is owed", lambda: (served.settle(), count(served, "unsaved") == 0)[1], PATIENCE_S)
    finish(served, *requests)
    next_engine = serve()
    restarted = request("restarted", *(digest(name) for name in ("a", "b", "late")))
    assert next_engine.schedule(restarted) == "load load load"
    finish(next_engine, restarted)


def test_an_entry_for_which_memory_can_never_have_room_is_reported(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(arena_bytes=4096)
    asking = request("one", X)
    served.vllm.offer(asking)
    served.runner.run(served.vllm.end_pass(), asking)
    finish(served, asking)
    [line] = [line for line in caplog.messages if "is not saved" in line]
    assert "LocalCPU, through which all entries pass, has only 4.0 KiB. Raise max_local_cpu_size" in line


def test_a_save_that_found_no_room_is_forgotten_when_vllm_frees_the_item(serve: Serve) -> None:
    served = serve(arena_bytes=PLACE_BYTES)
    one, two = request("one", X), request("two", Y)
    served.vllm.offer(one)
    first = served.vllm.end_pass()
    served.vllm.offer(two)
    second = served.vllm.end_pass()
    served.vllm.evict(Y)
    for output in (first, second):
        served.runner.run(output, one, two)
    served.settle()
    finish(served, one, two)
    assert (count(served, "unsaved"), count(served, "saves")) == (0, 1)


def test_a_save_dropped_for_an_item_that_came_back_in_the_pass_of_its_eviction_is_done_later(serve: Serve) -> None:
    served = serve(arena_bytes=PLACE_BYTES)
    one, two = request("one", X), request("two", Y)
    for each in (one, two):
        served.schedule(each)
        served.settle()
    blocking = request("blocking", Z)
    served.vllm.offer(blocking)
    blocked = served.vllm.end_pass()  # the only place is in use until this step has run
    served.vllm.evict(X)
    again = request("again", UUID, X)
    served.vllm.offer(again)
    output = served.vllm.end_pass()
    for each in (blocked, output):
        served.runner.run(each, blocking, again)
    assert X in served.cache.book.unsaved
    finish(served, one, two, blocking, again)
    served.vllm.evict(UUID)
    served.settle()


def test_an_output_of_an_unexpected_form_is_not_saved_again_and_again(serve: Serve) -> None:
    served = serve()
    served.runner.encode = lambda identifier, rows: torch.ones(rows, 3)
    odd = request("odd", X)
    served.schedule(odd)
    steps = []
    for _ in range(5):
        output = served.vllm.end_pass(text=1)
        steps.append(len(output.ec_connector_metadata.retries))
        served.runner.run(output)
        wait_until(
            "all is reported",
            lambda: not served.cache.book.outstanding(),
            PATIENCE_S,
            doing=lambda: served.cache.drain(0.0),
        )
    finish(served, odd)
    assert sum(steps) <= 1
    served.vllm.evict(X)


# ---- items that are never cached, and roles


@pytest.mark.parametrize(
    "kind",
    [{"modality": "prompt_embeds"}, {"identifier": counter_name("renderer0-mm-1-image-0")}],
    ids=["prompt_embeds", "counter"],
)
def test_an_item_whose_name_does_not_identify_its_media_is_never_cached(serve: Serve, kind: dict[str, str]) -> None:
    served = serve()
    identifier = kind.pop("identifier", X)
    for name in ("first", "second"):
        asking = request(name, identifier, **kind)  # type: ignore[arg-type]
        assert served.vllm.offer(asking) == "encode"
        output = served.vllm.end_pass()
        assert output.ec_connector_metadata.saves == {}
        served.runner.run(output, asking)
        finish(served, asking)
        served.vllm.evict(identifier)
        served.step()
    assert count(served, "used_bytes") == 0


def test_a_consumer_loads_and_stores_nothing(serve: Serve) -> None:
    serve(consumer=False).store(X)
    consumer = serve(producer=False, widths={})  # a consumer is not given the width of the rows
    asking = request("asking", X, Y)
    assert consumer.schedule(asking) == "load encode"
    finish(consumer, asking)
    consumer.settle()
    assert torch.equal(consumer.runner.cache[X], embedding(X))
    assert (count(consumer, "saves"), count(consumer, "saves_dropped")) == (0, 0)


# ---- items that a producer has announced


def with_announcement(name: str, *identifiers: str, namespace: str = "tests", data: Any = "pixels") -> Request:
    asking = request(name, *identifiers, data=data)
    asking.ec_transfer_params = {identifier: {"namespace": namespace, "metadata": {}} for identifier in identifiers}
    return asking


def test_a_consumer_waits_for_an_announced_entry_that_no_listing_has(serve: Serve) -> None:
    consumer = serve(producer=False, deadline_s=0.0, wait_for_producer_s=PATIENCE_S)
    asking, unannounced = with_announcement("asking", X), request("unannounced", Y)
    assert consumer.vllm.offer(asking) is None
    assert consumer.schedule(unannounced) == "encode"
    finish(consumer, unannounced)
    wait_until(
        "it was asked for again and again",
        lambda: count(consumer, "fetch_misses") >= 3,
        PATIENCE_S,
        doing=lambda: offer(consumer, asking),
    )
    assert consumer.vllm.offer(asking) is None
    neighbour = serve()
    neighbour.store(X)
    assert consumer.schedule(asking) == "load"
    finish(consumer, asking)


def test_an_announced_entry_that_never_comes_is_encoded_or_fails_its_request_alone(serve: Serve, clock: Clock) -> None:
    consumer = serve(producer=False, deadline_s=0.0, wait_for_producer_s=3.0)
    asking = with_announcement("asking", X)
    assert consumer.vllm.offer(asking) is None
    consumer.step()
    clock.now += 3.1
    assert consumer.vllm.offer(asking) == "encode"
    consumer.step(asking)
    finish(consumer, asking)
    empty = with_announcement("empty", Y, data=None)
    offer(consumer, empty)
    assert not consumer.side.take_unavailable_requests()
    clock.now += 3.1
    refused(consumer, empty)
    finish(consumer, empty)


@pytest.mark.parametrize(
    "params",
    [{X: {"namespace": "another"}}, {X: {"namespace": 7}}, {X: "tests"}, {X: {}}, ["tests"], {"nobody": {}}, "text"],
    ids=str,
)
def test_an_entry_announced_by_another_namespace_or_by_nobody_is_not_waited_for(serve: Serve, params: Any) -> None:
    consumer = serve(producer=False, deadline_s=0.0, wait_for_producer_s=PATIENCE_S)
    asking = request("asking", X)
    asking.ec_transfer_params = params
    assert consumer.vllm.offer(asking) == "encode"
    consumer.step(asking)
    finish(consumer, asking)
    assert count(consumer, "foreign_announcements") == (params == {X: {"namespace": "another"}})


# ---- requests with nothing to encode


def metadata_only(name: str, *identifiers: str, rows: int = 4) -> Request:
    return request(name, *identifiers, rows=rows, data=None)


def test_a_request_with_nothing_to_encode_is_served_from_the_cache_or_fails_alone(serve: Serve) -> None:
    served = serve()
    served.store(X)
    known, unknown, other = metadata_only("known", X), metadata_only("unknown", X, Y), request("other", Z)
    assert served.vllm.offer(unknown) is None
    assert served.side.take_unavailable_requests() == {"unknown"}
    assert served.side.take_unavailable_requests() == set()
    finish(served, unknown)
    served.stage(known)
    assert (served.vllm.offer(known), served.vllm.offer(other)) == ("load", "encode")
    served.step(known, other)
    assert served.side.take_unavailable_requests() == set()
    finish(served, known, other)


@pytest.mark.parametrize("other", [{"rows": 9}, {"modality": "video"}], ids=["rows", "modality"])
def test_one_name_for_two_things_with_nothing_to_encode_fails_its_request_alone(
    serve: Serve, other: dict[str, Any]
) -> None:
    """vLLM asks about the first in a pass whose window does not include the second; both have the same name."""
    served = serve(window=20, widths={"image": WIDTH, "video": 2 * WIDTH})
    served.store(UUID)
    first = Feature(UUID, Position(0, 4), data=None)
    second = Feature(UUID, Position(1000, other.get("rows", 4)), other.get("modality", "image"), data=None)
    twice = Request("twice", [first, second])
    assert served.vllm.offer(twice) is None
    assert served.side.take_unavailable_requests() == {"twice"}
    served.step()
    finish(served, twice)
    assert served.cache.book.live(UUID) is not None, "it is nobody else's fault"


def test_a_lease_is_worth_nothing_once_the_cache_is_inert(serve: Serve) -> None:
    """A rank leaves the cache when one of its hooks fails. Its engine keeps serving, and nothing more is promised."""
    served = serve()
    served.store(X)
    waiting, other = metadata_only("waiting", X), request("other", X)
    served.stage(waiting)
    for each in (waiting, other):
        assert served.vllm.offer(each, blocks=False) == "load"
    served.step()
    assert count(served, "leases") == 2
    served.runner.worker.abandon()
    wait_until("the cache is inert", lambda: (served.vllm.end_pass(text=1), served.cache.inert)[1], PATIENCE_S)
    assert served.vllm.offer(waiting) is None
    assert served.side.take_unavailable_requests() == {"waiting"}
    assert served.vllm.offer(other) == "encode"
    served.step(other)
    finish(served, waiting, other)


@pytest.mark.parametrize("inert", [False, True], ids=["working", "inert"])
def test_a_running_request_is_never_failed_over_an_item_that_vllm_holds_for_it(serve: Serve, inert: bool) -> None:
    served = serve()
    served.store(X)
    running = metadata_only("running", X)
    served.schedule(running)
    served.settle()
    forget(served, X)
    served.vllm.evict()
    if inert:
        served.runner.worker.abandon()
        wait_until("the cache is inert", lambda: (served.vllm.end_pass(text=1), served.cache.inert)[1], PATIENCE_S)
    for computed in (2, 4, 5):  # within the item, and past it
        assert served.vllm.offer(running, computed) == ""
        served.vllm.end_pass()
    assert served.side.take_unavailable_requests() == set()
    waiting = metadata_only("waiting", Y)
    assert served.vllm.offer(waiting) is None
    assert served.side.take_unavailable_requests() == {"waiting"}
    finish(served, running, waiting)


def test_a_preempted_request_no_longer_holds_its_item(serve: Serve) -> None:
    """It resumes where the prefix cache ends, within the item, which vLLM and the arena may have evicted since."""
    served = serve(folder=None)
    served.store(X)
    preempted = metadata_only("preempted", X)
    served.schedule(preempted)
    assert served.vllm.offer(preempted, 2) == ""
    preempted.num_preemptions += 1
    served.step(preempted)
    served.settle()
    served.vllm.evict(X)
    served.step()
    forget(served, X)
    assert served.vllm.offer(preempted, 2) is None
    assert served.side.take_unavailable_requests() == {"preempted"}
    finish(served, preempted)


# ---- waiting


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(module, monkeypatch)


def test_a_request_waits_for_its_deadline_in_total_and_no_longer(serve: Serve, clock: Clock) -> None:
    """Both items are being saved, in a step that has not run yet, when vLLM needs their room."""
    served = serve(window=5, deadline_s=1.0)
    writers = [request("first writer", UUID), request("second writer", OTHER_UUID)]
    steps = []
    for writer in writers:
        served.vllm.offer(writer)
        steps.append(served.vllm.end_pass())
    served.vllm.evict(UUID, OTHER_UUID)
    steps.append(served.vllm.end_pass())
    patient = request("patient", UUID, OTHER_UUID)

    def offer(computed: int, wait_s: float) -> bool:
        clock.now += wait_s
        scheduled = served.side.ensure_cache_available(patient, computed)
        served.vllm.end_pass(text=1)
        return scheduled

    assert not offer(0, 0.0)
    assert not offer(0, 0.6)
    served.runner.run(steps[0], *writers)
    wait_until("the first item has arrived", lambda: offer(0, 0.0), PATIENCE_S)
    assert not offer(8, 10.0)  # time between its waits does not count
    assert not offer(8, 0.3)
    assert offer(8, 0.2)
    assert count(served, "timeouts") == 1
    for step in steps[1:]:
        served.runner.run(step, *writers)
    finish(served, patient, *writers)


def test_more_images_than_the_arena_holds_are_all_served(serve: Serve) -> None:
    """Leases stop at half the arena; further items are encoded or loaded as they come; no request waits forever."""
    images = [digest(f"image {number}") for number in range(50)]
    writer = serve()
    writer.store(*images)
    served = serve(arena_bytes=20 * PLACE_BYTES, deadline_s=2.0)
    leased = []
    big, rival = request("big", *images), request("rival", *reversed(images))
    for each in (big, rival):
        answers = served.schedule(each).split()
        leased.append(count(served, "leased_bytes"))
        assert len(answers) == len(images) or each is rival
        for identifier in images:
            assert torch.equal(served.runner.cache[identifier], embedding(identifier))
    assert max(leased) <= 10 * PLACE_BYTES
    assert 0 < count(served, "loads_disk") < len(images)
    finish(served, big, rival)
    served.vllm.evict(*images)


def test_first_requests_wait_for_the_ranks_and_then_no_longer(clock: Clock) -> None:
    served = Served(None, start_timeout_s=3.0)
    try:
        served.cache._ranks.growth._attached.clear()
        served.cache._ranks.drain = lambda: None  # type: ignore[method-assign]
        early = metadata_only("early", X)
        assert served.vllm.offer(early) is None
        assert served.side.take_unavailable_requests() == set()
        clock.now += 3.0
        late = request("late", Y)
        served.vllm.end_pass()
        assert served.vllm.offer(late) == "encode"
        assert served.vllm.offer(early) is None
        assert served.side.take_unavailable_requests() == {"early"}
    finally:
        served.close()


# ---- the cache given up


def test_without_its_rank_the_cache_is_inert_and_everything_is_encoded(serve: Serve) -> None:
    served = serve()
    served.store(X)
    leased = request("leased", X)
    served.vllm.offer(leased, blocks=False)
    served.vllm.end_pass()
    served.runner.worker.abandon()
    wait_until("the cache is inert", lambda: (served.vllm.end_pass(text=1), served.cache.inert)[1], PATIENCE_S)
    asking = request("asking", X, Y)
    assert served.vllm.offer(asking) == "encode encode"
    output = served.vllm.end_pass()
    served.runner.run(output, asking)
    assert sorted(served.runner.cache) == sorted([X, Y])
    finish(served, leased, asking)
    assert (count(served, "leases"), count(served, "pins"), count(served, "places_reserved")) == (0, 0, 0)


def test_an_item_promised_before_the_cache_became_inert_is_encoded_after_all(serve: Serve) -> None:
    """vLLM relies on it, whatever happens to the cache: the engine dies if the tensor never comes."""
    served = serve()
    served.store(X)
    stored = request("stored", X)
    served.vllm.offer(stored)
    served.vllm.preempt(stored)
    served.runner.run(served.vllm.end_pass())  # deferred
    served.runner.worker.abandon()
    wait_until(
        "the cache is inert",
        lambda: served.cache.inert,
        PATIENCE_S,
        doing=lambda: served.cache.drain(time.monotonic()),
    )
    assert served.vllm.offer(stored) == ""
    served.runner.run(served.vllm.end_pass(), stored)
    assert torch.equal(served.runner.cache[X], embedding(X))
    finish(served, stored)
