# SPDX-License-Identifier: Apache-2.0
"""Which tier is asked, which requests wait for it, and what happens to a tier that is slow or fails."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import pytest

from lmcache_ec.key import EncoderCacheKey, EntryName
from lmcache_ec.presence import PresenceWriter
from lmcache_ec.tiers.base import Listed, Tier, TierError, TierNotReady, TierUnreachable, WritesRefused
from lmcache_ec.tiers.lane import NEVER, Habits, Lane
from lmcache_ec.tiers.remote import Lookup

NAMESPACE = "lane-0123456789abcdef"
SLOW, QUICK = 0.2, 0.001
STORED, ABSENT = (EncoderCacheKey(NAMESPACE, name).digest for name in ("stored", "absent"))


class Scripted(Tier):
    """A tier that holds one entry, and fails on demand: the faults matter, not the store."""

    name = "scripted"

    def __init__(self) -> None:
        self.broken = False
        self.torn: Exception | None = None
        self.refusal: Exception | None = None
        self.asked = self.listings = 0
        self.holds = [STORED]
        self.written: list[bytes] = []
        """Entries written by neighbours and not read as news yet."""
        self.takes_s = 0.0
        self.pass_time: Callable[[float], None] = lambda seconds: None

    def get_into(self, key: EntryName, buffer: memoryview) -> int | None:
        raise NotImplementedError

    def put(self, key: EncoderCacheKey, data: memoryview) -> bool:
        raise NotImplementedError

    def contains(self, key: EntryName) -> int | None:
        self.asked += 1
        self.pass_time(self.takes_s)
        if self.broken:
            raise TierUnreachable(None, "no answer")
        return None

    def check_writes(self) -> bool:
        if self.refusal is not None:
            raise self.refusal
        return True

    def delete(self, key: EntryName) -> bool:
        raise NotImplementedError

    def list(self, namespace: str) -> Iterator[Listed]:
        self.listings += 1
        for digest in self.holds:
            yield Listed(digest, 8192, 0.0)
        if self.torn is not None:
            raise self.torn

    def news(self, namespace: str) -> Sequence[bytes]:
        news, self.written = self.written, []
        return news

    def close(self) -> None:
        pass


class Setting:
    """A lane over a scripted tier, with a clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lookup: Lookup, local: bool = False) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.tier = Scripted()
        self.tier.pass_time = self.turn
        self.presence = PresenceWriter.create(["scripted"])
        self.lane = Lane(self.tier, "scripted", self.presence, Habits(lookup, 300.0, local=local))

    def turn(self, seconds: float) -> None:
        self.now += seconds

    @property
    def waited_for(self) -> bool:
        """Whether a first-seen image waits for this tier."""
        return not self.presence.all_complete

    def asks(self) -> tuple[bool, bool]:
        return self.lane.asks(STORED), self.lane.asks(ABSENT)

    def survey(self) -> None:
        self.lane.survey(NAMESPACE)

    def probe(self) -> float:
        """Run the due probes at their time. Returns how long reads had paused."""
        self.now = max(self.now, self.lane.probe_at)
        reads, writes = self.lane.due_probes()
        if writes:
            self.lane.probe_writes()
        return self.lane.probe_reads(NAMESPACE) if reads else 0.0

    def takes_writes(self) -> bool:
        return self.lane.enqueue(1, lambda: None)


UNREACHABLE = TierUnreachable(None, "no answer")
BUSY = TierNotReady(None, "503")
FULL = WritesRefused(None, "full")


def test_a_quick_tier_is_asked_about_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Setting(monkeypatch, Lookup.AUTO)
    here.survey()
    for _ in range(100):
        here.lane.read(QUICK)
    assert here.asks() == (True, True)
    assert here.waited_for
    assert here.lane.due_at == NEVER


def test_a_tier_found_slow_is_no_longer_waited_for_and_asked_only_about_what_it_has_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = Setting(monkeypatch, Lookup.AUTO)
    here.survey()
    here.lane.read(SLOW)
    assert here.waited_for, "one alone may be this machine's fault"
    here.lane.read(SLOW)
    assert not here.waited_for, "at once, before it is listed"
    assert here.lane.due_at <= here.now
    assert here.asks() == (False, False)
    here.tier.takes_s = SLOW
    here.survey()
    assert here.asks() == (True, False)
    assert here.tier.listings == 1
    here.now = here.lane.due_at
    here.survey()
    assert here.tier.listings == 1, "measured again long before it is listed again"
    here.tier.takes_s = QUICK
    here.now = here.lane.due_at
    here.survey()
    assert here.asks() == (True, True), "quick again"
    assert here.waited_for
    assert here.lane.due_at == NEVER


