# SPDX-License-Identifier: Apache-2.0
"""The storage plugin under LMCache's own storage manager, in separate processes, over real servers.

Two processes serve the whole module, since importing LMCache takes seconds; each test opens storage managers in them
with its own configuration file and closes them, which is also a test each time.
"""

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors
import yaml

from benchmarks.testbed.core import of_another_version
from benchmarks.testbed.servers.redis import RedisServer, redis_server
from benchmarks.testbed.servers.seaweed import Seaweed
from benchmarks.testbed.waiting import wait_until
from lmcache_ec import entry
from tests.lmcache.storage_process import PATIENCE_S, THINGS, StorageProcess, content, described, storage_processes

CANARY = "canary-5f0c-in-the-mine"
POOL_BYTES = 32 << 20
OURS = "ours"
Config = Callable[..., str]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        server.client().config_set("requirepass", CANARY)
        yield server


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory, s3: Seaweed) -> Iterator[list[StorageProcess]]:
    folder, environment = tmp_path_factory.mktemp("logs"), {**s3.environment, "REDIS_PASSWORD": CANARY}
    with storage_processes(folder, 2, environment) as found:
        yield found


@pytest.fixture
def one(processes: list[StorageProcess]) -> StorageProcess:
    return processes[0]


@pytest.fixture
def other(processes: list[StorageProcess]) -> StorageProcess:
    return processes[1]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Writes LMCache's configuration file, and returns its path. A store on a busy machine must not count as failing:
    no call times out before the test does."""

    def write(folder: str | None = None, *remotes: str, **settings: Any) -> str:
        patience = {"blocking_timeout_secs": PATIENCE_S, "drain_s": PATIENCE_S}
        ours = {"remotes": list(remotes), "min_free_disk_size": 0, **patience, **settings}
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
    return sorted(folder.glob("*/??/*.safetensors"))


def test_an_object_that_one_process_stores_is_read_bit_for_bit_by_another_from_disk_redis_and_s3(
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
    probed = config(None, in_redis, remote_lookup="probe")  # by default a slow Redis is not asked
    for only in (config("disk"), probed, config(None, in_s3)):
        with opened(other, only):
            assert [other("get", name=name) for name in names] == [described(name) for name in names]
        with opened(other, only):
            assert other("leading", names=[*names, "kv chunk#2"]) == len(names)
            assert other("get_all", names=["kv chunk#2", *names]) == [None, *map(described, names)]
            assert other("prefetch", names=[*names, "kv chunk#2", "fp8"]) == [described(name) for name in names]
            assert other("prefetch", names=["kv chunk#2", "fp8"]) == []
            assert not other("unpin", name="fp8"), "a pin of the look-up was left"
            assert [other("get_later", name=name) for name in ("fp8", "fp8#2")] == [described("fp8"), None]
            assert other("fill", nbytes=POOL_BYTES), "an object of LMCache's was not released"
    assert CANARY not in one.log.read_text() + other.log.read_text()


def test_a_stored_object_is_still_there_after_a_restart_and_any_tool_can_open_it(
    one: StorageProcess, config: Config, tmp_path: Path
) -> None:
    path = config("disk")
    with opened(one, path):
        one("put", names=["kv chunk", "kv chunk/1", "kv chunk#2"])
    with opened(one, path):
        assert one("contains", name="kv chunk") == OURS
        assert one("get", name="kv chunk/1") == described("kv chunk/1")
        assert one("contains", name="kv chunk/0") is None
        namespace = one("namespace")
    assert {file.relative_to(tmp_path / "disk").parts[0] for file in entries(tmp_path / "disk")} == {namespace}
    for file in entries(tmp_path / "disk"):
        with safetensors.safe_open(file, "pt") as opened_file:
            metadata, tensor = opened_file.metadata(), opened_file.get_tensor("ec")
        assert metadata["layout"] == "KV_2LTD bfloat16[2,3,16,64]"
        assert tensor.shape == (2 * 3 * 16, 64)
        assert f"org/some-model@1@0@{metadata['identifier'].split('@')[3]}@bfloat16" in metadata["identifier"]


def test_a_model_has_a_namespace_of_its_own_and_the_next_checkpoint_in_its_folder_too(
    one: StorageProcess, config: Config, tmp_path: Path
) -> None:
    model, found = tmp_path / "model", []
    model.mkdir()
    for weights in (b"first", b"later"):
        (model / "model.safetensors").write_bytes(weights)
        for settings in ({}, {"epoch": 1}, {"namespace": "mine"}):
            assert OURS in one("open", config=config("disk", **settings), model=str(model))
            found.append(one("namespace"))
            one("close")
    assert found[2] == found[5] == "mine"
    assert len({*found}) == 5


@pytest.mark.parametrize("harm", ["truncated", "emptied", "flipped", "swapped"])
def test_a_damaged_file_is_a_miss_and_is_removed_and_can_be_stored_again(
    one: StorageProcess, config: Config, tmp_path: Path, harm: str
) -> None:
    with opened(one, config("disk")):
        one("put", names=["kv chunk", "kv chunk#2"])
        harmed = one("file_name", name="kv chunk")
    (file,) = (tmp_path / "disk").rglob(harmed)
    (neighbour,) = {*entries(tmp_path / "disk")} - {file}
    data = file.read_bytes()
    flipped = data[:-7] + bytes([data[-7] ^ 4]) + data[-6:]
    harms = {"truncated": data[:-100], "emptied": b"", "flipped": flipped, "swapped": neighbour.read_bytes()}
    with opened(one, config("disk")):
        assert one("contains", name="kv chunk") == OURS
        file.write_bytes(harms[harm])
        assert one("get_all", names=["kv chunk"]) == [None]
        assert not file.exists()
        assert one("contains", name="kv chunk") is None
        assert one("counts")["disk_corrupt"] == 1
        one("put", names=["kv chunk"])
    with opened(one, config("disk")):
        assert one("get", name="kv chunk") == described("kv chunk")


def test_where_entries_are_signed_a_forged_file_is_a_miss_for_look_ups_too_until_it_is_stored_again(
    one: StorageProcess, config: Config, tmp_path: Path
) -> None:
    """LMCache does not store an object that a look-up found."""
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    with opened(one, config("disk")):
        one("put", names=["kv chunk"])
        unsigned = one("namespace")
    with opened(one, path := config("disk", signing_key_file=str(key))):
        namespace = one("namespace")
        assert namespace.startswith(f"{unsigned}-")
        assert one("contains", name="kv chunk") is None
        one("put", names=["kv chunk"])
    (file,) = (tmp_path / "disk" / namespace).glob("??/*.safetensors")
    signed = file.read_bytes()
    signature = signed.index(b'"signature":"') + len(b'"signature":"')
    file.write_bytes(forged := _with_right_digest(signed[:signature] + b"0" * 32 + signed[signature + 32 :]))
    with opened(one, path):
        assert one("contains", name="kv chunk") == OURS
        assert one("get_all", names=["kv chunk"]) == [None]
        assert one("contains", name="kv chunk") is None
        assert file.read_bytes() == forged
        assert one("counts")["disk_forged"] == 1
        one("put", names=["kv chunk"])
        assert one("counts")["disk_replaced"] == 1
    with opened(one, path):
        assert one("contains", name="kv chunk") == OURS
        assert one("get", name="kv chunk") == described("kv chunk")


def _with_right_digest(data: bytes) -> bytes:
    blob = bytearray(data)
    blob[entry._DIGEST_AT : entry._DIGEST_END] = entry._digest(memoryview(blob))
    return bytes(blob)


def test_a_file_of_another_version_is_a_miss_and_is_left_as_it_is(
    one: StorageProcess, config: Config, tmp_path: Path
) -> None:
    with opened(one, config("disk")):
        one("put", names=["kv chunk"])
    (file,) = entries(tmp_path / "disk")
    file.write_bytes(other := of_another_version(file.read_bytes(), "lmcache-ec/2"))
    with opened(one, config("disk")):
        assert one("get_all", names=["kv chunk"]) == [None]
        assert (one("counts").get("disk_corrupt", 0), one("counts")["disk_other_version"]) == (0, 1)
        one("put", names=["kv chunk"])
    assert file.read_bytes() == other


def test_a_prefetch_ends_at_the_first_object_that_does_not_verify_and_holds_nothing_after_it(
    one: StorageProcess, config: Config, tmp_path: Path
) -> None:
    chunks = [f"3 MB#{number}" for number in range(5)]
    with opened(one, config("disk")):
        one("put", names=chunks)
        (file,) = (tmp_path / "disk").rglob(one("file_name", name=chunks[2]))
    file.write_bytes(file.read_bytes()[:-1] + b"\0\0")
    with opened(one, config("disk")):
        assert one("prefetch", names=chunks) == list(map(described, chunks[:2]))
        assert one("fill", nbytes=POOL_BYTES)


def test_a_damaged_file_is_repaired_from_the_next_tier(
    one: StorageProcess, config: Config, tmp_path: Path, s3: Seaweed
) -> None:
    path = config("disk", s3_url(s3))
    with opened(one, path):
        one("put", names=["kv chunk"])
    (file,) = entries(tmp_path / "disk")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with opened(one, path):
        assert one("get", name="kv chunk") == described("kv chunk")
        one("wait", names=["kv chunk"])
    assert file.read_bytes() == whole


def test_an_object_found_in_a_remote_is_promoted_to_the_disk(
    one: StorageProcess, other: StorageProcess, config: Config, redis: RedisServer
) -> None:
    with opened(one, config(None, redis_url(redis), salt="promote")):
        one("put", names=["encoder output"])
    with opened(other, config("disk", redis_url(redis), salt="promote")):
        assert other("get", name="encoder output") == described("encoder output")
        other("wait", names=["encoder output"])
    with opened(other, config("disk", salt="promote")):
        assert other("get", name="encoder output") == described("encoder output")


def test_look_ups_stop_at_the_first_missing_key_and_pins_prevent_only_removals_that_are_not_forced(
    one: StorageProcess, config: Config
) -> None:
    chunks = [f"fp8#{number}" for number in range(70)]
    with opened(one, config("disk")):
        one("put", names=chunks[:50] + chunks[51:])
    with opened(one, config("disk")):
        assert one("leading", names=chunks) == 50
        assert one("leading", names=chunks[50:]) == 0
        assert one("leading", names=chunks[51:]) == 19
        assert not one("unpin", name=chunks[0])
        assert one("leading", names=chunks[:3], pin=True) == 3
        assert one("contains", name=chunks[0], pin=True) == OURS
        assert not one("pin", name=chunks[50])
        for _ in range(2):
            assert not one("remove", name=chunks[0], force=False)
            assert one("unpin", name=chunks[0])
        assert one("remove", name=chunks[0], force=False)
        assert one("remove", name=chunks[1])
        assert not one("remove", name=chunks[1])
        assert one("leading", names=chunks[:3]) == 0
        assert one("contains", name=chunks[2]) == OURS
        assert one("get", name=chunks[1]) is None


def test_a_put_calls_back_once_for_each_stored_key_and_survives_a_callback_that_raises(
    one: StorageProcess, config: Config, redis: RedisServer
) -> None:
    with opened(one, config("disk")):
        assert one("called_back", names=["fp8", "3 MB", "fp8#2"]) == ["3 MB", "fp8", "fp8#2"]
        assert one("called_back", names=["bools"], raising=True) == ["bools"]
        assert one("get", name="bools") == described("bools")
    with opened(one, config(None, redis_url(redis), max_remote_entry_size=0.001)):
        assert one("called_back", names=["fp8#3", "3 MB"]) == ["fp8#3"]


def test_a_stuck_remote_holds_up_neither_puts_nor_lmcaches_memory_and_removed_keys_do_not_come_back(
    one: StorageProcess, config: Config, redis: RedisServer
) -> None:
    """Writes wait for the frozen server. Entries on disk take no memory meanwhile; without a disk, there is memory for
    four entries only."""
    url, settings = redis_url(redis), {"max_pending_size": 4 * len(content("3 MB")) / (1 << 30)}
    chunks = [f"3 MB#{number}" for number in range(6)]

    def written(number: int) -> bool:
        return bool(one("counts").get("disk_writes", 0) == number)

    def put(disk: bool = False) -> list[str]:
        for number, chunk in enumerate(chunks, 1):
            one("put", names=[chunk], wait=False)
            if disk:
                wait_until("the disk has it", partial(written, number), PATIENCE_S)
        return [chunk for chunk in chunks if one("pending", name=chunk)]

    with opened(one, config("disk", url, salt="stuck", **settings)):
        redis.freeze()
        try:
            assert put(disk=True) == chunks
            assert one("fill", nbytes=POOL_BYTES), "something holds on to LMCache's memory"
            assert one("get_all", names=chunks[:1]) == [described(chunks[0])]  # from the disk
            assert one("forget", name=chunks[1])
        finally:
            redis.thaw()
        one("wait", names=chunks)
        assert [bool(one("contains", name=chunk)) for chunk in chunks] == [True, False, True, True, True, True]
    with opened(one, config(None, url, salt="stuck", **settings)):
        assert [one("contains", name=chunk) for chunk in chunks] == [OURS, None, OURS, OURS, OURS, OURS]
    with opened(one, config(None, url, salt="without a disk", **settings)):
        redis.freeze()
        try:
            assert put() == chunks[:3]
            assert one("counts")["puts_dropped"] == 3
        finally:
            redis.thaw()
        one("wait", names=chunks)


def test_accepted_objects_are_stored_before_close_returns(one: StorageProcess, config: Config, tmp_path: Path) -> None:
    with opened(one, config("disk")):
        one("put", names=[f"3 MB#{number}" for number in range(9)], wait=False)
    assert len(entries(tmp_path / "disk")) == 9


def test_close_returns_and_gives_up_what_a_stuck_remote_does_not_take(
    one: StorageProcess, config: Config, tmp_path: Path, s3: Seaweed
) -> None:
    assert OURS in one("open", config=config("disk", s3_url(s3), drain_s=0.2))
    with s3.stopped():
        one("put", names=["kv chunk", "fp8"], wait=False)
        wait_until("the disk has both", lambda: one("counts").get("disk_writes", 0) == 2, PATIENCE_S)
        one("close")
    assert len(entries(tmp_path / "disk")) == 2
    assert "2 entries were not in every tier" in one.tail


def test_a_remote_that_is_unreachable_at_the_start_is_skipped_until_it_is_up(
    one: StorageProcess, config: Config, tmp_path: Path
) -> None:
    with redis_server(tmp_path / "redis") as server:
        server.kill()
        with opened(one, config("disk", server.url)):
            one("put", names=["kv chunk"])
            assert one("get_all", names=["kv chunk", "fp8"]) == [described("kv chunk"), None]
            assert one("counts")["redis_writes_dropped"] == 1
            server.start()
            one("until_counted", count="redis_writes", names=[f"fp8#{number}" for number in range(1000)])


def test_a_scheduler_without_memory_of_its_own_can_look_up(one: StorageProcess, config: Config) -> None:
    with opened(one, config("disk")):
        one("put", names=["kv chunk"])
    assert one("open", config=config("disk"), role="scheduler") == [OURS]
    assert one("leading", names=["kv chunk", "kv chunk#2"]) == 1
    assert one("get", name="kv chunk") is None
    one("close")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_local_disc_size": 1}, "lmcache_ec.max_local_disc_size: did you mean lmcache_ec.max_local_disk_size"),
        ({"max_local_disk_size": -1}, "lmcache_ec.max_local_disk_size"),
        ({"local_disk": "relative"}, "lmcache_ec.local_disk: must be an absolute path"),
        ({}, "set lmcache_ec.local_disk or lmcache_ec.remotes"),
        ({"remote_url": f"redis://:{CANARY}@localhost"}, "give a password as ${NAME}"),
        ({"remote_url": f"redis://localhost?password={CANARY}"}, "give a password as ${NAME}"),
        ({"remotes": ["redis://:${NO_SUCH_VARIABLE}@localhost"]}, "no such environment variable: NO_SUCH_VARIABLE"),
        ({"remotes": ["gopher://localhost"]}, "no tier supports gopher://"),
        ({"remotes": ["s3://no bucket"]}, "S3 URL"),
        ({"local_disk": "/dev/null/x"}, "/dev/null/x cannot be made: /dev/null is a file, name a folder"),
    ],
)
def test_invalid_settings_are_named_in_the_log(
    one: StorageProcess, tmp_path: Path, settings: dict[str, Any], expected: str
) -> None:
    """LMCache logs the constructor's exception, and continues without the backend."""
    path = tmp_path / "lmcache.yaml"
    path.write_text(yaml.safe_dump(lmcache_config(settings)))
    before = len(one.log.read_text())
    assert OURS not in one("open", config=str(path))
    one("close")
    (line,) = (line for line in one.log.read_text()[before:].splitlines() if "Failed to create backend" in line)
    assert expected in line
    assert CANARY not in line


