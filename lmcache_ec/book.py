# SPDX-License-Identifier: Apache-2.0
"""The arena's book: the life of every place, from reservation to reuse.

Who owns what, and when it may be freed:

1. Only the scheduler side decides what a place is for; the store process and the ranks act on its orders.
2. RESERVED belongs to the scheduling pass: the place is sent with a step or dropped in the same pass.
3. WRITING belongs to the saving rank until its report covers the step. *Copied* passes the place to the store process;
   *absent*, *failed* or no outcome at all voids it.
4. SEALING belongs to the store process until it answers or that process has ended. The rank hands over before it
   reports, so the answer may come while the place is still WRITING: the copy is over by then, and the answer counts.
5. FILLING belongs to the store process in the same way.
6. LIVE belongs to the index. Promises, leases, loads under way, a write-through under way and a store process that may
   still read it are pins; only an unpinned place is evicted. A live place that is forgotten leaves the index at once
   and is freed at its last unpin. One forgotten during its save or fill leaves the index at once, is finished under
   its old name, is never found by a look-up, and is freed when its write-through is over.
7. A load holds its pin until every rank's report has covered its step.
8. When a store process is lost, places it was filling or sealing are ORPHANED and those it was writing stay pinned
   until that process has ended; only then are their bytes free. The writes are owed again.
9. No abort, preemption, deadline or timeout frees a place.
10. Place ids are never reused, so a late answer about a freed place matches nothing.

This is one state machine: index, pins, budgets and owed writes change together at each transition, so they stay in one
file. Independent parts have their own files: `place.py`, `space.py` (which bytes), `rewrites.py` (what tiers lost).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from lmcache_ec.channel import Outcome
from lmcache_ec.entry import TensorSpec, entry_length
from lmcache_ec.events.changes import Changes
from lmcache_ec.eviction import Uses, worth
from lmcache_ec.eviction_order import USES_HALF_LIFE, CostOrder, LruOrder, Order
from lmcache_ec.histogram import SIZE_BYTES, Histogram
from lmcache_ec.place import Extent, Place, State, aligned
from lmcache_ec.rewrites import Rewrites
from lmcache_ec.space import Space, Window
from lmcache_ec.tiers.base import Landing

_EVICTION_CANDIDATES = 64
_WINDOW_STEPS = 1024
_GOOD_FIT = 1.125
"""The search stops at a window whose loss is at most this many times the worth of `size` bytes of its candidate."""
_EVICTIONS_A_PASS = 16
_REMEMBERED_SAVES = 4096
_RETRIES_A_PASS = 8


class LifeError(RuntimeError):
    """A call that the life cycle of a place does not allow: a bug in the caller."""


@dataclass(slots=True)
class _Order:
    """A place sent to a rank with a step; kept until that rank's report covers the step."""

    step: int
    place: Place
    load: bool


@dataclass
class Counts:
    """Events counted since the engine started; `snapshot()` adds what the book holds now."""

    saves: int = 0
    saved_bytes: int = 0
    saves_dropped: int = 0
    saves_void: int = 0
    seals_failed: int = 0
    writes: int = 0
    writes_failed: int = 0
    rewrites: int = 0
    fills: int = 0
    fills_refused: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
    loads_failed: int = 0
    store_losses: int = 0
    loads: dict[str, int] = field(default_factory=dict)


