# SPDX-License-Identifier: Apache-2.0
"""Signed entries over real stores to which a forger without the key writes: forgeries are not trusted, and harmless."""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from benchmarks.testbed.servers.redis import RedisServer, redis_server
from benchmarks.testbed.servers.seaweed import Seaweed
from benchmarks.testbed.waiting import wait_until
from lmcache_ec import entry
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.signing import SigningKey
from lmcache_ec.status_server import tier_statuses
from lmcache_ec.tiers import write_through
from lmcache_ec.tiers.base import Held, Tier
from lmcache_ec.tiers.disk import DiskTier
from lmcache_ec.tiers.journal import Journal
from lmcache_ec.tiers.lane import Habits
from lmcache_ec.tiers.redis import open_redis
from lmcache_ec.tiers.remote import Lookup
from lmcache_ec.tiers.s3 import open_s3
from lmcache_ec.tiers.stack import Absent, Answer, Found, Stack, Wanted
from lmcache_ec.tiers.write_through import Put
from tests.tiers.conformance import fetch, new_namespace

OURS, THEIRS = SigningKey(b"\x01" * 32, "ours"), SigningKey(b"\x02" * 32, "theirs")
SPEC = entry.TensorSpec(16, 64, "BF16")
Forge = Callable[[EncoderCacheKey], bytes]


def sealed(key: EncoderCacheKey, signing: SigningKey | None, rows: int = 16, fill: int = 0) -> bytes:
    spec = entry.TensorSpec(rows, 64, "BF16")
    data = memoryview(bytearray([fill]) * entry.entry_length(key.identifier, spec))
    entry.seal(data, key, spec, "test", signing)
    return bytes(data)


def _flipped(key: EncoderCacheKey) -> bytes:
    data = bytearray(sealed(key, OURS))
    data[-1] ^= 1
    return bytes(data)


FORGERIES: dict[str, Forge] = {
    "unsigned": lambda key: sealed(key, None, fill=66),
    "signed with another key": lambda key: sealed(key, THEIRS, fill=66),
    "of another name": lambda key: sealed(EncoderCacheKey(key.namespace, "another"), OURS),
    "torn": _flipped,
    "longer": lambda key: sealed(key, None, 1000),
    "of another version": lambda key: sealed(key, None).replace(b"lmcache-ec/1", b"lmcache-ec/2"),
    "short": lambda key: b"short",
    "empty": lambda key: b"",
}


class Engine:
    """The tiers of one engine, which signs its entries with `signing`."""

    def __init__(
        self,
        tier: Tier,
        local: bool,
        namespace: str,
        signing: SigningKey | None = OURS,
        copied_bytes: int = 256 << 20,
    ) -> None:
        habits = Habits(Lookup.CATALOG if local else Lookup.PROBE, 300.0, local=local)
        self.lines: list[str] = []
        self.journal = Journal(lambda _, text: self.lines.append(text))
        self.stack = Stack([(tier, habits)], self.journal, namespace, signing=signing, copied_bytes=copied_bytes)

    def look_up(self, key: EncoderCacheKey, length: int) -> Answer:
        answers: list[Answer] = []
        self.stack.fetch([Wanted(key, memoryview(bytearray(length)), answers.append, insist=True)])
        wait_until("it is answered", lambda: answers)
        return answers[0]

    def write(self, key: EncoderCacheKey, data: bytes) -> bool:
        done: list[bool] = []
        put = Put(key, memoryview(data))
        put.done = lambda: done.append(put.took != 0)
        self.stack.writes.write(put)
        wait_until("it is written", lambda: done)
        return done[0]

    @property
    def count(self) -> Counter[str]:
        (lane,) = self.stack.lanes
        return Counter({name.removeprefix(f"{lane.name}_"): n for name, n in self.journal.counts.items()})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(params=["disk", "redis", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Tier, bool]]:
    """A tier, and whether it is local."""
    match request.param:
        case "disk":
            tier: Tier = DiskTier(tmp_path, 1 << 30)
        case "redis":
            tier = open_redis(request.getfixturevalue("server").url)
        case _:
            there = request.getfixturevalue("s3")
            keys = {"aws_access_key_id": there.access_key_id, "aws_secret_access_key": there.secret_access_key}
            tier = open_s3(f"s3://{there.bucket}/forgeries?endpoint={there.endpoint}", keys)
    yield tier, request.param == "disk"
    tier.close()


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_a_forgery_is_a_counted_miss_that_stays_until_the_next_write_replaces_it_once(
    store: tuple[Tier, bool], forge: Forge
) -> None:
    tier, local = store
    engine = Engine(tier, local, namespace := new_namespace())
    key, forged = EncoderCacheKey(namespace, "picture"), forge(EncoderCacheKey(namespace, "picture"))
    ours = sealed(key, OURS)
    tier.put(key, memoryview(forged))
    for _ in range(2):
        assert engine.look_up(key, len(forged)) == Absent()
        assert fetch(tier, key) == forged, "a request deletes nothing"
    assert engine.count["forged"] + engine.count["corrupt"] == 2
    assert engine.count["hits"] == 0
    assert engine.write(key, ours)
    assert engine.write(key, ours)
    assert (engine.count["replaced"], engine.count["present"]) == (1, 1)
    assert engine.look_up(key, len(ours)) == Found(SPEC, tier.name)
    assert fetch(tier, key) == ours
    if isinstance(tier, DiskTier):
        assert tier.stored_bytes == len(ours), "what was replaced is in the account no more"


