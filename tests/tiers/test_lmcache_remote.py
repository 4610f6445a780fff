# SPDX-License-Identifier: Apache-2.0
import errno
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from benchmarks.testbed.servers.lmcache_server import LMCacheServer, lmcache_server
from benchmarks.testbed.servers.relay import Then, relay
from benchmarks.testbed.waiting import wait_until
from lmcache_ec.key import EncoderCacheKey, EntryName
from lmcache_ec.tiers.base import Listed, Tier, TierError, TierUnreachable
from lmcache_ec.tiers.kinds import REFUSED, SCHEMES, check_remote, is_remote_key, open_remote
from lmcache_ec.tiers.lmcache_remote import LMCacheRemoteTier, open_lmcache_remote
from lmcache_ec.tiers.remote import Remote
from tests.tiers.conformance import MIB, TierConformance, fetch, new_namespace, value

PATIENCE_S = 20.0
"""More than the default: servers under test share this machine with other tests."""


@pytest.fixture(scope="module", autouse=True)
def _the_log_of_later_processes_is_theirs() -> Iterator[None]:
    """Opening such a remote silences LMCache in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMCACHE_LOG_LEVEL", "CRITICAL")
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCacheServer]:
    with lmcache_server(tmp_path_factory.mktemp("lm") / "log") as running:
        yield running


@contextmanager
def opened(url: str, timeout_s: float = PATIENCE_S, **extra_config: object) -> Iterator[LMCacheRemoteTier]:
    with closing(open_lmcache_remote(url, extra_config, timeout_s=timeout_s)) as tier:
        yield tier


@contextmanager
def impatient(tier: LMCacheRemoteTier, timeout_s: float = 0.3) -> Iterator[None]:
    """Within the block calls time out after `timeout_s`."""
    patient, tier._timeout_s = tier._timeout_s, timeout_s
    try:
        yield
    finally:
        tier._timeout_s = patient


def new_key() -> EncoderCacheKey:
    return EncoderCacheKey(new_namespace(), "picture")


class WithRecord(Tier):
    """A tier that cannot list, with a record of what went through it, so that the suite can test everything else."""

    name = "with record"

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.record: dict[EntryName, int] = {}

    def get_into(self, key: EntryName, buffer: memoryview) -> int | None:
        return self.tier.get_into(key, buffer)

    def put(self, key: EncoderCacheKey, data: memoryview) -> bool:
        written = self.tier.put(key, data)
        if written:
            self.record[key] = len(data)
        return written

    def contains(self, key: EntryName) -> int | None:
        return self.tier.contains(key)

    def delete(self, key: EntryName) -> bool:
        self.record.pop(key, None)
        return self.tier.delete(key)

    def list(self, namespace: str) -> Iterator[Listed]:
        assert list(self.tier.list(namespace)) == []
        yield from (
            Listed(key.digest, length, 0.0) for key, length in self.record.items() if key.namespace == namespace
        )

    def close(self) -> None:
        self.tier.close()


@pytest.fixture(scope="module")
def server_tier(server: LMCacheServer) -> Iterator[Tier]:
    with opened(server.url) as tier:
        yield WithRecord(tier)


class TestServer(TierConformance):
    """The whole suite except listing, which LMCache's server does not support: see the test below."""

    counts_namespaces = False

    @pytest.fixture
    def tier(self, server_tier: Tier) -> Tier:
        return server_tier


@pytest.fixture(scope="module", params=[1, 2], ids="folders {}".format)
def folder_tier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tier]:
    """LMCache spreads its files over a list of folders."""
    folders = [tmp_path_factory.mktemp("fs") for _ in range(request.param)]
    with opened(f"fs://{','.join(map(str, folders))}") as tier:
        yield tier


class TestFolder(TierConformance):
    counts_namespaces = False

    @pytest.fixture
    def tier(self, folder_tier: Tier) -> Tier:
        return folder_tier


# -- what a connector cannot promise


def test_a_server_that_cannot_list_reports_it(server: LMCacheServer) -> None:
    key = new_key()
    with opened(server.url) as tier:
        tier.put(key, value("a", 10))
        assert list(tier.list(key.namespace)) == []
        assert "cannot be listed" in tier.notice


