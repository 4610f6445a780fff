# SPDX-License-Identifier: Apache-2.0
"""What is evicted first: the least recently used, or what is worth least.

Both orders are maps in the order of eviction. A key has a *priority*: the least goes first. For `LruOrder` it is a
clock; for `CostOrder` it is GreedyDual-Size-Frequency (Cherkasova 1998): what a miss costs, for each byte, times the
uses of late, above the *floor*, the priority of what was evicted last. So what nobody asks for any more sinks as the
floor rises, and what was asked for once, however much of it, only pushes out its like.

Values, and sizes, are rounded to half powers of two and each pair has a queue of its own (CAMP, Ghandeharizadeh et al.
2014): within one the order of arrival is the order of priority, so that nothing is ever sorted. A use costs a
dictionary's operations, a choice of victim a look at the head of each queue, some dozens at most.

No clock, no I/O, no lock: whoever owns an order runs it on one thread.
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
"""Of value, and of size: powers of the root of two."""

_LEAST_VALUE = 1e-30

USES_HALF_LIFE = 8192.0
"""Of LocalCPU's `eviction.Uses`. A guess, to be replaced by what `lmcache-ec plan` finds."""


class Order(Protocol[K]):
    """Keys in the order of eviction. Each is added once, and leaves by one of the other ways."""

    def add(self, key: K) -> float:
        """Behind all that are worth no more. Returns its priority."""
        ...

    def remove(self, key: K) -> None:
        """KeyError if it is not there."""
        ...

    def discard(self, key: K) -> None: ...

    def age(self, key: K) -> None:
        """It is about to be removed to make room: what is added from now on has a higher priority."""
        ...

    def candidates(self, largest: int) -> Iterator[K]:
        """As they would be evicted, without those that are certainly longer than `largest` bytes, where costs decide:
        what is worth least may be of one size, of which no number does for another."""
        ...

    def worth(self, key: K) -> float:
        """What evicting it loses, for each byte, compared with others that are there."""
        ...

    def __contains__(self, key: object, /) -> bool: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[K]:
        """What is evicted first in front."""
        ...

    def __reversed__(self) -> Iterator[K]: ...


class LruOrder(OrderedDict[K, float]):
    """The least recently added in front; the priority is a clock, and all are worth the same."""

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
        """`value` of a key is asked for when it is added; in any unit, the same for all (see `eviction.worth`). So is
        its `size` in bytes, for those who ask for `candidates`."""
        self._value = value
        self._size = size
        self._queues: dict[_Class, OrderedDict[K, float]] = {}
        self._queue_of: dict[K, _Class] = {}
        self.floor = 0.0

    def add(self, key: K) -> float:
        """Behind all of its value. Returns its priority."""
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
        """Evict what is worth least. ValueError if there is nothing."""
        _, key = min((next(zip(queue.values(), queue, strict=True)) for queue in self._queues.values()), key=_priority)
        self.age(key)
        self.remove(key)
        return key

    def worth(self, key: K) -> float:
        """What is left of its value above the floor."""
        return max(0.0, self._queues[self._queue_of[key]][key] - self.floor)

    def candidates(self, largest: int) -> Iterator[K]:
        most = math.floor(2 * math.log2(largest)) - 1
        return self._merged([queue for (_, size), queue in self._queues.items() if size <= most])

    def __contains__(self, key: object) -> bool:
        return key in self._queue_of

    def __len__(self) -> int:
        return len(self._queue_of)

    def __iter__(self) -> Iterator[K]:
        """What is worth least in front."""
        return self._merged(list(self._queues.values()))

    def __reversed__(self) -> Iterator[K]:
        queues = (((priority, key) for key, priority in reversed(queue.items())) for queue in self._queues.values())
        return (key for _, key in heapq.merge(*queues, key=_priority, reverse=True))

    def _merged(self, queues: list[OrderedDict[K, float]]) -> Iterator[K]:
        parts = (zip(queue.values(), queue, strict=True) for queue in queues)
        return (key for _, key in heapq.merge(*parts, key=_priority))


_priority = itemgetter(0)
