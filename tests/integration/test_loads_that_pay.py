# SPDX-License-Identifier: Apache-2.0
"""A real store process over a Redis that answers late, and a slow encoder: what requests wait for.

Redis takes at least the configured time, and longer on a busy machine. So where a load has to be faster, the encoder,
which has its own clock, takes seconds.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks.testbed.servers.redis import redis_server
from benchmarks.testbed.servers.relay import Relay, relay
from benchmarks.testbed.stand_ins import PATIENCE_S, Clock, Encoder, Served, digest, request
from lmcache_ec.adapters.vllm import scheduler as module

STORED = [digest(f"stored {number}") for number in range(80)]
PASS_S = 0.001
Serve = Callable[..., Served]


@pytest.fixture(scope="module")
def between(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    """A relay in front of a Redis that has STORED. It forwards at once unless a test changes that."""
    with redis_server(tmp_path_factory.mktemp("redis")) as redis, relay(redis.port) as between:
        served = Served(None, keys=_keys(between))
        try:
            served.until("the cache is ready", lambda: served.cache.ready)
            served.store(*STORED)
        finally:
            served.close()
        yield between


@pytest.fixture
def serve(between: Relay) -> Iterator[Serve]:
    """Engines with nothing in memory, whose encoder takes `encode_s` per item."""
    running: list[Served] = []

    def start(tier_s: float, encode_s: float, load_policy: str = "auto") -> Served:
        served = Served(None, keys={**_keys(between), "load_policy": load_policy})
        running.append(served)
        served.runner.encode_with(Encoder(encode_s))
        between.delay_s = tier_s
        served.until("the cache is ready", lambda: served.cache.ready)
        return served

    yield start
    between.delay_s = 0.0
    between.passes_on.set()
    try:
        assert all(not served.held() for served in running)
    finally:
        for served in running:
            served.close()


def _keys(between: Relay) -> dict[str, Any]:
    url = f"redis://127.0.0.1:{between.port}"
    return {"remotes": [url], "remote_lookup": "probe"}


def ask(served: Served, *identifiers: str, data: Any = "pixels") -> list[str]:
    """One request after another, as in an idle engine: whether its item was loaded or encoded."""
    became = []
    for identifier in identifiers:
        asking = request(f"asking for {identifier}", identifier, data=data)
        began = time.perf_counter()
        served.side.expect(asking)
        while (answer := served.vllm.offer(asking)) is None:
            served.step()
            time.sleep(PASS_S)
            assert time.perf_counter() - began < PATIENCE_S
        served.step(asking)
        became.append(answer)
        served.side.request_finished(asking)
        served.vllm.evict(identifier)
        served.step()
    return became


def learn_encodes(served: Served) -> None:
    ask(served, *(digest(f"new {number} {id(served)}") for number in range(4)))


@pytest.mark.parametrize(
    ("tier_s", "encode_s", "better"),
    [
        (0.005, 10.0, "load"),
        (0.05, 0.002, "encode"),
        pytest.param(0.05, 10.0, "load", marks=pytest.mark.slow),
        pytest.param(0.5, 0.002, "encode", marks=pytest.mark.slow),
        pytest.param(0.5, 0.02, "encode", marks=pytest.mark.slow),
        pytest.param(0.5, 0.2, "encode", marks=pytest.mark.slow),
    ],
)
def test_after_tens_of_items_the_quicker_way_is_taken(
    serve: Serve, between: Relay, tier_s: float, encode_s: float, better: str
) -> None:
    served = serve(0.0, encode_s)
    learn_encodes(served)
    between.delay_s = tier_s
    ask(served, *STORED[:30])
    before = served.side.snapshot()
    became = ask(served, *STORED[30:60])
    after = served.side.snapshot()
    assert became.count(better) >= 28, became
    if better == "encode":
        assert after["policy_refused_redis"] - before.get("policy_refused_redis", 0) >= 28
        assert after["policy_measurements"] > 0
    else:
        assert after["policy_waits"] - before["policy_waits"] >= 28


def test_the_cost_of_an_encode_is_learned_even_if_everything_is_stored(serve: Serve, between: Relay) -> None:
    served = serve(0.05, 0.002)
    became = ask(served, *STORED[:60])
    assert became[:5] == ["load"] * 5, "at first loads pay"
    assert became[40:].count("encode") >= 19, became


def test_items_without_media_and_announced_items_are_waited_for_however_long_that_takes(
    serve: Serve, between: Relay
) -> None:
    served = serve(0.0, 0.002)
    learn_encodes(served)
    between.delay_s = 0.05
    ask(served, *STORED[:20])
    became = ask(served, *STORED[20:30])
    assert became.count("encode") >= 9, "the policy has learned"
    assert ask(served, STORED[70], data=None) == ["load"]
    announced = request("announced", STORED[71])
    announced.ec_transfer_params = {STORED[71]: {"namespace": served.cache.namespace, "metadata": {}}}
    assert served.schedule(announced) == "load"
    served.side.request_finished(announced)
    served.vllm.evict(STORED[71])
    served.step()


def test_a_request_waits_as_long_as_an_encode_takes_and_no_longer(
    serve: Serve, between: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a tier that was fast and now hangs: it still has twenty seconds to answer."""
    served = serve(0.0, 5.0)
    learn_encodes(served)
    assert ask(served, *STORED[:5]) == ["load"] * 5
    before = served.side.snapshot()["timeouts"]
    between.passes_on.clear()
    clock, asking = Clock(module, monkeypatch), request("asking", STORED[40])
    answers = []
    for passed_s in (0.0, 4.9, 0.2):
        clock.now += passed_s
        answers.append(served.vllm.offer(asking))
        served.step(asking)
    assert answers == [None, None, "encode"]
    assert served.side.snapshot()["timeouts"] == before + 1
    served.side.request_finished(asking)
    served.vllm.evict(STORED[40])
    served.step()


def test_without_the_policy_the_slow_tier_is_waited_for(serve: Serve, between: Relay) -> None:
    served = serve(0.0, 0.002, load_policy="always")
    learn_encodes(served)
    between.delay_s = 0.05
    assert set(ask(served, *STORED[:10])) == {"load"}
    assert served.side.snapshot()["policy_waits"] == 0
