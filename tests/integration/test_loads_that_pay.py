# SPDX-License-Identifier: Apache-2.0
"""A real store process over a Redis that answers late, and an encoder that takes its time: what is waited for."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from benchmarks.testbed.servers.redis import redis_server
from benchmarks.testbed.servers.relay import Relay, relay
from benchmarks.testbed.stand_ins import PATIENCE_S, Served, digest, embedding, request

STORED = [digest(f"stored {number}") for number in range(80)]
PASS_S = 0.001
Serve = Callable[..., Served]


@pytest.fixture(scope="module")
def between(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    """In front of a Redis that has STORED. It passes on at once until a test wants it otherwise."""
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
    """Engines with nothing in memory, whose encoder takes `encode_s` an item."""
    running: list[Served] = []

    def start(tier_s: float, encode_s: float, load_policy: str = "auto") -> Served:
        served = Served(None, keys={**_keys(between), "load_policy": load_policy}, deadline_s=PATIENCE_S)
        running.append(served)
        served.runner.encode = _encoder(encode_s)
        between.delay_s = tier_s
        served.until("the cache is ready", lambda: served.cache.ready)
        return served

    yield start
    between.delay_s = 0.0
    try:
        assert all(not served.held() for served in running)
    finally:
        for served in running:
            served.close()


def _keys(between: Relay) -> dict[str, Any]:
    url = f"redis://127.0.0.1:{between.port}"
    return {"remotes": [url], "remote_lookup": "probe", "blocking_timeout_secs": 20.0, "load_deadline_ms": 20_000}


def _encoder(seconds: float) -> Callable[[str, int], torch.Tensor]:
    def encode(identifier: str, rows: int) -> torch.Tensor:
        time.sleep(seconds)
        return embedding(identifier, rows)

    return encode


def ask(served: Served, *identifiers: str, data: Any = "pixels") -> list[tuple[str, float]]:
    """One request after another, as an idle engine serves them: what became of its item, and after how many seconds the
    model had it."""
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
        became.append((answer, time.perf_counter() - began))
        served.side.request_finished(asking)
        served.vllm.evict(identifier)
        served.step()
    return became


def learn_encodes(served: Served) -> None:
    ask(served, *(digest(f"new {number} {id(served)}") for number in range(4)))


@pytest.mark.parametrize(
    ("tier_s", "encode_s", "better"),
    [
        (0.005, 0.2, "load"),
        (0.05, 0.002, "encode"),
        pytest.param(0.05, 0.2, "load", marks=pytest.mark.slow),
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
    became = [answer for answer, _ in ask(served, *STORED[30:60])]
    after = served.side.snapshot()
    assert became.count(better) >= 28, became
    if better == "encode":
        assert after["policy_refused_redis"] - before.get("policy_refused_redis", 0) >= 28
        assert after["policy_measurements"] > 0
    else:
        assert after["policy_waits"] - before["policy_waits"] >= 28


def test_what_an_encode_costs_is_learned_though_all_is_stored(serve: Serve, between: Relay) -> None:
    served = serve(0.05, 0.002)
    became = [answer for answer, _ in ask(served, *STORED[:60])]
    assert became[:5] == ["load"] * 5, "at first loads pay"
    assert became[40:].count("encode") >= 19, became


def test_what_cannot_be_encoded_or_was_announced_is_waited_for_whatever_that_takes(
    serve: Serve, between: Relay
) -> None:
    served = serve(0.0, 0.002)
    learn_encodes(served)
    between.delay_s = 0.05
    ask(served, *STORED[:20])
    became = [answer for answer, _ in ask(served, *STORED[20:30])]
    assert became.count("encode") >= 9, "the policy has learned"
    assert [answer for answer, _ in ask(served, STORED[70], data=None)] == ["load"]
    announced = request("announced", STORED[71])
    announced.ec_transfer_params = {STORED[71]: {"namespace": served.cache.namespace, "metadata": {}}}
    assert served.schedule(announced) == "load"
    served.side.request_finished(announced)
    served.vllm.evict(STORED[71])
    served.step()


def test_a_request_waits_no_longer_than_an_encode_takes(serve: Serve, between: Relay) -> None:
    """For a tier that was quick, and hangs now: it has still twenty seconds to answer."""
    served = serve(0.0, 0.05)
    learn_encodes(served)
    ask(served, *STORED[:5])
    before = served.side.snapshot()["timeouts"]
    between.delay_s = 1.0
    [(answer, took_s)] = ask(served, STORED[40])
    assert answer == "encode"
    assert took_s < 0.5
    assert served.side.snapshot()["timeouts"] == before + 1


def test_without_the_policy_the_slow_tier_is_waited_for(serve: Serve, between: Relay) -> None:
    served = serve(0.0, 0.002, load_policy="always")
    learn_encodes(served)
    between.delay_s = 0.05
    assert {answer for answer, _ in ask(served, *STORED[:10])} == {"load"}
    assert served.side.snapshot()["policy_waits"] == 0
