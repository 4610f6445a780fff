# SPDX-License-Identifier: Apache-2.0
"""The life of a place through every transition, including faults; the test simulates ranks and store process."""

import random
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache_ec.book import Book, LifeError
from lmcache_ec.channel import Outcome
from lmcache_ec.entry import TensorSpec, entry_length
from lmcache_ec.place import Place, State
from lmcache_ec.tiers.base import Landing
from tests.examples import examples

MIB = 1 << 20
RANKS = 2


def spec(mib: float) -> TensorSpec:
    return TensorSpec(int(mib * 512), 1024, "BF16")


def opened(capacity: int, ranks: int = 1) -> Book:
    book = Book(capacity, capacity, ranks)
    book.open(0, capacity)
    return book


def stored(book: Book, identifier: str, mib: float) -> Place | None:
    """A whole save, without a write to any tier."""
    place = book.reserve_save(identifier, spec(mib), persist=False)
    if place is not None:
        step = place.id
        book.send_save(place, step, 0)
        book.report(0, step, [(place.id, Outcome.COPIED, 1)], frozenset({1}))
        book.sealed(place.id, 1, True)
    return place


class Life(RuleBasedStateMachine):
    """All other parties are simulated, and hold the places that they were ordered to touch until they report so."""

    restore_s: Callable[[Place], float] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.book = Book(8 * MIB, MIB, RANKS, self.restore_s)
        self.book.open(0, 4 * MIB)
        self.book.tiers = 0b11
        self.step = 0
        self.touched: dict[Place, set[object]] = {}
        self.reserved: list[Place] = []
        self.sent: list[deque[tuple[int, Place, bool]]] = [deque() for _ in range(RANKS)]
        self.handed: list[tuple[Place, int]] = []  # copied, awaiting that store process's answer
        self.reported_copied: dict[int, int] = {}
        self.fills: list[tuple[Place, int]] = []
        self.writes: list[tuple[Place, int]] = []
        self.promised: list[Place] = []
        self.leases: list[Place] = []
        self.incarnation = 1
        self.lost: list[int] = []
        self.ids = 0  # places up to this one are no longer usable

    # ---- the test's record of which party may touch which place

    def touch(self, place: Place, who: object) -> None:
        self.touched.setdefault(place, set()).add(who)

    def release(self, place: Place, who: object) -> None:
        self.touched[place].discard(who)

    @property
    def alive(self) -> frozenset[int]:
        return frozenset({self.incarnation, *self.lost})

    @invariant()
    def nobody_touches_bytes_that_are_free_or_anothers(self) -> None:
        for place, who in self.touched.items():
            assert not who or place.state is not State.FREE, (place, who)
            assert not who or place.extent.place is place
        for place in (*self.promised, *self.leases):
            assert place.state is State.LIVE

    @invariant()
    def nothing_that_was_forgotten_is_found(self) -> None:
        for number in range(13):
            place = self.book._index.get(f"i{number}")
            assert place is None or (place.id > self.ids and not place.forgotten)

    @invariant()
    def every_byte_is_counted_once(self) -> None:
        extents = self.book._space
        free = sum(length for length, _ in extents._free)
        assert free == extents.free_bytes
        places = {*self.book._index.values(), *self.book._orphaned.values(), *(p for p in self.touched if p.forgotten)}
        used = sum(p.extent.length for p in places if p.state is not State.FREE)
        assert used + free == extents.opened_bytes

    @invariant()
    def only_what_is_live_and_may_persist_is_due_to_be_written_again(self) -> None:
        for place in self.book.owed_rewrites():
            assert (place.state, place.persist, place.forgotten) == (State.LIVE, True, False)
            assert 0 < place.owed <= self.book.tiers

    @invariant()
    def budgets_hold(self) -> None:
        now = self.book.snapshot()
        for name, share in (("filling_bytes", 4), ("dirty_bytes", 4), ("leased_bytes", 2)):
            held = now[name]
            assert held <= max(self.book.capacity // share, 2 * MIB + 8192), (name, held)

    # ---- the scheduler side

    @rule(number=st.integers(0, 12), mib=st.sampled_from([0.1, 0.5, 1.0, 2.0]), persist=st.booleans())
    def reserve(self, number: int, mib: float, persist: bool) -> None:
        place = self.book.reserve_save(f"i{number}", spec(mib), persist)
        if place is not None:
            self.reserved.append(place)

    @precondition(lambda self: self.reserved)
    @rule()
    def drop(self) -> None:
        place = self.reserved.pop()
        self.book.drop(place)
        with pytest.raises(LifeError):
            self.book.drop(place)

    @precondition(lambda self: self.reserved or self.promised)
    @rule()
    def schedule(self) -> None:
        self.step += 1
        for place in self.reserved:
            self.book.send_save(place, self.step, 0)
            self.sent[0].append((self.step, place, False))
            self.touch(place, ("rank", 0, self.step))
        for place in dict.fromkeys(self.promised):
            self.book.send_load(place, self.step)
            for rank in range(RANKS):
                self.sent[rank].append((self.step, place, True))
                self.touch(place, ("rank", rank, self.step))
        for place in set(self.promised):
            for _ in range(self.promised.count(place) - 1):
                self.book.unpin(place)
        self.reserved, self.promised = [], []

    @rule(number=st.integers(0, 12))
    def promise(self, number: int) -> None:
        place = self.book.live(f"i{number}")
        if place is not None:
            self.book.pin(place)
            self.promised.append(place)
            self.touched.setdefault(place, set())

    @precondition(lambda self: self.promised)
    @rule()
    def withdraw(self) -> None:
        self.book.unpin(self.promised.pop())

    @rule(number=st.integers(0, 12))
    def lease(self, number: int) -> None:
        place = self.book.live(f"i{number}")
        if place is not None and self.book.lease(place):
            self.leases.append(place)

    @precondition(lambda self: self.leases)
    @rule()
    def end_lease(self) -> None:
        self.book.release(self.leases.pop(0))

    @rule(number=st.integers(0, 12))
    def forget(self, number: int) -> None:
        place = self.book.live(f"i{number}")
        if place is not None:
            self.touched.setdefault(place, set())
            self.book.forget(place)
            assert self.book.live(f"i{number}") is None

    @precondition(lambda self: not self.reserved and not self.promised)
    @rule()
    def forget_all(self) -> None:
        """Between passes: the encoder's weights have changed."""
        for place in self.book._index.values():
            self.touched.setdefault(place, set())
        self.book.forget_all()
        self.ids = self.book._ids
        assert not self.book.unsaved
        assert self.book.owed_write() is None

    @rule(number=st.integers(0, 12), mib=st.sampled_from([0.1, 1.0, 2.0]), certain=st.booleans())
    def fill(self, number: int, mib: float, certain: bool) -> None:
        length = entry_length(f"i{number}", spec(mib))
        evictions = self.book.counts.evictions
        place = self.book.reserve_fill(f"i{number}", length, self.incarnation, certain)
        if not certain:
            assert self.book.counts.evictions == evictions
        if place is not None:
            self.fills.append((place, self.incarnation))
            self.touch(place, ("store", self.incarnation))

    @rule()
    def owed_write(self) -> None:
        place = self.book.owed_write()
        if place is not None:
            self.book.begin_write(place, self.incarnation)
            self.writes.append((place, self.incarnation))
            self.touch(place, ("store", self.incarnation))

    @rule()
    def owed_rewrite(self) -> None:
        place = self.book.owed_rewrite()
        if place is not None:
            self.book.begin_rewrite(place, self.incarnation)
            self.writes.append((place, self.incarnation))
            self.touch(place, ("store", self.incarnation))

    @rule(number=st.integers(0, 12), tiers=st.integers(0, 3))
    def rewrite(self, number: int, tiers: int) -> None:
        place = self.book.live(f"i{number}")
        if place is not None:
            self.touched.setdefault(place, set())
            self.book.rewrite(place, tiers)

    @rule(number=st.integers(0, 12), tier=st.integers(0, 1), landing=st.sampled_from(Landing))
    def landed(self, number: int, tier: int, landing: Landing) -> None:
        place = self.book._index.get(f"i{number}")
        if place is not None:
            self.book.landed(place.id, place.identifier, tier, landing)

    @rule(tier=st.integers(0, 1), emptied=st.booleans())
    def news(self, tier: int, emptied: bool) -> None:
        (self.book.tier_emptied if emptied else self.book.tier_back)(tier)

    @rule()
    def once_a_pass(self) -> None:
        if (segment := self.book.next_segment()) is not None:
            self.book.open(*segment)
        self.book.evict_ahead()

    # ---- the ranks

    @precondition(lambda self: any(self.sent))
    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from([rank for rank in range(RANKS) if self.sent[rank]]))
        upto = data.draw(st.sampled_from(sorted({step for step, _, _ in self.sent[rank]})))
        outcomes = []
        while self.sent[rank] and self.sent[rank][0][0] <= upto:
            step, place, load = self.sent[rank].popleft()
            outcome = data.draw(st.sampled_from([*Outcome, None]))
            if outcome is Outcome.COPIED and not load:
                # The hand-over precedes the report; the store process may answer in between.
                to = data.draw(st.sampled_from(sorted(self.alive | {self.incarnation})))
                self.touch(place, ("store", to))
                self.handed.append((place, to))
                if to == self.incarnation and data.draw(st.booleans()):
                    self.seal()
                outcomes.append((place.id, outcome, to))
            elif outcome is not None:
                outcomes.append((place.id, outcome, 0))
            self.release(place, ("rank", rank, step))
        self.book.report(rank, upto, outcomes, self.alive)

    # ---- the store process

    @precondition(lambda self: any(to == self.incarnation for _, to in self.handed))
    @rule(ok=st.booleans())
    def seal(self, ok: bool = True) -> None:
        place = next(place for place, to in self.handed if to == self.incarnation)
        self.handed.remove((place, self.incarnation))
        self.release(place, ("store", self.incarnation))
        self.book.sealed(place.id, self.incarnation, ok)
        if ok and place.state is State.LIVE and place.dirty:
            self.writes.append((place, self.incarnation))
            self.touch(place, ("store", self.incarnation))

    @precondition(lambda self: self.writes)
    @rule(ok=st.booleans())
    def write(self, ok: bool) -> None:
        place, by = self.writes.pop(0)
        if by == self.incarnation:
            self.release(place, ("store", by))
            self.book.written(place.id, ok)

    @precondition(lambda self: any(by == self.incarnation for _, by in self.fills))
    @rule(found=st.booleans())
    def answer_fill(self, found: bool) -> None:
        place, by = next((place, by) for place, by in self.fills if by == self.incarnation)
        self.fills.remove((place, by))
        self.release(place, ("store", by))
        live = self.book.filled(place.id, spec(0.1) if found else None, "disk")
        assert (live is place) == (found and place.id > self.ids)

    @rule()
    def lose_store(self) -> None:
        if len(self.lost) < 2:
            self.book.store_lost(self.incarnation)
            self.lost.append(self.incarnation)
            self.incarnation += 1

    @precondition(lambda self: self.lost)
    @rule()
    def store_ended(self) -> None:
        ended = self.lost.pop(0)
        for place in list(self.touched):
            self.release(place, ("store", ended))
        self.handed = [(place, to) for place, to in self.handed if to != ended]
        self.book.store_ended(ended)

    def teardown(self) -> None:
        """Whatever happened: once all parties are done, nothing is held and the whole arena can be reserved again."""
        self.schedule()
        for place in [*self.promised]:
            self.book.unpin(place)
        while self.leases:
            self.end_lease()
        self.lose_store()
        if self.incarnation not in self.lost and not self.lost:
            self.book.store_lost(self.incarnation)
        for number in range(1, self.incarnation + 1):
            self.book.store_lost(number)
            self.book.store_ended(number)
        for rank in range(RANKS):
            self.book.report(rank, self.step, [], frozenset())
        now = self.book.snapshot()
        kinds = ("reserved", "writing", "sealing", "filling", "orphaned")
        left = {name: now[name] for name in ("pins", "leases", "orders", *(f"places_{kind}" for kind in kinds))}
        assert not any(left.values()), left
        assert not any(now[f"{name}_bytes"] for name in ("dirty", "filling", "leased"))
        for place in [*self.book._index.values()]:
            self.book.forget(place)
        assert self.book.snapshot()["used_bytes"] == 0


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=examples(150), stateful_step_count=60, deadline=None)


