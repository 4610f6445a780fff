# SPDX-License-Identifier: Apache-2.0
"""Many users at once: pictures of a catalogue, some of them popular, at rates that a server without the cache can and
cannot sustain; and how many requests per second a server completes, by the share of pictures it has seen before.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks.engine.client import Timing, ask
from benchmarks.engine.hits import Report
from benchmarks.engine.parties import Stores, Subject, ours, server
from benchmarks.testbed.servers.openai import OpenAIServer

CATALOGUE = 500
LOADS = (0.5, 1.0, 2.0)
"""Rates of requests, as multiples of what a server without the cache completes one at a time."""
REUSE = (0.0, 0.25, 0.5, 0.75, 1.0)
_AT_ONCE = 4
_SEEN_BEFORE = 24
"""Pictures that the second part asks for again: three times what vLLM's own cache holds for the large model."""
_FIRST = {"mixed": 10_000, "seen": 20_000, "new": 30_000}
"""First picture of each part, so that no part finds another's."""


@dataclass(frozen=True)
class Batch:
    """Requests that ran together, and what the server encoded for them."""

    party: str
    rate: float
    """Requests sent per second; 0 if each was sent as soon as another was answered."""
    reuse: float
    """Share of the requests whose picture had been asked for before."""
    timings: Sequence[Timing]
    elapsed_s: float
    encodes: int


def mixed(
    subject: Subject, folder: Path, behind: Stores, capacity: float, requests: int, report: Report
) -> list[Batch]:
    """Both parties answer the same requests, which arrive at random at each of the rates. `capacity` is in requests per
    second. The cache starts empty and is kept from one rate to the next."""
    batches = []
    for party in ("off", "cache"):
        connector = ours(behind.tiers("disk")) if party == "cache" else None
        chance, seen = random.Random(0), set[int]()
        with server(subject, folder / f"mixed-{party}", connector, behind.environment) as serving:
            _warm_up(serving, subject)
            for load in LOADS:
                rate = load * capacity
                report(f"{subject.model}, {party}: {requests} requests at {rate:.2f} a second")
                wanted = _zipf(chance, requests)
                reuse = sum(seed in seen or seed in wanted[:at] for at, seed in enumerate(wanted)) / requests
                seen.update(wanted)
                delays = [chance.expovariate(rate) for _ in wanted]
                batches.append(asyncio.run(_arriving(party, serving, subject, wanted, delays, rate, reuse)))
    return batches


def throughput(subject: Subject, folder: Path, behind: Stores, requests: int, report: Report) -> list[Batch]:
    """Requests of `_AT_ONCE` users without a pause, for each share of pictures seen before."""
    batches = []
    with ExitStack() as stack:
        for party in ("off", "cache"):
            connector = ours(behind.tiers("disk")) if party == "cache" else None
            serving = stack.enter_context(server(subject, folder / f"reuse-{party}", connector, behind.environment))
            known = [_FIRST["seen"] + number for number in range(_SEEN_BEFORE)]
            chance = random.Random(1)
            asyncio.run(_at_once(party, serving, subject, known, 0.0))
            new = iter(range(_FIRST["new"], _FIRST["new"] + 10_000))
            for reuse in REUSE:
                report(f"{subject.model}, {party}: {requests} requests, {reuse:.0%} of pictures seen before")
                again = round(requests * reuse)
                wanted = [known[at % len(known)] for at in range(again)] + [next(new) for _ in range(requests - again)]
                chance.shuffle(wanted)
                batches.append(asyncio.run(_at_once(party, serving, subject, wanted, reuse)))
            stack.close()
    return batches


def _zipf(chance: random.Random, count: int) -> list[int]:
    """Pictures of the catalogue; the n-th most popular is asked for 1/n as often as the first."""
    weights = [1 / rank for rank in range(1, CATALOGUE + 1)]
    return [_FIRST["mixed"] + rank for rank in chance.choices(range(CATALOGUE), weights, k=count)]


def _warm_up(serving: OpenAIServer, subject: Subject) -> None:
    asyncio.run(_at_once("", serving, subject, [1_000_001, 1_000_002], 0.0))


async def _arriving(
    party: str,
    serving: OpenAIServer,
    subject: Subject,
    wanted: Sequence[int],
    delays: Sequence[float],
    rate: float,
    reuse: float,
) -> Batch:
    serving.encoded()
    began = time.perf_counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session, asyncio.TaskGroup() as group:
        tasks = []
        for seed, delay in zip(wanted, delays, strict=True):
            await asyncio.sleep(delay)
            tasks.append(group.create_task(ask(session, serving.url, seed, subject.side)))
    elapsed = time.perf_counter() - began
    return Batch(party, rate, reuse, [task.result() for task in tasks], elapsed, serving.encoded())


async def _at_once(party: str, serving: OpenAIServer, subject: Subject, wanted: Sequence[int], reuse: float) -> Batch:
    serving.encoded()
    began, left, timings = time.perf_counter(), iter(wanted), []

    async def user(session: aiohttp.ClientSession) -> None:
        for seed in left:
            timings.append(await ask(session, serving.url, seed, subject.side))

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        for _ in range(_AT_ONCE):
            group.create_task(user(session))
    return Batch(party, 0.0, reuse, timings, time.perf_counter() - began, serving.encoded())