class Book:
    """Index, places, pins, budgets and eviction of one arena. Runs on the scheduler side's one thread: no lock, no I/O.

    The arena's `capacity` bytes are opened from its start onwards (`open`), in whole granules of `granule_bytes` except
    for the last. Places may cross granule boundaries. Fills and unwritten entries may each hold a quarter of the
    capacity, and leases a half; one of each is always allowed, however small the arena.
    """

    def __init__(
        self, capacity: int, granule_bytes: int, ranks: int, restore_s: Callable[[Place], float] | None = None
    ) -> None:
        """`restore_s`: seconds it would take to get a live entry back. If given, eviction is by the cost of a miss;
        otherwise the least recently used entry is evicted."""
        self.capacity = capacity
        self._granule = granule_bytes
        self.counts = Counts()
        self.saved_sizes = Histogram("save_bytes", SIZE_BYTES)
        self.unsaved: OrderedDict[str, TensorSpec] = OrderedDict()
        """Saves that found no room or were voided: retried while vLLM still holds the tensor."""
        self.tiers = 0
        """Bit mask of all tiers."""
        self.changes: Changes | None = None
        """Records which entries become live and which stop being live, for an engine that publishes these changes."""
        self._rewrites = Rewrites()
        self._space = Space()
        self._index: dict[str, Place] = {}
        self._restore_s = restore_s
        self._uses = Uses(USES_HALF_LIFE)
        self._evictable: Order[Place] = LruOrder() if restore_s is None else CostOrder(self._value, _size)
        self._orders: list[deque[_Order]] = [deque() for _ in range(ranks)]
        self._loads: dict[tuple[int, int], int] = {}
        self._filling: dict[int, Place] = {}
        self._saving: dict[int, Place] = {}
        self._orphaned: dict[int, Place] = {}
        self._states = dict.fromkeys(State, 0)
        self._pins = self._leases = 0
        self.revision = 0
        """Changes whenever `snapshot()` might."""
        self._dirty: dict[int, Place] = {}
        self._held: dict[int, list[Place]] = {}
        self._unwritten: OrderedDict[int, Place] = OrderedDict()
        self._wanted = 0
        """The longest run that could not be reserved but will fit once the arena has grown."""
        self._ids = 0
        self._low_water = capacity // 20
        self._bytes = dict.fromkeys(("filling", "dirty", "leased", "live"), 0)

    # ---- growth

    def next_segment(self) -> tuple[int, int] | None:
        """(offset, length) of the next segment to open; None if none is due.

        One is due once half of the open bytes are used, or as soon as no free run was long enough for a request: a
        quarter of the open bytes, and enough for that run. So the open part stays ahead of what is stored, but never
        far ahead. The first segment is one granule.
        """
        opened = self._space.opened_bytes
        if opened >= self.capacity or (self._space.free_bytes * 2 > opened > 0 and not self._wanted):
            return None
        short = self._wanted - self._space.tail_bytes if opened else 0
        granules = max(1, -(-max(short, opened // 4) // self._granule))
        return opened, min(granules * self._granule, self.capacity - opened)

    def open(self, offset: int, length: int) -> None:
        """Open `length` more bytes at `offset`, which is the end of the open part."""
        if offset == self._space.opened_bytes and length:
            self._space.open(length)
            self.revision += 1
            if self._space.tail_bytes >= self._wanted or self._space.opened_bytes >= self.capacity:
                self._wanted = 0

    def open_all(self) -> None:
        """Open the rest of the arena."""
        self.open(self._space.opened_bytes, self.capacity - self._space.opened_bytes)

    def end_growth(self) -> None:
        """The arena cannot grow any more: from now on its capacity is what is open."""
        self.capacity = self._space.opened_bytes
        self._low_water = self.capacity // 20
        self._wanted = 0
        self.revision += 1

    @property
    def growing(self) -> bool:
        """Whether a reservation failed that will find room once the arena has grown."""
        return bool(self._wanted)

    @property
    def unused_bytes(self) -> int:
        """Free bytes of the open part; as far as is known, they have yet to be written."""
        return self._space.free_bytes

    @property
    def opened(self) -> bool:
        return self._space.opened_bytes > 0

    # ---- look-up and pins

    def live(self, identifier: str) -> Place | None:
        """The entry for `identifier`, if it can be promised now."""
        place = self._index.get(identifier)
        return place if place is not None and place.state is State.LIVE else None

    def entries(self) -> Iterator[tuple[str, int]]:
        """All entries that can be promised now: identifier, length in bytes."""
        return ((place.identifier, place.length) for place in self._index.values() if place.state is State.LIVE)

    def under_way(self, identifier: str) -> bool:
        """Whether a save or a fill of `identifier` has a place but no entry yet."""
        place = self._index.get(identifier)
        return place is not None and place.state is not State.LIVE

    def pin(self, place: Place) -> None:
        place.pins += 1
        self._pins += 1
        self.revision += 1
        self._evictable.discard(place)

    def unpin(self, place: Place) -> None:
        if place.pins < 1:
            raise LifeError(f"place {place.id} ({place.state.value}) has no pin to give back")
        place.pins -= 1
        self._pins -= 1
        self.revision += 1
        if place.pins:
            return
        if place.forgotten:
            self._free(place)
        else:
            place.priority = self._evictable.add(place)
            self._rewrites.check(place)

    def lease(self, place: Place) -> bool:
        """Pin a prefetched entry for a waiting request. False, without a pin, if that exceeds half the arena."""
        if not place.lessees:
            if self._over("leased", place, self.capacity // 2):
                return False
            self._bytes["leased"] += place.extent.length
        place.lessees += 1
        self._leases += 1
        self.pin(place)
        return True

    def release(self, place: Place) -> None:
        place.lessees -= 1
        self._leases -= 1
        if not place.lessees:
            self._bytes["leased"] -= place.extent.length
        self.unpin(place)

    def forget(self, place: Place) -> None:
        """Take a live entry out of the index now; its bytes are freed at the last unpin."""
        if place.state is State.LIVE and not place.forgotten:
            place.forgotten = True
            del self._index[place.identifier]
            self._left(place)
            self._unwritten.pop(place.id, None)
            self._rewrites.drop(place)
            if not place.pins:
                self._evictable.remove(place)
                self._free(place)

    def forget_all(self) -> int:
        """Forget all live entries, all saves and fills under way, and all owed saves: no later look-up can use them.

        Takes microseconds per entry, in one go. Returns the number of entries forgotten.
        """
        places = list(self._index.values())
        for place in places:
            if place.state is State.LIVE:
                self.forget(place)
            else:
                place.forgotten = True
                del self._index[place.identifier]
        self.unsaved.clear()
        self.revision += 1
        return len(places)

    # ---- saves

    def reserve_save(self, identifier: str, spec: TensorSpec, persist: bool, retry: bool = False) -> Place | None:
        """A place for an item that this pass will encode, or None: already under way, already live, or no room.

        A save that found no room, or waits for the outcome of a fill, is owed: see `remember`. A `retry` evicts no
        entry whose own write is owed; otherwise two such saves would evict each other in turn while a tier hangs.
        If the budget of unwritten entries is used up, the entry is kept in memory only and its write is owed.
        """
        present = self._index.get(identifier)
        if present is not None:
            if present.state is State.FILLING:
                self.remember(identifier, spec)  # owed only if the fill turns out a miss
            return None
        length = entry_length(identifier, spec)
        evictable = self._evictable_and_written if retry else self._evictable.__contains__
        place = self._reserve(identifier, length, spec, State.RESERVED, evictable)
        if place is None:
            self.remember(identifier, spec)
            return None
        self.unsaved.pop(identifier, None)
        place.persist = persist
        if persist and not self._over("dirty", place, self.capacity // 4):
            self._mark_dirty(place)
        self._saving[place.id] = place
        return place

    def drop(self, place: Place) -> None:
        """RESERVED → FREE: the pass ended without sending the place, and so without the encode."""
        _expect(place, State.RESERVED)
        self._void(place)

    def send_save(self, place: Place, step: int, saver: int) -> None:
        """RESERVED → WRITING: the place is sent with `step` to the rank `saver`."""
        _expect(place, State.RESERVED)
        self._move(place, State.WRITING)
        self._orders[saver].append(_Order(step, place, load=False))

    def remember(self, identifier: str, spec: TensorSpec) -> None:
        """Note a dropped save as owed while vLLM's own cache holds the tensor. Bounded; the oldest are dropped."""
        self.counts.saves_dropped += identifier not in self.unsaved
        self.revision += 1
        self.unsaved[identifier] = spec
        while len(self.unsaved) > _REMEMBERED_SAVES:
            self.unsaved.popitem(last=False)

    def retries(self, holds: Callable[[str], bool | None], persists: Callable[[str], bool]) -> list[Place]:
        """Places for some of the owed saves, of tensors that the engine `holds` (None: not before its next step).
        A save whose tensor it no longer holds is dropped. Stops when there is no room."""
        places = []
        for identifier, spec in list(islice(self.unsaved.items(), _RETRIES_A_PASS)):
            held = holds(identifier)
            if held is None:
                continue
            if not held:
                del self.unsaved[identifier]
                continue
            place = self.reserve_save(identifier, spec, persists(identifier), retry=True)
            if place is None:
                if self.live(identifier) is None:
                    self.unsaved.move_to_end(identifier)  # behind the others, one of which may fit
                else:
                    del self.unsaved[identifier]
                break
            places.append(place)
        return places

    def sealed(self, place_id: int, incarnation: int, ok: bool) -> None:
        """The store's answer to a hand-over: SEALING (or WRITING, see 4.) → LIVE, or FREE if it could not be sealed."""
        place = self._saving.get(place_id)
        if place is None or place.state not in (State.SEALING, State.WRITING):
            return
        if not ok:
            self.counts.seals_failed += 1
            self._void(place)
            return
        del self._saving[place_id]
        place.incarnation = incarnation
        self.counts.saves += 1
        self.counts.saved_bytes += place.length
        self.saved_sizes.add(place.length)
        place.lacks = self.tiers if place.persist else 0
        self._use(place)
        self._publish(place)
        if place.dirty:
            self._dirty[place.id] = place
        elif place.persist and not place.forgotten:
            self._unwritten[place.id] = place

    def written(self, place_id: int, ok: bool) -> None:
        """The write-through of a live entry is over. A failed one is not tried again: the tier refused it."""
        place = self._dirty.pop(place_id, None)
        if place is None:
            return
        self.counts.writes += ok
        self.counts.writes_failed += not ok
        place.rewriting = 0
        self._clear_dirty(place)

    def landed(self, place_id: int, identifier: str, tier: int, landing: Landing) -> None:
        """One tier has answered the write of an entry. `written` is what releases the place."""
        place = self._index.get(identifier)
        if place is None or place.id != place_id:
            return
        bit = 1 << tier
        place.tiers = place.tiers | bit if landing is Landing.TOOK else place.tiers & ~bit
        place.lacks = place.lacks | bit if landing is Landing.FAILED else place.lacks & ~bit

    def owed_write(self) -> Place | None:
        """The entry whose write-through has been deferred longest, if it fits the budget now."""
        place = next(iter(self._unwritten.values()), None)
        return None if place is None or self._over("dirty", place, self.capacity // 4) else place

    def unwritten(self) -> list[Place]:
        """All entries whose write-through is owed."""
        return list(self._unwritten.values())

    def begin_write(self, place: Place, incarnation: int) -> None:
        """The owed write of a live entry was handed to the store process."""
        del self._unwritten[place.id]
        place.incarnation = incarnation
        self._mark_dirty(place)
        self._dirty[place.id] = place

    # ---- rewrites of what a tier lost

    def tier_emptied(self, tier: int) -> None:
        """A tier has lost everything it held: write all live entries to it again."""
        self._rewrites.emptied(tier, reversed(self._evictable))
        self.revision += 1

    def tier_back(self, tier: int) -> None:
        """A tier that was unreachable is back: write to it what it could not take in the meantime."""
        self._rewrites.back(tier, reversed(self._evictable))
        self.revision += 1

    def located(self, identifier: str, tiers: int, held: int) -> None:
        """Of `tiers`, exactly those in `held` have the entry now."""
        if (place := self.live(identifier)) is not None:
            place.tiers = place.tiers & ~tiers | held

    def rewrite(self, place: Place, tiers: int) -> None:
        """Have a live entry written to `tiers` again before all others: a caller is waiting for it."""
        self._rewrites.owe(place, tiers, first=True)

    def is_writing(self, place: Place) -> bool:
        """Whether the entry is being written to the tiers, or is due to be written again."""
        return place.dirty or self._rewrites.due(place)

    def owed_rewrite(self) -> Place | None:
        """The entry to write again next; `Place.owed` has the tiers. Rewrites take half of the budget at most, and
        none of it while a first write is owed."""
        place = self._rewrites.next()
        return None if place is None or self._unwritten or self._over("dirty", place, self.capacity // 8) else place

    def owed_rewrites(self) -> list[Place]:
        """All entries due to be written again."""
        return self._rewrites.all()

    def begin_rewrite(self, place: Place, incarnation: int) -> None:
        """The store process was asked to write an entry again."""
        self._rewrites.drop(place)
        self.counts.rewrites += 1
        place.rewriting, place.owed = place.owed, 0
        place.lacks |= place.rewriting
        place.incarnation = incarnation
        self._mark_dirty(place)
        self._dirty[place.id] = place

    # ---- fills

    def reserve_fill(self, identifier: str, length: int, incarnation: int, certain: bool) -> Place | None:
        """A place for the store process to fill. Takes free space only, unless `certain`: then it may evict."""
        if identifier in self._index:
            return None
        if self._bytes["filling"] and self._bytes["filling"] + aligned(length) > self.capacity // 4:
            self.counts.fills_refused += 1
            return None
        evictable = self._evictable.__contains__ if certain else None
        place = self._reserve(identifier, length, None, State.FILLING, evictable)
        if place is None:
            self.counts.fills_refused += 1
            return None
        place.incarnation = incarnation
        place.persist = True
        self._filling[place.id] = place
        self._bytes["filling"] += place.extent.length
        return place

    def filled(self, place_id: int, spec: TensorSpec | None, origin: str = "", tier: int = 0) -> Place | None:
        """FILLING → LIVE with the verified entry's `spec`, or FREE (None). Returns the live place.

        It came from `tier`, called `origin`; the tiers before that one are being sent a copy.
        """
        place = self._filling.pop(place_id, None)
        if place is None:
            return None
        self._bytes["filling"] -= place.extent.length
        if spec is None or place.forgotten:
            self._leave_index(place)
            self._free(place)
            return None
        self.counts.fills += 1
        self.unsaved.pop(place.identifier, None)
        place.spec = spec
        place.tiers |= 1 << tier
        place.lacks = ((1 << tier) - 1) & ~place.tiers
        place.origin = origin
        self._publish(place)
        return place

    # ---- loads and reports

    def send_load(self, place: Place, step: int) -> None:
        """Send the place with `step` to all ranks. Takes over one pin from the caller."""
        _expect(place, State.LIVE)
        for orders in self._orders:
            orders.append(_Order(step, place, load=True))
        self._loads[(step, place.id)] = len(self._orders)
        self._use(place)
        tier = place.origin or "cpu"
        place.origin = ""
        self.counts.loads[tier] = self.counts.loads.get(tier, 0) + 1

    def report(self, rank: int, step: int, outcomes: Iterable[tuple[int, Outcome, int]], alive: frozenset[int]) -> None:
        """A rank has finished every step up to `step`; `outcomes` are (place, outcome, incarnation handed to).

        Orders of those steps without an outcome are void. `alive` are the store processes that have not ended.
        """
        named = {place: (outcome, incarnation) for place, outcome, incarnation in outcomes}
        orders = self._orders[rank]
        while orders and orders[0].step <= step:
            order = orders.popleft()
            place = order.place
            outcome, incarnation = named.get(place.id, (Outcome.ABSENT, 0))
            if order.load:
                self.counts.loads_failed += outcome != Outcome.COPIED
                self._loaded(order)
            elif place.state is State.WRITING:
                self._copied(place, outcome, incarnation, alive)

    def _copied(self, place: Place, outcome: Outcome, incarnation: int, alive: frozenset[int]) -> None:
        if outcome != Outcome.COPIED:
            self.counts.saves_void += 1
            if outcome == Outcome.ABSENT:
                self._owe(place)
            self._void(place)
            return
        self._move(place, State.SEALING)
        place.incarnation = incarnation
        if incarnation not in alive:
            self._owe(place)
            self._void(place)

    def _loaded(self, order: _Order) -> None:
        key = (order.step, order.place.id)
        self._loads[key] -= 1
        if not self._loads[key]:
            del self._loads[key]
            self.unpin(order.place)

    # ---- lost and ended store processes

    def store_lost(self, incarnation: int) -> list[str]:
        """Void what that process held; the bytes stay reserved until `store_ended`. Returns the fills now missed."""
        self.counts.store_losses += 1
        missed = []
        for place in [p for p in self._filling.values() if p.incarnation == incarnation]:
            del self._filling[place.id]
            self._bytes["filling"] -= place.extent.length
            if not place.forgotten:
                missed.append(place.identifier)
            self._orphan(place)
        for place in [p for p in self._saving.values() if p.state is State.SEALING and p.incarnation == incarnation]:
            del self._saving[place.id]
            self._owe(place)
            self._clear_dirty(place)
            self._orphan(place)
        held = self._held.setdefault(incarnation, [])
        for place in [p for p in self._dirty.values() if p.incarnation == incarnation]:
            del self._dirty[place.id]
            self.pin(place)
            held.append(place)
            self._clear_dirty(place)
            rewriting, place.rewriting = place.rewriting, 0
            if rewriting:
                self._rewrites.owe(place, rewriting)
            elif not place.forgotten:
                self._unwritten[place.id] = place
        return missed

    def store_ended(self, incarnation: int) -> None:
        for place in [p for p in self._saving.values() if p.state is State.SEALING and p.incarnation == incarnation]:
            self._owe(place)  # handed over by a rank that did not yet know of the loss
            self._void(place)
        for place in [p for p in self._orphaned.values() if p.incarnation == incarnation]:
            del self._orphaned[place.id]
            self._free(place)
        for place in self._held.pop(incarnation, ()):
            self.unpin(place)

    # ---- once a pass

    def evict_ahead(self) -> None:
        """Keep a twentieth of a full arena free, a few evictions a pass, so that speculative fills find room.

        Never at the cost of an entry whose write is owed.
        """
        if self._space.opened_bytes < self.capacity:
            return
        for place in list(islice(self._evictable, _EVICTIONS_A_PASS)):
            if self._space.free_bytes >= self._low_water:
                return
            if self._evictable_and_written(place):
                self._evictable.age(place)
                self._evict(place)

    @property
    def settled(self) -> bool:
        """Whether nothing is under way: no order, fill, save or write-through."""
        return not (any(self._orders) or self._filling or self._saving or self._dirty)

    @property
    def filling(self) -> bool:
        """Whether a fill is under way, so that part of the fill budget will become free again."""
        return bool(self._bytes["filling"])

    def outstanding(self) -> bool:
        """Whether some rank still owes a report."""
        return any(self._orders)

    def snapshot(self) -> dict[str, int]:
        """Current state and counters of the book; all integers, in bytes where the name ends in `_bytes`."""
        states = {f"places_{state.value}": self._states[state] for state in State if state is not State.FREE}
        counts = {name: value for name, value in vars(self.counts).items() if isinstance(value, int)}
        loads = {f"loads_{tier}": number for tier, number in self.counts.loads.items()}
        return {
            **states,
            "pins": self._pins,
            "leases": self._leases,
            "orders": sum(map(len, self._orders)),
            "unsaved": len(self.unsaved),
            "unwritten": len(self._unwritten),
            "rewrites_owed": len(self._rewrites),
            "live_bytes": self._bytes["live"],
            "dirty_bytes": self._bytes["dirty"],
            "filling_bytes": self._bytes["filling"],
            "leased_bytes": self._bytes["leased"],
            "opened_bytes": self._space.opened_bytes,
            "used_bytes": self._space.opened_bytes - self._space.free_bytes,
            "capacity_bytes": self.capacity,
            **counts,
            **loads,
        }

    # ---- within

    def _reserve(
        self,
        identifier: str,
        length: int,
        spec: TensorSpec | None,
        state: State,
        evictable: Callable[[Place], bool] | None,
    ) -> Place | None:
        size = aligned(length)
        extent = self._space.take(size)
        if extent is None and evictable is not None and size <= self.capacity:
            if self._space.opened_bytes < self.capacity:
                self._wanted = max(self._wanted, size)  # nothing is evicted while the arena can still grow
            else:
                extent = self._clear_window(size, evictable)
        if extent is None:
            return None
        self._ids += 1
        place = Place(self._ids, identifier, length, extent, state, spec)
        self._states[state] += 1
        extent.place = place
        self._index[identifier] = place
        return place

    def _evictable_and_written(self, place: Place) -> bool:
        return place in self._evictable and place.id not in self._unwritten

    def _clear_window(self, size: int, evictable: Callable[[Place], bool]) -> Extent | None:
        """Evict at most twice `size` bytes around one of the first eviction candidates, choosing the window with the
        least loss; or evict nothing at all."""

        def loss(place: Place) -> float | None:
            return place.extent.length * self._evictable.worth(place) if evictable(place) else None

        start: Place | None = None
        steps, best = iter(range(_WINDOW_STEPS)), Window(float("inf"), [])
        for candidate in islice(self._evictable.candidates(2 * size), _EVICTION_CANDIDATES):
            window = self._space.window(candidate.extent, size, loss, best.lost, steps)
            if window is not None:
                best, start = window, candidate
                if window.lost <= _GOOD_FIT * size * self._evictable.worth(candidate):
                    break  # later candidates are worth no less per byte
        if start is None:
            return None
        self._evictable.age(start)
        free = best.extents[0]
        for extent in best.extents:
            if extent.place is not None:
                free = self._evict(extent.place)
        return self._space.cut(free, size)

    def _evict(self, place: Place) -> Extent:
        self.counts.evictions += 1
        self.counts.evicted_bytes += place.length
        self._evictable.remove(place)
        del self._index[place.identifier]
        self._left(place)
        if self._unwritten.pop(place.id, None) is not None:
            self._owe(place)  # it never reached a tier
        return self._free(place)

    def _move(self, place: Place, state: State) -> None:
        self.revision += 1
        self._states[place.state] -= 1
        self._states[state] += 1
        place.state = state

    def _publish(self, place: Place) -> None:
        self._move(place, State.LIVE)
        self._bytes["live"] += place.length
        self._rewrites.published(place)
        if self.changes is not None and not place.forgotten:
            self.changes.admit(place.identifier, place.length)
        if place.pins:
            return
        if place.forgotten:
            self._free(place)
        else:
            place.priority = self._evictable.add(place)

    def _left(self, place: Place) -> None:
        if self.changes is not None:
            self.changes.evict(place.identifier)

    def _owe(self, place: Place) -> None:
        if place.spec is not None and not place.forgotten:
            self.remember(place.identifier, place.spec)

    def _void(self, place: Place) -> None:
        """RESERVED, WRITING or SEALING → FREE."""
        del self._saving[place.id]
        self._leave_index(place)
        self._clear_dirty(place)
        self._free(place)

    def _orphan(self, place: Place) -> None:
        self._leave_index(place)
        self._move(place, State.ORPHANED)
        self._orphaned[place.id] = place

    def _leave_index(self, place: Place) -> None:
        if self._index.get(place.identifier) is place:
            del self._index[place.identifier]

    def _free(self, place: Place) -> Extent:
        if place.state is State.LIVE:
            self._bytes["live"] -= place.length
        self._rewrites.drop(place)
        self._move(place, State.FREE)
        return self._space.give(place.extent)

    def _mark_dirty(self, place: Place) -> None:
        place.dirty = True
        self._bytes["dirty"] += place.extent.length
        self.pin(place)

    def _clear_dirty(self, place: Place) -> None:
        if not place.dirty:
            return
        place.dirty = False
        self._bytes["dirty"] -= place.extent.length
        if place.state is State.LIVE:
            self.unpin(place)
        else:
            place.pins -= 1
            self._pins -= 1

    def _use(self, place: Place) -> None:
        if self._restore_s is not None:
            self._uses.add(place.identifier)

    def _value(self, place: Place) -> float:
        """What keeping a live entry is worth, for `CostOrder`: one that was prefetched counts as used once."""
        restore_s = 0.0 if self._restore_s is None else self._restore_s(place)
        return worth(place.length, restore_s, max(1.0, self._uses.count(place.identifier)))

    def _over(self, purpose: str, place: Place, budget: int) -> bool:
        """Whether `place` would break a budget. One is always allowed, or a small arena could hold nothing."""
        held = self._bytes[purpose]
        return bool(held) and held + place.extent.length > budget


def _size(place: Place) -> int:
    return place.extent.length


def _expect(place: Place, state: State) -> None:
    if place.state is not state:
        raise LifeError(f"place {place.id} is {place.state.value}, not {state.value}")
