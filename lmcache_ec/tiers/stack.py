# SPDX-License-Identifier: Apache-2.0
"""The ordered tiers of one process: look-up in order, write-through, promotion, surveys.

Who owns what, and when it may be freed:

1. The stack owns lanes, threads and presence filter, from `Stack` to `close`. Writes: `writes` (write_through.py).
2. `Wanted.into` is the caller's. One thread of one lane at a time writes into it, until `answer` is called, exactly
   once; in synchronous calls, until they return.
3. The answer is `Found` only for what verifies; until then the buffer's content must not be used.
4. An entry that does not verify against itself is deleted from the tier that had it, and the next tier is asked. What
   another version of the format may verify is kept. Where entries are signed, nothing is deleted: a read does not show
   whether what it read is still there. It is a miss, and the next write replaces it (write_through.py).
5. Promotion copies before the answer: the buffer is not read again.
6. The caller drives surveys: `due_at` is when one is due, `survey_due` starts it on the lanes' own threads, and `wake`
   is called when `due_at` or the number of jobs may have changed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from lmcache_ec import entry
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.presence import PresenceWriter
from lmcache_ec.signing import SigningKey
from lmcache_ec.tiers.awaited import AwaitedTier
from lmcache_ec.tiers.base import Landing, Tier, TierUnreachable, message
from lmcache_ec.tiers.journal import Journal
from lmcache_ec.tiers.lane import NEVER, Habits, Lane, lane_names
from lmcache_ec.tiers.write_through import WriteThrough

_NEWS_S = 0.25
"""How often new writes of neighbours on the folder are read."""
_COPIED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Found:
    """The buffer holds the entry, verified; `tier` had it, and took `seconds`."""

    spec: entry.TensorSpec
    tier: str
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """An entry of `length` bytes exists, but was not read: there was no buffer, or one of another length."""

    length: int


@dataclass(frozen=True, slots=True)
class Absent:
    """No tier that could be asked has it. `kept`: one has an entry of another version under this name."""

    kept: bool = False


Answer = Found | Elsewhere | Absent


def _ignore(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Wanted:
    """A requested entry, and the buffer of its length to read it into; without one, only its length is wanted.

    `insist`: ask for it even if a listing lacks it. `until` (monotonic seconds): when the caller stops waiting.
    `tiers`: only these are asked (a bit each; 0: all).
    `promoted` is called with the outcome of writing it to a tier before the one that had it.
    """

    key: EncoderCacheKey
    into: memoryview | None = None
    answer: Callable[[Answer], None] = _ignore
    promoted: Callable[[int, Landing], None] = _ignore
    insist: bool = False
    until: float = NEVER
    kept: bool = False
    tiers: int = 0


class Stack:
    """Tiers in order. Any thread may call it; I/O runs on the lanes' threads, or in the caller's where stated.

    `wake` (`due_at` may have changed), `job_ended` (a write; `wake` if it is not given) and `back` (a tier answers
    again) are called from any thread.
    """

    def __init__(
        self,
        tiers: Sequence[tuple[Tier, Habits]],
        journal: Journal,
        namespace: str = "",
        *,
        wake: Callable[[], None] = _ignore,
        job_ended: Callable[[], None] | None = None,
        back: Callable[[int], None] = _ignore,
        copied_bytes: int = _COPIED_BYTES,
        signing: SigningKey | None = None,
    ) -> None:
        names = lane_names([tier.name for tier, _ in tiers])
        self.namespace = namespace
        """The one that is listed."""
        self.presence = PresenceWriter.create(names)
        self.lanes = [
            Lane(tier, name, self.presence, habits) for (tier, habits), name in zip(tiers, names, strict=True)
        ]
        for lane in self.lanes:
            lane.tier.evicted = partial(self._evicted, lane.name)
            lane.signing = signing
            if isinstance(lane.tier, AwaitedTier):
                lane.leave_alone()
        self.signing = signing
        """The key that signs every entry, if they are signed."""
        self.writes = WriteThrough(self.lanes, journal, job_ended or wake, back, copied_bytes, signing)
        self._journal = journal
        self._wake = wake
        self._back = back
        self._closed = threading.Event()

    # ---- look up

    def fetch(self, wanted: Sequence[Wanted], number: int = 0) -> None:
        """Ask the tiers from `number` on in order, each on its own threads; several entries at once where that helps.
        Each entry is answered once, from any thread."""
        asked: dict[int, list[Wanted]] = {}
        for one in wanted:
            following = self.worth_asking(one.key, number, one.insist, one.tiers)
            if following is None:
                self._journal.count("fill_misses")
                one.answer(Absent(one.kept))
            else:
                asked.setdefault(following, []).append(one)
        for following, together in asked.items():
            for share in self.lanes[following].shares(together):
                self.lanes[following].reads.submit(self._fetch_from, following, share)

    def _fetch_from(self, number: int, wanted: Sequence[Wanted]) -> None:
        now = time.monotonic()
        awaited = [one for one in wanted if now <= one.until]
        for one in wanted:
            if now > one.until:
                self._journal.count("fills_late")  # it was queued until its caller had stopped waiting
                one.answer(Absent())
        unanswered: list[Wanted] = []
        answers = self.read(number, awaited)
        seconds = time.monotonic() - now
        for one, answer in zip(awaited, answers, strict=True):
            if isinstance(answer, Absent):
                unanswered.append(replace(one, kept=one.kept or answer.kept))
                continue
            if isinstance(answer, Found) and one.into is not None:
                answer = replace(answer, seconds=seconds)
                self.writes.promote(number, one.key, one.into, one.promoted)
            one.answer(answer)
        self.fetch(unanswered, number + 1)

    def worth_asking(self, key: EncoderCacheKey, number: int = 0, insist: bool = False, tiers: int = 0) -> int | None:
        """The first tier from `number` on, and of `tiers`, that is worth asking for this entry."""
        digest = key.digest
        later = (index for index in range(number, len(self.lanes)) if not tiers or tiers >> index & 1)
        return next((index for index in later if self.lanes[index].asks(digest, insist)), None)

    def read(self, number: int, wanted: Sequence[Wanted]) -> list[Answer]:
        """Ask one tier, in the calling thread. An entry that cannot be read is absent, and the error is reported."""
        lane = self.lanes[number]
        answers: list[Answer] = []
        for one, answer in zip(wanted, self._asked(lane, wanted), strict=True):
            if answer is None:
                self._journal.count(f"{lane.name}_misses")
            answers.append(self._judged(lane, one, answer) if isinstance(answer, int) else Absent())
        return answers

    def lengths(self, number: int, keys: Sequence[EncoderCacheKey]) -> list[int | None]:
        """The length of each entry in one tier, None also if it did not answer. In the calling thread."""
        found = self._asked(self.lanes[number], [Wanted(key) for key in keys])
        return [None if isinstance(length, Exception) else length for length in found]

    def _asked(self, lane: Lane, wanted: Sequence[Wanted]) -> list[int | Exception | None]:
        """A tier's answer for each entry: its length, None if it is absent, or an error, which is reported. An entry of
        its buffer's length has been read into it."""
        reads = [(one.key, one.into) for one in wanted if one.into is not None]
        probes = [one.key for one in wanted if one.into is None]
        began = time.monotonic()
        try:
            read = iter(lane.tier.get_each_into(reads) if reads else ())
            probed = iter(lane.tier.contains_each(probes) if probes else ())
            found: list[int | Exception | None] = [next(probed if one.into is None else read) for one in wanted]
        except Exception as failure:
            found = [failure] * len(wanted)
        took_s = time.monotonic() - began
        moved = any(one.into is not None and length == len(one.into) for one, length in zip(wanted, found, strict=True))
        if moved:
            self._journal.took(f"{lane.name}_read_ns", took_s)
        errors = [length for length in found if isinstance(length, Exception)]
        for one_error in errors:
            self._unread(lane, one_error)
        if len(errors) < len(found):
            self._welcome(lane, lane.read(None if moved or errors else took_s))
        elif errors:
            lane.read_failed(next((error for error in errors if isinstance(error, TierUnreachable)), errors[0]))
            self._wake()
        return found

    def _unread(self, lane: Lane, error: Exception) -> None:
        self._journal.count(f"{lane.name}_read_errors")
        self._journal.report(f"{lane.name}-read", f"{lane.name}: {message(error)}")

    def _welcome(self, lane: Lane, away_s: float) -> None:
        """Ask a tier again that had been resting for `away_s`."""
        if away_s:
            self._journal.report(f"{lane.name}-back", f"{lane.name} answers again, after {away_s:.0f} s")
            self._back(self.lanes.index(lane))
            self._wake()

    def _judged(self, lane: Lane, wanted: Wanted, length: int) -> Answer:
        """Verify what a tier has under this name."""
        key, buffer = wanted.key, wanted.into
        try:
            if length < entry.room(key.identifier):  # too short for an entry of this version; perhaps one of another
                buffer = memoryview(bytearray(length))
                length = lane.tier.get_into(key, buffer) or 0
            if buffer is None or len(buffer) != length:
                return Elsewhere(length)
            spec = entry.verify(buffer, key, self.signing)
        except entry.EntryError as error:
            (self.refuse if self.signing is None else self._disbelieve)(lane, key, error)
            return Absent(isinstance(error, entry.OtherVersion))
        except Exception as error:
            self._unread(lane, error)
            return Absent()
        lane.trust(key.digest)
        self._journal.count(f"{lane.name}_hits")
        self._journal.count(f"{lane.name}_read_bytes", length)
        return Found(spec, lane.name)

    def refuse(self, lane: Lane, key: EncoderCacheKey, error: entry.EntryError) -> None:
        """An entry that does not verify against itself is deleted, and replaced by the next encode. One that another
        version of the format may verify is not deleted."""
        if isinstance(error, entry.OtherVersion):
            self._journal.count(f"{lane.name}_other_version")
            text = f"{lane.name}: {key.object_name} is not for this engine: {error}"
            self._journal.report(f"{lane.name}-version", text)
            return
        self._journal.count(f"{lane.name}_corrupt")
        text = f"{lane.name}: {key.object_name} does not verify ({error}); deleted"
        self._journal.report(f"{lane.name}-corrupt", text)
        self.delete(lane, key)

    def _disbelieve(self, lane: Lane, key: EncoderCacheKey, error: entry.EntryError) -> None:
        """Where entries are signed: anyone may have put it there, and it may have been replaced since it was read."""
        kind = "forged" if error.reason is entry.Reason.SIGNATURE else "corrupt"
        self._journal.count(f"{lane.name}_{kind}")
        text = f"{lane.name}: {key.object_name} is not trusted ({error}); it is a miss, and the next encode replaces it"
        self._journal.report(f"{lane.name}-{kind}", text)
        lane.doubt(key.digest)

    def delete(self, lane: Lane, key: EncoderCacheKey) -> None:
        if lane.tier.read_only:
            return
        try:
            if lane.tier.delete(key):
                lane.lost()
        except Exception as error:
            self._journal.count(f"{lane.name}_delete_errors")
            self._journal.report(f"{lane.name}-delete", f"{lane.name}: {message(error)}")

    def _evicted(self, tier: str, length: int) -> None:
        self._journal.count(f"{tier}_evictions")
        self._journal.count(f"{tier}_evicted_bytes", length)

    # ---- survey

    @property
    def due_at(self) -> float:
        """When `survey_due` has something to do (monotonic seconds)."""
        return min((min(lane.due_at, lane.probe_at) for lane in self.lanes), default=NEVER)

    def survey_due(self) -> None:
        """Start the surveys of lanes, and probes of failed ones, that are due; on their own threads."""
        for lane in self.lanes:
            reads, writes = lane.due_probes()
            if reads:
                lane.probes.submit(self._probe_reads, lane)
            if writes:
                lane.probes.submit(self._probe_writes, lane)
            if lane.due_at <= time.monotonic():
                lane.due_at = NEVER
                lane.scans.submit(self._survey, lane)

    def _survey(self, lane: Lane) -> None:
        try:
            lane.survey(self.namespace)
            self.writes.weigh(lane)
            self.writes.report_notice(lane)
        except Exception as error:
            self._journal.count(f"{lane.name}_survey_errors")
            self._journal.report(f"{lane.name}-scan", f"{lane.name}: {message(error)}")
        self._wake()

    def _probe_reads(self, lane: Lane) -> None:
        try:
            self._welcome(lane, lane.probe_reads(self.namespace))
        except Exception as error:
            self._journal.report(f"{lane.name}-read", f"{lane.name}: {message(error)}")
        self._wake()

    def _probe_writes(self, lane: Lane) -> None:
        refusal = lane.probe_writes()
        if refusal:
            self.writes.report_read_only(lane, refusal)
        elif refusal is not None:
            self._back(self.lanes.index(lane))
        self._wake()

    def relist(self, namespace: str) -> None:
        """From now on another namespace is in use."""
        self.namespace = namespace
        for lane in self.lanes:
            lane.relist(namespace)

    def follow_neighbours(self) -> None:
        """Learn what others write to local tiers long before it is listed. On threads of its own: a listing takes
        time."""
        for lane in self.lanes:
            if lane.habits.local:
                threading.Thread(target=self._follow, args=(lane,), daemon=True).start()

    def _follow(self, lane: Lane) -> None:
        while not self._closed.wait(_NEWS_S):
            lane.follow(self.namespace)

    def announce(self) -> None:
        """Publish what was written here and is not yet published. In the calling thread."""
        for lane in self.lanes:
            if not lane.rests:
                try:
                    lane.tier.announce()
                except Exception as error:
                    self._journal.report(f"{lane.name}-write", f"{lane.name}: {message(error)}")

    def close(self) -> None:
        """Release the tiers. What is still in progress fails, or ends with the process."""
        self._closed.set()
        for lane in self.lanes:
            for pool in (lane.reads, lane.writes, lane.scans, lane.probes):
                pool.shutdown(wait=False, cancel_futures=True)
            lane.tier.close()