def test_a_tier_that_is_slow_from_the_start_is_listed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Setting(monkeypatch, Lookup.AUTO)
    here.tier.takes_s = SLOW
    here.survey()
    assert here.asks() == (True, False)
    assert not here.waited_for


def test_one_slow_answer_among_many_quick_ones_is_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Setting(monkeypatch, Lookup.AUTO)
    here.survey()
    for _ in range(20):
        here.lane.read(QUICK)
    here.lane.read(0.06)
    assert here.waited_for


def test_a_catalog_is_asked_until_it_is_complete_and_then_about_what_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Setting(monkeypatch, Lookup.CATALOG)
    assert here.asks() == (True, True)
    assert here.waited_for
    here.lane.read(SLOW)
    here.survey()
    assert here.asks() == (True, False)
    assert not here.waited_for


def test_a_tier_set_to_be_probed_is_always_probed_whatever_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Setting(monkeypatch, Lookup.PROBE)
    here.survey()
    here.lane.read(SLOW)
    assert here.asks() == (True, True)


@pytest.mark.parametrize("lookup", list(Lookup))
def test_a_tier_that_cannot_be_reached_is_left_alone_longer_each_time_and_comes_back(
    lookup: Lookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Setting(monkeypatch, lookup)
    here.probe()
    here.tier.broken = True
    first = here.now
    here.lane.read_failed(UNREACHABLE)
    assert here.lane.probe_at == here.now, "at once"
    rests = []
    for _ in range(7):
        assert here.asks() == (False, False)
        assert not here.waited_for
        assert here.lane.due_at == NEVER
        with pytest.raises(TierError):
            here.probe()
        assert not here.takes_writes()
        rests.append(here.lane.probe_at - here.now)
    assert rests[0] <= 1.2
    assert all(later > rest / 1.5 for rest, later in pairwise(rests))
    assert 20 < rests[-1] <= 60.0
    here.tier.broken = False
    assert here.probe() == here.now - first, "for how long it was away, once"
    assert here.probe() == 0
    here.survey()
    assert here.lane.asks(STORED)
    assert here.takes_writes()
    assert here.waited_for == (lookup is not Lookup.CATALOG)


def test_a_failure_of_a_single_request_ends_with_the_first_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Setting(monkeypatch, Lookup.PROBE)
    for error in (UNREACHABLE, BUSY):
        here.lane.read_failed(error)
        assert here.asks() == (False, False)
        assert here.takes_writes(), "in the time that a probe takes nothing is dropped"
        assert here.probe() == 0, "nothing to report"
        assert here.asks() == (True, True)


def test_any_answer_ends_the_pause_in_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Setting(monkeypatch, Lookup.PROBE)
    here.tier.broken = True
    here.lane.read_failed(UNREACHABLE)
    with pytest.raises(TierError):
        here.probe()
    here.turn(3.0)
    assert here.lane.read() == 3.0
    assert here.asks() == (True, True)


def test_an_error_about_one_entry_does_not_count_against_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Setting(monkeypatch, Lookup.PROBE)
    for _ in range(100):
        here.lane.read_failed(TierError(None, "unreadable"))
        here.lane.write_failed(TierError(None, "too large"))
    assert here.asks() == (True, True)
    assert here.takes_writes()


def test_failed_writes_do_not_affect_reads_and_pause_only_after_several_in_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = Setting(monkeypatch, Lookup.PROBE)
    here.probe()
    for _ in range(50):
        here.lane.write_failed(BUSY)
        here.lane.write_failed(UNREACHABLE)
        assert not here.lane.wrote()
    for error in (UNREACHABLE, BUSY, UNREACHABLE):
        assert here.takes_writes()
        here.lane.write_failed(error)
    assert not here.takes_writes()
    assert here.asks() == (True, True)
    assert not here.lane.read_only
    first = here.lane.probe_at - here.now
    here.probe()
    assert here.takes_writes(), "a probe that passes lets the next one try"
    here.lane.write_failed(BUSY)
    assert not here.takes_writes()
    assert here.lane.probe_at - here.now > 1.3 * first, "which fails, and the rest is longer"
    here.probe()
    assert here.lane.wrote(), "it had rested"
    assert not here.lane.wrote()


def test_a_store_that_refuses_writes_is_read_only_until_it_accepts_some_and_is_read_all_the_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = Setting(monkeypatch, Lookup.PROBE)
    here.probe()
    here.lane.write_failed(FULL)
    here.probe()
    assert (here.lane.read_only, here.takes_writes()) == (False, True), "it was this one entry"
    here.tier.refusal = FULL
    here.lane.write_failed(FULL)
    assert here.lane.probe_at == here.now, "it is asked at once"
    here.probe()
    assert (here.lane.read_only, here.takes_writes()) == (False, False), "for a moment, perhaps"
    assert here.lane.probe_at - here.now < 0.3
    here.probe()
    assert (here.lane.read_only, here.takes_writes()) == (True, False)
    waits = []
    for _ in range(6):
        waits.append(here.lane.probe_at - here.now)
        here.probe()
        assert here.lane.read_only
        assert here.asks() == (True, True)
    assert waits[-1] > 45
    here.tier.refusal = None
    here.probe()
    assert (here.lane.read_only, here.takes_writes()) == (False, True)


def test_writes_are_checked_at_the_start_and_the_reason_for_a_refusal_is_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = Setting(monkeypatch, Lookup.PROBE)
    here.tier.refusal = FULL
    assert here.lane.due_probes() == (False, True)
    assert here.lane.probe_writes() is None
    assert here.lane.probe_writes() == "full"
    assert here.lane.probe_writes() is None
    here.tier.refusal = None
    assert here.lane.probe_writes() == ""
    assert here.lane.probe_writes() is None


def test_many_failures_at_once_count_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight threads that fail in the same outage do not make the pause eight times as long."""
    here = Setting(monkeypatch, Lookup.AUTO)
    here.tier.broken = True
    here.lane.read_failed(UNREACHABLE)
    with pytest.raises(TierError):
        here.probe()
    for _ in range(8):
        here.lane.read_failed(UNREACHABLE)
    assert here.lane.probe_at <= here.now + 1.2


def test_a_listing_that_is_cut_off_is_not_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request waits for a tier that became unreachable meanwhile, listed keys are kept, and it is listed again."""
    here = Setting(monkeypatch, Lookup.CATALOG)
    here.tier.torn = UNREACHABLE
    with pytest.raises(TierError):
        here.survey()
    assert here.asks() == (False, False)
    assert not here.waited_for
    here.tier.torn = None
    here.probe()
    assert here.asks() == (True, True), "its catalog is not complete"
    here.now = max(here.now, here.lane.due_at)
    here.survey()
    assert here.asks() == (True, False)


def test_a_tier_that_cannot_be_listed_is_asked_about_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Setting(monkeypatch, Lookup.CATALOG)
    here.tier.torn = TierError(None, "no right to list")
    with pytest.raises(TierError):
        here.survey()
    assert here.asks() == (True, True)
    assert 270 <= here.lane.due_at - here.now <= 300


@pytest.mark.parametrize("listable", [True, False])
def test_replicas_that_were_started_together_do_not_list_together_again(
    monkeypatch: pytest.MonkeyPatch, listable: bool
) -> None:
    """None is later than planned, nor more than a tenth earlier; and they are not in step, even if a program seeds
    Python's random numbers alike on all of them, as vLLM does in its workers."""
    here, waits = Setting(monkeypatch, Lookup.CATALOG), list[float]()
    here.tier.torn = None if listable else TierError(None, "no right to list")
    for _ in range(100):
        random.seed(0)
        try:
            here.survey()
        except TierError:
            assert not listable
        waits.append(here.lane.due_at - here.now)
        here.now = here.lane.due_at
    assert all(270 <= seconds <= 300 for seconds in waits)
    [(_, most)] = Counter(map(int, waits)).most_common(1)
    assert most < 20, "of a hundred in one second"


def test_the_longer_a_listing_takes_the_later_the_next_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Setting(monkeypatch, Lookup.CATALOG)
    here.tier.takes_s = 10.0
    began = here.now
    here.survey()
    assert here.lane.due_at - here.now >= 20 * (here.now - began)


def test_a_disk_is_always_asked_and_never_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up there costs microseconds, and one unreadable file does not mean that others are."""
    here = Setting(monkeypatch, Lookup.CATALOG, local=True)
    here.survey()
    for _ in range(9):
        here.lane.read_failed(UNREACHABLE)
        here.lane.write_failed(FULL)
    assert here.asks() == (True, True)
    assert here.takes_writes()
    assert here.lane.probe_at == NEVER


def known(here: Setting) -> tuple[bool, bool]:
    """Whether the scheduler side would ask about what is stored, and about what is absent."""
    return here.presence.may_contain(STORED), here.presence.may_contain(ABSENT)


def test_an_entry_that_a_listing_no_longer_shows_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Setting(monkeypatch, Lookup.CATALOG)
    here.tier.holds = [STORED, ABSENT]
    here.survey()
    assert (known(here), here.asks(), here.lane.listed) == ((True, True), (True, True), 2)
    here.tier.holds = [STORED]
    here.now = here.lane.due_at
    here.survey()
    assert (known(here), here.asks(), here.lane.listed) == ((True, False), (True, False), 1)


def test_a_tier_is_not_asked_for_what_only_another_has(monkeypatch: pytest.MonkeyPatch) -> None:
    here, other = Setting(monkeypatch, Lookup.CATALOG), Scripted()
    here.presence = PresenceWriter.create(["scripted", "other"])
    here.lane = Lane(here.tier, "scripted", here.presence, Habits(Lookup.CATALOG, 300.0))
    lane = Lane(other, "other", here.presence, Habits(Lookup.CATALOG, 300.0))
    other.holds = [ABSENT]
    for each in (here.lane, lane):
        each.survey(NAMESPACE)
    assert here.asks() == (True, False)
    assert (lane.asks(STORED), lane.asks(ABSENT)) == (False, True)
    assert known(here) == (True, True)


def test_news_of_neighbours_counts_at_once_and_until_a_listing_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Setting(monkeypatch, Lookup.CATALOG, local=True)
    here.survey()
    here.tier.written = [ABSENT, STORED]
    here.lane.follow(NAMESPACE)
    assert (known(here), here.lane.listed) == ((True, True), 2)
    here.now = here.lane.due_at
    here.survey()
    assert (known(here), here.lane.listed) == ((True, False), 1)


def test_an_entry_that_a_neighbour_wrote_first_counts_once_in_whatever_order_that_is_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for put_first in (True, False):
        here = Setting(monkeypatch, Lookup.CATALOG, local=True)
        here.survey()
        before = here.lane.listed
        here.tier.written = [ABSENT]
        if put_first:
            here.lane.has(ABSENT, False)
        here.lane.follow(NAMESPACE)
        here.lane.has(ABSENT, False)
        assert here.lane.listed == before + 1


def test_news_is_not_read_before_a_listing_has_begun_and_a_listing_begins_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thus an entry that a neighbour writes after the first shards have been listed is read as news."""
    here = Setting(monkeypatch, Lookup.CATALOG, local=True)
    here.tier.written = [ABSENT]
    here.lane.follow(NAMESPACE)
    assert here.tier.written == [ABSENT]

    def list_and_write(namespace: str) -> Iterator[Listed]:
        assert here.tier.written == []
        yield Listed(STORED, 8192, 0.0)
        here.tier.written = [ABSENT]
        here.lane.follow(NAMESPACE)

    monkeypatch.setattr(here.tier, "list", list_and_write)
    here.survey()
    assert known(here) == (True, True)


def test_a_listing_that_another_namespace_has_overtaken_is_not_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows entries of the old namespace: until the new one is listed, everything is looked up."""
    here = Setting(monkeypatch, Lookup.CATALOG)

    def list_and_move(namespace: str) -> Iterator[Listed]:
        here.lane.relist("other")
        yield Listed(STORED, 8192, 0.0)

    with monkeypatch.context() as moving:
        moving.setattr(here.tier, "list", list_and_move)
        here.survey()
    assert here.waited_for
    assert here.asks() == (True, True)
    assert here.lane.due_at <= here.now
    here.lane.survey("other")
    assert not here.waited_for
    assert here.asks() == (True, False)


def test_entries_written_here_are_known_unless_the_tier_is_always_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    for lookup in Lookup:
        here = Setting(monkeypatch, lookup, local=lookup is Lookup.CATALOG)
        here.lane.has(STORED, True)
        here.lane.has(STORED, False)
        assert known(here) == (lookup is not Lookup.PROBE, False)
        assert here.lane.listed == (lookup is Lookup.CATALOG)


def test_waiting_writes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Setting(monkeypatch, Lookup.AUTO)
    held = threading.Event()

    def write() -> None:
        held.wait()

    try:
        taken = sum(here.lane.enqueue(64 << 20, write) for _ in range(100))
        assert taken == 16
    finally:
        held.set()
    here.lane.writes.shutdown(wait=True)
