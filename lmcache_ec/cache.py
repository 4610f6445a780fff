# SPDX-License-Identifier: Apache-2.0
"""The engine's side of the cache: look-ups, prefetches, saves, and the links to the ranks and the store process."""

from __future__ import annotations

import logging
import os
import secrets
import select
import time
from collections.abc import Callable, Sequence

from lmcache_ec import arena
from lmcache_ec.accesses import Accesses
from lmcache_ec.book import Book
from lmcache_ec.channel import (
    Back,
    Born,
    CpuChanges,
    Entered,
    Epoch,
    Filled,
    Hello,
    Landed,
    Ledger,
    Located,
    NotFilled,
    Notice,
    Pong,
    Populated,
    Record,
    Sealed,
    Start,
    ToStore,
    Write,
    Written,
)
from lmcache_ec.complaints import Complaints
from lmcache_ec.config import ConfigError, EncoderCacheConfig
from lmcache_ec.engine import Engine as Engine
from lmcache_ec.entry import TensorSpec, entry_length
from lmcache_ec.events.changes import Changes
from lmcache_ec.eviction import Below, restore_s
from lmcache_ec.fetches import Fetches, Probe
from lmcache_ec.host_memory import fitting
from lmcache_ec.key import identifier_digest
from lmcache_ec.load_policy import LoadPolicy
from lmcache_ec.place import Place, aligned
from lmcache_ec.ranks import Ranks
from lmcache_ec.sizes import precise_size
from lmcache_ec.supervisor import Supervisor
from lmcache_ec.tally import Tallies
from lmcache_ec.tiers.kinds import environment_of
from lmcache_ec.tiers_below import TiersBelow
from lmcache_ec.weights import Held, Home, Weights

_logger = logging.getLogger(__name__)

_LOOK_S = 2.0
"""Interval between checks for a tier having been emptied."""
_PLAUSIBLE_BYTES = 256 << 20
"""Entries up to this length are always accepted, whatever the engine gives as its largest."""


