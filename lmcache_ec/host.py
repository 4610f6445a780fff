# SPDX-License-Identifier: Apache-2.0
"""What this machine has available: memory within the host and the control group, and space on a file system.

Only reads (/proc, /sys, statvfs), for messages at an engine's start and for `lmcache-ec doctor`. A call may take as
long as a `stat` on that file system.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lmcache_ec.sizes import rounded_size

_NO_FILES = {
    *("proc", "sysfs", "cgroup", "cgroup2", "debugfs", "tracefs", "securityfs", "selinuxfs", "configfs", "efivarfs"),
    *("devpts", "mqueue", "nsfs", "pstore", "bpf", "binfmt_misc", "fusectl"),
}
"""File systems that are views of the kernel: even root cannot create files there."""
_LONGEST_COUNT_S = 2.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that can still be used, and what sets that limit."""

    available_bytes: int
    limited_by: str


@dataclass(frozen=True, slots=True)
class Disk:
    """The file system of a folder. `nearest` is the folder, or its nearest existing parent."""

    nearest: Path
    writable: bool
    free_bytes: int | None
    """None if the file system does not report it, like some network mounts."""
    kind: str

    @property
    def takes_files(self) -> bool:
        """Whether files can be created there by any user."""
        return self.kind not in _NO_FILES


def memory(root: Path = Path("/")) -> Memory | None:
    """The least available memory: the host's MemAvailable, or what a control group above this process (v1, v2) leaves.

    None if none of them is reported in a known form. A control group counts the page cache as used; its inactive part
    counts as available here.
    """
    try:
        rooms = [*_host_rooms(root), *_group_limits(root)]
    except (ValueError, IndexError):
        return None
    return min(rooms, key=lambda room: room.available_bytes, default=None)


def memory_warning(limit_bytes: int, kv_pool_bytes: int = 0, engines: int = 1) -> str | None:
    """A warning if LocalCPU, in `engines` engines on this host and with LMCache's own KV pool, may outgrow the memory
    available now."""
    room = memory()
    if room is None or limit_bytes * engines + kv_pool_bytes <= room.available_bytes:
        return None
    beside = f" in each of {engines} engines" if engines > 1 else ""
    beside += f" beside the {rounded_size(kv_pool_bytes)} of LMCache's KV pool" if kv_pool_bytes else ""
    advice = "lower max_local_cpu_size" + (", here (ec:) or there" if kv_pool_bytes else "")
    limit, available = rounded_size(limit_bytes), rounded_size(room.available_bytes)
    return (
        f"LocalCPU may grow to {limit}{beside}, but only {available} of memory is available "
        f"({room.limited_by}): {advice}"
    )


def disk(folder: Path) -> Disk:
    """The file system of `folder`. A path that this user may not access counts as missing; for a link, the missing
    folder is its target. OSError if the file system cannot be queried."""
    above = Path(os.path.realpath(folder)).parents
    nearest = next(each for each in (folder, *above) if os.path.exists(each))
    space = os.statvfs(nearest)
    kind = _kind(nearest)
    writable = kind not in _NO_FILES and os.access(nearest, os.W_OK | os.X_OK, effective_ids=True)
    return Disk(nearest, writable, space.f_bavail * space.f_frsize if space.f_blocks else None, kind)


def stored_bytes(folder: Path) -> int:
    """Bytes in the files below a folder, as far as they can be counted in two seconds."""
    deadline = time.monotonic() + _LONGEST_COUNT_S
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue  # evicted by another engine
        if time.monotonic() > deadline:
            break
    return total


def _host_rooms(root: Path) -> Iterator[Memory]:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield Memory(int(line.split()[1]) * 1024, "MemAvailable of the host")


def group_rooms(root: Path = Path("/")) -> Iterator[Memory]:
    """What each limited control group above this process leaves (v1 and v2); unknown formats are ignored."""
    try:
        yield from _group_limits(root)
    except (ValueError, IndexError):
        return


def _group_limits(root: Path) -> Iterator[Memory]:
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _rooms_above(root / "sys/fs/cgroup/memory", group, names)
        elif not controllers:
            yield from _rooms_above(root / "sys/fs/cgroup", group, ("memory.max", "memory.current", "inactive_file"))


def _rooms_above(top: Path, group: str, names: tuple[str, str, str]) -> Iterator[Memory]:
    """What a group and its parents leave. In a container the group's name may differ from /proc's: then it is `top`."""
    limit_name, usage_name, cache_name = names
    inner = top / group.strip("/")
    for folder in (inner, *inner.parents[: len(inner.parts) - len(top.parts)]):
        limit, usage = _lines(folder / limit_name), _lines(folder / usage_name)
        if limit and usage and limit[0].isdigit():
            cache = [line.split()[1] for line in _lines(folder / "memory.stat") if line.split()[0] == cache_name]
            room = int(limit[0]) - int(usage[0]) + sum(map(int, cache))
            yield Memory(max(0, room), f"{limit_name} of control group /{folder.relative_to(top)}".removesuffix("."))


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _kind(folder: Path) -> str:
    """The type of the file system, by the longest mount point above it; empty if /proc does not list it."""
    real, best, kind = folder.resolve(), "", ""
    for line in _lines(Path("/proc/self/mountinfo")):
        before, _, after = line.partition(" - ")
        mount = before.split()[4]
        if real.is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, after.split()[0]
    return kind