def test_an_entry_that_a_server_cannot_delete_is_absent_for_this_tier_and_replaced_for_all(
    server: LMCacheServer,
) -> None:
    key = new_key()
    with opened(server.url) as tier, opened(server.url) as neighbour:
        tier.put(key, value("bad", 100))
        tier.delete(key)
        assert (tier.contains(key), fetch(tier, key)) == (None, None)
        assert fetch(neighbour, key) == value("bad", 100)
        assert tier.put(key, value("good", 200)) is True
        assert fetch(tier, key) == fetch(neighbour, key) == value("good", 200)
        assert tier.put(key, value("third", 10)) is False


@pytest.mark.parametrize("place", ["folder", "server"])
def test_two_processes_may_both_write_a_key_but_nobody_ever_reads_a_mixture(
    place: str, server: LMCacheServer, tmp_path: Path
) -> None:
    """Two tiers stand in for them: like two processes, they share only the store."""
    url = server.url if place == "server" else f"fs://{tmp_path}"
    values = [bytes([number]) * (8 * MIB + number) for number in (1, 2)]
    with opened(url) as one, opened(url) as other, opened(url) as reader, ThreadPoolExecutor(2) as threads:
        for _ in range(20):
            key = new_key()
            writes = [
                threads.submit(tier.put, key, memoryview(data)) for tier, data in zip((one, other), values, strict=True)
            ]
            while not all(write.done() for write in writes):
                assert whole(reader, key) in (None, *values)
            assert any(write.result() for write in writes)
            assert whole(reader, key) in values
            reader.delete(key)


def whole(tier: Tier, key: EncoderCacheKey) -> bytes | None:
    """The entry; None if there is none, or if it has changed since its length was read."""
    buffer = memoryview(bytearray(tier.contains(key) or 0))
    return bytes(buffer) if tier.get_into(key, buffer) == len(buffer) > 0 else None


def test_a_writer_that_was_killed_leaves_a_key_that_costs_one_error_and_is_written_again(server: LMCacheServer) -> None:
    key = new_key()
    with opened(server.url) as tier, opened(server.url) as neighbour:
        leave_half_a_value(server, key)
        with pytest.raises(TierError, match="could not read it"):
            fetch(tier, key)
        assert (fetch(tier, key), tier.contains(key)) == (None, None)
        assert tier.put(key, value("a", 1000)) is True
        assert fetch(tier, key) == fetch(neighbour, key) == value("a", 1000)


def leave_half_a_value(server: LMCacheServer, key: EncoderCacheKey) -> None:
    """Acts as a process that is killed while it writes, and waits until the server knows its end."""
    import torch
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.memory_management import MemoryFormat
    from lmcache.v1.protocol import ClientCommand, ClientMetaMessage

    named = CacheEngineKey(f"ec.{key.namespace}", 1, 0, int.from_bytes(key.digest), torch.uint8)
    shape = torch.Size([1000])
    message = ClientMetaMessage(ClientCommand.PUT, named, 1000, MemoryFormat.EC_TD, torch.uint8, shape).serialize()
    with socket.create_connection(("127.0.0.1", server.port)) as writer:
        writer.sendall(message + bytes(500))
        writer.shutdown(socket.SHUT_WR)
        assert writer.recv(1) == b""


@pytest.mark.parametrize("left", [0, 10, 500])
def test_a_file_that_was_cut_costs_one_error_and_is_written_again(left: int, tmp_path: Path) -> None:
    key = new_key()
    with opened(f"fs://{tmp_path}") as tier:
        tier.put(key, value("a", 1000))
        (file,) = tmp_path.glob("*.data")
        os.truncate(file, left)
        with pytest.raises(TierError, match="could not read it"):
            fetch(tier, key)
        assert fetch(tier, key) is None
        assert tier.put(key, value("b", 1000)) is True
        assert fetch(tier, key) == value("b", 1000)


# -- faults of the store and of the network


def uses(tier: Tier) -> list[Callable[[], object]]:
    return [
        lambda: tier.get_into(EncoderCacheKey("ns", "a"), memoryview(bytearray(1000))),
        lambda: tier.contains(EncoderCacheKey("ns", "a")),
        lambda: tier.put(EncoderCacheKey("ns", "b"), value("b", 10)),
        lambda: tier.put(EncoderCacheKey("ns", "c"), value("c", 9 * MIB)),
    ]


def test_a_killed_server_is_an_error_and_after_its_restart_the_first_call_is_served(server: LMCacheServer) -> None:
    key = new_key()
    with opened(server.url) as tier, opened(server.url) as idle:
        server.kill()
        try:
            for use in uses(tier):
                with pytest.raises(TierUnreachable) as caught:
                    use()
                assert caught.value.errno == errno.ECONNREFUSED
            with pytest.raises(TierUnreachable):
                open_remote(Remote(server.url))
        finally:
            server.start()
        assert idle.put(key, value("a", 1000)) is True
        assert fetch(tier, key) == value("a", 1000)


