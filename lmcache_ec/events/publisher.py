# SPDX-License-Identifier: Apache-2.0
"""Publishes what LocalCPU holds, over ZeroMQ: events from a PUB socket, snapshots from a ROUTER socket.

Nothing here waits for a subscriber. A PUB socket drops messages for one that has a thousand waiting, and a ROUTER
socket drops the answer to one that does not read its answers; both subscribers see that they missed something.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from lmcache_ec.channel import CpuChanges
from lmcache_ec.events.batch import END, number_frame
from lmcache_ec.events.endpoints import Publishing, is_answered, remove_path
from lmcache_ec.events.source import Numbered, Source

BEAT_S = 1.0
"""The longest time between two batches."""

_BIND_AGAIN_S = 2.0
_WAITING_BATCHES = 1000
_WAITING_ANSWERS = 4
_REQUESTS_AT_ONCE = 64
_REQUEST_BYTES = 1024
_SNAPSHOT_SHARE = 10
"""Making snapshots takes at most one part in this many of the thread's time, however many subscribers ask."""
_LINGER_MS = 500
_PEER_SILENT_MS = 10_000
"""A peer whose host is lost is silent: after this its connection, and what waits for it, is dropped."""


class Publisher:
    """One per store process, on its own thread; all public methods are for the main thread.

    It continues whatever the sockets do: an address that is in use is tried again, and the changes made meanwhile are
    in the next snapshot.
    """

    def __init__(self, publishing: Publishing, namespace: str, report: Callable[[str, str], None]) -> None:
        """`report` takes a kind and a line for the engine's log; any thread may call it."""
        self._publishing = publishing
        self._report = report
        self._source = Source(publishing.rank, namespace)
        self._topic = publishing.topic.encode()
        self._pending: deque[CpuChanges] = deque()
        self._closing = threading.Event()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._events: zmq.Socket[bytes] | None = None
        self._snapshots: zmq.Socket[bytes] | None = None
        self._problem = ""
        self._answered = 0
        self._bind_at = self._snapshot_at = self._beat_at = 0.0
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    # ---- the main thread

    def publish(self, changes: CpuChanges) -> None:
        """Queue changes to be published. Never waits."""
        if self._thread.is_alive():
            self._pending.append(changes)
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Start publishing that nothing is held any more, and releasing the addresses."""
        self._closing.set()
        os.eventfd_write(self._wake, 1)

    def wait_closed(self, timeout_s: float) -> None:
        """Wait until that is done, for at most `timeout_s`."""
        self._thread.join(timeout_s)

    def status(self) -> dict[str, object]:
        """What the store process reports about it."""
        return {
            "endpoint": self._publishing.events,
            "snapshot_endpoint": self._publishing.snapshots,
            "entries": len(self._source),
            "number": self._source.number,
            "snapshots": self._answered,
            "problem": self._problem or None,
        }

    # ---- its own thread

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            while not self._closing.is_set():
                try:
                    self._turn(context)
                except Exception as error:
                    self._unbind()
                    self._complain(f"{type(error).__name__}: {error}")
                    self._closing.wait(_BIND_AGAIN_S)
            self._take_pending()
            self._send(self._source.clear())
        finally:
            self._unbind()
            context.destroy(linger=_LINGER_MS)

    def _turn(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        now = time.monotonic()
        if self._events is None and now >= self._bind_at:
            self._bind_at = now + _BIND_AGAIN_S
            self._bind(context)
        if now >= self._beat_at:
            self._send(self._source.beat())
        poller, due_at = zmq.Poller(), self._beat_at
        poller.register(self._wake, zmq.POLLIN)
        if self._events is None:
            due_at = min(due_at, self._bind_at)
        elif now >= self._snapshot_at:
            poller.register(self._snapshots, zmq.POLLIN)
        else:
            due_at = min(due_at, self._snapshot_at)
        ready = dict(poller.poll(1 + int(max(0.0, due_at - now) * 1000)))
        if self._wake in ready:
            os.eventfd_read(self._wake)
            self._take_pending()
        if self._snapshots in ready:
            self._answer()

    def _take_pending(self) -> None:
        while self._pending:
            self._send(self._source.take(self._pending.popleft()))

    def _send(self, batch: Numbered) -> None:
        self._beat_at = time.monotonic() + BEAT_S
        if self._events is not None:
            self._events.send_multipart((self._topic, number_frame(batch.number), batch.payload), zmq.DONTWAIT)

    def _answer(self) -> None:
        """Answer all current requests with the same snapshot."""
        assert self._snapshots is not None
        asking = set()
        try:
            for _ in range(_REQUESTS_AT_ONCE):
                asking.add(self._snapshots.recv_multipart(zmq.DONTWAIT)[0])
        except zmq.Again:
            pass
        began = time.monotonic()
        snapshot = self._source.snapshot()
        for peer in asking:
            head = (peer, b"", self._topic, number_frame(snapshot.number))
            self._snapshots.send_multipart((*head, snapshot.payload), zmq.DONTWAIT)
            self._snapshots.send_multipart((peer, b"", b"", END, b""), zmq.DONTWAIT)
        self._answered += len(asking)
        now = time.monotonic()
        self._snapshot_at = now + (now - began) * (_SNAPSHOT_SHARE - 1)

    # ---- addresses

    def _bind(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        where = self._publishing
        try:
            self._events = _listening(context, zmq.PUB, where.events, _WAITING_BATCHES)
            self._snapshots = _listening(context, zmq.ROUTER, where.snapshots, _WAITING_ANSWERS)
        except zmq.ZMQError as error:
            at = where.events if self._events is None else where.snapshots
            self._unbind()
            self._complain(f"{at}: {os.strerror(error.errno or errno.EIO)}")
            return
        if self._problem:
            self._problem = ""
            self._report("events-bound", f"events are published at {where.events} now")

    def _unbind(self) -> None:
        where = self._publishing
        for socket, endpoint in ((self._events, where.events), (self._snapshots, where.snapshots)):
            if socket is not None:
                remove_path(endpoint)  # while it is still ours
                socket.close(linger=_LINGER_MS if self._closing.is_set() else 0)
        self._events = self._snapshots = None

    def _complain(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            self._report("events-refused", f"events cannot be published; retrying: {problem}")
        self._bind_at = time.monotonic() + _BIND_AGAIN_S


def _listening(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str, waiting: int) -> zmq.Socket[bytes]:
    """A socket bound to an address; at most `waiting` messages wait for each peer. ZMQError if that is impossible."""
    if is_answered(endpoint):
        raise zmq.ZMQError(errno.EADDRINUSE)  # ZeroMQ would take a path away from the process that listens there
    socket = context.socket(kind)
    try:
        socket.sndhwm = waiting
        socket.maxmsgsize = _REQUEST_BYTES
        socket.ipv6 = "[" in endpoint
        socket.heartbeat_ivl = _PEER_SILENT_MS // 2
        socket.heartbeat_timeout = _PEER_SILENT_MS
        socket.bind(endpoint)
    except BaseException:
        socket.close(linger=0)
        raise
    return socket
