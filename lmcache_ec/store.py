# SPDX-License-Identifier: Apache-2.0
"""The store process: seals, verifies, fills, writes through. It does all I/O and computes all digests of an engine.

`python -m lmcache_ec.store ARENA LINK SAVER`, three inherited descriptors: the arena's memory, the link to the
scheduler side, the link from the saving rank. It outlives its engine only to finish work handed over, for at most
`drain_s` seconds.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_ec import arena, entry
from lmcache_ec.channel import (
    Accessed,
    AnyMessage,
    Back,
    Born,
    CpuChanges,
    Durable,
    Enter,
    Entered,
    Epoch,
    Fill,
    Filled,
    Hello,
    Landed,
    Ledger,
    Locate,
    NotFilled,
    Notice,
    Ping,
    Pong,
    Populate,
    Populated,
    Saved,
    Sealed,
    Start,
    Write,
    Written,
)
from lmcache_ec.engine import namespace_at
from lmcache_ec.epoch_watch import EpochWatch
from lmcache_ec.events.endpoints import Publishing
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.link import Link, LinkClosed
from lmcache_ec.locate import Locator
from lmcache_ec.recording import Recording
from lmcache_ec.status_server import Status, StatusServer, tier_statuses
from lmcache_ec.store_process import PROCESS_NAME
from lmcache_ec.tally import TIER_GAUGES, Tally
from lmcache_ec.tiers.base import Landing
from lmcache_ec.tiers.emptied import Looks
from lmcache_ec.tiers.journal import Journal
from lmcache_ec.tiers.lane import NEVER
from lmcache_ec.tiers.opening import Opening, opened
from lmcache_ec.tiers.stack import Absent, Answer, Elsewhere, Found, Stack, Wanted
from lmcache_ec.tiers.write_through import Put

if TYPE_CHECKING:
    from lmcache_ec.events.publisher import Publisher

_DISK_RESCAN_S = 30.0
_FAREWELL_S = 1.0
"""Longest time that this process's exit waits until subscribers know that their engine has ended."""


