# SPDX-License-Identifier: Apache-2.0
import errno
import logging
import select
import socket
import ssl
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.testbed.servers.authority import Authority, Identity
from benchmarks.testbed.servers.redis import (
    SERVICE,
    RedisServer,
    SentinelProcess,
    cluster,
    free_port,
    redis_server,
    wait_until,
    watched_pair,
)
from benchmarks.testbed.servers.relay import Then, relay
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.tiers.base import Tier, TierError, TierNotReady, TierUnreachable, WritesRefused
from lmcache_ec.tiers.redis import RedisTier, open_redis
from lmcache_ec.tiers.redis_client import connect, fault_of
from lmcache_ec.tiers.redis_commands import Command, packed
from lmcache_ec.tiers.redis_url import Deployment, RedisOptions, parse_redis_url
from lmcache_ec.tiers.resp import PayloadParser
from tests.examples import examples
from tests.scattering import Scattering
from tests.tiers.conformance import MIB, TierConformance, fetch, new_namespace, value

USER, PASSWORD = "canary-us%r", "canary/p@ss:w#rd?"
QUICK = RedisOptions(timeout_s=0.5, connect_timeout_s=0.5)
PATIENT = RedisOptions(timeout_s=20.0, connect_timeout_s=20.0)
"""Longer timeouts than by default: servers under test share this machine with other tests."""
TRAP = 64


def new_key() -> EncoderCacheKey:
    return EncoderCacheKey(new_namespace(), "picture")


@contextmanager
def opened(url: str, options: RedisOptions = PATIENT) -> Iterator[RedisTier]:
    tier = open_redis(url, options)
    try:
        yield tier
    finally:
        tier.close()


@contextmanager
def impatient(tier: RedisTier, timeout_s: float = 0.25) -> Iterator[None]:
    """Within the block calls end after twice `timeout_s`. A tier opened with so short a timeout would fail on a busy
    machine even for requests that the server answers."""
    patient, tier.options = tier.options, replace(tier.options, timeout_s=timeout_s)
    try:
        yield
    finally:
        tier.options = patient


def trapped(length: int) -> tuple[bytearray, memoryview]:
    """A buffer with guard bytes on both sides, which must not change, and the buffer alone."""
    around = bytearray(b"\xaa") * (length + 2 * TRAP)
    return around, memoryview(around)[TRAP : TRAP + length]


def assert_untouched(around: bytearray) -> None:
    assert around[:TRAP] == around[-TRAP:] == b"\xaa" * TRAP


def has_lengths(tier: Tier, keys: Sequence[EncoderCacheKey], lengths: Sequence[int | None]) -> bool:
    return tier.contains_each(keys) == lengths


def has_clients(watcher: redis.Redis, count: int) -> bool:
    clients: int = watcher.info("clients")["connected_clients"]
    return clients == count


def every_call(tier: Tier) -> Sequence[Callable[[], object]]:
    key, buffer = new_key(), memoryview(bytearray(100))
    return (
        lambda: tier.get_into(key, buffer),
        lambda: tier.contains(key),
        lambda: tier.put(key, buffer),
        lambda: tier.delete(key),
        lambda: list(tier.list(key.namespace)),
        lambda: list(tier.namespaces()),
        lambda: tier.remove(key.namespace),
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(scope="module")
def masters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[RedisServer]]:
    with cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Sequence[RedisServer], Sequence[SentinelProcess]]]:
    with watched_pair(tmp_path_factory.mktemp("sentinel")) as running:
        yield running


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def client_identity(authority: Authority) -> Identity:
    return authority.identity("client")


@pytest.fixture(scope="module")
def tls_port(server: RedisServer, authority: Authority) -> Iterator[int]:
    """Port of `server` for TLS clients with a certificate."""
    with relay(server.port, authority.server_context(authority.identity("server"), wants_client=True)) as front:
        yield front.port


def cluster_url(masters: Sequence[RedisServer]) -> str:
    return "redis-cluster://" + ",".join(f"127.0.0.1:{one.port}" for one in masters)


def sentinel_url(sentinels: Sequence[SentinelProcess], service: str = SERVICE) -> str:
    return "redis-sentinel://" + ",".join(f"127.0.0.1:{one.port}" for one in sentinels) + f"/{service}"


def tls_url(port: int, authority: Authority, identity: Identity | None) -> str:
    own = f"&ssl_certfile={identity.certificate}&ssl_keyfile={identity.key}" if identity else ""
    return f"rediss://127.0.0.1:{port}?ssl_ca_certs={authority.file}{own}"


class TestRedisTier(TierConformance):
    @pytest.fixture
    def tier(self, server: RedisServer) -> Iterator[RedisTier]:
        with opened(server.url, replace(PATIENT, prefix="any/pre[f]ix*\\?-")) as tier:
            yield tier


class TestRedisTierOverTls(TierConformance):
    examples = 10

    @pytest.fixture
    def tier(self, tls_port: int, authority: Authority, client_identity: Identity) -> Iterator[RedisTier]:
        with opened(tls_url(tls_port, authority, client_identity), PATIENT) as tier:
            yield tier


class TestRedisTierOnACluster(TierConformance):
    examples = 10

    @pytest.fixture
    def tier(self, masters: Sequence[RedisServer]) -> Iterator[RedisTier]:
        with opened(cluster_url(masters)) as tier:
            yield tier


class TestRedisTierBehindSentinels(TierConformance):
    examples = 10

    @pytest.fixture
    def tier(self, pair: tuple[Sequence[RedisServer], Sequence[SentinelProcess]]) -> Iterator[RedisTier]:
        with opened(sentinel_url(pair[1])) as tier:
            yield tier


def test_a_unix_socket_and_a_database_of_its_own(server: RedisServer) -> None:
    key = new_key()
    with opened(f"unix://{server.socket}?db=3") as tier, opened(server.url) as other:
        assert tier.put(key, value("a", 5000)) is True
        assert fetch(tier, key) == value("a", 5000)
        assert other.contains(key) is None
        assert server.client(db=3).get(f"lmcache-ec/{key.object_name}") == value("a", 5000)


def test_a_hit_is_one_round_trip_and_so_are_many(server: RedisServer) -> None:
    keys = [EncoderCacheKey(new_namespace(), str(number)) for number in range(8)]
    buffers = [memoryview(bytearray(3 * MIB)) for _ in keys]
    with relay(server.port) as line, opened(f"redis://127.0.0.1:{line.port}") as tier:
        for key in keys[:-1]:
            tier.put(key, value(key.identifier, 3 * MIB))
        for call, expected in (
            (lambda: tier.get_into(keys[0], buffers[0]), 3 * MIB),
            (lambda: tier.contains(keys[0]), 3 * MIB),
            (lambda: tier.contains(keys[-1]), None),
            (lambda: tier.get_each_into(list(zip(keys, buffers, strict=True))), [3 * MIB] * 7 + [None]),
            (lambda: tier.contains_each(keys), [3 * MIB] * 7 + [None]),
        ):
            before = line.turns
            assert call() == expected
            assert line.turns == before + 1
    assert all(buffer == value(key.identifier, 3 * MIB) for key, buffer in zip(keys[:-1], buffers, strict=False))


