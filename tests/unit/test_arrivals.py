# SPDX-License-Identifier: Apache-2.0
"""Look-ups begin when a request arrives, on the thread that receives requests, and leave nothing behind."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed.core import stopped
from benchmarks.testbed.stand_ins import PATIENCE_S, Request, Served, digest, request
from benchmarks.testbed.waiting import wait_until
from lmcache_ec.adapters.vllm.connector import ECLMCacheConnector
from lmcache_ec.cli.status import engines

X, Y = digest("x"), digest("y")
Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Engines one after another on one folder; each must hold nothing at the end."""
    running: list[Served] = []

    def start(**changes: Any) -> Served:
        running.append(Served(tmp_path / "entries", **changes).ready())
        return running[-1]

    yield start
    try:
        assert all(not served.held() for served in running if not served.cache.inert)
    finally:
        for served in running:
            served.close()


def arrive(served: Served, *requests: Request) -> None:
    """Requests arrive as in an engine: on a thread other than the scheduler's."""

    def take_in() -> None:
        for each in requests:
            served.side.expect(each)

    thread = threading.Thread(target=take_in)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "it waits for the scheduler's thread"


def count(served: Served, name: str) -> int:
    return served.side.snapshot()[name]


def test_an_entry_that_came_before_the_first_pass_defers_none(serve: Serve) -> None:
    serve().store(X, Y)
    served = serve()
    asking = request("asking", X, Y)
    arrive(served, asking)
    served.until("both have come", lambda: count(served, "fills") == 2)
    assert served.vllm.offer(asking) == "load load"
    served.step(asking)
    served.side.request_finished(asking)
    assert (count(served, "deferred_passes"), count(served, "early_look_ups")) == (0, 2)
    assert not served.runner.encoded