@pytest.mark.timeout(120)  # without its own limits no call would end
def test_a_server_that_hangs_is_an_error_in_bounded_time_and_served_again(server: LMCacheServer) -> None:
    key = new_key()
    with opened(server.url) as tier:
        tier.put(key, value("a", 1000))
        server.freeze()
        try:
            for use in uses(tier):
                with impatient(tier), pytest.raises(TierUnreachable, match="no answer in time") as caught:
                    use()
                assert caught.value.errno == errno.ETIMEDOUT
            with pytest.raises(TierUnreachable, match="no answer in time"):
                open_remote(Remote(server.url, timeout_s=0.3))
        finally:
            server.thaw()
        # It still has to process what was sent meanwhile.
        wait_until("it answers again", lambda: tier.contains(key) == 1000, 30, despite=TierError)
        assert fetch(tier, key) == value("a", 1000)


def test_an_address_where_nobody_answers_any_more_holds_up_no_call_once_it_leads_to_a_server_again(
    server: LMCacheServer,
) -> None:
    key = new_key()
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        relay(server.port) as between,
        opened(f"lm://127.0.0.1:{between.port}") as tier,
    ):
        tier.put(key, value("a", 1000))
        between.allow(0, Then.SILENCE)
        between.target = silent.getsockname()[1]
        for _ in range(2):
            with impatient(tier), pytest.raises(TierError, match="no answer in time"):
                tier.contains(key)
        between.target = server.port
        assert fetch(tier, key) == value("a", 1000)


def test_each_of_many_calls_at_once_on_a_server_that_hangs_ends(server: LMCacheServer) -> None:
    with opened(server.url) as tier, ThreadPoolExecutor(8) as threads:
        server.freeze()
        try:
            with impatient(tier):
                asked = [threads.submit(tier.contains, new_key()) for _ in range(8)]
                assert all(isinstance(one.exception(), TierError) for one in asked)
        finally:
            server.thaw()
        assert tier.contains(new_key()) is None


