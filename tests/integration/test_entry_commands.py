# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec ls`, `inspect`, `verify`, `warm` and `clear` over real stores."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy
import pytest
from typer.testing import CliRunner, Result

from benchmarks.testbed.core import NAMESPACE, VERSIONS, Bench, of_another_version, payload
from benchmarks.testbed.core import spec as spec_of_bench
from benchmarks.testbed.servers.redis import RedisServer, free_port, redis_server
from benchmarks.testbed.servers.seaweed import Seaweed
from benchmarks.testbed.waiting import wait_until
from lmcache_ec import Cache, entry
from lmcache_ec.cli.commands import app
from lmcache_ec.key import EncoderCacheKey, EntryName
from lmcache_ec.signing import read_key
from lmcache_ec.tiers.base import Tier
from lmcache_ec.tiers.disk import DiskTier
from lmcache_ec.tiers.redis import RedisTier, open_redis
from lmcache_ec.tiers.s3 import open_s3

CANARY = "hunter2-canary"
GIB = 1 << 30
DAY_S = 86_400
SPEC = entry.TensorSpec(4, 64, "BF16")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any of this machine's settings."""
    for name in list(os.environ):
        if name.startswith(("LMCACHE_", "AWS_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis"), "--requirepass", CANARY) as server:
        yield server