def test_many_answers_are_asked_for_in_parts_of_bounded_size(server: RedisServer) -> None:
    keys = [EncoderCacheKey(new_namespace(), str(number)) for number in range(6)]
    buffers = [memoryview(bytearray(1000)) for _ in keys]
    options = replace(PATIENT, batch_bytes=2000)
    with relay(server.port) as line, opened(f"redis://127.0.0.1:{line.port}", options) as tier:
        for key in keys:
            tier.put(key, value(key.identifier, 1000))
        before = line.turns
        assert tier.get_each_into(list(zip(keys, buffers, strict=True))) == [1000] * 6
        assert line.turns == before + 3
        assert tier.get_each_into([]) == tier.contains_each([]) == []


@pytest.mark.parametrize("stored", [0, 10, 70_000, 5 * MIB])
@pytest.mark.parametrize("asked", [0, 11, 71_000])
def test_a_wrong_length_is_reported_and_the_next_answer_is_right(server: RedisServer, stored: int, asked: int) -> None:
    """Whether the connection is kept, or closed because the value is too long to read and discard."""
    wrong, right, watcher = new_key(), new_key(), server.client()
    around, buffer = trapped(asked)
    good = memoryview(bytearray(1000))
    with opened(server.url) as tier:
        tier.put(wrong, value("wrong", stored))
        tier.put(right, value("right", 1000))
        connections = watcher.info("stats")["total_connections_received"]
        for _ in range(3):
            assert tier.get_into(wrong, buffer) == stored
            assert tier.get_into(right, good) == 1000
            assert good == value("right", 1000)
            good[:] = bytes(1000)
        assert (watcher.info("stats")["total_connections_received"] == connections) is (stored < 4 * MIB)
        assert tier.get_each_into([(wrong, buffer), (right, good), (wrong, buffer)]) == [stored, 1000, stored]
        assert good == value("right", 1000)
    assert_untouched(around)


def test_an_error_reply_is_an_error_of_its_entry_and_the_connection_goes_on(server: RedisServer) -> None:
    bad, good = new_key(), new_key()
    buffer = memoryview(bytearray(100))
    with opened(server.url) as tier:
        server.client().rpush(f"lmcache-ec/{bad.object_name}", "a list")
        tier.put(good, value("a", 100))
        connections = server.client().info("stats")["total_connections_received"]
        with pytest.raises(TierError, match="WRONGTYPE"):
            tier.get_into(bad, buffer)
        with pytest.raises(TierError, match="WRONGTYPE"):
            tier.contains(bad)
        first, second = tier.get_each_into([(bad, buffer), (good, buffer)])
        assert isinstance(first, TierError)
        assert (second, buffer) == (100, value("a", 100))
        assert list(tier.list(bad.namespace)) == []
        assert server.client().info("stats")["total_connections_received"] == connections + 1


@pytest.mark.parametrize("then", Then)
@pytest.mark.parametrize("answered", [0, 1, 9, 10, 11, 40_000, 99_999, 100_010])
def test_a_connection_that_fails_in_the_middle_of_an_answer(server: RedisServer, then: Then, answered: int) -> None:
    """If it is cut, the call is repeated on another one; if it goes silent, the call fails. The next call is right."""
    key = new_key()
    around, buffer = trapped(100_000)
    with relay(server.port) as line, opened(f"redis://127.0.0.1:{line.port}", PATIENT) as tier:
        tier.put(key, value("a", 100_000))
        line.allow(answered, then)
        if then is Then.CUT:
            assert tier.get_into(key, buffer) == 100_000
        else:
            with impatient(tier), pytest.raises(TierUnreachable, match="no answer in time") as caught:
                tier.get_into(key, buffer)
            assert caught.value.errno == errno.ETIMEDOUT
            assert tier.get_into(key, buffer) == 100_000
        assert buffer == value("a", 100_000)
        line.allow(answered, then)
        if then is Then.CUT:
            assert tier.get_each_into([(key, buffer), (new_key(), buffer[:7])]) == [100_000, None]
        else:
            with impatient(tier):
                answers = tier.get_each_into([(key, buffer), (new_key(), buffer[:7])])
            assert any(isinstance(answer, TierError) for answer in answers)
        assert tier.contains(new_key()) is None
    assert_untouched(around)


@contextmanager
def answering_gets_with(*pieces: bytes, pause_s: float = 0.0) -> Iterator[RedisTier]:
    """A tier on a fake server that answers every GET with these pieces, unlike any real server."""
    over = threading.Event()

    def serve(client: socket.socket) -> None:
        with client:
            while request := client.recv(1 << 16):
                for piece in pieces if b"\r\nGET\r\n" in request else (b":0\r\n" * request.count(b"*"),):
                    client.sendall(piece)
                    if over.wait(pause_s):
                        return

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=_quietly, args=(serve, client), daemon=True).start()

    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=accept, daemon=True).start()
    address, options = parse_redis_url(f"redis://127.0.0.1:{listener.getsockname()[1]}", PATIENT)
    tier = RedisTier(connect(address, options), address, options)
    try:
        yield tier
    finally:
        tier.close()
        over.set()
        listener.close()


def _quietly(serve: Callable[[socket.socket], None], client: socket.socket) -> None:
    try:
        serve(client)
    except OSError:
        pass


@pytest.mark.timeout(30)
def test_a_server_that_sends_a_trickle_without_end_is_abandoned() -> None:
    """Each byte arrives in time, but the call has a deadline. Without it this test would not end."""
    answer = [b"$1000000\r\n", *[b"x"] * 10_000]
    with (
        answering_gets_with(*answer, pause_s=0.05) as tier,
        impatient(tier),
        pytest.raises(TierError, match="no answer in time"),
    ):
        tier.get_into(new_key(), memoryview(bytearray(1_000_000)))


