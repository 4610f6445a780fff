# SPDX-License-Identifier: Apache-2.0
"""The stores of a soak, each with less room than all pictures need, and their configuration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.soak.faults import S3_PREFIX
from benchmarks.soak.parts import RedisServer, Seaweed

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Room:
    """Capacity of each tier in bytes. S3 has no limit of its own: there an entry only counts for `ttl_s`."""

    cpu: int
    disk: int
    redis: int
    ttl_s: float

    @classmethod
    def below(cls, all_bytes: int, ttl_s: float) -> Room:
        """Less than `all_bytes` in total, including what S3 holds meanwhile. (Clients use part of Redis's room.)"""
        return cls(all_bytes // 8, all_bytes // 6, all_bytes // 6 + (1 << 19), ttl_s)


@dataclass(frozen=True, slots=True)
class Stores:
    """Real servers, and the folder of LocalDisk."""

    disk: Path
    redis: RedisServer
    s3: Seaweed
    room: Room

    def keys(self) -> dict[str, object]:
        """The `ec:` keys. Deadlines are short, so that faults are handled within the soak."""
        return {
            "max_local_cpu_size": self.room.cpu / _GIB,
            "local_disk": str(self.disk),
            "max_local_disk_size": self.room.disk / _GIB,
            "min_free_disk_size": 0.1,
            "remotes": [self.redis.url, f"s3://{self.s3.bucket}/{S3_PREFIX}?endpoint={self.s3.endpoint}"],
            "ttl_s": self.room.ttl_s,
            "catalog_refresh_s": 5,
            "blocking_timeout_secs": 1,
            "store_timeout_s": 3,
            "start_timeout_s": 60,
            "drain_s": 10,
        }


@contextmanager
def stores(folder: Path, room: Room) -> Iterator[Stores]:
    """Running stores, which are ended afterwards, whatever happened to them in between."""
    redis = RedisServer(folder / "redis", "--maxmemory-policy", "allkeys-lru")
    try:
        limit = int(redis.client().info("memory")["used_memory"]) + room.redis
        redis.client().config_set("maxmemory", limit)
        redis.settings = (*redis.settings, "--maxmemory", str(limit))  # for its later lives
        s3 = Seaweed(folder / "s3")
        try:
            s3.start()
            yield Stores(folder / "disk", redis, s3, room)
        finally:
            s3.kill()
    finally:
        redis.kill()