class Stores:
    """An empty disk and an empty Redis, in the configuration that the commands read; `add_s3` adds an S3 remote."""

    def __init__(self, folder: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder / "disk"
        self.server = redis
        self.url = f"redis://:{CANARY}@127.0.0.1:{redis.port}"
        redis.client(password=CANARY).flushall()
        monkeypatch.setenv("LMCACHE_EC_LOCAL_DISK", str(self.folder))
        monkeypatch.setenv("LMCACHE_EC_REMOTES", self.url)
        self.disk = DiskTier(self.folder, GIB)
        self.redis = open_redis(self.url)

    def add_s3(self, s3: Seaweed, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        url = f"s3://{s3.bucket}/{self.folder.parent.name}?endpoint={s3.endpoint}"
        monkeypatch.setenv("LMCACHE_EC_REMOTES", f"{self.url}, {url}")
        self.s3 = open_s3(url)


@pytest.fixture
def stores(tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stores]:
    made = Stores(tmp_path, redis, monkeypatch)
    with closing(made.redis):
        yield made


@pytest.fixture
def three(stores: Stores, s3: Seaweed, monkeypatch: pytest.MonkeyPatch) -> Stores:
    """Stores with an S3 remote."""
    stores.add_s3(s3, monkeypatch)
    return stores


def run(*arguments: str, answer: str = "") -> Result:
    result = CliRunner().invoke(app, arguments, input=answer)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    assert CANARY not in result.output
    return result


def answered(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


def sealed(identifier: str, namespace: str = "ns", spec: entry.TensorSpec = SPEC) -> memoryview:
    data = memoryview(bytearray(entry.entry_length(identifier, spec)))
    entry.seal(data, EncoderCacheKey(namespace, identifier), spec, "host:41234")
    return data


def put(tier: Tier, *identifiers: str, namespace: str = "ns") -> None:
    for identifier in identifiers:
        assert tier.put(EncoderCacheKey(namespace, identifier), sealed(identifier, namespace))


def corrupted(identifier: str) -> memoryview:
    data = sealed(identifier)
    data[-1] ^= 1
    return data


# ---- ls


def test_each_entry_is_listed_once_with_the_tiers_that_hold_it(three: Stores) -> None:
    put(three.disk, "both", "only disk")
    put(three.redis, "both", "only redis", "\x1b[31mred\n")
    put(three.s3, "both", "only s3")
    put(three.s3, "both", namespace="other")
    path = three.folder / EncoderCacheKey("ns", "only disk").object_name
    os.utime(path, (path.stat().st_mtime - 40 * DAY_S,) * 2)
    before = {file: file.stat().st_mtime_ns for file in three.folder.rglob("*.safetensors")}
    report = answered("ls", "ns")
    held = {row["sha256"]: (row["tiers"], row["identifier"], row["bytes"]) for row in report["entries"]}
    length = len(sealed("both"))

    def sha(identifier: str) -> str:
        return EncoderCacheKey("ns", identifier).digest.hex()

    assert held == {
        sha("both"): (["disk", "redis", "s3"], "both", length),
        sha("only disk"): (["disk"], "only disk", length),
        sha("only redis"): (["redis"], "only redis", length),
        sha("\x1b[31mred\n"): (["redis"], "\x1b[31mred\n", length),
        sha("only s3"): (["s3"], None, length),  # S3 is only queried per entry if asked for
    }
    assert report["entries"][-1]["sha256"] == sha("only disk")  # the oldest
    assert {row["identifier"] for row in answered("ls", "ns", "--identifiers")["entries"]} >= {"only s3"}
    assert answered("ls")["found"] == 6
    assert answered("ls", "--tier", "disk")["found"] == 2
    twice = {row["sha256"]: row["tiers"] for row in answered("ls", "ns", "ns")["entries"]}
    assert twice == {name: tiers for name, (tiers, *_) in held.items()}

    text = run("ls", "ns").stdout
    assert "\x1b" not in text
    assert "40 d" in next(line for line in text.splitlines() if "only disk" in line)
    assert "5 entries.\n" in text
    newest = run("ls", "ns", "--tier", "disk", "--count", "1").stdout
    assert "2 entries. Only the newest is listed; --count 0 lists all." in newest
    assert {file: file.stat().st_mtime_ns for file in three.folder.rglob("*.safetensors")} == before


def test_a_tier_that_does_not_answer_is_one_line_beside_what_the_others_hold(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(stores.disk, "picture")
    monkeypatch.setenv("LMCACHE_EC_REMOTES", f"redis://user:{CANARY}@127.0.0.1:{free_port()}")
    result = run("ls")
    assert (result.exit_code, "picture" in result.stdout) == (1, True)
    assert "redis: " in result.stderr
    for only in ([], ["--tier", "redis"]):
        assert run("inspect", "another", *only).stderr.startswith("No tier that could be read has 'another'.\nredis: ")
    cleared = run("clear", "redis", "--yes")
    assert (cleared.exit_code, cleared.stdout, "nothing listens there" in cleared.stderr) == (1, "", True)
    assert run("ls", "../x").exit_code == run("ls", "--tier", "tape").exit_code == 2


# ---- inspect


def test_an_entry_is_described_by_identifier_sha256_or_object_name(stores: Stores) -> None:
    identifier = "ü😀" * 400  # its header is longer than most
    put(stores.disk, identifier)
    put(stores.redis, identifier)
    put(stores.redis, identifier, namespace="other")
    key = EncoderCacheKey("ns", identifier)
    for asked in ([identifier, "--namespace", "ns"], [key.digest.hex(), "--namespace", "ns"], [key.object_name]):
        found = answered("inspect", *asked)
        header = found["header"]
        assert (header["identifier"], header["namespace"], header["producer"]) == (identifier, "ns", "host:41234")
        assert (header["shape"], header["dtype"], header["bytes"]) == ([4, 64], "BF16", len(sealed(identifier)))
        assert [(copy["tier"], copy["problem"]) for copy in found["tiers"]] == [("disk", ""), ("redis", "")]
    assert [copy["tier"] for copy in answered("inspect", identifier)["tiers"]] == ["disk", "redis", "redis"]
    text = run("inspect", identifier).stdout
    assert [text.count(expected) for expected in ("[4, 64]", "BF16", "host:41234", "verifies")] == [2, 2, 2, 3]
    missing = run("inspect", "another")
    assert (missing.exit_code, missing.stderr) == (1, "No tier has 'another'.\n")
    missing = run("inspect", "another", "--json")
    assert (missing.stderr, json.loads(missing.stdout)["problem"]) == ("", "No tier has 'another'.")
    elsewhere = run("inspect", identifier, "--namespace", "elsewhere", "--tier", "redis").stderr
    assert elsewhere.startswith("redis does not have ")
    assert elsewhere.endswith(" in namespace elsewhere.\n")


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 3, 4)])
def test_a_programs_tensor_is_described_by_its_own_shape(stores: Stores, shape: tuple[int, ...]) -> None:
    with Cache(namespace="ns", local_disk=str(stores.folder)) as cache:
        cache.put("picture", numpy.ones(shape)).result()
    header = answered("inspect", "picture", "--tier", "disk")["header"]
    assert (header["shape"], header["dtype"]) == (list(shape), "F64")
    lines = run("inspect", "picture", "--tier", "disk").stdout.splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith(("shape", "dtype", "layout"))] == [
        str(list(shape)),
        "F64",
    ]


