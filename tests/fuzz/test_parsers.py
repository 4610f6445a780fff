# SPDX-License-Identifier: Apache-2.0
"""Parsers of external input, given anything: no crash, no wait, bounded memory, no write past a buffer."""

import json
import os
import struct
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.exceptions import RedisError

from lmcache_ec import entry
from lmcache_ec.adapters.vllm.announcement import announced
from lmcache_ec.key import EncoderCacheKey, object_name, parse_object_name
from lmcache_ec.tiers.base import TierError
from lmcache_ec.tiers.disk import DiskTier
from lmcache_ec.tiers.disk_account import FolderAccount
from lmcache_ec.tiers.disk_news import FolderNews
from lmcache_ec.tiers.resp import PayloadParser
from tests.scattering import Scattering

MIB = 1 << 20
KEY = EncoderCacheKey("ns", "picture")
SPEC = entry.TensorSpec(2, 3, "F32")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


@contextmanager
def at_most(length: int) -> Iterator[None]:
    """Check that the block allocates at most this much memory."""
    tracemalloc.start()
    try:
        yield
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < length


# ---- entries


def sealed() -> bytearray:
    blob = bytearray(entry.entry_length(KEY.identifier, SPEC))
    entry.seal(memoryview(blob), KEY, SPEC, "test")
    return blob


SEALED = sealed()
HEADER: dict[str, Any] = json.loads(SEALED[8 : 8 + struct.unpack_from("<Q", SEALED)[0]])
PLACES: list[Callable[[dict[str, Any]], tuple[dict[str, Any], str]]] = [
    *(lambda header, name=name: (header["__metadata__"], name) for name in HEADER["__metadata__"]),
    *(lambda header, name=name: (header["ec"], name) for name in HEADER["ec"]),
    lambda header: (header, "ec"),
    lambda header: (header, "__metadata__"),
    lambda header: (header, "another"),
]


@given(st.sampled_from(PLACES), JSON, st.integers(0, 4), st.binary(max_size=40))
@settings(deadline=None)
def test_an_entry_with_anything_in_a_field_of_its_header_is_verified_or_refused_and_not_changed(
    place: Callable[[dict[str, Any]], tuple[dict[str, Any], str]], value: object, extra: int, tail: bytes
) -> None:
    """Its digest is right, as a forger would make it."""
    header = json.loads(json.dumps(HEADER))
    fields, name = place(header)
    fields[name] = value
    text = json.dumps(header, separators=(",", ":")).encode()
    size = struct.unpack_from("<Q", SEALED)[0]
    blob = bytearray(struct.pack("<Q", size) + text.ljust(size)[:size] + SEALED[8 + size :])
    blob[entry._DIGEST_AT : entry._DIGEST_END] = entry._digest(memoryview(blob))
    blob += tail[:extra]
    before = bytes(blob)
    with at_most(4 * MIB):
        try:
            assert entry.verify(memoryview(blob), KEY).nbytes == SPEC.nbytes
        except entry.EntryError:
            pass
    assert blob == before


@given(st.binary(max_size=64), st.integers(0, len(SEALED)), st.integers(0, len(SEALED) + 100))
def test_an_entry_cut_or_overwritten_anywhere_is_refused(garbage: bytes, at: int, length: int) -> None:
    blob = bytearray(SEALED)
    blob[at : at + len(garbage)] = garbage
    blob = blob[:length]
    try:
        entry.verify(memoryview(blob), KEY)
        assert blob == SEALED
    except entry.EntryError:
        pass


# ---- names in listings


@given(
    st.text(max_size=120) | st.from_regex(r"[a-z0-9./-]{0,40}/[0-9a-f]{2}/[0-9a-f]{60,66}\.safetensors", fullmatch=True)
)
def test_a_name_in_a_listing_is_parsed_only_if_an_entry_can_have_it(name: str) -> None:
    parsed = parse_object_name(name)
    assert parsed is None or object_name(*parsed) == name


# ---- Redis


