# SPDX-License-Identifier: Apache-2.0
"""Entries that a tier lost but memory still holds are written to it again, except those that the tier evicted."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.testbed.core import MIB, NAMESPACE, Bench, names
from benchmarks.testbed.servers.redis import RedisServer, redis_server
from benchmarks.testbed.servers.seaweed import Seaweed
from lmcache_ec.cli.commands import app
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.tiers.base import Tier
from lmcache_ec.tiers.disk import DiskTier
from lmcache_ec.tiers.redis import open_redis
from lmcache_ec.tiers.s3 import open_s3

IMAGES = names("image", 6)
QUICK = {"catalog_refresh_s": 0.2}
"""How often S3 is checked."""


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_ec.cache._LOOK_S", 0.2)


@dataclass(frozen=True)
class Store:
    """One tier's store: how an engine is configured with it, how a test opens it, how it is emptied from outside."""

    name: str
    remotes: list[str]
    folder: Path | None
    tier: Tier
    empty: Callable[[], object]

    def bench(self, **keys: Any) -> Bench:
        return Bench(self.folder, **{"remotes": self.remotes, **QUICK, **keys})

    def held(self) -> set[bytes]:
        return {entry.digest for entry in self.tier.list(NAMESPACE)}


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["disk", "redis", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "disk":
        folder = tmp_path / "disk"
        return Store("disk", [], folder, DiskTier(folder, 1 << 30), lambda: shutil.rmtree(folder))
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis")
        server.client().flushall()
        return Store("redis", [server.url], None, open_redis(server.url), server.client().flushall)
    bucket: Seaweed = request.getfixturevalue("s3")
    for name, text in bucket.environment.items():
        monkeypatch.setenv(name, text)
    prefix = tmp_path.name.replace("_", "-").lower()
    url = f"s3://{bucket.bucket}/{prefix}?endpoint={bucket.endpoint}"

    def empty() -> None:
        for found in bucket.client().list_objects_v2(Bucket=bucket.bucket, Prefix=f"{prefix}/")["Contents"]:
            bucket.client().delete_object(Bucket=bucket.bucket, Key=found["Key"])

    return Store("s3", [url], None, open_s3(url), empty)


def digests(*identifiers: str) -> set[bytes]:
    return {EncoderCacheKey(NAMESPACE, identifier).digest for identifier in identifiers}


def entries_in(server: RedisServer) -> set[bytes]:
    with closing(open_redis(server.url)) as tier:
        return {entry.digest for entry in tier.list(NAMESPACE)}


def filled(bench: Bench, store: Store, *identifiers: str) -> None:
    """Store entries, until the tier itself lists them."""
    bench.encode(identifiers)
    bench.settle()
    bench.until("all is written", lambda: digests(*identifiers) <= store.held())
    looked(bench, store.name)


def looked(bench: Bench, name: str, times: int = 2) -> None:
    """Wait until the tier was checked `times` more times: by then a loss is known, and the rewrites are ordered."""
    before = bench.status()["store"].get(f"{name}_looks", 0)
    bench.until("it was looked at", lambda: bench.status()["store"].get(f"{name}_looks", 0) >= before + times, 20.0)
    bench.settle()


@pytest.mark.fault("emptied completely", "any tier", "refilled from memory")
def test_a_store_that_was_emptied_is_refilled_with_what_memory_holds(store: Store) -> None:
    """The folder removed, FLUSHALL, the bucket emptied; twice each. The next engine is warm."""
    with store.bench() as bench:
        filled(bench, store, *IMAGES)
        for number in range(2):
            store.empty()
            bench.until("all is there again", lambda: store.held() == digests(*IMAGES), 20.0)
            bench.settle()
            assert bench.snapshot()["rewrites"] == (number + 1) * len(IMAGES)
    with store.bench() as restarted:
        assert all(restarted.serves(identifier) for identifier in IMAGES)


@pytest.mark.parametrize("store", ["disk", "redis", pytest.param("s3", marks=pytest.mark.slow)], indirect=True)
def test_entries_that_one_engine_finds_lost_are_written_again_by_every_other_engine_too(store: Store) -> None:
    """The first engine to check gives the store its new name; the others see that it has changed."""
    with store.bench() as one, store.bench() as other:
        filled(one, store, *IMAGES[:3])
        filled(other, store, *IMAGES[3:])
        store.empty()

        def all_there() -> bool:
            other.drain()
            return store.held() == digests(*IMAGES)

        one.until("all is there again", all_there, 20.0)
        one.settle()
        other.settle()


def removed_by_command(store: Store) -> None:
    result = CliRunner().invoke(app, ["namespaces", "--remove", NAMESPACE, "--yes", "--force"])
    assert f"removed {len(IMAGES)} entries of {NAMESPACE}" in result.output


def deleted_one_by_one(store: Store) -> None:
    for identifier in IMAGES:
        store.tier.delete(EncoderCacheKey(NAMESPACE, identifier))


@pytest.mark.parametrize("remove", [removed_by_command, deleted_one_by_one], ids=lambda f: f.__name__)
def test_entries_that_we_removed_stay_removed(
    store: Store, remove: Callable[[Store], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if store.folder is not None:
        monkeypatch.setenv("LMCACHE_EC_LOCAL_DISK", str(store.folder))
    for url in store.remotes:
        monkeypatch.setenv("LMCACHE_EC_REMOTE_URL", url)
    with store.bench() as bench:
        filled(bench, store, *IMAGES)
        remove(store)
        looked(bench, store.name)
        assert (store.held(), bench.snapshot()["rewrites"]) == (set(), 0)
        assert all(bench.serves(identifier) for identifier in IMAGES)
        bench.settle()
        assert store.held() == set()


@pytest.mark.parametrize("store", ["redis", "s3"], indirect=True)
def test_expired_entries_are_not_written_again(store: Store) -> None:
    """In S3, each reader judges the age for itself."""
    reader = open_s3(store.remotes[0], ttl_s=1.0) if store.name == "s3" else store.tier
    with store.bench(ttl_s=1.0) as bench:
        bench.encode(IMAGES)
        bench.settle()
        looked(bench, store.name)
        bench.until("it has aged", lambda: not list(reader.list(NAMESPACE)), 20.0)
        looked(bench, store.name)
        assert bench.status()["store"][f"{store.name}_writes"] == len(IMAGES)
        assert bench.snapshot()["rewrites"] == 0


@pytest.mark.parametrize("store", ["disk", "redis"], indirect=True)
def test_a_consumer_writes_nothing_again(store: Store) -> None:
    with store.bench() as bench:
        filled(bench, store, *IMAGES)
    with store.bench(saves=False) as consumer:
        assert all(consumer.serves(identifier) for identifier in IMAGES)
        consumer.settle()
        store.empty()
        with store.bench() as another:
            looked(another, store.name)
            consumer.settle()
        assert (store.held(), consumer.snapshot()["rewrites"]) == (set(), 0)


def test_entries_evicted_from_the_folder_are_not_written_again(tmp_path: Path) -> None:
    """Entries of 1 MiB go through a folder of 4 MiB."""
    many = names("large", 12)
    with Bench(tmp_path, max_local_disk_size=4 / 1024) as bench:
        for identifier in many:
            bench.encode([identifier], MIB // 128 - 64)
            bench.settle()
        looked(bench, "disk")
        assert bench.status()["store"]["disk_writes"] == len(many)
        assert bench.snapshot()["rewrites"] == 0


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random"])
def test_entries_evicted_by_redis_are_not_written_again(tmp_path: Path, policy: str) -> None:
    """Even though a Redis that evicts at random may evict its own name as well. A flush is still noticed."""
    settings = ("--maxmemory", "6mb", "--maxmemory-policy", policy)
    with redis_server(tmp_path / "server", *settings) as server, Bench(None, remotes=[server.url]) as bench:
        looked(bench, "redis", times=1)
        first = server.client().get("lmcache-ec/born")
        for number, identifier in enumerate(names("large", 400)):
            bench.encode([identifier], 4096)
            bench.settle()
            name_evicted = server.client().get("lmcache-ec/born") != first
            if number >= 24 and (name_evicted or policy == "allkeys-lru"):
                break
        looked(bench, "redis")
        assert server.client().info("stats")["evicted_keys"] > 0
        assert name_evicted or policy == "allkeys-lru"
        assert (bench.snapshot()["rewrites"], server.client().exists("lmcache-ec/born")) == (0, 1)
        server.client().flushall()
        bench.until("the flush is seen", lambda: bench.snapshot()["rewrites"] > 0, 20.0)
        bench.settle()


def test_a_remote_that_was_unreachable_gets_what_it_missed(tmp_path: Path) -> None:
    """Entries encoded or promoted meanwhile, and those that it lost with its process."""
    with (
        redis_server(tmp_path / "near") as near,
        redis_server(tmp_path / "far") as far,
    ):
        with Bench(None, remotes=[far.url]) as another:
            another.encode(["promoted"])
            another.settle()
        with Bench(tmp_path / "disk", remotes=[near.url, far.url]) as bench:
            bench.encode(["before"])
            bench.settle()
            looked(bench, "redis")
            near.kill()
            bench.encode(["meanwhile"])
            assert bench.serves("promoted")
            bench.settle()
            near.start()
            everything = digests("before", "meanwhile", "promoted")
            bench.until("it has all", lambda: entries_in(near) == everything, 40.0)
            bench.settle()


def test_a_remote_that_is_unreachable_at_the_start_gets_what_it_missed(tmp_path: Path) -> None:
    with redis_server(tmp_path / "server") as server:
        server.kill()
        with Bench(tmp_path / "disk", remotes=[server.url]) as bench:
            bench.encode(IMAGES)
            bench.settle()
            server.start()
            bench.until("it has all", lambda: len(entries_in(server)) == len(IMAGES), 40.0)
            bench.settle()


def test_writes_lost_with_a_store_process_are_done_by_the_next(tmp_path: Path) -> None:
    """The disk has the entries, so their disk writes are over; the uploads died with the process."""
    with redis_server(tmp_path / "server") as server, Bench(tmp_path / "disk", remotes=[server.url]) as bench:
        pid = bench.serving()
        server.freeze()
        bench.encode(IMAGES)
        bench.settle()
        os.kill(pid, signal.SIGKILL)
        server.thaw()
        bench.until("it has all", lambda: len(entries_in(server)) == len(IMAGES), 40.0)
        bench.settle()
