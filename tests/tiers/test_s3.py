# SPDX-License-Identifier: Apache-2.0
import errno
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, repeat
from pathlib import Path

import pytest
import trustme
from botocore.loaders import JSONFileLoader

from benchmarks.testbed.servers.s3_front import s3_front
from benchmarks.testbed.servers.seaweed import Seaweed, seaweed
from benchmarks.testbed.waiting import wait_until
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.presence import PresenceWriter
from lmcache_ec.tiers import s3, s3_access
from lmcache_ec.tiers.base import TierError, TierNotReady, TierUnreachable, WritesRefused
from lmcache_ec.tiers.lane import Habits, Lane
from lmcache_ec.tiers.remote import Lookup
from lmcache_ec.tiers.s3 import S3Tier
from lmcache_ec.tiers.s3_clock import StoreClock
from lmcache_ec.tiers.s3_url import S3Options, s3_options
from tests.tiers.conformance import MIB, TierConformance, fetch, new_namespace, value

open_s3 = partial(s3.open_s3, timeout_s=20.0)
"""With a longer timeout than the default: the server under test shares this machine with other tests."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a certificate authority (`ca.pem`) that no system trusts."""
    folder, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "certificate.pem")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, authority: Path) -> Iterator[Seaweed]:
    tls_files = (authority / "certificate.pem", authority / "key.pem")
    with seaweed(tmp_path_factory.mktemp("s3") / "data", tls_files) as running:
        yield running


