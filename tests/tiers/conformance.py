# SPDX-License-Identifier: Apache-2.0
"""The contract of every tier. A tier's tests subclass TierConformance and provide the fixture `tier`."""

import errno
import hashlib
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from lmcache_ec.key import EncoderCacheKey, ObjectName
from lmcache_ec.tiers.base import Tier, TierError
from tests.examples import examples

MIB = 1 << 20


def new_namespace() -> str:
    return f"ns-{uuid.uuid4().hex}"


def value(seed: str, length: int) -> memoryview:
    """Bytes such that a shifted, torn or swapped value differs from the right one."""
    return memoryview(hashlib.shake_128(seed.encode()).digest(length))


def fetch(tier: Tier, key: EncoderCacheKey) -> bytes | memoryview | None:
    """The entry as a caller reads it: with its length from a first attempt, if need be."""
    buffer = memoryview(bytearray(1))
    length = tier.get_into(key, buffer)
    if length is None:
        return None
    if length != len(buffer):
        buffer = memoryview(bytearray(length))
        assert tier.get_into(key, buffer) == length
    return bytes(buffer)


class TierConformance:
    """Needs a fixture `tier` with room for 64 MiB."""

    counts_namespaces = True
    """Whether it can report the size of each namespace, and remove one."""

    examples = 40
    """Number of random histories that are compared with a dictionary. Fewer where another class tests the same tier,
    reached or published in another way."""

    @pytest.mark.parametrize("length", [0, 1, 4095, 4096, 4097, 65_537, MIB, 9 * MIB + 13])
    def test_an_entry_comes_back_byte_for_byte(self, tier: Tier, length: int) -> None:
        key = EncoderCacheKey(new_namespace(), "picture")
        assert tier.put(key, value("a", length)) is True
        buffer = memoryview(bytearray(length))
        assert tier.get_into(key, buffer) == length
        assert buffer == value("a", length)
        assert tier.contains(key) == length

    def test_an_entry_that_was_never_put_is_a_miss(self, tier: Tier) -> None:
        key = EncoderCacheKey(new_namespace(), "picture")
        assert tier.get_into(key, memoryview(bytearray(8))) is None
        assert tier.contains(key) is None
        assert list(tier.list(key.namespace)) == []
        tier.delete(key)

    @pytest.mark.parametrize("asked", [0, 1, 9_999, 10_001, 300_000])
    def test_a_buffer_of_another_length_is_answered_with_the_length(self, tier: Tier, asked: int) -> None:
        key = EncoderCacheKey(new_namespace(), "picture")
        tier.put(key, value("a", 10_000))
        around = bytearray(b"\xaa") * (asked + 8192)
        assert tier.get_into(key, memoryview(around)[4096 : 4096 + asked]) == 10_000
        assert around[:4096] == around[4096 + asked :] == b"\xaa" * 4096

    @pytest.mark.parametrize("length", [0, 1, 4096, 70_000])
    def test_a_look_at_an_entry_shows_its_beginning_under_either_name(self, tier: Tier, length: int) -> None:
        key = EncoderCacheKey(new_namespace(), "picture")
        assert tier.peek(key, 10) is None
        tier.put(key, value("a", length))
        for name in (key, ObjectName(key.namespace, key.digest)):
            for most in (1, 4096, 70_001):
                assert tier.peek(name, most) == bytes(value("a", length)[:most])
            assert tier.contains(name) == length
        tier.delete(ObjectName(key.namespace, key.digest))
        assert tier.peek(key, 10) is None

    def test_entries_asked_for_together_have_the_same_answers_as_alone(self, tier: Tier) -> None:
        namespace = new_namespace()
        there = [EncoderCacheKey(namespace, f"picture {number}") for number in range(5)]
        absent = EncoderCacheKey(namespace, "another")
        for number, key in enumerate(there):
            tier.put(key, value(f"{number}", 1000 + number))
        asked = [there[3], absent, there[0], there[0], there[4], there[1]]
        lengths = [1003, None, 1000, 1000, 1004, 1001]
        assert tier.contains_each(asked) == lengths
        buffers = [memoryview(bytearray(size)) for size in (1003, 1000, 1000, 1000, 1003, 1001)]  # one is too short
        assert tier.get_each_into(list(zip(asked, buffers, strict=True))) == lengths
        assert [buffers[0], buffers[2], buffers[3]] == [value("3", 1003), value("0", 1000), value("0", 1000)]
        assert buffers[5] == value("1", 1001)
        assert (tier.contains_each([]), tier.get_each_into([])) == ([], [])

    def test_an_entry_is_never_replaced(self, tier: Tier) -> None:
        key = EncoderCacheKey(new_namespace(), "picture")
        assert tier.put(key, value("first", 1000)) is True
        assert tier.put(key, value("second", 1000)) is False
        assert tier.put(key, value("longer", 2000)) is False
        assert fetch(tier, key) == value("first", 1000)

    def test_a_held_entry_can_be_replaced_by_one_of_any_length(self, tier: Tier) -> None:
        key = EncoderCacheKey(new_namespace(), "picture")
        assert tier.held(key, MIB) is None
        for old, new in ((1000, 1000), (1000, 300_000), (300_000, 10), (0, 1000)):
            tier.delete(key)
            tier.put(key, value("old", old))
            held = tier.held(key, MIB)
            assert held is not None
            assert (held.length, held.data) == (old, value("old", old))
            assert tier.replace(key, value("new", new), held) is True
            assert fetch(tier, key) == value("new", new)
            assert [found.length for found in tier.list(key.namespace)] == [new]
            if tier.replace(key, value("late", new), held):  # a tier that cannot tell replaces another entry
                assert fetch(tier, key) == value("late", new)
            else:
                assert fetch(tier, key) == value("new", new)

    def test_an_entry_longer_than_asked_for_is_held_without_its_bytes(self, tier: Tier) -> None:
        key = EncoderCacheKey(new_namespace(), "picture")
        tier.put(key, value("old", 5000))
        held = tier.held(key, 4999)
        assert held is not None
        assert (held.length, held.data) == (5000, None)
        assert tier.replace(key, value("new", 10), held) is True
        assert fetch(tier, key) == value("new", 10)

    def test_a_deleted_entry_is_absent_and_can_be_put_again(self, tier: Tier) -> None:
        key, other = (EncoderCacheKey(new_namespace(), "picture") for _ in range(2))
        tier.put(key, value("a", 10))
        tier.put(other, value("b", 10))
        assert tier.delete(key) is True
        assert fetch(tier, key) is None
        assert fetch(tier, other) == value("b", 10)
        assert tier.put(key, value("c", 20)) is True
        assert fetch(tier, key) == value("c", 20)

    @pytest.mark.parametrize("identifier", ["../../etc/passwd", "/", "\x00\n\r*?[", "ü😀", "x" * 4096, "a b%2F:{}#"])
    def test_any_identifier_names_an_entry(self, tier: Tier, identifier: str) -> None:
        key = EncoderCacheKey(new_namespace(), identifier)
        tier.put(key, value("a", 100))
        assert fetch(tier, key) == value("a", 100)
        assert [found.digest for found in tier.list(key.namespace)] == [key.digest]

    def test_a_list_has_each_entry_of_its_namespace_and_no_other(self, tier: Tier) -> None:
        namespace = new_namespace()
        keys = [EncoderCacheKey(namespace, f"picture {number}") for number in range(40)]
        for number, key in enumerate(keys):
            tier.put(key, value("a", number))
        tier.put(EncoderCacheKey(namespace + "-2", "picture 1"), value("b", 7))
        found = list(tier.list(namespace))
        assert {one.digest: one.length for one in found} == {key.digest: number for number, key in enumerate(keys)}
        assert len(found) == len(keys)

    def test_a_tiers_own_writes_are_no_news_to_it(self, tier: Tier) -> None:
        key = EncoderCacheKey(new_namespace(), "picture")
        assert list(tier.news(key.namespace)) == []
        tier.put(key, value("a", 1000))
        assert list(tier.news(key.namespace)) == []

    def test_the_size_of_each_namespace_is_counted_and_counting_changes_nothing(self, tier: Tier) -> None:
        if not self.counts_namespaces:
            with pytest.raises(TierError, match="cannot be listed") as raised:
                list(tier.namespaces())
            assert raised.value.errno == errno.EOPNOTSUPP
            return
        small, large = new_namespace(), new_namespace()
        began = time.time()
        tier.put(EncoderCacheKey(small, "picture"), value("a", 10))
        for number in range(30):
            tier.put(EncoderCacheKey(large, f"picture {number}"), value("b", 1000))
        moments: dict[str, float] = {}
        for _ in range(2):
            found = list(tier.namespaces())
            uses = {use.namespace: use for use in found}
            assert len(uses) == len(found)
            assert (uses[small].entries, uses[small].bytes) == (1, 10)
            assert (uses[large].entries, uses[large].bytes) == (30, 30_000)
            for name in (small, large):
                moment = uses[name].used or uses[name].written
                assert moment is not None
                assert began - 2 < moment < time.time() + 2  # Redis counts whole seconds, S3 may have another clock
                assert abs(moments.setdefault(name, moment) - moment) < 2
        assert fetch(tier, EncoderCacheKey(small, "picture")) == value("a", 10)

    def test_a_namespace_is_removed_whole_and_alone_and_can_be_filled_again(self, tier: Tier) -> None:
        namespace = new_namespace()
        if not self.counts_namespaces:
            with pytest.raises(TierError, match="cannot be listed"):
                tier.remove(namespace)
            return
        assert tier.remove(namespace) == 0
        keys = [EncoderCacheKey(namespace, f"picture {number}") for number in range(30)]
        other = EncoderCacheKey(namespace + "-2", "picture 1")
        for key in (*keys, other):
            tier.put(key, value("a", 100))
        assert tier.remove(namespace) == len(keys)
        assert [tier.contains(key) for key in keys] == [None] * len(keys)
        assert list(tier.list(namespace)) == []
        names = [use.namespace for use in tier.namespaces()]
        assert namespace not in names
        assert other.namespace in names
        assert fetch(tier, other) == value("a", 100)
        assert tier.put(keys[0], value("b", 200)) is True
        assert fetch(tier, keys[0]) == value("b", 200)
        for bad in ("", "..", "a/b", "*"):
            with pytest.raises(ValueError, match="namespace"):
                tier.remove(bad)

    def test_the_name_of_a_tiers_content_outlasts_all_ordinary_use_and_is_no_entry(self, tier: Tier) -> None:
        """Only emptying it from outside changes the name, which is the evidence for writing everything again."""
        namespace = new_namespace()
        keys = [EncoderCacheKey(namespace, f"picture {number}") for number in range(4)]
        name = tier.born()
        for key in keys:
            tier.put(key, value("a", 100))
        assert len(list(tier.list(namespace))) == len(keys)
        tier.maintain()
        tier.delete(keys[0])
        if self.counts_namespaces:
            assert sum(use.entries for use in tier.namespaces() if use.namespace == namespace) == 3
            assert tier.remove(namespace) == 3
        else:
            for key in keys:
                tier.delete(key)
        assert list(tier.list(namespace)) == []
        tier.maintain()
        assert tier.born() == name

    def test_whether_a_tier_takes_writes_is_checked_without_writing_anything(self, tier: Tier) -> None:
        key = EncoderCacheKey(new_namespace(), "picture")
        for _ in range(2):
            assert tier.check_writes() in (True, False)
        assert list(tier.list(key.namespace)) == []
        assert tier.put(key, value("a", 10)) is True
        tier.check_writes()
        assert fetch(tier, key) == value("a", 10)
        assert not tier.read_only

    def test_values_of_one_key_are_never_mixed(self, tier: Tier) -> None:
        """Writers of different bytes, a deleter and readers, all on one key at the same time."""
        key, length, rounds = EncoderCacheKey(new_namespace(), "picture"), 300_000, 30
        values = [bytes([number]) * length for number in range(1, 5)]

        def write(number: int) -> int:
            return sum(tier.put(key, memoryview(values[number])) for _ in range(rounds))

        def read() -> set[bytes]:
            seen, buffer = set(), memoryview(bytearray(length))
            for _ in range(rounds):
                if tier.get_into(key, buffer) == length:
                    seen.add(bytes(buffer))
            return seen

        def remove() -> None:
            for _ in range(rounds):
                tier.delete(key)

        with ThreadPoolExecutor(9) as threads:
            removal = threads.submit(remove)
            reads = [threads.submit(read) for _ in range(4)]
            writes = [threads.submit(write, number) for number in range(4)]
            removal.result()
            assert set().union(*(one.result() for one in reads)) <= set(values)
            assert sum(one.result() for one in writes) >= 1

    def test_one_of_many_writers_at_once_wins(self, tier: Tier) -> None:
        key, start = EncoderCacheKey(new_namespace(), "picture"), threading.Barrier(8)

        def write(number: int) -> bool:
            data = value(str(number), 50_000)
            start.wait()
            return tier.put(key, data)

        with ThreadPoolExecutor(8) as threads:
            won = list(threads.map(write, range(8)))
        assert won.count(True) == 1
        assert fetch(tier, key) == value(str(won.index(True)), 50_000)

    def test_a_tier_is_a_dictionary(self, tier: Tier) -> None:
        live(tier, examples(self.examples))

    @pytest.mark.slow
    def test_a_tier_is_a_dictionary_in_many_more_lives(self, tier: Tier) -> None:
        live(tier, 120)