class LifeByCost(Life):
    """The same with eviction by arbitrary costs of a miss."""

    restore_s = staticmethod(lambda place: place.id % 5 * 0.01)


TestLifeByCost = LifeByCost.TestCase
TestLifeByCost.settings = settings(max_examples=examples(50), stateful_step_count=60, deadline=None)


def test_a_write_that_was_lost_with_its_store_process_is_pending_again() -> None:
    book = opened(8 * MIB)
    place = book.reserve_save("a", spec(1), persist=True)
    assert place is not None
    book.send_save(place, 1, 0)
    book.report(0, 1, [(place.id, Outcome.COPIED, 1)], frozenset({1}))
    book.sealed(place.id, 1, True)
    book.store_lost(1)
    assert book.live("a") is place, "it is still there to be loaded"
    assert book.owed_write() is place
    book.begin_write(place, 2)
    book.written(place.id, True)
    assert book.snapshot()["pins"] == 1, "the lost process may still read it"
    book.store_ended(1)
    assert book.snapshot()["pins"] == 0


def test_a_save_whose_store_process_is_lost_is_remembered_and_its_bytes_wait() -> None:
    book = opened(8 * MIB)
    place = book.reserve_save("a", spec(1), persist=True)
    assert place is not None
    book.send_save(place, 1, 0)
    book.report(0, 1, [(place.id, Outcome.COPIED, 1)], frozenset({1}))
    book.store_lost(1)
    assert list(book.unsaved) == ["a"]
    assert place.state is State.ORPHANED
    book.store_ended(1)
    assert book.snapshot()["used_bytes"] == 0


