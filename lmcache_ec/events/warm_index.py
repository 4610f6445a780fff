# SPDX-License-Identifier: Apache-2.0
"""Which replicas hold these identifiers? Follows the events of any number of replicas, for a router or a command.

with WarmIndex(["tcp://10.0.0.7:5757", "tcp://10.0.0.8:5757"]) as index:
    index.wait(3.0)
    index.where(["5f2c…"])      # {"5f2c…": ["tcp://10.0.0.7:5757"]}
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import zmq

from lmcache_ec.events.batch import MAX_SNAPSHOT_BYTES
from lmcache_ec.events.endpoints import Replica
from lmcache_ec.events.mirror import Mirror

STALE_S = 5.0
"""A replica whose state was last confirmed longer ago is left out."""

MOST_ENTRIES = 1_000_000

_SILENT_S = 2.5
"""Without batches: by then two should have arrived, and the replica is asked."""
_ASK_AGAIN_S = (0.25, 0.5, 1.0, 2.0, 4.0)
_MESSAGES_A_TURN = 1000
_TURN_MS = 250
_WAITING_BATCHES, _LONGEST_BATCH_BYTES = 1000, 4 << 20
_WAITING_SNAPSHOTS = 4
_PEER_SILENT_MS = 6000
_RECONNECT_MS = (100, 2000)


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """What is known of a replica. `age_s`: how long ago that was last known to match what it holds; None: never.

    `state` is "following", "catching up" (waiting for a snapshot; recent state still counts), or "silent"
    (it is left out).
    """

    replica: str
    state: str
    age_s: float | None
    entries: int
    entries_left_out: int
    namespace: str
    data_parallel_rank: int
    gaps: int
    unreadable: int


class WarmIndex:
    """Follows replicas on its own thread. Every method may be called from any thread, and only `wait` waits.

    A replica's faults raise nothing: one that is unreachable, or sends unreadable data, is silent.
    Bounded: `most_entries` of each replica (some 200 bytes each), and a thousand batches not yet read.
    """

    def __init__(self, replicas: Iterable[str] = (), *, most_entries: int = MOST_ENTRIES) -> None:
        """`replicas`: as for `add`. ValueError for what is not an address."""
        self._most = most_entries
        self._followed: dict[str, _Followed] = {}  # never changed, only replaced
        self._left: deque[_Followed] = deque()
        self._changed = threading.Condition()  # the known state changed; its lock is held only briefly
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = False
        for replica in [Replica.parse(text) for text in replicas]:
            self._add(replica)
        self._thread = threading.Thread(target=self._run, name="warm-index", daemon=True)
        self._thread.start()

    def add(self, replica: str) -> str:
        """Follow one more replica: `tcp://host:5757`, the address of its events; after a comma that of its snapshots,
        if that is not 1000 ports above. Returns its name, the first of these. ValueError for what is not an address."""
        parsed = Replica.parse(replica)
        self._add(parsed)
        return parsed.events

    def _add(self, replica: Replica) -> None:
        with self._changed:
            if replica.events not in self._followed:
                followed = _Followed(replica, Mirror(self._most))
                self._followed = {**self._followed, replica.events: followed}
        self._rouse()

    def remove(self, replica: str) -> None:
        """Stop following it. Does nothing if it is not followed."""
        name = replica.partition(",")[0].strip()
        with self._changed:
            if name in self._followed:
                self._left.append(self._followed[name])
                self._followed = {key: each for key, each in self._followed.items() if key != name}
        self._rouse()

    def where(self, identifiers: Iterable[str], namespace: str | None = None) -> dict[str, list[str]]:
        """Identifier -> the replicas that hold it, of `namespace` if one is given. Takes microseconds; asks no replica.

        It may be wrong at any moment, as an entry may be evicted while a request is on its way: that costs an encode.
        """
        held: dict[str, list[str]] = {identifier: [] for identifier in identifiers}
        now = time.monotonic()
        for name, followed in self._followed.items():
            mirror = followed.mirror
            if now - mirror.confirmed > STALE_S or namespace not in (None, mirror.namespace):
                continue
            entries = mirror.entries
            for identifier, replicas in held.items():
                if identifier in entries:
                    replicas.append(name)
        return held

    def replicas(self) -> Sequence[ReplicaState]:
        """What is known of each, in the order in which they were added."""
        now = time.monotonic()
        return [_state(name, followed.mirror, now) for name, followed in self._followed.items()]

    def wait(self, timeout_s: float) -> bool:
        """Wait until all replicas are followed in step; False if that takes longer than `timeout_s`."""

        def following() -> bool:
            return all(_is_following(followed.mirror) for followed in self._followed.values())

        with self._changed:
            return self._changed.wait_for(following, timeout_s)

    def close(self) -> None:
        """Stop following all; a second call does nothing."""
        self._closing = True
        self._rouse()
        self._thread.join()
        with self._changed:
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rouse(self) -> None:
        with self._changed:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    # ---- its own thread

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        while not self._closing:
            while self._left:
                self._left.popleft().close()
            poller = zmq.Poller()
            poller.register(self._wake, zmq.POLLIN)
            for followed in self._followed.values():
                followed.register(context, poller, time.monotonic())
            if (self._wake, zmq.POLLIN) in poller.poll(_TURN_MS):
                os.eventfd_read(self._wake)
            now = time.monotonic()
            for followed in self._followed.values():
                followed.turn(now)
            with self._changed:
                self._changed.notify_all()
        context.destroy(linger=0)


class _Followed:
    """One replica. Belongs to the index's thread once made."""

    def __init__(self, replica: Replica, mirror: Mirror) -> None:
        self.mirror = mirror
        self._replica = replica
        self._began = time.monotonic()
        self._asked = 0
        self._ask_at = 0.0
        self._events: zmq.Socket[bytes] | None = None
        self._snapshots: zmq.Socket[bytes] | None = None

    def register(self, context: zmq.Context[zmq.Socket[bytes]], poller: zmq.Poller, now: float) -> None:
        """Register what to wait for: anything that arrives, and a connection if there is a request to send."""
        try:
            if self._events is None:
                self._events = _connected(context, zmq.SUB, self._replica.events)
            if self._snapshots is None:
                self._snapshots = _connected(context, zmq.DEALER, self._replica.snapshots)
        except zmq.ZMQError:
            pass  # no descriptor left: there may be one in the next turn
        if self._events is not None:
            poller.register(self._events, zmq.POLLIN)
        if self._snapshots is not None:
            poller.register(self._snapshots, zmq.POLLIN | (zmq.POLLOUT if self._is_asking(now) else 0))

    def turn(self, now: float) -> None:
        """Take in what has arrived, and request a snapshot if one is due."""
        for frames in _received(self._events):
            if len(frames) == 3 and len(frames[1]) == 8:
                self.mirror.take_batch(int.from_bytes(frames[1], "big"), frames[2])
        for frames in _received(self._snapshots):
            if len(frames) == 4 and len(frames[2]) == 8 and frames[3]:
                self.mirror.take_snapshot(int.from_bytes(frames[2], "big"), frames[3])
        if not self._wants(now):
            self._asked, self._ask_at = 0, 0.0
        elif self._is_asking(now) and self._snapshots is not None and self._snapshots.poll(0, zmq.POLLOUT):
            self._snapshots.send_multipart((b"", bytes(8)), zmq.DONTWAIT)
            self._ask_at = now + _ASK_AGAIN_S[min(self._asked, len(_ASK_AGAIN_S) - 1)]
            self._asked += 1

    def _wants(self, now: float) -> bool:
        """Whether a snapshot is needed: it is out of step, or nothing arrives."""
        heard = max(self.mirror.heard, self.mirror.confirmed, self._began)
        return not self.mirror.in_step or now - heard > _SILENT_S

    def _is_asking(self, now: float) -> bool:
        return now >= self._ask_at and self._wants(now)

    def close(self) -> None:
        for socket in (self._events, self._snapshots):
            if socket is not None:
                socket.close(linger=0)


