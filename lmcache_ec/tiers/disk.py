# SPDX-License-Identifier: Apache-2.0
"""LocalDisk: one file an entry, on a file system that may be shared with other engines.

    <root>/<namespace>/<aa>/<bb>/<sha256>.safetensors    an entry; its time of modification is that of its last use
    <root>/<namespace>/.tmp/<pid>-<random>               an entry being written; its writer holds a lock (flock) on it

A file is written under .tmp and then linked to its name, so that it appears whole and never replaces another (where
the file system has no links it is renamed, and two processes that write one entry at once may both succeed). A
temporary without a lock is what a writer left that was killed. Nothing is synced: an entry outlives its processes; the
loss of power may tear it, and then its digest tells.

Locking: `_lock` guards the index and the byte counts and is never held across I/O; `_first_scan` is held while the
whole folder is indexed, once, before the first write. The file's name alone decides whether an entry is there.
"""

import errno
import fcntl
import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmcache_ec.key import EncoderCacheKey, check_namespace, object_name
from lmcache_ec.tiers.base import Listed, Tier, TierError

_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}
_renaming = threading.Lock()  # where links are not to be had: a rename replaces what another thread just published
_FILE_NAME = re.compile(r"([0-9a-f]{64})\.safetensors")


class DiskTier(Tier):
    """Entries in the files under `root`, at most `max_bytes` of them; the least recently used go first.

    The limit counts what this tier wrote and what it found when it last listed: of several engines on one folder each
    keeps the folder to its own limit, as far as it has seen. ValueError if `root` cannot be a folder.

    Runs in the store process, on the tier's own threads.
    """

    name = "disk"

    def __init__(self, root: Path, max_bytes: int) -> None:
        if max_bytes <= 0:
            raise ValueError(f"size of the disk tier: {max_bytes} bytes given, a positive number is accepted")
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"disk tier at {root}: cannot make this folder: {error.strerror}") from error
        self.root = root
        self.max_bytes = max_bytes
        self._index: dict[str, tuple[int, float]] = {}  # object name -> length, last use
        self._newest = 0.0  # the latest use in the index
        self._in_order = True  # the index lists the least recently used first
        self._stored = 0  # bytes of all that is indexed
        self._writing = 0  # bytes of the writes under way
        self._lock = threading.Lock()
        self._first_scan = threading.Lock()
        self._scanned = False

    def get_into(self, key: EncoderCacheKey, buffer: memoryview) -> int | None:
        name = key.object_name
        with _reported(f"read {name}"):
            fd = _open_or_none(self.root / name, os.O_RDONLY)
            if fd is None:
                self._forget(name)
                return None
            try:
                length = _length(os.fstat(fd))
                if length != len(buffer):
                    return length
                if not _read_full(fd, buffer):
                    return None  # cut short by somebody since it was opened
                _mark_used(fd)
            finally:
                os.close(fd)
        self._used(name, length, time.time())
        return length

    def put(self, key: EncoderCacheKey, data: memoryview) -> bool:
        name, length = key.object_name, len(data)
        if self.contains(key) is not None:
            return False
        self._scan_all_once()
        self._make_room(length)
        try:
            with _reported(f"write {name}, {length} bytes"):
                written = _publish(self.root / key.namespace / ".tmp", self.root / name, data)
        finally:
            with self._lock:
                self._writing -= length
        if written:
            self._used(name, length, time.time())
        return written

    def contains(self, key: EncoderCacheKey) -> int | None:
        name = key.object_name
        with _reported(f"look for {name}"):
            try:
                return _length(os.stat(self.root / name))
            except OSError as error:
                if error.errno not in _GONE:
                    raise
        return None

    def delete(self, key: EncoderCacheKey) -> None:
        name = key.object_name
        with _reported(f"delete {name}"):
            _unlink(self.root / name)
        self._forget(name)

    def list(self, namespace: str) -> Iterator[Listed]:
        """As every tier; and removes what killed writers left, and brings the index up to date."""
        folder = self.root / check_namespace(namespace)
        started, seen = time.time(), set[str]()
        with _reported(f"list {folder}"):
            _sweep(folder / ".tmp")
            for found in _entries(folder):
                name = object_name(namespace, found.digest)
                seen.add(name)
                self._used(name, found.length, found.modified)
                yield found
        with self._lock:
            known = [name for name, (_, used) in self._index.items() if used < started]
        for name in known:
            if name.startswith(f"{namespace}/") and name not in seen:
                self._forget(name)

    def close(self) -> None:
        """There is nothing to let go of."""

    def _scan_all_once(self) -> None:
        """Index every namespace: entries of a model that is served no longer take up room as well."""
        with self._first_scan:
            if self._scanned:
                return
            with _reported(f"list {self.root}"):
                namespaces = [folder.name for folder in _scan(self.root)]
            for namespace in namespaces:
                try:
                    check_namespace(namespace)
                except ValueError:
                    continue  # not ours
                for _ in self.list(namespace):
                    pass
            self._scanned = True

    def _make_room(self, length: int) -> None:
        """Count `length` bytes as being written, after evicting what is in their way. TierError if they cannot fit."""
        victims: list[str] = []
        with self._lock:
            if self._writing + length > self.max_bytes:
                raise TierError(
                    errno.EFBIG,
                    f"an entry of {length} bytes does not fit: the disk tier may hold {self.max_bytes} bytes, "
                    f"and writes under way take {self._writing}",
                )
            if self._stored + self._writing + length > self.max_bytes and not self._in_order:
                self._index = dict(sorted(self._index.items(), key=lambda item: item[1][1]))
                self._in_order = True
            while self._stored + self._writing + length > self.max_bytes:
                victim = next(iter(self._index))
                self._stored -= self._index.pop(victim)[0]
                victims.append(victim)
            self._writing += length
        try:
            with _reported(f"evict {len(victims)} entries"):
                for victim in victims:
                    _unlink(self.root / victim)
        except TierError:
            with self._lock:
                self._writing -= length
            raise

    def _used(self, name: str, length: int, when: float) -> None:
        """Index an entry that is there and was used at `when`, or later if the index knows better."""
        with self._lock:
            known, last = self._index.pop(name, (0, when))
            last = max(when, last)
            self._index[name] = (length, last)
            self._stored += length - known
            self._in_order = self._in_order and last >= self._newest
            self._newest = max(last, self._newest)

    def _forget(self, name: str) -> None:
        with self._lock:
            self._stored -= self._index.pop(name, (0, 0.0))[0]


