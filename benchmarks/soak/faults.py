# SPDX-License-Identifier: Apache-2.0
"""Faults injected into store process, folder and stores from outside. Each has one function and one line in the table.

A fault takes its targets and a random source. It returns whether it found something to damage or, if it has to be
undone, `Held`: after how long, and how. Faults run on any thread, one at a time per target.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.soak.parts import RedisServer, Seaweed

S3_PREFIX = "soak"


@dataclass
class Targets:
    """What can be damaged. `store_processes` are those of the engine that serves now."""

    disk: Path
    redis: RedisServer
    s3: Seaweed
    store_processes: Callable[[], list[int]]

    def __post_init__(self) -> None:
        self.s3_client = self.s3.client()
        """boto3's client, kept because creating one takes 50 ms."""

    def entries(self) -> list[Path]:
        return sorted(self.disk.glob("*/??/*.safetensors"))

    def objects(self) -> list[str]:
        found = self.s3_client.list_objects_v2(Bucket=self.s3.bucket, Prefix=f"{S3_PREFIX}/")
        return sorted(each["Key"] for each in found.get("Contents", ()))


@dataclass(frozen=True, slots=True)
class Held:
    """A fault that lasts: `undo` after `seconds`. `undo` may itself take seconds, as a server's start does."""

    seconds: float
    undo: Callable[[], object]


Outcome = bool | Held
Act = Callable[[Targets, Random], Outcome]


@dataclass(frozen=True, slots=True)
class Fault:
    """`weight`: how often, relative to the others. `core_weight`: the same where no engine has to restart."""

    name: str
    act: Act
    weight: float
    core_weight: float

    @property
    def hurts(self) -> str:
        """The target: disk, store, redis or s3."""
        return self.name.partition("-")[0]


# ---- the folder


def _flip(targets: Targets, chance: Random) -> Outcome:
    def flip(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(chance.randrange(path.stat().st_size))
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1 << chance.randrange(8)]))

    return _to_an_entry(targets, chance, flip)


def _truncate(targets: Targets, chance: Random) -> Outcome:
    return _to_an_entry(targets, chance, lambda path: os.truncate(path, chance.randrange(path.stat().st_size)))


def _extend(targets: Targets, chance: Random) -> Outcome:
    def extend(path: Path) -> None:
        with path.open("ab") as file:
            file.write(chance.randbytes(chance.randrange(1, 5000)))

    return _to_an_entry(targets, chance, extend)


def _swap(targets: Targets, chance: Random) -> Outcome:
    """Two entries swap names."""

    def swap(one: Path, other: Path) -> None:
        aside = targets.disk / "swapped"
        one.rename(aside)
        other.rename(one)
        aside.rename(other)

    return _to_two_entries(targets, chance, swap)


def _link(targets: Targets, chance: Random) -> Outcome:
    """An entry becomes a link to another one, symbolic or hard."""

    def link(one: Path, other: Path) -> None:
        one.unlink()
        if chance.random() < 0.5:
            one.symlink_to(other)
        else:
            os.link(other, one)

    return _to_two_entries(targets, chance, link)


def _pipe(targets: Targets, chance: Random) -> Outcome:
    """For a while a FIFO, on which no reader may block, has an entry's name."""

    def become(path: Path) -> None:
        path.unlink()
        os.mkfifo(path)

    entries = targets.entries()
    if not entries:
        return False
    path = chance.choice(entries)
    with _if_there():
        become(path)
        return Held(chance.uniform(0.1, 2.0), lambda: path.unlink(missing_ok=True))
    return False


def _delete(targets: Targets, chance: Random) -> Outcome:
    return _to_an_entry(targets, chance, Path.unlink)


def _remove_folder(targets: Targets, chance: Random) -> Outcome:
    """Remove a shard, a namespace, or the whole folder."""
    shards = sorted(targets.disk.glob("*/??"))
    if not shards:
        return False
    shard = chance.choice(shards)
    folder = chance.choices([shard, shard.parent, targets.disk], [6, 2, 1])[0]
    shutil.rmtree(folder, ignore_errors=True)
    return True


def _corrupt_account(targets: Targets, chance: Random) -> Outcome:
    path = targets.disk / ".usage"
    with _if_there():
        if chance.random() < 0.5:
            path.unlink()
        else:
            path.write_bytes(chance.randbytes(chance.randrange(1, 60)))
        return True
    return False


