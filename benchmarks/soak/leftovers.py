# SPDX-License-Identifier: Apache-2.0
"""Finds what must not be left over: processes, sockets, memory, descriptors, threads, places, unaccounted bytes."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmcache_ec.tiers.disk_account import FolderAccount
from lmcache_ec.tiers.disk_folder import try_lock

_MEMORY = "/memfd:lmcache-ec"
_NEWS_S = 120.0
_HELD = ("reserved", "writing", "sealing", "filling", "orphaned")
_HELD_COUNTS = (
    *(f"places_{state}" for state in _HELD),
    *(
        "pins",
        "leases",
        "orders",
        "fetches_under_way",
        "staged",
        "requests",
        "dirty_bytes",
        "filling_bytes",
        "leased_bytes",
    ),
)


# ---- of an engine that has ended


@dataclass(frozen=True, slots=True)
class Traces:
    """Everything that could be left of an engine, collected while it runs."""

    started: Mapping[int, str]
    """Its processes with their start times, since pids are reused."""
    memory: frozenset[int]
    """Inodes of arena and presence filters."""
    names: frozenset[str]
    """Abstract sockets."""

    @classmethod
    def of(cls, pids: Sequence[int]) -> Traces:
        memory = frozenset(inode for pid in pids for inode in _memory_of(pid))
        return cls({pid: _started(pid) for pid in pids}, memory, frozenset(_sockets_of(pids)))

    def left(self) -> list[str]:
        """What still exists."""
        running = [pid for pid, when in self.started.items() if when and _started(pid) == when and _state(pid) != "Z"]
        holders = [pid for pid in _pids() if self.memory and _memory_of(pid) & self.memory]
        sockets = self.names & set(_listening().values())
        return [
            *(f"process {pid}" for pid in running),
            *(f"memory, held by process {pid}" for pid in holders if pid not in running),
            *(f"socket @{name}" for name in sockets),
        ]

    def wait(self, patience_s: float) -> list[str]:
        """What still exists after `patience_s`; returns early once nothing does. Blocks."""
        deadline = time.monotonic() + patience_s
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left


# ---- of an engine at rest


def held(book: Mapping[str, int]) -> list[str]:
    """What the scheduler side still holds, but should not while no request is under way."""
    return [f"{name} {book[name]}" for name in _HELD_COUNTS if book.get(name)]


@dataclass(frozen=True, slots=True)
class Footprint:
    """A process's threads and descriptors, the latter by kind."""

    threads: int
    descriptors: Counter[str]

    @classmethod
    def of(cls, pid: int) -> Footprint:
        kinds = (_target(link).split(":[")[0] for link in Path(f"/proc/{pid}/fd").iterdir())
        return cls(
            len(os.listdir(f"/proc/{pid}/task")), Counter(re.sub(r"[0-9a-f]{6,}|\d+", "N", kind) for kind in kinds)
        )

    def beyond(self, before: Footprint) -> list[str]:
        """What has grown since `before`."""
        grown = self.descriptors - before.descriptors
        found = [f"{count} descriptors more of {kind or 'something closed'}" for kind, count in grown.items()]
        return found + ([f"{self.threads - before.threads} threads more"] if self.threads > before.threads else [])


def on_disk(folder: Path) -> list[str]:
    """What is wrong with a folder that no process writes to: temporary files, or a wrong total in its account. Planted
    links do not count as entries."""
    entries = {path for path in folder.glob("*/??/*.safetensors") if path.is_file() and not path.is_symlink()}
    strangers = [path for path in folder.rglob("*") if not (path.is_dir() or path.is_symlink()) and path not in entries]
    left = [f"{path.relative_to(folder)}" for path in strangers if path != folder / ".usage" and not _is_news(path)]
    account, bytes_there = FolderAccount(folder / ".usage").read(), sum(map(_size, entries))
    if account is None:
        return [*left, "no account"]
    if account.total != bytes_there:
        left.append(f"the account says {account.total} bytes, the folder holds {bytes_there}")
    return left


def _is_news(path: Path) -> bool:
    """Whether it is a log of a store process that runs or ended recently: surveys remove logs a minute after that."""
    if path.parent.name != ".news":
        return False
    try:
        with path.open("rb") as file:
            return not try_lock(file.fileno()) or time.time() - path.stat().st_mtime < _NEWS_S
    except FileNotFoundError:
        return True


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


# ---- what the kernel reports


def processes_with(memory: set[int], command: bytes) -> list[int]:
    """Processes with this command that hold one of these memory files."""
    found = []
    for pid in _pids():
        try:
            if command in Path(f"/proc/{pid}/cmdline").read_bytes() and _memory_of(pid) & memory:
                found.append(pid)
        except OSError:
            pass
    return found


def arenas(pid: int) -> set[int]:
    return {inode for inode, name in _memory_files(pid).items() if name.startswith(f"{_MEMORY}-arena")}


def _memory_of(pid: int) -> set[int]:
    return set(_memory_files(pid))


def _memory_files(pid: int) -> dict[int, str]:
    """Inode -> name of our memory files that a process has open or mapped."""
    found = {}
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if (name := _target(link)).startswith(_MEMORY):
                found[os.stat(link).st_ino] = name
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if _MEMORY in line:
                fields = line.split()
                found[int(fields[4])] = fields[5]
    except OSError:
        pass  # it has ended, or closed a descriptor meanwhile
    return found


def _sockets_of(pids: Iterable[int]) -> set[str]:
    """Names of our abstract sockets that these processes have open."""
    listening = _listening()
    found = set()
    for pid in pids:
        try:
            targets = [_target(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        found |= {listening[target] for target in targets if target in listening}
    return found


def _listening() -> dict[str, str]:
    """ "socket:[inode]" -> name, for each of our abstract sockets."""
    lines = (line.split(None, 7) for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:])
    named = (fields for fields in lines if len(fields) == 8 and fields[7].startswith("@lmcache-ec-"))
    return {f"socket:[{fields[6]}]": fields[7][1:] for fields in named}


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _started(pid: int) -> str:
    """Start time in ticks; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""
