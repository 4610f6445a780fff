# SPDX-License-Identifier: Apache-2.0
"""Stores as they occur in practice: full, read only, throttled, demoted. Readable entries are still read.

New and stored pictures alternate, without a disk; the hits of stored ones are counted.
"""

import itertools
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed.core import Bench, names
from benchmarks.testbed.servers.redis import RedisServer, redis_server
from benchmarks.testbed.servers.relay import relay
from benchmarks.testbed.servers.s3_front import Request, S3Front, s3_front
from benchmarks.testbed.servers.seaweed import Seaweed
from benchmarks.testbed.waiting import wait_until
from lmcache_ec.cli.doctor import examine

STORED = names("stored", 40)
KEYS: dict[str, Any] = {"remote_lookup": "probe", "load_deadline_ms": 5000}


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as server:
        fill(server.url, lambda: stored_in(server))
        yield server


@pytest.fixture
def front(s3: Seaweed, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Front]:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    with s3_front(int(s3.endpoint.rpartition(":")[2])) as between:
        yield between


@pytest.fixture
def bucket(s3: Seaweed, front: S3Front) -> str:
    """The URL, through the front end, of a prefix that holds the stored pictures."""
    prefix = uuid.uuid4().hex

    def held() -> int:
        found = s3.client().list_objects_v2(Bucket=s3.bucket, Prefix=f"{prefix}/").get("Contents", [])
        return sum(one["Key"].endswith(".safetensors") for one in found)

    fill(f"s3://{s3.bucket}/{prefix}?endpoint={s3.endpoint}", held)
    return f"s3://{s3.bucket}/{prefix}?endpoint=http://127.0.0.1:{front.port}"


def stored_in(server: RedisServer) -> int:
    return len(server.client().keys("*.safetensors"))


def fill(url: str, held: Callable[[], int]) -> None:
    with Bench(None, remotes=[url]) as bench:
        bench.encode(STORED)
        bench.settle()
        wait_until("all is stored", lambda: held() == len(STORED))


def in_turn(bench: Bench, stored: list[str] = STORED, prefix: str = "new") -> int:
    """Hits of stored pictures, each asked for after an attempt to write a new one."""
    hits = 0
    for number, identifier in enumerate(stored):
        bench.encode([f"{prefix}-{number}"])
        bench.settle()
        hits += bench.serves(identifier)
    bench.settle()
    return hits


def tier(bench: Bench, name: str) -> dict[str, object]:
    (found,) = [each for each in bench.status()["tiers"] if each["name"] == name]
    return dict(found)


def lines(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


def fill_up(server: RedisServer) -> None:
    client = server.client()
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)