@pytest.fixture(autouse=True)
def environment(server: Seaweed, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The server's credentials, without any of this machine's settings."""
    for name in list(os.environ):
        if name.startswith("AWS_") or name.lower().endswith("_proxy") or name == "REQUESTS_CA_BUNDLE":
            monkeypatch.delenv(name)
    for name, text in server.environment.items():
        monkeypatch.setenv(name, text)
    return server.environment


@pytest.fixture
def url(server: Seaweed) -> str:
    """A separate prefix for each test."""
    return f"s3://{server.bucket}/{uuid.uuid4().hex}?endpoint={server.endpoint}"


@pytest.fixture
def tier(url: str) -> S3Tier:
    return open_s3(url)


def key(identifier: str, namespace: str = "ns") -> EncoderCacheKey:
    return EncoderCacheKey(namespace, identifier)


def object_key(url: str, entry: EncoderCacheKey) -> str:
    return f"{s3_options(url).prefix}/{entry.object_name}"


@pytest.fixture(scope="module")
def shared_tier(server: Seaweed) -> S3Tier:
    keys = {"aws_access_key_id": server.access_key_id, "aws_secret_access_key": server.secret_access_key}
    return open_s3(f"s3://{server.bucket}/conformance?endpoint={server.endpoint}", keys)


class TestS3Tier(TierConformance):
    @pytest.fixture
    def tier(self, shared_tier: S3Tier) -> S3Tier:
        return shared_tier


# -- faults of the server and of the network


class Relay:
    """A proxy between a client and the server that counts, changes and cuts the traffic, on its own threads."""

    def __init__(self, upstream: str) -> None:
        host, port = upstream.removeprefix("http://").split(":")
        self._upstream = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests = bytearray()
        self.answered_bytes = 0
        self.cut_after: int | None = None  # response bytes; then the connection is closed
        self.change: Callable[[bytes], bytes] = bytes
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            server = socket.create_connection(self._upstream)
            threading.Thread(target=self._pass, args=(client, server, self._request), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, self._answer), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, edit: Callable[[bytes], bytes]) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(edit(data))
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _request(self, data: bytes) -> bytes:
        self.requests += data
        return self.change(data)

    def _answer(self, data: bytes) -> bytes:
        self.answered_bytes += len(data)
        if self.cut_after is not None and self.answered_bytes > self.cut_after:
            raise OSError("cut")
        return data

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def relay(server: Seaweed) -> Iterator[Relay]:
    made = Relay(server.endpoint)
    yield made
    made.close()


def through(relay: Relay, url: str) -> str:
    return f"{url.split('?')[0]}?endpoint={relay.endpoint}"


def test_a_killed_server_is_an_error_and_its_entries_are_there_after_its_restart(server: Seaweed, tier: S3Tier) -> None:
    tier.put(key("a"), value("a", MIB))
    server.kill()
    try:
        for use in uses(tier):
            with pytest.raises(TierUnreachable) as caught:
                use()
            assert caught.value.errno == errno.ECONNREFUSED
    finally:
        server.start()
    assert fetch(tier, key("a")) == value("a", MIB)
    assert tier.put(key("b"), value("b", 10)) is True


@pytest.mark.timeout(60)  # it takes 4 s; without its own limits each of seven calls would take half a minute
def test_a_server_that_hangs_is_an_error_in_bounded_time(server: Seaweed, url: str) -> None:
    tier = open_s3(url)
    impatient = wait_until("it opens in time", lambda: open_s3(url, timeout_s=0.15), despite=ValueError)
    tier.put(key("a"), value("a", 1000))
    with server.stopped():
        for use in uses(impatient):
            with pytest.raises(TierUnreachable, match="no answer in time") as caught:
                use()
            assert caught.value.errno == errno.ETIMEDOUT
    assert fetch(tier, key("a")) == value("a", 1000)


def uses(tier: S3Tier) -> list[Callable[[], object]]:
    return [
        lambda: tier.get_into(key("a"), memoryview(bytearray(MIB))),
        lambda: tier.contains(key("a")),
        lambda: tier.put(key("b"), value("b", 10)),
        lambda: tier.delete(key("c")),
        lambda: list(tier.list("ns")),
        lambda: list(tier.namespaces()),
        lambda: tier.remove("ns"),
    ]


def test_an_answer_that_breaks_off_is_an_error_and_stays_inside_the_buffer(url: str, relay: Relay) -> None:
    tier = open_s3(through(relay, url))
    tier.put(key("a"), value("a", MIB))
    around = bytearray(b"\xaa") * (MIB + 8192)
    relay.cut_after = relay.answered_bytes + MIB // 2
    with pytest.raises(TierError, match="connection broke"):
        tier.get_into(key("a"), memoryview(around)[4096:-4096])
    assert around[:4096] == around[-4096:] == b"\xaa" * 4096


@pytest.mark.parametrize("length", [10, 100_000])
def test_an_object_that_somebody_replaced_is_recognized_by_its_length(
    server: Seaweed, url: str, tier: S3Tier, length: int
) -> None:
    tier.put(key("a"), value("a", 1000))
    server.client().put_object(Bucket=server.bucket, Key=object_key(url, key("a")), Body=b"x" * length)
    around = bytearray(b"\xaa") * (1000 + 8192)
    assert tier.get_into(key("a"), memoryview(around)[4096:-4096]) == length
    assert around[:4096] == around[-4096:] == b"\xaa" * 4096


def test_a_wrong_guess_of_the_length_does_not_fetch_the_object(url: str, relay: Relay) -> None:
    tier = open_s3(through(relay, url))
    tier.put(key("a"), memoryview(bytes(48 * MIB)))
    before = relay.answered_bytes
    assert tier.get_into(key("a"), memoryview(bytearray(MIB))) == 48 * MIB
    assert tier.contains(key("b")) is None  # a request later
    assert relay.answered_bytes - before < 24 * MIB  # the socket buffers' contents


def test_an_object_that_is_there_already_is_not_sent_again(url: str, relay: Relay) -> None:
    tier = open_s3(through(relay, url))
    tier.put(key("a"), value("a", MIB))
    sent = len(relay.requests)
    assert tier.put(key("a"), value("a", MIB)) is False
    assert len(relay.requests) - sent < 10_000


def test_bytes_that_change_on_the_way_are_refused_by_the_server(url: str, relay: Relay) -> None:
    tier = open_s3(through(relay, url))
    relay.change = lambda data: data.replace(b"picture", b"pictURE")
    with pytest.raises(TierError):
        tier.put(key("a"), memoryview(b"a picture " * 1000))
    relay.change = bytes
    assert tier.contains(key("a")) is None
    assert tier.put(key("a"), memoryview(b"a picture " * 1000)) is True


def test_only_one_of_two_processes_that_write_at_once_succeeds(url: str, tier: S3Tier) -> None:
    code = """
import sys; from lmcache_ec.key import EncoderCacheKey; from lmcache_ec.tiers.s3 import open_s3
tier = open_s3(sys.argv[1])
print("ready", flush=True); sys.stdin.readline()
data = memoryview(sys.argv[2].encode() * 50_000)
print(sum(tier.put(EncoderCacheKey("ns", str(number)), data) for number in range(40)))
"""
    writers = [
        subprocess.Popen([sys.executable, "-c", code, url, letter], stdin=-1, stdout=-1, text=True) for letter in "ab"
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    written = [int(writer.communicate()[0]) for writer in writers]
    assert sum(written) == 40
    whole = {letter * 50_000 for letter in (b"a", b"b")}
    assert all(fetch(tier, key(str(number))) in whole for number in range(40))


# -- lists and namespaces


def test_prefixes_do_not_see_each_other(server: Seaweed) -> None:
    root = uuid.uuid4().hex
    tiers = {
        prefix: open_s3(f"s3://{server.bucket}/{prefix}?endpoint={server.endpoint}")
        for prefix in (root, f"{root}2", f"{root}/ns", f"{root}/ns/aa", "")
    }
    names = {prefix: new_namespace() if not prefix else "ns" for prefix in tiers}
    for number, (prefix, tier) in enumerate(tiers.items()):
        assert tier.put(key("a", names[prefix]), value(prefix, 100 + number)) is True
    for number, (prefix, tier) in enumerate(tiers.items()):
        assert fetch(tier, key("a", names[prefix])) == value(prefix, 100 + number)
        assert [found.length for found in tier.list(names[prefix])] == [100 + number]
        if prefix:
            assert [(use.namespace, use.entries) for use in tier.namespaces()] == [("ns", 1)]
    tiers[root].remove("ns")
    assert [bool(list(tier.list(names[prefix]))) for prefix, tier in tiers.items()] == [False, True, True, True, True]


def test_more_entries_than_a_page_of_the_listing_are_listed_counted_and_removed_and_strangers_stay(
    server: Seaweed, url: str, tier: S3Tier
) -> None:
    keys = [key(str(number)) for number in range(1100)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda entry: tier.put(entry, memoryview(b"x" * 7)), keys))
    tier.put(key("a", "ns-2"), value("a", 11))
    folder = s3_options(url).prefix
    strangers = [
        f"{folder}/README",
        f"{folder}/ns/README",
        f"{folder}/ns/00/00/{'1' * 64}.safetensors",
        f"{folder}/x/y",
    ]
    for name in strangers:
        server.client().put_object(Bucket=server.bucket, Key=name, Body=b"not ours")

    started = time.time()
    found = list(tier.list("ns"))
    assert len(found) == len(keys)
    assert {one.digest for one in found} == {entry.digest for entry in keys}
    assert {one.length for one in found} == {7}
    assert all(started - 300 < one.modified < started + 300 for one in found)

    uses = {use.namespace: use for use in tier.namespaces()}
    assert {name: (use.entries, use.bytes) for name, use in uses.items()} == {"ns": (1100, 7700), "ns-2": (1, 11)}
    assert started - 300 < (uses["ns"].written or 0) < started + 300

    abandoned = tier.list("ns")
    seen = [next(abandoned) for _ in range(1001)]  # into the second page
    del abandoned
    assert len(seen) == 1001

    assert tier.remove("ns") == 1100
    assert list(tier.list("ns")) == []
    assert [use.namespace for use in tier.namespaces()] == ["ns-2"]
    for name in strangers:
        server.client().head_object(Bucket=server.bucket, Key=name)


def test_a_small_namespace_is_listed_with_one_request(url: str, relay: Relay) -> None:
    tier = open_s3(through(relay, url))
    for number in range(20):
        tier.put(key(str(number)), value("a", 10))
    assert len(list(tier.list("ns"))) == 20
    assert relay.requests.count(b"list-type=2") == 1


def test_entries_that_have_aged_are_absent_until_they_are_written_again(
    server: Seaweed, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    aging, lasting = open_s3(url, ttl_s=3600.0), open_s3(url)
    aging.put(key("a"), value("old", 1000))
    assert fetch(aging, key("a")) == value("old", 1000)
    assert aging.put(key("a"), value("new", 1000)) is False
    with monkeypatch.context() as later:
        later.setattr(StoreClock, "now", lambda self: time.time() + 3700)
        assert fetch(aging, key("a")) is None
        assert aging.contains(key("a")) is None
        assert list(aging.list("ns")) == []
        assert fetch(lasting, key("a")) == value("old", 1000)
        assert aging.put(key("a"), value("new", 1000)) is True
    assert fetch(aging, key("a")) == value("new", 1000)
    assert len(list(aging.list("ns"))) == 1

    # A neighbour replaces it first.
    look = aging._head

    def slow_look(entry: EncoderCacheKey) -> object:
        held = look(entry)
        server.client().put_object(Bucket=server.bucket, Key=object_key(url, entry), Body=b"neighbour's")
        return held

    with monkeypatch.context() as later:
        later.setattr(StoreClock, "now", lambda self: time.time() + 3700)
        later.setattr(aging, "_head", slow_look)
        assert aging.put(key("a"), value("mine", 1000)) is False
    assert fetch(lasting, key("a")) == b"neighbour's"


def test_an_entry_that_has_aged_is_a_miss_and_leaves_the_catalog_at_its_next_refresh(
    server: Seaweed, url: str, tier: S3Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the server's own timestamps, for an engine that keeps running and for one that starts."""

    def written_s(name: str) -> float:
        found = server.client().head_object(Bucket=server.bucket, Key=object_key(url, key(name)))
        return float(found["LastModified"].timestamp())

    mortal, now_s = open_s3(url, ttl_s=600.0), [0.0]
    monkeypatch.setattr(StoreClock, "now", lambda clock: now_s[0])
    running, starting = (
        Lane(mortal, "s3", PresenceWriter.create(["s3"]), Habits(Lookup.CATALOG, refresh_s=0.01)) for _ in range(2)
    )
    mortal.put(key("a"), value("a", 1000))
    tier.put(key("b"), value("b", 1000))
    now_s[0] = written_s("b")
    running.survey("ns")
    assert running.listed == 2
    assert all(running.asks(key(name).digest) for name in "ab")

    now_s[0] += 602.0
    running._list_at = 0.0
    running.survey("ns")
    assert running.listed == 0
    for name in "ab":
        assert mortal.get_into(key(name), memoryview(bytearray(1000))) is None
        assert mortal.contains(key(name)) is None
        assert fetch(tier, key(name)) == value(name, 1000)
    starting.survey("ns")
    assert starting.listed == 0
    assert not any(starting.asks(key(name).digest) for name in "ab")

    def written_again() -> bool:
        """Write again, until it is some seconds later: timestamps are in whole seconds."""
        assert mortal.put(key("a"), value("new", 1000)) is True
        return written_s("a") >= written_s("b") + 2

    wait_until("it is written again", written_again, pause_s=0.2)
    now_s[0] = written_s("a") + 599.9
    assert fetch(mortal, key("a")) == value("new", 1000)
    starting._list_at = 0.0
    starting.survey("ns")
    assert (starting.listed, starting.asks(key("a").digest), starting.asks(key("b").digest)) == (1, True, False)


def test_the_lifecycle_rule_covers_only_our_prefix_and_is_read_back(server: Seaweed, url: str, tier: S3Tier) -> None:
    other = {"ID": "theirs", "Status": "Enabled", "Filter": {"Prefix": "theirs/"}, "Expiration": {"Days": 9}}
    client = server.client()
    client.put_bucket_lifecycle_configuration(Bucket=server.bucket, LifecycleConfiguration={"Rules": [other]})
    assert tier.lifecycle_s() is None
    tier.set_lifecycle(3 * 86_400 + 1)
    assert tier.lifecycle_s() == 4 * 86_400
    tier.set_lifecycle(60)
    assert tier.lifecycle_s() == 86_400
    rules = client.get_bucket_lifecycle_configuration(Bucket=server.bucket)["Rules"]
    assert sorted(rule["Filter"]["Prefix"] for rule in rules) == sorted(["theirs/", f"{s3_options(url).prefix}/"])
    for rule in rules:
        rule["Status"] = "Disabled"
    client.put_bucket_lifecycle_configuration(Bucket=server.bucket, LifecycleConfiguration={"Rules": rules})
    assert tier.lifecycle_s() is None
    whole_bucket = open_s3(f"s3://{server.bucket}?endpoint={server.endpoint}")
    with pytest.raises(ValueError, match="whole bucket"):
        whole_bucket.set_lifecycle(60)
    client.delete_bucket_lifecycle(Bucket=server.bucket)
    assert tier.lifecycle_s() is None


# -- errors are reported at opening


@pytest.mark.parametrize(
    ("address", "credentials", "expected"),
    [
        ("s3://no-such-bucket/p?endpoint={endpoint}", {}, "bucket no-such-bucket does not exist"),
        ("s3://{bucket}/p?endpoint={endpoint}", {"AWS_ACCESS_KEY_ID": "AKCANARY"}, "credentials refused.*Invalid"),
        ("s3://{bucket}/p?endpoint={endpoint}", {"AWS_SECRET_ACCESS_KEY": "CANARY"}, "credentials refused.*Signature"),
        ("s3://{bucket}/p?endpoint={endpoint}", {"AWS_SESSION_TOKEN": "CANARY"}, "credentials refused|access denied"),
        ("s3://{bucket}/p?endpoint={endpoint}", {"AWS_ACCESS_KEY_ID": ""}, "no credentials found"),
        ("s3://{bucket}/p?endpoint={endpoint}&profile=nobody", {}, "cannot be used: ProfileNotFound"),
        ("s3://{bucket}/p?endpoint={authority}", {}, "TLS: it does not answer with TLS.*http://"),
        ("s3://{bucket}/p?endpoint={tls_endpoint}", {}, "TLS: its certificate is not trusted.*ca_bundle"),
        ("s3://{bucket}/p?endpoint={tls_authority}&tls=false", {}, "perhaps it expects TLS"),
        ("s3://{bucket}/p?endpoint=http://127.0.0.1:1", {}, "it refuses connections"),
        ("s3://{bucket}/p?endpoint=http://no-such-host.invalid", {}, "its name cannot be resolved"),
    ],
)
def test_a_remote_that_cannot_work_is_refused_with_the_reason(
    server: Seaweed, monkeypatch: pytest.MonkeyPatch, address: str, credentials: dict[str, str], expected: str
) -> None:
    for name, text in credentials.items():
        monkeypatch.setenv(name, text) if text else monkeypatch.delenv(name)
    filled = address.format(
        bucket=server.bucket,
        endpoint=server.endpoint,
        authority=server.endpoint.removeprefix("http://"),
        tls_endpoint=server.tls_endpoint,
        tls_authority=server.tls_endpoint.removeprefix("https://"),
    )
    with refused(expected):
        open_s3(filled)


@pytest.mark.timeout(30)
def test_a_server_that_hangs_is_refused(server: Seaweed, url: str) -> None:
    with server.stopped(), refused("no answer in time"):
        open_s3(url, timeout_s=0.3)


@contextmanager
def refused(expected: str) -> Iterator[None]:
    with pytest.raises(ValueError, match=expected) as caught:
        yield
    shown = "".join(traceback.format_exception(caught.value))
    assert "CANARY" not in shown
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert os.environ.get(name, "none") not in shown


class Answers(BaseHTTPRequestHandler):
    """Plays an S3 that answers like AWS where SeaweedFS differs, and echoes all that it was sent, as AWS does."""

    protocol_version = "HTTP/1.1"
    plays: Iterator[tuple[int, str]]

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        about_the_time = self.command == "HEAD" and self.path == "/bucket"
        status, code = (200, "") if about_the_time else next(self.plays)
        repeated = f"<StringToSign>{self.headers}</StringToSign>" if code else ""
        region = "<Region>eu-north-1</Region>" if code == "AuthorizationHeaderMalformed" else ""
        body = f"<Error><Code>{code}</Code>{region}{repeated}</Error>".encode() if code else b""
        self.send_response(status)
        self.send_header("etag", '"0"')
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_PUT = do_HEAD = do_DELETE = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def answering(*answers: tuple[int, str]) -> Iterator[str]:
    """The URL of a remote that gives these answers, the last one forever."""

    class Playing(Answers):
        plays = chain(answers, repeat(answers[-1]))

    with ThreadingHTTPServer(("127.0.0.1", 0), Playing) as http:
        http.daemon_threads = True
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"s3://bucket/p?endpoint=http://127.0.0.1:{http.server_address[1]}&region=us-west-2"
        http.shutdown()


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (400, "AuthorizationHeaderMalformed", "wrong region: .*not in us-west-2.*says eu-north-1"),
        (301, "PermanentRedirect", "wrong region: .*not in us-west-2"),
        (403, "RequestTimeTooSkewed", "clock skew"),
        (403, "AccessDenied", "access denied: needed are s3:ListBucket"),
        (403, "", "access denied"),
        (500, "InternalError", "server error"),
        (200, "", "has an object for any name"),
        (404, "", "does not answer like S3"),
    ],
)
def test_answers_that_only_aws_gives_are_refused_with_the_reason(status: int, code: str, expected: str) -> None:
    with answering((status, code)) as remote, refused(expected):
        open_s3(remote)