@pytest.mark.timeout(30)
def test_a_server_that_takes_only_a_little_at_a_time_is_abandoned() -> None:
    """The same as above for a write."""
    over = threading.Event()

    def serve(client: socket.socket) -> None:
        while b"\r\nSET\r\n" not in (request := client.recv(1 << 16)):
            client.sendall(b":0\r\n" * request.count(b"*"))  # the entry is not there yet
        while client.recv(1 << 17) and not over.wait(0.02):
            pass

    def accept() -> None:
        client, _ = listener.accept()
        with client:
            serve(client)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_quietly, args=(lambda _: accept(), listener), daemon=True).start()
        address, options = parse_redis_url(f"redis://127.0.0.1:{listener.getsockname()[1]}", QUICK)
        tier = RedisTier(connect(address, options), address, options)
        began = time.monotonic()
        with pytest.raises(TierUnreachable, match="no answer in time"):
            tier.put(new_key(), memoryview(bytes(128 * MIB)))
        assert time.monotonic() - began < 10, "it takes 20 s to hand over so much in this way"
        tier.close()
        over.set()


def test_unrequested_bytes_of_a_server_are_no_answer_to_the_next_request() -> None:
    """Whether they came together with an answer, or after it."""
    answer, unasked = (b"$100\r\n" + letter * 100 + b"\r\n" for letter in (b"a", b"b"))
    buffer = memoryview(bytearray(100))
    with answering_gets_with(answer + unasked) as tier:
        for _ in range(3):
            assert tier.get_into(new_key(), buffer) == 100
            assert buffer == b"a" * 100
    with answering_gets_with(answer, unasked, pause_s=0.05) as tier:
        for _ in range(3):
            assert tier.get_into(new_key(), buffer) == 100
            assert buffer == b"a" * 100
            pool = tier._client.connection_pool
            (line,) = pool._available_connections
            if not line._parser.holds_more:  # on a busy machine it may have arrived with the answer
                select.select([line._sock], [], [])


_ARGUMENT = st.one_of(st.text(), st.integers(), st.binary(), st.binary().map(lambda data: memoryview(data)))


@given(st.lists(st.lists(_ARGUMENT, max_size=4).map(lambda rest: Command(("SET", *rest))), min_size=1, max_size=5))
def test_commands_are_sent_as_redis_py_would_send_them(commands: list[Command]) -> None:
    ours, theirs = packed(commands), redis.connection.Connection().pack_commands([each.args for each in commands])
    assert b"".join(ours) == b"".join(theirs)


@pytest.mark.parametrize(
    "answer",
    [
        b"$100\r\n" + b"x" * 100 + b"yy\r\n",  # longer than announced
        b"$-7\r\n",
        b"$1x0\r\n",
        b"*1\r\n$100\r\n" + b"x" * 100 + b"\r\n",
        b":100\r\n",
        b"+OK\r\n",
        b"-MOVED nonsense\r\n",
        b"-MOVED 1 127.0.0.1:1\r\n",
        b"-\xff\xfe\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"$" + b"1" * 100_000,
    ],
)
def test_an_answer_that_makes_no_sense_is_an_error_and_touches_nothing(answer: bytes) -> None:
    around, buffer = trapped(100)
    with answering_gets_with(answer) as tier:
        for _ in range(2):
            with impatient(tier):  # part of it looks like the beginning of an answer
                with pytest.raises(TierError):
                    tier.get_into(new_key(), buffer)
                (one,) = tier.get_each_into([(new_key(), buffer)])
            assert isinstance(one, TierError)
            assert list(tier.contains_each([new_key(), new_key()])) == [None, None]
    assert_untouched(around)


@pytest.mark.parametrize("length", [10**9, 10**30])
def test_a_length_beyond_all_reason_is_reported_and_not_waited_for(length: int) -> None:
    with answering_gets_with(b"$%d\r\n" % length) as tier:
        assert tier.get_into(new_key(), memoryview(bytearray(100))) == length
        assert tier.contains(new_key()) is None


REPLIES = st.lists(
    st.one_of(
        st.tuples(st.just("value"), st.binary(max_size=200), st.integers(0, 200)),
        st.tuples(st.just("text"), st.binary(max_size=200), st.just(0)),
        st.tuples(st.just("none"), st.just(b""), st.integers(0, 200)),
        st.tuples(st.just("error"), st.just(b"ERR no"), st.integers(0, 200)),
        st.tuples(st.just("list"), st.binary(max_size=20), st.just(0)),
    ),
    max_size=12,
)


class _Line(Scattering):
    """A connection as a parser sees it: its bytes arrive in pieces of any size."""

    def __init__(self, sent: bytes, sizes: Sequence[int]) -> None:
        self._sent, self._sizes, self._socket_timeout = sent, list(sizes), 1.0
        self._sock = self

    def settimeout(self, seconds: float) -> None:
        assert seconds > 0

    def recv_into(self, view: memoryview) -> int:
        size = min(self._sizes.pop() if self._sizes else 1, len(view), len(self._sent))
        view[:size], self._sent = self._sent[:size], self._sent[size:]
        return size


@settings(deadline=None, max_examples=examples(300))
@given(REPLIES, st.lists(st.integers(1, 300), max_size=60))
def test_answers_are_read_alike_however_they_arrive(replies: list[tuple[str, bytes, int]], sizes: list[int]) -> None:
    encoded: dict[str, Callable[[bytes], bytes]] = {
        "value": lambda data: b"$%d\r\n%s\r\n" % (len(data), data),
        "text": lambda data: b"$%d\r\n%s\r\n" % (len(data), data),
        "none": lambda _: b"$-1\r\n",
        "error": lambda data: b"-%s\r\n" % data,
        "list": lambda data: b"*3\r\n:7\r\n*1\r\n$%d\r\n%s\r\n+OK\r\n" % (len(data), data),
    }
    parser = PayloadParser(socket_read_size=1)
    parser.on_connect(_Line(b"".join(encoded[kind](data) for kind, data, _ in replies), sizes))
    buffers = [trapped(len(data) if length < 100 else length) for _, data, length in replies]
    parser.targets.extend(
        None if kind in ("text", "list") else buffer for (kind, _, _), (_, buffer) in zip(replies, buffers, strict=True)
    )
    for (kind, data, _), (around, buffer) in zip(replies, buffers, strict=True):
        reply = parser.read_response()
        if kind == "value":
            assert reply == len(data)
            assert len(buffer) != len(data) or buffer == data
        elif kind == "error":
            assert isinstance(reply, redis.ResponseError)
        else:
            assert reply == {"text": data, "none": None, "list": [7, [data], b"OK"]}[kind]
        assert_untouched(around)


