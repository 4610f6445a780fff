# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec namespaces` and `lifecycle`: data that no engine uses any more are found and removed, and no others."""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from benchmarks.testbed.core import NAMESPACE, Bench, names, stored
from benchmarks.testbed.servers.redis import RedisServer, free_port, redis_server
from benchmarks.testbed.servers.seaweed import Seaweed
from lmcache_ec.cli import namespaces as module
from lmcache_ec.cli.commands import app
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.link import status_address
from lmcache_ec.tiers.base import Tier
from lmcache_ec.tiers.disk import DiskTier
from lmcache_ec.tiers.redis import open_redis
from lmcache_ec.tiers.s3 import open_s3

IMAGES = names("image", 4)
CANARY = "hunter2-canary"
DAY_S = 86_400
GIB = 1 << 30


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this machine's settings, and without a neighbour's store process that does not answer."""
    for name in list(os.environ):
        if name.startswith(("LMCACHE_", "AWS_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    look = module._in_use

    def in_use() -> tuple[dict[str, list[int]], list[int]]:
        using, silent = look()
        return using, [pid for pid in silent if pid == os.getpid()]

    monkeypatch.setattr(module, "_in_use", in_use)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis"), "--requirepass", CANARY) as server:
        yield server


def run(*arguments: str, answer: str = "") -> Result:
    result = CliRunner().invoke(app, arguments, input=answer)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    assert CANARY not in result.output
    return result


def found(*arguments: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(run("namespaces", "--json", *arguments).stdout)
    return report


def entries(report: dict[str, Any]) -> dict[tuple[str, str], int]:
    return {(row["tier"], row["namespace"]): row["entries"] for row in report["namespaces"]}


def fill(tier: Tier, namespace: str, number: int = 3) -> None:
    for index in range(number):
        tier.put(EncoderCacheKey(namespace, f"picture {index}"), memoryview(bytes(1000)))


def disk(folder: Path) -> DiskTier:
    return DiskTier(folder, GIB)


def age(folder: Path, namespace: str, days: float) -> None:
    for file in (folder / namespace).rglob("*.safetensors"):
        os.utime(file, (time.time() - days * DAY_S,) * 2)


def seen(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Everything that would reveal a change: names, files, sizes, times of use."""
    files = {path: path.stat() for path in folder.rglob("*")}
    return {str(path): (status.st_ino, status.st_size, status.st_mtime_ns) for path, status in files.items()}


def held_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


def test_every_tier_of_the_configuration_is_counted_and_nothing_in_it_changes(
    tmp_path: Path, redis: RedisServer, s3: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    folder, url = tmp_path / "disk", f"redis://:{CANARY}@127.0.0.1:{redis.port}"
    bucket = f"s3://{s3.bucket}/counted?endpoint={s3.endpoint}"
    fill(disk(folder), "old")
    age(folder, "old", 40)
    fill(disk(folder), "new", 2)
    with closing(open_redis(url)) as tier:
        fill(tier, "new", 4)
    fill(open_s3(bucket), "old", 5)
    (folder / "old" / ".tmp" / f"9.{'0' * 24}").write_bytes(b"of a dead")  # an engine's next survey removes it
    (folder / ".usage").unlink()  # and creates this
    before = seen(tmp_path)

    monkeypatch.setenv("LMCACHE_EC_LOCAL_DISK", str(folder))
    monkeypatch.setenv("LMCACHE_EC_REMOTES", f"{url}, {bucket}, lm://127.0.0.1:{free_port()}")
    result = run("namespaces", "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["errors"]) == (0, {})
    counted = {("disk", "old"): 3, ("disk", "new"): 2, ("redis", "new"): 4, ("s3", "old"): 5}
    assert entries(report) == counted
    rows = {(row["tier"], row["namespace"]): row for row in report["namespaces"]}
    assert abs(rows["disk", "old"]["used"] - (time.time() - 40 * DAY_S)) < 300
    assert rows["disk", "old"]["written"] is rows["s3", "old"]["used"] is None
    assert abs(rows["s3", "old"]["written"] - time.time()) < 300
    assert abs(rows["redis", "new"]["used"] - time.time()) < 300
    assert {row["bytes"] / row["entries"] for row in rows.values()} == {1000.0}
    assert "cannot be listed" in report["notes"]["lmcache"]
    assert seen(tmp_path) == before

    lines = run("namespaces").stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:5]] == [list(name) for name in counted]  # each tier's oldest first
    assert [line for line in lines if "(written)" in line] == [lines[4]]