@pytest.mark.parametrize(
    ("status", "code", "reading", "writing"),
    [
        (503, "SlowDown", TierNotReady, TierNotReady),
        (500, "InternalError", TierNotReady, TierNotReady),
        (429, "TooManyRequests", TierNotReady, TierNotReady),
        (403, "AccessDenied", TierUnreachable, WritesRefused),
        (403, "SignatureDoesNotMatch", TierUnreachable, TierUnreachable),
        (404, "NoSuchBucket", TierUnreachable, TierUnreachable),
        (301, "PermanentRedirect", TierUnreachable, TierUnreachable),
        (409, "OperationAborted", TierError, TierError),
    ],
)
def test_an_answer_shows_whether_it_concerns_the_entry_the_store_or_its_writes(
    status: int, code: str, reading: type[TierError], writing: type[TierError]
) -> None:
    with answering((404, "NoSuchKey"), (status, code)) as remote, pytest.raises(TierError) as caught:
        open_s3(remote).get_into(key("a"), memoryview(bytearray(10)))
    assert type(caught.value) is reading
    with answering((404, "NoSuchKey"), (404, ""), (status, code)) as remote, pytest.raises(TierError) as caught:
        open_s3(remote).put(key("a"), value("a", 10))
    assert type(caught.value) is writing


