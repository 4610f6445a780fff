# SPDX-License-Identifier: Apache-2.0
"""Added keys are never denied, whatever the writer does meanwhile; deleted keys are dropped; sizes and error rates."""

import hashlib
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.testbed.waiting import wait_until
from lmcache_ec import presence as module
from lmcache_ec.presence import PresenceFilter, PresenceWriter
from tests.examples import examples

TIERS = ["disk", "redis"]
KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def writer() -> Iterator[PresenceWriter]:
    writer = PresenceWriter.create(TIERS)
    yield writer
    writer.close()


@contextmanager
def reader_of(writer: PresenceWriter, tiers: Sequence[str] = TIERS) -> Iterator[PresenceFilter]:
    reader = PresenceFilter.attach(os.dup(writer.fd), tiers)
    try:
        yield reader
    finally:
        reader.close()


def digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def digests(prefix: str, count: int) -> list[bytes]:
    return [digest(f"{prefix}{number}") for number in range(count)]


def list_all(writer: PresenceWriter, keys: Iterable[bytes], tier: str = "disk") -> None:
    with writer.listing(tier) as add:
        for key in keys:
            add(key)


def mistaken(reader: PresenceFilter, asked: int = 50_000) -> float:
    """The share of false positives among keys that were never added."""
    return sum(map(reader.may_contain, digests("out", asked))) / asked


def resident_bytes(writer: PresenceWriter) -> int:
    return os.fstat(writer.fd).st_blocks * 512


# ---- never denied


class Interrupted:
    """The memory as a reader sees it: before each word that it reads, something changes it."""

    def __init__(self, words: memoryview) -> None:
        self.words = words
        self.happens: list[Callable[[], None]] = []

    def __getitem__(self, place: int) -> int:
        if self.happens:
            self.happens.pop(0)()
        return int(self.words[place])

    def release(self) -> None:
        self.words.release()


class Watched:
    """The memory as the writer has it: before and after each operation on it, a reader looks."""

    def __init__(self, memory: Any, look: Callable[[], None]) -> None:
        self._memory = memory
        self._look = look

    def __getitem__(self, place: int | slice) -> Any:
        return self._memory[place]

    def __setitem__(self, place: int | slice, value: object) -> None:
        self._look()
        self._memory[place] = value
        self._look()

    def madvise(self, *arguments: int) -> None:
        self._look()
        self._memory.madvise(*arguments)
        self._look()


class Model:
    """A writer, small enough to grow and shrink within a few keys, and the keys that its filter must not deny."""

    def __init__(self) -> None:
        self.writer = PresenceWriter.create(["disk"])
        self.reader = PresenceFilter.attach(os.dup(self.writer.fd), ["disk"])
        self.words = Interrupted(self.reader._words)
        self.reader._words = self.words  # type: ignore[assignment]
        self.known: set[bytes] = set()
        self.listed: set[bytes] | None = None
        self.forgotten: set[bytes] = set()
        """Keys dropped since the look-up began."""

    def add(self, number: int) -> None:
        self._take(number, partial(self.writer.add, "disk"))

    def list_some(self, number: int) -> None:
        if self.listed is not None:
            self._take(number, self.list_one)

    def _take(self, number: int, take: Callable[[bytes], object]) -> None:
        for key in digests(f"{number} of ", 40):
            take(key)
            self.known.add(key)
            if self.listed is not None:
                self.listed.add(key)

    def begin(self) -> None:
        if self.listed is None:
            self.listing = self.writer.listing("disk")
            self.list_one = self.listing.__enter__()
            self.listed = set()

    def finish(self) -> None:
        if self.listed is not None:
            self.listing.__exit__(None, None, None)
            self.forgotten |= self.known - self.listed
            self.known, self.listed = self.listed, None

    def abandon(self) -> None:
        if self.listed is not None:
            self.listing.__exit__(ConnectionError, ConnectionError(), None)
            self.listed = None

    def relist(self) -> None:
        """A complete listing of all known keys."""
        if self.listed is None:
            list_all(self.writer, self.known)

    def look(self, key: bytes, meanwhile: list[Callable[[], None]]) -> None:
        owed, self.forgotten = key in self.known, set()
        self.words.happens = meanwhile
        answer, self.words.happens = self.reader.may_contain(key), []
        assert answer or not owed or key in self.forgotten

    def close(self) -> None:
        if self.listed is not None:
            self.finish()
        self.reader.close()
        self.writer.close()


