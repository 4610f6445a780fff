# SPDX-License-Identifier: Apache-2.0
"""What other writers of a folder have just written: a small log for each writer, which the others follow.

    <root>/.news/<24 hex digits>    records of 36 bytes: the digest of a key, and a CRC-32 over it and its namespace

A writer appends a record once the entry has its name. It has one log at a time, with a lock (flock) on it; when it is
full, a new one is begun, and the two before that are kept. A follower reads what was added since its last read, and
begins before its first listing; so listing and logs together leave nothing out. But nothing depends on a log: what was
never in one (no room, no right to write), what was not read before its removal, and what a network file system shows
late (NFS caches sizes and folders for seconds to a minute) is found by the next listing.

A log is untrusted input. Only records that verify are accepted, and those cost at worst a false "maybe" in the presence
filter. Only regular files with such names in a real folder are opened, without blocking, and read no further than a log
may reach. A torn record, left at the end by a killed writer, is skipped; records of other namespaces and of other
versions do not verify.

Who removes a log: its writer, as above; and any process's survey of the folder, once the log has had no writer and no
change for a minute, by when every follower has read it (no writer: no lock on it; or, without locks, an hour old). The
folder may be removed by hand: a writer checks after each append whether its log still has its name, and appends to
another if not. Logs are not in the account: each process that writes has at most 192 KiB of them.
"""

import errno
import os
import re
import struct
import threading
import zlib
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from lmcache_ec.tiers.disk_folder import (
    FOLDER,
    LISTED,
    Descriptor,
    create_file,
    open_below,
    open_file,
    open_or_make,
    open_root,
    present,
    try_lock,
)

_RECORD = struct.Struct("<32sI")
_VERSION = b"lmcache-ec news 1\0"
_LOG_BYTES = 1820 * _RECORD.size  # 64 KiB
_KEPT_LOGS = 3
_NAME = re.compile(r"[0-9a-f]{24}")
_FOLLOWED = 256
"""The most files in the folder that a follower looks at."""
_TURN_BYTES = 1 << 20
"""The most that one call reads; the rest waits for the next."""
_UNREAD_S = 60.0
_DEAD_AFTER_S = 3600.0
_REMADE = 16
"""How often the folder is made again for one log, if it is removed each time."""


class _LogFolder(NamedTuple):
    """The folder of the logs, `name` below `root`."""

    root: str
    name: str

    def open(self, flags: int) -> Descriptor:
        with Descriptor(open_root(self.root)) as root:
            return Descriptor(open_below(root, self.name, flags))


class FolderNews:
    """The news of one folder, at `path`: what this process writes there, and what it reads. Any thread may call it.

    No method fails, and only `announce` makes the folder. `_telling` is held across an append and `_hearing` across a
    read of the logs: a thread that waits for one of them was about to do the same.
    """

    def __init__(self, path: Path) -> None:
        self._where = _LogFolder(str(path.parent), path.name)
        self._log = _Log(self._where)
        self._heard_to: dict[str, int] | None = None  # name of a log -> bytes of it that were read
        self._telling, self._hearing = threading.Lock(), threading.Lock()

    def announce(self, namespace: str, digest: bytes) -> None:
        """The entry whose key has this 32-byte digest has just been written."""
        record = _RECORD.pack(digest, zlib.crc32(digest, _seed(namespace)))
        with self._telling:
            try:
                self._log.append(record)
            except OSError:
                self._log.leave()  # the next entry tries again

    def hear(self, namespace: str) -> list[bytes]:
        """Digests of entries that others have written since the last call. The first call only marks the start."""
        heard: list[bytes] = []
        seed, left = _seed(namespace), _TURN_BYTES
        with self._hearing:
            before, after = self._heard_to, dict[str, int]()
            try:
                for folder, name, status in _logs(self._where, _FOLLOWED):
                    if name.startswith(self._log.writer):
                        continue
                    begin = _whole(status.st_size) if before is None else before.get(name, 0)
                    data = _read(folder, name, begin, min(status.st_size, _LOG_BYTES, begin + left))
                    after[name], left = begin + len(data), left - len(data)
                    heard += [key for key, check in _RECORD.iter_unpack(data) if check == zlib.crc32(key, seed)]
            except OSError:
                after = {**(before or {}), **after}  # no folder yet, or it cannot be read to the end at this moment
            self._heard_to = after
        return heard

    def sweep(self) -> None:
        """Remove the logs that no process writes any more."""
        now: float | None = None
        try:
            for folder, name, status in _logs(self._where):
                now = present(folder) if now is None else now
                if (age := now - status.st_mtime) > _UNREAD_S:
                    _remove_dead(folder, name, age)
        except OSError:
            pass  # no folder


