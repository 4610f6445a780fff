# SPDX-License-Identifier: Apache-2.0
"""The store process: seals, verifies, fills, writes through. All I/O and all digests of an engine happen here.

`python -m lmcache_ec.store ARENA LINK SAVER`, three inherited descriptors: the arena's memory, the link to the
scheduler side, the link from the saving rank. It outlives its engine only to finish what was handed over, for at most
`drain_s` seconds.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lmcache_ec import arena, entry
from lmcache_ec.channel import (
    AnyMessage,
    Back,
    Born,
    Durable,
    Enter,
    Entered,
    Fill,
    Filled,
    Hello,
    Landed,
    Landing,
    Ledger,
    Link,
    LinkClosed,
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
    same_user,
    status_address,
)
from lmcache_ec.incarnation import PROCESS_NAME
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.lane import NEVER, Habits, Lane, lane_names
from lmcache_ec.locate import Locator
from lmcache_ec.presence import PresenceWriter
from lmcache_ec.tiers.awaited import AwaitedTier
from lmcache_ec.tiers.base import Tier, TierUnreachable, message
from lmcache_ec.tiers.kinds import kind_of, open_remote
from lmcache_ec.tiers.remote import Lookup

Opener = Callable[[], Tier]

_OPEN_TIMEOUT_S = 8.0
"""Of which importing LMCache for one of its remotes takes up to 6.5 s."""
_DISK_RESCAN_S = 30.0
_NEWS_S = 0.25
"""How often it is looked what neighbours on the folder have written."""
_PROMOTED_BYTES = 256 << 20
"""Copies of entries on their way from a remote tier to those before it, at most."""


class Store:
    """One engine's store process.

    The main thread only passes messages between the links and the lanes, so that it answers a ping whatever a tier
    does; sealing has a thread of its own, each tier several. Threads answer through `_post`.
    """

    def __init__(self, arena_fd: int, link: Link, saver: Link) -> None:
        self._arena = arena.attach(arena_fd)
        self._memory = memoryview(self._arena)
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
        self._promoted_bytes = 0
        self._asked: list[_Asked] = []  # since this turn began: what belongs to one request comes together
        self._sought: list[Locate] = []  # ... likewise
        self._locator: Locator | None = None
        self._looks: list[_Look] = []
        self._held: dict[str, int] = {}  # tier -> bytes, where it knows
        self._engine_pid = _creator(link)
        self._since = time.time()
        self._deliveries: dict[int, _Delivery] = {}
        self._start: Start | None = None
        self._namespace = ""  # what is listed
        self._presence: PresenceWriter | None = None
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
            due = [*(lane.due_at for lane in self._lanes), *(look.due_at for look in self._looks)]
            due_at = min(due, default=NEVER)
            self._turn(max(0.0, min(due_at - time.monotonic(), 3600.0)))
            self._survey()
            self._look()
        deadline = time.monotonic() + (self._start.drain_s if self._start else 0.0)
        while (self._jobs or self._saver in self._links) and (left := deadline - time.monotonic()) > 0:
            self._turn(left)

    # ---- the main thread

    def _turn(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            key.data()
        if self._asked:
            asked, self._asked = self._asked, []
            self._fill(asked)
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

    def _take(self, message: AnyMessage) -> None:
        match message:
            case Saved() if self._owns(message.offset, message.length):
                self._submit(self._sealer, partial(self._seal, message))
            case Fill() if message.place == 0 or self._owns(message.offset, message.length):
                self._asked.append(_Asked(message, time.monotonic()))
            case Write() if self._owns(message.offset, message.length):
                self._write(message)
            case Locate():
                self._sought.append(message)
            case Ping(number=number):
                self._post(Pong(number))
            case Populate() if self._owns(message.offset, message.length):
                threading.Thread(target=self._populate, args=(message,), name="populate", daemon=True).start()
            case Ledger(counts=counts):
                self._ledger = counts
            case Enter(namespace=namespace):
                self._namespace = namespace
                for lane in self._lanes:
                    lane.relist(namespace)
                self._post(Entered(namespace))
            case Start():
                self._begin(message)
            case _:
                self._post(Notice("message", f"the store process cannot act on {type(message).__name__}"))

    def _begin(self, start: Start) -> None:
        self._start, self._namespace = start, start.namespace
        openings: list[tuple[str, Opener, Habits]] = []
        if start.disk:
            habits = Habits(Lookup.CATALOG, refresh_s=_DISK_RESCAN_S, local=True)
            openings.append((f"local_disk {start.disk}", partial(_disk, start), habits))
        for remote in start.remotes:
            habits = Habits(remote.lookup, remote.refresh_s)
            openings.append((kind_of(remote.url).name, partial(open_remote, remote), habits))
        tiers = self._opened(openings)
        names = lane_names([tier.name for tier, _ in tiers])
        presence = self._presence = PresenceWriter.create(names)
        self._lanes = [Lane(tier, name, presence, habits) for (tier, habits), name in zip(tiers, names, strict=True)]
        for lane in self._lanes:
            if isinstance(lane.tier, AwaitedTier):
                lane.failed()
            if lane.habits.local:
                threading.Thread(target=self._follow, args=(lane,), daemon=True).start()
        self._locator = Locator(self._lanes, self._post)
        self._looks = [_Look(number, _look_s(lane.habits, start)) for number, lane in enumerate(self._lanes)]
        self._looks *= start.saves
        self._link.send(Hello(os.getpid(), "", names), [os.pidfd_open(os.getpid()), presence.fd])
        self._survey()

    def _opened(self, openings: Sequence[tuple[str, Opener, Habits]]) -> list[tuple[Tier, Habits]]:
        """The tiers that could be opened, side by side. What is wrong with one is told, and it is done without.

        A remote that is merely away is waited for; and so is any tier, once an engine has been served with it.
        """
        pool = ThreadPoolExecutor(max(1, len(openings)), "open")
        futures = [pool.submit(opener) for _, opener, _ in openings]
        wait(futures, _OPEN_TIMEOUT_S)
        tiers: list[tuple[Tier, Habits]] = []
        for (what, opener, habits), future in zip(openings, futures, strict=True):
            error = future.exception() if future.done() else TierUnreachable(errno.ETIMEDOUT, "no answer")
            if error is None:
                tiers.append((future.result(), habits))
                if notice := future.result().notice:
                    self._post(Notice(f"{what}-open", notice))
            elif not self._is_successor and (habits.local or not isinstance(error, TierUnreachable)):
                self._link.send(Hello(os.getpid(), f"{what}: {message(error)}", []), [os.pidfd_open(os.getpid())])
            else:
                self._post(Notice(f"{what}-open", f"{message(error)}; tried again in the background"))
                name = "disk" if habits.local else what
                tiers.append((AwaitedTier(name, opener, None if future.done() else future), habits))
        pool.shutdown(wait=False)
        return tiers

    @property
    def _is_successor(self) -> bool:
        return self._start is not None and self._start.incarnation > 1

    def _flush(self) -> None:
        """Send what the threads answered; what finds the scheduler side's link full waits for room.

        In order over both links: a producer's rank that hears of an entry ends its step, and then the scheduler side
        has to know of it already.
        """
        while self._outbox and self._sent(self._outbox[0]):
            self._outbox.popleft()
        if self._link not in self._links:
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
        self._selector.modify(self._link, wanted, self._from_scheduler)

    def _sent(self, message: AnyMessage) -> bool:
        link = self._saver if isinstance(message, Durable) else self._link
        try:
            return link.send(message) or link is self._saver  # a rank that does not read has waited long enough
        except LinkClosed:
            return True  # nobody is there to hear it

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
            "namespace": self._namespace,
            "engine_pid": self._engine_pid,
            "since": self._since,
            "state": "serving" if self._link in self._links else "finishing",
            "tiers": [self._status_of_tier(lane, start) for lane in self._lanes],
            "incarnation": start.incarnation,
            "scan_complete": self._presence is not None and self._presence.all_complete,
            "jobs": self._jobs,
            "store": {**self._counts, **{f"{lane.name}_listed": lane.listed for lane in self._lanes}},
            "book": self._ledger,
        }

    def _status_of_tier(self, lane: Lane, start: Start) -> dict[str, object]:
        count = self._counts
        return {
            "name": lane.name,
            "entries": lane.listed if lane.habits.local or lane.listed else None,
            "bytes": self._held.get(lane.name),
            "limit_bytes": start.disk_bytes if lane.habits.local else None,
            "rests": lane.rests,
            "hits": count[f"{lane.name}_hits"],
            "misses": count[f"{lane.name}_misses"],
            "writes": count[f"{lane.name}_writes"],
            "errors": sum(count[f"{lane.name}_{what}"] for what in ("read_errors", "write_errors", "corrupt")),
        }

    # ---- threads

    def _post(self, message: AnyMessage) -> None:
        """From any thread: send it as soon as the main thread gets to it, to the scheduler side or, `Durable`, to the
        rank that saves."""
        self._outbox.append(message)
        os.eventfd_write(self._wake, 1)

    def _submit(self, pool: ThreadPoolExecutor, job: Callable[[], None]) -> None:
        """Run a job that the engine's end waits for."""
        with self._lock:
            self._jobs += 1
        pool.submit(self._run, job)

    def _enqueue(self, lane: Lane, length: int, job: Callable[[], None]) -> bool:
        """Have a tier's threads write `length` bytes, which the engine's end waits for. False if that is too much."""
        with self._lock:
            self._jobs += 1
        if lane.enqueue(length, partial(self._run, job)):
            return True
        with self._lock:
            self._jobs -= 1
        self._count(f"{lane.name}_writes_dropped")
        return False

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            self._post(Notice("job", f"{type(error).__name__}: {error}"))
        finally:
            with self._lock:
                self._jobs -= 1
            os.eventfd_write(self._wake, 1)

    def _count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number

    def _populate(self, order: Populate) -> None:
        try:
            arena.populate(self._arena, order.offset, order.length)
        except OSError:
            pass  # an old kernel, or no memory: the devices that register them make the pages, or refuse
        self._post(Populated(order.offset))

    def _seal(self, saved: Saved) -> None:
        key = _key(saved)
        try:
            spec = entry.TensorSpec(saved.rows, saved.width, saved.dtype)
            entry.seal(self._at(saved.offset, saved.length), key, spec, self._start.producer if self._start else "")
        except ValueError as error:
            self._post(Notice("seal", f"cannot seal {saved.rows} x {saved.width} {saved.dtype}: {error}"))
            self._post(Sealed(saved.place, False))
            if saved.flush:
                self._post(Durable(saved.place, False))
            return
        self._count("sealed")
        self._post(Sealed(saved.place, True))
        if saved.flush and not self._lanes:
            self._post(Durable(saved.place, False))
        elif saved.flush:
            with self._lock:
                self._deliveries[saved.place] = _Delivery(len(self._lanes))
        if saved.persist:
            self._write(Write(saved.place, saved.offset, saved.length, saved.namespace, saved.identifier))

    def _write(self, write: Write, index: int = 0, stored: bool = False) -> None:
        """Write a place to the tiers from `index` on, one after another. It stays its entry's until the answer."""
        for number, lane in self._wanted(write, index):
            if self._enqueue(lane, write.length, partial(self._write_place, number, write, stored)):
                return
            self._landed(write, number, Landing.FAILED)
        self._post(Written(write.place, stored))

    def _write_place(self, index: int, write: Write, stored: bool) -> None:
        """What is in a file need not stay in the arena: the tiers after the disk are written from there."""
        lane, key = self._lanes[index], _key(write)
        landing = self._put(lane, key, self._at(write.offset, write.length))
        took = landing is Landing.TOOK
        self._landed(write, index, landing)
        if not (took and lane.habits.local):
            self._write(write, index + 1, stored or took)
            return
        self._post(Written(write.place, True))
        for number, later in self._wanted(write, index + 1):
            if not self._enqueue(later, write.length, partial(self._copy, lane, number, write)):
                self._landed(write, number, Landing.FAILED)

    def _wanted(self, write: Write, index: int) -> Iterator[tuple[int, Lane]]:
        """The lanes from `index` on that are to have the entry, with their numbers."""
        for number in range(index, len(self._lanes)):
            if not write.tiers or write.tiers >> number & 1:
                yield number, self._lanes[number]

    def _copy(self, source: Lane, number: int, write: Write) -> None:
        """From one tier to another. What is gone meanwhile, or does not verify, is not."""
        landing, key = Landing.FAILED, _key(write)
        try:
            data = memoryview(bytearray(source.tier.contains(key) or 0))
            if data and source.tier.get_into(key, data) == len(data):
                entry.verify(data, key)
                landing = self._put(self._lanes[number], key, data)
        finally:
            self._landed(write, number, landing)

    def _landed(self, write: Write, number: int, landing: Landing) -> None:
        """A tier has answered. A producer waits for the answers to its save, not for those to a rewrite."""
        self._post(Landed(write.place, write.identifier, number, landing))
        if not write.tiers:
            self._delivered(write.place, landing is Landing.TOOK)

    def _delivered(self, place: int, took: bool) -> None:
        """One tier more has an entry, or will not have it. Where a producer waits for it, it is told after the last."""
        with self._lock:
            delivery = self._deliveries.get(place)
            if delivery is None:
                return
            delivery.outstanding -= 1
            delivery.ok &= took
            if delivery.outstanding:
                return
            del self._deliveries[place]
        self._post(Durable(place, delivery.ok))

    def _promote(self, index: int, fill: Fill, data: memoryview) -> None:
        """Write what a tier had to those before it. From a copy: the place is the scheduler side's once it is told."""
        for number, lane in enumerate(self._lanes[:index]):
            with self._lock:
                room = self._promoted_bytes + len(data) <= _PROMOTED_BYTES
                self._promoted_bytes += len(data) * room
            if not room or not self._enqueue(lane, len(data), partial(self._put_copy, number, fill, bytes(data))):
                self._count("promotions_dropped")
                self._post(Landed(fill.place, fill.identifier, number, Landing.FAILED))
                with self._lock:
                    self._promoted_bytes -= len(data) * room

    def _put_copy(self, number: int, fill: Fill, copy: bytes) -> None:
        landing = self._put(self._lanes[number], _key(fill), memoryview(copy))
        self._post(Landed(fill.place, fill.identifier, number, landing))
        with self._lock:
            self._promoted_bytes -= len(copy)

    def _put(self, lane: Lane, key: EncoderCacheKey, data: memoryview) -> Landing:
        """Write an entry to a tier. One of the same length that is there already is this one."""
        try:
            stored = lane.tier.put(key, data)
            there = stored or lane.tier.contains(key) == len(data)
        except Exception as error:
            self._count(f"{lane.name}_write_errors")
            self._post(Notice(f"{lane.name}-write", f"{lane.name}: {error}"))
            if getattr(error, "errno", None) == errno.EFBIG:
                return Landing.REFUSED  # too large for this tier, which is none the worse for it
            lane.failed()
            return Landing.FAILED
        self._count(f"{lane.name}_writes" if stored else f"{lane.name}_present")
        self._count(f"{lane.name}_written_bytes", len(data) * stored)
        self._weigh(lane)
        if there:
            lane.has(key.digest, stored)
        return Landing.TOOK if there else Landing.REFUSED

    def _fill(self, asked: Sequence[_Asked], index: int = 0) -> None:
        """Ask the tiers in order, each on its own threads; what was asked for together together, where that helps."""
        waiting: dict[int, list[_Asked]] = {}
        for one in asked:
            number = self._who_may_have(one.fill, index)
            if number is not None:
                waiting.setdefault(number, []).append(one)
                continue
            self._count("fill_misses")
            self._post(_not_filled(one.fill, kept=one.kept))
        for number, together in waiting.items():
            for share in self._lanes[number].shares(together):
                self._lanes[number].reads.submit(self._read, number, share)

    def _who_may_have(self, fill: Fill, index: int) -> int | None:
        """The next lane from `index` on that is worth asking."""
        digest = _key(fill).digest
        later = range(index, len(self._lanes))
        return next((number for number in later if self._lanes[number].asks(digest, fill.insist)), None)

    def _read(self, number: int, asked: Sequence[_Asked]) -> None:
        now = time.monotonic()
        awaited = [one for one in asked if self._start is None or now - one.at <= self._start.deadline_s]
        for one in asked:
            if one not in awaited:
                self._count("fills_late")  # it stood in a queue until nobody waited for it any more
                self._post(_not_filled(one.fill))
        answers = self._answers(self._lanes[number], awaited)
        told = zip(awaited, answers, strict=True)
        unsettled = [self._unsettled(number, one, answer) for one, answer in told]
        self._fill([one for one in unsettled if one is not None], number + 1)

    def _answers(self, lane: Lane, asked: Sequence[_Asked]) -> Sequence[int | Exception | None]:
        """What a tier says of each: its length, None if it is not there, or an error. What has the length that was
        expected is in its place now."""
        fills = [one.fill for one in asked]
        reads = [(_key(fill), self._at(fill.offset, fill.length)) for fill in fills if fill.place]
        probes = [_key(fill) for fill in fills if not fill.place]
        began = time.monotonic()
        try:
            read = iter(lane.tier.get_each_into(reads) if reads else ())
            told = iter(lane.tier.contains_each(probes) if probes else ())
        except Exception as error:
            return [error] * len(fills)
        answers = [next(read if fill.place else told) for fill in fills]
        moved = (answer == fill.length and fill.place for answer, fill in zip(answers, fills, strict=True))
        if not any(moved) and not any(isinstance(answer, Exception) for answer in answers):
            lane.answered(time.monotonic() - began)
        return answers

    def _unsettled(self, number: int, asked: _Asked, answer: int | Exception | None) -> _Asked | None:
        """The question as the next lane is to be asked it; None if the scheduler side has its answer."""
        lane, fill = self._lanes[number], asked.fill
        try:
            if answer is None:
                self._count(f"{lane.name}_misses")
                return asked
            if isinstance(answer, Exception):
                raise answer
            if answer < entry.room(fill.identifier):
                self._judge(lane, _key(fill), answer)
            if answer != fill.length or not fill.place:
                self._post(_not_filled(fill, answer))
                return None
            self._take_in(number, fill)
            return None
        except entry.EntryError as error:
            return self._refused(lane, asked, error)
        except Exception as error:
            self._count(f"{lane.name}_read_errors")
            self._post(Notice(f"{lane.name}-read", f"{lane.name}: {error}"))
            lane.failed()
        return asked

    def _judge(self, lane: Lane, key: EncoderCacheKey, length: int) -> None:
        """Raise EntryError for what is too short to be an entry of this version; it may be one of another."""
        data = memoryview(bytearray(length))
        if lane.tier.get_into(key, data) == length:
            entry.verify(data, key)

    def _take_in(self, number: int, fill: Fill) -> None:
        """Verify what a lane has put into the place, and tell the scheduler side. EntryError for no entry of its."""
        lane, key, data = self._lanes[number], _key(fill), self._at(fill.offset, fill.length)
        spec = entry.verify(data, key)
        self._count(f"{lane.name}_hits")
        self._count(f"{lane.name}_read_bytes", len(data))
        self._promote(number, fill, data)
        self._post(Filled(fill.place, spec.rows, spec.width, spec.dtype, lane.name))

    def _refused(self, lane: Lane, asked: _Asked, error: entry.EntryError) -> _Asked:
        """What does not verify against itself is deleted, and made good by the next encode. What another version of
        the format may verify is nobody's to delete."""
        key = _key(asked.fill)
        if isinstance(error, entry.OtherVersion):
            self._count(f"{lane.name}_other_version")
            self._post(
                Notice(f"{lane.name}-version", f"{lane.name}: {key.object_name} is not for this engine: {error}")
            )
            return replace(asked, kept=True)
        self._count(f"{lane.name}_corrupt")
        self._post(Notice(f"{lane.name}-corrupt", f"{lane.name}: {key.object_name} does not verify ({error}); deleted"))
        self._delete(lane, key)
        return asked

    def _delete(self, lane: Lane, key: EncoderCacheKey) -> None:
        try:
            lane.tier.delete(key)
        except OSError as error:
            self._post(Notice(f"{lane.name}-delete", f"{lane.name}: {error}"))

    def _survey(self) -> None:
        """Have the lanes looked over that are due for it."""
        for number, lane in enumerate(self._lanes):
            if lane.due_at <= time.monotonic():
                lane.due_at = NEVER
                lane.scans.submit(self._survey_one, number, lane)

    def _survey_one(self, number: int, lane: Lane) -> None:
        try:
            if away := lane.survey(self._namespace):
                self._post(Notice(f"{lane.name}-back", f"{lane.name} answers again, after {away:.0f} s"))
                self._post(Back(number))
            self._weigh(lane)
        except Exception as error:
            self._post(Notice(f"{lane.name}-scan", f"{lane.name}: {error}"))
        os.eventfd_write(self._wake, 1)

    def _follow(self, lane: Lane) -> None:
        """Know of what neighbours write long before it is listed. A thread of its own: a listing takes its time."""
        while True:
            time.sleep(_NEWS_S)
            lane.follow(self._namespace)

    def _look(self) -> None:
        """Have the tiers looked at that may have been emptied, where that is due."""
        for look in self._looks:
            if look.due_at <= time.monotonic():
                look.due_at = NEVER
                self._lanes[look.number].scans.submit(self._look_at, look)

    def _look_at(self, look: _Look) -> None:
        """Tell the scheduler side what the tier's holdings are called, if that has changed. A tier that cannot say
        is asked again: whatever is wrong, those who need the tier find out."""
        lane = self._lanes[look.number]
        try:
            born = None if lane.rests else lane.tier.born()
            self._count(f"{lane.name}_looks")
        except Exception:
            born = None
        if born not in (None, look.born):
            look.born = born
            self._post(Born(look.number, born))
        look.due_at = time.monotonic() + look.every_s
        os.eventfd_write(self._wake, 1)

    def _weigh(self, lane: Lane) -> None:
        """How much a tier holds, for whoever asks: the main thread does no I/O to find out. On the tier's threads."""
        try:
            held = lane.tier.stored_bytes
        except OSError:
            return
        if held is not None:
            self._held[lane.name] = held

    def _owns(self, offset: int, length: int) -> bool:
        return arena.within(offset, length, len(self._memory))

    def _at(self, offset: int, length: int) -> memoryview:
        return self._memory[offset : offset + length]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A fill, and when it was asked for (monotonic seconds). `kept`: a tier has an entry of another version."""

    fill: Fill
    at: float
    kept: bool = False


@dataclass(slots=True)
class _Look:
    """When a tier is looked at next, to see whether it was emptied, and what its holdings were called at last."""

    number: int
    every_s: float
    due_at: float = 0.0
    born: str | None = None


@dataclass(slots=True)
class _Delivery:
    """An entry that a producer waits for: how many tiers have yet to take it, and whether all others did."""

    outstanding: int
    ok: bool = True


def _look_s(habits: Habits, start: Start) -> float:
    """How often a tier is looked at: where a request costs something, as often as it is listed."""
    return habits.refresh_s if habits.lookup is Lookup.CATALOG and not habits.local else start.look_s


def _key(message: Fill | Write | Saved) -> EncoderCacheKey:
    return EncoderCacheKey(message.namespace, message.identifier)


def _not_filled(fill: Fill, length: int = 0, kept: bool = False) -> NotFilled:
    return NotFilled(fill.place, fill.namespace, fill.identifier, length, kept)


def _disk(start: Start) -> Tier:
    from lmcache_ec.tiers.disk import DiskTier

    return DiskTier(Path(start.disk), start.disk_bytes, start.disk_free_bytes)


def _creator(link: Link) -> int:
    """The process that made the link: the engine's, on its scheduler side."""
    with socket.socket(fileno=os.dup(link.fileno())) as sock:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])


def main() -> None:
    """Detach from the engine's process tree and process group, then serve.

    A process that vLLM's front end kills with its tree must not take this one along, and Ctrl-C in a terminal reaches a
    whole foreground group: hence the fork and the group of its own. No session of its own: Linux schedules sessions as
    wholes where it has autogroups, and on two cores, which two workers keep busy, the small session of a process that
    mostly sleeps got no time for half a minute.
    """
    if os.fork():
        os._exit(0)
    os.setpgid(0, 0)
    # What was handed over is finished first: after the end of a terminal, and where a whole control group is terminated
    # (systemd, some container runtimes). The end of the engine's link ends this process, within drain_s.
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        Path("/proc/self/comm").write_text(PROCESS_NAME)
    except OSError:
        pass  # it is found by this name only where a container ends with its engine
    os.chdir("/")
    arena_fd, *links = (int(argument) for argument in sys.argv[1:])
    link, saver = (Link(socket.socket(fileno=fd)) for fd in links)
    Store(arena_fd, link, saver).run()
    os._exit(0)  # a thread may still be stuck in a tier


if __name__ == "__main__":
    main()
