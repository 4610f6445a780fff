# SPDX-License-Identifier: Apache-2.0
"""Draws faults by their weight, brings them about, and ends those that last."""

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
"""What a store answers that is not quite up again. Then nothing was hurt."""
_ENDS_AT_ONCE = ("store-kill", "redis-flush", "redis-hang-up")
_LOOK_S = 0.02
_PATIENCE_S = 20.0
"""An engine that was ended meanwhile never serves again."""


class Breaker:
    """`step` from one thread. What is held is let go on threads of its own, since a server takes seconds to start."""

    def __init__(
        self,
        targets: Targets,
        chance: Random,
        weight: Callable[[Fault], float],
        serves: Callable[[str], bool] = lambda what: True,
    ) -> None:
        """`serves`: whether what a fault hurts (`Fault.hurts`) is used as if nothing had been."""
        self.recoveries_s: dict[str, list[float]] = {}
        """How long that took from the end of each fault that lasts, and of a kill, by its name."""
        self._serves = serves
        self.counts: Counter[str] = Counter()
        """Faults that hurt something, by name."""
        self.without: set[str] = set()
        """What is spared, as in `Fault.hurts`."""
        self._targets = targets
        self._chance = chance
        self._weights = [weight(fault) for fault in FAULTS]
        self._held: dict[str, Future[None]] = {}
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(4, "undo")

    def step(self) -> None:
        """One fault, unless what it would hurt is held by another one."""
        [fault] = self._chance.choices(FAULTS, self._weights)
        chance = Random(self._chance.random())  # what a fault finds does not change which comes next
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
        """End all that lasts. Raises what went wrong when a server was started again."""
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
