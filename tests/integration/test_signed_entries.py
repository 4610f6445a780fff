# SPDX-License-Identifier: Apache-2.0
"""Engines whose entries are signed, over a folder that others may write to."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.testbed.core import NAMESPACE, Bench, length, payload, spec, store_processes
from benchmarks.testbed.servers.redis import redis_server
from lmcache_ec import Cache, ConfigError, entry
from lmcache_ec.cli.commands import app
from lmcache_ec.cli.status import engines, show
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.signing import SigningKey, read_key
from lmcache_ec.tiers.redis import open_redis

SECRET = bytes(range(100, 164))


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "signing.key"
    file.write_bytes(SECRET)
    file.chmod(0o600)
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def forge(folder: Path, namespace: str, identifier: str, signing: SigningKey | None = None) -> Path:
    """Write an entry with another picture's output and a right digest, replacing any existing one."""
    key = EncoderCacheKey(namespace, identifier)
    data = memoryview(bytearray(length(identifier)))
    entry.payload(data, identifier)[:] = payload("another picture")
    entry.seal(data, key, spec(), "forger", signing)
    path = folder / key.object_name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def tier(bench: Bench) -> dict[str, Any]:
    (found,) = (each for each in engines() if each["engine"] == bench.engine)
    answer: dict[str, Any] = found["tiers"][0]
    return answer


def test_a_forged_entry_is_never_served_and_is_replaced_by_the_next_encode_once(folder: Path, key_file: Path) -> None:
    key = read_key(key_file)
    namespace = key.namespace(NAMESPACE)
    path = forge(folder, namespace, "cat")
    forged = path.read_bytes()
    with Bench(folder, signing_key_file=key_file) as bench:
        assert bench.cache.namespace == namespace
        assert not bench.serves("cat")
        assert path.read_bytes() == forged
        assert (tier(bench)["forged"], tier(bench)["hits"]) == (1, 0)
        bench.encode(["cat"])
        bench.settle()
        assert entry.verify(memoryview(path.read_bytes()), EncoderCacheKey(namespace, "cat"), key) == spec()
    with Bench(folder, signing_key_file=key_file, saves=False) as consumer:
        assert consumer.serves("cat")
        assert (tier(consumer)["forged"], tier(consumer)["hits"]) == (0, 1)


