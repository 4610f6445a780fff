# SPDX-License-Identifier: Apache-2.0
"""Which entries are rewritten to a tier, when, and in what order; the test simulates the store process."""

from lmcache_ec.book import Book
from lmcache_ec.channel import Outcome
from lmcache_ec.entry import TensorSpec, entry_length
from lmcache_ec.place import Place
from lmcache_ec.tiers.base import Landing

MIB = 1 << 20
SPEC = TensorSpec(512, 1024, "BF16")
DISK, NEAR, FAR = range(3)
ALL = 0b111


def a_book(mib: int = 64) -> Book:
    book = Book(mib * MIB, mib * MIB, 1)
    book.open(0, mib * MIB)
    book.tiers = ALL
    return book


def saved(book: Book, identifier: str, *, persist: bool = True, answers: dict[int, Landing] | None = None) -> Place:
    """A whole save and write; each tier answers TOOK, unless `answers` has another answer for it."""
    place = book.reserve_save(identifier, SPEC, persist)
    assert place is not None
    book.send_save(place, place.id, 0)
    book.report(0, place.id, [(place.id, Outcome.COPIED, 1)], frozenset({1}))
    book.sealed(place.id, 1, True)
    if persist:
        answered(book, place, ALL, answers)
    return place


def answered(book: Book, place: Place, tiers: int, answers: dict[int, Landing] | None = None) -> None:
    for tier in (tier for tier in (DISK, NEAR, FAR) if tiers >> tier & 1):
        book.landed(place.id, place.identifier, tier, (answers or {}).get(tier, Landing.TOOK))
    book.written(place.id, True)


def written_again(book: Book, number: int = 100) -> list[tuple[str, int]]:
    """Identifiers and tiers of the rewrites ordered now, one after another, each answered at once."""
    done: list[tuple[str, int]] = []
    while len(done) < number and (place := book.owed_rewrite()) is not None:
        tiers = place.owed
        book.begin_rewrite(place, 1)
        answered(book, place, tiers)
        done.append((place.identifier, tiers))
    return done


def load(book: Book, place: Place) -> None:
    book.pin(place)
    book.unpin(place)


def test_a_tier_that_is_back_gets_what_it_failed_to_take_and_nothing_else() -> None:
    book = a_book()
    saved(book, "taken")
    saved(book, "refused", answers={NEAR: Landing.REFUSED})
    saved(book, "failed", answers={NEAR: Landing.FAILED})
    saved(book, "failed elsewhere", answers={FAR: Landing.FAILED})
    saved(book, "a client's own", persist=False)
    assert written_again(book) == []
    book.tier_back(NEAR)
    assert written_again(book) == [("failed", 1 << NEAR)]
    book.tier_back(NEAR)
    assert written_again(book) == []


def test_an_emptied_tier_gets_all_that_is_live_the_hottest_first() -> None:
    book = a_book()
    places = [saved(book, name) for name in "abcd"]
    saved(book, "a client's own", persist=False)
    saved(book, "refused", answers={FAR: Landing.REFUSED})
    load(book, places[1])
    book.tier_emptied(FAR)
    assert not any(place.tiers >> FAR & 1 for place in places)
    assert written_again(book) == [(name, 1 << FAR) for name in ("b", "refused", "d", "c", "a")]
    assert all(place.tiers == ALL for place in places)


def test_an_entry_that_was_in_use_when_the_news_came_is_written_after_its_use() -> None:
    book = a_book()
    place = saved(book, "a")
    book.pin(place)
    book.tier_emptied(DISK)
    assert written_again(book) == []
    book.unpin(place)
    assert written_again(book) == [("a", 1 << DISK)]
    load(book, place)
    assert written_again(book) == []


