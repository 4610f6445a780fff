# SPDX-License-Identifier: Apache-2.0
"""A subscriber knows what the book holds, whatever is lost on the way; and the addresses at which engines publish."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lmcache_ec.book import Book
from lmcache_ec.channel import CpuChanges, Outcome
from lmcache_ec.config import ConfigError, resolve
from lmcache_ec.entry import TensorSpec
from lmcache_ec.events.batch import EntriesAdmitted, EventBatch, decode, encode
from lmcache_ec.events.changes import Changes
from lmcache_ec.events.endpoints import Replica, of_rank, snapshots_of
from lmcache_ec.events.mirror import Mirror
from lmcache_ec.events.source import Numbered, Source
from lmcache_ec.link import pair
from lmcache_ec.place import Place
from tests.examples import examples

PAGE = 4096
IDENTIFIERS = st.integers(0, 11).map("picture-{}".format)
SOME = st.lists(IDENTIFIERS, min_size=1, max_size=3)
ROOM = st.sampled_from([9, 9, 9, 1, 0])
WEATHER = st.sampled_from(["fine", "fine", "fine", "slow", "lossy", "garbled"])
ANSWERED = st.sampled_from(["now", "now", "later", "never"])


class Following(RuleBasedStateMachine):
    """A book, a store process, a subscriber; the link between the first two may be full, the wire may lose anything.

    `history` has the contents of each session at each of its numbers. The subscriber begins in step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.book = Book(6 * PAGE, PAGE, 1)
        self.book.open_all()
        self.book.changes = self.changes = Changes(self.book.entries)
        self.namespace = "first"
        self.encoding: list[Place] = []
        self.history: dict[tuple[str, int], tuple[str, dict[str, int]]] = {}
        self.wire: deque[Numbered] = deque()
        self.answers: deque[Numbered] = deque()
        self.join_late()
        self.begin_store_process()
        self.ask("now")

    @rule(identifiers=SOME, sealed=st.integers(1, 4), room=ROOM, weather=WEATHER, then=WEATHER, answered=ANSWERED)
    def run_pass(self, identifiers: list[str], sealed: int, room: int, weather: str, then: str, answered: str) -> None:
        """A pass, reported in one weather; a heartbeat in the next; and a question, if the subscriber has one."""
        self.serve(identifiers, sealed, room)
        self.report(room, weather)
        self.beat(then)
        if not self.mirror.in_step:
            self.ask(answered)

    # ---- the engine

    def serve(self, identifiers: list[str], sealed: int, rows: int) -> None:
        """Seal the first `sealed` saves, in an arena of six pages: others are evicted."""
        for identifier in identifiers:
            place = self.book.reserve_save(identifier, TensorSpec(60 + 20 * rows, 16, "BF16"), persist=False)
            if place is not None:
                self.book.send_save(place, place.id, 0)
                self.encoding.append(place)
        for place in self.encoding[:sealed]:
            self.book.report(0, place.id, [(place.id, Outcome.COPIED, 1)], frozenset({1}))
            self.book.sealed(place.id, 1, True)
        del self.encoding[:sealed]

    def report(self, room: int, weather: str) -> None:
        """The link has room for `room` messages."""
        left = iter(range(room))
        self.changes.hand(self.namespace, lambda changes: next(left, None) is not None and self.take(changes, weather))

    @rule(what=st.sampled_from(["change_weights", "begin_store_process", "join_late", "forget_some"]))
    def disturb(self, what: str) -> None:
        getattr(self, what)()

    def forget_some(self) -> None:
        for identifier, _ in list(self.book.entries())[::2]:
            place = self.book.live(identifier)
            assert place is not None
            self.book.forget(place)

    def change_weights(self) -> None:
        self.namespace = f"weights-{len(self.history)}"
        self.book.forget_all()
        self.changes.begin_anew()

    # ---- the store process

    def take(self, changes: CpuChanges, weather: str) -> bool:
        batch = self.source.take(changes)
        if changes.anew:
            self.copy.clear()
        self.copy |= dict(changes.admitted)
        for identifier in changes.evicted:
            self.copy.pop(identifier, None)
        self.publish(batch, weather)
        return True

    def beat(self, weather: str) -> None:
        self.publish(self.source.beat(), weather)

    def publish(self, batch: Numbered, weather: str) -> None:
        """A batch arrives at once, or later with the next one, or never, or torn."""
        self.history[self.source.session, batch.number] = decode(batch.payload).namespace, dict(self.copy)
        if weather != "lossy":
            self.wire.append(batch if weather != "garbled" else batch._replace(payload=batch.payload[:-1]))
        while self.wire and weather != "slow":
            self.mirror.take_batch(*self.wire.popleft())

    def begin_store_process(self) -> None:
        """A new store process, which knows nothing, replaces any earlier one."""
        self.source = Source(0, self.namespace)
        self.copy: dict[str, int] = {}
        self.changes.begin_anew()
        self.beat("fine")

    # ---- the subscriber

    def ask(self, answered: str) -> None:
        """Late answers arrive with the next one, in the order of their requests."""
        if answered != "never":
            self.answers.append(self.source.snapshot())
        while answered == "now" and self.answers:
            self.mirror.take_snapshot(*self.answers.popleft())

    def join_late(self) -> None:
        self.mirror = Mirror(most=100)

    @invariant()
    def what_it_knows_was_held_once(self) -> None:
        if self.mirror.in_step:
            known = self.mirror.namespace, self.mirror.entries
            assert known == self.history[self.mirror.session, self.mirror._number]

    def teardown(self) -> None:
        """Nothing is lost any more, and the subscriber asks as a real one does."""
        self.serve([], len(self.encoding), 0)
        self.report(100, "fine")
        for _ in range(2):
            self.beat("fine")
            if not self.mirror.in_step:
                self.ask("now")
        assert self.mirror.in_step
        assert self.mirror.namespace == self.namespace
        assert self.mirror.entries == dict(self.book.entries())


