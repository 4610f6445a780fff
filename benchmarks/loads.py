# SPDX-License-Identifier: Apache-2.0
"""What `load_policy: auto` chooses, and what that costs a request, over stores and encoders of various speeds.

A real scheduler side, worker side and store process over a Redis behind a relay that adds a delay; the encoder is a
sleep. For each pair of times an engine serves stored images, one request at a time: first enough of them to learn, then
those that count. The table shows how long the model waited for an image's output, with the policy and with each of its
two alternatives, and how often it chose each. Exit status 1 if it took more than 1.1 times the better alternative.

    python -m benchmarks.loads
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch

from benchmarks.testbed.servers.redis import redis_server
from benchmarks.testbed.servers.relay import Relay, relay
from benchmarks.testbed.stand_ins import PATIENCE_S, Served, digest, embedding, request

TIERS_S = (0.005, 0.05, 0.5)
ENCODES_S = (0.002, 0.02, 0.2)
LEARNS, COUNTS = 40, 20
PASS_S = 0.001
"""How long vLLM sleeps in a pass that schedules nothing."""

STORED = [digest(f"stored {number}") for number in range(LEARNS + COUNTS)]
BAR = 1.1


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as redis, relay(redis.port) as between:
        served = start(between, "always", 0.0)
        served.store(*STORED)
        served.close()
        print("store  encode |  auto   load  encode ms | auto / better  loads  encodes")
        rows = [row(between, tier_s, encode_s) for tier_s in TIERS_S for encode_s in ENCODES_S]
    return int(max(rows) > BAR)


def row(between: Relay, tier_s: float, encode_s: float) -> float:
    """Print a row; returns the policy's time as a multiple of the better alternative's. The three take turns."""
    auto, _, encodes = engines = [start(between, policy, encode_s) for policy in ("auto", "always", "always")]
    encodes.cache.fetch = lambda *_, **__: False  # type: ignore[method-assign]
    became: list[list[tuple[str, float]]] = [[], [], []]
    try:
        ask(auto, [digest(f"new {number}, {id(auto)}") for number in range(4)])
        between.delay_s = tier_s
        ask(auto, STORED[:LEARNS])
        for identifier in STORED[LEARNS:]:
            for engine, answers in zip(engines, became, strict=True):
                answers += ask(engine, [identifier])
    finally:
        between.delay_s = 0.0
        for engine in engines:
            engine.close()
    took = [median(seconds for _, seconds in answers) for answers in became]
    chosen = [answer for answer, _ in became[0]]
    ratio = took[0] / min(took[1:])
    times = " ".join(f"{seconds * 1e3:6.1f}" for seconds in took)
    counts = f"{chosen.count('load'):9d} {chosen.count('encode'):8d}"
    print(f"{tier_s * 1e3:5.0f} {encode_s * 1e3:7.0f} | {times}    | {ratio:10.2f} {counts}", flush=True)
    return ratio


def start(between: Relay, load_policy: str, encode_s: float) -> Served:
    url = f"redis://127.0.0.1:{between.port}"
    keys = {"remotes": [url], "remote_lookup": "probe", "blocking_timeout_secs": 20.0, "load_policy": load_policy}
    served = Served(None, keys=keys, deadline_s=PATIENCE_S)
    served.runner.encode = encoder(encode_s)
    served.until("the cache is ready", lambda: served.cache.ready)
    return served


def encoder(seconds: float) -> Callable[[str, int], torch.Tensor]:
    def encode(identifier: str, rows: int) -> torch.Tensor:
        time.sleep(seconds)
        return embedding(identifier, rows)

    return encode


def ask(served: Served, identifiers: Sequence[str]) -> list[tuple[str, float]]:
    """One request after another, in an otherwise idle engine: whether its image was loaded or encoded, and seconds from
    its arrival until the model had it."""
    became = []
    for identifier in identifiers:
        asking = request(f"asking for {identifier}", identifier)
        began = time.perf_counter()
        served.side.expect(asking)
        while (answer := served.vllm.offer(asking)) is None:
            served.step()
            time.sleep(PASS_S)
        served.step(asking)
        became.append((answer, time.perf_counter() - began))
        served.side.request_finished(asking)
        served.vllm.evict(identifier)
        served.step()
    return became


if __name__ == "__main__":
    sys.exit(main())