def test_a_frozen_server_is_an_error_in_time_and_none_once_it_resumes(server: RedisServer) -> None:
    with closing(wait_until("it opens in time", lambda: open_redis(server.url, QUICK))) as tier:
        large = new_key()
        server.freeze()
        try:
            calls: list[Callable[[], object]] = [*every_call(tier), lambda: tier.put(large, value("a", 32 * MIB))]
            for call in calls:
                with pytest.raises(TierUnreachable, match="no answer in time") as caught:
                    call()
                assert caught.value.errno == errno.ETIMEDOUT
        finally:
            server.thaw()
        for call in every_call(tier):
            wait_until("it is answered", lambda: (call(), True)[1])  # noqa: B023
        assert wait_until("it is answered", lambda: (tier.contains(large),)) == (None,)


def test_a_killed_server_is_an_error_and_none_once_it_is_back(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, opened(server.url) as tier:
        with ThreadPoolExecutor(4) as threads:  # several connections, all of which will be dead
            list(threads.map(lambda _: [call() for call in every_call(tier)], range(4)))
        server.kill()
        for call in every_call(tier):
            with pytest.raises(TierUnreachable, match="nothing listens there"):
                call()
        server.start()
        for _ in range(4):
            for call in every_call(tier):
                call()


def test_a_full_server_refuses_the_whole_entry_and_the_error_names_the_reason(tmp_path: Path) -> None:
    limit = ("--maxmemory", "6mb", "--maxmemory-policy", "noeviction")
    with redis_server(tmp_path, *limit) as server, opened(server.url) as tier:
        stored: list[EncoderCacheKey] = []

        def fill() -> None:
            for number in range(12):
                key = EncoderCacheKey("ns", str(number))
                tier.put(key, value(key.identifier, MIB))
                stored.append(key)

        with pytest.raises(WritesRefused, match="full") as caught:
            fill()
        assert caught.value.errno == errno.ENOSPC
        assert {found.digest: found.length for found in tier.list("ns")} == {key.digest: MIB for key in stored}
        assert stored
        assert fetch(tier, stored[-1]) == bytes(value(stored[-1].identifier, MIB))


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("LOADING Valkey is loading the dataset in memory", TierNotReady),
        ("MASTERDOWN Link with MASTER is down", TierNotReady),
        ("CLUSTERDOWN The cluster is down", TierNotReady),
        ("BUSY Valkey is busy running a script", TierNotReady),
        ("READONLY You can't write against a read only replica.", WritesRefused),
        ("OOM command not allowed when used memory > 'maxmemory'.", WritesRefused),
        ("NOPERM User reader has no permissions to run the 'set' command", WritesRefused),
        ("MISCONF Errors writing to the AOF file", WritesRefused),
        ("NOREPLICAS Not enough good replicas to write.", WritesRefused),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", TierError),
        ("ERR something else", TierError),
        ("NOAUTH Authentication required.", TierUnreachable),
        ("WRONGPASS invalid username-password pair", TierUnreachable),
    ],
)
def test_an_error_shows_whether_it_concerns_the_entry_the_store_or_its_writes(line: str, kind: type[TierError]) -> None:
    assert fault_of(PayloadParser.parse_error(line)) is kind


def test_an_entry_that_the_server_evicts_is_a_plain_miss_and_listing_does_not_count_as_a_use(tmp_path: Path) -> None:
    limit = ("--maxmemory", "12mb", "--maxmemory-policy", "allkeys-lru")
    with redis_server(tmp_path, *limit) as server, opened(server.url) as tier:
        keys = [EncoderCacheKey("ns", str(number)) for number in range(24)]
        for key in keys:
            assert tier.put(key, value(key.identifier, MIB)) is True
        present = [key for key in keys if fetch(tier, key) is not None]
        assert 0 < len(present) < len(keys)
        client, idle = server.client(), ("OBJECT", "IDLETIME", f"lmcache-ec/{present[0].object_name}")
        wait_until("a second has passed without use", lambda: client.execute_command(*idle) >= 1)
        (listed,) = [found for found in tier.list("ns") if found.digest == present[0].digest]
        assert client.execute_command(*idle) >= 1
        assert listed.modified <= client.time()[0]
        wait_until("another has", lambda: client.execute_command(*idle) >= 2)
        (use,) = tier.namespaces()
        assert client.execute_command(*idle) >= 2
        assert (use.namespace, use.entries, use.bytes) == ("ns", len(present), len(present) * MIB)
        assert use.used is not None
        assert use.used <= client.time()[0]


def test_thousands_of_entries_are_counted_and_removed_in_steps_and_foreign_keys_stay(tmp_path: Path) -> None:
    """Even if the server evicts by frequency: then times of use are unknown."""
    with redis_server(tmp_path) as server, opened(server.url) as tier:
        client = server.client()
        keys = [EncoderCacheKey("ns", str(number)) for number in range(3000)]
        client.mset({f"lmcache-ec/{key.object_name}": "x" * 7 for key in keys})
        tier.put(EncoderCacheKey("ns-2", "picture"), value("a", 11))
        strangers = {"other/" + keys[0].object_name, "lmcache-ec/ns/README", "lmcache-ec/NS/" + keys[0].object_name[3:]}
        client.mset(dict.fromkeys(strangers, "not ours"))
        uses = {use.namespace: use for use in tier.namespaces()}
        assert {name: (use.entries, use.bytes) for name, use in uses.items()} == {"ns": (3000, 21_000), "ns-2": (1, 11)}
        assert all(use.used is not None and use.written is None for use in uses.values())
        client.config_set("maxmemory-policy", "allkeys-lfu")
        assert {(use.namespace, use.entries, use.used) for use in tier.namespaces()} == {
            ("ns", 3000, None),
            ("ns-2", 1, None),
        }
        client.config_resetstat()
        assert tier.remove("ns") == 3000
        asked = client.info("commandstats")
        assert asked["cmdstat_unlink"]["calls"] == 3000
        assert asked["cmdstat_scan"]["calls"] >= 3
        assert not {"cmdstat_keys", "cmdstat_del", "cmdstat_flushdb"} & asked.keys()
        assert {name.decode() for name in client.scan_iter() if b"/ns-2/" not in name} == strangers


def test_an_entry_lives_as_long_as_is_configured_whoever_reads_it(server: RedisServer) -> None:
    key, other = new_key(), new_key()
    client, name = server.client(), f"lmcache-ec/{key.object_name}"
    with opened(server.url, replace(PATIENT, ttl_s=600.0)) as tier, opened(server.url) as eternal:
        tier.put(key, value("a", 100))
        eternal.put(other, value("a", 100))
        assert client.pttl(f"lmcache-ec/{other.object_name}") == -1
        assert 0 < client.pttl(name) <= 600_000
        client.pexpire(name, 300_000)
        assert fetch(tier, key) == value("a", 100)
        assert client.pttl(name) <= 300_000
        client.pexpire(name, 1)
        wait_until("the entry has expired", lambda: tier.contains(key) is None)
        assert tier.put(key, value("b", 100)) is True


