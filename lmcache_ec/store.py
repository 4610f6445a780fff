# SPDX-License-Identifier: Apache-2.0
"""The store process: seals, verifies, fills, writes through. All I/O and all digests of an engine happen here.

`python -m lmcache_ec.store ARENA LINK SAVER`, three inherited descriptors: the arena's memory, the link to the
scheduler side, the link from the saving rank. It outlives its engine only to finish what was handed over, for at most
`drain_s` seconds.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

from lmcache_ec import arena, entry
from lmcache_ec.channel import (
    AnyMessage,
    Discard,
    Fill,
    Filled,
    Hello,
    Ledger,
    Link,
    LinkClosed,
    NotFilled,
    Notice,
    Ping,
    Pong,
    Saved,
    Sealed,
    Start,
    Write,
    Written,
    same_user,
    status_address,
)
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.presence import PresenceFilter
from lmcache_ec.tiers.base import Tier

_OPEN_TIMEOUT_S = 5.0
_RESCAN_S = 30.0
_RESCAN_SHARE = 20
"""A rescan waits at least this many times as long as the last one took: at most 5 % of a disk's time."""


class Lane:
    """A tier and threads of its own, so that a stuck tier holds up nothing but itself. Created on the main thread."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.reads = ThreadPoolExecutor(4, f"{tier.name}-read")
        self.writes = ThreadPoolExecutor(1, f"{tier.name}-write")
        self.scans = ThreadPoolExecutor(1, f"{tier.name}-scan")


class Store:
    """One engine's store process.

    The main thread only passes messages between the links and the lanes, so that it answers a ping whatever a tier
    does; sealing has a thread of its own, each tier several. Threads answer through `_post`.
    """

    def __init__(self, arena_fd: int, link: Link, saver: Link) -> None:
        self._memory = memoryview(arena.attach(arena_fd))
        self._link = link
        self._saver = saver
        self._lanes: list[Lane] = []
        self._sealer = ThreadPoolExecutor(1, "seal")
        self._outbox: deque[AnyMessage] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._ledger: dict[str, int] = {}
        self._jobs = 0
        self._rescan_at = float("inf")
        self._start: Start | None = None
        self._presence: PresenceFilter | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
        self._selector.register(link, selectors.EVENT_READ, self._from_scheduler)
        self._selector.register(saver, selectors.EVENT_READ, self._from_saver)
        self._links = {link, saver}
        status = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        status.bind(status_address(os.getpid()))
        status.listen(8)
        status.setblocking(False)
        self._status = status
        self._selector.register(status, selectors.EVENT_READ, self._tell_status)

    def run(self) -> None:
        """Serve until the scheduler side is gone, then finish what was handed over."""
        while self._link in self._links:
            self._turn(max(0.0, min(self._rescan_at - time.monotonic(), 3600.0)))
            if time.monotonic() >= self._rescan_at:
                self._rescan_at = float("inf")
                self._scan()
        deadline = time.monotonic() + (self._start.drain_s if self._start else 0.0)
        while (self._jobs or self._saver in self._links) and (left := deadline - time.monotonic()) > 0:
            self._turn(left)

    # ---- the main thread

    def _turn(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            key.data()
        self._flush()

    def _woken(self) -> None:
        os.eventfd_read(self._wake)

    def _from_scheduler(self) -> None:
        self._drain(self._link)

    def _from_saver(self) -> None:
        self._drain(self._saver)

    def _drain(self, link: Link) -> None:
        try:
            while (received := link.receive()) is not None:
                self._take(received[0])
        except LinkClosed:
            self._selector.unregister(link)
            self._links.discard(link)

    def _take(self, message: AnyMessage) -> None:
        match message:
            case Saved() if self._owns(message.offset, message.length):
                self._submit(self._sealer, partial(self._seal, message))
            case Fill() if message.place == 0 or self._owns(message.offset, message.length):
                self._fill(message, 0)
            case Write() if self._owns(message.offset, message.length):
                self._write(message)
            case Ping(number=number):
                self._post(Pong(number))
            case Ledger(counts=counts):
                self._ledger = counts
            case Discard(identifier=identifier):
                for lane in self._lanes:
                    self._submit(lane.writes, partial(self._delete, lane, self._key(identifier)))
            case Start():
                self._begin(message)
            case _:
                self._post(Notice("message", f"the store process cannot act on {type(message).__name__}"))

    def _begin(self, start: Start) -> None:
        self._start = start
        if start.disk:
            from lmcache_ec.tiers.disk import DiskTier

            opening = self._sealer.submit(DiskTier, Path(start.disk), start.disk_bytes, start.disk_free_bytes)
            wait([opening], _OPEN_TIMEOUT_S)
            problem = "no answer from its file system" if not opening.done() else str(opening.exception() or "")
            if problem:
                self._link.send(Hello(os.getpid(), f"local_disk {start.disk}: {problem}"), [os.pidfd_open(os.getpid())])
                self._sealer = ThreadPoolExecutor(1, "seal")
            else:
                self._lanes.append(Lane(opening.result()))
        self._presence = PresenceFilter.create([lane.tier.name for lane in self._lanes])
        self._link.send(Hello(os.getpid(), ""), [os.pidfd_open(os.getpid()), self._presence.fd])
        for tier in (lane.tier for lane in self._lanes):
            if tier.notice:
                self._post(Notice(f"{tier.name}-open", tier.notice))
        self._scan()

    def _flush(self) -> None:
        """Send what the threads answered; what finds the link full waits for room."""
        if self._link not in self._links:
            self._outbox.clear()
            return
        try:
            while self._outbox and self._link.send(self._outbox[0]):
                self._outbox.popleft()
        except LinkClosed:
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
        self._selector.modify(self._link, wanted, self._from_scheduler)

    def _tell_status(self) -> None:
        """Whoever asked may have given up meanwhile, or not read: that must not end this process."""
        try:
            connection, _ = self._status.accept()
            with connection:
                if same_user(connection) and self._start is not None:
                    connection.setblocking(False)
                    connection.sendall(json.dumps(self._status_of(self._start)).encode())
        except OSError:
            pass

    def _status_of(self, start: Start) -> dict[str, object]:
        return {
            "pid": os.getpid(),
            "engine": start.engine,
            "namespace": start.namespace,
            "incarnation": start.incarnation,
            "scan_complete": self._presence is not None and self._presence.all_complete,
            "jobs": self._jobs,
            "store": dict(self._counts),
            "book": self._ledger,
        }

    # ---- threads

    def _post(self, message: AnyMessage) -> None:
        """From any thread: send to the scheduler side as soon as the main thread gets to it."""
        self._outbox.append(message)
        os.eventfd_write(self._wake, 1)

    def _submit(self, pool: ThreadPoolExecutor, job: Callable[[], None]) -> None:
        """Run a job that the engine's end waits for."""

        def run() -> None:
            try:
                job()
            except Exception as error:
                self._post(Notice("job", f"{type(error).__name__}: {error}"))
            finally:
                with self._lock:
                    self._jobs -= 1
                os.eventfd_write(self._wake, 1)

        with self._lock:
            self._jobs += 1
        pool.submit(run)

    def _count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number

    def _seal(self, saved: Saved) -> None:
        key = self._key(saved.identifier)
        try:
            spec = entry.TensorSpec(saved.rows, saved.width, saved.dtype)
            entry.seal(self._at(saved.offset, saved.length), key, spec, self._start.producer if self._start else "")
        except ValueError as error:
            self._post(Notice("seal", f"cannot seal {saved.rows} x {saved.width} {saved.dtype}: {error}"))
            self._post(Sealed(saved.place, False))
            return
        self._count("sealed")
        self._post(Sealed(saved.place, True))
        if saved.persist:
            self._write(Write(saved.place, saved.offset, saved.length, saved.identifier))

    def _write(self, write: Write) -> None:
        """Write through to the tiers in order; the answer comes when the last one is done."""
        if not self._lanes:
            self._post(Written(write.place, False))
        for lane in self._lanes:
            self._submit(lane.writes, partial(self._put, lane, write))

    def _put(self, lane: Lane, write: Write) -> None:
        key = self._key(write.identifier)
        try:
            stored = lane.tier.put(key, self._at(write.offset, write.length))
        except Exception as error:
            self._count(f"{lane.tier.name}_write_errors")
            self._post(Notice(f"{lane.tier.name}-write", f"{lane.tier.name}: {error}"))
            self._post(Written(write.place, False))
            return
        self._count(f"{lane.tier.name}_writes" if stored else f"{lane.tier.name}_present")
        self._count(f"{lane.tier.name}_written_bytes", write.length * stored)
        if self._presence is not None:
            self._presence.add(key.digest)
        self._post(Written(write.place, True))

    def _fill(self, fill: Fill, index: int) -> None:
        """Ask the tiers in order, each on its own threads."""
        if index == len(self._lanes):
            self._count("fill_misses")
            self._post(NotFilled(fill.place, fill.identifier, 0))
            return
        lane = self._lanes[index]
        lane.reads.submit(self._read, lane, fill, index)

    def _read(self, lane: Lane, fill: Fill, index: int) -> None:
        name, key = lane.tier.name, self._key(fill.identifier)
        try:
            if fill.place == 0:
                length = lane.tier.contains(key)
            else:
                length = lane.tier.get_into(key, self._at(fill.offset, fill.length))
            if length is not None and length < entry.room(fill.identifier):
                raise entry.EntryError(entry.Reason.LENGTH, f"{length} bytes are no entry")
            if length == fill.length and fill.place:
                spec = entry.verify(self._at(fill.offset, fill.length), key)
                self._count(f"{name}_hits")
                self._count(f"{name}_read_bytes", length)
                self._post(Filled(fill.place, spec.rows, spec.width, spec.dtype, name))
                return
            if length is not None:
                self._post(NotFilled(fill.place, fill.identifier, length))
                return
        except entry.EntryError as error:
            self._count(f"{name}_corrupt")
            self._post(Notice(f"{name}-corrupt", f"{name}: {key.object_name} does not verify ({error}); deleted"))
            self._delete(lane, key)
        except Exception as error:
            self._count(f"{name}_read_errors")
            self._post(Notice(f"{name}-read", f"{name}: {error}"))
        self._fill(fill, index + 1)

    def _delete(self, lane: Lane, key: EncoderCacheKey) -> None:
        try:
            lane.tier.delete(key)
        except OSError as error:
            self._post(Notice(f"{lane.tier.name}-delete", f"{lane.tier.name}: {error}"))

    def _scan(self) -> None:
        for lane in self._lanes:
            lane.scans.submit(self._list, lane)

    def _list(self, lane: Lane) -> None:
        presence, start = self._presence, self._start
        if presence is None or start is None:
            return
        begun = time.monotonic()
        try:
            for number, listed in enumerate(lane.tier.list(start.namespace), 1):
                presence.add(listed.digest)
                self._counts[f"{lane.tier.name}_listed"] = number
            presence.set_complete(lane.tier.name)
            lane.tier.maintain()
        except Exception as error:
            self._post(Notice(f"{lane.tier.name}-scan", f"{lane.tier.name}: {error}"))
        self._rescan_at = time.monotonic() + max(_RESCAN_S, _RESCAN_SHARE * (time.monotonic() - begun))
        os.eventfd_write(self._wake, 1)

    def _key(self, identifier: str) -> EncoderCacheKey:
        return EncoderCacheKey(self._start.namespace if self._start else "", identifier)

    def _owns(self, offset: int, length: int) -> bool:
        return arena.within(offset, length, len(self._memory))

    def _at(self, offset: int, length: int) -> memoryview:
        return self._memory[offset : offset + length]


def main() -> None:
    """Detach from the engine's process tree and session, then serve.

    A process that vLLM's front end kills with its tree must not take this one along, and Ctrl-C in a terminal reaches a
    whole foreground group: hence the fork and the session of its own.
    """
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    arena_fd, *links = (int(argument) for argument in sys.argv[1:])
    link, saver = (Link(socket.socket(fileno=fd)) for fd in links)
    Store(arena_fd, link, saver).run()
    os._exit(0)  # a thread may still be stuck in a tier


if __name__ == "__main__":
    main()
