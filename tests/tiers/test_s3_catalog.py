# SPDX-License-Identifier: Apache-2.0
"""A catalog never denies an entry that is stored and announced, whatever process dies, whatever its objects contain."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from benchmarks.testbed.servers.s3_front import Request, S3Front, s3_front
from benchmarks.testbed.servers.seaweed import Seaweed
from benchmarks.testbed.waiting import wait_until
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.presence import MAX_SHARD_BYTES, SHARDS, PresenceWriter, shard_of
from lmcache_ec.signing import SigningKey
from lmcache_ec.tiers.base import TierError
from lmcache_ec.tiers.filter_shard import (
    NoCatalogObject,
    decode_delta,
    decode_shard,
    encode,
)
from lmcache_ec.tiers.lane import Habits, Lane
from lmcache_ec.tiers.remote import Lookup
from lmcache_ec.tiers.s3 import open_s3
from lmcache_ec.tiers.s3_catalog import CatalogFolder, Pace
from lmcache_ec.tiers.s3_compactor import Compactor, LeaseLost
from lmcache_ec.tiers.s3_url import s3_options

NAMESPACE = "ns"
KEY = SigningKey(b"k" * 32, "abcdefabcdef")
PACE = Pace(lease_s=0.3, compact_s=3600.0, large=64)
STORED = (286, *range(79))
"""The first one's key is in shard 00, from which the size of a namespace is estimated."""


