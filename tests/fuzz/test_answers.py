# SPDX-License-Identifier: Apache-2.0
"""Arbitrary answers from a remote's server: the tier gives an answer or an error, in bounded time and memory, and
nothing is written past a buffer."""

import json
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from xml.sax.saxutils import escape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_ec.cli.status import _ask
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.tiers import lmcache_connection
from lmcache_ec.tiers.base import TierError
from lmcache_ec.tiers.lmcache_remote import LMCacheRemoteTier, open_lmcache_remote
from lmcache_ec.tiers.s3 import S3Tier, open_s3

LIMIT = 1 << 20
ABSENT = struct.pack("9i", 400, 0, 1, 0, 0, 0, 0, 0, 0)
NUMBERS = st.integers(0, 12) | st.sampled_from([200, 400, -1, 40, 41, 1 << 22, (1 << 31) - 1, -(1 << 31)])
IDENTIFIERS = (f"picture {number}" for number in count())
FEWER = settings(deadline=None, max_examples=settings().max_examples // 2)
"""For tests that ask a server for each example."""


@pytest.fixture(scope="module", autouse=True)
def _settings_of_this_machine_are_not_used() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMCACHE_LOG_LEVEL", "CRITICAL")
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            patch.delenv(name, raising=False)
            patch.delenv(name.lower(), raising=False)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield


def read(tier: LMCacheRemoteTier | S3Tier, length: int) -> None:
    """Read answers in every way."""
    key = EncoderCacheKey("ns", next(IDENTIFIERS))
    guarded = bytearray(b"\xa5" * (length + 16))
    with suppress(TierError):
        found = tier.get_into(key, memoryview(guarded)[8 : 8 + length])
        assert found is None or found >= 0
    assert guarded[:8] == guarded[-8:] == b"\xa5" * 8
    with suppress(TierError):
        found = tier.contains(key)
        assert found is None or found >= 0


# ---- LMCache's server


class Scripted:
    """Answers each request with `answer` and closes the connection; if that is None, it reports a miss."""

    def __init__(self) -> None:
        self.answer: bytes | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while connection.recv(4096):
                if self.answer is None:
                    connection.sendall(ABSENT)
                else:
                    connection.sendall(self.answer)
                    connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[Scripted, LMCacheRemoteTier]]:
    with closing(Scripted()) as server:
        url = f"lm://127.0.0.1:{server.port}"
        with closing(open_lmcache_remote(url, timeout_s=5.0, max_entry_bytes=LIMIT)) as tier:
            yield server, tier


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Check that a connector allocates a bounded amount of memory."""
    asked: list[int] = []
    made = lmcache_connection._memory_object

    def recorded(shapes, dtypes, fmt):  # type: ignore[no-untyped-def]
        memory = made(shapes, dtypes, fmt)
        asked.append(memory.get_size())
        return memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lmcache_connection, "_memory_object", recorded)
        yield
    assert max(asked, default=0) <= LIMIT


@given(
    st.lists(NUMBERS, min_size=9, max_size=9).map(lambda numbers: struct.pack("9i", *numbers)) | st.binary(max_size=80),
    st.binary(max_size=60),
    st.integers(0, 41),
)
@FEWER
def test_any_answer_of_an_lmcache_server_is_an_entry_a_miss_or_an_error(
    scripted: tuple[Scripted, LMCacheRemoteTier], head: bytes, payload: bytes, length: int
) -> None:
    server, tier = scripted
    server.answer = head + payload
    with bounded_memory():
        read(tier, length)


@given(
    st.lists(NUMBERS, min_size=7, max_size=7).map(lambda numbers: struct.pack("7i", *numbers)) | st.binary(max_size=60),
    st.binary(max_size=60),
    st.integers(0, 41),
)
@FEWER
def test_any_content_of_an_lmcache_file_is_an_entry_a_miss_or_an_error(
    folder_tier: tuple[Path, LMCacheRemoteTier], head: bytes, payload: bytes, length: int
) -> None:
    folder, tier = folder_tier
    key = EncoderCacheKey("ns", next(IDENTIFIERS))
    name = lmcache_connection.Entry(key.namespace, key.digest).engine_key.to_string()
    (folder / f"{name}.data").write_bytes(head + payload)
    guarded = bytearray(b"\xa5" * (length + 16))
    with bounded_memory():
        with suppress(TierError):
            found = tier.get_into(key, memoryview(guarded)[8 : 8 + length])
            assert found is None or found >= 0
        with suppress(TierError):
            assert all(listed.length >= 0 for listed in tier.list("ns"))
    assert guarded[:8] == guarded[-8:] == b"\xa5" * 8
    (folder / f"{name}.data").unlink()


@pytest.fixture(scope="module")
def folder_tier() -> Iterator[tuple[Path, LMCacheRemoteTier]]:
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(open_lmcache_remote(f"fs://{folder}", timeout_s=5.0, max_entry_bytes=LIMIT)) as tier,
    ):
        yield Path(folder), tier


# ---- S3


class Bucket(ThreadingHTTPServer):
    """Answers every request with `status`, `body` and `headers`; by default, that there is no such key."""

    daemon_threads = True

    def __init__(self) -> None:
        self.status, self.body, self.headers = 404, b"<Error><Code>NoSuchKey</Code></Error>", dict[str, str]()
        super().__init__(("127.0.0.1", 0), _Answer)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Answer(BaseHTTPRequestHandler):
    server: Bucket

    def _serve(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response_only(self.server.status)
        for name, value in {"Content-Length": str(len(self.server.body)), **self.server.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(self.server.body)
        self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def bucket() -> Iterator[tuple[Bucket, S3Tier]]:
    server = Bucket()
    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b"}
    url = f"s3://bucket/prefix?endpoint=http://127.0.0.1:{server.server_port}&path_style=true"
    yield server, open_s3(url, keys, timeout_s=5.0, ttl_s=3600.0)
    server.shutdown()
    server.server_close()


FIELDS = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), max_size=20).map(escape)
NAMES = st.from_regex(r"prefix/ns/[0-9a-f]{2}/[0-9a-f]{64}\.safetensors", fullmatch=True) | FIELDS
SIZES = st.integers(-(1 << 70), 1 << 70).map(str) | FIELDS
TIMES = (
    st.sampled_from(["2026-01-01T00:00:00.000Z", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "", "now"]) | FIELDS
)
OBJECTS = st.tuples(NAMES, SIZES, TIMES).map(
    lambda one: (
        f"<Contents><Key>{one[0]}</Key><Size>{one[1]}</Size><LastModified>{one[2]}</LastModified>"
        '<ETag>"x"</ETag></Contents>'
    )
)
LISTINGS = st.tuples(st.lists(OBJECTS, max_size=4), st.sampled_from(["false", "true", "maybe"])).map(
    lambda one: f"<ListBucketResult><IsTruncated>{one[1]}</IsTruncated>{''.join(one[0])}</ListBucketResult>".encode()
)


@given(LISTINGS | st.binary(max_size=200))
@FEWER
def test_any_listing_of_a_bucket_becomes_entries_or_an_error(bucket: tuple[Bucket, S3Tier], body: bytes) -> None:
    server, tier = bucket
    server.status, server.body, server.headers = 200, body, {}
    with suppress(TierError):
        for listed in tier.list("ns"):
            assert len(listed.digest) == 32
            assert listed.length >= 0
    with suppress(TierError):
        list(tier.namespaces())


@given(
    st.sampled_from([200, 206, 304, 400, 404, 409, 412]),
    st.binary(max_size=60),
    st.fixed_dictionaries(
        {},
        optional={
            "Content-Length": st.integers(0, 1 << 64).map(str),
            "Content-Range": st.text("bytes 0123456789-/*", max_size=20),
            "ETag": st.text('"abc', max_size=6),
            "Last-Modified": st.sampled_from(
                [f"{datetime.now(UTC):%a, %d %b %Y %H:%M:%S} GMT", "Mon, 01 Jan 0001 00:00:00 GMT", "soon"]
            ),
            "Date": st.sampled_from(["Mon, 01 Jan 0001 00:00:00 GMT", "Fri, 31 Dec 9999 23:59:59 GMT", "soon", ""]),
        },
    ),
    st.integers(0, 61),
)
@FEWER
def test_any_answer_of_a_bucket_is_an_entry_a_miss_or_an_error(
    bucket: tuple[Bucket, S3Tier], code: int, body: bytes, headers: dict[str, str], length: int
) -> None:
    server, tier = bucket
    server.status, server.body, server.headers = code, body, headers
    read(tier, length)
    with suppress(TierError):
        tier.born()


# ---- a store process's status


JSON = st.recursive(st.none() | st.integers() | st.text(max_size=8), st.lists).map(
    lambda value: json.dumps(value).encode()
)


@given(st.binary(max_size=60) | JSON)
@settings(deadline=None)
def test_status_goes_on_whatever_answers_in_place_of_a_store_process(answer: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("")
        listener.listen()
        name = listener.getsockname()[1:].decode()

        def serve() -> None:
            with listener.accept()[0] as connection, suppress(OSError):
                connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        found = _ask(name)
        thread.join()
    assert found is None or isinstance(found, dict)