def test_an_unreachable_tier_is_one_line_and_the_others_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(disk(tmp_path / "disk"), "old")
    monkeypatch.setenv("LMCACHE_EC_LOCAL_DISK", str(tmp_path / "disk"))
    monkeypatch.setenv("LMCACHE_EC_REMOTE_URL", f"redis://user:{CANARY}@127.0.0.1:{free_port()}")
    result = run("namespaces")
    assert result.exit_code == 1
    assert "disk" in result.stdout.splitlines()[1]
    [line] = result.stderr.splitlines()
    assert line.startswith("redis: ")
    assert "nothing listens there" in line
    # An unreachable store might know of a use: the others alone cannot decide what is unused.
    age(tmp_path / "disk", "old", 40)
    refused = run("namespaces", "--unused-for", "30", "--remove-unused", "--yes")
    assert (refused.exit_code, "redis may know of a later use" in refused.stderr) == (1, True)
    assert list(disk(tmp_path / "disk").list("old"))
    assert run("namespaces", "--unused-for", "30", "--remove-unused", "--yes", "--tier", "disk").exit_code == 0
    assert not (tmp_path / "disk" / "old").exists()


def test_a_folder_that_does_not_exist_yet_is_not_created(tmp_path: Path) -> None:
    result = run("namespaces", "--extra", json.dumps({"local_disk": str(tmp_path / "none")}))
    assert (result.exit_code, "there is no such folder yet" in result.stderr) == (0, True)
    assert list(tmp_path.iterdir()) == []


def test_a_namespace_in_use_is_listed_and_kept_and_the_engine_survives_its_removal(tmp_path: Path) -> None:
    extra = ("--extra", json.dumps({"local_disk": str(tmp_path)}))
    with Bench(tmp_path) as bench:
        bench.encode(IMAGES)
        bench.settle()
    fill(disk(tmp_path), "old")
    with Bench(tmp_path) as bench:
        bench.scanned()
        rows = {row["namespace"]: row for row in found(*extra)["namespaces"]}
        assert bench.status()["pid"] in rows[NAMESPACE]["in_use_by"]
        assert rows["old"]["in_use_by"] == []

        refused = run("namespaces", *extra, "--remove", NAMESPACE, "--yes")
        assert (refused.exit_code, "in use by the engine of store process" in refused.stderr) == (1, True)
        for namespace in (NAMESPACE, "old"):
            age(tmp_path, namespace, 40)
        assert entries(found(*extra, "--unused-for", "30")) == {("disk", "old"): 3}
        assert stored(tmp_path / NAMESPACE) == set(IMAGES)
        assert bench.serves(IMAGES[0])
        bench.settle()

        assert run("namespaces", *extra, "--remove", "old", "--yes").exit_code == 0
        assert stored(tmp_path / NAMESPACE) == set(IMAGES)
        assert disk(tmp_path).stored_bytes == held_bytes(tmp_path)

        forced = run("namespaces", *extra, "--remove", NAMESPACE, "--yes", "--force")
        assert (forced.exit_code, f"removed 4 entries of {NAMESPACE}" in forced.output) == (0, True)
        assert disk(tmp_path).stored_bytes == held_bytes(tmp_path) == 0
        assert bench.serves(IMAGES[0])  # from its own memory
        assert not any(bench.serves(identifier) for identifier in IMAGES[1:])
        bench.encode(IMAGES[1:])
        bench.settle()
        assert stored(tmp_path / NAMESPACE) == set(IMAGES[1:])
        assert disk(tmp_path).stored_bytes == held_bytes(tmp_path)