@pytest.mark.parametrize("then", [Then.CUT, Then.SILENCE])
def test_a_value_of_which_half_arrives_leaves_the_buffer_as_it_was(server: LMCacheServer, then: Then) -> None:
    key, buffer = new_key(), memoryview(bytearray(b"\xaa" * MIB))
    with relay(server.port) as between, opened(f"lm://127.0.0.1:{between.port}") as tier:
        assert tier.put(key, value("a", MIB)) is True
        between.allow(MIB // 2, then)
        if then is Then.CUT:
            assert tier.get_into(key, buffer) == MIB  # it is asked again, on a new connection
            assert buffer == value("a", MIB)
        else:
            with impatient(tier), pytest.raises(TierError, match="no answer in time"):
                tier.get_into(key, buffer)
            assert buffer == b"\xaa" * MIB
            assert fetch(tier, key) == value("a", MIB)


def test_a_long_value_of_another_length_is_not_fetched_and_what_comes_after_it_is_right(server: LMCacheServer) -> None:
    """The value looks like the server's answer for a miss, which would turn a hit into a miss."""
    wrong, right, word = new_key(), new_key(), struct.pack("9i", 400, 0, 1, 1, 0, 0, 0, 0, 0)
    data = memoryview(word * (5 * MIB // len(word)))
    with opened(server.url) as tier:
        tier.put(wrong, data)
        tier.put(right, value("right", 1000))
        for _ in range(3):
            assert tier.get_into(wrong, memoryview(bytearray(7))) == tier.contains(wrong) == len(data)
            assert fetch(tier, right) == value("right", 1000)
        assert fetch(tier, wrong) == data


def test_a_short_value_of_another_length_costs_no_connection(server: LMCacheServer) -> None:
    key = new_key()
    with opened(server.url) as tier:
        tier.put(key, value("a", 100_000))
        before = server.log.read_text().count("Connected by")
        for _ in range(3):
            assert tier.get_into(key, memoryview(bytearray(7))) == tier.contains(key) == 100_000
        assert server.log.read_text().count("Connected by") == before


def test_an_entry_over_the_limit_is_refused(tmp_path: Path) -> None:
    with closing(open_lmcache_remote(f"fs://{tmp_path}", max_entry_bytes=1000)) as tier:
        assert tier.put(new_key(), value("a", 1000)) is True
        with pytest.raises(TierError, match="1001 bytes does not fit") as caught:
            tier.put(new_key(), value("a", 1001))
        assert caught.value.errno == errno.EFBIG


# -- names


def test_the_longest_namespaces_are_kept_apart(server: LMCacheServer) -> None:
    alike = [EncoderCacheKey("n" * 79 + last, "picture") for last in "ab"] + [EncoderCacheKey("n" * 58, "picture")]
    with opened(server.url) as tier:
        for number, key in enumerate(alike):
            assert tier.put(key, value(str(number), 100)) is True
        for number, key in enumerate(alike):
            assert fetch(tier, key) == value(str(number), 100)


def test_files_of_lmcache_and_of_strangers_are_not_listed(tmp_path: Path) -> None:
    key = EncoderCacheKey("ns", "picture")
    with opened(f"fs://{tmp_path}") as tier:
        tier.put(key, value("a", 10))
        for name in (
            "ns@1@0@abc@uint8",
            "ec.ns@2@1@abc@uint8",
            "ec.ns@1@0@abc@half",
            "ec.nsx@1@0@abc@uint8",
            "x",
            f"ec.ns@1@0@{key.digest.hex()}@uint8@tag%x",
        ):
            (tmp_path / f"{name}.data").write_bytes(bytes(100))
        (tmp_path / f"ec.ns@1@0@{1:x}@uint8.data").write_bytes(b"torn")
        assert [(found.digest, found.length) for found in tier.list("ns")] == [(key.digest, 10)]


def test_temporaries_of_the_dead_are_removed_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    old, young = (tmp_path / f".lmcache-ec-{name}" for name in ("old", "young"))
    for folder, age_s in ((old, 90_000), (young, 80_000)):
        folder.mkdir()
        (folder / "half").write_bytes(b"x")
        os.utime(folder, (time.time() - age_s,) * 2)
    with opened(f"fs://{tmp_path}") as tier:
        assert (old.exists(), young.exists()) == (False, True)
        (own,) = (folder for folder in tmp_path.glob(".lmcache-ec-*") if folder != young)
        own.rmdir()  # as a neighbour does when it finds it a day old
        assert tier.put(new_key(), value("a", 10)) is True
    assert list(tmp_path.glob(".lmcache-ec-*")) == [young]


# -- which remotes are served


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("azure://account/container", "azure:// cannot keep encoder outputs: .* a KV chunk of one size"),
        ("bigtable://x", "bigtable:// cannot keep encoder outputs: .* a KV chunk of one size"),
        ("plugin://hfbucket", "plugin://hfbucket cannot keep encoder outputs: .* a KV chunk of one size"),
        ("plugin://bigtable.eu", "plugin://bigtable.eu cannot keep encoder outputs: .* a KV chunk of one size"),
        ("mock://100/", "stores lengths, but no bytes"),
        ("blackhole://", "stores nothing"),
        ("audit://host:1", "use that one"),
        ("external://host:0/module/?connector_name=X", "use plugin://<name>"),
        ("plugin://redis.one", "use its own URL"),
        ("plugin://mine", "must have remote_storage_plugin.mine.module_path and remote_storage_plugin.mine.class_name"),
        ("plugin://", "plugin://<name>"),
        ("mooncakestore://host:1/", "must have mooncake_master_server_addr"),
        ("plugin://mooncakestore.one", "must have mooncake_master_server_addr"),
        ("lm://host", "must be lm://<host>:<port>"),
        ("fs://", "must be fs:///<folder>"),
        ("fs://folder/below", "must be fs:///<folder>"),
        ("lm://user:canary@host:1", "takes neither user nor password"),
        ("nfs://host/folder", r"no tier supports nfs://: did you mean fs://\?"),
        (
            "http://host/folder",
            r"no tier supports http://: must be redis://, .* \(an S3 store: s3:",
        ),
    ],
)
def test_a_remote_that_cannot_serve_is_refused_before_anything_is_opened(url: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected) as caught:
        check_remote(Remote(url))
    assert "canary" not in str(caught.value)


def test_every_scheme_of_lmcache_is_served_or_refused_for_a_reason() -> None:
    from lmcache.v1.storage_backend import connector

    adapters = connector.ConnectorManager("lm://", None, None).adapters
    schemes = {adapter.schema.partition("://")[0] for adapter in adapters} - {"plugin"}
    assert {"lm", "fs", "mooncakestore", "azure", "redis", "s3"} <= schemes
    assert schemes <= {*SCHEMES, *REFUSED}


PLUGIN = """
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

class Sound(RemoteConnector):
    kept = {}

    def __init__(self, loop, local_cpu_backend, config):
        super().__init__(local_cpu_backend.config, local_cpu_backend.metadata)
        self.backend = local_cpu_backend
        self.secret = config.extra_config["remote_storage_plugin.mine.password"]
        if self.secret == "canary-refused":
            raise RuntimeError(f"not let in with {self.secret}")

    async def exists(self, key): return key in self.kept
    def exists_sync(self, key): return key in self.kept
    async def put(self, key, held): self.kept[key] = (held.meta, bytes(held.byte_array))
    async def list(self): return [key.to_string() for key in self.kept]
    async def close(self): pass
    def remove_sync(self, key): return self.kept.pop(key, None) is not None

    async def get(self, key):
        if key not in self.kept:
            return None
        meta, data = self.kept[key]
        held = self.backend.allocate(meta.shapes, meta.dtypes, meta.fmt)
        if held is not None:
            held.byte_array.cast("B")[:] = data
        return held

class Shapes(Sound):
    kept = {}

    async def get(self, key):
        if key not in self.kept:
            return None
        held = self.backend.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt)
        if held is None:
            return None
        data = self.kept[key][1]
        view = held.byte_array.cast("B")
        read = min(len(view), len(data))
        view[:read] = data[:read]
        return self.reshape_partial_chunk(held, read)

class Forgetful(Sound):
    async def put(self, key, held): pass

class Stubborn(Sound):
    #Takes nothing but what it is tried with, and gives up nothing.
    async def put(self, key, held):
        if "probe" in key.model_name:
            await super().put(key, held)
        elif "kept" in key.model_name:
            self.kept[key] = (held.meta, bytes(held.byte_array))

    def remove_sync(self, key): return False
"""


def plugin(class_name: str, password: str = "canary") -> dict[str, object]:
    keys = {"module_path": "a_plugin_of_a_user", "class_name": class_name, "password": password}
    return {f"remote_storage_plugin.mine.{key}": text for key, text in keys.items()}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "a_plugin_of_a_user.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("a_plugin_of_a_user", None)


@pytest.mark.usefixtures("module")
def test_a_plugin_that_keeps_values_as_they_are_serves() -> None:
    key = new_key()
    extra_config = plugin("Sound")
    assert all(is_remote_key(name) for name in extra_config)
    with closing(open_remote(Remote("plugin://mine", extra_config))) as tier:
        assert tier.put(key, value("a", 5 * MIB)) is True
        assert tier.contains(key) == 5 * MIB
        assert fetch(tier, key) == value("a", 5 * MIB)
        tier.delete(key)
        assert fetch(tier, key) is None


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("class_name", ["Shapes", "Forgetful"])
def test_a_plugin_that_does_not_keep_values_as_they_are_is_refused_when_it_is_opened(class_name: str) -> None:
    with pytest.raises(ValueError, match="cannot keep encoder outputs") as caught:
        open_remote(Remote("plugin://mine", plugin(class_name)))
    assert not isinstance(caught.value, TierUnreachable)


@pytest.mark.usefixtures("module")
def test_an_entry_that_a_store_fails_to_keep_or_to_delete_is_an_error() -> None:
    key = EncoderCacheKey("kept", "picture")
    with closing(open_remote(Remote("plugin://mine", plugin("Stubborn")))) as tier:
        with pytest.raises(TierError, match="was written, but is not there"):
            tier.put(new_key(), value("a", 10))
        assert tier.put(key, value("a", 10)) is True
        with pytest.raises(TierError, match="was deleted, but is still there"):
            tier.delete(key)


@pytest.mark.usefixtures("module")
def test_no_error_shows_a_secret_of_extra_config() -> None:
    with pytest.raises(ValueError, match=r"not let in with <remote_storage_plugin\.mine\.password>") as caught:
        open_remote(Remote("plugin://mine", plugin("Sound", "canary-refused")))
    assert "canary" not in str(caught.value)


def test_neither_torch_nor_lmcache_is_imported_before_such_a_remote_is_opened() -> None:
    code = """
import sys
import lmcache_ec.store
from lmcache_ec.tiers.kinds import check_remote
from lmcache_ec.tiers.remote import Remote
check_remote(Remote("lm://host:1"))
print([name for name in ("torch", "lmcache", "vllm") if name in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
