# SPDX-License-Identifier: Apache-2.0
"""Entries that the ranks' devices hold ahead of the step that loads them.

A promise cannot be revoked, and a load can fail: a device may have no memory left. An item that carries something to
encode is then encoded in the same step. One that carries nothing cannot be, and by then it is too late to fail its
request: vLLM reads `take_unavailable_requests` once the step has run (`update_from_output` in
vllm/v1/core/sched/scheduler.py), and the step ends the engine if an encoder output is missing
(`_gather_mm_embeddings` in vllm/v1/worker/gpu_model_runner.py). So the part that can fail comes first:

1. A request leases the entry (`Book.lease`), which keeps its bytes in place, and asks for it to be staged.
2. Every rank copies it to its device, on the rank's own thread, and answers. Until then the request is not scheduled.
3. If one cannot, that request fails, as for an entry that no tier has. Nothing was promised.
4. If all can, the load in a step is a mere dictionary look-up: each rank passes its staged tensor to vLLM.

A staged entry is consumed by one load, or released with the last request that waits for it.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from lmcache_ec.channel import Stage, Staged, Unstage
from lmcache_ec.complaints import Complaints
from lmcache_ec.entry import room
from lmcache_ec.link import Link, LinkClosed
from lmcache_ec.place import Place

STAGED_BYTES = 256 << 20
"""Limit per device; one entry is always allowed. This memory is on top of what vLLM has measured for itself. If waiting
requests need more, the rest is loaded within their steps."""


class Readiness(enum.Enum):
    NO_ROOM = enum.auto()
    """The limit of staged bytes is reached."""
    PENDING = enum.auto()
    READY = enum.auto()
    FAILED = enum.auto()
    """A rank cannot load it."""


@dataclass(slots=True)
class _Order:
    """One entry, staged or being staged."""

    number: int
    nbytes: int
    unanswered: set[int]
    problem: str = ""
    requests: set[str] = field(default_factory=set)

    @property
    def readiness(self) -> Readiness:
        if self.problem:
            return Readiness.FAILED
        return Readiness.PENDING if self.unanswered else Readiness.READY


class Staging:
    """Entries staged on all ranks alike. Runs on the scheduler side's one thread; sends, never waits."""

    def __init__(self, links: Sequence[Link], complaints: Complaints) -> None:
        """`links` are those to the ranks, by number; they may be connected later."""
        self._links = links
        self._complaints = complaints
        self._orders: dict[int, _Order] = {}  # by place
        self._outbox: dict[int, deque[Stage | Unstage]] = {}  # by rank: what its link had no room for
        self._last = 0

    def __len__(self) -> int:
        return len(self._orders)

    def ask(self, place: Place, request_id: str) -> Readiness:
        """Stage a leased entry for a request, unless that is done already. Called again in each pass."""
        order = self._orders.get(place.id) or self._begin(place)
        if order is None:
            return Readiness.NO_ROOM
        order.requests.add(request_id)
        return order.readiness

    def _begin(self, place: Place) -> _Order | None:
        spec = place.spec
        if spec is None or (self._orders and self._bytes + spec.nbytes > STAGED_BYTES):
            return None
        self._last += 1
        offset = place.offset + room(place.identifier)
        self._send(Stage(self._last, offset, spec.rows, spec.width, spec.dtype))
        order = _Order(self._last, spec.nbytes, set(range(len(self._links))))
        self._orders[place.id] = order
        return order

    @property
    def _bytes(self) -> int:
        return sum(order.nbytes for order in self._orders.values())

    def take(self, place: Place, request_id: str) -> int:
        """The number of the entry staged for the request, for a load to consume; 0 if none is."""
        order = self._orders.get(place.id)
        if order is None or request_id not in order.requests or order.readiness is not Readiness.READY:
            return 0
        del self._orders[place.id]
        return order.number

    def unspent(self, number: int) -> None:
        """No step will order the load that took this number. 0 is ignored."""
        if number:
            self._send(Unstage(number))

    def release(self, place: Place, request_id: str) -> None:
        """The request no longer waits for the entry."""
        order = self._orders.get(place.id)
        if order is None:
            return
        order.requests.discard(request_id)
        if not order.requests:
            del self._orders[place.id]
            self._send(Unstage(order.number))

    def answered(self, rank: int, answer: Staged) -> None:
        order = next((order for order in self._orders.values() if order.number == answer.number), None)
        if order is None:
            return
        order.unanswered.discard(rank)
        if answer.problem:
            order.problem = answer.problem
            self._complaints.warn(
                f"staging-{rank}",
                f"rank {rank} cannot load an entry, so requests that carry nothing to encode in its place fail: "
                f"{answer.problem}",
            )

    def advance(self) -> None:
        """Send what found a link full."""
        for rank, waiting in list(self._outbox.items()):
            while waiting and self._sent(rank, waiting[0]):
                waiting.popleft()
            if not waiting:
                del self._outbox[rank]

    def _send(self, message: Stage | Unstage) -> None:
        for rank in range(len(self._links)):
            if rank in self._outbox or not self._sent(rank, message):
                self._outbox.setdefault(rank, deque()).append(message)

    def _sent(self, rank: int, message: Stage | Unstage) -> bool:
        try:
            return self._links[rank].send(message)
        except LinkClosed:
            return True  # noticed and handled by the next drain