def _received(socket: zmq.Socket[bytes] | None) -> Iterable[list[bytes]]:
    try:
        for _ in range(_MESSAGES_A_TURN if socket is not None else 0):
            assert socket is not None
            yield socket.recv_multipart(zmq.DONTWAIT)
    except zmq.Again:
        return


def _connected(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str) -> zmq.Socket[bytes]:
    """A socket that connects and reconnects by itself. It queues a request only while it is connected."""
    socket = context.socket(kind)
    events = kind == zmq.SUB
    socket.rcvhwm = _WAITING_BATCHES if events else _WAITING_SNAPSHOTS
    socket.maxmsgsize = _LONGEST_BATCH_BYTES if events else MAX_SNAPSHOT_BYTES
    socket.sndhwm = 1
    if events:
        socket.subscribe(b"")
    else:
        socket.immediate = True
    socket.ipv6 = True
    socket.heartbeat_ivl = _PEER_SILENT_MS // 3
    socket.heartbeat_timeout = _PEER_SILENT_MS
    socket.reconnect_ivl, socket.reconnect_ivl_max = _RECONNECT_MS
    socket.connect(endpoint)
    return socket


def _is_following(mirror: Mirror) -> bool:
    return mirror.in_step and time.monotonic() - mirror.confirmed <= STALE_S


def _state(name: str, mirror: Mirror, now: float) -> ReplicaState:
    age_s = now - mirror.confirmed if mirror.confirmed > 0 else None
    stale = age_s is None or age_s > STALE_S
    state = "silent" if stale else "following" if mirror.in_step else "catching up"
    return ReplicaState(
        replica=name,
        state=state,
        age_s=age_s,
        entries=len(mirror.entries),
        entries_left_out=mirror.left_out,
        namespace=mirror.namespace,
        data_parallel_rank=mirror.rank,
        gaps=mirror.gaps,
        unreadable=mirror.unreadable,
    )