def test_lmcaches_encoder_cache_benefits_from_the_plugin_once_its_get_asks_all_backends(
    one: StorageProcess, other: StorageProcess, config: Config, s3: Seaweed
) -> None:
    """LMCache 0.5.6 only asks the first backend, since a list of None is truthy: only its CPU memory is read."""
    shared = config(None, s3_url(s3))
    one("encoder", config=shared, mended=False)
    assert one("encoder_put", picture="a cat", rows=257, width=96)
    assert one("encoder_get", picture="a cat", rows=257, width=96)
    one("close")
    for mended, answer in ((False, None), (True, True)):
        other("encoder", config=shared, mended=mended)
        assert other("encoder_contains", picture="a cat")
        assert other("encoder_get", picture="a cat", rows=257, width=96) is answer
        assert other("encoder_get", picture="a dog", rows=1, width=96) is None
        other("close")


def test_the_ready_configuration_is_one_that_works(one: StorageProcess, tmp_path: Path) -> None:
    ready = yaml.safe_load((Path(__file__).parents[2] / "configs" / "lmcache-plugin.yaml").read_text())
    assert ready["extra_config"]["lmcache_ec.local_disk"].startswith("/var/")
    ready["extra_config"] |= {"lmcache_ec.local_disk": str(tmp_path / "disk"), "lmcache_ec.min_free_disk_size": 0}
    path = tmp_path / "lmcache.yaml"
    path.write_text(yaml.safe_dump({**ready, "max_local_cpu_size": POOL_BYTES / (1 << 30)}))
    (ours,) = ready["storage_plugins"]
    assert one("open", config=str(path)) == ["LocalCPUBackend", ours]
    one("close")