TestFollowing = Following.TestCase
TestFollowing.settings = settings(max_examples=examples(100), stateful_step_count=50, deadline=None)


def test_a_snapshot_that_is_older_than_what_is_known_sets_nothing_back() -> None:
    source, mirror = Source(0, "ns"), Mirror(most=10)
    older = source.snapshot()
    mirror.take_snapshot(*older)
    mirror.take_batch(*source.take(CpuChanges("ns", False, [("a", 7)], [])))
    mirror.take_snapshot(*older)
    assert (mirror.in_step, mirror.entries, mirror.gaps) == (True, {"a": 7}, 0)


def test_events_that_came_while_a_snapshot_was_on_its_way_are_not_asked_for_again() -> None:
    source, mirror = Source(0, "ns"), Mirror(most=10)
    snapshot = source.snapshot()
    for name in "abc":
        mirror.take_batch(*source.take(CpuChanges("ns", False, [(name, 7)], [])))
    mirror.take_snapshot(*snapshot)
    assert (mirror.in_step, [*mirror.entries]) == (True, ["a", "b", "c"])


def test_entries_of_another_medium_are_left_aside() -> None:
    mirror = Mirror(most=10)
    events: list[Any] = [EntriesAdmitted(["a"], [1]), EntriesAdmitted(["b"], [1], "DISK")]
    mirror.take_snapshot(1, encode(EventBatch(0.0, events, 0, "s", "n")))
    assert [*mirror.entries] == ["a"]


def test_all_entries_at_once_are_cleared_and_not_evicted_one_by_one() -> None:
    changes = Changes(dict[str, int]().items)
    for number in range(1000):
        changes.evict(f"picture-{number}")
    changes.begin_anew()
    sent: list[CpuChanges] = []

    def send(message: CpuChanges) -> bool:
        sent.append(message)
        return True

    changes.hand("other", send)
    assert sent == [CpuChanges("other", True, [], [])]


def test_an_engine_that_publishes_nothing_notes_nothing() -> None:
    assert Book(PAGE, PAGE, 1).changes is None


def test_changes_noted_while_nobody_takes_them_are_bounded_by_what_is_live() -> None:
    live = {f"live-{number}": 1 for number in range(1000)}
    changes = Changes(live.items)
    for number in range(300_000):
        changes.evict(f"long-gone-{number}")
        assert len(changes._noted) <= 70_000
    sent: list[CpuChanges] = []

    def send(message: CpuChanges) -> bool:
        sent.append(message)
        return True

    while changes._noted or changes._anew:
        changes.hand("ns", send)
    held: dict[str, int] = {}
    for message in sent:
        held = {} if message.anew else held
        held |= dict(message.admitted)
        for identifier in message.evicted:
            held.pop(identifier, None)
    assert sent[0].anew
    assert held == live


