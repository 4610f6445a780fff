# SPDX-License-Identifier: Apache-2.0
"""The cost of one request, by where its picture's encoder output was.

Each kind of hit is compared with its floor, a hit in vLLM's own cache: same server, same pictures, a few requests
later. A miss with the cache is compared with one without and, for the tiny model, with one through a connector that
does nothing, on servers that take turns. Servers of one kind differ by more than the effect to be shown (by a tenth,
for a tiny model), so misses are measured in several sets of servers, hits in memory in several rounds over the same
pictures, and hits from disk after several restarts. All counts are checked: a supposed hit that was none ends the run.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.client import FEW_TOKENS, TOKENS, Timing, ask_once
from benchmarks.engine.parties import Stores, Subject, example, nothing, ours, server
from benchmarks.testbed.models import model_path
from benchmarks.testbed.servers.openai import OpenAIServer
from benchmarks.testbed.waiting import wait_until

BLOCK = 4
"""Pictures between two kinds of hit: more than the processor cache holds, fewer than vLLM's own cache holds."""
_MORE = 500_000
"""First number of the pictures that are asked for once."""
WARM_UP = (1_000_001, 1_000_002)
"""Pictures of the requests that are not counted."""
_LOADS = {"LocalCPU": "cpu", "disk": "disk", "Redis": "redis", "S3": "s3"}
_WRITES_S = 120.0

KINDS = (*_LOADS, "ECExample")
"""Kinds of hits. Those in LocalCPU are always measured, together with the misses."""

Measured = dict[str, dict[tuple[int, int], Timing]]
"""Kind of request -> picture and round -> timing. The floor of a kind has the same name with "own" appended."""


@dataclass(frozen=True)
class Counts:
    """How much is measured: pictures per kind, rounds over them for hits in memory, restarts for hits from disk;
    `misses` more pictures that are asked for once; and pairs of servers that share all of these."""

    pictures: int
    rounds: int
    restarts: int
    misses: int
    pairs: int


def servers_of(seed: int, pairs: int) -> int:
    """Number of the pair of servers that a picture was asked of, where only one pair was."""
    return seed % _MORE % pairs


Report = Callable[[str], object]


class NotWhatItSeems(Exception):
    """A request was not served in the way that was meant to be measured."""


def measure(
    subject: Subject,
    folder: Path,
    behind: Stores,
    counts: Counts,
    report: Report,
    kinds: Collection[str] = KINDS,
    keep: Callable[[Measured], object] = lambda measured: None,
) -> Measured:
    """Misses, hits in memory, and hits of `kinds`. `keep` is called repeatedly with everything measured so far."""
    measured: Measured = {}
    seeds = range(counts.pictures)
    for pair in range(counts.pairs):
        share = slice(pair, None, counts.pairs)
        more = range(_MORE, _MORE + counts.misses)
        pair_folder = folder / f"pair-{pair}"
        _measure_misses(measured, subject, pair_folder, behind, seeds[share], more[share], counts.rounds, report)
        keep(measured)
    remotes = [_LOADS[kind] for kind in ("Redis", "S3") if kind in kinds]
    if remotes:
        report(f"{subject.model}: filling {' and '.join(remotes)}")
        with _served(subject, folder / "filling", ours(behind.tiers(*remotes)), behind) as cached:
            for seed in seeds:
                ask_once(cached.url, seed, subject.side)
            wait_until("all is written", lambda: _written(cached, len(seeds)), _WRITES_S, pause_s=0.2)
    for kind, restarts in (("disk", counts.restarts), ("Redis", 1), ("S3", 1)):
        tier = _LOADS[kind]
        for number in range(restarts if kind in kinds else 0):
            report(f"{subject.model}: hits from {kind} after a restart, {number + 1} of {restarts}")
            keys = {**behind.tiers(tier), "load_policy": "always"}  # auto may try an encode of unknown cost
            with _served(subject, folder / f"{tier}-{number}", ours(keys), behind) as cached:
                for block in _blocks(seeds):
                    _each(measured, kind, cached, subject, block, number, loads=tier)
                    _each(measured, f"{kind} own", cached, subject, block, number)
            keep(measured)
    if "ECExample" in kinds:
        report(f"{subject.model}: vLLM's ECExampleConnector, after a restart")
        with _served(subject, folder / "example", example(folder / "files"), behind) as filling:
            for seed in seeds:
                ask_once(filling.url, seed, subject.side)
        with _served(subject, folder / "example", example(folder / "files"), behind) as filled:
            for block in _blocks(seeds):
                _each(measured, "ECExample", filled, subject, block)
                _each(measured, "ECExample own", filled, subject, block)
    _check_answers(measured)
    return measured