def test_a_consumer_neither_believes_a_forgery_nor_deletes_it(
    folder: Path, key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = forge(folder, read_key(key_file).namespace(NAMESPACE), "cat")
    with Bench(folder, signing_key_file=key_file, saves=False) as consumer:
        assert not consumer.serves("cat")
        consumer.until("the ledger is there", lambda: consumer.status()["book"])
        show([found for found in engines() if found["engine"] == consumer.engine])
    assert "1 read of disk: unsigned, or signed with another key" in capsys.readouterr().out
    assert path.exists()


def test_a_producer_announces_only_what_it_has_verified(folder: Path, key_file: Path) -> None:
    """Otherwise it only sees an entry's existence and length: a forger could make all consumers wait in vain."""
    namespace = read_key(key_file).namespace(NAMESPACE)
    with Bench(folder, signing_key_file=key_file) as bench:
        bench.encode(["cat"])
        bench.settle()
    forge(folder, namespace, "dog")
    with Bench(folder, signing_key_file=key_file) as producer:
        producer.scanned()
        probes = {name: producer.cache.probe(name, spec(), 0.0) for name in ("cat", "dog", "bird")}
        producer.until("they are answered", lambda: all(probe.held is not None for probe in probes.values()))
        assert {name: probe.held for name, probe in probes.items()} == {"cat": 1, "dog": 0, "bird": 0}


def test_switching_signing_on_and_changing_the_key_meet_no_old_entries(folder: Path, key_file: Path) -> None:
    for _ in range(2):
        with Bench(folder, signing_key_file=key_file) as bench:
            assert not bench.serves("cat")
            bench.encode(["cat"])
            bench.settle()
            assert tier(bench)["forged"] == 0
        key_file.write_bytes(os.urandom(64))
    with Bench(folder) as unsigned:
        assert not unsigned.serves("cat")
    assert len({path.name for path in folder.iterdir() if not path.name.startswith(".")}) == 2


@pytest.mark.usefixtures("new_interpreters")
def test_the_key_reaches_the_store_process_and_nothing_that_others_read(
    folder: Path, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = read_key(key_file)
    with Bench(folder, signing_key_file=key_file) as bench:
        bench.encode(["cat"])
        bench.settle()
        [pid] = store_processes(bench.arena)
        seen = [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
        found = [each for each in engines() if each["engine"] == bench.engine]
        key_file.unlink()  # the next store process gets it from the engine
        os.kill(pid, 9)
        bench.until("another one serves", lambda: bench.serving() not in (0, pid) and bench.cache.ready)
        bench.encode(["dog"])
        bench.settle()
    texts = [*seen, json.dumps(found).encode(), caplog.text.encode(), repr(bench.cache._config).encode()]
    for secret in (SECRET, SECRET.hex().encode(), key.secret, key.secret.hex().encode()):
        assert not any(secret in text for text in texts)
    namespace = key.namespace(NAMESPACE)
    for name in ("cat", "dog"):
        data = memoryview((folder / EncoderCacheKey(namespace, name).object_name).read_bytes())
        assert entry.verify(data, EncoderCacheKey(namespace, name), key)


def test_a_program_signs_and_believes_as_an_engine_does(folder: Path, key_file: Path) -> None:
    namespace = read_key(key_file).namespace(NAMESPACE)
    with Bench(folder, signing_key_file=key_file) as bench:
        bench.encode(["cat"])
        bench.settle()
    for name in (NAMESPACE, namespace):  # as configured, and as shown by `lmcache-ec namespaces`
        with Cache(local_disk=str(folder), namespace=name, signing_key_file=str(key_file)) as cache:
            assert cache.namespace == namespace
            assert (found := cache.get("cat")) is not None
            assert bytes(found.data) == payload("cat")
            forge(folder, namespace, "dog")
            assert cache.get("dog") is None
            assert "dog" not in cache, "so that whoever asks before it puts does put"
            assert cache.put("dog", b"a dog").result() == ("disk",)
            assert "dog" in cache
            assert cache.report()["counts"]["disk_replaced"] == 1  # type: ignore[index]
            (folder / EncoderCacheKey(namespace, "dog").object_name).unlink()


def test_inspect_reports_a_forgery_as_unsigned(folder: Path, key_file: Path) -> None:
    extra = json.dumps({"local_disk": str(folder), "signing_key_file": str(key_file)})
    with Bench(folder, signing_key_file=key_file) as bench:
        bench.encode(["cat"])
        bench.settle()
    namespace = read_key(key_file).namespace(NAMESPACE)
    forge(folder, namespace, "dog")
    for name, status, expected in (("cat", 0, "verifies"), ("dog", 1, "it is not signed")):
        result = CliRunner().invoke(app, ["inspect", name, "--namespace", namespace, "--extra", extra])
        assert (result.exit_code, expected in result.output) == (status, True)


def test_verify_counts_a_forgery_and_warm_copies_none(folder: Path, key_file: Path, tmp_path: Path) -> None:
    shared, namespace = tmp_path / "shared", read_key(key_file).namespace(NAMESPACE)
    for name in ("cat", "dog"):
        forge(folder, namespace, name, read_key(key_file) if name == "cat" else None)
    with redis_server(tmp_path / "redis") as redis:
        remote = open_redis(redis.url)
        for name in ("cat", "dog"):
            key = EncoderCacheKey(namespace, name)
            remote.put(key, memoryview((folder / key.object_name).read_bytes()))
        remote.close()
        keys = {"signing_key_file": str(key_file), "min_free_disk_size": 0}
        here, there = {**keys, "local_disk": str(folder)}, {**keys, "local_disk": str(shared), "remotes": [redis.url]}
        file = tmp_path / "lmcache.yaml"
        file.write_text(json.dumps({"ec": there}))
        result = CliRunner().invoke(app, ["verify", "--json", "--extra", json.dumps(here)])
        assert json.loads(result.stdout)["tiers"]["disk"]["not_signed"] == 1
        environment = {"LMCACHE_CONFIG_FILE": str(file)}
        warmed = json.loads(CliRunner().invoke(app, ["warm", "--json"], env=environment).stdout)
    assert (warmed["copied"], warmed["not_signed"]) == (1, 1)
    assert (shared / EncoderCacheKey(namespace, "cat").object_name).exists()


def test_a_key_that_cannot_be_used_ends_the_start_and_doctor_reports_why(
    folder: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = json.dumps({"local_disk": str(folder), "max_local_disk_size": 0.001, "signing_key_file": str(key_file)})
    fine = json.loads(CliRunner().invoke(app, ["doctor", "--json", "--extra", extra]).stdout)
    assert fine["signing"] == read_key(key_file).id
    key_file.chmod(0o644)
    for start in (
        lambda: Bench(folder, signing_key_file=key_file),
        lambda: Cache(local_disk=str(folder), namespace="mine", signing_key_file=str(key_file)),
    ):
        with pytest.raises(ConfigError, match=r"signing_key_file: .*mode 0644"):
            start()
    report = json.loads(CliRunner().invoke(app, ["doctor", "--json", "--extra", extra]).stdout)
    assert any("signing_key_file" in problem and "0644" in problem for problem in report["problems"])
    assert report["signing"] is None
