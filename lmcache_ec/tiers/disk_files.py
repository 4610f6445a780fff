# SPDX-License-Identifier: Apache-2.0
"""The files of a disk tier: found, read, written whole under a name of their own, published, swept.

Plain functions over paths, which know neither the account nor what is evicted. They block as long as the file system
does; OSError if it fails. Any thread.
"""

import errno
import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmcache_ec.key import check_namespace, parse_object_name
from lmcache_ec.tiers.disk_account import in_folder, try_lock

GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}
"""What the system says of what is not there, or not any more."""
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}
_renaming = threading.Lock()  # where links are not to be had: a rename replaces what another thread just published
_SHARD = re.compile(r"[0-9a-f]{2}")
_TEMPORARY = re.compile(r"([0-9]+)\.[0-9a-f]{24}")
_ATTEMPTS = 16
_DEAD_AFTER_S = 3600.0


def is_namespace(name: str) -> bool:
    try:
        check_namespace(name)
    except ValueError:
        return False  # not ours
    return True


def find(path: str) -> int | None:
    """The length of the file at `path`, None if there is none."""
    try:
        return file_length(os.stat(path))
    except OSError as error:
        if error.errno not in GONE:
            raise
    return None


def file_length(status: os.stat_result) -> int | None:
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def read_full(fd: int, buffer: memoryview) -> bool:
    """Fill `buffer` from the file; False if the file ends before."""
    while buffer:
        count = os.readv(fd, [buffer])
        if count == 0:
            return False
        buffer = buffer[count:]
    return True


def write_full(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def mark_used(fd: int) -> None:
    """Now, to the nanosecond: the kernel's own stamps are milliseconds apart, uses are not."""
    now = time.time_ns()
    try:
        os.utime(fd, ns=(now, now))
    except OSError:
        try:
            os.utime(fd)  # all that may be done to a file of another user that we may write
        except OSError:
            pass  # a folder that we may only read: its owner decides what is used


def publish(temporary: str, path: str) -> bool:
    """Give the file its name; False if another file has it already."""
    return in_folder(os.path.dirname(path), lambda: _name(temporary, path))


def _name(temporary: str, path: str) -> bool:
    try:
        os.link(temporary, path)
    except FileExistsError:
        _expect_file(path)
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with _renaming:
            if os.path.lexists(path):
                _expect_file(path)
                return False
            os.rename(temporary, path)
    return True


def _expect_file(path: str) -> None:
    """OSError if what stands where an entry belongs is none, so that nobody takes the entry for stored."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return  # it was one, or whatever it was is in nobody's way any more
    if not (stat.S_ISREG(mode) or os.path.isfile(path)):
        raise FileExistsError(errno.EEXIST, "something that is no file has its name")


@contextmanager
def temporary_file(workshop: str, length: int) -> Iterator[tuple[int, str]]:
    """A new file of ours in the folder `workshop`, to be `length` bytes long; locked while it has a name there."""
    for _ in range(_ATTEMPTS):
        path = f"{workshop}/{length}.{os.urandom(12).hex()}"
        fd = _create(path)
        try:
            if try_lock(fd) is not False and os.fstat(fd).st_nlink:  # else a neighbour swept it before it was locked
                yield fd, path
                return
        finally:
            try:
                _unlink(path)
            finally:
                os.close(fd)
    raise FileNotFoundError(errno.ENOENT, f"what is made in {workshop} has no name at once")


def _create(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return in_folder(os.path.dirname(path), lambda: os.open(path, flags, 0o666))


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError as error:
        if error.errno not in GONE:
            raise


def sweep(workshop: Path | str, *, ours: bool) -> list[tuple[int, os.stat_result]]:
    """Remove the temporaries that no living writer holds; of those that stay the length reserved and the status.

    All files where the folder is `ours` for certain, else those of our names.
    """
    left = []
    for file in scan(workshop):
        match = _TEMPORARY.fullmatch(file.name)
        try:
            if (match or ours) and not _removed_as_dead(file.path):
                left.append((int(match[1]) if match else 0, os.stat(file.path)))
        except OSError:
            pass  # published or swept meanwhile
    return left


def _removed_as_dead(path: str) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except PermissionError:
        return False  # another user's
    try:
        locked = try_lock(fd)
        if locked is False or (locked is None and time.time() - os.fstat(fd).st_mtime < _DEAD_AFTER_S):
            return False
        os.unlink(path)
    except PermissionError:
        return False
    finally:
        os.close(fd)
    return True


def shards_of(folder: Path) -> list[str]:
    return [shard.path for shard in scan(folder) if _SHARD.fullmatch(shard.name)]


def entries_in(shard: str) -> Iterator[tuple[str, bytes, os.stat_result]]:
    """Path, digest and status of the entries in a shard."""
    folder = "/".join(shard.split("/")[-2:])
    for file in scan(shard):
        entry = parse_object_name(f"{folder}/{file.name}")
        if entry is not None:
            status = _status(file)
            if status is not None and stat.S_ISREG(status.st_mode):
                yield file.path, entry.digest, status


def _status(file: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return file.stat()
    except OSError as error:
        if error.errno in GONE:
            return None
        raise


def remove_empty(folder: Path) -> None:
    """Remove the folders of a namespace that holds nothing; a writer that finds its folder gone makes it again."""
    workshop = folder / ".tmp"
    if not workshop.is_dir():
        return  # a stranger's
    try:
        for shard in shards_of(folder):
            os.rmdir(shard)
        os.rmdir(workshop)
        os.rmdir(folder)
    except OSError:
        pass  # in use after all, or not ours to remove


def scan(folder: Path | str) -> list[os.DirEntry[str]]:
    """What a folder holds; nothing if it is gone, or is no folder."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError as error:
        if error.errno in GONE:
            return []
        raise
