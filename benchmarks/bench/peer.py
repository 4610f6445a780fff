# SPDX-License-Identifier: Apache-2.0
"""LMCache's own encoder-cache engine (`ECCacheEngine`, 0.5.6) over its LocalCPU and LocalDisk tiers."""

import functools
import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["LMCACHE_LOG_LEVEL"] = "WARNING"  # it logs a line for every put

import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.ec_engine import ECCacheEngine
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.storage_manager import StorageManager

from benchmarks.bench.sample import BACK_TO_BACK_S, WIDTH, Pause, Samples, pause_of, timed, times_of

_POOL_GIB = 1.0
_HELD = 256
_DEADLINE_S = 60.0


def patch_reads() -> None:
    """Make `StorageManager.batched_get` continue with the next tier after a miss.

    In 0.5.6 it returns the first tier's answer if that is truthy, and `[None]` is: for an entry that is only on disk,
    `contains()` is true and `get()` returns None. Without this there would be no figure for its reads from disk.
    """
    ask = StorageManager.batched_get

    @functools.wraps(ask)
    def batched_get(self: Any, keys: list[Any], location: str | None = None) -> list[Any]:
        found: list[Any] = [None] * len(keys)
        for tier in [location] if location else list(self.storage_backends):
            found = ask(self, keys, location=tier)
            if None not in found:
                break
        return found

    StorageManager.batched_get = batched_get


class Peer:
    """Runs in its own process, as in a worker: its tiers' threads are in the engine's process.

    load_cpu, save   as its connector calls it in the forward pass: `get` and `put`
    disk_get         only its disk tier, into its memory pool, on the caller's thread; nothing is verified
    disk_put         only its disk tier, from a place in the pool, until its thread reports completion
    fetch_to_live    `get` of an entry that is only on disk, to a tensor: the forward pass waits for it
    save_to_written  `put` until the entry is on disk
    """

    def __init__(self, folder: str, largest_rows: int) -> None:
        torch.set_num_threads(1)
        patch_reads()
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=True,
            max_local_cpu_size=_POOL_GIB,
            local_disk=str(Path(folder) / "peer"),
            max_local_disk_size=64.0,
        )
        metadata = LMCacheMetadata("bench", 1, 1, 0, 0, torch.bfloat16, (1, 2, 256, 1, 64), role="worker")
        self._engine = ECCacheEngine(config, metadata, torch.bfloat16)
        self._manager = self._engine._storage_manager
        self._disk = self._manager.storage_backends["LocalDiskBackend"]
        self._source = torch.randn(largest_rows, WIDTH).to(torch.bfloat16)
        self._number = 0
        for number in range(_HELD):
            self._engine.put(f"held-{number}", self._source[:1])
        gc.collect()
        gc.freeze()

    def calls(self, rows: int, suffix: str) -> Samples:
        """Operations that run on the caller's thread."""
        samples: Samples = {}
        for _ in range(times_of(rows)):
            self._calls(samples, rows, suffix)
        return samples

    def _calls(self, samples: Samples, rows: int, suffix: str) -> None:
        name = self._new_name()
        key = self._engine._make_cache_key(name)
        timed(samples, f"save{suffix}", "peer", lambda: self._engine.put(name, self._source[:rows]))
        self._await(lambda: self._disk.contains(key), time.sleep)
        timed(samples, f"load_cpu{suffix}", "peer", lambda: self._load(name))
        timed(samples, f"disk_get{suffix}", "peer", lambda: self._disk.get_blocking(key).ref_count_down())
        self._manager.remove(key, ["LocalCPUBackend"])
        timed(samples, f"fetch_to_live{suffix}", "peer", lambda: self._load(name))
        self._manager.remove(key)

    def ways(self, rows: int, busy: bool) -> Samples:
        """Operations on its own threads; with `busy` this process's main thread runs Python meanwhile."""
        samples: Samples = {}
        suffix, pause = "_busy" if busy else "", pause_of(busy)
        for _ in range(times_of(rows)):
            name, written = self._new_name(), threading.Event()
            key, tensor = self._engine._make_cache_key(name), self._source[:rows]
            shape = (tensor.shape, tensor.dtype, MemoryFormat.EC_TD)
            place = self._manager.allocate(*shape, eviction=True, busy_loop=False)
            place.tensor.copy_(tensor)
            timed(samples, f"disk_put{suffix}", "peer", functools.partial(self._put, key, place, written, pause))
            place.ref_count_down()
            self._manager.remove(key)
            name = self._new_name()
            timed(samples, f"save_to_written{suffix}", "peer", functools.partial(self._store, name, tensor, pause))
            self._manager.remove(self._engine._make_cache_key(name))
        return samples

    def look_ups(self) -> Samples:
        """Look-ups of entries that it holds."""
        began = time.perf_counter()
        for number in range(_HELD):
            self._engine.contains(f"held-{number}")
        return {("has_cache_item", "peer"): [(time.perf_counter() - began) / _HELD]}

    def _load(self, name: str) -> None:
        cache: dict[str, torch.Tensor] = {}
        tensor = self._engine.get(name, "cpu")
        if tensor is None:
            raise RuntimeError("what was put is not there")
        cache[name] = tensor

    def _put(self, key: Any, place: Any, written: threading.Event, pause: Pause) -> None:
        self._disk.submit_put_task(key, place, lambda _: written.set())
        self._await(written.is_set, pause)

    def _store(self, name: str, tensor: torch.Tensor, pause: Pause) -> None:
        self._engine.put(name, tensor)
        key = self._engine._make_cache_key(name)
        self._await(lambda: self._disk.contains(key), pause)

    @staticmethod
    def _await(condition: Callable[[], bool], pause: Pause) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing was written in {_DEADLINE_S:.0f} s")
            pause(BACK_TO_BACK_S)

    def _new_name(self) -> str:
        self._number += 1
        return f"bench-{self._number}"

    def close(self) -> None:
        self._engine.close()
