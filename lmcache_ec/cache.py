# SPDX-License-Identifier: Apache-2.0
"""The engine's side of the cache: look up, prefetch, save, and the three parties' links kept going."""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lmcache_ec import arena
from lmcache_ec.book import Book
from lmcache_ec.channel import (
    Attach,
    Attached,
    Back,
    Born,
    Enter,
    Entered,
    Fill,
    Filled,
    Hello,
    Landed,
    Ledger,
    Link,
    LinkClosed,
    Locate,
    Located,
    NotFilled,
    Notice,
    Ping,
    Pong,
    Report,
    Sealed,
    Segment,
    SegmentReady,
    Start,
    StoreLink,
    ToStore,
    WeightsReport,
    Write,
    Written,
    rank_address,
    same_user,
)
from lmcache_ec.complaints import Complaints
from lmcache_ec.config import ConfigError, EncoderCacheConfig
from lmcache_ec.entry import TensorSpec, entry_length
from lmcache_ec.host_memory import Growing, fitting
from lmcache_ec.incarnation import Incarnation
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.place import Place, aligned
from lmcache_ec.presence import PresenceFilter
from lmcache_ec.recent import Recent
from lmcache_ec.tiers.kinds import environment_of
from lmcache_ec.weights import Held, Home, Weights

_logger = logging.getLogger(__name__)

_Take = Callable[[object, list[int], float], None]
"""Acts on a message: the message, its descriptors, the time of the pass."""

_PING_INTERVAL_S = 1.0
_SLOW_PONG_S = 5.0
"""A store process that has not answered a ping for this long, and for longer than a request would wait for an entry, is
asked nothing new."""

_OPENING_S = 20.0
"""How much longer a store process may be silent before its first words: it opens its tiers, for up to eight seconds."""

_LOOK_S = 2.0
"""Between two looks whether a tier was emptied."""

_MISS_REMEMBERED_S = 2.0
MISFIT_REMEMBERED_S = 60.0
"""How long nobody asks again for an entry that is there and of no use here."""

_ASKED_AGAIN_S = 0.05
"""Between two questions about an entry that a producer has announced."""

_FETCHES_AT_ONCE = 4096
"""While a tier answers nothing and passes for alive, no more than this waits for it."""

_RESTART_PAUSE_S = (0.0, 1.0, 5.0, 30.0)
"""Before each next start of a store process that keeps ending without ever having served."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What the cache has to know of the engine that it serves.

    `name` is one engine's on this host, the same on the scheduler side and in every rank. `largest_entry_bytes` bounds
    an entry; `ranks` is how many processes load (rank 0 saves). `namespace` is that of the weights of the start; with
    `watched` the ranks report what weights they have, and nothing is promised before they have done so. One that
    `saves` nothing, a consumer, never gives a tier again what that has lost.
    """

    name: str
    namespace: str
    producer: str
    ranks: int
    largest_entry_bytes: int
    saves: bool = True
    watched: bool = False


@dataclass(slots=True, eq=False)
class Probe:
    """A question which tiers have an entry, asked at a time (monotonic seconds); `held` is the answer, a bit each."""

    asked_at: float
    held: int | None = None


