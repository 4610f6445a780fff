# SPDX-License-Identifier: Apache-2.0
"""What is evicted first: the least recently used entry, or the one worth least.

Both orders are maps in the order of eviction. A key has a *priority*: the lowest goes first. For `LruOrder` it is a
clock; for `CostOrder` it is GreedyDual-Size-Frequency (Cherkasova 1998): the cost of a miss per byte, times the number
of recent uses, above the *floor*, the priority of the last eviction. So an entry that is no longer requested sinks as
the floor rises, and entries requested only once, however many, only push out others like them.

Values and sizes are rounded to half powers of two, and each pair has its own queue (CAMP, Ghandeharizadeh et al.
2014): within a queue the order of arrival is the order of priority, so nothing is ever sorted. A use costs a few
dictionary operations; choosing a victim means a look at the head of each queue, some dozens at most.

No clock, no I/O, no lock: the owner of an order uses it on one thread.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Generic, Protocol, TypeVar

K = TypeVar("K")

_Class = tuple[int, int]
"""Class of value, and of size: exponents of the square root of two."""

_LEAST_VALUE = 1e-30

USES_HALF_LIFE = 8192.0
"""For LocalCPU's `eviction.Uses`. A guess, to be replaced by what `lmcache-ec plan` finds."""


class Order(Protocol[K]):
    """Keys in the order of eviction. Each is added once, and leaves by `remove` or `discard`."""

    def add(self, key: K) -> float:
        """Insert it behind all keys that are worth no more. Returns its priority."""
        ...

    def remove(self, key: K) -> None:
        """KeyError if it is not there."""
        ...

    def discard(self, key: K) -> None: ...

    def age(self, key: K) -> None:
        """The key is about to be removed to make room: raise the priority of keys added from now on."""
        ...

    def candidates(self, largest: int) -> Iterator[K]:
        """Keys in the order of eviction. Where costs decide, those certainly longer than `largest` bytes are left out:
        the keys worth least may all have one size, no number of which makes suitable room for another."""
        ...

    def worth(self, key: K) -> float:
        """The loss of evicting it, per byte, relative to the other keys."""
        ...

    def __contains__(self, key: object, /) -> bool: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[K]:
        """In the order of eviction."""
        ...

    def __reversed__(self) -> Iterator[K]: ...


class LruOrder(OrderedDict[K, float]):
    """Least recently added first; the priority is a clock, and all keys are worth the same."""

    _clock = 0

    def add(self, key: K) -> float:
        self._clock += 1
        self[key] = self._clock
        return self._clock

    def remove(self, key: K) -> None:
        del self[key]

    def age(self, key: K) -> None:
        pass

    def candidates(self, largest: int) -> Iterator[K]:
        return iter(self)

    def discard(self, key: K) -> None:
        self.pop(key, None)

    def worth(self, key: K) -> float:
        return 1.0


class CostOrder(Generic[K]):
    """Keys by what they are worth."""

    def __init__(self, value: Callable[[K], float], size: Callable[[K], int] = lambda key: 1) -> None:
        """`value` is called for a key when it is added; in any unit, the same for all (see `eviction.worth`). So is
        `size`, in bytes, which `candidates` uses."""
        self._value = value
        self._size = size
        self._queues: dict[_Class, OrderedDict[K, float]] = {}
        self._queue_of: dict[K, _Class] = {}
        self.floor = 0.0

    def add(self, key: K) -> float:
        """Insert it behind all keys of its value. Returns its priority."""
        number = round(2 * math.log2(max(self._value(key), _LEAST_VALUE)))
        kind = number, math.floor(2 * math.log2(self._size(key)))
        priority = self.floor + math.pow(2.0, number / 2)
        self._queue_of[key] = kind
        self._queues.setdefault(kind, OrderedDict())[key] = priority
        return priority

    def remove(self, key: K) -> None:
        """KeyError if it is not there."""
        kind = self._queue_of.pop(key)
        queue = self._queues[kind]
        del queue[key]
        if not queue:
            del self._queues[kind]

    def discard(self, key: K) -> None:
        if key in self._queue_of:
            self.remove(key)

    def age(self, key: K) -> None:
        self.floor = max(self.floor, self._queues[self._queue_of[key]][key])

    def evict_first(self) -> K:
        """Evict the key worth least. ValueError if there is none."""
        _, key = min((next(zip(queue.values(), queue, strict=True)) for queue in self._queues.values()), key=_priority)
        self.age(key)
        self.remove(key)
        return key

    def worth(self, key: K) -> float:
        """Its remaining value above the floor."""
        return max(0.0, self._queues[self._queue_of[key]][key] - self.floor)

    def candidates(self, largest: int) -> Iterator[K]:
        most = math.floor(2 * math.log2(largest)) - 1
        return self._merged([queue for (_, size), queue in self._queues.items() if size <= most])

    def __contains__(self, key: object) -> bool:
        return key in self._queue_of

    def __len__(self) -> int:
        return len(self._queue_of)

    def __iter__(self) -> Iterator[K]:
        """From the lowest priority to the highest."""
        return self._merged(list(self._queues.values()))

    def __reversed__(self) -> Iterator[K]:
        queues = (((priority, key) for key, priority in reversed(queue.items())) for queue in self._queues.values())
        return (key for _, key in heapq.merge(*queues, key=_priority, reverse=True))

    def _merged(self, queues: list[OrderedDict[K, float]]) -> Iterator[K]:
        parts = (zip(queue.values(), queue, strict=True) for queue in queues)
        return (key for _, key in heapq.merge(*parts, key=_priority))


_priority = itemgetter(0)