def test_a_hand_over_to_a_store_process_already_lost_does_not_stay_pending_for_ever() -> None:
    book = opened(8 * MIB)
    place = book.reserve_save("a", spec(1), persist=True)
    assert place is not None
    book.send_save(place, 1, 0)
    book.store_lost(1)
    book.report(0, 1, [(place.id, Outcome.COPIED, 1)], frozenset({1, 2}))
    book.store_ended(1)
    assert book.snapshot()["used_bytes"] == 0
    assert "a" in book.unsaved


def test_the_arena_opens_more_once_half_of_what_is_open_is_used_and_never_far_ahead() -> None:
    book = Book(512 * MIB, 8 * MIB, 1)
    assert book.next_segment() == (0, 8 * MIB)
    book.open(0, 8 * MIB)
    for number in range(200):
        assert stored(book, str(number), 1)
        while (segment := book.next_segment()) is not None:
            book.open(*segment)
        now = book.snapshot()
        assert now["opened_bytes"] <= 2.5 * now["used_bytes"] + 8 * MIB
        assert now["opened_bytes"] >= 2 * now["used_bytes"] - MIB
    assert book.snapshot()["evictions"] == 0


def test_room_for_a_large_entry_is_opened_at_once_and_nothing_is_evicted_for_it() -> None:
    """A 134 MB video is not refused because only 8 MiB are open so far, nor does it evict their entries."""
    book = Book(512 * MIB, 8 * MIB, 1)
    book.open(0, 8 * MIB)
    assert stored(book, "small", 1)
    assert book.reserve_fill("maybe", 100 * MIB, 1, certain=False) is None
    assert book.next_segment() is None, "for what may not exist nothing is opened"
    assert book.reserve_fill("larger than the arena", 513 * MIB, 1, certain=True) is None
    assert book.next_segment() is None, "it would not help"
    assert stored(book, "large", 134) is None
    assert book.growing
    assert book.next_segment() == (8 * MIB, 128 * MIB)
    book.open(8 * MIB, 128 * MIB)
    assert not book.growing
    assert stored(book, "large", 134)
    assert book.snapshot()["evictions"] == 0


