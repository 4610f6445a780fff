# SPDX-License-Identifier: Apache-2.0
"""An engine's two sides without vLLM: real cache, store process, links and rank, driven in vLLM's order."""

import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

from benchmarks.bench.sample import Pause
from benchmarks.testbed.stand_ins import Request, Served, request
from lmcache_ec.adapters.vllm import build
from lmcache_ec.adapters.vllm.connector import ECLMCacheConnector
from lmcache_ec.adapters.vllm.tensors import dtype_name, view
from lmcache_ec.entry import TensorSpec, room
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.tiers.disk import DiskTier

_numbers = itertools.count(1)
_DEADLINE_S = 60.0


class Saving(NamedTuple):
    """Seconds that the forward pass was delayed, and CPU seconds of its thread in that time; seconds, and passes, until
    the entry was known to be on disk."""

    held_up_s: float
    ran_s: float
    written_s: float
    passes: int


class Engine(Served):
    """Scheduler side and worker side in this process, as in an engine with one process. Its encoder returns the first
    rows of `output`."""

    def __init__(self, folder: Path, arena_bytes: int, output: torch.Tensor) -> None:
        widths = {"image": output.shape[1]}
        super().__init__(folder, arena_bytes, deadline_s=_DEADLINE_S, dtype=dtype_name(output.dtype), widths=widths)
        self.output = output
        self._disk = DiskTier(folder, 1 << 40, make=False)
        self.runner.encode = lambda identifier, rows: output[:rows]
        self.ready()

    def connector(self) -> ECLMCacheConnector:
        """The connector's shell around this scheduler side, built by its own constructor."""
        config = SimpleNamespace(
            ec_transfer_config=SimpleNamespace(is_ec_producer=True, is_ec_consumer=True, engine_id="bench"),
            instance_id=f"{id(self):x}",
            parallel_config=SimpleNamespace(data_parallel_index=0),
        )
        with patch.object(build, "build_scheduler_side", lambda *_: (self.side, None)):
            return ECLMCacheConnector(config, ECConnectorRole.SCHEDULER)

    def save(self, identifier: str, rows: int, pause: Pause, pass_s: float) -> Saving:
        item = request(identifier, identifier, rows=rows)
        _expect(self.vllm.offer(item), "encode")
        writes, cache, passes = self.cache.book.counts.writes, {identifier: self.output[:rows]}, 0
        meta = self.vllm.end_pass().ec_connector_metadata
        ran, began = time.thread_time(), time.perf_counter()
        self.runner.worker.bind(meta)
        self.runner.worker.save(cache, identifier)
        self.runner.worker.finish_step()
        saved, ran = time.perf_counter(), time.thread_time() - ran
        while self.cache.book.counts.writes == writes:
            self._next_pass(began, pause, pass_s)
            passes += 1
        written = time.perf_counter()
        self._finish(item)
        return Saving(saved - began, ran, written - began, passes)

    def stored(self, identifier: str, rows: int) -> torch.Tensor:
        """A view of a live entry's tensor in the arena."""
        place, rank = self.cache.book.live(identifier), self.runner.worker._rank
        memory = rank.memory if rank is not None else None
        if place is None or memory is None:
            raise RuntimeError("what was saved is not live")
        spec = TensorSpec(rows, self.output.shape[1], dtype_name(self.output.dtype))
        return view(memory, place.offset + room(identifier), spec)

    def load(self, identifier: str, rows: int) -> tuple[float, float]:
        """Seconds of a load from the arena into a fresh dictionary, and of the report at the step's end."""
        item = request(identifier, identifier, rows=rows)
        _expect(self.vllm.offer(item), "load")
        cache: dict[str, torch.Tensor] = {}
        meta = self.vllm.end_pass().ec_connector_metadata
        began = time.perf_counter()
        self.runner.worker.bind(meta)
        self.runner.worker.load(cache)
        loaded = time.perf_counter()
        self.runner.worker.finish_step()
        reported = time.perf_counter()
        if identifier not in cache:
            raise RuntimeError("what was promised was not loaded")
        self._finish(item)
        return loaded - began, reported - loaded

    def fetch(self, identifier: str, rows: int, pause: Pause, pass_s: float, step_s: float = 0.0) -> tuple[float, int]:
        """Seconds and deferred passes from the hook that first asks for an entry on disk to the pass that can promise
        it. With `step_s`, from the request's arrival, which is `step_s` before its first pass."""
        item, passes = request(identifier, identifier, rows=rows), 0
        began = time.perf_counter()
        if step_s:
            self.side.expect(item)
            pause(step_s)
        while (answer := self.vllm.offer(item)) is None:
            self._next_pass(began, pause, pass_s)
            passes += 1
        live = time.perf_counter()
        _expect(answer, "load")
        self.step(item)
        self._finish(item)
        return live - began, passes

    def forget(self, identifier: str, everywhere: bool = False) -> None:
        """Evict an entry from the arena; with `everywhere` delete it from the disk as well."""
        self.settle()
        place = self.cache.book.live(identifier)
        if place is not None:
            self.cache.book.forget(place)
            if everywhere:
                self._disk.delete(EncoderCacheKey(self.cache.namespace, identifier))

    def _next_pass(self, began: float, pause: Pause, pass_s: float) -> None:
        if time.perf_counter() - began > _DEADLINE_S:
            raise TimeoutError(f"nothing came of it in {_DEADLINE_S:.0f} s: {self.side.snapshot()}")
        self.step()
        pause(pass_s)

    def _finish(self, item: Request) -> None:
        self.side.request_finished(item)
        self.vllm.evict(*(feature.identifier for feature in item.mm_features))
        self.step()


def new_identifier() -> str:
    return f"{next(_numbers):064x}"


def _expect(answer: Any, wanted: str) -> None:
    if answer != wanted:
        raise RuntimeError(f"the scheduler side answered {answer}, expected was {wanted}")