class Line(Scattering):
    """A socket on which these bytes arrive in pieces before it closes."""

    def __init__(self, data: bytes, piece: int) -> None:
        self._left, self._piece = data, piece
        self._sock, self._socket_timeout = self, 1.0

    def settimeout(self, seconds: float) -> None:
        pass

    def recv_into(self, view: memoryview) -> int:
        count = min(len(view), self._piece, len(self._left))
        view[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


PIECES = st.one_of(
    st.sampled_from(
        [b"$", b"*", b"-", b"+", b":", b"\r\n", b"\r", b"-1\r\n", b"*-1\r\n", b"*1\r\n", b"_\r\n", b"%1\r\n"]
    ),
    st.integers(-5, 1 << 70).map(lambda number: b"%d\r\n" % number),
    st.integers(0, 1 << 40).map(lambda number: b"$%d\r\n" % number),
    st.integers(0, 1 << 40).map(lambda number: b"*%d\r\n" % number),
    st.binary(max_size=30),
    st.binary(max_size=30).map(lambda data: b"$%d\r\n%s\r\n" % (len(data), data)),
    st.integers(1, 4000).map(lambda depth: b"*1\r\n" * depth),
)


@given(
    st.lists(PIECES, max_size=12).map(b"".join),
    st.integers(1, 200),
    st.lists(st.none() | st.integers(0, 40), max_size=4),
)
@settings(deadline=None)
def test_whatever_a_server_sends_becomes_a_reply_or_an_error_and_nothing_is_written_past_a_buffer(
    data: bytes, piece: int, lengths: list[int | None]
) -> None:
    parser = PayloadParser(1)
    parser.on_connect(Line(data, piece))
    guarded = [bytearray(b"\xa5" * (length + 16)) for length in lengths if length is not None]
    buffers = iter(guarded)
    parser.targets.extend(None if length is None else memoryview(next(buffers))[8 : 8 + length] for length in lengths)
    with at_most(40 * MIB):
        try:
            for _ in range(len(lengths) + 1):
                parser.read_response()
                if parser.abandoned:
                    break
        except RedisError:
            pass
    for buffer in guarded:
        assert buffer[:8] == buffer[-8:] == b"\xa5" * 8


def test_many_values_that_are_each_small_enough_can_be_too_much_together() -> None:
    """A page of a listing has a maximum length: longer ones are refused."""
    value = b"$1000000\r\n" + bytes(1_000_000) + b"\r\n"
    parser = PayloadParser(1)
    parser.on_connect(Line(b"*200\r\n" + value * 30, 1 << 20))
    with at_most(100 * MIB), pytest.raises(RedisError, match="where text was expected"):
        parser.read_response()


# ---- clients


@given(JSON | st.dictionaries(st.text(max_size=8), st.dictionaries(st.sampled_from(["namespace", "metadata"]), JSON)))
def test_whatever_parameters_a_client_sends_only_text_is_taken_from_them(params: object) -> None:
    found = announced(SimpleNamespace(ec_transfer_params=params))
    assert all(isinstance(text, str) for pair in found.items() for text in pair)


# ---- the folder


@given(st.binary(max_size=60) | st.lists(st.integers(0, (1 << 64) - 1), min_size=5, max_size=5))
@settings(deadline=None)
def test_whatever_the_account_holds_entries_are_written_and_a_survey_corrects_it(state: bytes | list[int]) -> None:
    """Even with the right checksum, as a malicious neighbour would write it."""
    import zlib

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        tier = DiskTier(root, 1000)
        tier.put(KEY, memoryview(bytes(100)))
        if isinstance(state, list):
            fields = struct.pack("<8sQQQQQ", b"LMCECUS2", *state)
            state = fields + struct.pack("<I", zlib.crc32(fields))
        (root / ".usage").write_bytes(state)
        try:
            tier.put(EncoderCacheKey("ns", "other"), memoryview(bytes(100)))
        except TierError:
            pass
        tier.maintain()
        tier.maintain()
        held = sum(path.stat().st_size for path in root.rglob("*.safetensors"))
        account = FolderAccount(root / ".usage").read()
        assert account is not None
        assert account.total == held
        assert tier.put(EncoderCacheKey("ns", "third"), memoryview(bytes(100)))


@given(st.lists(st.binary(max_size=100), max_size=6), st.binary(max_size=24))
@settings(deadline=None)
def test_whatever_the_logs_of_neighbours_hold_it_is_no_news_and_does_no_harm(logs: list[bytes], odd: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        news = FolderNews(Path(folder) / ".news")
        assert news.hear("ns") == []
        (Path(folder) / ".news").mkdir()
        for number, data in enumerate(logs):
            (Path(folder) / ".news" / f"{number:024}").write_bytes(data)
        name = odd.replace(b"/", b"").replace(b"\0", b"")
        if name not in (b"", b".", b".."):
            Path(os.fsdecode(os.fsencode(folder) + b"/.news/" + name)).write_bytes(b"x" * 36)
        with at_most(4 * MIB):
            assert news.hear("ns") == []
            news.sweep()