class EncoderCache:
    """The scheduler side's cache of one engine. Runs on the scheduler's thread alone; no lock.

    `drain` once a scheduling pass keeps everything going; no call waits for I/O. The constructor may wait, for at most
    `start_timeout_s`, until the store process serves.
    """

    def __init__(self, config: EncoderCacheConfig, engine: Engine) -> None:
        """Raises ConfigError where a tier cannot be opened, OSError where memory or processes cannot be had."""
        self.inert = ""
        """Why the cache does nothing any more; empty while it works."""
        self.counts = {"filtered": 0, "fetches": 0, "fetch_misses": 0, "probes": 0, "weight_changes": 0}
        self.weights = Weights(engine.ranks if engine.watched else 0, engine.namespace, config.persist_updated_weights)
        self.held: Held | None = self.weights.held
        """The weights that everything here is of."""
        self.in_doubt = self.held is None
        """Whether the ranks may have other weights by now: nothing here may be used, and nothing may be added."""
        self._home = Home(engine.namespace, True)
        self._listed = engine.namespace  # what the store process lists
        self._enters = False  # whether the presence filter may still be about another namespace
        self._config = config
        self._engine = engine
        fit = fitting(aligned(config.max_local_cpu_bytes))
        if fit.message:
            _logger.warning("encoder cache: %s", fit.message)
        capacity = fit.bytes
        self._growing = Growing()
        segment = max(arena.SEGMENT_BYTES, aligned(engine.largest_entry_bytes))
        self.book = Book(capacity, segment, engine.ranks)
        self._largest = max(engine.largest_entry_bytes, self.book.segment_bytes)
        self._arena_id = secrets.token_hex(8)
        self._complaints = Complaints(_logger)
        self._presence: PresenceFilter | None = None
        self._fetches: dict[str, int] = {}  # identifier -> times asked
        self._probes: dict[int, tuple[str, Probe]] = {}  # not yet answered
        self._asked = 0
        self._tiers: list[str] = []
        self._born: dict[int, str] = {}  # tier -> what it was called when it was last looked at
        self._put_off: deque[tuple[str, int]] = deque()  # there, and waiting for the budget of fills
        self._misses: Recent[str] = Recent(_MISS_REMEMBERED_S)
        self._unusable: Recent[str] = Recent(MISFIT_REMEMBERED_S)
        self._attached: set[int] = set()
        self._segment: tuple[int, int] | None = None
        self._segment_untold: list[Link] = []
        self._segment_acks = 0
        self._revision = -1
        self._failures = 0
        self._restart_at = 0.0
        self._lost = 0  # number of the last store process that was lost
        self._closed = False
        self._ping = 0
        self._ping_waits = False
        self._ping_sent = self._ping_answered = time.monotonic()
        self._old: list[Incarnation] = []
        self._arena_fd = arena.create(capacity)
        self._store = self._incarnation(1)
        self._ranks: list[Link] = []
        self._rank_takers: list[tuple[Link, _Take]] = []
        try:
            self._connect_ranks()
            self._begin_store()
            self._await_hello()
        except BaseException:
            self.close()
            raise

    # ---- for the adapter

    @property
    def arena_id(self) -> str:
        """Repeated in every metadata: a rank that is attached to another arena copies nothing."""
        return self._arena_id

    @property
    def ready(self) -> bool:
        """Whether every rank has mapped the arena and told its weights, and the store process serves."""
        attached = len(self._attached) == self._engine.ranks and self.weights.started
        return attached and self.book.opened and self._presence is not None

    @property
    def namespace(self) -> str:
        """Of the entries for the weights that the ranks have."""
        return self._home.namespace

    @property
    def persists(self) -> bool:
        """Whether these entries leave memory at all."""
        return self._home.persists and bool(self._config.local_disk or self._config.remotes)

    def follow_weights(self) -> bool:
        """Act on what the ranks have reported of their weights. Between passes. True if all that was held is forgotten.

        What is on its way is finished under the name that it began with, and is nobody's here (see `Book.forget_all`).
        """
        self.weights.moved = False
        held = self.weights.held
        self.in_doubt = held is None
        if held is None:
            return False
        self.held = held
        home = self.weights.home(held)
        if home == self._home:
            return False
        self._home = home
        self._enters = home.persists and home.namespace != self._listed
        self._enter()
        forgotten = self.book.forget_all()
        self._fetches.clear()
        self._put_off.clear()
        self._misses.clear()
        self._unusable.clear()
        self._probes.clear()
        self.counts["weight_changes"] += 1
        kept = f"namespace {home.namespace}" if home.persists else "memory only, see ec.persist_updated_weights"
        self._complaints.warn(
            "weights", f"the encoder's weights have changed; {forgotten} entries are forgotten, new ones go to {kept}"
        )
        return True

    def fetch(self, identifier: str, length: int, now: float, announced: bool = False) -> bool:
        """Start bringing an entry of `length` bytes (0: unknown) into the arena. False if none can come.

        Single-flight: while one is under way, the answer is True and nothing more is asked. One that was `announced`
        may have been written after the last listing, or be about to be: it is asked for, again and again, until the
        caller has waited long enough.
        """
        if self.under_way(identifier, now):
            return True
        presence = self._presence
        if presence is None or not self.ready or not self.persists or not self._responsive(now):
            return False
        if len(self._fetches) >= _FETCHES_AT_ONCE or length > self.book.segment_bytes:
            return False
        if self._unusable.holds(identifier, now):
            return False
        if announced:
            just_missed = self._misses.age(identifier, now) < _ASKED_AGAIN_S
            return just_missed or self._ask(identifier, length, certain=False, insist=True)
        if self._misses.holds(identifier, now):
            return False
        key = EncoderCacheKey(self.namespace, identifier)
        if presence.all_complete and not self._enters and not presence.may_contain(key.digest):
            self.counts["filtered"] += 1
            return False
        return self._ask(identifier, length, certain=False)

    def probe(self, identifier: str, spec: TensorSpec | None, now: float) -> Probe:
        """Start finding out which of the tiers that consumers reach have the entry, recognized by its length (None:
        it could not be). What is known at once, or cannot be found out, is answered at once."""
        probe = Probe(now)
        presence = self._presence
        if spec is None or presence is None or not self.ready or not self.persists or not self._responsive(now):
            return self._located(identifier, probe, 0)
        key = EncoderCacheKey(self.namespace, identifier)
        if presence.all_complete and not self._enters and not presence.may_contain(key.digest):
            self.counts["filtered"] += 1
            return self._located(identifier, probe, 0)
        number = self._asked + 1
        question = Locate(number, self.namespace, identifier, entry_length(identifier, spec), self._reached)
        if len(self._probes) >= _FETCHES_AT_ONCE or not self._tell(question):
            return self._located(identifier, probe, 0)
        self.counts["probes"] += 1
        self._asked = number
        self._probes[number] = (identifier, probe)
        return probe

    def covers(self, tiers: int) -> bool:
        """Whether a consumer finds what these tiers have: the remotes, all of them; without any, the disk."""
        return bool(self._reached) and tiers & self._reached == self._reached

    def rewrite(self, place: Place) -> None:
        """Write a live entry to the tiers that consumers reach and that lack it, as soon as the budget allows."""
        self.book.rewrite(place, self._reached & ~place.tiers)

    def is_writing(self, place: Place, now: float) -> bool:
        """Whether a live entry is being written to the tiers, or soon will be."""
        return self.book.is_writing(place) and self._responsive(now)

    def under_way(self, identifier: str, now: float) -> bool:
        """Whether an entry is on its way into the arena: from a tier, or from an encode of this engine's."""
        return (identifier in self._fetches or self.book.under_way(identifier)) and self._responsive(now)

    def drain(self, now: float) -> None:
        """Take in what ranks and store process have said. Once a scheduling pass, before anything is decided."""
        if self.inert:
            return
        for link, take in self._rank_takers:
            self._drain(link, take, now)
        self._drain(self._store.link, self._from_store, now)
        self._look_after_store(now)
        self._fetch_again(now)
        self._introduce_saver()
        self._grow()
        self._enter()
        while (place := self.book.owed_write()) is not None and self._tell(self._write(place)):
            self.book.begin_write(place, self._store.number)
        while (place := self.book.owed_rewrite()) is not None and self._tell(self._write(place, place.owed)):
            self.book.begin_rewrite(place, self._store.number)
        self.book.evict_ahead()
        self._complaints.tell_withheld()

    def hand_ledger(self, counts: dict[str, int]) -> None:
        """Hand all counts, with the caller's, to the store process if the book has changed. It tells whoever asks."""
        if self._revision == self.book.revision or self.inert or not self._responsive(time.monotonic()):
            return
        if self._tell(Ledger({**self.snapshot(), **counts})):
            self._revision = self.book.revision

    def snapshot(self) -> dict[str, int]:
        """What is held and what has been counted; all integers. Nothing held: every place live, no pin, no order."""
        now = {"fetches_under_way": len(self._fetches), "memory_only": int(not self._home.persists)}
        return {**self.book.snapshot(), **self.counts, **now}

    def close(self) -> None:
        """Give everything back. The store process finishes by itself what was handed over, and what was put off."""
        if self._closed:
            return
        self._closed = True
        if self._presence is not None and not self.inert:
            self._drain(self._store.link, self._from_store, time.monotonic())  # the last news of the tiers
        for place in self.book.unwritten():
            self._tell(self._write(place))
        for place in self.book.owed_rewrites():
            self._tell(self._write(place, place.owed))
        for link in self._ranks:
            link.close()
        for store in (self._store, *self._old):
            store.close()
        if self._presence is not None:
            self._presence.close()
            self._presence = None
        os.close(self._arena_fd)
        self._ranks, self._old = [], []
        self.inert = self.inert or "closed"

    # ---- starting

    def _incarnation(self, number: int) -> Incarnation:
        return Incarnation(number, self._arena_fd, environment_of(self._config.remotes))

    def _connect_ranks(self) -> None:
        for rank in range(self._engine.ranks):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                sock.connect(rank_address(self._engine.name, rank))
                if not same_user(sock):
                    raise PermissionError("its address is held by another user")
                link = Link(sock)
                self._ranks.append(link)
                self._rank_takers.append((link, partial(self._from_rank, rank)))
                link.send(Attach(self._arena_id), [self._arena_fd])
            except OSError as error:
                sock.close()
                self._give_up(f"rank {rank} cannot be reached on this host ({error})")
                return

    def _begin_store(self) -> None:
        """The first words to a new store process, and its link for the saving rank."""
        self._revision = -1  # it has not been told the counts
        self._listed, self._enters = self.namespace, False
        disk = self._config.local_disk
        self._tell(
            Start(
                incarnation=self._store.number,
                engine=self._engine.name,
                namespace=self.namespace,
                producer=self._engine.producer,
                disk=str(disk) if disk else "",
                disk_bytes=self._config.max_local_disk_bytes,
                disk_free_bytes=self._config.min_free_disk_bytes,
                drain_s=self._config.drain_s,
                deadline_s=self._config.load_deadline_ms / 1000,
                remotes=self._config.remote_tiers,
                saves=self._engine.saves,
                look_s=_LOOK_S,
            )
        )
        self._introduce_saver()

    def _introduce_saver(self) -> None:
        """Hand the saving rank its end of the store process's link, now or when its own link has room."""
        socket_ = self._store.saver_socket
        if socket_.fileno() < 0 or not self._ranks:
            return
        try:
            if self._ranks[0].send(StoreLink(self._store.number), [socket_.fileno()]):
                socket_.close()
        except LinkClosed:
            pass  # found and answered by the next drain

    def _await_hello(self) -> None:
        deadline = time.monotonic() + self._config.start_timeout_s
        poller = select.poll()
        poller.register(self._store.link, select.POLLIN)
        while self._presence is None and not self._store.closed and (left := deadline - time.monotonic()) > 0:
            if poller.poll(left * 1000):
                self._drain(self._store.link, self._first_words, time.monotonic())
        if self._store.closed:
            raise OSError(f"the encoder cache's store process ended at once: {self._store.last_words()}")

    def _first_words(self, message: object, fds: list[int], now: float) -> None:
        if isinstance(message, Hello) and message.problem:
            self._store.own(fds[0])
            raise ConfigError(message.problem)
        self._from_store(message, fds, now)

    # ---- links

    def _drain(self, link: Link, take: _Take, now: float) -> None:
        try:
            while (received := link.receive()) is not None:
                take(*received, now)
        except LinkClosed:
            if link is self._store.link:
                self._store.closed = True
            else:
                self._give_up("the link to a rank has ended")

    def _from_rank(self, rank: int, message: object, fds: list[int], now: float) -> None:
        match message:
            case Report(step=step, outcomes=outcomes):
                self.book.report(rank, step, outcomes, self._alive())
            case Attached():
                self._attached.add(rank)
            case WeightsReport(calls=calls, digest=digest):
                self.weights.report(rank, calls, digest)
            case SegmentReady(offset=offset) if self._segment is not None and offset == self._segment[0]:
                self._segment_acks += 1
                if self._segment_acks == self._engine.ranks:
                    self.book.open_segment(*self._segment)
                    self._segment = None

    def _from_store(self, message: object, fds: list[int], now: float) -> None:
        match message:
            case Filled():
                spec = TensorSpec(message.rows, message.width, message.dtype)
                place = self.book.filled(message.place, spec, message.tier, self._tiers.index(message.tier))
                if place is not None:
                    self._fetches.pop(place.identifier, None)
            case NotFilled():
                self._not_filled(message, now)
            case Sealed(place=place_id, ok=ok):
                self.book.sealed(place_id, self._store.number, ok)
            case Written(place=place_id, ok=ok):
                self.book.written(place_id, ok)
            case Landed():
                self.book.landed(message.place, message.identifier, message.tier, message.landing)
            case Located(number=number, held=held) if number in self._probes:
                self._located(*self._probes.pop(number), held)
            case Back(tier=tier):
                self._tier_back(tier)
            case Born(tier=tier, name=name):
                self._tier_born(tier, name)
            case Entered(namespace=namespace) if namespace == self.namespace:
                self._enters = False
            case Pong(number=number) if number == self._ping:
                self._ping_answered = now
                self._failures = 0  # not at its first word already: one that ends right after it is to be let rest
            case Notice(kind=kind, text=text):
                self._complaints.warn(kind, text)
            case Hello(problem=problem, tiers=tiers):
                self._store.own(fds[0])
                if self._ping_answered < self._ping_sent:
                    self._ping_sent = now  # its answer comes next: from here on its silence counts in full
                if problem:
                    self._complaints.warn("tier", problem)
                if len(fds) > 1:
                    self._adopt_presence(fds[1], tiers)
                    self._adopt_tiers(tiers)

    def _adopt_presence(self, fd: int, tiers: list[str]) -> None:
        if self._presence is not None:
            self._presence.close()
        self._presence = PresenceFilter.attach(fd, tiers)

    def _adopt_tiers(self, tiers: list[str]) -> None:
        """What a store process that was lost had yet to write to any of them is written by this one."""
        self._tiers = tiers
        self.book.tiers = (1 << len(tiers)) - 1
        if self._store.number > 1:
            for tier in range(len(tiers)):
                self._tier_back(tier)

    @property
    def _reached(self) -> int:
        """The tiers that consumers reach, a bit each. A disk is shared with them if nothing else is."""
        private = 1 if self._config.local_disk and self._config.remotes else 0
        return self.book.tiers & ~private

    def _tier_back(self, tier: int) -> None:
        if self._engine.saves:
            self.book.tier_back(tier)

    def _tier_born(self, tier: int, name: str) -> None:
        known, self._born[tier] = self._born.get(tier), name
        if known not in (None, name) and self._engine.saves:
            self._complaints.warn(
                f"emptied-{tier}", f"{self._tiers[tier]} was emptied; what memory still holds is written to it again"
            )
            self.book.tier_emptied(tier)

    def _tell(self, message: ToStore) -> bool:
        try:
            return not self._store.closed and self._store.link.send(message)
        except LinkClosed:
            return False

    def _alive(self) -> frozenset[int]:
        """The store processes that are not yet gone. One that was lost is among the old ones until then."""
        serving = () if self._store.number == self._lost else (self._store,)
        return frozenset(store.number for store in (*serving, *self._old))

    def _give_up(self, why: str) -> None:
        if not self.inert:
            self.inert = why
            _logger.error("encoder cache: off from now on: %s. Requests are served without it.", why)

    # ---- fetches

    def _ask(self, identifier: str, length: int, certain: bool, insist: bool = False) -> bool:
        """Ask the store process for an entry, with a place for it where its length is known."""
        if not length:
            asked = self._tell(Fill(0, 0, 0, self.namespace, identifier, insist))
        else:
            place = self.book.reserve_fill(identifier, length, self._store.number, certain)
            if place is None and certain:
                return False
            if place is None:
                return self._ask(
                    identifier, 0, certain, insist
                )  # once it is known to be there, room may be made for it
            asked = self._tell(Fill(place.id, place.offset, place.length, self.namespace, identifier, insist))
            if not asked:
                self.book.filled(place.id, None)
        if asked:
            self.counts["fetches"] += 1
            self._fetches[identifier] = self._fetches.get(identifier, 0) + 1
        return asked

    def _located(self, identifier: str, probe: Probe, held: int) -> Probe:
        probe.held = held
        self.book.located(identifier, self._reached, held)
        return probe

    def _not_filled(self, answer: NotFilled, now: float) -> None:
        """A miss, or an entry of another length than guessed: then it is fetched once more.

        One that has no place here, or is of another version, has the name and keeps it: it may serve others.
        """
        self.book.filled(answer.place, None)
        if answer.namespace != self.namespace:
            return  # nobody waits for it any more
        plausible = 0 < answer.length <= self._largest
        if plausible and self._fetches.get(answer.identifier, 0) == 1:
            self._put_off.append((answer.identifier, answer.length))
            return
        if answer.length > self._largest or answer.kept:
            self._unusable.add(answer.identifier, now)
        self._miss(answer.identifier, now)

    def _fetch_again(self, now: float) -> None:
        """Fetch what is there, with its length, as far as the budget of fills goes; the others wait for its turn."""
        while self._put_off:
            identifier, length = self._put_off[0]
            if self.book.live(identifier) is not None or self.book.under_way(identifier):
                self._fetches.pop(identifier, None)  # encoded and saved meanwhile
            elif not self._ask(identifier, length, certain=True, insist=True):
                if self.book.filling:
                    return
                self._miss(identifier, now)
            self._put_off.popleft()

    def _miss(self, identifier: str, now: float) -> None:
        self._fetches.pop(identifier, None)
        self.counts["fetch_misses"] += 1
        self._misses.add(identifier, now)

    # ---- the store process

    def _responsive(self, now: float) -> bool:
        silent_s = now - self._ping_sent if self._ping_sent > self._ping_answered else 0.0
        patience_s = max(_SLOW_PONG_S, self._config.load_deadline_ms / 1000)
        return not self.inert and not self._store.closed and silent_s <= patience_s

    @property
    def _patience_s(self) -> float:
        return self._config.store_timeout_s + (0.0 if self._store.introduced else _OPENING_S)

    def _look_after_store(self, now: float) -> None:
        for old in [store for store in self._old if store.gone]:
            self.book.store_gone(old.number)
            old.close()
            self._old.remove(old)
        if self._ping_waits and self._tell(Ping(self._ping)):
            self._ping_waits, self._ping_sent = False, now  # it reads again: its time starts anew
        if self._store.closed:
            self._replace_store(now, "ended")
        elif self._ping_answered < self._ping_sent and now - self._ping_sent > self._patience_s:
            self._store.kill()
            self._replace_store(now, f"did not answer for {now - self._ping_sent:.0f} s and was killed")
        elif self._ping_answered >= self._ping_sent and now - self._ping_sent >= _PING_INTERVAL_S:
            self._ping += 1
            self._ping_sent = now
            self._ping_waits = not self._tell(Ping(self._ping))  # a link that is full because nobody reads it counts
        self._store.reap()

    def _replace_store(self, now: float, why: str) -> None:
        """Void what the store process held and start the next one. Its places wait until its process is gone."""
        if self._lost != self._store.number:
            self._lost = self._store.number
            for identifier in self.book.store_lost(self._store.number):
                self._miss(identifier, now)
            self._put_off.clear()
            for identifier, probe in self._probes.values():
                self._located(identifier, probe, 0)
            self._probes.clear()
            for identifier in list(self._fetches):
                self._miss(identifier, now)
            words = self._store.last_words()
            self._complaints.warn("store", f"the store process {why}; another one takes its place. {words}".rstrip())
            self._store.closed = True
            self._old.append(self._store)
            self._restart_at = now + _RESTART_PAUSE_S[min(self._failures, len(_RESTART_PAUSE_S) - 1)]
            self._failures += 1
        if now < self._restart_at:
            return
        try:
            self._store = self._incarnation(self._store.number + 1)
        except OSError as error:
            self._restart_at = now + _RESTART_PAUSE_S[-1]
            self._complaints.warn("store", f"no store process can be started: {error}")
            return
        self._ping_sent = self._ping_answered = now
        self._begin_store()

    def _enter(self) -> None:
        if self._enters and self._listed != self.namespace and self._tell(Enter(self.namespace)):
            self._listed = self.namespace

    def _write(self, place: Place, tiers: int = 0) -> Write:
        return Write(place.id, place.offset, place.length, self.namespace, place.identifier, tiers)

    # ---- segments

    def _next_segment(self) -> tuple[int, int] | None:
        """The segment to open next, if one is due and there is memory for it."""
        due = self.book.next_segment()
        if due is None or due[0] == 0 or self._growing.allows(self.book.unused_bytes + due[1]):
            return due
        if self._growing.refusal:
            self._complaints.warn("memory", f"LocalCPU stays as large as it is: {self._growing.refusal}")
        return None

    def _grow(self) -> None:
        """Have every rank take the next segment into use. Pages come into being only as entries are written."""
        if self._segment is None and len(self._attached) == self._engine.ranks:
            self._segment = self._next_segment()
            self._segment_acks = 0
            self._segment_untold = list(self._ranks) if self._segment is not None else []
        if self._segment is not None:
            try:
                self._segment_untold = [link for link in self._segment_untold if not link.send(Segment(*self._segment))]
            except LinkClosed:
                pass  # found and answered by the next drain