def test_an_entry_over_the_limit_is_refused_before_anything_is_sent(server: RedisServer) -> None:
    with opened(server.url, replace(PATIENT, max_entry_bytes=1000)) as tier:
        assert tier.put(new_key(), value("a", 1000)) is True
        watcher = server.client()
        before = watcher.info("stats")["total_commands_processed"]
        with pytest.raises(TierError, match="1001 bytes does not fit: the Redis tier takes 1000") as caught:
            tier.put(new_key(), value("a", 1001))
        assert caught.value.errno == errno.EFBIG
        assert watcher.info("stats")["total_commands_processed"] == before + 1


def test_an_entry_that_is_there_already_is_not_sent_again(server: RedisServer) -> None:
    key = new_key()
    with opened(server.url) as tier:
        tier.put(key, value("a", MIB))
        before = server.client().info("stats")["total_net_input_bytes"]
        assert tier.put(key, value("b", MIB)) is False
        assert server.client().info("stats")["total_net_input_bytes"] < before + MIB // 2


def test_connections_are_bounded_and_given_back(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        watcher = server.client()
        with opened(server.url, replace(PATIENT, connections=2)) as tier:
            keys = [EncoderCacheKey("ns", str(number)) for number in range(40)]

            def use(key: EncoderCacheKey) -> bool:
                tier.put(key, value(key.identifier, 100_000))
                return fetch(tier, key) == value(key.identifier, 100_000)

            with ThreadPoolExecutor(12) as threads:
                assert all(threads.map(use, keys))
            assert watcher.info("clients")["connected_clients"] <= 1 + 2
        wait_until("connections are closed", lambda: watcher.info("clients")["connected_clients"] == 1)


def test_a_call_that_finds_no_connection_free_is_an_error_in_time(server: RedisServer) -> None:
    with opened(server.url, replace(PATIENT, connections=1)) as tier:
        server.freeze()
        try:
            with impatient(tier), ThreadPoolExecutor(6) as threads:
                for failed in [threads.submit(tier.contains, new_key()) for _ in range(6)]:
                    assert isinstance(failed.exception(), TierError)
        finally:
            server.thaw()
        assert tier.contains(new_key()) is None


def slot_of(key: EncoderCacheKey, server: RedisServer) -> int:
    return int(server.client().execute_command("CLUSTER KEYSLOT", f"lmcache-ec/{key.object_name}"))


def owner_of(slot: int, masters: Sequence[RedisServer]) -> RedisServer:
    for first, last, (_, port, *_), *_ in masters[0].client().execute_command("CLUSTER SLOTS"):
        if first <= slot <= last:
            return next(server for server in masters if server.port == port)
    raise AssertionError(slot)


def node_id(server: RedisServer) -> str:
    return bytes(server.client().execute_command("CLUSTER MYID")).decode()


def test_on_a_cluster_redirects_are_followed_by_every_call(masters: Sequence[RedisServer]) -> None:
    """ASK while a slot migrates to another server, MOVED once it is there."""
    key, missing = new_key(), new_key()
    buffer = memoryview(bytearray(100))
    with opened(cluster_url(masters)) as tier:
        slot = slot_of(key, masters[0])
        old = owner_of(slot, masters)
        new = next(server for server in masters if server is not old)
        new.client().execute_command("CLUSTER SETSLOT", slot, "IMPORTING", node_id(old))
        old.client().execute_command("CLUSTER SETSLOT", slot, "MIGRATING", node_id(new))
        for _ in range(2):
            assert tier.put(key, value("a", 100)) is True
            assert tier.get_into(key, buffer) == 100
            assert buffer == value("a", 100)
            assert tier.contains(key) == 100
            assert tier.get_each_into([(key, buffer), (missing, buffer)]) == [100, None]
            assert tier.contains_each([missing, key]) == [None, 100]
            tier.delete(key)
            assert tier.put(key, value("b", 100)) is True
            assert tier.remove(key.namespace) == 1
            assert tier.contains(key) is None
            for server in (new, old):
                server.client().execute_command("CLUSTER SETSLOT", slot, "NODE", node_id(new))
        tier.put(key, value("a", 100))
        for server in masters:
            server.client().execute_command("CLUSTER SETSLOT", slot, "NODE", node_id(new))
    with opened(cluster_url(masters)) as tier:
        assert [found.digest for found in tier.list(key.namespace)] == [key.digest]


def test_a_lost_server_of_a_cluster_costs_only_the_entries_it_had(masters: Sequence[RedisServer]) -> None:
    """Killed or frozen: the others answer in the same call, which asks all of them in parallel."""
    namespace = new_namespace()
    keys = [EncoderCacheKey(namespace, str(number)) for number in range(30)]
    with opened(cluster_url(masters)) as tier:
        for key in keys:
            tier.put(key, value(key.identifier, 100))
        victim = masters[1]
        keys.sort(key=lambda key: owner_of(slot_of(key, masters[0]), masters) is not victim)  # it is asked first
        wanted = [(key, memoryview(bytearray(100))) for key in keys]
        lost = [owner_of(slot_of(key, masters[0]), masters) is victim for key in keys]
        assert 0 < sum(lost) < len(keys)
        assert tier.get_each_into(wanted) == [100] * 30
        for hurt, heal, keeps in ((victim.freeze, victim.thaw, True), (victim.kill, victim.start, False)):
            hurt()
            try:
                with impatient(tier, 1.0):  # it applies to the others, too
                    both = tier.get_each_into(wanted), tier.contains_each(keys)
                for answers in both:
                    assert [isinstance(answer, TierError) for answer in answers] == lost
                    assert {answer for answer, missing in zip(answers, lost, strict=True) if not missing} == {100}
            finally:
                heal()
            back = [100 if keeps or not missing else None for missing in lost]
            wait_until("the server is back", partial(has_lengths, tier, keys, back))
            assert tier.get_each_into(wanted) == back
        wait_until_whole(masters)


def test_on_a_cluster_the_entries_of_a_silent_server_are_asked_of_its_successor(masters: Sequence[RedisServer]) -> None:
    victim, successor, witness = masters[1], masters[0], masters[2]
    keys = (EncoderCacheKey("ns", str(number)) for number in range(1000))
    key = next(key for key in keys if owner_of(slot_of(key, masters[0]), masters) is victim)
    slot = slot_of(key, masters[0])
    opens = partial(open_redis, cluster_url(masters), QUICK)
    with closing(wait_until("it opens in time", opens)) as tier:
        victim.freeze()
        try:
            for server in (successor, witness):
                server.client().execute_command("CLUSTER SETSLOT", slot, "NODE", node_id(successor))

            def answered() -> bool:
                (answer,) = tier.contains_each([key])
                return answer is None

            wait_until("the successor answers", answered)
        finally:
            victim.thaw()
    wait_until_whole(masters)
    for server in masters:
        server.client().execute_command("CLUSTER SETSLOT", slot, "NODE", node_id(victim))


def wait_until_whole(masters: Sequence[RedisServer]) -> None:
    def whole() -> bool:
        infos = [server.client().execute_command("CLUSTER INFO") for server in masters]
        return all(info["cluster_state"] == "ok" and info["cluster_slots_fail"] == "0" for info in infos)

    wait_until("the Cluster is whole again", whole)


def test_on_a_cluster_one_server_of_the_url_is_enough_and_every_connection_is_given_back(
    masters: Sequence[RedisServer],
) -> None:
    watchers = [server.client() for server in masters]
    before = [watcher.info("clients")["connected_clients"] for watcher in watchers]
    with opened(f"redis-cluster://127.0.0.1:{free_port()},127.0.0.1:{masters[2].port}") as tier:
        for key in [EncoderCacheKey("ns", str(number)) for number in range(30)]:
            assert tier.contains(key) is None
        for watcher, idle in zip(watchers, before, strict=True):
            assert watcher.info("clients")["connected_clients"] > idle
    for watcher, idle in zip(watchers, before, strict=True):
        wait_until("connections are closed", partial(has_clients, watcher, idle))


def test_behind_sentinels_an_answer_that_came_too_late_is_discarded(
    pair: tuple[Sequence[RedisServer], Sequence[SentinelProcess]],
) -> None:
    """Two entries of the same length. The server resumes while the second is asked for."""
    servers, sentinels = pair
    first, second, buffer = new_key(), new_key(), memoryview(bytearray(100))
    master = next(server for server in servers if server.client().role()[0] == b"master")
    with opened(sentinel_url(sentinels)) as tier:
        tier.put(first, value("first", 100))
        tier.put(second, value("second", 100))
    with opened(sentinel_url(sentinels)) as tier, ThreadPoolExecutor(1) as threads:

        def second_is_right() -> bool:
            try:
                assert tier.get_into(second, buffer) == 100
            except TierError:
                return False
            assert buffer == value("second", 100)
            return True

        master.freeze()
        try:
            with impatient(tier), pytest.raises(TierError, match="no answer in time"):
                tier.get_into(first, buffer)
            late = threads.submit(second_is_right)
        finally:
            master.thaw()
        late.result()
        wait_until("there is an answer", second_is_right)


def test_behind_sentinels_a_new_master_is_found_and_a_silent_sentinel_passed_over(
    pair: tuple[Sequence[RedisServer], Sequence[SentinelProcess]],
) -> None:
    (first, second), sentinels = pair
    key, buffer, passing_over = new_key(), memoryview(bytearray(100)), replace(PATIENT, connect_timeout_s=1.0)
    with opened(sentinel_url(sentinels), passing_over) as tier:
        tier.put(key, value("a", 100))
        master = first if first.client().role()[0] == b"master" else second
        assert master.client().wait(1, 5000) == 1
        master.kill()
        with pytest.raises(TierError):
            tier.get_into(key, buffer)
        with sentinels[0].impatient(), sentinels[1].impatient():
            wait_until("there is a new master", lambda: tier.get_into(key, buffer) == 100)
        assert buffer == value("a", 100)
        assert tier.put(new_key(), value("b", 100)) is True
        master.start()
        wait_until("the old master is in its new place", lambda: master.client().role()[0] == b"slave")
        sentinels[0].freeze()
        try:
            opens = partial(open_redis, sentinel_url(sentinels), passing_over)
            with closing(wait_until("the other one is asked", opens)) as another:
                assert wait_until("it is asked again", lambda: another.get_into(key, buffer)) == 100
        finally:
            sentinels[0].thaw()


@pytest.mark.slow
def test_a_master_that_was_replaced_is_abandoned(
    pair: tuple[Sequence[RedisServer], Sequence[SentinelProcess]],
) -> None:
    """It lives on as a replica, and would refuse writes."""
    servers, (_, sentinel) = pair
    with opened(sentinel_url([sentinel])) as tier:
        tier.put(new_key(), value("a", 100))
        master, replica = servers if servers[0].client().role()[0] == b"master" else servers[::-1]
        wait_until("the replica is in step", lambda: replica.client().info("replication")["master_link_status"] == "up")
        client = sentinel.client()
        wait_until("there is a failover", lambda: client.sentinel_failover(SERVICE))
        wait_until("the old master is a replica", lambda: master.client().role()[0] == b"slave")
        wait_until(
            "the new master is known", lambda: client.sentinel_get_master_addr_by_name(SERVICE)[1] == replica.port
        )
        assert tier.put(new_key(), value("b", 100)) is True


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Admits the canary's user, and one without any rights here."""
    with redis_server(tmp_path_factory.mktemp("guarded"), "--requirepass", "something else") as running:
        client = running.client(password="something else")
        client.acl_setuser(USER, enabled=True, passwords=[f"+{PASSWORD}"], keys=["lmcache-ec/*"], categories=["+@all"])
        client.acl_setuser("nobody", enabled=True, passwords=[f"+{PASSWORD}"], keys=["mine/*"], categories=["+@all"])
        yield running


def with_credentials(url: str, user: str = USER, password: str = PASSWORD) -> str:
    return url.replace("://", f"://{quote(user, safe='')}:{quote(password, safe='')}@", 1)


def test_user_and_password_are_taken_from_the_url_or_from_the_options(guarded: RedisServer) -> None:
    for url, options in (
        (with_credentials(guarded.url), PATIENT),
        (guarded.url, replace(PATIENT, username=USER, password=PASSWORD)),
        (f"{guarded.url}?username={quote(USER)}&password={quote(PASSWORD)}", PATIENT),
        (with_credentials(f"unix://{guarded.socket}"), PATIENT),
    ):
        with opened(url, options) as tier:
            key = new_key()
            assert tier.put(key, value("a", 100)) is True
            assert list(tier.list(key.namespace))


Opening = Callable[[pytest.FixtureRequest], str]


def _relay_to(request: pytest.FixtureRequest, context: ssl.SSLContext | None) -> int:
    front = relay(request.getfixturevalue("server").port, context)
    port = front.__enter__().port
    request.addfinalizer(lambda: front.__exit__(None, None, None))
    return port


def _wrong_password(request: pytest.FixtureRequest) -> str:
    return with_credentials(request.getfixturevalue("guarded").url, password=f"wrong {PASSWORD}")


def _no_password(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("guarded").url)


def _no_rights(request: pytest.FixtureRequest) -> str:
    return with_credentials(request.getfixturevalue("guarded").url, user="nobody")


def _unknown_host(_: pytest.FixtureRequest) -> str:
    return with_credentials("redis://no-such-host.invalid")


def _nobody_listens(_: pytest.FixtureRequest) -> str:
    return with_credentials(f"redis://127.0.0.1:{free_port()}")


def _no_socket(_: pytest.FixtureRequest) -> str:
    return with_credentials("unix:///no/such/socket")


def _silent(request: pytest.FixtureRequest) -> str:
    listener = socket.create_server(("127.0.0.1", 0))
    request.addfinalizer(listener.close)
    return with_credentials(f"redis://127.0.0.1:{listener.getsockname()[1]}")


def _another_authority(request: pytest.FixtureRequest) -> str:
    other = Authority(request.getfixturevalue("tmp_path"), "another authority")
    return with_credentials(
        tls_url(_relay_to(request, other.server_context(other.identity("server"))), *_ours(request))
    )


def _another_address(request: pytest.FixtureRequest) -> str:
    authority = request.getfixturevalue("authority")
    context = authority.server_context(authority.identity("elsewhere", "192.0.2.1"))
    return with_credentials(tls_url(_relay_to(request, context), *_ours(request)))


def _no_client_certificate(request: pytest.FixtureRequest) -> str:
    return with_credentials(tls_url(request.getfixturevalue("tls_port"), request.getfixturevalue("authority"), None))


def _tls_to_a_plain_server(request: pytest.FixtureRequest) -> str:
    return with_credentials(tls_url(request.getfixturevalue("server").port, *_ours(request)))


def _plain_to_a_tls_server(request: pytest.FixtureRequest) -> str:
    return with_credentials(f"redis://127.0.0.1:{request.getfixturevalue('tls_port')}")


def _no_such_file(request: pytest.FixtureRequest) -> str:
    return f"rediss://127.0.0.1:{request.getfixturevalue('tls_port')}?ssl_ca_certs=/no/such/file"


def _no_certificate(request: pytest.FixtureRequest) -> str:
    file = request.getfixturevalue("authority").file
    return f"rediss://127.0.0.1:{request.getfixturevalue('tls_port')}?ssl_ca_certs={file}&ssl_certfile={file}"


def _ours(request: pytest.FixtureRequest) -> tuple[Authority, Identity]:
    return request.getfixturevalue("authority"), request.getfixturevalue("client_identity")


def _cluster_as_a_single_server(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("masters")[0].url)


def _no_such_database(request: pytest.FixtureRequest) -> str:
    return f"redis://127.0.0.1:{request.getfixturevalue('server').port}/4711"


def _single_server_as_a_cluster(request: pytest.FixtureRequest) -> str:
    return cluster_url([request.getfixturevalue("server")])


def _no_cluster(_: pytest.FixtureRequest) -> str:
    return with_credentials(f"redis-cluster://127.0.0.1:{free_port()},127.0.0.1:{free_port()}")


def _unknown_service(request: pytest.FixtureRequest) -> str:
    return sentinel_url(request.getfixturevalue("pair")[1], "another-service")


def _service_not_named(request: pytest.FixtureRequest) -> str:
    return sentinel_url(request.getfixturevalue("pair")[1], "").removesuffix("/")


def _single_server_as_a_sentinel(request: pytest.FixtureRequest) -> str:
    return f"redis-sentinel://127.0.0.1:{request.getfixturevalue('server').port}/{SERVICE}"


def _sentinel_as_a_single_server(request: pytest.FixtureRequest) -> str:
    return f"redis://127.0.0.1:{request.getfixturevalue('pair')[1][0].port}"


def _no_sentinel(_: pytest.FixtureRequest) -> str:
    return with_credentials(f"redis-sentinel://127.0.0.1:{free_port()}")


@pytest.mark.parametrize(
    ("store", "expected"),
    [
        (_wrong_password, "authentication failed"),
        (_no_password, "authentication failed: it requires a password, but none is configured"),
        (_no_rights, "no permission"),
        (_unknown_host, "no-such-host.invalid:6379: the host name does not resolve"),
        (_nobody_listens, "nothing listens there"),
        (_no_socket, "/no/such/socket: nothing listens there"),
        (_silent, "no answer in time"),
        (_another_authority, "TLS: the server's certificate is refused: .*certificate"),
        (_another_address, "TLS: the server's certificate is refused: .*127.0.0.1"),
        (_no_client_certificate, "(refuses|requires?) .*client('s)? certificate"),
        (_tls_to_a_plain_server, "TLS handshake failed: does the server speak TLS"),
        (_plain_to_a_tls_server, "rediss://"),
        (_no_such_file, "TLS: ssl_ca_certs /no/such/file cannot be used: No such file"),
        (_no_certificate, "TLS: ssl_certfile .*authority.pem cannot be used: no PEM, no key for it"),
        (_cluster_as_a_single_server, "redis-cluster://"),
        (_no_such_database, "no database 4711: name a lower number in the URL, or raise `databases`"),
        (_single_server_as_a_cluster, "this is not a Cluster: for a single server use redis://"),
        (_no_cluster, "nothing listens there"),
        (_unknown_service, "know no running master of this service: another-service$"),
        (_service_not_named, r"of this service: mymaster \(the default where the URL has no /SERVICE\)"),
        (_single_server_as_a_sentinel, "a Redis server, not a Sentinel: for a single server use redis://"),
        (_sentinel_as_a_single_server, "for a Sentinel use redis-sentinel://"),
        (_no_sentinel, "nothing listens there"),
    ],
    ids=lambda given: given.__name__ if callable(given) else "",
)
def test_a_mistake_is_reported_at_the_opening_in_one_line_without_credentials(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, store: Opening, expected: str
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(ValueError, match=expected) as caught:
        open_redis(store(request), QUICK if store in (_silent, _tls_to_a_plain_server) else PATIENT)
    assert "\n" not in str(caught.value)
    assert_no_canary("".join(traceback.format_exception(caught.value)) + caplog.text)


def assert_no_canary(text: str) -> None:
    for secret in (USER, PASSWORD):
        for written in (secret, quote(secret), quote(secret, safe="")):
            assert written not in text


def test_credentials_are_in_no_error_no_repr_and_no_log(guarded: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    texts = []
    options = RedisOptions(password=PASSWORD, sentinel_password=PASSWORD, key_password=PASSWORD, username=USER)
    with opened(with_credentials(guarded.url)) as tier:
        texts += [repr(options), repr(parse_redis_url(with_credentials(guarded.url), options)), repr(tier), str(tier)]
        admin = guarded.client(password="something else")
        admin.acl_setuser(USER, reset_passwords=True)
        admin.client_kill_filter(skipme=True)
        for call in every_call(tier):
            with pytest.raises(TierUnreachable, match="authentication failed") as caught:
                call()
            texts.append("".join(traceback.format_exception(caught.value)))
        admin.acl_setuser(USER, enabled=True, passwords=[f"+{PASSWORD}"])
        for call in every_call(tier):
            call()
    assert_no_canary("\n".join(texts) + caplog.text)


def test_a_server_that_repeats_the_credentials_in_its_error_does_not_make_us_repeat_them(tmp_path: Path) -> None:
    """As a server without AUTH does."""
    with redis_server(tmp_path, "--rename-command", "AUTH", "") as server:
        with pytest.raises(ValueError, match="AUTH") as caught:
            open_redis(with_credentials(server.url))
        assert_no_canary("".join(traceback.format_exception(caught.value)))


@pytest.mark.parametrize(
    ("url", "deployment", "servers", "tls"),
    [
        ("redis://h", Deployment.SINGLE, [("h", 6379)], False),
        ("valkey://h:1/2", Deployment.SINGLE, [("h", 1)], False),
        ("resp://u:p@h:1", Deployment.SINGLE, [("h", 1)], False),
        ("rediss://[::1]:7", Deployment.SINGLE, [("::1", 7)], True),
        ("redis-sentinel://a,b:2/pictures", Deployment.SENTINEL, [("a", 26379), ("b", 2)], False),
        ("redis-cluster://u:p@a,b:2", Deployment.CLUSTER, [("a", 6379), ("b", 2)], False),
        ("rediss-cluster://a", Deployment.CLUSTER, [("a", 6379)], True),
        ("unix:///run/redis%20socket?db=2", Deployment.SOCKET, [], False),
    ],
)
def test_urls_that_are_accepted(url: str, deployment: Deployment, servers: list[tuple[str, int]], tls: bool) -> None:
    address, options = parse_redis_url(url, RedisOptions(ttl_s=5))
    assert (address.deployment, list(address.servers), address.tls) == (deployment, servers, tls)
    assert address.path == ("/run/redis socket" if deployment is Deployment.SOCKET else address.path)
    assert options.database == (2 if url.endswith(("/2", "db=2")) else 0)
    assert (options.username, options.password) == (("u", "p") if "u:p@" in url else (None, None))
    assert options.service == ("pictures" if "pictures" in url else "mymaster")
    assert options.ttl_s == 5


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h", "redis, valkey"),
        ("redis://u:canary#x@h", "write %23 for #"),
        ("redis://u:canary/x@h", "%2F for /"),
        ("redis://u:canary?x@h", "%3F for [?]"),
        ("unix://u:canary/x@/run/socket", "%40 for @"),
        ("redis://u:canary@h:port", "host:port"),
        ("redis://u:canary@h:70000", "from 1 to 65535"),
        ("redis://u:canary@", "host:port"),
        ("redis://u:canary@[::1", "cannot be read"),
        ("redis://u:canary@a,b", "several servers"),
        ("redis://u:canary@h/one", "number of a database"),
        ("redis://u:canary@h?db=-1", "database of a Redis tier: must be 0 or more, not -1"),
        ("redis://u:canary@h?max_connections=many", "max_connections: must be a number"),
        (
            "redis://u:canary@h?socket_timeout=0",
            "timeout_s of a Redis tier: must be a positive number of seconds, not 0.0",
        ),
        ("redis://u:canary@h?canary=1", "unknown parameter: must be among db, "),
        ("redis://u:canary@h?pasword_file=/x", r"unknown parameter pasword_file: did you mean password_file\?"),
        ("rediss://u:canary@h?ssl_check_hostname=maybe", "ssl_check_hostname: must be true or false"),
        ("rediss://u:canary@h?ssl_cert_reqs=maybe", "ssl_cert_reqs: must be required or none"),
        ("redis-cluster://u:canary@h/1", "no database 1"),
        ("unix://u:canary@h/run/socket", "unix:///path"),
    ],
)
def test_a_refused_url_is_explained_and_not_quoted(url: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected) as caught:
        parse_redis_url(url, RedisOptions())
    assert "canary" not in "".join(traceback.format_exception(caught.value)).replace(url, "")


@pytest.mark.parametrize("option", ["timeout_s", "connect_timeout_s", "ttl_s", "max_entry_bytes", "connections"])
def test_impossible_options_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} of a Redis tier: must be a positive number.*, not -1"):
        RedisOptions(**{option: cast(Any, -1)})