def test_an_arena_that_can_open_no_more_makes_do_with_what_is_open() -> None:
    book = Book(512 * MIB, 8 * MIB, 1)
    book.open(0, 8 * MIB)
    assert stored(book, "small", 3)
    assert stored(book, "large", 9) is None
    book.end_growth()
    assert not book.growing
    assert book.next_segment() is None
    assert stored(book, "large", 9) is None, "it never fits, and nothing is evicted for it"
    assert stored(book, "other", 6)
    assert (book.live("small"), book.snapshot()["evictions"]) == (None, 1)
    assert book.snapshot()["capacity_bytes"] == 8 * MIB


@pytest.mark.parametrize("seed", range(3))
def test_mixed_sizes_keep_the_arena_full_and_evict_no_more_than_twice_what_they_take(seed: int) -> None:
    """0.5 to 134 MiB into 2 GiB: at least 85 % of the bytes are live; nothing is evicted for a save that then fails."""
    book, rng = opened(2048 * MIB), random.Random(seed)
    live, failed = [], 0
    for number in range(4000):
        mib = rng.choices([0.5, 2.75, 9.8, 33.5, 134], [40, 30, 15, 10, 5])[0]
        before = book.counts.evicted_bytes
        place = stored(book, f"e{number}", mib)
        evicted = book.counts.evicted_bytes - before
        assert evicted <= 2 * (mib * MIB + 8192)
        assert place is not None or not evicted
        failed += place is None
        if number % 2:
            book.evict_ahead()
        if number > 1000:
            live.append(book.snapshot()["live_bytes"] / book.capacity)
    assert min(live) >= 0.85
    assert failed < 40


