# SPDX-License-Identifier: Apache-2.0
"""The cost of the hooks on the scheduler's thread, with no entry moving and with all of them moving."""

import gc
import itertools
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench.example import Example
from benchmarks.bench.sample import BACK_TO_BACK_S, WIDTH, Samples, rows_of
from benchmarks.bench.served import Engine, new_identifier
from benchmarks.testbed.stand_ins import Request, VllmScheduler, request, scheduler_output
from lmcache_ec.adapters.vllm.connector import ECLMCacheConnector

_REQUESTS, _IMAGES = 256, 4
_HELD_REQUESTS = 64
_ARENA_BYTES = 256 << 20
_ON_DISK = [0.5] * 40 + [2.75] * 48 + [16.0] * 14
"""Megabytes of each entry to promote; together one and a half times the arena."""

_WAITING = 4
_PASSES = 400


class Hooks:
    """Runs in its own process. The hooks are called through the connector's shell, as vLLM calls them.

    has_cache_item        for items that are in the arena and leased to the request. Floor: a dictionary look-up
    ensure_idle_step      a pass over 256 decoding requests of 4 images. Floor: as many calls that do nothing
    hook_p99_promoting    99th percentile of the hooks while each request's entries come from disk into an arena that
                          has to evict for them
    pass_p99_promoting    the same for the sum of all hooks in a pass
    """

    def __init__(self, folder: str) -> None:
        torch.set_num_threads(1)
        self._still = Engine(Path(folder) / "still", 64 << 20, torch.randn(4, 8))
        self._shell = self._still.connector()
        self._held = [[new_identifier() for _ in range(_IMAGES)] for _ in range(_HELD_REQUESTS)]
        self._still.store(*itertools.chain(*self._held))
        self._decoding = [
            request(f"decoding-{number}", *(new_identifier() for _ in range(_IMAGES))) for number in range(_REQUESTS)
        ]
        self._example = Example(folder)
        self._example.save("held", torch.zeros(1, WIDTH))
        self._promoting = Promoting(Path(folder) / "promoting")
        gc.collect()
        gc.freeze()  # as vLLM does once an engine has started

    def measure(self) -> Samples:
        hooks, passes = self._promoting.run(_PASSES)
        return {
            ("has_cache_item", "ours"): [self._has()],
            ("has_cache_item", "floor"): [self._look_up()],
            ("has_cache_item", "example"): [self._example_has()],
            ("ensure_idle_step", "ours"): [self._idle_step(self._shell)],
            ("ensure_idle_step", "floor"): [self._idle_step(Nothing())],
            ("hook_p99_promoting", "ours"): [_p99(hooks)],
            ("pass_p99_promoting", "ours"): [_p99(passes)],
        }

    def _has(self) -> float:
        seconds, has = 0.0, self._shell.has_cache_item
        asking = [request(f"asking-{number}", *names) for number, names in enumerate(self._held)]
        for item, names in zip(asking, self._held, strict=True):
            _check(self._shell.ensure_cache_available(item, 0), "items that are held were waited for")
            began = time.perf_counter()
            answers = [has(name) for name in names]
            seconds += time.perf_counter() - began
            _check(all(answers), "items that are held were not promised")
        self._shell.build_connector_meta(scheduler_output())
        for item in asking:
            self._shell.request_finished(item)
        self._still.step()
        return seconds / (_HELD_REQUESTS * _IMAGES)

    def _look_up(self) -> float:
        index = dict.fromkeys(itertools.chain(*self._held), True)
        began = time.perf_counter()
        sum(index[name] for names in self._held for name in names)
        return (time.perf_counter() - began) / len(index)

    def _example_has(self) -> float:
        began = time.perf_counter()
        for _ in range(_REQUESTS):
            self._example.has("held")
        return (time.perf_counter() - began) / _REQUESTS

    def _idle_step(self, connector: Any) -> float:
        """For requests past their prompts: the first pass remembers them, and the last of a few passes is timed."""
        ensure, seconds = connector.ensure_cache_available, 0.0
        for _ in range(3):
            began = time.perf_counter()
            for item in self._decoding:
                ensure(item, 1000)
            seconds = time.perf_counter() - began
            connector.build_connector_meta(scheduler_output())
        return seconds

    def close(self) -> None:
        _check(self._shell.snapshot() != {}, "a hook has failed")
        self._still.close()
        self._promoting.close()


class Nothing:
    """Stands in for the connector and does nothing."""

    def ensure_cache_available(self, request: Request, computed: int) -> bool:
        return True

    def build_connector_meta(self, output: Any) -> None:
        return None


class Clocked:
    """The connector's hooks, each timed separately. The scheduler uses no other attribute."""

    def __init__(self, connector: ECLMCacheConnector) -> None:
        self.hooks: list[float] = []
        for name in (
            "ensure_cache_available",
            "has_cache_item",
            "update_state_after_alloc",
            "build_connector_meta",
            "request_finished",
        ):
            setattr(self, name, self._clocked(getattr(connector, name)))

    def _clocked(self, hook: Any) -> Any:
        def called(*arguments: Any) -> Any:
            began = time.perf_counter()
            answer = hook(*arguments)
            self.hooks.append(time.perf_counter() - began)
            return answer

        return called


class Promoting:
    """An engine whose requests need, one after another, entries that together exceed its arena."""

    def __init__(self, folder: Path) -> None:
        largest = torch.randn(rows_of(max(_ON_DISK)), WIDTH).to(torch.bfloat16)
        self._engine = Engine(folder, _ARENA_BYTES, largest)
        self._clocked: Any = Clocked(self._engine.connector())
        self._engine.vllm = VllmScheduler(self._clocked)
        self._items = {new_identifier(): rows_of(megabytes) for megabytes in _ON_DISK}
        self._numbers = itertools.count()
        for identifier, rows in self._items.items():
            self._engine.save(identifier, rows, time.sleep, BACK_TO_BACK_S)
        names = list(self._items)
        self._turn = itertools.cycle(names[::2] + names[1::2])
        self._waiting: deque[Request] = deque()

    def run(self, passes: int) -> tuple[list[float], list[float]]:
        """Seconds of each hook, and of all hooks of each pass together."""
        hooks, sums = self._clocked.hooks, []
        before = self._engine.side.snapshot()
        hooks.clear()
        for _ in range(passes):
            first = len(hooks)
            self._pass()
            sums.append(sum(hooks[first:]))
        after = self._engine.side.snapshot()
        _check(after["loads_disk"] > before.get("loads_disk", 0), "nothing was promoted")
        _check(after["evictions"] > before["evictions"], "nothing was evicted")
        return list(hooks), sums

    def _pass(self) -> None:
        engine = self._engine
        while len(self._waiting) < _WAITING:
            name = next(self._turn)
            self._waiting.append(request(f"promoting-{next(self._numbers)}", name, rows=self._items[name]))
        scheduled = [item for item in self._waiting if engine.vllm.offer(item) is not None]
        engine.step(*scheduled)
        for item in scheduled:
            self._waiting.remove(item)
            self._clocked.request_finished(item)
            engine.vllm.evict(*(feature.identifier for feature in item.mm_features))
        time.sleep(BACK_TO_BACK_S)

    def close(self) -> None:
        self._engine.close()


def _p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def _check(right: bool, otherwise: str) -> None:
    if not right:
        raise RuntimeError(otherwise)
