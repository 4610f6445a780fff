# SPDX-License-Identifier: Apache-2.0
"""Simulates replicas with tiers of given sizes and policies on a trace of requests.

A request goes to one replica and is answered by the first of its tiers that has the output, or by the encoder if
that is expected sooner (as with `ec.load_policy: auto`). All tiers before that one then have it; after an encode, all
tiers do. Not simulated: queueing time, failures, batches.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from lmcache_ec.eviction import Uses, worth
from lmcache_ec.eviction_order import USES_HALF_LIFE, CostOrder
from lmcache_ec.plan.traces import Batch, scattered

POLICIES = ("lru", "cost")
ROUTINGS = ("random", "picture")


class Medium(NamedTuple):
    """A kind of tier: whether all replicas share one, and the assumed time to read an entry from it."""

    shared: bool
    latency_s: float
    bytes_per_s: float


MEDIA = {
    "gpu": Medium(False, 0.0, math.inf),
    "cpu": Medium(False, 50e-6, 10e9),
    "disk": Medium(False, 300e-6, 2e9),
    "redis": Medium(True, 1e-3, 1e9),
    "s3": Medium(True, 30e-3, 200e6),
}
"""In the order in which they are asked. Only memory, `gpu` and `cpu`, evicts by cost if that is the policy."""

_IN_MEMORY = ("gpu", "cpu")


@dataclass(frozen=True, slots=True)
class Scenario:
    """Tiers by name, with their bytes (per replica, or in total if shared), and how memory evicts."""

    tiers: dict[str, float]
    policy: str = "lru"
    replicas: int = 1
    routing: str = "random"


@dataclass(slots=True)
class Served:
    """What one tier, or the encoder, has answered."""

    requests: int = 0
    bytes: int = 0
    encode_s: float = 0.0
    """Time that encoding this took, or would have taken."""
    read_s: float = 0.0


@dataclass(slots=True)
class Outcome:
    """The outcome for a trace's requests. For a sampled trace it is that of the sample."""

    scenario: Scenario
    by_tier: dict[str, Served]
    encoder: Served = field(default_factory=Served)
    written: dict[str, Served] = field(default_factory=dict)
    """To tiers that replicas share."""
    begin_s: float = math.inf
    end_s: float = -math.inf

    @property
    def requests(self) -> int:
        return self.encoder.requests + sum(served.requests for served in self.by_tier.values())

    @property
    def saved_s(self) -> float:
        """Encoder seconds that the tiers have saved."""
        return sum(served.encode_s for served in self.by_tier.values())

    @property
    def saved_share(self) -> float:
        whole = self.saved_s + self.encoder.encode_s
        return self.saved_s / whole if whole else 0.0

    @property
    def network_bytes(self) -> int:
        read = sum(served.bytes for name, served in self.by_tier.items() if MEDIA[name].shared)
        return read + sum(served.bytes for served in self.written.values())


class Cache(Protocol):
    """A tier's memory."""

    def has(self, identifier: int) -> bool:
        """Whether it is there; counts as a use."""
        ...

    def put(self, identifier: int, size: int, miss_s: float) -> None:
        """Add an entry that is not there, making room for it. The next miss of it would take `miss_s`."""
        ...

    def __contains__(self, identifier: int) -> bool:
        """Whether it is there; does not count as a use."""
        ...


class Lru:
    """Evicts the least recently used entry first."""

    def __init__(self, capacity: float) -> None:
        self._free = capacity
        self._capacity = capacity
        self._sizes: OrderedDict[int, int] = OrderedDict()

    def has(self, identifier: int) -> bool:
        if identifier not in self._sizes:
            return False
        self._sizes.move_to_end(identifier)
        return True

    def put(self, identifier: int, size: int, miss_s: float) -> None:
        if size > self._capacity:
            return
        while size > self._free:
            self._free += self._sizes.popitem(last=False)[1]
        self._sizes[identifier] = size
        self._free -= size

    def __contains__(self, identifier: int) -> bool:
        return identifier in self._sizes