@pytest.mark.parametrize(("status", "certain"), [(412, True), (404, True), (501, False), (400, False)])
def test_writes_are_checked_with_a_request_that_no_store_carries_out(status: int, certain: bool) -> None:
    with answering((404, "NoSuchKey"), (status, "")) as remote:
        assert open_s3(remote).check_writes() is certain
    with answering((404, "NoSuchKey"), (403, "AccessDenied")) as remote, pytest.raises(WritesRefused):
        open_s3(remote).check_writes()


@pytest.mark.parametrize("status", [400, 501])
def test_a_store_that_refuses_conditions_is_written_without_them_from_then_on(
    server: Seaweed, url: str, status: int
) -> None:
    with s3_front(int(server.endpoint.rpartition(":")[2])) as front:
        tier = open_s3(f"{url.split('?')[0]}?endpoint=http://127.0.0.1:{front.port}")
        front.rule = lambda request: (status, "Odd") if request.method == "PUT" else None
        with pytest.raises(TierError):  # it is refused without a condition as well as with one
            tier.put(key("a"), value("a", 10))
        assert not tier.notice
        front.rule = lambda request: (status, "NotImplemented") if "if-none-match" in request.headers else None
        assert tier.put(key("a"), value("a", 10)) is True
        assert "not support conditional writes" in tier.notice
        front.seen.clear()
        assert tier.put(key("b"), value("b", 10)) is True
        assert tier.put(key("b"), value("c", 10)) is False
        assert [request.method for request in front.seen] == ["HEAD", "PUT", "HEAD"]


