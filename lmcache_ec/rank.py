# SPDX-License-Identifier: Apache-2.0
"""A rank's end of the links: waits for the scheduler side, maps the arena, hands saves over and reports steps."""

from __future__ import annotations

import logging
import mmap
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from lmcache_ec import arena
from lmcache_ec.channel import (
    Attach,
    Attached,
    Durable,
    Link,
    LinkClosed,
    Outcome,
    Report,
    Saved,
    Segment,
    SegmentReady,
    StoreLink,
    WeightsReport,
    rank_address,
    same_user,
)

_logger = logging.getLogger(__name__)


class Rank:
    """One rank's side of an engine's cache.

    Lives in a worker process. A thread of its own waits at the rank's address, takes what the scheduler side sends and
    sends what found its link full; the forward pass calls `hand_over` and `report`, which never wait: the lock is held
    for a non-blocking send at most.
    """

    def __init__(self, engine: str, rank: int, register: Callable[[mmap.mmap, int, int], None]) -> None:
        """`register(memory, offset, length)` makes a segment fit for the device; it runs on the rank's thread.

        Raises OSError if another process holds the rank's address.
        """
        self.arena_id = ""
        self.memory: mmap.mmap | None = None
        self.incarnation = 0
        self._rank = rank
        self._register = register
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._store: Link | None = None
        self._unsent: deque[Report | WeightsReport] = deque()
        self._weights: WeightsReport | None = None  # the last, for a scheduler side that comes later
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopping = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(rank_address(engine, rank))
            self._listener.listen(1)
        except OSError:
            self._listener.close()
            os.close(self._wake)
            raise
        self._thread = threading.Thread(target=self._run, name=f"lmcache-ec-rank-{rank}", daemon=True)
        self._thread.start()

    # ---- the forward pass

    def hand_over(self, message: Saved) -> int:
        """Pass a copied payload to the store process. Returns its incarnation; 0 if it could not be handed over."""
        with self._lock:
            if self._store is None:
                return 0
            try:
                return self.incarnation if self._store.send(message) else 0
            except LinkClosed:
                return 0

    def await_durable(self, places: set[int], deadline: float) -> set[int]:
        """Wait until the store process has said of each place that it is in every tier, or will not be; at the latest
        until `deadline` (monotonic). Returns those that are. For a producer's saving rank alone."""
        waiting, durable = set(places), set[int]()
        while waiting and (left := deadline - time.monotonic()) > 0:
            with self._lock:
                link = self._store
            if link is None:
                break
            poller = select.poll()
            try:
                poller.register(link, select.POLLIN)
                if not poller.poll(left * 1000):
                    break
                received = link.receive()
            except (LinkClosed, ValueError):  # ValueError: the rank's thread has closed it, for the next store process
                break
            if received is not None and isinstance(answer := received[0], Durable):
                waiting.discard(answer.place)
                if answer.ok:
                    durable.add(answer.place)
        return durable & places

    def report(self, step: int, outcomes: list[tuple[int, Outcome, int]]) -> None:
        """Tell the scheduler side that all steps up to `step` are done, now or as soon as the link has room."""
        message = Report(step, outcomes)
        with self._lock:
            self._post(message)

    def report_weights(self, calls: int, digest: str) -> None:
        """Tell the scheduler side what weights the encoder has (see `WeightsReport`), as soon as it is there."""
        with self._lock:
            self._weights = WeightsReport(calls, digest)
            self._post(self._weights)

    def _post(self, message: Report | WeightsReport) -> None:
        """Under the lock: send it, now or as soon as the link has room."""
        if self._unsent or not self._send(message):
            self._unsent.append(message)
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End the thread and give back links and memory. Views of the memory may outlive this."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._detach()
        self._listener.close()
        os.close(self._wake)

    # ---- the rank's thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wait()
        except LinkClosed:
            self._detach()
        except OSError as error:
            _logger.error("encoder cache: rank %d copies nothing more: %s", self._rank, error.strerror)
            self._detach()
        except Exception:
            _logger.exception("encoder cache: the link thread of rank %d failed; it copies nothing more", self._rank)
            self._detach()

    def _wait(self) -> None:
        source = self._link or self._listener
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        poller.register(source, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        ready = {fd for fd, _ in poller.poll()}
        if self._wake in ready:
            try:
                os.eventfd_read(self._wake)
            except BlockingIOError:
                pass
        if source.fileno() not in ready or self._stopping:
            return
        if self._link is None:
            self._accept()
        else:
            self._flush()
            while (received := self._link.receive()) is not None:
                self._take(*received)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        if not same_user(sock):
            _logger.warning("encoder cache: refused a connection of another user to rank %d", self._rank)
            sock.close()
            return
        self._link = Link(sock)
        self._listener.close()  # one scheduler side, once

    def _take(self, message: object, fds: list[int]) -> None:
        match message:
            case Attach(arena=arena_id):
                self.memory = arena.attach(fds[0])
                os.close(fds[0])
                self.arena_id = arena_id
                self._answer(Attached(self._rank))
                with self._lock:
                    if self._weights is not None:
                        self._post(self._weights)
            case StoreLink(incarnation=incarnation):
                with self._lock:
                    if self._store is not None:
                        self._store.close()
                    self._store = Link(socket.socket(fileno=fds[0]))
                    self.incarnation = incarnation
            case Segment(offset=offset, length=length) if self.memory is not None:
                self._register(self.memory, offset, length)
                self._answer(SegmentReady(offset))
            case _:
                raise LinkClosed(f"unexpected {type(message).__name__}")

    def _answer(self, message: Attached | SegmentReady) -> None:
        with self._lock:
            if not self._send(message):
                raise LinkClosed("no room for an answer")

    def _flush(self) -> None:
        with self._lock:
            while self._unsent and self._send(self._unsent[0]):
                self._unsent.popleft()

    def _send(self, message: Report | WeightsReport | Attached | SegmentReady) -> bool:
        """Under the lock. With the scheduler side gone there is nobody to tell."""
        if self._link is None:
            return True
        try:
            return self._link.send(message)
        except LinkClosed:
            return True

    def _detach(self) -> None:
        """Copy nothing more: from now on no metadata can name this rank's arena."""
        self.arena_id = ""
        with self._lock:
            for link in (self._link, self._store):
                if link is not None:
                    link.close()
            self._link = self._store = None
            self._unsent.clear()
        memory, self.memory = self.memory, None
        if memory is not None:
            try:
                memory.close()
            except BufferError:
                pass  # a tensor still looks into it: unmapped with the last view