class Cost:
    """Evicts as LocalCPU does with `cache_policy: cost`."""

    def __init__(self, capacity: float) -> None:
        self._free = capacity
        self._capacity = capacity
        self._held: dict[int, tuple[int, float]] = {}  # bytes, seconds that a miss takes
        self._order: CostOrder[int] = CostOrder(self._value)
        self._uses = Uses(USES_HALF_LIFE)

    def has(self, identifier: int) -> bool:
        self._uses.add(f"{identifier:x}")
        if identifier not in self._held:
            return False
        self._order.remove(identifier)
        self._order.add(identifier)
        return True

    def put(self, identifier: int, size: int, miss_s: float) -> None:
        if size > self._capacity:
            return
        while size > self._free:
            self._free += self._held.pop(self._order.evict_first())[0]
        self._held[identifier] = size, miss_s
        self._order.add(identifier)
        self._free -= size

    def __contains__(self, identifier: int) -> bool:
        return identifier in self._held

    def _value(self, identifier: int) -> float:
        size, miss_s = self._held[identifier]
        return worth(size, miss_s, max(1.0, self._uses.count(f"{identifier:x}")))


class Simulation:
    """One scenario, fed with batches. For a sampled trace, `share` is the share of the identifiers."""

    def __init__(self, scenario: Scenario, share: float = 1.0) -> None:
        self._names = [name for name in MEDIA if scenario.tiers.get(name, 0)]
        self.outcome = Outcome(scenario, {name: Served() for name in self._names})
        self.outcome.written = {name: Served() for name in self._names if MEDIA[name].shared}
        shared: dict[str, Cache] = {}

        def cache(name: str) -> Cache:
            by_cost = scenario.policy == "cost" and name in _IN_MEMORY
            made: Cache = (Cost if by_cost else Lru)(scenario.tiers[name] * share)
            return shared.setdefault(name, made) if MEDIA[name].shared else made

        self._stacks = [[cache(name) for name in self._names] for _ in range(scenario.replicas)]
        self._routed = 0

    def replay(self, batch: Batch) -> None:
        """Replay the batch's requests, after those of earlier batches."""
        outcome, stacks, names = self.outcome, self._stacks, self._names
        media = [MEDIA[name] for name in names]
        served = [outcome.by_tier[name] for name in names]
        writes = [outcome.written.get(name) for name in names]
        by_picture, replicas, routed = outcome.scenario.routing == "picture", len(stacks), self._routed
        for identifier, size, encode_s in zip(batch.identifiers, batch.sizes, batch.encodes_s, strict=True):
            if replicas == 1:
                stack = stacks[0]
            else:
                routed += 1
                stack = stacks[scattered(identifier ^ 0x55 if by_picture else routed) % replicas]
            found = 0
            for cache in stack:
                if cache.has(identifier):
                    break
                found += 1
            answer, read_s = outcome.encoder, 0.0
            if found < len(stack):
                read_s = media[found].latency_s + size / media[found].bytes_per_s
                if read_s <= encode_s:
                    answer = served[found]
                else:
                    read_s = 0.0
            answer.requests += 1
            answer.bytes += size
            answer.encode_s += encode_s
            answer.read_s += read_s
            miss_s = encode_s
            if found < len(stack):
                miss_s = min(encode_s, media[found].latency_s + size / media[found].bytes_per_s)
            for number in range(found - 1, -1, -1):
                stack[number].put(identifier, size, miss_s)
                miss_s = min(encode_s, media[number].latency_s + size / media[number].bytes_per_s)
                if (write := writes[number]) is not None:
                    write.requests += 1
                    write.bytes += size
        self._routed = routed
        outcome.begin_s = min(outcome.begin_s, batch.times_s[0])
        outcome.end_s = max(outcome.end_s, batch.times_s[-1])


def replay(batches: Sequence[Batch], scenario: Scenario, share: float = 1.0) -> Outcome:
    """The outcome for a trace that is in memory."""
    simulation = Simulation(scenario, share)
    for batch in batches:
        simulation.replay(batch)
    return simulation.outcome