class EncoderCache:
    """The scheduler side's cache of one engine. Runs on the scheduler's thread only; no lock.

    Call `drain` once per scheduling pass; no call waits for I/O. The constructor may wait, for at most
    `start_timeout_s`, until the store process serves and the ranks use the first part of the arena.
    """

    def __init__(self, config: EncoderCacheConfig, engine: Engine) -> None:
        """Raises ConfigError if a tier cannot be opened, OSError if memory or a process cannot be obtained."""
        self.inert = ""
        """Why the cache is switched off; empty while it works."""
        self.weight_changes = 0
        self._signing = config.signing_key()
        engine = engine.signing_with(self._signing)
        epoch = engine.epoch or 0
        self.weights = Weights(
            engine.ranks if engine.watched else 0, engine.namespace_at(epoch), config.persist_updated_weights, epoch
        )
        self.held: Held | None = self.weights.held
        """The weights that produced all entries held here."""
        self.in_doubt = self.held is None
        """Whether the ranks may have other weights by now: no entry may be used or added."""
        self._home = self.weights.home_of_start
        self._config = config
        self._engine = engine
        fit = fitting(aligned(config.max_local_cpu_bytes))
        if fit.message:
            _logger.warning("encoder cache: %s", fit.message)
        capacity = fit.bytes
        weigh = self._restore_s if config.cache_policy == "cost" else None
        self.policy = LoadPolicy(always=config.load_policy == "always")
        self.book = Book(capacity, arena.GRANULE_BYTES, engine.ranks, weigh)
        self._publishing = config.publishing(engine.data_parallel_rank)
        if self._publishing is not None:
            self.book.changes = Changes(self.book.entries)
        largest = max(engine.largest_entry_bytes, min(_PLAUSIBLE_BYTES, capacity))
        self.arena_id = secrets.token_hex(8)
        """Sent with every metadata: a rank attached to another arena copies nothing."""
        self._complaints = Complaints(_logger)
        self.accesses: Accesses | None = None
        """Set while a client records what requests need."""
        self.tallies = Tallies()
        """What the store processes have counted."""
        self.below = TiersBelow(self.book, self._complaints, config, engine, self._send)
        self._handed = (-1, -1)  # revision of the book, and ping, of the last ledger
        self._closed = False
        self._arena_fd = arena.create(capacity)
        self._store = Supervisor(
            self._arena_fd,
            environment_of(config.remotes),
            timeout_s=config.store_timeout_s,
            patience_s=config.load_deadline_ms / 1000,
            complaints=self._complaints,
            follower=self,
        )
        self._fetches = Fetches(self.book, self._store, self.namespace, largest, self.below.candidates, self.policy)
        self._ranks = Ranks(
            engine.ranks, self.book, self.policy, self.weights, self._store, self._complaints, self._give_up
        )
        self.staging, self.copies = self._ranks.staging, self._ranks.copies
        try:
            self._ranks.connect(engine.name, self.arena_id, self._arena_fd)
            self._begin_store()
            self._await_start()
            if self.weights.epoch > self._home.epoch:
                self._move(self.weights.home_of_start)
        except BaseException:
            self.close()
            raise

    # ---- for the adapter

    @property
    def ready(self) -> bool:
        """Whether every rank has mapped the arena and reported its weights, and the store process serves."""
        return self._ranks.growth.attached and self.weights.started and self.book.opened and self._served

    @property
    def _served(self) -> bool:
        return self.below.presence is not None

    @property
    def namespace(self) -> str:
        """The namespace of entries for the ranks' current weights."""
        return self._home.namespace

    @property
    def persists(self) -> bool:
        """Whether these entries are kept in any tier below memory."""
        return self._home.persists and bool(self._config.local_disk or self._config.remotes)

    def follow_weights(self) -> bool:
        """Act on the ranks' reports about their weights, and on a new epoch. Call between passes. True if everything
        held was forgotten.

        Saves and fills under way finish under their old name, and no look-up finds them (see `Book.forget_all`).
        """
        self.weights.moved = False
        held = self.weights.held
        self.in_doubt = held is None
        if held is None:
            return False
        self.held = held
        before, home = self._home, self.weights.home(held)
        if home == before:
            return False
        forgotten = self._move(home)
        if home.epoch > before.epoch:
            what = f"{self._config.local_disk} is in epoch {home.epoch} from now on"
        else:
            what = "the encoder's weights have changed"
            self.weight_changes += 1
        kept = f"namespace {home.namespace}" if home.persists else "memory only, see ec.persist_updated_weights"
        self._complaints.warn("weights", f"{what}; {forgotten} entries were dropped, new ones go to {kept}")
        return True

    def _move(self, home: Home) -> int:
        """Forget everything held and switch to this home. Returns the number of entries forgotten."""
        self._home = home
        self.below.enter(home)
        self._fetches.forget(home.namespace)
        forgotten = self.book.forget_all()
        self._publish_anew()
        return forgotten

    def fetch(
        self,
        identifier: str,
        length: int,
        now: float,
        announced: bool = False,
        encode_s: Callable[[], float] | None = None,
        early: bool = False,
    ) -> bool:
        """Start fetching an entry of `length` bytes (0: unknown) into the arena. False if it cannot be fetched, or if
        that is expected to take longer than `encode_s()`, which is called only if a tier may have the entry (None:
        fetch it however long it takes). With `early`, a refusal is not counted.

        Single-flight: while a fetch is under way, this returns True and sends nothing. An `announced` entry may not
        be written yet: it is requested again and again until the caller has waited long enough.
        """
        if self.under_way(identifier, now):
            return True
        return self._asks_tiers(now) and self._fetches.fetch(identifier, length, now, announced, encode_s, early)

    def may_come(self, identifier: str, now: float) -> bool:
        """Whether any tier that can be asked may have the entry, as far as is known without asking."""
        return self._asks_tiers(now) and bool(self.below.candidates(identifier_digest(identifier)))

    def late(self, identifier: str, now: float) -> None:
        """Note that a request gave up waiting for an entry that is still under way."""
        self._fetches.late(identifier, now)

    def probe(self, identifier: str, spec: TensorSpec | None, now: float) -> Probe:
        """Start finding out which of the tiers that consumers reach have the entry, recognized by its length. If
        `spec` is None, the tiers cannot be asked, or the answer is known already, it is answered at once."""
        if spec is None or not self._asks_tiers(now):
            return self._fetches.in_none(identifier, self.below.reached, now)
        return self._fetches.probe(identifier, entry_length(identifier, spec), self.below.reached, now)

    def _asks_tiers(self, now: float) -> bool:
        """Whether there are tiers to ask, and a store process that can ask them."""
        return self.ready and self.persists and self._responsive(now)

    def restore_s(self, names: Sequence[str], length: int, modality: str, rows: int) -> float:
        """Seconds it costs to get an item of `length` bytes back, which may be stored under any of `names`, as far as
        is known without asking. An entry not sealed yet may get lost, so it counts as one to be encoded."""
        encode_s = self.policy.restore_s(0, length, modality, rows)
        if any(self.book.live(name) for name in names):
            return restore_s(Below.MEMORY, length, rows, encode_s)
        if not self._asks_tiers(time.monotonic()):
            return encode_s
        held = self.below.may_have([identifier_digest(name) for name in names])
        return self.policy.restore_s(held, length, modality, rows)

    def check_fits(self, identifier: str, spec: TensorSpec) -> None:
        """Warn about an entry that found no room because it is larger than the whole arena."""
        length = entry_length(identifier, spec)
        if length > self.book.capacity:
            self._complaints.warn(
                "large",
                f"an entry of {precise_size(length)} is not saved: LocalCPU, through which all entries pass, has only "
                f"{precise_size(self.book.capacity)}. Raise max_local_cpu_size",
            )

    def rewrite(self, place: Place) -> None:
        """Write a live entry to the tiers that consumers reach and that lack it, as soon as the budget allows."""
        self.book.rewrite(place, self.below.reached & ~place.tiers)

    def is_writing(self, place: Place, now: float) -> bool:
        """Whether a live entry is being written to the tiers, or soon will be."""
        return self.book.is_writing(place) and self._responsive(now)

    def under_way(self, identifier: str, now: float) -> bool:
        """Whether an entry is on its way into the arena: from a tier, or from an encode by this engine."""
        return (identifier in self._fetches or self.book.under_way(identifier)) and self._responsive(now)

    def drain(self, now: float) -> None:
        """Process what ranks and store process have reported. Call once per scheduling pass, before any decision."""
        if self.inert:
            return
        self._ranks.drain()
        self._store.drain(self._from_store, now)
        self._store.look_after(now)
        self._fetches.ask_again(now)
        self._ranks.advance()
        self.below.advance()
        while (place := self.book.owed_write()) is not None and self._send(self._write(place)):
            self.book.begin_write(place, self._store.number)
        while (place := self.book.owed_rewrite()) is not None and self._send(self._write(place, place.owed)):
            self.book.begin_rewrite(place, self._store.number)
        self.book.evict_ahead()
        self._complaints.report_withheld()

    def listen(self, now: float) -> bool:
        """Process what the store process has answered since the last `drain`. Returns whether there was anything."""
        if self.inert or not self._store.drain(self._from_store, now):
            return False
        self._fetches.ask_again(now)
        return True

    def _restore_s(self, place: Place) -> float:
        rows = place.spec.rows if place.spec is not None else 0
        return self.policy.restore_s(place.tiers, place.length, place.modality, rows)

    def hand_ledger(self, counts: Callable[[], dict[str, int]], later: bool = False) -> None:
        """Send all counts, including the caller's, to the store process, which serves status requests: if the book has
        changed, and with each ping, since the caller's may change without it. `later`: a request is waiting for the
        end of this pass and another pass follows, so changes of the book are left to that one."""
        handed = self.book.revision, self._store.ping
        if self._handed == handed or self.inert or (later and self._handed[1] == handed[1]):
            return
        if not self._responsive(time.monotonic()):
            return
        if self._send(Ledger({**self.snapshot(), **counts()})):
            self._handed = handed

    def hand_changes(self) -> None:
        """Send the store process what was added to LocalCPU and what left it, to publish. At the end of a pass."""
        changes = self.book.changes
        if changes is None:
            return
        if not self.inert:
            changes.hand(self.namespace, self._send)
        elif self._send(CpuChanges(self.namespace, True, [], [])):  # no entry is available any more
            self.book.changes = None

    def _publish_anew(self) -> None:
        if self.book.changes is not None:
            self.book.changes.begin_anew()

    def snapshot(self) -> dict[str, int]:
        """Current state and counters; all integers. At rest every place is live, without pins and orders."""
        return {
            **self.book.snapshot(),
            **self._fetches.counts,
            **self.policy.snapshot(self.below.names),
            "fetches_under_way": len(self._fetches),
            "staged": len(self.staging),
            "memory_only": int(not self._home.persists),
            "weight_changes": self.weight_changes,
            "epoch": self._home.epoch,
        }

    def close(self) -> None:
        """Release everything. The store process finishes handed-over and deferred writes by itself."""
        if self._closed:
            return
        self._closed = True
        if self._served and not self.inert:
            self._store.drain(self._from_store, time.monotonic())  # the last messages about the tiers
        for place in self.book.unwritten():
            self._send(self._write(place))
        for place in self.book.owed_rewrites():
            self._send(self._write(place, place.owed))
        self._ranks.close()
        self._store.close()
        self.below.close()
        self.tallies.close()
        os.close(self._arena_fd)
        self.inert = self.inert or "closed"

    # ---- starting

    def _begin_store(self) -> None:
        """Send a new store process its first message, and the saving rank its link to it."""
        self._handed = (-1, -1)
        self.below.begin(self.namespace)
        disk = self._config.local_disk
        self._send(
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
                signing=self._signing,
                publishing=self._publishing,
                epoch=None if self._engine.epoch is None else self.weights.epoch,
                base=self._engine.namespace,
            )
        )
        self._publish_anew()
        self._ranks.introduce_saver()

    def _await_start(self) -> None:
        """Wait until the store process serves and the ranks have registered the first segment: no request waits then.

        Late ranks are picked up by later passes; a store process that ended at once is an error.
        """
        deadline = time.monotonic() + self._config.start_timeout_s
        while not self._started() and (left := deadline - time.monotonic()) > 0:
            poller = select.poll()
            for link in (self._store.link, *(() if self.inert else self._ranks.links)):
                poller.register(link, select.POLLIN)
            poller.poll(left * 1000)
            now = time.monotonic()
            self._store.drain(self._first_message, now)
            if not self.inert:
                self._ranks.drain()
                self._ranks.advance()
        if self._store.closed:
            raise OSError(f"the encoder cache's store process ended at once: {self._store.last_errors()}")

    def _started(self) -> bool:
        return self._store.closed or (self._served and (self.ready or bool(self.inert)))

    def _first_message(self, message: object, fds: list[int], now: float) -> None:
        if isinstance(message, Hello) and message.problem:
            self._store.introduce(fds[0], now)
            raise ConfigError(message.problem)
        self._from_store(message, fds, now)

    # ---- messages from the store process

    def _from_store(self, message: object, fds: list[int], now: float) -> None:
        match message:
            case Filled():
                spec = TensorSpec(message.rows, message.width, message.dtype)
                tier = self.below.names.index(message.tier)
                place = self.book.filled(message.place, spec, message.tier, tier)
                if place is not None:
                    self._fetches.filled(place.identifier, tier, message.seconds, now)
            case NotFilled():
                self._fetches.not_filled(message, now)
            case Sealed(place=place_id, ok=ok):
                self.book.sealed(place_id, self._store.number, ok)
            case Written(place=place_id, ok=ok):
                self.book.written(place_id, ok)
            case Landed():
                self.book.landed(message.place, message.identifier, message.tier, message.landing)
            case Located(number=number, held=held):
                self._fetches.located(number, held)
            case Back(tier=tier):
                self.below.back(tier)
            case Born(tier=tier, name=name):
                self.below.born(tier, name)
            case Entered(namespace=namespace):
                self.below.entered(namespace)
            case Populated(offset=offset):
                self._ranks.growth.populated(offset)
            case Pong(number=number):
                self._store.answered(number, now)
            case Record(on=on):
                self.accesses = Accesses(self._send) if on else None
            case Notice(kind=kind, text=text):
                self._complaints.warn(kind, text)
            case Epoch(number=number):
                self._begin_epoch(number)
            case Hello(problem=problem, tiers=tiers):
                self._store.introduce(fds[0], now)
                if self._begin_epoch(message.epoch):
                    self.below.lists(self._engine.namespace_at(message.epoch))
                if problem:
                    self._complaints.warn("tier", problem)
                if len(fds) > 1:
                    self.below.adopt(tiers, fds[1], replaced=self._store.number > 1)
                    self.tallies.adopt(self._store.number, fds[2], tiers)

    def _begin_epoch(self, number: int) -> bool:
        """Adopt the folder's epoch if it is later than ours; `follow_weights` then acts on it. True if it is later."""
        later = self._engine.epoch is not None and number > self.weights.epoch
        if later:
            self.weights.begin_epoch(number, self._engine.namespace_at(number))
        return later

    def _send(self, message: ToStore) -> bool:
        return self._store.send(message)

    def _give_up(self, why: str) -> None:
        if not self.inert:
            self.inert = why
            _logger.error("encoder cache: off from now on: %s. Requests are served without it.", why)

    # ---- the store process

    def _responsive(self, now: float) -> bool:
        return not self.inert and self._store.responsive(now)

    def store_lost(self, number: int, now: float) -> None:
        """Void what that store process held. Its places are kept until the process has ended."""
        self.accesses = None
        self._fetches.lost(self.book.store_lost(number), now)

    def store_ended(self, number: int) -> None:
        """That store process can no longer access the arena."""
        self.book.store_ended(number)
        self.tallies.ended(number)

    def store_started(self) -> None:
        """A new store process has started."""
        self._begin_store()
        self._ranks.growth.store_replaced()

    def _write(self, place: Place, tiers: int = 0) -> Write:
        return Write(place.id, place.offset, place.length, self.namespace, place.identifier, tiers)
