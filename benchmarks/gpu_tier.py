# SPDX-License-Identifier: Apache-2.0
"""How each eviction order of vLLM's own cache performs on traces: encodes, loads, encoder seconds.

    python -m benchmarks.gpu_tier [--requests 100000] [--gpu-gib 0.05] [--cpu-gib 2]

The managers are the real ones, vLLM's and ours; LocalCPU below them is that of `lmcache-ec plan`, with no tier below
it. A request holds its item until one to three later ones have asked, since prefill is short.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from lmcache_ec.adapters.vllm.encoder_cache_manager import TierAwareEncoderCacheManager
from lmcache_ec.eviction import Below, restore_s
from lmcache_ec.plan.simulate import Cache, Cost, Lru
from lmcache_ec.plan.synthetic import Synthetic, generate, parse

_ROW_BYTES = 5120
_TRACES = ("zipf", "scan", "conversations", "conversations:gap_s=2,turns=4,pictures=100000", "mixed")
"""The fourth: bursts, four requests within seconds and none after."""


class LocalCpu:
    """LocalCPU, as one engine's manager sees it, with its knowledge of encodes."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.known: dict[str, tuple[int, int, float]] = {}
        """Name -> number in the trace, bytes, seconds of encode."""

    def restore_s(self, identifier: str, modality: str, rows: int) -> float:
        number, size, encode_s = self.known[identifier]
        return restore_s(Below.MEMORY if number in self._cache else Below.NOTHING, size, rows, encode_s)


@dataclass
class Outcome:
    requests: int = 0
    encodes: int = 0
    loads: int = 0
    spent_s: float = 0.0
    all_s: float = 0.0

    @property
    def saved(self) -> float:
        return 1 - self.spent_s / self.all_s


def requests(trace: Synthetic) -> Iterator[tuple[int, int, float]]:
    for batch in generate(trace):
        yield from zip(batch.identifiers, batch.sizes, batch.encodes_s, strict=True)


def replay(trace: Synthetic, manager: str, cpu: str, gpu_bytes: float, cpu_bytes: float) -> Outcome:
    """`manager` is "vllm", "lru" or "cost", `cpu` "lru" or "cost"."""
    cache: Cache = (Cost if cpu == "cost" else Lru)(cpu_bytes)
    below, rows = LocalCpu(cache), int(gpu_bytes / _ROW_BYTES)
    gpu = (
        EncoderCacheManager(rows)
        if manager == "vllm"
        else TierAwareEncoderCacheManager(rows, below if manager == "cost" else None)
    )
    out, running, dice = Outcome(), list[tuple[int, int, Any]](), random.Random(1)
    for number, size, encode_s in requests(trace):
        out.requests += 1
        out.all_s += encode_s
        name = f"{number:x}"
        below.known[name] = number, size, encode_s
        one = _request(out.requests, name, max(1, size // _ROW_BYTES))
        if not gpu.check_and_update_cache(one, 0):
            while not gpu.can_allocate(one, 0, 10**9, 0):  # it waits for a running request
                if not running:
                    raise ValueError(f"an item of {size} bytes is larger than vLLM's cache")
                gpu.free(heappop(running)[2])
            if cache.has(number):
                out.loads += 1
            else:
                out.encodes += 1
                out.spent_s += encode_s
                cache.put(number, size, encode_s)
            gpu.allocate(one, 0)
        heappush(running, (out.requests + dice.randint(1, 3), out.requests, one))
        while running[0][0] <= out.requests:
            gpu.free(heappop(running)[2])
        gpu.get_freed_mm_hashes()
    return out


def _request(number: int, identifier: str, rows: int) -> Any:
    feature = SimpleNamespace(identifier=identifier, modality="image")
    return SimpleNamespace(request_id=f"r{number}", mm_features=[feature], get_num_encoder_embeds=lambda index: rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--gpu-gib", type=float, default=0.05)
    parser.add_argument("--cpu-gib", type=float, default=2.0)
    chosen = parser.parse_args()
    gpu_bytes, cpu_bytes = chosen.gpu_gib * 2**30, chosen.cpu_gib * 2**30
    print(f"gpu {chosen.gpu_gib} GiB, cpu {chosen.cpu_gib} GiB, {chosen.requests} requests")
    print("| trace | manager | LocalCPU | encodes | loads | encoder seconds | saved | against vLLM's |")
    print("|---|---|---|---|---|---|---|---|")
    for name in _TRACES:
        trace = parse(f"{name}{',' if ':' in name else ':'}requests={chosen.requests}")
        base: Outcome | None = None
        for manager, cpu in (("vllm", "lru"), ("lru", "lru"), ("cost", "lru"), ("vllm", "cost"), ("cost", "cost")):
            out = replay(trace, manager, cpu, gpu_bytes, cpu_bytes)
            base = base or out
            gain = out.saved / base.saved - 1
            print(
                f"| {name} | {manager} | {cpu} | {out.encodes} | {out.loads} | {out.spent_s:.0f} "
                f"| {out.saved:.1%} | {gain:+.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
