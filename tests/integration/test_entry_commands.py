# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec ls` and `inspect` over real stores."""

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from benchmarks.testbed.core import VERSIONS, of_another_version
from benchmarks.testbed.servers.redis import RedisServer, free_port, redis_server
from benchmarks.testbed.servers.seaweed import Seaweed, seaweed
from lmcache_ec import entry
from lmcache_ec.cli import app
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.tiers.base import Tier
from lmcache_ec.tiers.disk import DiskTier
from lmcache_ec.tiers.redis import open_redis
from lmcache_ec.tiers.s3 import open_s3

CANARY = "hunter2-canary"
GIB = 1 << 30
DAY_S = 86_400
SPEC = entry.TensorSpec(4, 64, "BF16")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this machine's settings."""
    for name in list(os.environ):
        if name.startswith(("LMCACHE_", "AWS_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis"), "--requirepass", CANARY) as server:
        yield server


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with seaweed(tmp_path_factory.mktemp("s3") / "data") as server:
        yield server


class Stores:
    """A disk, a Redis and an S3 tier of the configuration that the commands read, all of them empty."""

    def __init__(self, folder: Path, redis: RedisServer, s3: Seaweed, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        self.folder = folder / "disk"
        self.server = redis
        self.redis_url = f"redis://:{CANARY}@127.0.0.1:{redis.port}"
        self.s3_url = f"s3://{s3.bucket}/{folder.name}?endpoint={s3.endpoint}"
        redis.client(password=CANARY).flushall()
        monkeypatch.setenv("LMCACHE_EC_LOCAL_DISK", str(self.folder))
        monkeypatch.setenv("LMCACHE_EC_REMOTES", f"{self.redis_url}, {self.s3_url}")
        self.disk = DiskTier(self.folder, GIB)
        self.redis = open_redis(self.redis_url)
        self.s3 = open_s3(self.s3_url)


@pytest.fixture
def stores(tmp_path: Path, redis: RedisServer, s3: Seaweed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stores]:
    made = Stores(tmp_path, redis, s3, monkeypatch)
    with closing(made.redis):
        yield made


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


def spoiled(identifier: str) -> memoryview:
    data = sealed(identifier)
    data[-1] ^= 1
    return data


# ---- ls


def test_each_entry_is_listed_once_with_the_tiers_that_hold_it(stores: Stores) -> None:
    put(stores.disk, "both", "only disk")
    put(stores.redis, "both", "only redis", "\x1b[31mred\n")
    put(stores.s3, "both", "only s3")
    put(stores.s3, "both", namespace="other")
    path = stores.folder / EncoderCacheKey("ns", "only disk").object_name
    os.utime(path, (path.stat().st_mtime - 40 * DAY_S,) * 2)
    before = {file: file.stat().st_mtime_ns for file in stores.folder.rglob("*.safetensors")}
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
        sha("only s3"): (["s3"], None, length),  # a request to S3 for each is made where it is asked for
    }
    assert report["entries"][-1]["sha256"] == sha("only disk")  # the oldest
    assert {row["identifier"] for row in answered("ls", "ns", "--identifiers")["entries"]} >= {"only s3"}
    assert answered("ls")["found"] == 6
    assert answered("ls", "--tier", "disk")["found"] == 2

    text = run("ls", "ns").stdout
    assert "\x1b" not in text
    assert "40 d" in next(line for line in text.splitlines() if "only disk" in line)
    assert "5 entries.\n" in text
    newest = run("ls", "ns", "--tier", "disk", "--count", "1").stdout
    assert "2 entries. Only the newest 1 are listed; --count 0 lists all." in newest
    assert {file: file.stat().st_mtime_ns for file in stores.folder.rglob("*.safetensors")} == before


def test_a_tier_that_does_not_answer_is_one_line_beside_what_the_others_hold(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(stores.disk, "picture")
    monkeypatch.setenv("LMCACHE_EC_REMOTES", f"redis://user:{CANARY}@127.0.0.1:{free_port()}")
    result = run("ls")
    assert (result.exit_code, "picture" in result.stdout) == (1, True)
    assert "redis: " in result.stderr
    assert run("ls", "../x").exit_code == run("ls", "--tier", "tape").exit_code == 2


# ---- inspect


def test_an_entry_is_described_by_identifier_sha256_or_object_name(stores: Stores) -> None:
    identifier = "ü😀" * 400  # its header is longer than most
    put(stores.disk, identifier)
    put(stores.s3, identifier)
    put(stores.redis, identifier, namespace="other")
    key = EncoderCacheKey("ns", identifier)
    for asked in ([identifier, "--namespace", "ns"], [key.digest.hex(), "--namespace", "ns"], [key.object_name]):
        found = answered("inspect", *asked)
        header = found["header"]
        assert (header["identifier"], header["namespace"], header["producer"]) == (identifier, "ns", "host:41234")
        assert (header["shape"], header["dtype"], header["bytes"]) == ([4, 64], "BF16", len(sealed(identifier)))
        assert [(copy["tier"], copy["problem"]) for copy in found["tiers"]] == [("disk", ""), ("s3", "")]
    assert [copy["tier"] for copy in answered("inspect", identifier)["tiers"]] == ["disk", "redis", "s3"]
    text = run("inspect", identifier).stdout
    assert [text.count(said) for said in ("4 x 64 BF16", "host:41234", "verifies")] == [2, 2, 3]
    missing = run("inspect", "another")
    assert (missing.exit_code, missing.stderr) == (1, "No tier has another.\n")


@pytest.mark.parametrize("how", ["spoiled", *VERSIONS[:1]])
def test_what_does_not_verify_in_one_tier_is_said_of_that_tier(stores: Stores, how: str) -> None:
    data = spoiled("picture") if how == "spoiled" else memoryview(of_another_version(bytes(sealed("picture")), how))
    put(stores.disk, "picture")
    stores.redis.put(EncoderCacheKey("ns", "picture"), data)
    result = run("inspect", "picture", "--json")
    problems = {copy["tier"]: copy["problem"] for copy in json.loads(result.stdout)["tiers"]}
    assert (result.exit_code, problems["disk"]) == (1, "")
    assert problems["redis"].startswith("does not verify: digest" if how == "spoiled" else "cannot be judged here")
    if how == "spoiled":
        assert run("inspect", "picture", "--header-only").exit_code == 0


def test_of_a_large_entry_only_the_header_is_read_where_that_is_enough(stores: Stores) -> None:
    spec = entry.TensorSpec(1 << 16, 64, "BF16")
    for tier in (stores.disk, stores.redis, stores.s3):
        tier.put(EncoderCacheKey("ns", "large"), sealed("large", spec=spec))
    client = stores.server.client(password=CANARY)
    before = client.info("stats")["total_net_output_bytes"]
    assert run("inspect", "large", "--header-only").exit_code == 0
    assert run("ls", "--identifiers").exit_code == 0
    assert client.info("stats")["total_net_output_bytes"] - before < 100_000
