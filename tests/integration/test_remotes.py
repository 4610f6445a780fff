# SPDX-License-Identifier: Apache-2.0
"""Remote tiers under the whole core: warm on another host, asked in order, and harmless when unreachable."""

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks.testbed.core import (
    NAMESPACE,
    Bench,
    length,
    names,
    of_another_version,
    own_arenas,
    stopped,
    store_processes,
    stored,
)
from benchmarks.testbed.servers.authority import Authority
from benchmarks.testbed.servers.lmcache_server import lmcache_server
from benchmarks.testbed.servers.redis import RedisServer, free_port, redis_server
from benchmarks.testbed.servers.relay import relay
from benchmarks.testbed.servers.seaweed import Seaweed
from benchmarks.testbed.stand_ins import Served
from benchmarks.testbed.waiting import DEADLINE_S, wait_until
from lmcache_ec.cache import EncoderCache
from lmcache_ec.cli.doctor import Report, examine, render
from lmcache_ec.config import ConfigError, EncoderCacheConfig, summary
from lmcache_ec.key import EncoderCacheKey

IMAGES = names("image", 6)


@dataclass(frozen=True)
class Remote:
    """A running store, and how a test inspects it."""

    name: str
    url: str
    held: Callable[[], int]
    edit: Callable[[str, Callable[[bytes], bytes]], bytes]
    """Change an entry's bytes; returns the new ones."""


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


def entries_in(server: RedisServer) -> int:
    return len(server.client().keys("*.safetensors"))


def looks_at(server: RedisServer) -> int:
    """How often it was checked for having been emptied; the last check may be under way."""
    counts: dict[str, dict[str, int]] = server.client().info("commandstats")
    return counts.get("cmdstat_dbsize", {"calls": 0})["calls"]


@pytest.fixture
def in_redis(redis: RedisServer) -> Remote:
    redis.client().flushall()

    def edit(identifier: str, change: Callable[[bytes], bytes]) -> bytes:
        name = f"lmcache-ec/{object_name(identifier)}"
        data = change(redis.client().get(name))
        redis.client().set(name, data)
        return data

    return Remote("redis", redis.url, lambda: entries_in(redis), edit)