def test_an_ailing_store_is_distinguished_from_a_wrong_address() -> None:
    for status in (500, 503, 429):
        with answering((status, "SlowDown")) as remote, pytest.raises(TierNotReady):
            open_s3(remote)


def test_a_write_that_a_deletion_crossed_is_made_again() -> None:
    before = [(404, "NoSuchKey"), (404, "")]
    with answering(*before, (409, "ConditionalRequestConflict"), (200, "")) as remote:
        assert open_s3(remote).put(key("a"), value("a", 10)) is True
    with answering(*before, (409, "ConditionalRequestConflict")) as remote, pytest.raises(TierError):
        open_s3(remote).put(key("a"), value("a", 10))


def test_a_bucket_that_was_removed_is_an_error_and_not_a_miss() -> None:
    with answering((404, "NoSuchKey"), (404, "NoSuchBucket")) as remote:
        tier = open_s3(remote)
        with pytest.raises(TierUnreachable, match="HTTP 404 NoSuchBucket"):
            tier.get_into(key("a"), memoryview(bytearray(10)))


def test_no_credential_is_ever_printed(
    server: Seaweed, url: str, relay: Relay, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    keys = {"aws_access_key_id": server.access_key_id, "aws_secret_access_key": server.secret_access_key}
    tier = open_s3(through(relay, url), keys)
    shown = [repr(tier), repr(tier._access), repr(s3_options(url, keys)), str(tier)]
    with answering((404, "NoSuchKey"), (403, "SignatureDoesNotMatch")) as remote:
        faulty = open_s3(remote)
        for use in uses(faulty):
            with pytest.raises(TierError, match="HTTP 403") as caught:
                use()
            shown += traceback.format_exception(caught.value)
    text = "".join(shown) + caplog.text
    assert server.access_key_id.encode() in relay.requests  # it was used
    assert server.access_key_id not in text
    assert server.secret_access_key not in text


# -- credentials and addresses


def test_credentials_of_a_profile_and_of_lmcaches_configuration_are_found(
    server: Seaweed, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with refused(f"{url.partition('?')[0]}: no credentials found"):
        open_s3(url)
    shared = tmp_path / "credentials"
    shared.write_text(
        f"[fleet]\naws_access_key_id={server.access_key_id}\naws_secret_access_key={server.secret_access_key}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(shared))
    assert open_s3(f"{url}&profile=fleet").put(key("a"), value("a", 10)) is True
    monkeypatch.setenv("AWS_PROFILE", "fleet")
    assert fetch(open_s3(url), key("a")) == value("a", 10)
    monkeypatch.delenv("AWS_PROFILE")
    keys = {"aws_access_key_id": server.access_key_id, "aws_secret_access_key": server.secret_access_key}
    assert fetch(open_s3(url, keys), key("a")) == value("a", 10)


def test_credentials_that_expire_are_renewed(
    server: Seaweed, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like those of a role; here a user's program (`credential_process`) stands in for the role."""
    monkeypatch.setattr(s3_access, "_CREDENTIALS_S", 1.0)  # obstore asks each time
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    answer, config = tmp_path / "answer.json", tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = cat {answer}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))

    def gives(secret: str) -> None:
        ends = datetime.now(UTC) + timedelta(minutes=9)  # so soon that boto3 renews them at the next use
        answer.write_text(
            json.dumps(
                {
                    "Version": 1,
                    "AccessKeyId": server.access_key_id,
                    "SecretAccessKey": secret,
                    "Expiration": ends.isoformat(),
                }
            )
        )

    gives(server.secret_access_key)
    tier = open_s3(url)
    tier.put(key("a"), value("a", 10))

    def refused() -> bool:
        return raises(TierError, lambda: tier.contains(key("a")))

    gives("CANARY")
    wait_until("the wrong secret is used", refused, 20, pause_s=0.02)
    gives(server.secret_access_key)
    wait_until("the right one is used again", lambda: not refused(), 20, pause_s=0.02)
    answer.unlink()
    wait_until("there is none", refused, 20, pause_s=0.02)


def raises(kind: type[Exception], call: Callable[[], object]) -> bool:
    try:
        call()
    except kind:
        return True
    return False


@pytest.mark.parametrize(
    ("query", "variables", "region"),
    [
        ("&region=eu-central-1", {"AWS_DEFAULT_REGION": "eu-west-1"}, "eu-central-1"),
        ("", {"AWS_DEFAULT_REGION": "eu-west-1", "AWS_REGION": "eu-west-2"}, "eu-west-1"),
        ("", {"AWS_REGION": "eu-west-2"}, "eu-west-2"),
        ("", {}, "us-east-1"),
    ],
)
def test_requests_are_signed_for_the_region_that_was_named(
    url: str, relay: Relay, monkeypatch: pytest.MonkeyPatch, query: str, variables: dict[str, str], region: str
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    open_s3(through(relay, url) + query)
    assert relay.requests.count(b"/s3/aws4_request") == relay.requests.count(f"/{region}/s3/aws4_request".encode()) > 0


@pytest.mark.parametrize("named", ["in the URL", "in the environment"])
def test_a_private_authority_is_trusted_where_it_is_named(
    server: Seaweed, authority: Path, url: str, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    address = f"{url.split('?')[0]}?endpoint={server.tls_endpoint}"
    if named == "in the URL":
        address += f"&ca_bundle={authority / 'ca.pem'}"
    else:
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority / "ca.pem"))
    tier = open_s3(address)
    assert tier.put(key("a"), value("a", 100_000)) is True
    assert fetch(tier, key("a")) == value("a", 100_000)
    assert tier.lifecycle_s() is None


@pytest.mark.parametrize(
    ("address", "extra"),
    [
        ("s3://{bucket}/{prefix}?endpoint=http://{domain}&path_style=false", {}),
        ("s3://{bucket}.{domain}/{prefix}", {"s3_region": "us-east-1", "disable_tls": True}),
        ("s3://{bucket}.{domain}:80/{prefix}?tls=false", {}),
        ("s3://{bucket}/{prefix}?endpoint=http://any.host&path_style=true", {}),
        ("s3://{bucket}/{prefix}", {"AWS_ENDPOINT_URL_S3": "http://any.host"}),
    ],
)
def test_buckets_are_found_by_host_and_by_path(
    server: Seaweed, url: str, tier: S3Tier, monkeypatch: pytest.MonkeyPatch, address: str, extra: dict[str, object]
) -> None:
    """The server acts as a proxy for these hosts, which have no address here."""
    monkeypatch.setenv("http_proxy", server.endpoint)
    if "AWS_ENDPOINT_URL_S3" in extra:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://any.host")
    filled = address.format(bucket=server.bucket, domain=server.domain, prefix=s3_options(url).prefix)
    other = open_s3(filled, extra)
    assert other.put(key("a"), value("a", 100)) is True
    assert fetch(tier, key("a")) == value("a", 100)
    assert len(list(other.list("ns"))) == 1


@pytest.mark.parametrize(
    ("address", "extra", "options"),
    [
        ("s3://bucket", {}, S3Options("bucket")),
        ("s3://my.bucket/a/b/", {}, S3Options("my.bucket", "a/b")),
        ("s3://bucket/p?region=eu-west-1&tls=1", {"s3_region": "x"}, S3Options("bucket", "p", region="eu-west-1")),
        ("s3://bucket.s3.eu-west-1.amazonaws.com", {"s3_region": "x"}, S3Options("bucket", region="eu-west-1")),
        ("s3://my.bucket.s3.eu-west-1.amazonaws.com/p", {}, S3Options("my.bucket", "p", region="eu-west-1")),
        ("s3://bucket.s3.cn-north-1.amazonaws.com.cn", {}, S3Options("bucket", region="cn-north-1")),
        ("s3://bucket.s3.amazonaws.com", {"s3_region": "us-east-2"}, S3Options("bucket", region="us-east-2")),
        (
            "s3://bucket.store.local",
            {"s3_region": "r", "s3_num_io_threads": 64},
            S3Options("bucket", region="r", endpoint="https://store.local", path_style=False),
        ),
        (
            "s3://bucket/p?endpoint=store:9000",
            {"disable_tls": True, "aws_access_key_id": "a", "aws_secret_access_key": "b"},
            S3Options("bucket", "p", None, "http://store:9000", False, access_key_id="a", secret_access_key="b"),
        ),
        ("s3://bucket?endpoint=https://[::1]:9/", {}, S3Options("bucket", endpoint="https://[::1]:9")),
    ],
)
def test_urls_in_our_form_and_in_lmcaches(address: str, extra: dict[str, object], options: S3Options) -> None:
    assert s3_options(address, extra) == options


@pytest.mark.parametrize(
    ("address", "extra", "expected"),
    [
        ("s3://AKCANARY:CANARY@bucket/p", {}, "with credentials"),
        ("s3://AKCANARY:CAN/ARY@bucket/p", {}, "with credentials"),
        ("s3://AKCANARY:CANARY/bucket", {}, "3 to 63 characters"),
        ("s3://bucket/p?aws_secret_access_key=CANARY", {}, "with credentials"),
        ("s3://bucket/p?endpoint=http://u:CANARY%40host", {}, "must be host"),
        ("s3://bucket/p?regoin=CANARY", {}, "unknown option regoin: did you mean region?"),
        ("s3://bucket/p?zone=CANARY", {}, "unknown option zone: must be one of endpoint, region"),
        ("s3://bucket/p?path_style=CANARY", {}, "path_style must be true or false"),
        ("s3://bucket/p?region=", {}, "region is empty"),
        ("s3://bucket/p?endpoint=http://host&tls=true", {}, "contradict"),
        ("s3://bucket/p?endpoint=ftp://host", {}, "must be host"),
        ("s3://bucket/p?ca_bundle=/no/such/file", {}, "is not a file"),
        ("s3://bucket/../p", {}, "the prefix may contain"),
        ("s3://bucket/a//b", {}, "the prefix may contain"),
        ("s3://Bucket/p", {}, "3 to 63 characters"),
        ("http://bucket/p", {}, "must be s3://"),
        ("s3://bucket", {"aws_access_key_id": "CANARY"}, "given together"),
        ("s3://bucket.s3express-use1-az4.us-east-1.amazonaws.com", {}, "a host of AWS must be"),
        ("s3://fast--use1-az4--x-s3.s3.us-east-1.amazonaws.com", {}, "directory buckets"),
        ("s3://bucket", {"s3_enable_s3express": True}, "directory buckets"),
    ],
)
def test_urls_that_are_refused_and_never_repeated(address: str, extra: dict[str, object], expected: str) -> None:
    with refused(expected):
        s3_options(address, extra)


def test_limits_that_make_no_sense_are_refused(url: str) -> None:
    for limits in ({"ttl_s": 0.0}, {"timeout_s": 0.0}):
        with pytest.raises(ValueError, match="must be above 0"):
            open_s3(url, **limits)  # type: ignore[arg-type]


def test_another_remote_of_the_process_is_opened_without_reading_what_botocore_knows_of_s3_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_s3(url)
    read, load = list[str](), JSONFileLoader.load_file

    def noted(loader: JSONFileLoader, path: str) -> object:
        read.append(path)
        return load(loader, path)

    monkeypatch.setattr(JSONFileLoader, "load_file", noted)
    open_s3(url)
    assert read == []


def test_boto3_and_obstore_are_imported_when_a_remote_is_opened_and_torch_never(url: str) -> None:
    code = """
import sys; from lmcache_ec.tiers.s3 import open_s3
assert not {"boto3", "botocore", "obstore"} & set(sys.modules)
open_s3(sys.argv[1])
assert {"boto3", "obstore"} <= set(sys.modules) and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, url], check=True)


@pytest.mark.parametrize("missing", ["boto3", "obstore.auth.boto3"])
def test_a_missing_package_is_named(url: str, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ValueError, match=r"pip install 'lmcache-ec\[s3\]'"):
        open_s3(url)