def test_an_entry_that_comes_during_the_first_pass_defers_none(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request waits for it: it is looked up once more before the pass defers the request."""
    serve().store(X)
    served = serve()
    listen = served.cache.listen

    def listen_to_a_quick_store(now: float) -> bool:
        return bool(wait_until("it has come", lambda: listen(now) and count(served, "fills"), PATIENCE_S))

    asking = request("asking", X)
    with monkeypatch.context() as patch:
        patch.setattr(served.cache, "listen", listen_to_a_quick_store)
        assert served.vllm.offer(asking) == "load"
    served.step(asking)
    served.side.request_finished(asking)
    assert count(served, "deferred_passes") == 0


def test_an_entry_that_comes_later_defers_as_many_passes_as_begin_before(serve: Serve) -> None:
    serve().store(X)
    served = serve()
    asking = request("asking", X)
    [store] = [engine["pid"] for engine in engines() if engine["engine"] == served.name]
    with stopped(store):
        assert served.vllm.offer(asking) is None
        served.step()
    wait_until("the entry has come", lambda: served.cache.listen(time.monotonic()) and count(served, "fills") == 1)
    assert served.vllm.offer(asking) == "load"
    served.step(asking)
    served.side.request_finished(asking)
    assert count(served, "deferred_passes") == 1


def test_a_request_that_never_reaches_a_pass_leaves_nothing(serve: Serve) -> None:
    serve().store(X)
    served = serve()
    arrive(served, *(request(f"refused {number}", X) for number in range(3)))
    served.until("it has come", lambda: count(served, "fills") == 1)
    assert count(served, "requests") == 0
    assert served.held() == {}
    assert count(served, "fetches") == 1, "one for all of them"


def test_a_request_that_arrives_in_the_middle_of_a_pass_waits_for_nothing(serve: Serve) -> None:
    serve().store(X)
    served = serve()
    running = request("running", Y)
    assert served.vllm.offer(running) == "encode"
    arrive(served, late := request("late", X))
    assert count(served, "early_look_ups") == 0
    served.step(running)
    arrive(served, late)
    assert count(served, "early_look_ups") == 1
    assert served.schedule(late) == "load"
    for each in (running, late):
        served.side.request_finished(each)


def test_no_tier_is_asked_for_a_first_seen_item(serve: Serve) -> None:
    served = serve()
    arrive(served, request("new", X))
    assert (count(served, "early_look_ups"), count(served, "fetches")) == (0, 0)


def test_an_answer_of_the_presence_filter_is_counted_once_per_request(serve: Serve) -> None:
    served = serve()
    arrive(served, new := request("new", X))
    assert served.schedule(new) == "encode"
    served.side.request_finished(new)
    assert count(served, "filtered") == 1


def test_items_that_the_kv_cache_may_have_are_left_to_the_pass(serve: Serve) -> None:
    """A chat sends its pictures again with every turn; only the pass knows which of their tokens are cached."""
    serve().store(X)
    for reuses_kv in (True, False):
        served = serve(reuses_kv=reuses_kv)
        first = request("first turn", X)
        assert served.schedule(first) == "load"
        served.side.request_finished(first)
        served.vllm.evict(X)
        served.settle()
        place = served.cache.book.live(X)
        assert place is not None
        served.cache.book.forget(place)
        arrive(served, request("second turn", X))
        assert count(served, "early_look_ups") == (not reuses_kv)
        served.settle()


def test_an_unsigned_item_is_not_looked_for_in_the_tiers(serve: Serve) -> None:
    serve().store(X)
    served = serve()
    unsigned = request("unsigned", X)
    unsigned.trace_headers = None
    arrive(served, unsigned)
    assert (count(served, "early_look_ups"), count(served, "unsigned_items")) == (0, 0)


def test_the_signature_is_still_there_for_the_first_pass(serve: Serve) -> None:
    served = serve()
    asking = request("asking", X)
    before = dict(asking.trace_headers or {})
    arrive(served, asking)
    assert asking.trace_headers == before


def test_an_error_ends_the_cache_on_the_scheduler_s_thread_and_not_on_the_other(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve().store(X)
    served = serve()
    monkeypatch.setattr(served.cache, "listen", lambda now: 1 / 0)
    arrive(served, request("asking", X))
    assert not served.cache.inert
    with pytest.raises(ZeroDivisionError):
        served.side.ensure_cache_available(request("next", Y), 0)
    served.side.shutdown()
    arrive(served, request("later", X))  # only the thread that shut it down holds the turn


def test_every_engine_of_this_process_is_notified_of_arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrapper around a function with vLLM's signature."""
    from vllm.v1.engine.core import EngineCore

    from lmcache_ec.adapters.vllm import arrivals

    monkeypatch.setattr(EngineCore, "preprocess_add_request", lambda self, asked: (asked, 7))
    for _ in range(2):
        arrivals.follow()
    heard: list[object] = []
    connector = object.__new__(ECLMCacheConnector)
    monkeypatch.setattr(connector, "expect", heard.append, raising=False)
    core: Any = object.__new__(EngineCore)
    asked: Any = request("asked", X)
    assert core.preprocess_add_request(asked) == (asked, 7), "before there is a scheduler"
    core.scheduler = type("Scheduler", (), {"ec_connector": connector})()
    assert core.preprocess_add_request(asked) == (asked, 7)
    assert heard == [asked]


def test_counts_are_never_read_in_the_middle_of_an_early_look_up(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks for metrics between two passes; a change while they are read would break them for good."""
    serve().store(X)
    served, looking, go_on, read = serve(), threading.Event(), threading.Event(), threading.Event()

    def listen_slowly(now: float) -> bool:
        looking.set()
        return not go_on.wait(PATIENCE_S)

    def read_all() -> None:
        served.side.measures()
        read.set()

    with monkeypatch.context() as patch:
        patch.setattr(served.cache, "listen", listen_slowly)
        threads = [threading.Thread(target=served.side.expect, args=(request("early", X),))]
        threads[0].start()
        assert looking.wait(PATIENCE_S)
        threads.append(threading.Thread(target=read_all))
        threads[1].start()
        assert not read.wait(0.2)
        go_on.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert read.is_set()
