# SPDX-License-Identifier: Apache-2.0
"""The remote tiers as the store process uses them, against a bare socket and a bare client, on private servers."""

import mmap
import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import xxhash

from benchmarks.bench.result import LEAST
from benchmarks.bench.sample import BATCHED_MEGABYTES, WIDTH, Samples, in_any_order, noise, rows_of, timed, times_of
from benchmarks.testbed.servers.redis import redis_server
from benchmarks.testbed.servers.seaweed import Seaweed
from lmcache_ec import entry
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.tiers.kinds import configured, open_remote

_NAMESPACE = "bench"
_BATCHES = (16, 64)
_S3_MOST_BYTES = 20_000_000
"""Above this size only the test server's own speed would be measured."""


class Remotes:
    """Runs in its own process, on one thread, in memory whose pages are resident.

    redis_get, redis_put     ours: into and out of the place, and the read verified. Floor: the same bytes through a
                             bare socket, GET by `recv_into` and SET by `sendall`. Both use the same socket in turn:
                             how fast the kernel moves bytes over a connection depends on its earlier traffic, and two
                             connections side by side differ by a factor of two
    redis_…_least            the floor plus what else the design requires: xxh3 of everything that was read, and a check
                             before a write whether the entry exists
    s3_get, s3_put           the same; the floor is bare obstore
    redis_get_16, _64, s3_…  a batch of entries of 0.5 MB, in one call. Floor: one after another, as above
    """

    def __init__(self, folder: str, largest_rows: int) -> None:
        if "torch" in sys.modules:
            raise RuntimeError("the store process imports no torch, and so does what is measured in its place")
        self._stack = ExitStack()
        redis = self._stack.enter_context(redis_server(Path(folder) / "redis"))
        s3 = Seaweed(Path(folder) / "s3")
        s3.start()
        self._stack.callback(s3.kill)
        os.environ.update(s3.environment)
        self._redis = open_at(redis.url)
        self._s3 = open_at(f"s3://{s3.bucket}/bench?endpoint={s3.endpoint}")
        self._bare_redis = BareRedis(socket_of(self._redis))
        self._bare_s3 = BareS3(s3)
        length = entry.entry_length("0" * 64, entry.TensorSpec(largest_rows, WIDTH, "BF16"))
        batch = max(_BATCHES) * entry.entry_length(
            "0" * 64, entry.TensorSpec(rows_of(BATCHED_MEGABYTES), WIDTH, "BF16")
        )
        fd = os.memfd_create("bench")
        os.ftruncate(fd, max(length, batch))
        self._memory = memoryview(mmap.mmap(fd, max(length, batch)))
        self._memory[:] = noise(len(self._memory))
        self._number = 0

    def measure(self, rows: int) -> Samples:
        samples: Samples = {}
        for _ in range(times_of(rows)):
            key, place = self._sealed(rows, 0)
            parties: list[tuple[str, Any, Any]] = [("redis", self._redis, self._bare_redis)]
            if len(place) <= _S3_MOST_BYTES:
                parties.append(("s3", self._s3, self._bare_s3))
            for name, tier, bare in parties:
                in_any_order(
                    lambda: self._ours(samples, name, tier, key, place),  # noqa: B023
                    lambda: self._floor(samples, name, bare, place),  # noqa: B023
                    lambda: self._least(samples, name, bare, place),  # noqa: B023
                )
                for row in (f"{name}_get", f"{name}_put"):
                    if (row + LEAST, "ours") in samples:
                        samples[row + LEAST, "floor"] = samples[row, "floor"]
        return samples

    def batches(self) -> Samples:
        """Batches of entries of 0.5 MB; seconds for the whole batch."""
        samples: Samples = {}
        rows = rows_of(BATCHED_MEGABYTES)
        for count in _BATCHES:
            wanted, end = [], 0
            for _ in range(count):
                key, place = self._sealed(rows, end)
                end += len(place)
                wanted.append((key, place))
            for name, tier, bare in (("redis", self._redis, self._bare_redis), ("s3", self._s3, self._bare_s3)):
                for key, place in wanted:
                    tier.put(key, place)
                    bare.put(key.identifier, place)
                in_any_order(
                    lambda: timed(samples, f"{name}_get_{count}", "ours", lambda: self._get_each(tier, wanted)),  # noqa: B023
                    lambda: timed(
                        samples,
                        f"{name}_get_{count}",  # noqa: B023
                        "floor",
                        lambda: [bare.get(key.identifier, place) for key, place in wanted],  # noqa: B023
                    ),
                )
                for key, _ in wanted:
                    tier.delete(key)
                    bare.delete(key.identifier)
        return samples

    def _ours(self, samples: Samples, name: str, tier: Any, key: EncoderCacheKey, place: memoryview) -> None:
        timed(samples, f"{name}_put", "ours", lambda: tier.put(key, place))
        timed(samples, f"{name}_get", "ours", lambda: self._get_each(tier, [(key, place)]))
        tier.delete(key)

    @staticmethod
    def _get_each(tier: Any, wanted: list[tuple[EncoderCacheKey, memoryview]]) -> None:
        if len(wanted) == 1:
            [(key, place)] = wanted
            lengths = [tier.get_into(key, place)]
        else:
            lengths = tier.get_each_into(wanted)
        if lengths != [len(place) for _, place in wanted]:
            raise RuntimeError(f"what was put is not there: {lengths}")
        for key, place in wanted:
            entry.verify(place, key)

    @staticmethod
    def _floor(samples: Samples, name: str, bare: Any, place: memoryview) -> None:
        timed(samples, f"{name}_put", "floor", lambda: bare.put("floor", place))
        timed(samples, f"{name}_get", "floor", lambda: bare.get("floor", place))
        bare.delete("floor")

    @staticmethod
    def _least(samples: Samples, name: str, bare: Any, place: memoryview) -> None:
        if isinstance(bare, BareRedis):
            timed(samples, f"{name}_put{LEAST}", "ours", lambda: bare.put_if_missing("floor", place))
            timed(samples, f"{name}_get{LEAST}", "ours", lambda: bare.get_digest("floor", place))
            bare.delete("floor")

    def _sealed(self, rows: int, at: int) -> tuple[EncoderCacheKey, memoryview]:
        self._number += 1
        spec = entry.TensorSpec(rows, WIDTH, "BF16")
        key = EncoderCacheKey(_NAMESPACE, f"{self._number:064x}")
        place = self._memory[at : at + entry.entry_length(key.identifier, spec)]
        entry.seal(place, key, spec, "bench")
        return key, place

    def close(self) -> None:
        self._redis.close()
        self._s3.close()
        self._stack.close()


