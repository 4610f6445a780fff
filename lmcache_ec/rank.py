# SPDX-License-Identifier: Apache-2.0
"""A rank's end of the links: waits for the scheduler side, maps the arena, hands saves over and reports steps.

Ownership of the mapping: this end maps the arena once and unmaps it once, when the device has released it. That is at
`close`, or some time after the rank has left the engine (its link has closed, or `leave`): until then, steps under way
still load what they were promised, and no process changes those bytes any more. If the device does not release the
memory, it stays mapped for as long as the process lives.
"""

from __future__ import annotations

import logging
import mmap
import os
import select
import socket
import threading
import time
from collections import deque
from typing import Protocol

from lmcache_ec import arena
from lmcache_ec.channel import (
    Attach,
    Attached,
    Durable,
    Outcome,
    Report,
    Saved,
    Segment,
    SegmentReady,
    Stage,
    Staged,
    StoreLink,
    Unstage,
    WeightsReport,
)
from lmcache_ec.link import Link, LinkClosed, rank_address, same_user

_logger = logging.getLogger(__name__)

LINGER_S = 30.0
"""How long a rank that has left its engine can still load: longer than any step that was under way takes."""

_END_S = 5.0
"""How long `close` waits for the rank's thread, which a hanging device may block."""


class Device(Protocol):
    """What a rank's device does with the arena's memory. Called on the rank's thread."""

    registers: bool
    """Whether it copies faster to and from registered memory."""

    def register(self, memory: mmap.mmap, offset: int, length: int) -> str:
        """Register a granule. Returns why the device refused; empty if it is registered."""

    def stage(self, memory: mmap.mmap, order: Stage) -> str:
        """Copy a payload to the device and keep it there under its number. Returns why that failed; empty on success.

        May take as long as the copy.
        """

    def unstage(self, number: int) -> None:
        """Release the staged payload, if it is still there."""

    def release(self) -> bool:
        """Queue no more copies, wait for those that are queued, then unregister all. Bounded; idempotent.

        False if the device does not finish in time: then the memory must stay mapped.
        """


class HostMemory:
    """The host CPU as a device: it copies without registering or staging anything."""

    registers = False

    def register(self, memory: mmap.mmap, offset: int, length: int) -> str:
        return ""

    def stage(self, memory: mmap.mmap, order: Stage) -> str:
        return ""

    def unstage(self, number: int) -> None:
        pass

    def release(self) -> bool:
        return True