@pytest.mark.parametrize("letter", ["a", "\N{GREEK SMALL LETTER ALPHA}"])
def test_the_longest_identifiers_fit_the_link(letter: str) -> None:
    """4096 bytes each, the maximum of an entry."""
    ours, theirs = pair()
    changes = Changes(dict[str, int]().items)
    for number in range(100):
        changes.admit(f"{number:04}" + letter * (4092 // len(letter.encode())), 1 << 30)
    sent: list[CpuChanges] = []

    def send(message: CpuChanges) -> bool:
        sent.append(message)
        return ours.send(message)

    changes.hand("ns", send)
    assert len(sent) > 1
    theirs.close()


def test_more_than_a_subscriber_keeps_is_counted_and_not_kept() -> None:
    source, mirror = Source(0, "ns"), Mirror(most=2)
    source.take(CpuChanges("ns", False, [(name, 7) for name in "abcd"], []))
    mirror.take_snapshot(*source.snapshot())
    assert (len(mirror.entries), mirror.left_out, mirror.in_step) == (2, 2, True)


@given(st.binary(max_size=200), st.integers(0, 1 << 63))
@example(encode(EventBatch(0.0, [EntriesAdmitted(["a"], [])], 0, "s", "n")), 1)
def test_whatever_comes_from_an_address_is_a_gap_at_worst(payload: bytes, number: int) -> None:
    source, mirror = Source(0, "ns"), Mirror(most=10)
    source.take(CpuChanges("ns", False, [("a", 7)], []))
    mirror.take_snapshot(*source.snapshot())
    mirror.take_batch(number, payload)
    mirror.take_snapshot(number, payload)
    assert mirror.unreadable == 2
    assert not mirror.in_step
    mirror.take_snapshot(*source.snapshot())
    assert mirror.entries == {"a": 7}


# ---- addresses


def keys(**given: Any) -> Any:
    return resolve(given, environ={}).config


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://*:5757", "tcp://10.0.0.7:5757", "tcp://[::]:5757", "tcp://[fe80::1]:1", "ipc:///run/lmcache-ec/events"],
)
def test_addresses_of_this_host_are_accepted(endpoint: str) -> None:
    assert keys(events_endpoint=endpoint).publishing(0).events == endpoint


@pytest.mark.parametrize(
    "endpoint",
    [
        *("5757", "*:5757", "tcp://*", "tcp://*:0", "tcp://*:65000", "tcp://*:5757/x", "udp://*:5757", "inproc://x"),
        *("tcp://replica.example:5757", "tcp://::1:5757", "ipc://relative", 5757),
        *("tcp://10.0.0.777:5757", "ipc:///" + "x" * 100),
    ],
)
def test_any_other_address_ends_the_start_with_what_is_accepted(endpoint: object) -> None:
    with pytest.raises(ConfigError, match=r"events_endpoint=.*must (be|have)"):
        keys(events_endpoint=endpoint)


def test_events_and_snapshots_need_an_address_each() -> None:
    with pytest.raises(ConfigError, match="another address than events_endpoint"):
        keys(events_endpoint="tcp://*:5757", events_snapshot_endpoint="tcp://*:5757")


@pytest.mark.parametrize("nothing", [None, "", " "])
def test_nothing_is_published_by_default_or_where_the_key_is_emptied(nothing: str | None) -> None:
    assert keys().publishing(0) is None
    assert keys(events_endpoint=nothing, events_snapshot_endpoint="tcp://*:5758").publishing(0) is None


def test_each_data_parallel_engine_has_addresses_of_its_own_as_vllms_kv_events_do() -> None:
    config = keys(events_endpoint="tcp://*:5757", events_topic="ec")
    assert [config.publishing(rank).events for rank in range(3)] == [f"tcp://*:{5757 + rank}" for rank in range(3)]
    assert config.publishing(2).snapshots == "tcp://*:6759"
    assert (config.publishing(2).topic, config.publishing(2).rank) == ("ec", 2)
    assert of_rank("ipc:///run/e", 1) == "ipc:///run/e_dp1"
    apart = keys(events_endpoint="tcp://*:5757", events_snapshot_endpoint="tcp://127.0.0.1:9000")
    assert apart.publishing(1).snapshots == "tcp://127.0.0.1:9001"


@pytest.mark.parametrize(
    ("text", "snapshots"),
    [
        ("tcp://replica.example:5757", "tcp://replica.example:6757"),
        ("tcp://[::1]:5757", "tcp://[::1]:6757"),
        ("ipc:///run/e", "ipc:///run/e.snapshots"),
        ("tcp://a:5757, tcp://b:80", "tcp://b:80"),
        ("tcp://a:65535,tcp://a:1", "tcp://a:1"),
    ],
)
def test_a_subscriber_finds_the_snapshots_where_the_engine_has_them(text: str, snapshots: str) -> None:
    assert Replica.parse(text).snapshots == snapshots


@pytest.mark.parametrize("text", ["", "host:5757", "tcp://*:5757", "tcp://a:65535", "tcp://a:1,", "a,b,c", "ipc://x"])
def test_an_invalid_replica_is_refused_with_what_is_accepted(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        Replica.parse(text)


def test_snapshots_are_at_the_address_in_the_table_of_keys() -> None:
    assert snapshots_of("tcp://*:5757") == "tcp://*:6757"