@contextmanager
def small_sizes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (("_SMALLEST_BYTES", 64), ("_FIRST_BYTES", 256), ("_REGION_BYTES", mmap.PAGESIZE)):
            patch.setattr(module, name, size)
        yield


def test_a_key_that_was_added_is_never_denied_whatever_the_writer_is_doing() -> None:
    """While it adds, grows, lists, shrinks, swaps, gives up, and releases memory."""
    with small_sizes():
        writer, stored = PresenceWriter.create(["disk"]), digests("stored", 20)
        with reader_of(writer, ["disk"]) as reader:
            looks: list[bool] = []
            bits = writer._bits["disk"]

            def look() -> None:
                looks.append(all(map(reader.may_contain, stored)))

            list_all(writer, stored)
            bits._words = words = Watched(bits._words, look)  # type: ignore[assignment]
            for region in bits._regions:
                region._words, region._memory = words, Watched(region._memory, look)  # type: ignore[assignment]
            for size in (0, 200, 20):
                list_all(writer, stored + digests("other", size))
                for key in digests(f"after {size} ", 150):
                    writer.add("disk", key)
            with pytest.raises(ZeroDivisionError), writer.listing("disk"):
                raise ZeroDivisionError
        assert len(looks) > 2000
        assert all(looks)
        writer.close()


Action = Callable[[Model], None]
KEYS = [key for number in range(6) for key in digests(f"{number} of ", 40)]


def actions() -> st.SearchStrategy[Action]:
    numbered = [Model.add, Model.list_some]
    plain: list[Action] = [Model.begin, Model.finish, Model.finish, Model.abandon, Model.relist]
    return st.sampled_from(plain) | st.builds(
        lambda action, number: lambda model: action(model, number), st.sampled_from(numbered), st.integers(0, 5)
    )


@given(st.lists(st.tuples(actions(), st.sampled_from(KEYS), st.lists(actions(), max_size=5)), max_size=30))
@settings(max_examples=examples(300), deadline=None)
def test_a_key_that_was_added_is_never_denied_whatever_happens_between_two_reads_of_a_look(
    program: list[tuple[Action, bytes, list[Action]]],
) -> None:
    with small_sizes():
        model = Model()
        for action, key, meanwhile in program:
            action(model)
            model.look(key, [partial(happens, model) for happens in meanwhile])
        assert all(map(model.reader.may_contain, model.known))
        model.close()


LISTS_FOR_EVER = """
import hashlib, itertools, os, sys, threading
from lmcache_ec.presence import PresenceWriter
digests = lambda prefix, count: [hashlib.sha256(f"{prefix}{n}".encode()).digest() for n in range(count)]
writer, stored, sizes = PresenceWriter.create(["disk"]), digests("stored", 500), itertools.cycle((0, 100_000, 10_000))
others = digests("other", 100_000)
for key in stored:
    writer.add("disk", key)
print(os.getpid(), writer.fd, flush=True)
for size in sizes:
    with writer.listing("disk") as add:
        for key in others[:size]:
            add(key)
        for key in stored:
            add(key)
    print(size, flush=True)
"""


def test_another_process_lists_again_and_again_and_nothing_it_lists_is_ever_denied_here() -> None:
    """It swaps, grows and shrinks as needed, while this process looks without a pause."""
    stored, seen = digests("stored", 500), list[str]()
    with subprocess.Popen([sys.executable, "-c", LISTS_FOR_EVER], stdout=subprocess.PIPE, text=True) as lister:
        assert lister.stdout is not None
        pid, fd = map(int, lister.stdout.readline().split())
        reader = PresenceFilter.attach(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR), ["disk"])
        counter = threading.Thread(target=lambda: seen.extend(lister.stdout or ()))
        counter.start()

        def listed_often_and_nothing_denied() -> bool:
            assert all(map(reader.may_contain, stored))
            return len(seen) >= 9

        wait_until("it has listed often", listed_often_and_nothing_denied, 60, pause_s=0)
        lister.kill()
        counter.join()
        reader.close()


