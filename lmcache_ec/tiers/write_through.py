# SPDX-License-Identifier: Apache-2.0
"""Writes an entry to several tiers, and reports the outcome of each.

Who owns what, and when it may be freed:

1. `Put.data` is the caller's. The tiers read it from `write` until `released` is called, which happens exactly once,
   on any thread, after the last of them: from then on nothing here touches it.
2. If the first tier is local it is written first, alone. Once it has taken the entry, `data` is released, and the
   tiers after it get it from its file: one of them reads and verifies it, for all (`_Copy`). Otherwise, and if the
   local tier does not take the entry, all others read `data` in parallel; none waits for another.
3. Copies are ours, both those of files and those that promotion makes. One is dropped after its last use. Their total
   size is bounded by `copied_bytes`: beyond that a file is read again, and nothing is promoted.
4. Where entries are signed, an existing entry of the same name is read, and replaced unless it is signed, too. Its
   replacement can be no worse, whichever process replaced it meanwhile.
5. `landed` is called once for each wanted tier, before `released` if that tier read `data`; `done` once, after all.
   Neither is called for what is still queued when the lanes are closed: the process is about to end.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from lmcache_ec import entry
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.signing import SigningKey
from lmcache_ec.tiers.base import Held, Landing, TierError, WritesRefused, message
from lmcache_ec.tiers.journal import Journal
from lmcache_ec.tiers.lane import Lane

_REPLACEMENTS = 3
_PLAUSIBLE_BYTES = 256 << 20
"""An existing value longer than this, and than the new entry, is assumed not to be an entry without being read."""


def _ignore(*_: object) -> None:
    pass


@dataclass(eq=False, slots=True)
class Put:
    """An entry being written to tiers.

    `tiers`: which ones, a bit each in their order; 0: all. `released` is called with whether a tier has it.
    """

    key: EncoderCacheKey
    data: memoryview
    tiers: int = 0
    landed: Callable[[int, Landing], None] = _ignore
    released: Callable[[bool], None] = _ignore
    done: Callable[[], None] = _ignore
    cancelled: bool = False
    """May be set at any time: the entry is removed again from each tier that takes or took it."""
    took: int = 0
    """The tiers that have it, a bit each."""
    _readers: int = 1
    _outstanding: int = 1
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, readers: int = 0, tiers: int = 0) -> None:
        """`readers` more lanes read `data`; `tiers` more tiers have to answer."""
        with self._lock:
            self._readers += readers
            self._outstanding += tiers

    def end(self, readers: int = 0, tiers: int = 0) -> None:
        """As many fewer."""
        with self._lock:
            self._readers -= readers
            self._outstanding -= tiers
            released, done = readers and not self._readers, tiers and not self._outstanding
        if released:
            self.released(self.took != 0)
        if done:
            self.done()

    def land(self, number: int, landing: Landing, readers: int = 0) -> None:
        """A tier has answered."""
        if landing is Landing.TOOK:
            with self._lock:
                self.took |= 1 << number
        self.landed(number, landing)
        self.end(readers, 1)


class WriteThrough:
    """The writes of one stack of tiers. Any thread may call it; tiers are written on their own threads.

    `job_ended` is called whenever `jobs` has decreased, `back` with the number of a tier that takes writes again.
    `_lock` guards the numbers, and is never held across I/O.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        journal: Journal,
        job_ended: Callable[[], None],
        back: Callable[[int], None],
        copied_bytes: int,
        signing: SigningKey | None = None,
    ) -> None:
        self.jobs = 0
        """Writes, each to one tier, that are queued or in progress."""
        self.held: dict[str, int] = {}
        """Tier -> bytes that all namespaces take in it, where that is known."""
        self._lanes = lanes
        self._journal = journal
        self._job_ended = job_ended
        self._back = back
        self._copies = _Budget(copied_bytes)
        self._signing = signing
        self._under_way: dict[EncoderCacheKey, list[Put]] = {}
        self._lock = threading.Lock()

    def write(self, put: Put) -> None:
        """Write through (see the top of this file). Returns at once."""
        numbers = [number for number in range(len(self._lanes)) if not put.tiers or put.tiers >> number & 1]
        self._begin(put, len(numbers))
        numbers = self._without_read_only(put, numbers)
        if numbers and self._lanes[numbers[0]].habits.local:
            first, *numbers = numbers
            if self._enqueue(first, len(put.data), partial(self._write_first, put, first, numbers)):
                return
            put.land(first, Landing.FAILED)
        self._spread(put, numbers)

    def promote(
        self, number: int, key: EncoderCacheKey, data: memoryview, landed: Callable[[int, Landing], None] = _ignore
    ) -> None:
        """Write what tier `number` had to the tiers before it, from a copy, if there is room for one."""
        if not number:
            return
        length = len(data)
        if not self._copies.take(length):
            for earlier in range(number):
                self._journal.count("promotions_dropped")
                landed(earlier, Landing.FAILED)
            return
        put = Put(key, memoryview(bytes(data)), landed=landed, released=lambda _: self._copies.give_back(length))
        self._begin(put, number)
        self._spread(put, self._without_read_only(put, range(number)))

    def writing(self, key: EncoderCacheKey) -> bool:
        """Whether a tier has yet to answer for this entry."""
        return key in self._under_way

    def cancel(self, key: EncoderCacheKey) -> bool:
        """Remove an entry again from each tier that it is being written to. Whether there is such a write."""
        with self._lock:
            puts = self._under_way.get(key, [])
            for put in puts:
                put.cancelled = True
        return bool(puts)

    def _begin(self, put: Put, tiers: int) -> None:
        with self._lock:
            self._under_way.setdefault(put.key, []).append(put)
        put.begin(tiers=tiers)
        put.done = partial(self._end, put, put.done)

    def _end(self, put: Put, done: Callable[[], None]) -> None:
        with self._lock:
            puts = self._under_way[put.key]
            puts.remove(put)
            if not puts:
                del self._under_way[put.key]
        done()

    def _without_read_only(self, put: Put, numbers: Sequence[int]) -> list[int]:
        """The tiers not configured as read only; those that are refuse at once."""
        written = []
        for number in numbers:
            if self._lanes[number].tier.read_only:
                put.land(number, Landing.REFUSED)
            else:
                written.append(number)
        return written

    def _spread(self, put: Put, numbers: Sequence[int]) -> None:
        """Have all of these tiers read `data`, in parallel."""
        put.begin(readers=len(numbers))
        for number in numbers:
            if not self._enqueue(number, len(put.data), partial(self._write_data, put, number)):
                put.land(number, Landing.FAILED, readers=1)
        put.end(readers=1, tiers=1)

    def _write_data(self, put: Put, number: int) -> None:
        put.land(number, self._put(number, put, put.data), readers=1)

    def _write_first(self, put: Put, number: int, later: Sequence[int]) -> None:
        landing = self._put(number, put, put.data)
        if landing is not Landing.TOOK:
            put.land(number, landing)
            self._spread(put, later)
            return
        length = len(put.data)
        put.land(number, landing)
        put.end(readers=1)
        copy = _Copy(partial(self._file, number, put.key, length), length, len(later), self._copies)
        for following in later:
            if not self._enqueue(following, length, partial(self._write_copy, put, following, copy)):
                copy.leave()
                put.land(following, Landing.FAILED)
        put.end(tiers=1)

    def _write_copy(self, put: Put, number: int, copy: _Copy) -> None:
        landing = Landing.FAILED
        try:
            if (data := copy.data()) is not None:
                landing = self._put(number, put, data)
        finally:
            copy.leave()
            put.land(number, landing)

    def _file(self, number: int, key: EncoderCacheKey, length: int) -> memoryview | None:
        """What a tier took just now; None if it was evicted since, or does not verify: others should not get it."""
        data = memoryview(bytearray(length))
        try:
            if self._lanes[number].tier.get_into(key, data) != length:
                return None
            entry.verify(data, key, self._signing)
        except (OSError, entry.EntryError) as error:
            name = self._lanes[number].name
            text = f"{name}: {key.object_name} cannot be copied to other tiers: {message(error)}"
            self._journal.report(f"{name}-copy", text)
            return None
        return data

    def _put(self, number: int, put: Put, data: memoryview) -> Landing:
        """Write to one tier. An entry of equal length already there counts as this one, unless entries are signed."""
        lane, journal, key = self._lanes[number], self._journal, put.key
        if put.cancelled:
            return Landing.FAILED
        if not lane.takes_writes:  # since it was queued
            journal.count(f"{lane.name}_writes_dropped")
            return Landing.FAILED
        try:
            began = time.monotonic()
            new = stored = lane.tier.put(key, data)
            if not stored and self._signing is not None:
                stored, there = self._replaced(lane, key, data, self._signing)
            else:
                there = stored or lane.tier.contains(key) == len(data)
            if stored:
                journal.took(f"{lane.name}_write_ns", time.monotonic() - began)
            if put.cancelled:  # meanwhile
                lane.tier.delete(key)
                return Landing.FAILED
            journal.count(f"{lane.name}_writes" if stored else f"{lane.name}_present")
            journal.count(f"{lane.name}_written_bytes", len(data) if stored else 0)
            if stored and lane.wrote():
                journal.report(f"{lane.name}-writes", f"{lane.name} accepts writes again")
                self._back(number)
            self.weigh(lane)
            self.report_notice(lane)
            if there:
                lane.has(key.digest, new)
            return Landing.TOOK if there else Landing.REFUSED
        except Exception as error:
            return self._refused(lane, error)

    def _replaced(self, lane: Lane, key: EncoderCacheKey, data: memoryview, signing: SigningKey) -> tuple[bool, bool]:
        """Put an entry in place of something unsigned: whether this call wrote it, and whether one of its length is
        there."""
        for _ in range(_REPLACEMENTS):
            held, signed = self._in_the_way(lane, key, len(data), signing)
            if held is None:
                if lane.tier.put(key, data):
                    return True, True
            elif signed:
                return False, held.length == len(data)
            elif lane.tier.replace(key, data, held):
                self._journal.count(f"{lane.name}_replaced")
                what = f"{held.length} bytes that are not a signed entry of this name"
                text = f"{lane.name}: {key.object_name}: {what}, were replaced"
                self._journal.report(f"{lane.name}-replaced", text)
                return True, True
        raise TierError(errno.EAGAIN, f"{key.object_name} is not written: others keep writing and removing it")

    def _in_the_way(
        self, lane: Lane, key: EncoderCacheKey, length: int, signing: SigningKey
    ) -> tuple[Held | None, bool]:
        """What has the name of an entry of `length` bytes, without its bytes, and whether it is signed. A longer value
        uses the budget for copies: others who may write to a store must not fill this process' memory."""
        held = lane.tier.held(key, length)
        if held is None or held.data is not None or not length < held.length <= _PLAUSIBLE_BYTES:
            return held, held is not None and _is_signed(held, key, signing)
        if not self._copies.take(held.length):
            raise TierError(errno.EAGAIN, f"{key.object_name} is not written: no memory to read the existing value")
        try:
            longer = lane.tier.held(key, held.length)
            signed = longer is not None and _is_signed(longer, key, signing)
            return longer and replace(longer, data=None), signed
        finally:
            self._copies.give_back(held.length)

    def _refused(self, lane: Lane, error: Exception) -> Landing:
        self._journal.count(f"{lane.name}_write_errors")
        known = lane.read_only
        lane.write_failed(error)
        if lane.read_only and not known:
            self.report_read_only(lane, message(error))
        elif lane.habits.local or not isinstance(error, WritesRefused):  # a remote's is one line, once it is certain
            self._journal.report(f"{lane.name}-write", f"{lane.name}: {message(error)}")
        too_large = getattr(error, "errno", None) == errno.EFBIG
        return Landing.REFUSED if too_large else Landing.FAILED

    def report_read_only(self, lane: Lane, why: str) -> None:
        text = f"{lane.name}: read only; now and then it is tested whether it accepts writes again: {why}"
        self._journal.report(f"{lane.name}-writes", text)

    def report_notice(self, lane: Lane) -> None:
        """Report a tier's notice to the user if it has changed. On the tier's threads."""
        if lane.new_notice:
            self._journal.report(f"{lane.name}-notice", lane.tier.notice)

    def weigh(self, lane: Lane) -> None:
        """Record how much a tier holds, for callers that must not wait for I/O. On the tier's threads."""
        try:
            held = lane.tier.stored_bytes
        except OSError:
            return
        if held is not None:
            self.held[lane.name] = held

    def _enqueue(self, number: int, length: int, job: Callable[[], None]) -> bool:
        """Queue this write for a tier's threads. False if the tier rests, or its queue is full."""
        lane = self._lanes[number]

        def run() -> None:
            try:
                job()
            except Exception as error:
                self._journal.report("job", f"{type(error).__name__}: {error}")
            finally:
                self._add_job(-1)
                self._job_ended()

        self._add_job(1)
        if lane.enqueue(length, run):
            return True
        self._add_job(-1)
        self._journal.count(f"{lane.name}_writes_dropped")
        return False

    def _add_job(self, number: int) -> None:
        with self._lock:
            self.jobs += number