def live(tier: Tier, examples: int) -> None:
    limits = settings(max_examples=examples, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(machine_over(tier), settings=limits)


def machine_over(tier: Tier) -> type[RuleBasedStateMachine]:
    """Compares a tier with a dictionary, each example in its own namespace."""
    names = st.sampled_from(["a", "b", "c", "../d", "é"])

    class TierMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.namespace = new_namespace()
            self.model: dict[str, bytes] = {}

        def key(self, name: str) -> EncoderCacheKey:
            return EncoderCacheKey(self.namespace, name)

        @rule(name=names, data=st.binary(max_size=40))
        def put(self, name: str, data: bytes) -> None:
            assert tier.put(self.key(name), memoryview(data)) is (name not in self.model)
            self.model.setdefault(name, data)

        @rule(name=names)
        def fetch(self, name: str) -> None:
            assert fetch(tier, self.key(name)) == self.model.get(name)

        @rule(name=names, length=st.integers(0, 50))
        def get_into(self, name: str, length: int) -> None:
            buffer, held = bytearray(length), self.model.get(name)
            assert tier.get_into(self.key(name), memoryview(buffer)) == (None if held is None else len(held))
            if held is not None and len(held) == length:
                assert buffer == held

        @rule(name=names)
        def contains(self, name: str) -> None:
            held = self.model.get(name)
            assert tier.contains(self.key(name)) == (None if held is None else len(held))

        @rule(name=names)
        def delete(self, name: str) -> None:
            tier.delete(self.key(name))
            self.model.pop(name, None)

        @rule()
        def maintain(self) -> None:
            tier.maintain()

        @invariant()
        def the_list_is_complete(self) -> None:
            expected = {self.key(name).digest: len(held) for name, held in self.model.items()}
            assert {found.digest: found.length for found in tier.list(self.namespace)} == expected

    return TierMachine