def _corrupt_news(targets: Targets, chance: Random) -> Outcome:
    """Remove or corrupt a neighbour's log, remove all of them, or add one that no process wrote."""
    folder = targets.disk / ".news"
    logs = sorted(folder.glob("*"))
    if not logs:
        return False
    with _if_there():
        how, log = chance.randrange(4), chance.choice(logs)
        if how == 0:
            log.unlink()
        elif how == 1:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            path = log if how == 2 else folder / chance.randbytes(12).hex()
            path.write_bytes(chance.randbytes(chance.randrange(1, 100_000)))
        return True
    return False


def _leave_temporary(targets: Targets, chance: Random) -> Outcome:
    """Add a file as a killed writer leaves it."""
    workshops = sorted(targets.disk.glob("*/.tmp"))
    if not workshops:
        return False
    with _if_there():
        size = chance.randrange(1, 20_000)
        (chance.choice(workshops) / f"{size}.{chance.randbytes(12).hex()}").write_bytes(chance.randbytes(size // 2))
        return True
    return False


def _to_an_entry(targets: Targets, chance: Random, do: Callable[[Path], object]) -> bool:
    entries = targets.entries()
    if not entries:
        return False
    with _if_there():
        do(chance.choice(entries))
        return True
    return False


def _to_two_entries(targets: Targets, chance: Random, do: Callable[[Path, Path], object]) -> bool:
    entries = targets.entries()
    if len(entries) < 2:
        return False
    with _if_there():
        do(*chance.sample(entries, 2))
        return True
    return False


def _if_there() -> contextlib.AbstractContextManager[None]:
    """The file may have been evicted, deleted, rewritten or emptied meanwhile: then there was nothing to damage."""
    return contextlib.suppress(FileNotFoundError, FileExistsError, ValueError)


# ---- the store process


def _stop_store(targets: Targets, chance: Random) -> Outcome:
    return _stopped(targets, chance.uniform(0.05, 1.5))


def _stop_store_for_long(targets: Targets, chance: Random) -> Outcome:
    """Stopped for longer than it may be silent, so that it is killed and replaced."""
    return _stopped(targets, chance.uniform(3.5, 6.0))


def _stopped(targets: Targets, seconds: float) -> Outcome:
    pids = targets.store_processes()
    _send(pids, signal.SIGSTOP)
    return Held(seconds, lambda: _send(pids, signal.SIGCONT)) if pids else False


def _kill_store(targets: Targets, chance: Random) -> Outcome:
    pids = targets.store_processes()
    _send(pids, signal.SIGKILL)
    return bool(pids)


def _send(pids: list[int], what: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)


# ---- Valkey


def _stop_redis(targets: Targets, chance: Random) -> Outcome:
    targets.redis.freeze()
    return Held(chance.uniform(0.1, 4.0), targets.redis.thaw)


def _kill_redis(targets: Targets, chance: Random) -> Outcome:
    targets.redis.kill()
    return Held(chance.uniform(0.1, 3.0), targets.redis.start)


def _flush_redis(targets: Targets, chance: Random) -> Outcome:
    client = targets.redis.client()
    held = bool(client.dbsize())
    client.flushall()
    return held


def _hang_up_redis(targets: Targets, chance: Random) -> Outcome:
    return bool(targets.redis.client().client_kill_filter(_type="normal", skipme=True))


def _pause_redis(targets: Targets, chance: Random) -> Outcome:
    """It answers no client but keeps its connections; it resumes by itself."""
    seconds = chance.uniform(0.05, 3.0)
    targets.redis.client().client_pause(int(seconds * 1000))
    return Held(seconds, lambda: None)


def _fill_redis(targets: Targets, chance: Random) -> Outcome:
    """It is full and evicts nothing: every write is an error."""
    client = targets.redis.client()
    before = {name: client.config_get(name)[name] for name in ("maxmemory", "maxmemory-policy")}
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", "1")

    def undo() -> None:
        for name, value in before.items():
            client.config_set(name, value)

    return Held(chance.uniform(0.2, 3.0), undo)


def _poison_redis(targets: Targets, chance: Random) -> Outcome:
    """A value is corrupted, truncated, or replaced by noise, by another value or by another type."""
    client = targets.redis.client()
    key, other = client.randomkey(), client.randomkey()
    value = client.get(key) if key else None
    if key is None or not value:
        return False
    match chance.randrange(5):
        case 0:
            client.setrange(key, chance.randrange(len(value)), chance.randbytes(3))
        case 1:
            client.set(key, value[: chance.randrange(len(value))])
        case 2:
            client.set(key, chance.randbytes(chance.randrange(60_000)))
        case 3:
            client.set(key, client.get(other) or b"")
        case _:
            client.delete(key)
            client.rpush(key, "no string")
    return True


def _delete_from_redis(targets: Targets, chance: Random) -> Outcome:
    client = targets.redis.client()
    key = client.randomkey()
    return bool(key and client.delete(key))


# ---- S3


def _stop_s3(targets: Targets, chance: Random) -> Outcome:
    stopped = targets.s3.stopped()
    stopped.__enter__()
    return Held(chance.uniform(0.1, 4.0), lambda: stopped.__exit__(None, None, None))


def _kill_s3(targets: Targets, chance: Random) -> Outcome:
    targets.s3.kill()
    return Held(chance.uniform(0.1, 2.0), targets.s3.start)


def _poison_s3(targets: Targets, chance: Random) -> Outcome:
    """An object is corrupted, truncated, extended, or replaced by noise or by another object."""
    objects, client, bucket = targets.objects(), targets.s3_client, targets.s3.bucket
    if not objects:
        return False
    key, other = chance.choice(objects), chance.choice(objects)
    body = bytearray(_body(targets, other if chance.random() < 0.25 else key))
    if not body:
        return False
    match chance.randrange(4):
        case 0:
            body[chance.randrange(len(body))] ^= 1 << chance.randrange(8)
        case 1:
            del body[chance.randrange(len(body)) :]
        case 2:
            body = bytearray(chance.randbytes(chance.randrange(60_000)))
        case _:
            body += chance.randbytes(100)
    client.put_object(Bucket=bucket, Key=key, Body=bytes(body))
    return True


def _body(targets: Targets, key: str) -> bytes:
    client: Any = targets.s3_client
    try:
        return bytes(client.get_object(Bucket=targets.s3.bucket, Key=key)["Body"].read())
    except client.exceptions.NoSuchKey:
        return b""


def _swap_in_s3(targets: Targets, chance: Random) -> Outcome:
    objects, client, bucket = targets.objects(), targets.s3_client, targets.s3.bucket
    if len(objects) < 2:
        return False
    one, other = chance.sample(objects, 2)
    bodies = _body(targets, one), _body(targets, other)
    if not all(bodies):
        return False
    client.put_object(Bucket=bucket, Key=other, Body=bodies[0])
    client.put_object(Bucket=bucket, Key=one, Body=bodies[1])
    return True


def _delete_from_s3(targets: Targets, chance: Random) -> Outcome:
    """Delete a few objects, or all of them, as a lifecycle rule does."""
    objects = targets.objects()
    if not objects:
        return False
    doomed = objects if chance.random() < 0.1 else chance.sample(objects, min(len(objects), chance.randrange(1, 9)))
    named = [{"Key": key} for key in doomed]
    targets.s3_client.delete_objects(Bucket=targets.s3.bucket, Delete={"Objects": named, "Quiet": True})
    return True


FAULTS = (
    Fault("disk-flip", _flip, 8, 20),
    Fault("disk-truncate", _truncate, 5, 12),
    Fault("disk-extend", _extend, 3, 8),
    Fault("disk-swap", _swap, 8, 16),
    Fault("disk-link", _link, 5, 10),
    Fault("disk-pipe", _pipe, 2, 4),
    Fault("disk-delete", _delete, 4, 10),
    Fault("disk-folder", _remove_folder, 3, 5),
    Fault("disk-account", _corrupt_account, 2, 4),
    Fault("disk-news", _corrupt_news, 2, 4),
    Fault("disk-temporary", _leave_temporary, 2, 4),
    Fault("store-stop", _stop_store, 5, 4),
    Fault("store-stop-long", _stop_store_for_long, 1, 0.1),
    Fault("store-kill", _kill_store, 4, 2),
    Fault("redis-stop", _stop_redis, 3, 1),
    Fault("redis-kill", _kill_redis, 3, 1),
    Fault("redis-flush", _flush_redis, 2, 2),
    Fault("redis-hang-up", _hang_up_redis, 3, 3),
    Fault("redis-pause", _pause_redis, 1, 0.5),
    Fault("redis-full", _fill_redis, 1, 1),
    Fault("redis-poison", _poison_redis, 10, 20),
    Fault("redis-delete", _delete_from_redis, 4, 10),
    Fault("s3-stop", _stop_s3, 2, 0.5),
    Fault("s3-kill", _kill_s3, 0.7, 0.1),
    Fault("s3-poison", _poison_s3, 8, 8),
    Fault("s3-swap", _swap_in_s3, 4, 4),
    Fault("s3-delete", _delete_from_s3, 4, 4),
)
