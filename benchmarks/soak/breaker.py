# SPDX-License-Identifier: Apache-2.0
"""Draws faults by weight, injects them, and ends those that last."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random

import botocore.exceptions
import redis

from benchmarks.soak.faults import FAULTS, Fault, Held, Targets

_AWAY = (redis.RedisError, botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError, OSError)
"""Errors of a store that is not quite up again. The fault then does not count."""
_ENDS_AT_ONCE = ("store-kill", "redis-flush", "redis-hang-up")
_LOOK_S = 0.02
_PATIENCE_S = 20.0
"""Limit for the wait below: an engine that was ended meanwhile never serves again."""


class Breaker:
    """Call `step` from one thread. Lasting faults are undone on other threads: starting a server takes seconds."""

    def __init__(
        self,
        targets: Targets,
        chance: Random,
        weight: Callable[[Fault], float],
        serves: Callable[[str], bool] = lambda what: True,
    ) -> None:
        """`serves`: whether the target of a fault (`Fault.hurts`) is in normal use again."""
        self.recoveries_s: dict[str, list[float]] = {}
        """Seconds until then from the end of each fault that lasts, and from a kill, by the fault's name."""
        self._serves = serves
        self.counts: Counter[str] = Counter()
        """Faults that had an effect, by name."""
        self.without: set[str] = set()
        """Targets that are spared, as in `Fault.hurts`."""
        self._targets = targets
        self._chance = chance
        self._weights = [weight(fault) for fault in FAULTS]
        self._held: dict[str, Future[None]] = {}
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(4, "undo")

    def step(self) -> None:
        """One fault, unless its target is held by another one."""
        [fault] = self._chance.choices(FAULTS, self._weights)
        chance = Random(self._chance.random())  # what a fault finds does not change which fault comes next
        if fault.hurts in self.without or self._is_held(fault.hurts):
            return
        try:
            outcome = fault.act(self._targets, chance)
        except _AWAY:
            return
        self.counts[fault.name] += bool(outcome)
        if outcome is True and fault.name in _ENDS_AT_ONCE:
            outcome = Held(0.0, lambda: None)
        if isinstance(outcome, Held):
            self._held[fault.hurts] = self._pool.submit(self._let_go, fault, outcome)

    def calm(self) -> None:
        """End all faults that last. Raises any error from restarting a server."""
        self._over.set()
        held, self._held = self._held, {}
        for future in held.values():
            future.result()
        self._over.clear()

    def close(self) -> None:
        self._over.set()
        self._pool.shutdown()

    def _is_held(self, what: str) -> bool:
        future = self._held.get(what)
        if future is None or not future.done():
            return future is not None
        del self._held[what]
        future.result()
        return False

    def _let_go(self, fault: Fault, held: Held) -> None:
        self._over.wait(held.seconds)
        held.undo()
        began = time.monotonic()
        while not self._over.wait(_LOOK_S) and time.monotonic() < began + _PATIENCE_S:
            if self._serves(fault.hurts):
                self.recoveries_s.setdefault(fault.name, []).append(time.monotonic() - began)
                return
