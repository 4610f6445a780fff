# SPDX-License-Identifier: Apache-2.0
"""The storage plugin under LMCache's own storage manager, in processes of its own, over real servers.

Two processes serve the whole module, since importing LMCache takes seconds; each test opens storage managers in them
with a configuration file of its own, and closes them, which is a test each time.
"""

import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors
import yaml

from tests.lmcache.storage_process import THINGS, StorageProcess, content, described, storage_process
from tests.seaweed import Seaweed, seaweed
from tests.servers.redis import RedisServer, redis_server

CANARY = "canary-5f0c-in-the-mine"
POOL_BYTES = 32 << 20
OURS = "ours"
Config = Callable[..., str]


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with seaweed(tmp_path_factory.mktemp("s3") / "data") as server:
        yield server


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        server.client().config_set("requirepass", CANARY)
        yield server


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory, s3: Seaweed) -> Iterator[list[StorageProcess]]:
    folder, environment = tmp_path_factory.mktemp("logs"), {**s3.environment, "REDIS_PASSWORD": CANARY}
    with storage_process(folder / "0", environment) as one, storage_process(folder / "1", environment) as other:
        yield [one, other]


@pytest.fixture
def one(processes: list[StorageProcess]) -> StorageProcess:
    return processes[0]


@pytest.fixture
def other(processes: list[StorageProcess]) -> StorageProcess:
    return processes[1]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Writes LMCache's configuration file, and says where it is."""

    def write(folder: str | None = None, *remotes: str, **settings: Any) -> str:
        ours = {"remotes": list(remotes), "min_free_disk_size": 0, **settings}
        if folder:
            ours["local_disk"] = str(tmp_path / folder)
        path = tmp_path / f"{uuid.uuid4().hex}.yaml"
        path.write_text(yaml.safe_dump(lmcache_config(ours)))
        return str(path)

    return write


def lmcache_config(ours: dict[str, Any]) -> dict[str, Any]:
    return {
        "local_cpu": True,
        "max_local_cpu_size": POOL_BYTES / (1 << 30),
        "storage_plugins": [OURS],
        "extra_config": {
            f"storage_plugin.{OURS}.module_path": "lmcache_ec.adapters.lmcache.storage_plugin",
            f"storage_plugin.{OURS}.class_name": "ShapeAgnosticBackend",
            **{f"lmcache_ec.{name}": value for name, value in ours.items()},
        },
    }


def s3_url(server: Seaweed) -> str:
    return f"s3://{server.bucket}/{uuid.uuid4().hex}?endpoint={server.endpoint}"


def redis_url(server: RedisServer) -> str:
    return f"redis://:${{REDIS_PASSWORD}}@127.0.0.1:{server.port}"


@contextmanager
def opened(process: StorageProcess, path: str) -> Iterator[StorageProcess]:
    assert process("open", config=path) == ["LocalCPUBackend", OURS], process.tail
    try:
        yield process
    finally:
        process("close")


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/??/??/*.safetensors"))


def test_what_one_process_stores_another_reads_to_the_bit_from_disk_redis_and_s3(
    one: StorageProcess, other: StorageProcess, config: Config, s3: Seaweed, redis: RedisServer
) -> None:
    in_s3, in_redis, names = s3_url(s3), redis_url(redis), list(THINGS)
    with opened(one, config("disk", in_redis, in_s3)):
        one("put", names=names)
        assert one("fill", nbytes=POOL_BYTES)
        assert not any(one("in_memory", name=name) for name in names)
        for name in names:
            assert one("get", name=name) == described(name), name
            assert one("in_memory", name=name)
    for only in (config("disk"), config(None, in_redis), config(None, in_s3)):
        with opened(other, only):
            assert [other("get", name=name) for name in names] == [described(name) for name in names]
        with opened(other, only):
            assert other("leading", names=[*names, "kv chunk#2"]) == len(names)
            assert other("get_all", names=["kv chunk#2", *names]) == [None, *map(described, names)]
            assert other("prefetch", names=[*names, "kv chunk#2", "fp8"]) == [described(name) for name in names]
            assert [other("get_later", name=name) for name in ("fp8", "fp8#2")] == [described("fp8"), None]
            assert other("fill", nbytes=POOL_BYTES), "an object of LMCache's was not released"
    assert CANARY not in one.log.read_text() + other.log.read_text()