@pytest.mark.parametrize("how", ["corrupted", *VERSIONS[:1]])
def test_an_entry_that_does_not_verify_in_one_tier_is_reported_for_that_tier(stores: Stores, how: str) -> None:
    data = corrupted("picture") if how == "corrupted" else memoryview(of_another_version(bytes(sealed("picture")), how))
    put(stores.disk, "picture")
    stores.redis.put(EncoderCacheKey("ns", "picture"), data)
    result = run("inspect", "picture", "--json")
    problems = {copy["tier"]: copy["problem"] for copy in json.loads(result.stdout)["tiers"]}
    assert (result.exit_code, problems["disk"]) == (1, "")
    assert problems["redis"].startswith("does not verify: digest" if how == "corrupted" else "cannot be judged here")
    if how == "corrupted":
        assert run("inspect", "picture", "--header-only").exit_code == 0
        shown = [json.loads(run("inspect", "picture", "--json", *more).stdout) for more in ([], ["--header-only"])]
        assert [found["verified"] for found in shown] == [True, False]
        printed = [run("inspect", "picture", *more).stdout for more in ([], ["--header-only"], ["--tier", "redis"])]
        assert ["not verified" in text for text in printed] == [False, True, True]


def test_an_identifier_that_does_not_match_the_entrys_name_is_not_listed_as_its_own(stores: Stores) -> None:
    stores.disk.put(EncoderCacheKey("ns", "picture"), sealed("another"))
    result = run("ls")
    assert "names another entry" in result.stdout
    assert [row["identifier"] for row in answered("ls")["entries"]] == [None]


def test_only_the_header_of_a_large_entry_is_read_where_that_is_enough(stores: Stores) -> None:
    spec = entry.TensorSpec(1 << 16, 64, "BF16")
    for tier in (stores.disk, stores.redis):
        tier.put(EncoderCacheKey("ns", "large"), sealed("large", spec=spec))
    client = stores.server.client(password=CANARY)
    before = client.info("stats")["total_net_output_bytes"]
    assert run("inspect", "large", "--header-only").exit_code == 0
    assert run("ls", "--identifiers").exit_code == 0
    assert client.info("stats")["total_net_output_bytes"] - before < 100_000


# ---- verify


def test_verify_checks_each_entry_of_each_tier_and_neither_counts_as_a_use_nor_changes_anything(three: Stores) -> None:
    tiers = {"disk": three.disk, "redis": three.redis, "s3": three.s3}
    for tier in tiers.values():
        put(tier, "good", "better", "ü😀" * 400)
        put(tier, "elsewhere", namespace="other")
        for number, how in enumerate(VERSIONS):
            key = EncoderCacheKey("ns", f"version {number}")
            tier.put(key, memoryview(of_another_version(bytes(sealed(key.identifier)), how)))
        tier.put(EncoderCacheKey("ns", "torn"), sealed("torn")[:-1])
        tier.put(EncoderCacheKey("ns", "flipped"), corrupted("flipped"))
        tier.put(EncoderCacheKey("ns", "under another's name"), sealed("good"))
    before = {file: file.stat().st_mtime_ns for file in three.folder.rglob("*.safetensors")}
    result = run("verify", "--json")
    report = json.loads(result.stdout)
    counts = {
        "good": 4,
        "corrupt": 3,
        "not_signed": 0,
        "other_version": len(VERSIONS),
        "unreadable": 0,
        "gone": 0,
        "removed": 0,
    }
    assert {name: {key: found[key] for key in counts} for name, found in report["tiers"].items()} == dict.fromkeys(
        tiers, counts
    )
    assert (result.exit_code, report["errors"], report["interrupted"]) == (1, {}, False)
    assert {file: file.stat().st_mtime_ns for file in three.folder.rglob("*.safetensors")} == before
    assert run("verify", "other").exit_code == 0

    text = run("verify", "--remove", "--tier", "disk").stdout
    assert "4 good, 3 corrupt (3 removed), 5 of another version, 0 unreadable" in text
    assert answered("verify", "--tier", "disk")["tiers"]["disk"]["corrupt"] == 0
    assert len(list(three.folder.rglob("*.safetensors"))) == 4 + len(VERSIONS)
    assert three.disk.stored_bytes == sum(file.stat().st_size for file in three.folder.rglob("*.safetensors"))
    assert run("verify", "--remove", "--tier", "s3").exit_code == 1  # some were found
    assert run("verify", "--tier", "s3").exit_code == 0
    assert len(list(three.redis.list("ns"))) == 11  # not asked for