def test_a_fetched_entry_is_written_to_the_nearer_tiers_that_missed_it_once_they_are_back() -> None:
    book = a_book()
    for name, landing in (("promoted", Landing.TOOK), ("not promoted", Landing.FAILED)):
        place = book.reserve_fill(name, entry_length(name, SPEC), 1, certain=True)
        assert place is not None
        book.landed(place.id, name, DISK, Landing.TOOK)
        book.filled(place.id, SPEC, "far", FAR)
        book.landed(place.id, name, NEAR, landing)
        assert place.tiers == (1 << DISK | 1 << FAR | (1 << NEAR) * (landing is Landing.TOOK))
    for tier in (DISK, NEAR, FAR):
        book.tier_back(tier)
    assert written_again(book) == [("not promoted", 1 << NEAR)]


def test_writing_again_takes_half_of_the_budget() -> None:
    book = a_book(64)  # of which 16 may be unwritten
    places = [saved(book, f"{number}") for number in range(12)]
    book.tier_emptied(DISK)
    ordered = []
    while (place := book.owed_rewrite()) is not None:
        book.begin_rewrite(place, 1)
        ordered.append(place)
    assert ordered == places[:-8:-1]
    assert book.snapshot()["dirty_bytes"] <= 8 * MIB
    new = book.reserve_save("new", SPEC, persist=True)
    assert new is not None
    assert new.dirty, "there is room for what was never written"
    book.drop(new)
    answered(book, ordered[0], 1 << DISK)
    assert written_again(book, 1) == [(places[4].identifier, 1 << DISK)]


def test_first_writes_go_before_rewrites() -> None:
    book = a_book(4)  # of which one may be unwritten
    first, second = saved(book, "a"), saved(book, "b")
    book.tier_emptied(DISK)
    unwritten = [book.reserve_save(name, SPEC, persist=True) for name in ("c", "d")]
    for place in filter(None, unwritten):
        book.send_save(place, place.id, 0)
        book.report(0, place.id, [(place.id, Outcome.COPIED, 1)], frozenset({1}))
        book.sealed(place.id, 1, True)
    assert book.snapshot()["unwritten"] == 1
    answered(book, next(place for place in unwritten if place is not None and place.dirty), ALL)
    assert (book.owed_rewrite(), book.owed_write()) == (None, unwritten[1])
    book.begin_write(book.owed_write(), 1)  # type: ignore[arg-type]
    answered(book, unwritten[1], ALL)  # type: ignore[arg-type]
    again = {name for name, _ in written_again(book)}
    assert again == {place.identifier for place in (first, second) if book.live(place.identifier) is place}


def test_rewrites_lost_with_a_store_process_are_due_again_for_the_same_tiers() -> None:
    book = a_book()
    place = saved(book, "a")
    book.tier_emptied(NEAR)
    assert book.owed_rewrite() is place
    book.begin_rewrite(place, 1)
    book.store_lost(1)
    assert (book.owed_write(), book.owed_rewrite()) == (None, place)
    assert place.owed == 1 << NEAR
    book.store_ended(1)
    assert written_again(book) == [("a", 1 << NEAR)]
    assert book.snapshot()["pins"] == 0


def test_an_entry_that_leaves_the_arena_is_no_longer_due() -> None:
    book = a_book(8)
    places = [saved(book, f"{number}") for number in range(6)]
    book.tier_emptied(DISK)
    book.forget(places[0])
    assert book.reserve_save("large", TensorSpec(5 * 512, 1024, "BF16"), persist=False) is not None  # evicts for it
    left = [place for place in places if book.live(place.identifier) is place]
    assert 0 < len(left) < 5
    assert sorted(name for name, _ in written_again(book)) == sorted(place.identifier for place in left)
    assert book.snapshot()["rewrites_owed"] == 0


def test_the_answer_about_a_place_that_was_freed_changes_nothing() -> None:
    book = a_book()
    first = saved(book, "a", answers={NEAR: Landing.FAILED})
    book.forget(first)
    second = saved(book, "a")
    book.landed(first.id, "a", NEAR, Landing.FAILED)
    assert (second.tiers, second.lacks) == (ALL, 0)