def test_keys_that_a_thread_adds_while_another_lists_again_and_again_are_not_lost(writer: PresenceWriter) -> None:
    stored, often = list[bytes](), sys.getswitchinterval()

    def store() -> None:
        for key in digests("in", 10_000):
            stored.append(key)
            writer.add("disk", key)

    sys.setswitchinterval(1e-6)
    try:
        thread = threading.Thread(target=store)
        thread.start()
        while thread.is_alive():
            list_all(writer, stored)  # read once the listing has begun, as a tier reads its folder
    finally:
        sys.setswitchinterval(often)
    assert all(map(writer.may_contain, stored))


# ---- forgotten


def test_keys_that_a_listing_no_longer_shows_are_forgotten_and_those_added_meanwhile_are_not(
    writer: PresenceWriter,
) -> None:
    stored, deleted, meanwhile = (digests(name, 2000) for name in ("stored", "deleted", "meanwhile"))
    list_all(writer, stored + deleted)
    with reader_of(writer) as reader:
        assert all(map(reader.may_contain, deleted))
        with writer.listing("disk") as add:
            for key, new in zip(stored, meanwhile, strict=True):
                add(key)
                writer.add("disk", new)
            assert all(map(reader.may_contain, deleted)), "not before the listing is through"
        assert all(map(reader.may_contain, stored + meanwhile))
        assert sum(map(reader.may_contain, deleted)) < 20


def test_listed_keys_count_before_the_listing_is_complete(writer: PresenceWriter) -> None:
    with writer.listing("disk") as add:
        assert not writer.may_contain(digest("early"))
        add(digest("early"))
        assert writer.may_contain(digest("early"))


def test_a_listing_that_is_cut_off_forgets_nothing_and_adds_what_it_saw(writer: PresenceWriter) -> None:
    list_all(writer, [digest("before")])

    def cut_off() -> Iterator[bytes]:
        yield digest("seen")
        raise ConnectionError

    with pytest.raises(ConnectionError):
        list_all(writer, cut_off())
    assert writer.may_contain(digest("before"))
    assert writer.may_contain(digest("seen"))
    list_all(writer, [digest("seen")])
    assert not writer.may_contain(digest("before"))


def test_a_listing_of_one_tier_touches_nothing_of_another(writer: PresenceWriter) -> None:
    writer.add("disk", digest("on disk"))
    writer.add("redis", digest("in redis"))
    list_all(writer, [], "redis")
    assert writer.may_contain(digest("on disk"))
    assert writer.may_contain(digest("on disk"), "disk")
    assert not writer.may_contain(digest("on disk"), "redis")
    assert not writer.may_contain(digest("in redis"))


# ---- how large, and how often mistaken