def test_remove_asks_first_and_removes_only_the_named_namespace_from_the_named_tiers(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"redis://:{CANARY}@127.0.0.1:{redis.port}"
    with closing(open_redis(url)) as remote:
        for namespace in ("dead", "dead-2", "alive"):
            fill(disk(tmp_path), namespace)
            fill(remote, namespace)
    monkeypatch.setenv("LMCACHE_EC_LOCAL_DISK", str(tmp_path))
    monkeypatch.setenv("LMCACHE_EC_REMOTE_URL", url)
    everything = entries(found())
    remove = ("namespaces", "--remove", "dead")

    for answer in ("n\n", ""):
        assert run(*remove, answer=answer).exit_code == 1
    assert run(*remove, "--json").exit_code == 2  # it cannot ask for confirmation
    assert entries(found()) == everything

    asked = run(*remove, "--tier", "redis", answer="y\n")
    assert asked.exit_code == 0
    assert "Remove 3 entries, 2.9 KiB?" in asked.output
    left = {name: number for name, number in everything.items() if name != ("redis", "dead")}
    assert entries(found()) == left

    report = json.loads(run(*remove, "--yes", "--json").stdout)
    assert report["removed"] == [{"tier": "disk", "namespace": "dead", "entries": 3}]
    del left["disk", "dead"]
    assert entries(found()) == left
    nothing = run(*remove, "--yes")
    assert (nothing.exit_code, nothing.stdout) == (1, "")
    assert "dead: nothing to remove, none of the tiers that were looked at has it: disk" in nothing.stderr
    for wrong in (("--tier", "s3"), ("--remove", "../x"), ("--remove-unused",), ("--extra", "[]")):
        assert run("namespaces", *wrong, "--yes").exit_code == 2
    assert entries(found()) == left


def test_a_namespace_is_unused_if_no_tier_has_seen_it_used_for_that_long(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"redis://:{CANARY}@127.0.0.1:{redis.port}"
    for namespace in ("dead", "elsewhere", "recent"):
        fill(disk(tmp_path), namespace)
        age(tmp_path, namespace, {"recent": 29}.get(namespace, 31))
    with closing(open_redis(url)) as remote:
        remote.remove("dead")
        fill(remote, "elsewhere")
    one = next((tmp_path / "recent").rglob("*.safetensors"))
    os.utime(one, (time.time() - 400 * DAY_S,) * 2)  # one old entry does not make its namespace old
    monkeypatch.setenv("LMCACHE_EC_LOCAL_DISK", str(tmp_path))
    monkeypatch.setenv("LMCACHE_EC_REMOTE_URL", url)
    assert entries(found("--unused-for", "30")) == {("disk", "dead"): 3}
    redis.client(password=CANARY).config_set("maxmemory-policy", "allkeys-lfu")  # now it has no times of use
    try:
        assert entries(found("--unused-for", "30")) == {("disk", "dead"): 3}
        assert "unknown" in run("namespaces").stdout
    finally:
        redis.client(password=CANARY).config_set("maxmemory-policy", "noeviction")
    assert run("namespaces", "--unused-for", "30", "--remove", "recent", "--yes").exit_code == 1
    result = run("namespaces", "--unused-for", "30", "--remove-unused", "--yes")
    assert (result.exit_code, "disk: removed 3 entries of dead" in result.output) == (0, True)
    assert {name for tier, name in entries(found()) if tier == "disk"} == {"elsewhere", "recent"}


def test_nothing_is_removed_without_force_while_a_store_process_of_unknown_namespace_runs(tmp_path: Path) -> None:
    """Another user's engine, for example. Here it is a socket without an answer."""
    fill(disk(tmp_path), "old")
    remove = ("namespaces", "--extra", json.dumps({"local_disk": str(tmp_path)}), "--remove", "old", "--yes")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(status_address(os.getpid()))
        refused = run(*remove)
        assert (refused.exit_code, f"store process {os.getpid()}" in refused.stderr) == (1, True)
        assert len(list(disk(tmp_path).list("old"))) == 3
        assert run(*remove, "--force").exit_code == 0
    assert list(disk(tmp_path).list("old")) == []


def test_the_rule_of_a_bucket_is_checked_and_set(s3: Seaweed, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LMCACHE_EC_REMOTE_URL", f"s3://{s3.bucket}/ruled?endpoint={s3.endpoint}")
    assert run("lifecycle").exit_code == 0  # no age, no rule
    assert run("lifecycle", "--set").exit_code == 2
    aging = ("--extra", json.dumps({"ttl_s": 2.5 * DAY_S}))
    missing = run("lifecycle", *aging)
    assert (missing.exit_code, "no rule deletes old entries" in missing.stderr) == (1, True)
    [rule] = json.loads(run("lifecycle", "--set", "--json", *aging).stdout)
    assert (rule["ttl_days"], rule["deleted_after_days"], rule["problem"]) == (2.5, 3.0, "")
    assert run("lifecycle", *aging).exit_code == 0
    for other in ({"ttl_s": 5 * DAY_S}, {}):
        changed = run("lifecycle", "--extra", json.dumps(other))
        assert (changed.exit_code, "a rule deletes entries after 3 days" in changed.stderr) == (1, True)
    monkeypatch.setenv("LMCACHE_EC_REMOTE_URL", f"s3://{s3.bucket}?endpoint={s3.endpoint}")
    whole_bucket = run("lifecycle", "--set", *aging)
    assert (whole_bucket.exit_code, "no prefix" in whole_bucket.stderr) == (1, True)