def test_an_entry_that_an_engine_has_rewritten_since_it_was_read_is_not_removed(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = EncoderCacheKey("ns", "picture")
    stores.disk.put(key, corrupted("picture"))
    look = DiskTier.peek

    def peek(tier: DiskTier, name: EntryName, most: int) -> bytes | None:
        found = look(tier, name, most)
        stores.disk.delete(key)
        put(stores.disk, "picture")
        monkeypatch.setattr(DiskTier, "peek", look)
        return found

    monkeypatch.setattr(DiskTier, "peek", peek)
    assert answered("verify", "--remove", "--tier", "disk")["tiers"]["disk"]["removed"] == 0
    assert stores.disk.contains(key)


def test_entries_that_are_not_signed_as_configured_are_neither_valid_nor_removed_nor_copied(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("00" * 32)
    (tmp_path / "key").chmod(0o600)
    monkeypatch.setenv("LMCACHE_EC_SIGNING_KEY_FILE", str(tmp_path / "key"))
    signing = read_key(tmp_path / "key")
    namespace = signing.namespace("ns")
    data = memoryview(bytearray(entry.entry_length("signed", SPEC)))
    entry.seal(data, EncoderCacheKey(namespace, "signed"), SPEC, "host:1", signing)
    stores.redis.put(EncoderCacheKey(namespace, "signed"), data)
    put(stores.redis, "forged", namespace=namespace)
    found = answered("verify", "--remove", "--tier", "redis")["tiers"]["redis"]
    assert (found["good"], found["not_signed"], found["removed"]) == (1, 1, 0)
    report = answered("warm", "--from", "redis")
    assert (report["copied"], report["not_signed"]) == (1, 1)
    assert [one.digest for one in stores.disk.list(namespace)] == [EncoderCacheKey(namespace, "signed").digest]


@pytest.mark.parametrize(("sample", "least", "most"), [("7", 7, 7), ("1000", 200, 200), ("50%", 40, 160)])
def test_a_sample_is_a_number_of_entries_or_a_share_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: str, least: int, most: int
) -> None:
    monkeypatch.setenv("LMCACHE_EC_LOCAL_DISK", str(tmp_path))
    put(DiskTier(tmp_path, GIB), *(f"picture {number}" for number in range(200)))
    assert least <= answered("verify", "--sample", sample)["tiers"]["disk"]["good"] <= most
    for wrong in ("some", "101%", "-1", "5 %"):
        assert run("verify", "--sample", wrong).exit_code == 2


def test_the_smallest_sample_reads_an_entry_where_there_is_one_and_reports_out_of_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_EC_LOCAL_DISK", str(tmp_path))
    assert answered("verify", "--sample", "0.001%")["tiers"]["disk"]["listed"] == 0
    put(DiskTier(tmp_path, GIB), "a", "b", "c")
    found = answered("verify", "--sample", "0.001%")["tiers"]["disk"]
    assert (found["listed"], found["good"]) == (3, 1)
    assert "disk: 1 of 3 entries read," in run("verify", "--sample", "1").output
    assert "disk: 3 entries read," in run("verify").output


def test_a_store_that_dies_while_it_is_verified_is_an_error_and_not_a_loss_of_entries(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with redis_server(tmp_path / "own") as server:
        monkeypatch.setenv("LMCACHE_EC_REMOTES", f"redis://127.0.0.1:{server.port}")
        with closing(open_redis(f"redis://127.0.0.1:{server.port}")) as tier:
            put(tier, *(f"picture {number}" for number in range(40)))
        look = RedisTier.peek

        def peek(tier: RedisTier, name: EntryName, most: int) -> bytes | None:
            server.kill()
            return look(tier, name, most)

        monkeypatch.setattr(RedisTier, "peek", peek)
        result = run("verify", "--remove", "--tier", "redis", "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["tiers"]["redis"]["removed"], report["tiers"]["redis"]["corrupt"]) == (1, 0, 0)
    assert "the rest was not checked" in report["errors"]["redis"]


# ---- warm


def test_warm_copies_the_newest_entries_of_a_remote_to_the_disk_and_keeps_their_age(three: Stores) -> None:
    names = [f"picture {number}" for number in range(6)]
    put(three.redis, *names[:3], "ü😀" * 400)
    put(three.s3, *names)
    put(three.disk, names[0])
    report = answered("warm", "--from", "redis")
    assert (report["namespace"], report["copied"], report["present"]) == ("ns", 3, 1)
    for identifier in (*names[:3], "ü😀" * 400):
        path = three.folder / EncoderCacheKey("ns", identifier).object_name
        assert entry.verify(memoryview(path.read_bytes()), EncoderCacheKey("ns", identifier)) == SPEC
    again = answered("warm", "--from", "redis")
    assert (again["copied"], again["present"]) == (0, 4)

    two = answered("warm", "ns", "--from", "s3", "--bytes", f"{2 * len(sealed('picture 0'))}")
    assert two["chosen"] == 2
    assert answered("warm", "ns", "--from", "s3", "--count", "3")["chosen"] == 3
    listed = {found.digest: found.modified for found in three.s3.list("ns")}
    assert run("warm", "--from", "s3").exit_code == 0
    ages = {found.digest: found.modified for found in three.disk.list("ns")}
    assert listed.keys() <= ages.keys()
    own = EncoderCacheKey("ns", "picture 5").digest
    assert abs(ages[own] - listed[own]) < 1e-3
    assert three.disk.stored_bytes == sum(file.stat().st_size for file in three.folder.rglob("*.safetensors"))


def test_an_engine_that_runs_on_the_folder_finds_what_was_warmed(stores: Stores) -> None:
    with Bench(stores.folder) as bench:
        bench.scanned()
        key, spec = EncoderCacheKey(NAMESPACE, "picture"), spec_of_bench()
        data = memoryview(bytearray(entry.entry_length(key.identifier, spec)))
        entry.payload(data, key.identifier)[:] = payload(key.identifier)
        entry.seal(data, key, spec, "host:1")
        stores.redis.put(key, data)
        assert not bench.fetch("picture")
        assert answered("warm", NAMESPACE)["copied"] == 1
        bench.until("its news is heard", lambda: bench.fetch("picture"))
        assert bench.serves("picture")


def test_a_list_of_identifiers_is_copied_and_what_the_remote_lacks_is_counted(stores: Stores, tmp_path: Path) -> None:
    put(stores.redis, "one", "two", "three", "ü")
    put(stores.redis, "one", namespace="other")
    (tmp_path / "list").write_text("one\nü\nnowhere\n\none\n")
    unnamed = run("warm", "--identifiers", str(tmp_path / "list"))
    assert (unnamed.exit_code, "holds 2 namespaces, name one: ns, other" in unnamed.stderr) == (1, True)
    (tmp_path / "latin").write_bytes("ü\n".encode("latin-1"))
    latin = run("warm", "ns", "--identifiers", str(tmp_path / "latin"))
    assert (latin.exit_code, "value for --identifiers" in latin.stderr) == (2, True)
    report = answered("warm", "ns", "--identifiers", str(tmp_path / "list"))
    assert (report["chosen"], report["copied"], report["absent"]) == (3, 2, 1), json.dumps(report)
    assert {found.digest for found in stores.disk.list("ns")} == {
        EncoderCacheKey("ns", it).digest for it in ("one", "ü")
    }


def test_a_namespace_that_the_remote_lacks_is_noted_and_does_not_stop_the_start_of_a_new_fleet(stores: Stores) -> None:
    put(stores.redis, "one", namespace="other")
    result = run("warm", "ns", "--from", "redis")
    assert (result.exit_code, "redis has no entry of ns; namespaces that it has: other" in result.stderr) == (0, True)
    assert answered("warm", "other", "--from", "redis")["note"] == ""


def test_warm_reports_when_it_may_not_copy_even_the_newest_entry(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(stores.redis, "one")
    for size in ("10", "0"):
        report = answered("warm", "ns", "--from", "redis", "--bytes", size)
        assert report["chosen"] == 0
        assert re.fullmatch(
            rf"nothing is copied: the newest entry takes .+, and --bytes allows {size} B", report["note"]
        )
    monkeypatch.setenv("LMCACHE_EC_MAX_LOCAL_DISK_SIZE", str(8 / GIB))
    assert answered("warm", "ns", "--from", "redis")["note"].endswith("and max_local_disk_size allows 8 B")


def test_a_disk_that_is_full_keeps_what_it_has_unless_eviction_is_asked_for(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = len(sealed("picture 0"))
    monkeypatch.setenv("LMCACHE_EC_MAX_LOCAL_DISK_SIZE", f"{5.5 * length / GIB:.12f}")
    own = [f"own {number}" for number in range(3)]
    put(stores.disk, *own)
    for path in stores.folder.rglob("*.safetensors"):
        os.utime(path, (time.time() - 3600,) * 2)  # Redis reports times of use in whole seconds
    put(stores.redis, *(f"picture {number}" for number in range(4)))
    result = run("warm", "--from", "redis", "--threads", "1")
    assert (result.exit_code, "2 copied" in result.stdout) == (0, True)
    assert "the disk is full" in result.stderr
    assert all(stores.disk.contains(EncoderCacheKey("ns", identifier)) for identifier in own)
    assert answered("warm", "--from", "redis", "--evict")["full"] == ""
    held = [found.digest for found in stores.disk.list("ns")]
    assert len(held) == 5
    assert len([one for one in held if one in {EncoderCacheKey("ns", identifier).digest for identifier in own}]) == 1


def test_an_entry_that_does_not_verify_in_the_remote_is_not_copied_to_the_disk(stores: Stores) -> None:
    stores.redis.put(EncoderCacheKey("ns", "flipped"), corrupted("flipped"))
    stores.redis.put(EncoderCacheKey("ns", "v"), memoryview(of_another_version(bytes(sealed("v")), VERSIONS[0])))
    put(stores.redis, "good")
    result = run("warm", "--from", "redis", "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["copied"], report["corrupt"], report["other_version"]) == (1, 1, 1, 1), json.dumps(
        report
    )
    assert [found.digest for found in stores.disk.list("ns")] == [EncoderCacheKey("ns", "good").digest]


def test_warm_names_the_tier_that_is_missing_and_refuses_wrong_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "no Redis and no S3 remote is configured" in run("warm").stderr
    monkeypatch.setenv("LMCACHE_EC_LOCAL_DISK", str(tmp_path))
    monkeypatch.setenv("LMCACHE_EC_REMOTE_URL", f"redis://user:{CANARY}@127.0.0.1:{free_port()}")
    down = run("warm")
    assert (down.exit_code, "nothing listens there" in down.stderr) == (1, True)
    for wrong in (("--from", "disk"), ("--bytes", "10GB"), ("--count", "-1"), ("../x",)):
        assert run("warm", *wrong).exit_code == 2


# ---- clear


def test_clear_asks_first_and_removes_all_that_is_ours_from_a_tier(stores: Stores) -> None:
    for tier in (stores.disk, stores.redis):
        put(tier, "one", "two")
        put(tier, "one", namespace="other")
    stores.server.client(password=CANARY).set("theirs", "1")
    (stores.folder / "theirs").write_text("1")
    assert run("clear", "redis", "--force", answer="n\n").exit_code == 1
    assert run("clear", "redis", "--json").exit_code == 2
    assert run("clear", "tape").exit_code == 2
    assert len(list(stores.redis.list("ns"))) == 2
    assert run("clear", "redis", "--force", "--namespace", "other", "--yes").exit_code == 0
    assert [use.namespace for use in stores.redis.namespaces()] == ["ns"]
    asked = run("clear", "redis", "--force", answer="y\n")
    assert (asked.exit_code, "Remove 2 entries" in asked.output) == (0, True)
    assert stores.server.client(password=CANARY).keys() == [b"theirs"]
    assert answered("clear", "disk", "--force", "--yes")["removed"] == [
        {"tier": "disk", "namespace": "ns", "entries": 2},
        {"tier": "disk", "namespace": "other", "entries": 1},
    ]
    assert (stores.folder / "theirs").exists()
    assert stores.disk.stored_bytes == 0
    again = run("clear", "disk", "--force", "--yes")
    assert (again.exit_code, again.stdout) == (0, "There is nothing to remove.\n")


# ---- a hundred thousand entries


def in_a_process(*arguments: str) -> subprocess.Popen[str]:
    # A shell's background jobs and their children ignore Ctrl-C.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{heed}; from lmcache_ec.cli import main; main()", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_thousand_entries_are_warmed_and_verified_through_interruptions(
    stores: Stores, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Progress appears within a second of the first work, Ctrl-C ends it at once, and the same command continues."""
    number = 100_000
    client = stores.server.client(password=CANARY)
    for first in range(0, number, 1000):
        pipe = client.pipeline(transaction=False)
        for each in range(first, first + 1000):
            key = EncoderCacheKey("ns", f"picture {each}")
            pipe.set(f"lmcache-ec/{key.object_name}", bytes(sealed(key.identifier)))
        pipe.execute()

    for signalled in (True, False):
        began = time.monotonic()
        process = in_a_process("warm", "ns", "--from", "redis", "--json")
        assert process.stderr is not None
        line = process.stderr.readline()
        first_s = time.monotonic() - began
        if signalled:
            wait_until("some were copied", lambda: len(list(stores.folder.glob("ns/0?/*"))) > 100, 120)
            process.send_signal(signal.SIGINT)
        since = time.monotonic()
        out, err = process.communicate(timeout=600)
        report, took_s = json.loads(out), time.monotonic() - began
        with capsys.disabled():
            print(f"\nwarm: first line after {first_s:.1f} s ({line.strip()}), {took_s:.1f} s in all: {report}")
            print(
                f"  ended {time.monotonic() - since:.1f} s after the first line or the signal; {err.splitlines()[-1:]}"
            )
        assert process.returncode == (130 if signalled else 0)
        assert report["interrupted"] is signalled
    assert report["copied"] + report["present"] == number
    assert report["present"] > 100
    assert (
        stores.disk.stored_bytes
        == number * len(sealed("picture 10000"))
        == sum(found.length for found in stores.disk.list("ns"))
    )

    began = time.monotonic()
    process = in_a_process("verify", "ns", "--tier", "disk", "--json")
    out, err = process.communicate(timeout=600)
    with capsys.disabled():
        print(f"verify: {time.monotonic() - began:.1f} s; {err.splitlines()}")
    assert json.loads(out)["tiers"]["disk"]["good"] == number


def test_a_namespace_that_no_tier_has_is_named_and_is_an_error(tmp_path: Path) -> None:
    """A misspelled namespace must not look like one without problems."""
    extra = json.dumps({"local_disk": str(tmp_path / "entries"), "min_free_disk_size": 0})
    (tmp_path / "entries").mkdir()
    for command in (["ls"], ["verify"], ["verify", "--sample", "5%"]):
        result = CliRunner().invoke(app, [*command, "no-such", "--extra", extra])
        assert result.exit_code == 1, command
        assert "no-such: no tier has an entry of this namespace" in result.stderr
        result = CliRunner().invoke(app, [*command, "no-such", "--extra", extra, "--json"])
        assert (result.exit_code, result.stderr) == (1, ""), command
        assert json.loads(result.stdout)["errors"] == {"no-such": "no tier has an entry of this namespace"}
    refused = CliRunner().invoke(app, ["verify", "--sample", "0%", "--extra", extra])
    assert refused.exit_code == 2