class _Log:
    """The log of one writer, and those that it filled before. The caller has the lock."""

    def __init__(self, where: _LogFolder) -> None:
        self.writer = os.urandom(8).hex()
        """The prefix of its logs' names."""
        self._where = where
        self._names: deque[str] = deque()
        self._begun = 0
        self._file: FileIO | None = None  # not a descriptor: it is closed with the tier's owner
        self._identity = (0, 0)
        self._room = 0

    def append(self, record: bytes) -> None:
        """OSError if it cannot be written."""
        for _ in range(2):
            file = self._file if self._file is not None and self._room >= len(record) else self._begin()
            self._room -= len(record)
            if file.write(record) == len(record) and self._has_its_name():
                return
            self.leave()

    def leave(self) -> None:
        """Stop writing to the current log."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self) -> FileIO:
        self.leave()
        name = f"{self.writer}{self._begun % (1 << 32):08x}"
        self._begun += 1
        self._file = _create(self._where, name)
        status = os.fstat(self._file.fileno())
        self._identity, self._room = (status.st_dev, status.st_ino), _LOG_BYTES
        try_lock(self._file.fileno())
        self._names.append(name)
        if len(self._names) > _KEPT_LOGS:
            _remove(self._where, self._names.popleft())
        return self._file

    def _has_its_name(self) -> bool:
        try:
            status = os.lstat(f"{self._where.root}/{self._where.name}/{self._names[-1]}")
        except FileNotFoundError:
            return False
        return (status.st_dev, status.st_ino) == self._identity


@lru_cache(16)
def _seed(namespace: str) -> int:
    return zlib.crc32(_VERSION + namespace.encode())


def _whole(length: int) -> int:
    """How many of `length` bytes are whole records."""
    return length - length % _RECORD.size


def _logs(where: _LogFolder, at_most: int | None = None) -> Iterator[tuple[int, str, os.stat_result]]:
    """The folder's descriptor, and name and status of each log in it, among the first `at_most` files. OSError if there
    is no folder."""
    with where.open(LISTED) as folder, os.scandir(folder) as found:
        for file in islice(found, at_most):
            if _NAME.fullmatch(file.name) and file.is_file(follow_symlinks=False):
                try:
                    yield folder, file.name, file.stat(follow_symlinks=False)
                except FileNotFoundError:
                    pass  # removed meanwhile


def _read(folder: int, name: str, begin: int, end: int) -> bytes:
    """Whole records between two offsets in a log; none if it was removed, or may not be read."""
    if begin >= end:
        return b""
    try:
        with Descriptor(open_file(folder, name, os.O_RDONLY)) as fd:
            data = os.pread(fd, end - begin, begin)
    except OSError:
        return b""
    return data[: _whole(len(data))]


def _create(where: _LogFolder, name: str) -> FileIO:
    """A new log; the folder is made if it is missing or is removed meanwhile."""
    for _ in range(_REMADE):
        try:
            with (
                Descriptor(open_root(where.root, make=True)) as root,
                Descriptor(open_or_make(root, where.name)) as folder,
            ):
                return FileIO(create_file(folder, name, os.fstat(root)), "w")
        except FileNotFoundError:
            continue
    raise FileNotFoundError(errno.ENOENT, "the folder of the logs is removed again and again")


def _remove(where: _LogFolder, name: str) -> None:
    try:
        with where.open(FOLDER) as folder:
            os.unlink(name, dir_fd=folder)
    except OSError:
        pass  # swept, or the folder was removed


def _remove_dead(folder: int, name: str, age: float) -> None:
    try:
        with Descriptor(open_file(folder, name, os.O_WRONLY)) as fd:
            locked = try_lock(fd)
            if locked or (locked is None and age > _DEAD_AFTER_S):
                os.unlink(name, dir_fd=folder)
    except OSError:
        pass  # another user's, or swept by another process
