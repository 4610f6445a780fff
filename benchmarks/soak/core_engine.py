# SPDX-License-Identifier: Apache-2.0
"""The engine's side without an engine, in a process that can be killed: it looks up, loads and saves in passes.

`python -m benchmarks.soak.core_engine SETTINGS`: SETTINGS is JSON. It prints reports as JSON lines on standard output,
each cumulative. At a line on standard input it stops asking, waits for everything to come to rest, reports what did
not, and ends when its standard input is closed.
"""

from __future__ import annotations

import select
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from benchmarks.soak.leftovers import held
from benchmarks.soak.parts import Bench, length, payload

_AT_ONCE = 12
_PATIENCE_S = 1.0
"""How long a request waits for an entry before it is encoded."""

_REPORT_EVERY_S = 0.2
_REST_S = 30.0
_ROWS = (16, 16, 16, 48, 150)
"""Rows of 128 bytes: 6 to 23 KB per entry. The name determines which number applies."""

_SKEW = 2.0


class Settings(msgspec.Struct):
    """`keys` are those of `ec:`; `names` is how many different items there are."""

    seed: str
    names: int
    disk: str
    arena_bytes: int
    keys: dict[str, Any]


class Report(msgspec.Struct):
    requests: int = 0
    encodes: int = 0
    loads: dict[str, int] = {}
    wrong: list[str] = []
    failed: list[str] = []
    left: list[str] = []
    at_rest: bool = False


class _Engine:
    """Runs on one thread. A request is an item's name and the time until which it waits."""

    def __init__(self, settings: Settings) -> None:
        self._chance = Random(settings.seed)
        self._names = settings.names
        self._bench = Bench(Path(settings.disk), arena_bytes=settings.arena_bytes, **settings.keys)
        self._waiting: dict[str, float] = {}
        self._report = Report()
        self._counts: Counter[str] = Counter()

    def run(self) -> None:
        reported = 0.0
        while not _is_to_stop() and not self._bench.cache.inert:
            before = self._report.requests
            self._pass(arrivals=True)
            if self._report.requests == before:
                time.sleep(0.001)
            if time.monotonic() > reported + _REPORT_EVERY_S:
                self._print()
                reported = time.monotonic()
        if self._bench.cache.inert:
            self._report.failed.append(f"inert: {self._bench.cache.inert}")
        self._rest()
        self._print()
        sys.stdin.readline()
        while not _is_to_stop():
            self._pass(arrivals=False)
            time.sleep(0.005)
        self._bench.close()

    def _pass(self, *, arrivals: bool) -> None:
        bench, now = self._bench, time.monotonic()
        bench.drain()
        while arrivals and len(self._waiting) < _AT_ONCE:
            self._waiting.setdefault(self._some_name(), now + _PATIENCE_S)
        to_encode: dict[int, list[str]] = {}
        for name in list(self._waiting):
            rows = _rows(name)
            if bench.live(name):
                self._load(name, rows)
            elif bench.cache.fetch(name, length(name, rows), now) and now < self._waiting[name]:
                continue
            else:
                to_encode.setdefault(rows, []).append(name)
            del self._waiting[name]
            self._report.requests += 1
        for rows, names in to_encode.items():
            self._report.encodes += len(names)
            bench.encode(names, rows)

    def _load(self, name: str, rows: int) -> None:
        if self._bench.read([name]) != {name: payload(name, rows)}:
            self._report.wrong.append(name)

    def _some_name(self) -> str:
        return f"item-{int(self._names * self._chance.random() ** _SKEW)}"

    def _rest(self) -> None:
        deadline = time.monotonic() + _REST_S
        while self._waiting or held(self._bench.snapshot()):
            if time.monotonic() > deadline:
                self._report.left += held(self._bench.snapshot())
                break
            self._pass(arrivals=False)
            time.sleep(0.002)
        self._report.at_rest = True

    def _print(self) -> None:
        loads = {name: number for name, number in self._bench.snapshot().items() if name.startswith("loads_")}
        self._report.loads = {name.removeprefix("loads_"): number for name, number in loads.items()}
        self._report.loads.pop("failed", None)
        print(msgspec.json.encode(self._report).decode(), flush=True)


def _is_to_stop() -> bool:
    """Whether standard input has a line or has been closed."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


def _rows(name: str) -> int:
    return _ROWS[int(name.rpartition("-")[2]) % len(_ROWS)]


def average_bytes() -> int:
    """Average size of an entry."""
    return sum(length("item-0", rows) for rows in _ROWS) // len(_ROWS)


if __name__ == "__main__":
    _Engine(msgspec.json.decode(sys.argv[1], type=Settings)).run()