class Rank:
    """One rank's side of an engine's cache.

    Lives in a worker process. Its own thread listens at the rank's address, receives the scheduler side's messages and
    sends those that found the link full. The forward pass calls `hand_over`, `report` and `leave`, which never wait:
    the lock is held for a non-blocking send at most.
    """

    def __init__(self, engine: str, rank: int, device: Device | None = None, linger_s: float = LINGER_S) -> None:
        """Raises OSError if another process holds the rank's address."""
        self.arena_id = ""
        self.memory: mmap.mmap | None = None
        self.incarnation = 0
        self._rank = rank
        self._device = device or HostMemory()
        self._linger_s = linger_s
        self._pageable = not self._device.registers
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._store: Link | None = None
        self._unsent: deque[Report | WeightsReport | Staged] = deque()
        self._weights: WeightsReport | None = None  # the last one, for a scheduler side that connects later
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._leaving = self._closing = False
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
        """Wait until the store process has reported for each place whether its entry is in every tier, but not past
        `deadline` (monotonic). Returns the places for which it is. Only for a producer's saving rank."""
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
            except (LinkClosed, ValueError):  # ValueError: closed by the rank's thread, for the next store process
                break
            if received is not None and isinstance(answer := received[0], Durable):
                waiting.discard(answer.place)
                if answer.ok:
                    durable.add(answer.place)
        return durable & places

    def report(
        self,
        step: int,
        outcomes: list[tuple[int, Outcome, int]],
        load_ns: int = 0,
        save_ns: int = 0,
        encode_s: float = 0.0,
    ) -> None:
        """Report to the scheduler side that all steps up to `step` are done, now or as soon as the link has room."""
        message = Report(step, outcomes, load_ns, save_ns, encode_s)
        with self._lock:
            self._post(message)

    def report_weights(self, calls: int, digest: str) -> None:
        """Report the encoder's weights to the scheduler side (see `WeightsReport`), as soon as it is connected."""
        with self._lock:
            self._weights = WeightsReport(calls, digest)
            self._post(self._weights)

    def _post(self, message: Report | WeightsReport | Staged) -> None:
        """Send the message, now or as soon as the link has room. The caller holds the lock."""
        if self._unsent or not self._send(message):
            self._unsent.append(message)
            os.eventfd_write(self._wake, 1)

    def leave(self) -> None:
        """Hand over and report nothing more: the scheduler side sees the link close and promises nothing more."""
        self._leaving = True
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End the thread and release links and memory. Views of the memory may outlive this."""
        self._leaving = self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(_END_S)
        if self._thread.is_alive():
            _logger.error("encoder cache: the device of rank %d does not respond; its memory stays mapped", self._rank)
            return
        os.close(self._wake)

    # ---- the rank's thread

    def _run(self) -> None:
        try:
            while not self._leaving:
                self._wait()
        except LinkClosed:
            pass
        except OSError as error:
            _logger.error("encoder cache: rank %d no longer saves entries: %s", self._rank, error.strerror)
        except Exception:
            _logger.exception("encoder cache: the link thread of rank %d failed; it saves no more entries", self._rank)
        self._close_links()
        self._linger()
        self._unmap()

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
        if source.fileno() not in ready or self._leaving:
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
            _logger.warning("encoder cache: rejected a connection by another user to rank %d", self._rank)
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
                self._answer(Attached(self._rank, self._device.registers))
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
                self._answer(self._use(self.memory, offset, length))
            case Stage() if self.memory is not None:
                answer = Staged(message.number, self._device.stage(self.memory, message))
                with self._lock:
                    self._post(answer)
            case Unstage(number=number):
                self._device.unstage(number)
            case _:
                raise LinkClosed(f"unexpected {type(message).__name__}")

    def _use(self, memory: mmap.mmap, offset: int, length: int) -> SegmentReady:
        """Have the device register a segment, granule by granule, until it refuses one."""
        usable, problem = length if self._pageable else 0, ""
        while usable < length and not (problem or self._leaving):
            granule = min(arena.GRANULE_BYTES, length - usable)
            problem = self._device.register(memory, offset + usable, granule)
            usable += 0 if problem else granule
        if problem and not offset + usable:
            self._pageable, usable = True, length
        return SegmentReady(offset, usable, problem)

    def _answer(self, message: Attached | SegmentReady) -> None:
        with self._lock:
            if not self._send(message):
                raise LinkClosed("no room for an answer")

    def _flush(self) -> None:
        with self._lock:
            while self._unsent and self._send(self._unsent[0]):
                self._unsent.popleft()

    def _send(self, message: Report | WeightsReport | Staged | Attached | SegmentReady) -> bool:
        """The caller holds the lock. True if the scheduler side is not connected: there is no one to report to."""
        if self._link is None:
            return True
        try:
            return self._link.send(message)
        except LinkClosed:
            return True

    def _close_links(self) -> None:
        self._listener.close()
        with self._lock:
            for link in (self._link, self._store):
                if link is not None:
                    link.close()
            self._link = self._store = None
            self._unsent.clear()

    def _linger(self) -> None:
        deadline = time.monotonic() + self._linger_s
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        while self.memory is not None and not self._closing and (left := deadline - time.monotonic()) > 0:
            if poller.poll(left * 1000):
                os.eventfd_read(self._wake)

    def _unmap(self) -> None:
        """Unmap the arena. From now on no metadata can match this rank's arena."""
        self.arena_id = ""
        memory, self.memory = self.memory, None
        if self._device.release() and memory is not None:
            try:
                memory.close()
            except BufferError:
                pass  # a tensor still views it: unmapped with the last view