@pytest.mark.parametrize("count", [0, 100, 40_000, 100_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_after_a_listing_false_positives_are_under_one_percent_at_25_bits_a_key(
    writer: PresenceWriter, count: int
) -> None:
    keys = digests("in", count)
    list_all(writer, keys)
    smallest = len(TIERS) * 128 * KIB + 8 * KIB
    assert resident_bytes(writer) <= smallest + count * 25 // 8
    with reader_of(writer) as reader:
        assert mistaken(reader) <= 0.01
    list_all(writer, keys)
    assert resident_bytes(writer) <= smallest + count * 25 // 8
    assert all(map(writer.may_contain, keys))


def test_a_filter_that_fills_between_two_listings_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error rate is higher than that of one sized for its count, but far lower than without growth."""
    monkeypatch.setattr(module, "_SMALLEST_BYTES", 16 * KIB)
    writer, keys = PresenceWriter.create(TIERS), digests("in", 50_000)
    list_all(writer, keys[:100])
    with reader_of(writer) as reader:
        for key in keys:
            writer.add("disk", key)
        assert all(map(reader.may_contain, keys))
        assert mistaken(reader) <= 0.15
        list_all(writer, keys)
        assert mistaken(reader) <= 0.01
    writer.close()


def test_a_filter_stops_growing_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its largest size it accepts more keys without more memory."""
    monkeypatch.setattr(module, "_SMALLEST_BYTES", 16 * KIB)
    monkeypatch.setattr(module, "_REGION_BYTES", 32 * KIB)
    small, keys = PresenceWriter.create(["disk"]), digests("in", 50_000)
    for key in keys:
        small.add("disk", key)
    list_all(small, keys)
    assert all(map(small.may_contain, keys))
    assert resident_bytes(small) <= 32 * KIB + 8 * KIB
    small.close()


def test_where_memory_cannot_be_given_back_its_keys_are_forgotten_all_the_same(
    writer: PresenceWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in sandboxes that do not support the call."""
    monkeypatch.setattr(mmap, "MADV_REMOVE", 4242)
    for name in ("first", "second", "third"):
        list_all(writer, digests(name, 1000))
        assert all(map(writer.may_contain, digests(name, 1000)))
    assert sum(map(writer.may_contain, digests("first", 1000) + digests("second", 1000))) < 20


@pytest.mark.slow
def test_ten_million_keys_take_16_mib_with_false_positives_under_one_percent() -> None:
    writer, count = PresenceWriter.create(["disk"]), 10_000_000
    for _ in range(2):
        with writer.listing("disk") as add:
            for number in range(count):
                add(digest(f"in{number}"))
        assert resident_bytes(writer) <= 16 * MIB + 8 * KIB
        with reader_of(writer, ["disk"]) as reader:
            assert all(reader.may_contain(digest(f"in{number}")) for number in range(0, count, 7))
            assert mistaken(reader) <= 0.01
    writer.close()


# ---- flags, and memory that is not a filter


def test_flags_are_a_tiers_own_and_seen_by_the_reader(writer: PresenceWriter) -> None:
    with reader_of(writer) as reader:
        writer.set_complete("redis")
        assert (reader.complete("disk"), reader.complete("redis"), reader.all_complete) == (False, True, False)
        writer.set_complete("disk")
        assert reader.all_complete
        list_all(writer, digests("in", 1000))
        assert reader.all_complete
        writer.set_complete("redis", False)
        assert not reader.all_complete
        for unknown in (lambda: reader.complete("s3"), lambda: reader.may_contain(digest("x"), "s3")):
            with pytest.raises(KeyError):
                unknown()


def test_flags_and_bits_do_not_touch_each_other(writer: PresenceWriter) -> None:
    for tier in TIERS:
        writer.set_complete(tier)
    assert not any(map(writer.may_contain, digests("any", 10_000)))


def test_without_tiers_a_no_can_be_relied_on() -> None:
    presence = PresenceWriter.create([])
    assert presence.all_complete
    assert not presence.may_contain(digest("any"))
    presence.close()


@pytest.mark.parametrize("tiers", [["disk"], ["redis", "disk"], []])
def test_a_filter_over_other_tiers_is_refused(writer: PresenceWriter, tiers: list[str]) -> None:
    with pytest.raises(ValueError, match="no presence filter"):
        PresenceFilter.attach(writer.fd, tiers)
    os.fstat(writer.fd)  # still ours


def test_a_descriptor_of_something_else_is_refused(writer: PresenceWriter) -> None:
    fd = os.memfd_create("other")
    for size in (0, os.fstat(writer.fd).st_size):
        os.ftruncate(fd, size)
        with pytest.raises(ValueError, match="no presence filter"):
            PresenceFilter.attach(fd, TIERS)
    os.close(fd)


def test_nobody_can_shrink_the_filter_under_its_readers(writer: PresenceWriter) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(writer.fd, 0)


def test_close_gives_the_descriptor_back_and_may_be_repeated() -> None:
    presence = PresenceWriter.create(["disk"])
    presence.add("disk", digest("x"))
    presence.close()
    presence.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(presence.fd)
