# SPDX-License-Identifier: Apache-2.0
"""One store process serves at a time: it is pinged, killed if it does not answer, and replaced if it has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from lmcache_ec.channel import Ping, ToStore
from lmcache_ec.complaints import Complaints
from lmcache_ec.link import Link, LinkClosed
from lmcache_ec.store_process import StoreProcess

_PING_INTERVAL_S = 1.0
_SLOW_PONG_S = 5.0
"""A store process that has not answered a ping for this long, and for longer than a request would wait for an entry,
gets no new requests."""

_OPENING_S = 20.0
"""Extra time for a store process before its first message: opening its tiers may take up to eight seconds."""

_RESTART_PAUSE_S = (0.0, 1.0, 5.0, 30.0)
"""Pause before each restart of a store process that keeps ending without ever having served."""


class Follower(Protocol):
    """Is notified of what happens to a store process, by its number: lost, then ended, and a new one started.

    A lost store process gets no more requests but may still read and write the arena until it has ended.
    """

    def store_lost(self, number: int, now: float) -> None: ...

    def store_ended(self, number: int) -> None: ...

    def store_started(self) -> None: ...


class Supervisor:
    """The store processes of one engine. Runs on the scheduler side's one thread, and never waits."""

    def __init__(
        self,
        arena_fd: int,
        passed_on: tuple[str, ...],
        *,
        timeout_s: float,
        patience_s: float,
        complaints: Complaints,
        follower: Follower,
    ) -> None:
        """Start the first store process. `timeout_s`: one that is silent for this long is killed; `patience_s`: how
        long a request waits for its answer. `passed_on`: see `StoreProcess`. OSError if it cannot be started."""
        self._arena_fd = arena_fd
        self._passed_on = passed_on
        self._timeout_s = timeout_s
        self._waited_s = patience_s
        self._complaints = complaints
        self._follower = follower
        self._failures = 0
        self._restart_at = 0.0
        self._lost = 0  # number of the last one that was lost
        self._ping = 0
        self._ping_waits = False
        self._ping_sent = self._ping_answered = time.monotonic()
        self._old: list[StoreProcess] = []
        self._process = self._start(1)

    def _start(self, number: int) -> StoreProcess:
        return StoreProcess(number, self._arena_fd, self._passed_on)

    @property
    def process(self) -> StoreProcess:
        """The store process that serves, or served last if it has ended."""
        return self._process

    @property
    def number(self) -> int:
        return self._process.number

    @property
    def ping(self) -> int:
        """The number of the last ping: one a second while there are passes."""
        return self._ping

    @property
    def link(self) -> Link:
        return self._process.link

    @property
    def closed(self) -> bool:
        """Whether the link to the store process is closed."""
        return self._process.closed

    def send(self, message: ToStore) -> bool:
        """False if the link is full or closed."""
        try:
            return not self._process.closed and self._process.link.send(message)
        except LinkClosed:
            return False

    def drain(self, take: Callable[[object, list[int], float], None], now: float) -> bool:
        """Call `take` for each message received: the message, its descriptors, and `now`. True if there was one."""
        any_came = False
        try:
            while (received := self._process.link.receive()) is not None:
                any_came = True
                take(*received, now)
        except LinkClosed:
            self._process.closed = True
        return any_came

    def introduce(self, pidfd: int, now: float) -> None:
        """The store process has sent a `Hello`, with its pidfd."""
        self._process.own(pidfd)
        if self._ping_answered < self._ping_sent:
            self._ping_sent = now  # the answer to the ping comes next: the timeout starts anew here

    def answered(self, ping: int, now: float) -> None:
        if ping == self._ping:
            self._ping_answered = now
            self._failures = 0  # not at its first message: one that ends right after that must not restart at once

    def responsive(self, now: float) -> bool:
        """Whether the store process can be expected to answer requests."""
        silent_s = now - self._ping_sent if self._ping_sent > self._ping_answered else 0.0
        return not self._process.closed and silent_s <= max(_SLOW_PONG_S, self._waited_s)

    def alive(self) -> frozenset[int]:
        """The numbers of the store processes that have not ended, including lost ones."""
        serving = () if self._process.number == self._lost else (self._process,)
        return frozenset(process.number for process in (*serving, *self._old))

    def last_errors(self) -> str:
        return self._process.last_errors()

    def look_after(self, now: float) -> None:
        """Call once per scheduling pass."""
        for old in [process for process in self._old if process.ended]:
            self._follower.store_ended(old.number)
            old.close()
            self._old.remove(old)
        if self._ping_waits and self.send(Ping(self._ping)):
            self._ping_waits, self._ping_sent = False, now  # it reads again: the timeout starts anew
        if self._process.closed:
            self._replace(now, "ended")
        elif self._ping_answered < self._ping_sent and now - self._ping_sent > self._patience_s:
            self._process.kill()
            self._replace(now, f"did not answer for {now - self._ping_sent:.0f} s and was killed")
        elif self._ping_answered >= self._ping_sent and now - self._ping_sent >= _PING_INTERVAL_S:
            self._ping += 1
            self._ping_sent = now
            self._ping_waits = not self.send(Ping(self._ping))  # a full link that is not being read counts as silence
        self._process.reap()

    @property
    def _patience_s(self) -> float:
        return self._timeout_s + (0.0 if self._process.introduced else _OPENING_S)

    def _replace(self, now: float, why: str) -> None:
        """Give up the current store process, and start the next one when that is due."""
        if self._lost != self._process.number:
            self._lost = self._process.number
            self._follower.store_lost(self._process.number, now)
            errors = self._process.last_errors()
            self._complaints.warn("store", f"the store process {why}; another one replaces it. {errors}".rstrip())
            self._process.closed = True
            self._old.append(self._process)
            self._restart_at = now + _RESTART_PAUSE_S[min(self._failures, len(_RESTART_PAUSE_S) - 1)]
            self._failures += 1
        if now < self._restart_at:
            return
        try:
            self._process = self._start(self._process.number + 1)
        except OSError as error:
            self._restart_at = now + _RESTART_PAUSE_S[-1]
            self._complaints.warn("store", f"the store process cannot be started: {error}")
            return
        self._ping_sent = self._ping_answered = now
        self._follower.store_started()

    def close(self) -> None:
        """Close the links to all store processes. Idempotent. Each finishes its work and ends by itself."""
        for process in (self._process, *self._old):
            process.close()
        self._old = []