class Store:
    """One engine's store process.

    The main thread only passes messages between the links and the tiers, so that it answers pings regardless of what a
    tier does. Sealing has its own thread, each tier several (`Stack`). Threads answer through `_post`.
    """

    def __init__(self, arena_fd: int, link: Link, saver: Link) -> None:
        self._arena = arena.attach(arena_fd)
        self._memory = memoryview(self._arena)
        self._link = link
        self._saver = saver
        self._journal = Journal(lambda kind, text: self._post(Notice(kind, text)))
        self._stack = Stack([], self._journal)  # until the tiers are known
        self._tally: Tally | None = None
        self._looks: Looks | None = None
        self._locator: Locator | None = None
        self._publisher: Publisher | None = None
        self._sealer = ThreadPoolExecutor(1, "seal")
        self._seals = 0
        self._outbox: deque[AnyMessage] = deque()
        self._sending = threading.Lock()  # never held across blocking calls
        self._introduced = False  # nothing is sent to the scheduler side before `Hello`
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._ledger: dict[str, int] = {}
        self._ledger_at = 0.0
        self._asked: list[Wanted] = []  # since this turn began: the fills of one request arrive together
        self._sought: list[Locate] = []  # ... likewise
        self._engine_pid = _creator(link)
        self._since = time.time()
        self._start: Start | None = None
        self._status = StatusServer(self._state)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
        self._selector.register(link, selectors.EVENT_READ, self._from_scheduler)
        self._selector.register(saver, selectors.EVENT_READ, self._from_saver)
        self._selector.register(self._status, selectors.EVENT_READ, self._status.answer)
        self._recording = Recording(self._selector, self._post)
        self._links = {link, saver}

    def run(self) -> None:
        """Serve until the scheduler side has closed its link, then finish the work handed over."""
        while self._link in self._links:
            due_at = min(self._stack.due_at, self._looks.due_at) if self._looks else self._stack.due_at
            self._turn(max(0.0, min(due_at - time.monotonic(), 3600.0)))
            self._stack.survey_due()
            if self._looks is not None:
                self._looks.look_due()
        if self._publisher is not None:
            self._publisher.close()
        deadline = time.monotonic() + (self._start.drain_s if self._start else 0.0)
        while (self._jobs or self._saver in self._links) and (left := deadline - time.monotonic()) > 0:
            self._turn(left)
        if self._start is not None and deadline > time.monotonic():
            self._stack.announce()
        if self._publisher is not None:
            self._publisher.wait_closed(_FAREWELL_S)

    # ---- the main thread

    def _turn(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            key.data()
        if self._asked:
            asked, self._asked = self._asked, []
            self._stack.fetch(asked)
        if self._sought and self._locator is not None:
            sought, self._sought = self._sought, []
            self._locator.ask(sought)
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
            if link is self._link:
                self._recording.close()

    def _take(self, message: AnyMessage) -> None:
        match message:
            case Saved() if self._owns(message.offset, message.length):
                with self._lock:
                    self._seals += 1
                self._sealer.submit(self._seal, message)
            case Fill() if message.place == 0 or self._owns(message.offset, message.length):
                self._asked.append(self._wanted(message))
            case Write() if self._owns(message.offset, message.length):
                self._write(message)
            case Locate():
                self._sought.append(message)
            case Ping(number=number):
                self._take_stock()
                self._post(Pong(number))
            case Populate() if self._owns(message.offset, message.length):
                threading.Thread(target=self._populate, args=(message,), name="populate", daemon=True).start()
            case Ledger(counts=counts):
                self._ledger, self._ledger_at = counts, time.monotonic()
            case CpuChanges():
                if self._publisher is not None:
                    self._publisher.publish(message)
            case Accessed():
                self._recording.pass_on(message)
            case Enter(namespace=namespace):
                self._stack.relist(namespace)
                self._post(Entered(namespace))
            case Start():
                self._begin(message)
            case _:
                self._post(Notice("message", f"the store process cannot act on {type(message).__name__}"))

    def _begin(self, start: Start) -> None:
        self._start = start
        restarted, epochs = start.incarnation > 1, self._epochs(start)
        openings: list[Opening] = []
        if start.disk:
            disk = Opening.of_disk(Path(start.disk), start.disk_bytes, start.disk_free_bytes, _DISK_RESCAN_S)
            if epochs is not None:
                disk = replace(disk, open=partial(epochs.opening, disk.open, strict=not restarted))
            openings.append(disk)
        openings += map(Opening.of_remote, start.remotes)
        tiers = opened(openings, self._journal.report, self._refuse, restarted=restarted)
        epoch, namespace = start.epoch or 0, start.namespace
        if epochs is not None and (found := epochs.start()) > epoch:
            epoch, namespace = found, namespace_at(start.base, found, start.signing)
        stack = self._stack = Stack(
            tiers,
            self._journal,
            namespace,
            wake=self._rouse,
            job_ended=self._job_ended,
            back=lambda number: self._post(Back(number)),
            signing=start.signing,
        )
        stack.follow_neighbours()
        if start.publishing is not None:
            self._publish(start.publishing, namespace)
        self._locator = Locator(stack, self._post)
        if start.saves:
            self._looks = Looks(
                stack.lanes, start.look_s, self._journal, lambda *news: self._post(Born(*news)), self._rouse
            )
        names = [lane.name for lane in stack.lanes]
        counts = Tally.memory()
        self._tally = Tally(counts, names, write=True)
        self._journal.share(self._tally)
        self._take_stock()
        self._link.send(Hello(os.getpid(), "", names, epoch), [os.pidfd_open(os.getpid()), stack.presence.fd, counts])
        os.close(counts)
        self._introduced = True
        stack.survey_due()

    def _publish(self, publishing: Publishing, namespace: str) -> None:
        """Start publishing. ZeroMQ is loaded only here, so that an engine that publishes nothing does not load it."""
        try:
            from lmcache_ec.events.publisher import Publisher
        except ImportError as error:
            self._post(Notice("events", f"no events are published: {error}"))
            return
        self._publisher = Publisher(publishing, namespace, lambda kind, text: self._post(Notice(kind, text)))

    def _epochs(self, start: Start) -> EpochWatch | None:
        """The watch of the folder, if the engine has one and follows its epochs."""
        if not start.disk or start.epoch is None:
            return None
        return EpochWatch(Path(start.disk), start.epoch, lambda epoch: self._post(Epoch(epoch)), self._journal.report)

    def _refuse(self, problem: str) -> None:
        """Abort the engine's start, if it is still waiting; otherwise serve with the other tiers."""
        self._link.send(Hello(os.getpid(), problem, []), [os.pidfd_open(os.getpid())])

    @property
    def _jobs(self) -> int:
        """Number of unfinished jobs: seals, and writes, counted per tier."""
        return self._seals + self._stack.writes.jobs

    def _flush(self) -> None:
        """Send queued messages; those that find the scheduler side's link full wait for room.

        In order over both links: a producer's rank ends its step on the message about an entry, and by then the
        scheduler side must already know of the entry.
        """
        self._send()
        if self._link not in self._links:
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
        self._selector.modify(self._link, wanted, self._from_scheduler)

    def _sent(self, message: AnyMessage) -> bool:
        link = self._saver if isinstance(message, Durable) else self._link
        try:
            return link.send(message) or link is self._saver  # a rank that does not read has waited long enough
        except LinkClosed:
            return True  # the other end is closed

    def _take_stock(self) -> None:
        """Update the tally's gauges: with each ping, once a second while the engine works."""
        tally, start = self._tally, self._start
        if tally is None or start is None:
            return
        tally.set("jobs", self._jobs)
        for lane in self._stack.lanes:
            held = self._stack.writes.held.get(lane.name, -1)
            limit = start.disk_bytes if lane.habits.local else -1
            stock = (lane.state, lane.listed, held, limit, *lane.queued)
            for name, value in zip(TIER_GAUGES, stock, strict=True):
                tally.set(f"{lane.name}_{name}", value)

    def _state(self) -> Status | None:
        start, counts = self._start, self._journal.counts
        if start is None:
            return None
        return {
            "pid": os.getpid(),
            "engine": start.engine,
            "namespace": self._stack.namespace,
            "engine_pid": self._engine_pid,
            "since": self._since,
            "state": "serving" if self._link in self._links else "finishing",
            "tiers": tier_statuses(self._stack, self._journal, start.disk_bytes),
            "incarnation": start.incarnation,
            "scan_complete": self._stack.presence.all_complete,
            "jobs": self._jobs,
            "store": {**counts, **{f"{lane.name}_listed": lane.listed for lane in self._stack.lanes}},
            "book": self._ledger,
            "book_age_s": round(time.monotonic() - self._ledger_at, 1) if self._ledger else None,
            "events": self._publisher.status() if self._publisher is not None else None,
        }

    # ---- any thread

    def _post(self, message: AnyMessage) -> None:
        """Send a message: `Durable` to the saving rank, anything else to the scheduler side. At once if there is room,
        since a request may be waiting for it and the main thread would have to wake up first."""
        self._outbox.append(message)
        if self._introduced:
            self._send()
        if self._outbox:
            self._rouse()

    def _send(self) -> None:
        with self._sending:
            while self._outbox and self._sent(self._outbox[0]):
                self._outbox.popleft()

    def _rouse(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _job_ended(self) -> None:
        """The main thread waits for jobs only after the engine has closed its link: then it checks `_jobs` again. It
        has noted the closed link before it looks at the number, and the number is lower before this looks at the link.
        """
        if self._link not in self._links:
            self._rouse()

    def _populate(self, order: Populate) -> None:
        """Allocate the pages that a device is about to register. Runs on its own thread."""
        try:
            arena.populate(self._arena, order.offset, order.length)
        except OSError:
            pass  # an old kernel, or no memory: devices allocate the pages when registering them, or refuse
        self._post(Populated(order.offset))

    def _seal(self, saved: Saved) -> None:
        """Complete an entry, then write it through. Runs on the sealing thread."""
        try:
            spec, start = entry.TensorSpec(saved.rows, saved.width, saved.dtype), self._start
            producer, signing = (start.producer, start.signing) if start else ("", None)
            entry.seal(self._at(saved.offset, saved.length), _key(saved), spec, producer, signing)
        except ValueError as error:
            self._post(Notice("seal", f"cannot seal {saved.rows} x {saved.width} {saved.dtype}: {error}"))
            self._post(Sealed(saved.place, False))
            if saved.flush:
                self._post(Durable(saved.place, False))
        except Exception as error:
            self._post(Notice("job", f"{type(error).__name__}: {error}"))
        else:
            self._journal.count("sealed")
            self._post(Sealed(saved.place, True))
            if saved.persist:
                write = Write(saved.place, saved.offset, saved.length, saved.namespace, saved.identifier)
                self._write(write, saved.flush)
            elif saved.flush:
                self._post(Durable(saved.place, False))
        finally:
            with self._lock:
                self._seals -= 1
            self._job_ended()

    def _write(self, write: Write, flush: bool = False) -> None:
        """Write a place through. It keeps its entry until `Written`; with `flush` a rank waits for all tiers."""
        put = Put(
            _key(write),
            self._at(write.offset, write.length),
            write.tiers,
            landed=partial(self._landed, write),
            released=lambda stored: self._post(Written(write.place, stored)),
        )
        if flush:
            everywhere = sum(1 << number for number, lane in enumerate(self._stack.lanes) if not lane.tier.read_only)
            put.done = lambda: self._post(Durable(write.place, bool(everywhere) and put.took == everywhere))
        self._stack.writes.write(put)

    def _landed(self, entry_of: Fill | Write, number: int, landing: Landing) -> None:
        self._post(Landed(entry_of.place, entry_of.identifier, number, landing))

    def _wanted(self, fill: Fill) -> Wanted:
        """The request to the tiers for a fill. Its place may be written to until the answer, and never afterwards."""
        return Wanted(
            _key(fill),
            self._at(fill.offset, fill.length) if fill.place else None,
            partial(self._answer, fill),
            partial(self._landed, fill),
            fill.insist,
            time.monotonic() + self._start.deadline_s if self._start else NEVER,
            tiers=fill.tiers,
        )

    def _answer(self, fill: Fill, answer: Answer) -> None:
        match answer:
            case Found(spec=spec, tier=tier, seconds=seconds):
                self._post(Filled(fill.place, spec.rows, spec.width, spec.dtype, tier, seconds))
            case Elsewhere(length=length):
                self._post(NotFilled(fill.place, fill.namespace, fill.identifier, length))
            case Absent(kept=kept):
                self._post(NotFilled(fill.place, fill.namespace, fill.identifier, 0, kept))

    def _owns(self, offset: int, length: int) -> bool:
        return arena.within(offset, length, len(self._memory))

    def _at(self, offset: int, length: int) -> memoryview:
        return self._memory[offset : offset + length]


def _key(message: Fill | Write | Saved) -> EncoderCacheKey:
    return EncoderCacheKey(message.namespace, message.identifier)


def _creator(link: Link) -> int:
    """The pid of the process that created the link: the engine's scheduler side."""
    with socket.socket(fileno=os.dup(link.fileno())) as sock:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])


def main() -> None:
    """Detach from the engine's process tree and process group, then serve.

    vLLM's front end may kill the engine's process tree, and Ctrl-C in a terminal reaches the whole foreground group:
    hence the fork and the separate process group. It gets no separate session: with autogroups, Linux schedules each
    session as a whole, and on two cores kept busy by two workers, the small session of a process that mostly sleeps got
    no CPU time for half a minute.
    """
    if os.fork():
        os._exit(0)
    os.setpgid(0, 0)
    # Work handed over is finished first, even if the terminal is closed or a whole control group is terminated
    # (systemd, some container runtimes). The end of the engine's link ends this process, within drain_s.
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        Path("/proc/self/comm").write_text(PROCESS_NAME)
    except OSError:
        pass  # the name is used only if a container ends with its engine
    os.chdir("/")
    arena_fd, *links = (int(argument) for argument in sys.argv[1:])
    link, saver = (Link(socket.socket(fileno=fd)) for fd in links)
    try:
        store = Store(arena_fd, link, saver)
    except OSError as error:
        sys.exit(error.strerror)  # printed last on standard error, which the engine logs
    store.run()
    os._exit(0)  # a thread may still be stuck in a tier


if __name__ == "__main__":
    main()