def _measure_misses(
    measured: Measured,
    subject: Subject,
    folder: Path,
    behind: Stores,
    seeds: Sequence[int],
    more: Sequence[int],
    rounds: int,
    report: Report,
) -> None:
    """Misses in servers side by side, then hits in memory for `seeds`."""
    report(f"{subject.model}: misses with and without the cache, hits in memory")
    connectors = {"off": None, **({"nothing": nothing()} if more else {}), "miss": ours(behind.tiers("disk"))}
    model_path(subject.model)  # build it once, not in each of the threads
    with ExitStack() as stack, ThreadPoolExecutor() as starting:
        started = {
            kind: starting.submit(stack.enter_context, _served(subject, folder / kind, connector, behind))
            for kind, connector in connectors.items()
        }
        servers = {kind: server.result() for kind, server in started.items()}
        off, cached = servers["off"], servers["miss"]
        written = _writes(cached)
        for block in _blocks(seeds):
            _miss(measured, subject, servers, block)
            _each(measured, "off own", off, subject, block)
            for number in range(rounds if len(block) > 1 else 0):  # one picture stays in the processor cache
                cached.forget()
                _each(measured, "LocalCPU", cached, subject, block, number, loads="cpu")
                _each(measured, "LocalCPU own", cached, subject, block, number)
        _miss(measured, subject, servers, more)
        wait_until("all is written", lambda: _writes(cached) >= written + len(seeds), _WRITES_S, pause_s=0.2)


def _miss(measured: Measured, subject: Subject, servers: Mapping[str, OpenAIServer], seeds: Sequence[int]) -> None:
    """Ask each server for each picture; each server is first equally often."""
    kinds = list(servers)
    for position, seed in enumerate(seeds):
        first = position % len(kinds)
        for kind in (*kinds[first:], *kinds[:first]):
            _each(measured, kind, servers[kind], subject, [seed], encodes=1)


@contextmanager
def _served(subject: Subject, folder: Path, connector: dict[str, Any] | None, behind: Stores) -> Iterator[OpenAIServer]:
    """A server that has already served some requests, like a real one."""
    with server(subject, folder, connector, behind.environment) as serving:
        for seed in WARM_UP:
            ask_once(serving.url, seed, subject.side)
        serving.encoded()
        yield serving


def _each(
    measured: Measured,
    kind: str,
    serving: OpenAIServer,
    subject: Subject,
    seeds: Sequence[int],
    number: int = 0,
    *,
    encodes: int = 0,
    loads: str = "",
) -> None:
    """Ask for each picture once and check that it came from the expected place."""
    before = _loads(serving, loads)
    for seed in seeds:
        timing = ask_once(serving.url, seed, subject.side, TOKENS if number == 0 else FEW_TOKENS)
        measured.setdefault(kind, {})[seed, number] = timing
    if (encoded := serving.encoded()) != encodes * len(seeds):
        raise NotWhatItSeems(f"{kind}: {encoded} of {len(seeds)} were encoded")
    if loads:
        expected = before + len(seeds)
        wait_until(f"{len(seeds)} loads from {loads} are counted", lambda: _loads(serving, loads) >= expected)


def _loads(serving: OpenAIServer, tier: str) -> int:
    return int(serving.status()["book"].get(f"loads_{tier}", 0)) if tier else 0


def _written(serving: OpenAIServer, pictures: int) -> bool:
    """Whether every tier holds the pictures, including those of the warm-up."""
    return _writes(serving) >= pictures + len(WARM_UP)


def _writes(serving: OpenAIServer) -> int:
    """Writes of the tier that has written least."""
    return min(int(tier["writes"]) for tier in serving.status()["tiers"])


def _blocks(seeds: Sequence[int]) -> Iterator[Sequence[int]]:
    return (seeds[start : start + BLOCK] for start in range(0, len(seeds), BLOCK))


def _check_answers(measured: Measured) -> None:
    """Check that a picture always has the same answer, wherever its encoder output was."""
    for kind, timings in measured.items():
        for (seed, _), timing in timings.items():
            if timing.tokens != measured["off"][seed, 0].tokens[: len(timing.tokens)]:
                raise NotWhatItSeems(f"picture {seed}, {kind}: another answer than without the cache")