def open_at(url: str) -> Any:
    return open_remote(configured(url, {}))


def socket_of(tier: Any) -> socket.socket:
    """Socket of the tier's only connection, which it keeps as long as nothing fails."""
    pool = tier._client.connection_pool
    connection = pool.get_connection()
    pool.release(connection)
    return connection._sock  # type: ignore[no-any-return]


class BareRedis:
    """RESP by hand over one blocking socket."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def put(self, name: str, data: memoryview) -> None:
        self._socket.settimeout(None)
        self._socket.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name.encode(), len(data)))
        self._socket.sendall(data)
        self._socket.sendall(b"\r\n")
        self._line()

    def put_if_missing(self, name: str, data: memoryview) -> None:
        self._socket.settimeout(None)
        self._socket.sendall(b"*2\r\n$6\r\nSTRLEN\r\n$%d\r\n%s\r\n" % (len(name), name.encode()))
        if self._line() != b":0":
            raise RuntimeError("it is there")
        self.put(name, data)

    def get_digest(self, name: str, place: memoryview) -> bytes:
        self.get(name, place)
        return xxhash.xxh3_128(place).digest()

    def get(self, name: str, place: memoryview) -> None:
        self._socket.settimeout(None)
        self._socket.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name.encode()))
        if self._line() != b"$%d" % len(place):
            raise RuntimeError("what was put is not there")
        have = 0
        while have < len(place):
            have += self._socket.recv_into(place[have:])
        self._line()

    def delete(self, name: str) -> None:
        self._socket.sendall(b"*2\r\n$6\r\nUNLINK\r\n$%d\r\n%s\r\n" % (len(name), name.encode()))
        self._line()

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\r\n"):
            line += self._socket.recv(1)
        return line[:-2]


class BareS3:
    """obstore as its documentation shows it."""

    def __init__(self, server: Seaweed) -> None:
        import obstore
        from obstore.store import S3Store

        self._obstore = obstore
        self._store = S3Store(
            server.bucket,
            endpoint=server.endpoint,
            access_key_id=server.access_key_id,
            secret_access_key=server.secret_access_key,
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )

    def put(self, name: str, data: memoryview) -> None:
        self._obstore.put(self._store, f"bare/{name}", data, use_multipart=False)

    def get(self, name: str, place: memoryview) -> None:
        if len(self._obstore.get(self._store, f"bare/{name}").bytes()) != len(place):
            raise RuntimeError("what was put is not there")

    def delete(self, name: str) -> None:
        self._obstore.delete(self._store, f"bare/{name}")
