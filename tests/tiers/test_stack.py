# SPDX-License-Identifier: Apache-2.0
"""Several tiers as one: looked up in order, repaired, promoted, and written through from one read of the file."""

import errno
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.testbed.waiting import wait_until
from lmcache_ec import entry
from lmcache_ec.key import EncoderCacheKey, EntryName
from lmcache_ec.tiers.base import Landing, Listed, Tier, TierError
from lmcache_ec.tiers.disk import DiskTier
from lmcache_ec.tiers.journal import Journal
from lmcache_ec.tiers.lane import Habits
from lmcache_ec.tiers.remote import Lookup
from lmcache_ec.tiers.stack import Absent, Answer, Elsewhere, Found, Stack, Wanted
from lmcache_ec.tiers.write_through import Put

NAMESPACE = "stack-0123456789abcdef"
KEY = EncoderCacheKey(NAMESPACE, "picture")
SPEC = entry.TensorSpec(16, 64, "BF16")


def sealed(key: EncoderCacheKey = KEY) -> memoryview:
    data = memoryview(bytearray(entry.entry_length(key.identifier, SPEC)))
    entry.payload(data, key.identifier)[:] = bytes(range(256)) * (SPEC.nbytes // 256)
    entry.seal(data, key, SPEC, "test")
    return data


class Memory(Tier):
    """A remote in this process, `held` where a test needs to see what happens meanwhile."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.entries: dict[bytes, bytes] = {}
        self.free = threading.Event()
        self.free.set()

    def get_into(self, key: EntryName, buffer: memoryview) -> int | None:
        found = self.entries.get(key.digest)
        if found is not None and len(found) == len(buffer):
            buffer[:] = found
        return None if found is None else len(found)

    def put(self, key: EncoderCacheKey, data: memoryview) -> bool:
        assert self.free.wait(10)
        new = key.digest not in self.entries
        self.entries.setdefault(key.digest, bytes(data))
        return new

    def contains(self, key: EntryName) -> int | None:
        found = self.entries.get(key.digest)
        return None if found is None else len(found)

    def delete(self, key: EntryName) -> bool:
        return self.entries.pop(key.digest, None) is not None

    def list(self, namespace: str) -> Iterator[Listed]:
        yield from (Listed(digest, len(data), 0.0) for digest, data in self.entries.items())

    def close(self) -> None:
        pass


class CountedDisk(DiskTier):
    """The real disk tier, with its reads counted."""

    reads = 0

    def get_into(self, key: EntryName, buffer: memoryview) -> int | None:
        self.reads += 1
        return super().get_into(key, buffer)


class Setting:
    def __init__(self, folder: Path | None, copied_bytes: int = 1 << 20) -> None:
        self.near, self.far = Memory("near"), Memory("far")
        self.disk = CountedDisk(folder, 1 << 30) if folder else None
        local = [(self.disk, Habits(Lookup.CATALOG, 300.0, local=True))] if self.disk else []
        remotes = [(tier, Habits(Lookup.PROBE, 300.0)) for tier in (self.near, self.far)]
        self.lines: list[tuple[str, str]] = []
        self.journal = Journal(lambda kind, text: self.lines.append((kind, text)))
        self.stack = Stack([*local, *remotes], self.journal, NAMESPACE, copied_bytes=copied_bytes)
        self.events: list[object] = []

    def put(self, data: memoryview, tiers: int = 0) -> Put:
        """Write through; the caller's callbacks are recorded in `events`."""
        put = Put(KEY, data, tiers)
        put.landed = lambda number, landing: self.events.append((number, landing))
        put.released = lambda stored: self.events.append(f"released, {'stored' if stored else 'lost'}")
        put.done = lambda: self.events.append("done")
        self.stack.writes.write(put)
        return put

    def written(self, data: memoryview, tiers: int = 0) -> list[object]:
        self.put(data, tiers)
        wait_until("it is done", lambda: "done" in self.events)
        wait_until("no job is left", lambda: not self.stack.writes.jobs)
        return self.events

    def fetched(self, into: memoryview | None) -> Answer:
        answers: list[Answer] = []
        self.stack.fetch([Wanted(KEY, into, answers.append)])
        wait_until("it is answered", lambda: answers)
        wait_until("what was promoted is written", lambda: not self.stack.writes.jobs)
        (answer,) = answers
        return answer

    @property
    def count(self) -> Counter[str]:
        return self.journal.counts


@pytest.mark.parametrize(("copied_bytes", "reads"), [(1 << 20, 1), (0, 2)], ids=["room for a copy", "no room"])
def test_remotes_behind_the_disk_are_fed_from_one_read_of_the_file_for_which_there_is_room(
    tmp_path: Path, copied_bytes: int, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified = Counter[str]()
    verify = entry.verify
    monkeypatch.setattr(entry, "verify", lambda *given: verified.update(["it"]) or verify(*given))
    here, data = Setting(tmp_path, copied_bytes), sealed()
    disk, stack, expected = here.disk, here.stack, bytes(data)
    assert disk is not None
    here.near.free.clear()
    here.far.free.clear()
    here.put(data)
    wait_until("the disk has it", lambda: "released, stored" in here.events)
    data[:] = bytes(len(data))  # the buffer is the caller's again
    wait_until("both wait", lambda: stack.writes.jobs == 2 and disk.reads == reads)
    here.near.free.set()
    here.far.free.set()
    wait_until("it is done", lambda: "done" in here.events)
    assert here.near.entries == here.far.entries == {KEY.digest: expected}
    assert verified["it"] == disk.reads == reads
    assert here.events[:2] == [(0, Landing.TOOK), "released, stored"]


def test_without_a_disk_no_remote_waits_for_another_and_the_data_is_read_until_the_last_one_has_answered() -> None:
    here = Setting(None)
    here.near.free.clear()
    here.put(sealed())
    wait_until("the other one has it", lambda: here.events == [(1, Landing.TOOK)])
    here.near.free.set()
    wait_until("it is done", lambda: "done" in here.events)
    assert here.events == [(1, Landing.TOOK), (0, Landing.TOOK), "released, stored", "done"]


def test_an_entry_that_the_disk_refuses_still_reaches_the_remotes(tmp_path: Path) -> None:
    here = Setting(tmp_path)
    assert here.disk is not None
    here.disk.max_bytes = 10
    events = here.written(sealed())
    assert events[0] == (0, Landing.REFUSED)
    assert set(events[1:3]) == {(1, Landing.TOOK), (2, Landing.TOOK)}
    assert events[3:] == ["released, stored", "done"]
    assert here.disk.reads == 0


def test_only_the_wanted_tiers_are_written(tmp_path: Path) -> None:
    here = Setting(tmp_path)
    assert here.written(sealed(), tiers=0b100) == [(2, Landing.TOOK), "released, stored", "done"]
    assert (here.near.entries, list(here.far.entries)) == ({}, [KEY.digest])


def test_with_no_tiers_at_all_the_data_is_released_and_nothing_is_stored() -> None:
    stack, events = Stack([], Journal(lambda *_: None)), list[object]()
    stack.writes.write(Put(KEY, sealed(), released=events.append, done=lambda: events.append("done")))
    assert events == [False, "done"]


def test_a_tier_that_raises_an_unexpected_error_still_gives_the_data_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = Setting(None)

    def odd(*_: object) -> bool:
        raise RuntimeError("odd")

    monkeypatch.setattr(here.near, "put", odd)
    monkeypatch.setattr(here.far, "contains", odd)  # asked after the write about the existing entry
    here.far.entries[KEY.digest] = b"other"
    events = here.written(sealed())
    assert events[2:] == ["released, lost", "done"]
    assert not here.stack.writes.writing(KEY)


def test_a_write_that_is_cancelled_leaves_nothing_behind() -> None:
    here = Setting(None)
    here.near.free.clear()
    here.put(sealed())
    wait_until("the other one has it", lambda: here.far.entries)
    assert here.stack.writes.cancel(KEY)
    here.near.free.set()
    wait_until("it is done", lambda: "done" in here.events)
    assert here.near.entries == {}
    assert not here.stack.writes.cancel(KEY)


def test_an_entry_that_does_not_verify_is_deleted_and_repaired_from_the_next_tier(tmp_path: Path) -> None:
    here, data = Setting(tmp_path), sealed()
    assert here.disk is not None
    harmed = memoryview(bytearray(data))
    harmed[-1] ^= 1
    here.disk.put(KEY, harmed)
    here.near.entries[KEY.digest] = bytes(range(100))  # too short for any entry
    here.far.put(KEY, data)
    into = memoryview(bytearray(len(data)))
    assert here.fetched(into) == Found(SPEC, "far")
    assert into == data
    assert here.near.entries[KEY.digest] == bytes(data)
    assert here.disk.get_into(KEY, into) == len(data)
    assert into == data
    assert (here.count["disk_corrupt"], here.count["near_corrupt"], here.count["far_hits"]) == (1, 1, 1)
    assert [kind for kind, _ in here.lines] == ["disk-corrupt", "near-corrupt"]


def test_an_entry_that_a_neighbour_writes_is_known_within_a_second_and_without_a_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written right after a look at the news. The second is the waiting time between looks."""
    here, neighbour, waited_s = Setting(tmp_path), DiskTier(tmp_path, 1 << 30), list[float]()
    lane = here.stack.lanes[0]
    lane.survey(NAMESPACE)

    def may_be_there() -> bool:
        return here.stack.presence.may_contain(KEY.digest, "disk")

    def wait(seconds: float) -> bool:
        """Record a wait. Returns whether no further look is needed."""
        if len(waited_s) == 1:
            assert not may_be_there()
            neighbour.put(KEY, sealed())
        if may_be_there() or len(waited_s) > 100:
            return True
        waited_s.append(seconds)
        return False

    monkeypatch.setattr(here.stack, "_closed", SimpleNamespace(wait=wait))
    here.stack._follow(lane)
    assert may_be_there()
    assert sum(waited_s[1:]) <= 1.0


def test_deleting_an_entry_that_a_folder_does_not_have_leaves_its_listed_count_as_it_is(tmp_path: Path) -> None:
    here = Setting(tmp_path)
    lane = here.stack.lanes[0]
    lane.listed = 2
    here.stack.delete(lane, KEY)
    assert lane.listed == 2
    here.written(sealed())
    here.stack.delete(lane, KEY)
    here.stack.delete(lane, KEY)
    assert lane.listed == 2, "one was written, and one deleted"


def test_a_caller_without_a_buffer_of_the_right_length_gets_the_length_and_nothing_is_promoted() -> None:
    here, data = Setting(None), sealed()
    here.far.put(KEY, data)
    assert here.fetched(None) == Elsewhere(len(data))
    assert here.fetched(memoryview(bytearray(8192 + 1))) == Elsewhere(len(data))
    assert here.near.entries == {}
    here.far.delete(KEY)
    assert here.fetched(None) == Absent()


def test_after_an_error_of_one_tier_the_next_one_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    here, data = Setting(None), sealed()

    def broken(*_: object) -> int:
        raise TierError(None, "broken")

    monkeypatch.setattr(here.near, "get_into", broken)
    here.far.put(KEY, data)
    assert here.fetched(memoryview(bytearray(len(data)))) == Found(SPEC, "far")
    assert here.count["near_read_errors"] == 1


@pytest.mark.parametrize("call", ["get_into", "put", "delete"])
def test_the_report_about_a_tier_that_fails_is_its_own_text_without_a_number(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    here, data = Setting(None), sealed()

    def broken(*_: object) -> int:
        raise TierError(errno.ETIMEDOUT, "Redis tier at cache:6379: no answer in time")

    if call == "delete":
        here.near.entries[KEY.digest] = b"other"
    monkeypatch.setattr(here.near, call, broken)
    if call == "put":
        here.written(data)
    else:
        here.fetched(memoryview(bytearray(len(data))))
    wait_until("it is reported", lambda: here.journal.last_error("near"))
    last = here.journal.last_error("near")
    assert last is not None
    assert last.text == "near: Redis tier at cache:6379: no answer in time"


def test_a_read_only_disk_refuses_writes_without_an_error_each_and_the_remotes_take_them(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    assert setting.disk is not None
    setting.disk.read_only = True
    events = setting.written(sealed())
    assert [event for event in events if isinstance(event, tuple)] == [
        (0, Landing.REFUSED),
        (1, Landing.TOOK),
        (2, Landing.TOOK),
    ]
    assert not setting.lines
    assert "disk_write_errors" not in setting.journal.counts
