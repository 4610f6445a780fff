# SPDX-License-Identifier: Apache-2.0
"""A bounded memory of recent findings, so that they are not looked up again."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

_AT_MOST = 4096

K = TypeVar("K", bound=Hashable)


class Recent(Generic[K]):
    """Names, each remembered for `seconds` after it was last added; at most 4096, the oldest are dropped first.

    Runs on one thread. Times are monotonic seconds.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._added: OrderedDict[K, float] = OrderedDict()

    def add(self, name: K, now: float) -> None:
        self._added[name] = now
        self._added.move_to_end(name)
        while len(self._added) > _AT_MOST:
            self._added.popitem(last=False)

    def discard(self, name: K) -> None:
        self._added.pop(name, None)

    def age(self, name: K, now: float) -> float:
        """Seconds since it was added; infinite if it was never added, or is forgotten."""
        return now - self._added.get(name, float("-inf"))

    def holds(self, name: K, now: float) -> bool:
        return self.age(name, now) < self.seconds

    def clear(self) -> None:
        self._added.clear()

    def __len__(self) -> int:
        return len(self._added)
