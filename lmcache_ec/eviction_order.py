# SPDX-License-Identifier: Apache-2.0
"""What is evicted first: the least recently used, or what is worth least.

Both orders are maps in the order of eviction. A key has a *priority*: the least goes first. For `LruOrder` it is a
clock; for `CostOrder` it is GreedyDual-Size-Frequency (Cherkasova 1998): what a miss costs, for each byte, times the
uses of late, above the *floor*, the priority of what was evicted last. So what nobody asks for any more sinks as the
floor rises, and what was asked for once, however much of it, only pushes out its like.

Values are rounded to half powers of two and each has a queue of its own (CAMP, Ghandeharizadeh et al. 2014): within one
the order of arrival is the order of priority, so that nothing is ever sorted. A use costs a dictionary's operations, a
choice of victim a look at the head of each queue, some dozens at most.

No clock, no I/O, no lock: whoever owns an order runs it on one thread.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

K = TypeVar("K")

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

    def evict(self, key: K) -> None:
        """Remove it to make room."""
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

    evict = remove

    def discard(self, key: K) -> None:
        self.pop(key, None)

    def worth(self, key: K) -> float:
        return 1.0


class CostOrder(Generic[K]):
    """Keys by what they are worth."""

    def __init__(self, value: Callable[[K], float]) -> None:
        """`value` of a key is asked for when it is added; in any unit, the same for all (see `eviction.worth`)."""
        self._value = value
        self._queues: dict[int, OrderedDict[K, float]] = {}
        self._queue_of: dict[K, int] = {}
        self.floor = 0.0

    def add(self, key: K) -> float:
        """Behind all of its value. Returns its priority."""
        number = round(2 * math.log2(max(self._value(key), _LEAST_VALUE)))
        priority = self.floor + math.pow(2.0, number / 2)
        self._queue_of[key] = number
        self._queues.setdefault(number, OrderedDict())[key] = priority
        return priority

    def remove(self, key: K) -> None:
        """KeyError if it is not there."""
        number = self._queue_of.pop(key)
        queue = self._queues[number]
        del queue[key]
        if not queue:
            del self._queues[number]

    def discard(self, key: K) -> None:
        if key in self._queue_of:
            self.remove(key)

    def evict(self, key: K) -> None:
        """Remove it to make room: all that is added from now on has a higher priority than what was worth least."""
        self.floor = max(self.floor, min(next(iter(queue.values())) for queue in self._queues.values()))
        self.remove(key)

    def evict_first(self) -> K:
        """Evict what is worth least. ValueError if there is nothing."""
        number, priority = min(
            ((number, next(iter(queue.values()))) for number, queue in self._queues.items()), key=lambda head: head[1]
        )
        self.floor = max(self.floor, priority)
        key = next(iter(self._queues[number]))
        self.remove(key)
        return key

    def worth(self, key: K) -> float:
        """What is left of its value above the floor."""
        return self._queues[self._queue_of[key]][key] - self.floor

    def __contains__(self, key: object) -> bool:
        return key in self._queue_of

    def __len__(self) -> int:
        return len(self._queue_of)

    def __iter__(self) -> Iterator[K]:
        """What is worth least in front."""
        queues = (((priority, n, key) for key, priority in queue.items()) for n, queue in self._queues.items())
        return (key for _, _, key in heapq.merge(*queues, key=lambda entry: entry[0]))

    def __reversed__(self) -> Iterator[K]:
        queues = (((priority, key) for key, priority in reversed(queue.items())) for queue in self._queues.values())
        return (key for _, key in heapq.merge(*queues, key=lambda entry: -entry[0]))
