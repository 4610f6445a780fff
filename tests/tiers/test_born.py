# SPDX-License-Identifier: Apache-2.0
"""A tier that was emptied from outside gets a new name, and one that only evicts entries does not."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.testbed.servers.redis import RedisServer, cluster, redis_server
from benchmarks.testbed.servers.seaweed import Seaweed
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.tiers import s3 as s3_module
from lmcache_ec.tiers.base import Tier
from lmcache_ec.tiers.disk import DiskTier
from lmcache_ec.tiers.redis import open_redis
from lmcache_ec.tiers.redis_counts import Counts
from lmcache_ec.tiers.s3 import open_s3
from tests.tiers.conformance import MIB, value

NAMESPACE = "ns"
BORN = "lmcache-ec/born"


def key(identifier: str) -> EncoderCacheKey:
    return EncoderCacheKey(NAMESPACE, identifier)


@dataclass(frozen=True)
class Store:
    opened: Callable[[], Tier]
    empty: Callable[[], object]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def masters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    with cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield list(running)


@pytest.fixture(params=["disk", "what a shell's star names", "redis", "cluster", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param in ("disk", "what a shell's star names"):
        root = tmp_path / "root"
        star = [root] if request.param == "disk" else []

        def remove_folders() -> None:
            for path in star or root.glob("[!.]*"):
                shutil.rmtree(path)

        return Store(lambda: DiskTier(root, 64 * MIB), remove_folders)
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis")
        server.client().flushall()
        return Store(lambda: open_redis(server.url), server.client().flushall)
    if request.param == "cluster":
        servers: list[RedisServer] = request.getfixturevalue("masters")
        url = "redis-cluster://" + ",".join(f"127.0.0.1:{one.port}" for one in servers)
        return Store(lambda: open_redis(url), lambda: [one.client().flushall() for one in servers])
    bucket: Seaweed = request.getfixturevalue("s3")
    for name, text in bucket.environment.items():
        monkeypatch.setenv(name, text)
    place = f"s3://{bucket.bucket}/{tmp_path.name.replace('_', '-').lower()}?endpoint={bucket.endpoint}"

    def empty() -> None:
        for found in bucket.client().list_objects_v2(Bucket=bucket.bucket)["Contents"]:
            bucket.client().delete_object(Bucket=bucket.bucket, Key=found["Key"])

    return Store(lambda: open_s3(place), empty)


def surveyed(tier: Tier) -> str | None:
    """The tier's name as the store process sees it after a survey."""
    for _ in tier.list(NAMESPACE):
        pass
    tier.maintain()
    return tier.born()


def test_emptying_a_store_gives_it_another_name_that_all_see(store: Store) -> None:
    one, other = store.opened(), store.opened()
    name = surveyed(one)
    for _ in range(2):
        for number in range(3):
            one.put(key(f"{number}"), value("a", 1000))
        assert {surveyed(one), surveyed(other), surveyed(store.opened())} == {name}
        store.empty()
        later = surveyed(one)
        assert later not in (None, name)
        assert surveyed(other) == later
        name = later


def test_a_folder_that_was_emptied_in_an_orderly_way_keeps_its_name(tmp_path: Path) -> None:
    """By eviction, by the command, and by hand for a few entries."""
    tier = DiskTier(tmp_path, 10_000)
    name = surveyed(tier)
    for number in range(30):
        tier.put(key(f"{number}"), value("a", 1000))
    assert surveyed(tier) == name
    for path in list(tmp_path.rglob("*.safetensors"))[:4]:
        path.unlink()
    assert surveyed(tier) == name
    tier.remove(NAMESPACE)
    assert surveyed(tier) == name


def test_a_name_that_redis_evicted_comes_back_even_if_a_newcomer_has_given_another(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru") as server:
        tier = open_redis(server.url)
        name = tier.born()
        for number in range(20):
            tier.put(key(f"{number}"), value(f"{number}", 400_000))
        assert server.client().info("stats")["evicted_keys"] > 0
        server.client().delete(BORN)
        newcomer = open_redis(server.url)  # does not know the first name
        assert newcomer.born() != name
        assert tier.born() == tier.born() == name
        server.client().flushall()
        assert tier.born() == newcomer.born() != name


def test_a_redis_that_lost_all_with_its_process_has_another_name(tmp_path: Path) -> None:
    """A Redis that reloaded everything from its disk keeps its name."""
    with redis_server(tmp_path) as server:
        tier = open_redis(server.url)
        name = tier.born()
        tier.put(key("a"), value("a", 100))
        server.client().save()
        server.kill()
        server.start()
        assert tier.born() == name
        (tmp_path / "dump.rdb").unlink()
        server.kill()
        server.start()
        assert tier.born() != name


def test_where_the_counts_of_redis_may_not_be_read_nothing_is_concluded(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        server.client().execute_command("ACL", "SETUSER", "u", "on", ">p", "~*", "+@all", "-info")
        tier = open_redis(f"redis://u:p@127.0.0.1:{server.port}")
        assert tier.born() is None
        server.client().flushall()
        assert tier.born() is None


def test_a_user_who_may_only_read_writes_no_name(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        server.client().execute_command("ACL", "SETUSER", "u", "on", ">p", "~*", "+@read", "+info", "+dbsize")
        tier = open_redis(f"redis://u:p@127.0.0.1:{server.port}")
        assert tier.born() is None
        name = open_redis(server.url).born()
        assert tier.born() == name


@pytest.mark.parametrize(
    ("then", "now", "evicted"),
    [
        (Counts(frozenset({b"a"}), 0, 0, 100), Counts(frozenset({b"a"}), 0, 0, 0), False),  # flushed
        (Counts(frozenset({b"a"}), 7, 0, 100), Counts(frozenset({b"a"}), 7, 50, 50), False),  # expired, nothing evicted
        (Counts(frozenset({b"a"}), 7, 0, 100), Counts(frozenset({b"a"}), 9, 0, 99), True),
        (Counts(frozenset({b"a"}), 7, 0, 100), Counts(frozenset({b"a"}), 9, 30, 68), True),
        (Counts(frozenset({b"a"}), 7, 0, 100), Counts(frozenset({b"a"}), 9, 0, 3), False),  # evicting, and flushed
        (Counts(frozenset({b"a"}), 7, 0, 100), Counts(frozenset({b"b"}), 0, 0, 0), False),  # restarted without data
        (Counts(frozenset({b"a"}), 7, 0, 100), Counts(frozenset({b"b"}), 120, 0, 100), True),
    ],
)
def test_a_loss_is_explained_by_eviction_only_if_the_servers_have_counted_one(
    then: Counts, now: Counts, evicted: bool
) -> None:
    assert now.explain_loss_since(then) is evicted


def test_the_name_in_a_bucket_is_kept_from_aging(s3: Seaweed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lifecycle rule deletes objects that were not written for some days."""
    for name, text in s3.environment.items():
        monkeypatch.setenv(name, text)
    tier = open_s3(f"s3://{s3.bucket}/aging?endpoint={s3.endpoint}", ttl_s=1.0)
    name_in_bucket = tier.born()

    def written() -> object:
        return s3.client().head_object(Bucket=s3.bucket, Key="aging/lmcache-ec-born")["LastModified"]

    first = written()
    assert tier.born() == name_in_bucket
    assert written() == first
    monkeypatch.setattr(s3_module, "_BORN_REWRITTEN_S", 0.0)
    while written() == first:
        assert tier.born() == name_in_bucket