@contextmanager
def _reported(action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TierError(error.errno, f"disk tier could not {action}: {error.strerror}") from error


def _length(status: os.stat_result) -> int | None:
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _open_or_none(path: Path, flags: int) -> int | None:
    """A descriptor, or None if nothing is there."""
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise


def _read_full(fd: int, buffer: memoryview) -> bool:
    """Fill `buffer` from the file; False if the file ends before."""
    while buffer:
        count = os.readv(fd, [buffer])
        if count == 0:
            return False
        buffer = buffer[count:]
    return True


def _mark_used(fd: int) -> None:
    try:
        os.utime(fd)
    except OSError:
        pass  # a folder that we may only read: its owner decides what is used


def _unlink(path: Path) -> None:
    try:
        os.unlink(path)
    except OSError as error:
        if error.errno not in _GONE:
            raise


def _publish(workshop: Path, path: Path, data: memoryview) -> bool:
    """Make `data` appear at `path`, whole; False if another file is there already."""
    os.makedirs(path.parent, exist_ok=True)
    with _temporary(workshop) as (fd, temporary):
        while data:
            data = data[os.write(fd, data) :]
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            with _renaming:
                if path.exists():
                    return False
                os.rename(temporary, path)
    return True


@contextmanager
def _temporary(workshop: Path) -> Iterator[tuple[int, Path]]:
    """A new file of ours in the folder `workshop`, locked for as long as it has a name there."""
    os.makedirs(workshop, exist_ok=True)
    while True:
        path = workshop / f"{os.getpid()}-{os.urandom(12).hex()}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            if _locked(fd) and os.fstat(fd).st_nlink:  # else a neighbour swept it before it was locked
                yield fd, path
                return
        finally:
            try:
                _unlink(path)
            finally:
                os.close(fd)


def _locked(fd: int) -> bool:
    """Whether the file could be locked at once."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sweep(workshop: Path) -> None:
    """Remove the temporaries that no living writer holds, as far as we may."""
    for file in _scan(workshop):
        try:
            fd = os.open(file.path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                if _locked(fd):
                    os.unlink(file.path)
            finally:
                os.close(fd)
        except OSError:
            pass  # published or swept meanwhile, or another user's


def _entries(folder: Path) -> Iterator[Listed]:
    """The entries in the files of a namespace's folder."""
    for first in _scan(folder):
        for second in _scan(first.path) if len(first.name) == 2 else ():
            for file in _scan(second.path):
                match = _FILE_NAME.fullmatch(file.name)
                if match and match[1].startswith(first.name + second.name):
                    found = _listed(file, bytes.fromhex(match[1]))
                    if found is not None:
                        yield found


def _listed(file: os.DirEntry[str], digest: bytes) -> Listed | None:
    try:
        status = file.stat()
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    length = _length(status)
    return None if length is None else Listed(digest, length, status.st_mtime)


def _scan(folder: Path | str) -> list[os.DirEntry[str]]:
    """What a folder holds; nothing if it is gone, or is no folder."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError as error:
        if error.errno in _GONE:
            return []
        raise