@pytest.mark.fault(
    "full, with eviction off (no engine)",
    "Valkey",
    "read only until it has room; every stored entry is a hit",
    recovery="what it lacks is written",
)
def test_a_full_store_is_read_and_written_again_when_it_has_room(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    fill_up(redis)
    with Bench(None, remotes=[redis.url], **KEYS) as bench:
        assert in_turn(bench) == len(STORED)
        bench.until("that is seen", lambda: tier(bench, "redis")["read_only"])
        bench.until("that is reported", lambda: bool(lines(caplog, "redis: read only")))
        assert len(lines(caplog, "redis: read only")) == 1
        assert len(lines(caplog, "full and evicts nothing")) == 1, "one line, not one for each write"
        redis.client().config_set("maxmemory", 0)
        bench.until(
            "what it lacks is written",
            lambda: bool(redis.client().keys("*new*")) or written(bench),
            20.0,
        )
        assert not tier(bench, "redis")["read_only"]


def written(bench: Bench) -> bool:
    """Whether the remote has accepted a write by now; each call is a pass of the scheduler."""
    bench.encode([f"later-{uuid.uuid4().hex}"])
    bench.settle()
    return bool(bench.status()["store"].get("redis_writes") or bench.status()["store"].get("s3_writes"))


@pytest.mark.fault(
    "one write in ten is refused", "Valkey", "no hit is lost; written later", recovery="what was refused is made up for"
)
def test_one_refused_write_in_ten_costs_no_hit_and_is_done_later(redis: RedisServer) -> None:
    """Each time the store is full for a moment, and then has room again."""
    with Bench(None, remotes=[redis.url], **KEYS) as bench:
        bench.serving()
        hits = 0
        for number, identifier in enumerate(STORED):
            if number % 10 == 5:
                fill_up(redis)
            bench.encode([f"new-{number}"])
            bench.settle()
            redis.client().config_set("maxmemory", 0)
            hits += bench.serves(identifier)
        assert hits == len(STORED)
        bench.until(
            "what was refused is made up for", lambda: written(bench) and stored_in(redis) > 2 * len(STORED), 20.0
        )
        assert not tier(bench, "redis")["read_only"]


@pytest.mark.fault("the user has no permission to write", "Valkey", "read only; every stored entry is a hit")
def test_a_user_who_may_not_write_can_still_read(redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    redis.client().execute_command(
        "ACL", "SETUSER", "reader", "on", ">s3cret", "~*", "+@read", "+@connection", "+info", "+client"
    )
    url = f"redis://reader:s3cret@127.0.0.1:{redis.port}"
    report = examine("{}", {"LMCACHE_EC_REMOTE_URL": url})
    assert report.remotes["redis"].endswith(", answers, read only")
    assert any("no permission for this" in note for note in report.notes)
    assert not [problem for problem in report.problems if "edis" in problem]
    with Bench(None, remotes=[url], **KEYS) as bench:
        assert in_turn(bench) == len(STORED)
        bench.until("that is seen", lambda: tier(bench, "redis")["read_only"])
        bench.until("that is reported", lambda: bool(lines(caplog, "redis: read only")))
        assert not tier(bench, "redis")["rests"]
        assert len(lines(caplog, "redis: read only")) == 1


def test_a_remote_that_is_declared_read_only_is_never_written_and_the_disk_is_filled_from_it(
    redis: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = len(redis.client().keys("*"))
    with Bench(tmp_path / "disk", remotes=[f"{redis.url}?read_only=true"], **KEYS) as bench:
        assert in_turn(bench) == len(STORED)
        assert tier(bench, "redis")["read_only"]
        bench.until("the disk has all of them", lambda: tier(bench, "disk")["writes"] == 2 * len(STORED))
        assert bench.status()["store"].get("redis_write_errors", 0) == 0
    assert len(redis.client().keys("*")) == before
    assert not lines(caplog, "read only; now and then")


@pytest.mark.fault("a failover behind one address", "Valkey", "the new master is found; no hit is lost")
def test_behind_one_address_the_new_master_is_found_and_the_old_one_is_left(tmp_path: Path) -> None:
    at_once = ("--repl-diskless-sync-delay", "0")
    with redis_server(tmp_path / "one", *at_once) as old, redis_server(tmp_path / "two", *at_once) as new:
        fill(old.url, lambda: stored_in(old))
        new.client().replicaof("127.0.0.1", old.port)
        wait_until("they are in step", lambda: new.client().info("replication")["master_link_status"] == "up")
        with relay(old.port) as between, Bench(None, remotes=[f"redis://127.0.0.1:{between.port}"], **KEYS) as bench:
            assert in_turn(bench, STORED[:4]) == 4
            new.client().replicaof("NO", "ONE")
            old.client().replicaof("127.0.0.1", new.port)
            between.target = new.port
            assert in_turn(bench, STORED[4:], "after") == len(STORED) - 4
            wrote = bench.status()["store"]["redis_writes"]
            assert wrote >= len(STORED) - 2
            assert not tier(bench, "redis")["read_only"]


def no_writes(request: Request) -> tuple[int, str] | None:
    return (403, "AccessDenied") if request.writes else None


def unconditional(request: Request) -> tuple[int, str] | None:
    conditions = {"if-none-match", "if-match"} & request.headers.keys()
    return (501, "NotImplemented") if request.writes and conditions else None


def encrypted_only(request: Request) -> tuple[int, str] | None:
    refused = request.method == "PUT" and "x-amz-server-side-encryption" not in request.headers
    return (403, "AccessDenied") if refused else None


def no_puts_now(request: Request) -> tuple[int, str] | None:
    return (503, "SlowDown") if request.method == "PUT" else None


@pytest.mark.parametrize("rule", [no_writes, encrypted_only, no_puts_now], ids=lambda rule: rule.__name__)
@pytest.mark.fault(
    "writes are forbidden or throttled, or need a header", "S3", "read only; every stored entry is a hit"
)
def test_a_bucket_that_takes_no_writes_is_still_read(
    bucket: str, front: S3Front, rule: Callable[[Request], tuple[int, str] | None]
) -> None:
    front.rule = rule
    with Bench(None, remotes=[bucket], **KEYS) as bench:
        assert in_turn(bench) == len(STORED)
        if rule is not no_puts_now:
            bench.until("that is seen", lambda: tier(bench, "s3")["read_only"])
        puts = sum(request.method == "PUT" for request in front.seen)
        assert puts < len(STORED), "it is not asked each time"


@pytest.mark.fault(
    "does not support conditional writes (501)", "S3", "checks for the object first, then writes unconditionally"
)
def test_a_store_without_conditional_writes_is_written_without_them(
    bucket: str, front: S3Front, caplog: pytest.LogCaptureFixture
) -> None:
    front.rule = unconditional
    with Bench(None, remotes=[bucket], **KEYS) as bench:
        assert in_turn(bench) == len(STORED)
        assert bench.status()["store"]["s3_writes"] == len(STORED)
        assert len(lines(caplog, "not support conditional writes")) == 1
    with Bench(None, remotes=[bucket], **KEYS) as other:
        assert all(other.serves(f"new-{number}") for number in range(5))
        other.encode(["new-7"])
        other.settle()
        assert other.status()["store"].get("s3_writes", 0) == 0, "it is there"


@pytest.mark.fault("one response in ten is an error", "S3", "nothing is lost beyond the failed requests")
def test_no_more_answers_are_lost_than_fail(bucket: str, front: S3Front) -> None:
    """One request in ten fails, of every kind: obstore tries three times, so only three failures in a row count."""
    turns = itertools.count()

    def one_in_ten(request: Request) -> tuple[int, str] | None:
        return (400, "Flaky") if next(turns) % 10 == 9 else None

    with Bench(None, remotes=[bucket], **KEYS) as bench:
        bench.serving()
        front.rule = one_in_ten
        hits = in_turn(bench)
        front.rule = lambda request: None
        assert hits >= 0.85 * len(STORED)
        assert bench.status()["store"]["s3_writes"] >= 0.6 * len(STORED)


def test_encryption_and_storage_class_of_each_write_come_from_the_url(bucket: str, front: S3Front) -> None:
    front.rule = encrypted_only
    front.seen.clear()
    asked = f"{bucket}&sse=AES256&storage_class=STANDARD_IA&requester_pays=true"
    with Bench(None, remotes=[asked], **KEYS) as bench:
        in_turn(bench, STORED[:3])
    puts = [request.headers for request in front.seen if request.method == "PUT" and "safetensors" in request.path]
    assert len(puts) >= 3
    for headers in puts:
        assert headers["x-amz-server-side-encryption"] == "AES256"
        assert headers["x-amz-storage-class"] == "STANDARD_IA"
    assert all(request.headers["x-amz-request-payer"] == "requester" for request in front.seen)


@pytest.mark.parametrize("status", [500, 503])
@pytest.mark.fault("answers with 500 or 503 at startup", "S3", "the engine starts without it", recovery="it is used")
def test_an_ailing_bucket_does_not_stop_the_start_and_is_used_once_it_is_well(
    bucket: str, front: S3Front, status: int
) -> None:
    front.rule = lambda request: (status, "SlowDown")
    report = examine("{}", {"LMCACHE_EC_REMOTE_URL": bucket})
    assert report.remotes["s3"].endswith(", is not ready")
    assert not [problem for problem in report.problems if "S3" in problem]
    with Bench(None, remotes=[bucket], **KEYS) as bench:
        bench.encode(["new"])
        bench.settle()
        assert not bench.serves(STORED[0])
        front.rule = lambda request: None
        bench.until("it is used", lambda: bench.serves(STORED[1]) or bench.serves(STORED[2]), 20.0)


@pytest.mark.fault(
    "still loading its data set at startup", "Valkey", "the engine starts without it", recovery="it is used"
)
def test_a_server_that_is_loading_its_data_does_not_stop_the_start(tmp_path: Path) -> None:
    """Loading takes long enough to be noticed: a third of a second per key."""
    with redis_server(tmp_path / "redis", "--enable-debug-command", "local") as server:
        fill(server.url, lambda: stored_in(server))
        server.client().save()
        server.client().config_set("key-load-delay", 300_000)
        server.client().config_set("loading-process-events-interval-bytes", 1024)
        client = server.client()
        client.connection_pool.connection_kwargs["socket_timeout"] = 0.2
        with pytest.raises(Exception, match="imeout"):
            client.execute_command("DEBUG", "RELOAD", "NOSAVE")
        with pytest.raises(Exception, match="loading"):
            server.client().get("x")
        with Bench(None, remotes=[server.url], **KEYS) as bench:
            bench.encode(["new"])
            bench.settle()
            server.client().config_set("key-load-delay", 0)
            bench.until("it is used", lambda: any(map(bench.serves, STORED)), 20.0)