@pytest.fixture
def in_s3(s3: Seaweed, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Remote:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    prefix = f"test-{abs(hash(request.node.name))}"

    def held() -> int:
        found = s3.client().list_objects_v2(Bucket=s3.bucket, Prefix=f"{prefix}/").get("Contents", [])
        return sum(one["Key"].endswith(".safetensors") for one in found)

    def edit(identifier: str, change: Callable[[bytes], bytes]) -> bytes:
        place = {"Bucket": s3.bucket, "Key": f"{prefix}/{object_name(identifier)}"}
        data = change(s3.client().get_object(**place)["Body"].read())
        s3.client().put_object(**place, Body=data)
        return data

    return Remote("s3", f"s3://{s3.bucket}/{prefix}?endpoint={s3.endpoint}", held, edit)


@pytest.fixture(params=["redis", "s3"])
def remote(request: pytest.FixtureRequest) -> Remote:
    found: Remote = request.getfixturevalue(f"in_{request.param}")
    return found


def object_name(identifier: str) -> str:
    return EncoderCacheKey(NAMESPACE, identifier).object_name


def holds_all(remote: Remote) -> bool:
    return remote.held() == len(IMAGES)


def filled(folder: Path | None, *remotes: Remote) -> None:
    """A host that encodes, stores and ends."""
    with Bench(folder, remotes=[remote.url for remote in remotes]) as bench:
        bench.encode(IMAGES)
        bench.settle()
        for remote in remotes:
            wait_until(f"all is in {remote.name}", partial(holds_all, remote))


def test_another_host_is_warm_and_keeps_what_it_fetched(tmp_path: Path, remote: Remote) -> None:
    filled(tmp_path / "one", remote)
    with Bench(tmp_path / "two", remotes=[remote.url]) as other:
        assert all(other.serves(identifier) for identifier in IMAGES)
        other.settle()
        assert other.snapshot()[f"loads_{remote.name}"] == len(IMAGES)
        wait_until("all is on its disk, too", lambda: stored(tmp_path / "two") == set(IMAGES))
    assert remote.held() == len(IMAGES)
    with Bench(tmp_path / "two") as alone:
        assert all(alone.serves(identifier) for identifier in IMAGES)


def test_a_host_without_a_disk_writes_and_reads_the_remote(remote: Remote) -> None:
    filled(None, remote)
    with Bench(None, remotes=[remote.url]) as other:
        assert all(other.serves(identifier) for identifier in IMAGES)
        assert not other.serves("never stored")
        other.settle()


def opened_by_lmcache(bench: Bench) -> None:
    """Wait for LMCache: importing it may take longer than the start waits."""
    bench.scanned_disk()
    bench.until("it is open", lambda: asks(bench, f"new-{time.monotonic()}"), 60.0)


def test_entries_lost_from_the_disk_come_from_a_remote_of_lmcache(tmp_path: Path) -> None:
    """Through LMCache's own connector, in the store process."""
    with Bench(tmp_path / "disk", remotes=[f"fs://{tmp_path}/shared"]) as bench:
        opened_by_lmcache(bench)
        bench.encode(IMAGES)
        bench.settle()
        wait_until("all is written", lambda: bench.status()["store"].get("lmcache_writes") == len(IMAGES))
        bench.cache.book.forget_all()
        for file in (tmp_path / "disk").rglob("*.safetensors"):
            file.unlink()
        assert all(bench.serves(identifier) for identifier in IMAGES)
        assert not bench.serves("never stored")
        bench.settle()
        assert bench.snapshot()["loads_lmcache"] == len(IMAGES)
        wait_until("all is on its disk again", lambda: stored(tmp_path / "disk") == set(IMAGES))


@pytest.mark.slow  # two store processes import LMCache
@pytest.mark.parametrize("kind", ["fs", "lm"])
def test_another_host_is_warm_from_a_remote_of_lmcache(tmp_path: Path, kind: str) -> None:
    """Through LMCache's own connector, in the store process."""
    with ExitStack() as stack:
        url = f"fs://{tmp_path}/shared"
        if kind == "lm":
            url = stack.enter_context(lmcache_server(tmp_path / "server.log")).url
        with Bench(tmp_path / "one", remotes=[url]) as bench:
            opened_by_lmcache(bench)
            bench.encode(IMAGES)
            bench.settle()
            wait_until("all is written", lambda: bench.status()["store"].get("lmcache_writes") == len(IMAGES))
        with Bench(tmp_path / "two", remotes=[url]) as other:
            opened_by_lmcache(other)
            assert all(other.serves(identifier) for identifier in IMAGES)
            assert not other.serves("never stored")
            other.settle()
            assert other.snapshot()["loads_lmcache"] == len(IMAGES)
            wait_until("all is on its disk, too", lambda: stored(tmp_path / "two") == set(IMAGES))


def test_entries_lost_from_one_remote_come_from_the_next_and_are_put_back(
    tmp_path: Path, in_redis: Remote, in_s3: Remote, redis: RedisServer
) -> None:
    filled(tmp_path / "one", in_redis, in_s3)
    redis.client().flushall()
    with Bench(tmp_path / "two", remotes=[in_redis.url, in_s3.url]) as other:
        assert all(other.serves(identifier) for identifier in IMAGES)
        assert other.snapshot()["loads_s3"] == len(IMAGES)
        wait_until("Redis has all again", lambda: in_redis.held() == len(IMAGES))
        wait_until("the disk has all", lambda: stored(tmp_path / "two") == set(IMAGES))
        other.settle()


@pytest.mark.fault("a value is damaged", "any remote", "a miss; deleted and rewritten")
def test_a_damaged_value_is_a_miss_and_the_next_save_replaces_it(remote: Remote) -> None:
    filled(None, remote)
    remote.edit(IMAGES[0], lambda data: data[:5000] + bytes([data[5000] ^ 0xFF]) + data[5001:])
    with Bench(None, remotes=[remote.url]) as other:
        assert not other.serves(IMAGES[0])
        assert other.serves(IMAGES[1])
        wait_until("it is deleted", lambda: remote.held() == len(IMAGES) - 1)
        other.encode([IMAGES[0]])
        other.settle()
        wait_until("it is written again", lambda: remote.held() == len(IMAGES))
    with Bench(None, remotes=[remote.url]) as third:
        assert third.serves(IMAGES[0])


@pytest.mark.parametrize("remote", ["redis", pytest.param("s3", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("how", ["lmcache-ec/2 longer", "more fields sealed"])
def test_an_entry_of_another_version_is_a_miss_and_is_left_as_it_is(remote: Remote, how: str) -> None:
    filled(None, remote)
    other = remote.edit(IMAGES[0], lambda data: of_another_version(data, how))
    with Bench(None, remotes=[remote.url]) as bench:
        for _ in range(3):
            assert not bench.serves(IMAGES[0])
        assert bench.snapshot()["fetches"] <= 2, "what it is is remembered"
        assert bench.serves(IMAGES[1])
        bench.encode(IMAGES[:1])
        bench.settle()
        assert bench.serves(IMAGES[0])
        store = bench.status()["store"]
        assert (store.get(f"{remote.name}_corrupt", 0), store[f"{remote.name}_other_version"]) == (0, 1)
    assert remote.edit(IMAGES[0], bytes) == other


def asks(bench: Bench, identifier: str) -> bool:
    """Whether a first-seen image would wait for a tier."""
    before = bench.snapshot()["fetches"]
    asked = bench.cache.fetch(identifier, 8192, time.monotonic())
    bench.until("that is answered", lambda: not bench.snapshot()["fetches_under_way"])
    assert asked == (bench.snapshot()["fetches"] > before)
    return asked


def test_redis_is_asked_while_it_answers_quickly_and_not_waited_for_once_it_is_slow(
    tmp_path: Path, in_redis: Remote, redis: RedisServer
) -> None:
    filled(tmp_path / "one", in_redis)
    with relay(redis.port) as between:
        url = f"redis://127.0.0.1:{between.port}"
        with Bench(tmp_path / "two", remotes=[url]) as bench:
            bench.scanned_disk()
            rounds = count()

            def asked_for_each() -> bool:
                return all(asks(bench, identifier) for identifier in names(f"new {next(rounds)}", 20))

            bench.until("it answers quickly, which on a busy machine may take a while", asked_for_each, 60.0)
            between.delay_s = 0.2
            for number in range(20):
                if not asks(bench, f"newer-{number}"):
                    break
            assert not any(asks(bench, identifier) for identifier in names("newest", 20))
            bench.scanned()
            bench.until("what it has is still found", lambda: bench.serves(IMAGES[0]))
            bench.settle()


def test_entries_asked_for_together_cost_redis_one_round_trip_for_each_of_its_threads(
    in_redis: Remote, redis: RedisServer
) -> None:
    """Entries of known length are read at once; for others the length is asked for first. Eight threads do either, and
    may have to connect first. Besides, the tier is monitored: latency, writability, whether it was emptied."""
    known, unknown, threads, connecting, watching = names("known", 80), names("unknown", 40), 8, 16, 8
    with Bench(None, remotes=[in_redis.url]) as bench:
        bench.encode([*known, *unknown])
        bench.settle()
        wait_until("all is written", lambda: in_redis.held() == 120)
    with (
        relay(redis.port) as between,
        Bench(None, remotes=[f"redis://127.0.0.1:{between.port}"], remote_lookup="probe") as bench,
    ):

        def turns(lengths: dict[str, int]) -> int:
            before = between.turns
            with stopped(bench.serving()):  # so that it finds all requests at once
                assert all(bench.cache.fetch(name, size, time.monotonic()) for name, size in lengths.items())
            bench.until("all is there", lambda: all(bench.live(name) for name in lengths))
            return between.turns - before

        assert turns({name: length(name) for name in known}) <= threads + connecting + watching
        assert turns(dict.fromkeys(unknown, 0)) <= threads + connecting + watching + len(unknown)
        bench.settle()


def test_s3_is_not_asked_about_what_its_catalog_lacks(tmp_path: Path, in_s3: Remote) -> None:
    filled(tmp_path / "one", in_s3)
    with Bench(tmp_path / "two", remotes=[in_s3.url]) as bench:
        bench.scanned()
        assert not any(asks(bench, identifier) for identifier in names("new", 20))
        assert bench.serves(IMAGES[0])
        bench.settle()


@pytest.mark.slow
def test_a_new_replica_hits_from_its_first_request_while_a_large_bucket_is_listed(
    tmp_path: Path, in_s3: Remote, s3: Seaweed
) -> None:
    """Takes a minute and a half, mostly for putting 100,000 objects. Each page of the list takes 0.2 s."""
    filled(None, in_s3)
    crowd(s3, in_s3, 100_000)
    with relay(int(s3.endpoint.rpartition(":")[2])) as between:
        url = in_s3.url.replace(s3.endpoint, f"http://127.0.0.1:{between.port}")
        between.delay_s = 0.2
        with Bench(None, remotes=[url]) as bench:
            assert bench.serves(IMAGES[0])
            assert not bench.status()["scan_complete"], "the list was quicker than the request: it shows nothing"
            assert asks(bench, "new")
            bench.until("all is listed", lambda: bench.status()["scan_complete"], 120.0)
            assert bench.status()["store"]["s3_listed"] == 100_000 + len(IMAGES)
            assert not any(asks(bench, identifier) for identifier in names("newer", 20))
            assert all(bench.serves(identifier) for identifier in IMAGES)
            bench.settle()


def crowd(s3: Seaweed, remote: Remote, count: int) -> None:
    """Put `count` objects of a few bytes, named like other entries of the namespace."""
    from obstore.store import S3Store

    place = urlsplit(remote.url)
    store = S3Store(
        place.netloc,
        prefix=place.path.strip("/"),
        endpoint=s3.endpoint,
        access_key_id=s3.access_key_id,
        secret_access_key=s3.secret_access_key,
        region="us-east-1",
        client_options={"allow_http": True},
    )

    async def put_all() -> None:
        names = (object_name(f"crowd-{number}") for number in range(count))

        async def put() -> None:
            for name in names:
                await store.put_async(name, b"crowd")

        await asyncio.gather(*(put() for _ in range(64)))

    asyncio.run(put_all())


@pytest.mark.fault(
    "goes down and comes back (no engine)",
    "Valkey",
    "not used meanwhile; then it gets what it missed",
    recovery="it is asked again",
)
def test_a_remote_that_dies_is_left_alone_and_costs_nobody_a_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log shows that it became unreachable, and that it is back."""
    with redis_server(tmp_path / "server") as server, Bench(tmp_path / "disk", remotes=[server.url]) as bench:
        bench.encode(IMAGES[:1])
        bench.settle()
        bench.until("it has the first, and was seen with it", lambda: entries_in(server) == 1 and looks_at(server) >= 2)
        server.kill()
        bench.until("that is found out", lambda: not asks(bench, f"new-{time.monotonic()}"))
        bench.encode(IMAGES[1:])
        bench.settle()
        assert stored(tmp_path / "disk") == set(IMAGES)
        server.start()
        bench.until("it is asked again", lambda: asks(bench, f"newer-{time.monotonic()}"), 20.0)
        bench.encode(["later"])
        bench.settle()
        bench.until("it is given all that memory holds", lambda: entries_in(server) == len(IMAGES) + 1)
        assert re.search(r"redis answers again, after \d+ s", caplog.text)


@pytest.mark.fault("unreachable at startup", "Valkey", "the engine starts without it", recovery="it is asked")
def test_a_remote_that_is_unreachable_at_the_start_is_used_once_it_is_up(tmp_path: Path) -> None:
    with redis_server(tmp_path / "server") as server:
        server.kill()
        with Bench(tmp_path / "disk", remotes=[server.url]) as bench:
            bench.encode(IMAGES)
            bench.settle()
            assert stored(tmp_path / "disk") == set(IMAGES)
            assert not asks(bench, "new")
            server.start()
            bench.until("it is asked", lambda: asks(bench, f"newer-{time.monotonic()}"), 20.0)


def test_a_remote_that_is_misconfigured_is_reported_at_the_start_and_leaves_nothing(
    tmp_path: Path, s3: Seaweed, in_s3: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    with redis_server(tmp_path / "server", "--requirepass", "s3cr3t-canary") as server:
        wrong = f"redis://:wr0ng-canary@127.0.0.1:{server.port}"
        mistakes = {
            wrong: "authentication failed",
            f"s3://no-such-bucket/x?endpoint={s3.endpoint}": "no-such-bucket does not exist",
            (silent := f"rediss://127.0.0.1:{server.port}"): "TLS",
        }
        for url, words in mistakes.items():
            before, patience_s = own_arenas(), 1.0 if url == silent else DEADLINE_S
            with pytest.raises(ConfigError, match=words) as raised:
                Bench(tmp_path / "disk", remotes=[url], blocking_timeout_secs=patience_s)
            assert "canary" not in str(raised.value)
            assert own_arenas() == before
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wr0ng-canary")
        with pytest.raises(ConfigError, match="credentials refused") as raised:
            Bench(tmp_path / "disk", remotes=[in_s3.url])
        assert "canary" not in str(raised.value)


def test_doctor_reports_before_a_start_what_the_start_would_report_of_a_remote(tmp_path: Path) -> None:
    def found(password: str) -> Report:
        return examine("{}", {"LMCACHE_EC_REMOTE_URL": f"redis://:{password}@127.0.0.1:{server.port}"})

    with redis_server(tmp_path / "server", "--requirepass", "s3cr3t-canary") as server:
        right, wrong = found("s3cr3t-canary"), found("wr0ng-canary")
        server.kill()
        away = found("s3cr3t-canary")
    assert right.remotes == {"redis": f"redis://127.0.0.1:{server.port}, answers"}
    assert right.look_ups["redis"].startswith("round trip ")
    assert "authentication failed" in " ".join(wrong.problems)
    assert "retry in the background" in " ".join(away.notes)
    assert not [problem for problem in (*right.problems, *away.problems) if "redis" in problem]
    assert "canary" not in "".join(report.to_json() + render(report) for report in (right, wrong, away))


@pytest.mark.usefixtures("new_interpreters")
def test_a_password_appears_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with redis_server(tmp_path / "server", "--requirepass", "s3cr3t-canary") as server:
        url = f"redis://:s3cr3t-canary@127.0.0.1:{server.port}"
        assert "canary" not in summary(EncoderCacheConfig(remotes=[url]))
        with Bench(tmp_path / "disk", remotes=[url]) as bench:
            pid = bench.serving()
            bench.encode(IMAGES)
            bench.settle()
            server.kill()
            bench.until(
                "the fault is logged", lambda: not asks(bench, f"new-{time.monotonic()}") and bool(caplog.records)
            )
            shown = [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
            assert not any(b"canary" in text for text in shown)
            command = [sys.executable, "-c", "from lmcache_ec.cli import main; main()", "status", "--json"]
            status = subprocess.run(command, capture_output=True, check=True)
            assert bench.engine.encode() in status.stdout
            assert b"canary" not in status.stdout + status.stderr
    assert "canary" not in caplog.text
    assert not [file for file in (tmp_path / "disk").rglob("*") if file.is_file() and b"canary" in file.read_bytes()]


@pytest.mark.usefixtures("new_interpreters")
def test_credentials_of_the_environment_reach_the_store_process_only_for_s3(
    tmp_path: Path, in_s3: Remote, in_redis: Remote
) -> None:
    seen = {}
    for remote in (in_s3, in_redis):
        with Bench(tmp_path, remotes=[remote.url]) as bench:
            [pid] = store_processes(bench.arena)
            seen[remote.name] = b"AWS_SECRET_ACCESS_KEY" in Path(f"/proc/{pid}/environ").read_bytes()
    assert seen == {"s3": True, "redis": False}


def test_an_authority_that_the_environment_names_is_trusted_by_doctor_and_engine_alike(
    tmp_path: Path, in_redis: Remote, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path / "authority")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    with relay(redis.port, authority.server_context(authority.identity("server"))) as front:
        url = f"rediss://127.0.0.1:{front.port}"
        report = examine("{}", {"LMCACHE_EC_REMOTE_URL": url})
        assert report.remotes == {"redis": f"{url}, answers"}
        with Bench(None, remotes=[url]) as bench:
            bench.encode(IMAGES[:1])
            bench.settle()
            wait_until("it is stored", lambda: in_redis.held() == 1)


def test_the_list_of_tiers_arrives_before_any_report_about_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports refer to tiers by number. An unreachable remote is reported while tiers are opened."""
    messages, take = list[str](), EncoderCache._from_store

    def noted(cache: EncoderCache, message: object, fds: list[int], now: float) -> None:
        messages.append(type(message).__name__)
        take(cache, message, fds, now)

    monkeypatch.setattr(EncoderCache, "_from_store", noted)
    served = Served(tmp_path, remotes=[f"redis://127.0.0.1:{free_port()}"])
    try:
        served.until("the remote is reported", lambda: "Notice" in messages)
        assert messages[0] == "Hello"
    finally:
        served.close()