@pytest.fixture(autouse=True)
def environment(s3: Seaweed, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    for name, text in s3.environment.items():
        monkeypatch.setenv(name, text)


@pytest.fixture
def front(s3: Seaweed) -> Iterator[S3Front]:
    with s3_front(int(s3.endpoint.rpartition(":")[2])) as made:
        yield made


@pytest.fixture
def url(s3: Seaweed) -> str:
    return f"s3://{s3.bucket}/{uuid.uuid4().hex}?endpoint={s3.endpoint}"


def key(name: object) -> EncoderCacheKey:
    return EncoderCacheKey(NAMESPACE, str(name))


STRANGERS = [key(f"stranger {number}").digest for number in range(5000)]


class Replica:
    """A tier and its lane, refreshed by the test."""

    def __init__(self, url: str, *, catalog: bool = True, signing: SigningKey | None = None, pace: Pace = PACE) -> None:
        self.tier = open_s3(f"{url}&catalog=true" if catalog else url, timeout_s=20.0)
        self.presence = PresenceWriter.create(["s3"])
        self.lane = Lane(self.tier, "s3", self.presence, Habits(Lookup.CATALOG, 300.0))
        self.lane.signing = signing
        if self.cataloged is not None:
            self.cataloged.catalog.pace = pace

    @property
    def cataloged(self) -> Any:
        return self.tier._cataloged

    @property
    def folder(self) -> CatalogFolder:
        return self.cataloged._folder(NAMESPACE)  # type: ignore[no-any-return]

    def put(self, *names: object) -> None:
        for name in names:
            self.tier.put(key(name), memoryview(b"x"))
            self.lane.has(key(name).digest, True)

    def refresh(self) -> None:
        """A survey; if it started a listing for the catalog, also that listing and another survey."""
        self.lane._list_at = 0.0
        self.lane.survey(NAMESPACE)

    def compact(self) -> None:
        compactor = self.compactor()
        assert compactor.take(self.folder.look())
        compactor.compact()

    def compactor(self, folder: CatalogFolder | None = None, pace: Pace = PACE) -> Compactor:
        pages = partial(self.cataloged._pages, NAMESPACE)
        return Compactor(folder or self.folder, pages, pace, self.lane.signing)

    def lacks(self, *names: object) -> list[object]:
        """The names for which it would not ask the store."""
        return [name for name in names if not self.lane.asks(key(name).digest)]

    @property
    def asked_for_nothing(self) -> float:
        return sum(map(self.lane.asks, STRANGERS)) / len(STRANGERS)


@pytest.fixture
def filled(url: str) -> str:
    """A prefix with `STORED`."""
    client = Replica(url).cataloged._client
    for name in STORED:
        client.put(key(name).object_name, b"x", use_multipart=False)
    return url


def objects(s3: Seaweed, url: str) -> list[str]:
    found = s3.client().list_objects_v2(Bucket=s3.bucket, Prefix=f"{s3_options(url).prefix}/.catalog")
    return [one["Key"] for one in found.get("Contents", ())]


def test_one_replica_lists_and_the_others_read_what_it_wrote(filled: str, front: S3Front, s3: Seaweed) -> None:
    one, other = Replica(filled), Replica(filled.replace(s3.endpoint, f"http://127.0.0.1:{front.port}"))
    one.refresh()
    assert one.lacks("not known yet") == []  # until there is a catalog it asks for everything
    wait_until("it has listed", lambda: not one.cataloged._compactor.running)
    one.refresh()
    other.refresh()
    for replica in (one, other):
        assert replica.lacks(*STORED) == []
        assert replica.asked_for_nothing < 0.02
        assert replica.presence.complete("s3")
        assert replica.lane.listed == len(STORED)
    listings = [one for one in front.seen if one.method == "GET" and "list-type=2" in one.path]
    assert all(".catalog" in listing.path for listing in listings)
    front.seen.clear()
    other.refresh()
    assert len([request for request in front.seen if ".catalog" in request.path]) == 1


def test_entries_that_one_has_written_are_known_to_the_others_after_its_refresh_and_theirs(filled: str) -> None:
    one, other = Replica(filled), Replica(filled)
    one.compact()
    one.refresh()
    other.refresh()
    one.put("new", "newer")
    one.refresh()
    other.refresh()
    assert other.lacks("new", "newer") == []
    assert other.asked_for_nothing < 0.02
    one.compact()  # which removes the delta
    assert not one.folder.look().deltas
    other.refresh()
    assert other.lacks("new", "newer", *STORED) == []
    assert one.lacks("new") == []


def test_a_writer_that_ends_announces_what_it_wrote_last(filled: str) -> None:
    one, other = Replica(filled), Replica(filled)
    one.compact()
    one.refresh()
    one.put("last")
    one.tier.announce()
    other.refresh()
    assert other.lacks("last") == []


def test_entries_that_cannot_be_announced_are_an_error_and_are_announced_later(
    filled: str, front: S3Front, s3: Seaweed
) -> None:
    one, other = Replica(filled.replace(s3.endpoint, f"http://127.0.0.1:{front.port}")), Replica(filled)
    one.compact()
    one.refresh()
    one.put("new")
    front.rule = lambda request: (403, "AccessDenied") if request.writes and "/delta/" in request.path else None
    for announce in (one.refresh, one.tier.announce):
        with pytest.raises(TierError, match=f"could not announce in the catalog of {NAMESPACE} what was written here"):
            announce()
    assert one.lacks("new", *STORED) == []
    front.rule = lambda request: None
    one.refresh()
    other.refresh()
    assert other.lacks("new") == []


def test_deleted_entries_are_forgotten_with_the_next_full_listing(filled: str) -> None:
    one, other = Replica(filled), Replica(filled)
    one.compact()
    other.refresh()
    for name in STORED[:40]:
        one.tier.delete(key(name))
    other.refresh()
    assert other.lacks(*STORED[:40]) == []
    one.compact()
    other.refresh()
    assert len(other.lacks(*STORED[:40])) > 36
    assert other.lacks(*STORED[40:]) == []


def test_a_small_namespace_is_listed_and_nothing_is_written_for_it(s3: Seaweed, url: str) -> None:
    one = Replica(url)
    one.put("a", "b")
    one.refresh()
    one.refresh()
    assert objects(s3, url) == []
    assert one.lacks("a", "b") == []
    assert len(one.lacks("c")) == 1


def test_a_namespace_that_has_become_small_loses_its_catalog(filled: str) -> None:
    one, other = Replica(filled), Replica(filled)
    one.compact()
    other.refresh()
    for name in STORED[:-20]:
        one.tier.delete(key(name))
    one.compact()
    assert not one.folder.look().shards
    other.refresh()
    assert other.lacks(*STORED[-20:]) == []
    assert other.asked_for_nothing < 0.01


def test_without_the_option_nothing_asks_for_a_catalog(filled: str, front: S3Front, s3: Seaweed) -> None:
    Replica(filled).compact()
    one = Replica(filled.replace(s3.endpoint, f"http://127.0.0.1:{front.port}"), catalog=False)
    one.refresh()
    one.put("a")
    one.refresh()
    assert not [request for request in front.seen if ".catalog" in request.path]
    assert one.lacks("a", *STORED) == []


@pytest.mark.slow
def test_a_replica_that_may_only_read_reads_the_catalog_and_writes_nothing(
    filled: str, s3: Seaweed, front: S3Front
) -> None:
    Replica(filled).compact()
    through = filled.replace(s3.endpoint, f"http://127.0.0.1:{front.port}")
    reader = Replica(f"{through}&read_only=true", pace=replace(PACE, compact_s=-60.0))
    reader.refresh()
    assert reader.lacks(*STORED) == []
    assert not [request for request in front.seen if request.writes]


@pytest.mark.slow
def test_a_removed_namespace_has_no_catalog_and_its_compactor_ends(s3: Seaweed, filled: str) -> None:
    one = Replica(filled)
    compactor = one.compactor()
    assert compactor.take(one.folder.look())
    assert one.tier.remove(NAMESPACE) == len(STORED)
    assert objects(s3, filled) == []
    with pytest.raises(LeaseLost):
        compactor.compact()
    other = Replica(filled)
    other.refresh()  # shards among missing ones, or none
    wait_until("the lease is stale", lambda: other.cataloged.catalog.free)
    other.refresh()
    if other.cataloged._compactor is not None:
        wait_until("it has listed", lambda: not other.cataloged._compactor.running)
    other.refresh()
    assert other.asked_for_nothing < 0.01


def test_a_store_without_conditional_writes_is_listed(filled: str, front: S3Front, s3: Seaweed) -> None:
    def unconditional(request: Request) -> tuple[int, str] | None:
        return (501, "NotImplemented") if {"if-match", "if-none-match"} & set(request.headers) else None

    front.rule = unconditional
    one = Replica(filled.replace(s3.endpoint, f"http://127.0.0.1:{front.port}"))
    one.refresh()
    one.refresh()
    assert objects(s3, filled) == []
    assert one.lacks(*STORED) == []
    assert one.asked_for_nothing < 0.01


def test_a_replica_that_may_not_write_the_catalog_lists(filled: str, front: S3Front, s3: Seaweed) -> None:
    front.rule = lambda request: (403, "AccessDenied") if request.writes and ".catalog" in request.path else None
    one = Replica(filled.replace(s3.endpoint, f"http://127.0.0.1:{front.port}"))
    with suppress(TierError):
        one.refresh()
    one.refresh()
    assert one.lacks(*STORED) == []
    assert one.asked_for_nothing < 0.01


def test_a_store_that_was_busy_for_a_moment_gets_its_catalog_at_the_next_refresh(
    filled: str, front: S3Front, s3: Seaweed
) -> None:
    front.rule = lambda request: (503, "SlowDown") if request.writes else None
    one = Replica(filled.replace(s3.endpoint, f"http://127.0.0.1:{front.port}"))
    with pytest.raises(TierError):
        one.refresh()
    front.rule = lambda request: None
    one.refresh()
    wait_until("it has listed", lambda: one.cataloged._compactor is not None and not one.cataloged._compactor.running)
    assert len(objects(s3, filled)) > SHARDS


# ---- processes that die, and others that interfere


class Killed(Exception):
    """The compactor's process has ended."""


class Steps(CatalogFolder):
    """Ends the process before the `left`-th write or removal."""

    left = 0

    def write(self, name: str, data: bytes, over: str | None) -> str | None:
        self._step()
        return super().write(name, data, over)

    def remove(self, names: Any) -> None:
        self._step()
        super().remove(names)

    def _step(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed


def steps(replica: Replica, left: int) -> Steps:
    folder = Steps(replica.cataloged._client, replica.cataloged._lister, NAMESPACE)
    folder.left = left
    return folder


@pytest.mark.parametrize(
    "first",
    [pytest.param(True, id="the first catalog", marks=pytest.mark.slow), pytest.param(False, id="a later one")],
)
def test_a_compactor_may_die_before_each_kind_of_step(filled: str, first: bool) -> None:
    one = Replica(filled)
    if not first:
        one.compact()
        one.refresh()
        one.put("announced")
        one.refresh()
    known = [*STORED, *(() if first else ("announced",))]
    old = Replica(filled)
    old.refresh()
    written = 256
    for left in (1, 130, written + 1, written + 2, written + 3):
        compactor = one.compactor(steps(one, left))
        with suppress(Killed, LeaseLost):
            compactor.take(one.folder.look())
            compactor.compact()
        new = Replica(filled)
        for replica in (old, new):
            replica.refresh()
            assert replica.lacks(*known) == []
    one.compact()
    new = Replica(filled)
    new.refresh()
    assert new.lacks(*known) == []
    assert new.asked_for_nothing < 0.02


def test_a_compactor_that_has_lost_its_lease_to_another_is_refused_and_removes_nothing(filled: str) -> None:
    """It pauses after it has listed; meanwhile its lease is taken, more is written, and everything is listed again."""
    one, other = Replica(filled), Replica(filled)
    one.compact()
    one.refresh()
    slow = one.compactor(pace=replace(PACE, lease_s=400.0))
    assert slow.take(one.folder.look())
    pages = slow._pages
    stood: list[int] = []

    def stands_still(number: int) -> Iterator[Any]:
        found = list(pages(number))
        if not stood:
            stood.append(number)
            one.put("meanwhile")
            one.refresh()
            other.compact()
        yield from found

    slow._pages = stands_still
    with pytest.raises(LeaseLost):
        slow.compact()
    new = Replica(filled)
    new.refresh()
    assert new.lacks("meanwhile", *STORED) == []


@pytest.mark.slow
def test_whether_a_lease_is_stale_depends_only_on_the_observers_clock(filled: str, front: S3Front, s3: Seaweed) -> None:
    """The store's clock is a year off, and the holder has just died: the others wait, and then replace it."""
    front.ahead_s = 365 * 86400.0
    one = Replica(filled.replace(s3.endpoint, f"http://127.0.0.1:{front.port}"))
    dead = one.compactor()
    assert dead.take(one.folder.look())
    one.refresh()
    assert one.cataloged._compactor is None
    assert one.lacks("anything") == []  # not known yet
    wait_until("the lease is stale", lambda: one.cataloged.catalog.free)
    one.refresh()
    wait_until("it has listed", lambda: not one.cataloged._compactor.running)
    one.refresh()
    assert one.lacks(*STORED) == []
    assert one.asked_for_nothing < 0.02


def test_a_lease_that_is_renewed_is_never_stale(filled: str) -> None:
    one = Replica(filled)
    holder = one.compactor()
    assert holder.take(one.folder.look())
    ticks = 0

    def renewed_for_long() -> bool:
        nonlocal ticks
        ticks += 1
        holder._renew()
        one.refresh()
        assert one.cataloged._compactor is None
        return ticks > 5

    wait_until("it was renewed", renewed_for_long)


def test_a_delta_that_is_compacted_while_it_is_read_is_found_in_the_shards(filled: str) -> None:
    one, other, reader = Replica(filled), Replica(filled), Replica(filled)
    one.compact()
    one.refresh()
    reader.refresh()
    one.put("new")
    one.refresh()
    folder = reader.folder
    read = folder.read
    happened: list[str] = []

    def compacted_first(name: str) -> tuple[bytes, str | None]:
        if not happened:
            happened.append(name)
            other.compact()
        return read(name)

    folder.read = compacted_first  # type: ignore[method-assign]
    reader.cataloged.catalog._folder = lambda namespace: folder
    reader.refresh()
    assert happened[0].startswith("delta/")
    assert reader.lacks("new", *STORED) == []


def test_entries_of_a_writer_that_died_before_its_delta_are_found_by_the_next_full_listing(filled: str) -> None:
    one, other = Replica(filled), Replica(filled)
    one.compact()
    one.refresh()
    one.put("unannounced")
    other.refresh()
    assert other.lacks("unannounced") == ["unannounced"]  # a miss: it is encoded again
    other.compact()
    other.refresh()
    assert other.lacks("unannounced") == []


# ---- whatever its objects contain


def damaged(data: bytes, how: str, number: int) -> bytes | None:
    name = f"{NAMESPACE}/shard/{number:02x}"
    return {
        "lost": None,
        "torn": data[: len(data) // 2],
        "altered": data[:40] + bytes([data[40] ^ 255]) + data[41:],
        "empty": b"",
        "of zeros": bytes(len(data)),
        "too long": bytes(2 << 20),
        "of another key": encode(name, 1, shard_of(b""), SigningKey(b"z" * 32, "abcdefabcdef")),
        "unsigned": encode(name, 1, shard_of(b""), None),
        "of another shard": encode(f"{NAMESPACE}/shard/ff", 1, shard_of(b""), KEY),
        "of another namespace": encode(f"other/shard/{number:02x}", 1, shard_of(b""), KEY),
        "of no length that a shard has": encode(name, 1, bytes(24), KEY),
    }[how]


HOWS = (
    *("lost", "torn", "altered", "empty", "of zeros", "too long", "of another key", "unsigned", "of another shard"),
    *("of another namespace", "of no length that a shard has"),
)


def test_damaged_shards_cause_look_ups_and_the_next_listing_repairs_them(filled: str, s3: Seaweed) -> None:
    """Each shard is damaged in another way; then all keys that belong to it are asked for."""
    one = Replica(filled, signing=KEY)
    one.compact()
    follower = Replica(filled, signing=KEY)
    follower.refresh()
    client, folder = s3.client(), f"{s3_options(filled).prefix}/.catalog/{NAMESPACE}/shard"
    for number, how in enumerate(HOWS):
        name = f"{folder}/{number:02x}"
        bad = damaged(client.get_object(Bucket=s3.bucket, Key=name)["Body"].read(), how, number)
        if bad is None:
            client.delete_object(Bucket=s3.bucket, Key=name)
        else:
            client.put_object(Bucket=s3.bucket, Key=name, Body=bad)
    for replica in (Replica(filled, signing=KEY), follower):
        replica.tier.maintain = lambda: None  # type: ignore[method-assign]  # it is not repaired
        replica.refresh()
        assert replica.lacks(*STORED) == []
        for number, how in enumerate(HOWS):
            assert all(replica.lane.asks(digest) for digest in STRANGERS if digest[0] == number), how
        assert replica.asked_for_nothing < 0.02 + len(HOWS) / 256
        assert replica.cataloged.catalog.due
    one.compact()
    follower.refresh()
    assert follower.lacks(*STORED) == []
    assert follower.asked_for_nothing < 0.02
    assert not follower.cataloged.catalog.due


def test_deltas_that_do_not_verify_or_are_too_long_are_ignored(filled: str) -> None:
    one = Replica(filled, signing=KEY)
    one.compact()
    payload = key("forged").digest[:16]
    for name, data in (
        ("unsigned", encode(f"{NAMESPACE}/delta/unsigned", 1, payload, None)),
        ("renamed", encode(f"{NAMESPACE}/delta/other", 1, payload, KEY)),
        ("miscounted", encode(f"{NAMESPACE}/delta/miscounted", 2, payload, KEY)),
        ("empty", b""),
        ("long", bytes(3 << 20)),
        ("good", encode(f"{NAMESPACE}/delta/good", 1, key("announced").digest[:16], KEY)),
    ):
        one.folder.write(f"delta/{name}", data, None)
    reader = Replica(filled, signing=KEY)
    reader.refresh()
    assert reader.lacks("announced") == []
    assert reader.lacks("forged") == ["forged"]
    assert reader.lacks(*STORED) == []


def test_no_allocation_is_sized_by_a_count_in_a_shard() -> None:
    data = encode("ns/shard/00", 1 << 60, shard_of(b""), None)
    assert decode_shard("ns/shard/00", data, None)[0] <= MAX_SHARD_BYTES * 8


@pytest.mark.parametrize("length", [0, 15, 31, 32, 100])
def test_data_too_short_for_an_object_is_refused(length: int) -> None:
    for decode in (decode_shard, decode_delta):
        with pytest.raises(NoCatalogObject):
            decode("ns/shard/00", bytes(length), None)