def test_eviction_takes_the_least_recently_used_and_never_a_pinned_one() -> None:
    book = opened(4 * MIB)
    for name in "abc":
        assert stored(book, name, 1)
    pinned, used = book.live("a"), book.live("b")
    assert pinned is not None
    assert used is not None
    book.pin(pinned)
    book.pin(used)
    book.unpin(used)
    assert stored(book, "d", 1)
    assert [name for name in "abcd" if book.live(name)] == ["a", "b", "d"]


def test_an_entry_that_fits_is_evicted_rather_than_an_older_one_of_nearly_twice_the_size() -> None:
    book = opened(8 * MIB)
    for name, mib in (("large", 3.5), ("apart", 0.5), ("fits", 2), ("last", 1.9)):  # no two neighbours fit together
        assert stored(book, name, mib)
    assert stored(book, "new", 2)
    assert [name for name in ("large", "apart", "fits", "last") if book.live(name)] == ["large", "apart", "last"]


def test_a_retry_evicts_nothing_whose_own_write_is_pending() -> None:
    """While a tier hangs, entries that could not be written yet must not evict one another, pass after pass."""
    book = opened(4 * MIB)
    for number, name in enumerate("abc"):  # a quarter of the arena may be dirty: the writes of b and c are owed
        place = book.reserve_save(name, spec(1), persist=True)
        assert place is not None
        book.send_save(place, number, 0)
        book.report(0, number, [(place.id, Outcome.COPIED, 1)], frozenset({1}))
        book.sealed(place.id, 1, True)
    assert book.reserve_save("d", spec(1.2), persist=True, retry=True) is None
    book.evict_ahead()
    assert [name for name in "abc" if book.live(name)] == ["a", "b", "c"]
    assert book.reserve_save("e", spec(1), persist=True) is not None, "a new save takes room all the same"
    assert [name for name in "abc" if book.live(name)] == ["a", "c"]


def test_an_entry_larger_than_the_arena_evicts_nothing() -> None:
    book = opened(4 * MIB)
    assert stored(book, "a", 1)
    assert book.reserve_save("b", spec(8), persist=False) is None
    assert book.live("a") is not None
    assert book.counts.saves_dropped == 1


def test_leases_hold_at_most_half_of_the_arena() -> None:
    book = opened(8 * MIB)
    places = [stored(book, str(number), 1) for number in range(7)]
    assert sum(book.lease(place) for place in places if place is not None) == 3


def under_way(book: Book, *identifiers: str) -> list[Place]:
    """Saves of 2 MiB each that a step has sent. With 8 MiB one may be written at a time; other writes are owed."""
    places = [book.reserve_save(identifier, spec(2), persist=True) for identifier in identifiers]
    sent = [place for place in places if place is not None]
    for place in sent:
        book.send_save(place, 1, 0)
    return sent


def test_a_small_entry_finds_room_where_only_larger_ones_are_worth_less() -> None:
    """A reservation evicts at most twice its size, so the larger entries do not help."""
    book = Book(128 * MIB, 128 * MIB, 1, lambda place: place.length * (1e-9 if place.length > MIB else 1e-8))
    book.open(0, 128 * MIB)
    for number in range(64):
        assert stored(book, f"small {number}", 0.25) is not None
    for number in range(70):
        stored(book, f"large {number}", 1.5)
    for number in range(200):
        assert stored(book, f"new {number}", 0.25) is not None, number


def test_an_entry_forgotten_on_its_way_is_finished_and_found_by_nobody() -> None:
    """Including its write-through; a write that would still be owed is not done."""
    book = opened(16 * MIB)
    written, owed = under_way(book, "a", "b")[0], under_way(book, "c")[0]
    assert written.dirty
    assert not owed.dirty
    assert book.forget_all() == 3
    book.report(0, 1, [(place.id, Outcome.COPIED, 1) for place in (written, owed)], frozenset({1}))
    for place in (written, owed):
        book.sealed(place.id, 1, True)
    assert (written.state, owed.state) == (State.LIVE, State.FREE)
    assert book.live("a") is book.live("c") is book.owed_write() is None
    book.written(written.id, True)
    assert written.state is State.FREE
    assert not book.unsaved
    assert book.settled
    assert book.snapshot()["used_bytes"] == book.snapshot()["pins"] == 0


def test_an_entry_forgotten_on_its_way_that_never_came_is_not_pending() -> None:
    book = opened(8 * MIB)
    [place] = under_way(book, "a")
    book.forget_all()
    book.report(0, 1, [], frozenset({1}))
    assert place.state is State.FREE
    assert not book.unsaved