def test_unsigned_entries_are_counted_separately_and_listed_for_their_tier(store: tuple[Tier, bool]) -> None:
    tier, local = store
    engine = Engine(tier, local, namespace := new_namespace())
    for number, forge in enumerate((FORGERIES["unsigned"], FORGERIES["torn"])):
        key = EncoderCacheKey(namespace, f"picture {number}")
        tier.put(key, memoryview(forge(key)))
        engine.look_up(key, len(forge(key)))
    (status,) = tier_statuses(engine.stack, engine.journal, 0)
    assert (status["forged"], status["errors"], status["hits"]) == (1, 1, 0)
    assert sum("it is not signed, but key ours is required" in line for line in engine.lines) == 1


def test_an_engine_that_never_read_a_forgery_replaces_it_when_it_writes(store: tuple[Tier, bool]) -> None:
    """A producer knows only the length of entries; and a forgery may be put there between a miss and a write."""
    tier, local = store
    engine = Engine(tier, local, namespace := new_namespace())
    key = EncoderCacheKey(namespace, "picture")
    tier.put(key, memoryview(sealed(key, None)))
    assert engine.write(key, ours := sealed(key, OURS))
    assert fetch(tier, key) == ours


def test_a_signed_entry_keeps_its_name_whatever_its_length(store: tuple[Tier, bool]) -> None:
    tier, local = store
    engine = Engine(tier, local, namespace := new_namespace())
    key = EncoderCacheKey(namespace, "picture")
    first = sealed(key, OURS, rows=100)
    tier.put(key, memoryview(first))
    assert not engine.write(key, sealed(key, OURS))
    assert fetch(tier, key) == first
    assert engine.count["replaced"] == 0


def test_a_huge_forgery_is_replaced_without_being_read(
    store: tuple[Tier, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forgery no longer than an entry takes no more memory than the budget for copies."""
    tier, local = store
    engine = Engine(tier, local, namespace := new_namespace(), copied_bytes=600_000)
    read: list[int] = []
    held = tier.held

    def counted(key: EncoderCacheKey, most_bytes: int) -> Held | None:
        found = held(key, most_bytes)
        read.append(0 if found is None or found.data is None else len(found.data))
        return found

    monkeypatch.setattr(tier, "held", counted)
    monkeypatch.setattr(write_through, "_PLAUSIBLE_BYTES", 1 << 20)
    for number, (length, replaced) in enumerate(((2 << 20, True), (500_000, True), (1 << 20, False))):
        key = EncoderCacheKey(namespace, f"picture {number}")
        tier.put(key, memoryview(bytes(length)))
        ours = sealed(key, OURS)
        assert engine.write(key, ours) is replaced
        assert (fetch(tier, key) == ours) is replaced
    assert max(read) == 500_000


def test_many_engines_that_find_one_forgery_leave_one_of_their_entries(store: tuple[Tier, bool]) -> None:
    tier, local = store
    namespace = new_namespace()
    engines = [Engine(tier, local, namespace) for _ in range(4)]
    key = EncoderCacheKey(namespace, "picture")
    tier.put(key, memoryview(sealed(key, None, 50)))
    ours = sealed(key, OURS)
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(lambda engine: engine.write(key, ours), engines))
    assert fetch(tier, key) == ours
    assert sum(engine.count["replaced"] for engine in engines) >= 1


def test_without_a_key_an_entry_in_the_way_of_a_write_is_not_read(store: tuple[Tier, bool]) -> None:
    tier, local = store
    engine = Engine(tier, local, namespace := new_namespace(), signing=None)
    key = EncoderCacheKey(namespace, "picture")
    tier.put(key, memoryview(sealed(key, THEIRS)))
    tier.held = None  # type: ignore[method-assign, assignment]
    assert engine.write(key, sealed(key, None))
    assert engine.look_up(key, len(sealed(key, None))) == Found(SPEC, tier.name)


def test_a_list_under_an_entrys_name_in_redis_is_replaced(server: RedisServer) -> None:
    tier, namespace = open_redis(server.url), new_namespace()
    engine, key = Engine(tier, False, namespace), EncoderCacheKey(namespace, "picture")
    ours = sealed(key, OURS)
    with redis.Redis.from_url(server.url) as client:
        client.rpush(f"lmcache-ec/{key.object_name}", "x")
        assert engine.look_up(key, 1) == Absent()
        assert engine.write(key, ours)
    assert fetch(tier, key) == ours
    tier.close()


def test_in_s3_only_the_object_that_was_read_is_replaced(s3: Seaweed) -> None:
    keys = {"aws_access_key_id": s3.access_key_id, "aws_secret_access_key": s3.secret_access_key}
    tier = open_s3(f"s3://{s3.bucket}/forgeries?endpoint={s3.endpoint}", keys)
    key = EncoderCacheKey(new_namespace(), "picture")
    tier.put(key, memoryview(b"forged"))
    held = tier.held(key, 100)
    assert held is not None
    assert tier.replace(key, memoryview(b"a neighbour's"), held)
    assert tier.replace(key, memoryview(b"ours"), held) is False
    assert fetch(tier, key) == b"a neighbour's"


def test_a_link_in_the_place_of_an_entry_is_replaced_and_what_it_leads_to_is_left_alone(tmp_path: Path) -> None:
    tier, namespace = DiskTier(tmp_path / "tier", 1 << 30), new_namespace()
    engine, key = Engine(tier, True, namespace), EncoderCacheKey(namespace, "picture")
    (elsewhere := tmp_path / "elsewhere").write_bytes(b"not ours")
    (path := tier.root / key.object_name).parent.mkdir(parents=True)
    path.symlink_to(elsewhere)
    ours = sealed(key, OURS)
    assert engine.write(key, ours)
    assert fetch(tier, key) == ours
    assert elsewhere.read_bytes() == b"not ours"
    tier.replace(key, memoryview(b"new"), held) if (held := tier.held(key, 1 << 20)) else pytest.fail("nothing held")
    assert tier.stored_bytes == 3