def _is_signed(held: Held, key: EncoderCacheKey, signing: SigningKey) -> bool:
    try:
        if held.data is not None:
            entry.verify(held.data, key, signing)
        return held.data is not None
    except entry.EntryError:
        return False


class _Budget:
    """A number of bytes, shared by all who take from it. Any thread."""

    def __init__(self, limit_bytes: int) -> None:
        self._left = limit_bytes
        self._lock = threading.Lock()

    def take(self, length: int) -> bool:
        with self._lock:
            enough = length <= self._left
            if enough:
                self._left -= length
        return enough

    def give_back(self, length: int) -> None:
        with self._lock:
            self._left += length


class _Copy:
    """An entry from a file, read once for all its users if the budget has room to keep it until the last one.

    `_lock` is held while the file is read, so that the others wait for the one that reads it: only threads that write
    to remotes do.
    """

    def __init__(self, read: Callable[[], memoryview | None], length: int, users: int, budget: _Budget) -> None:
        self._read = read
        self._length = length
        self._users = users
        self._budget = budget
        self._kept: memoryview | None = None
        self._lock = threading.Lock()

    def data(self) -> memoryview | None:
        with self._lock:
            if self._kept is not None:
                return self._kept
            data = self._read()
            if data is not None and self._users > 1 and self._budget.take(self._length):
                self._kept = data
            return data

    def leave(self) -> None:
        """One user fewer."""
        with self._lock:
            self._users -= 1
            if not self._users and self._kept is not None:
                self._kept = None
                self._budget.give_back(self._length)