def test_the_tier_brings_along_no_torch_and_the_store_process_no_redis_until_it_has_one() -> None:
    code = "import sys, {0}; print(sorted({{'torch', 'vllm', 'lmcache', 'redis', 'numpy'}} & set(sys.modules)))"
    for module, brought in (("lmcache_ec.tiers.redis", ["redis"]), ("lmcache_ec.store", [])):
        done = subprocess.run([sys.executable, "-c", code.format(module)], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(brought)


@pytest.mark.parametrize("user", ["", "somebody@"])
def test_a_password_that_is_replaced_in_its_file_is_used_by_the_next_connection(tmp_path: Path, user: str) -> None:
    file, key = tmp_path / "password", new_key()
    name = user.strip("@") or "default"

    def rotate(password: str) -> None:
        running.client().execute_command("ACL", "SETUSER", name, "on", "resetpass", f">{password}", "~*", "+@all")
        file.write_text(f"{password}\n")

    with redis_server(tmp_path / "redis") as running:
        admin = running.client()
        admin.execute_command("ACL", "SETUSER", "admin", "on", ">admin", "~*", "+@all")
        running.client = lambda **_: redis.Redis(port=running.port, username="admin", password="admin")  # type: ignore[method-assign]
        rotate("canary-one")
        with opened(f"redis://{user}127.0.0.1:{running.port}?password_file={file}") as tier:
            tier.put(key, value("a", 100))
            rotate("canary-two")
            running.client().client_kill_filter(_type="normal", skipme=True)
            assert fetch(tier, key) == value("a", 100)
            file.write_text("canary-wrong")
            running.client().client_kill_filter(_type="normal", skipme=True)
            with pytest.raises(TierUnreachable, match="authentication failed") as caught:
                tier.contains(key)
            assert "canary" not in str(caught.value)
            rotate("canary-three")
            assert tier.contains(key) == 100
        with pytest.raises(ValueError, match="cannot be read: "):
            open_redis(f"{running.url}?password_file={tmp_path / 'none'}")
        with pytest.raises(ValueError, match="must be given once"):
            open_redis(f"redis://:secret@127.0.0.1:{running.port}?password_file={file}")
