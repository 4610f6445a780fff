# SPDX-License-Identifier: Apache-2.0
"""Files of a disk tier: find, read, write whole under a temporary name, publish, sweep.

Plain functions over folder descriptors, which know neither the account nor what is evicted. They block as long as
the file system does. OSError if it fails; `Foreign` (see disk_folder.py) if a folder on the path is a link or a mount.
Any thread.

Anything with an entry's name that is not a regular file is not an entry: it is not read, listed or removed. If it is a
link, the next write of that entry replaces it (the link, not its target); if it is anything else, that write fails.
"""

import errno
import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from lmcache_ec.key import EncoderCacheKey, is_namespace, object_name, parse_object_name
from lmcache_ec.tiers.disk_folder import (
    FILE,
    FOLDER,
    GONE,
    LISTED,
    NO_FILE,
    Descriptor,
    Foreign,
    create_file,
    open_below,
    open_file,
    open_or_make,
    present,
    try_lock,
)

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}
_renaming = threading.Lock()  # where there are no links: a rename would replace what another thread just published
_SHARD = re.compile(r"[0-9a-f]{2}")
_TEMPORARY = re.compile(r"([0-9]{1,15})\.[0-9a-f]{24}")
_ATTEMPTS = 16
_DEAD_AFTER_S = 3600.0


def find(root: int, name: str) -> int | None:
    """The length of the entry with this name, None if there is none."""
    above, _, last = name.rpartition("/")
    try:
        with Descriptor(open_below(root, above, FOLDER)) as folder:
            return find_in(folder, last)
    except OSError as error:
        if error.errno not in GONE:
            raise
    return None


def find_in(folder: int, last: str) -> int | None:
    """As `find`, in the folder that holds the entry."""
    try:
        status = os.stat(last, dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        if error.errno not in GONE:
            raise
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _opened(root: int, name: str) -> int | None:
    """The file with this name, open for reading; None if it cannot be an entry."""
    try:
        return open_below(root, name, os.O_RDONLY | FILE)
    except Foreign:
        find(root, name)  # Foreign again if it is a folder on the path, else there is no entry
    except OSError as error:
        if error.errno not in GONE | NO_FILE:
            raise
    return None


def read_start(root: int, name: str, most: int) -> bytes | None:
    """The first `most` bytes of the entry with this name, None if there is none. Does not mark it as used."""
    fd = _opened(root, name)
    if fd is None:
        return None
    with Descriptor(fd):
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None
        buffer = memoryview(bytearray(min(most, status.st_size)))
        return bytes(buffer) if _read_full(fd, buffer) else None


def read_into(root: int, name: str, buffer: memoryview) -> int | None:
    """Fill `buffer` from the entry with this name if the lengths match: its length, None if there is none."""
    fd = _opened(root, name)
    if fd is None:
        return None
    with Descriptor(fd):
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return None
            if status.st_size == len(buffer):
                if not _read_full(fd, buffer):
                    return None  # truncated since it was opened
                if status.st_nlink == 1:  # else the time also belongs to a file elsewhere
                    mark_used(fd)
        except OSError as error:
            if error.errno not in GONE:
                raise
            return None
    return status.st_size


def remove_entry(root: int, name: str, used: int | None = None) -> os.stat_result | None:
    """Remove an entry: its status before removal; None if there is none, or if it was used since `used` (ns)."""
    above, _, last = name.rpartition("/")
    try:
        with Descriptor(open_below(root, above, FOLDER)) as folder:
            status = os.stat(last, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) or used not in (None, status.st_mtime_ns):
                return None
            os.unlink(last, dir_fd=folder)
    except OSError as error:
        if error.errno not in GONE:
            raise
        return None
    return status


# ---- written


class NewEntry(NamedTuple):
    """An entry to be written. `over`: replace an entry of this name. `used` (Unix): its last use, if that was
    elsewhere. `name` is that of its object."""

    namespace: str
    digest: bytes
    name: str
    data: memoryview
    over: bool
    used: float | None

    @classmethod
    def of(cls, key: EncoderCacheKey, data: memoryview, *, over: bool = False, used: float | None = None) -> "NewEntry":
        digest = key.digest
        return cls(key.namespace, digest, object_name(key.namespace, digest), data, over, used)


class TemporaryFile:
    """Our new file in the folder `workshop`, to become `length` bytes long; locked while it has a name there.

    FileNotFoundError if neighbours remove it each time before it is locked. One thread."""

    __slots__ = ("_workshop", "fd", "name", "outlived_entry")

    def __init__(self, of_root: os.stat_result, workshop: int, length: int) -> None:
        self._workshop = workshop
        self.outlived_entry = False
        """Whether its name here was the file's last: true if the entry had been removed by then."""
        for _ in range(_ATTEMPTS):
            self.name = f"{length}.{os.urandom(12).hex()}"
            self.fd = create_file(workshop, self.name, of_root)
            try:
                if try_lock(self.fd) is not False and os.fstat(self.fd).st_nlink:
                    return
            except BaseException:
                self.__exit__()
                raise
            self.__exit__()  # a neighbour swept it before it was locked
        raise FileNotFoundError(errno.ENOENT, "a new temporary has no name at once")

    def __enter__(self) -> "TemporaryFile":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            is_last = os.fstat(self.fd).st_nlink == 1  # not read afterwards, when the entry's name may be the last
            self.outlived_entry = _unlink(self._workshop, self.name) and is_last
        finally:
            os.close(self.fd)


def write_full(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def mark_used(fd: int) -> None:
    """Stamp the present, to the nanosecond: the kernel's timestamps are milliseconds apart, uses are not."""
    now = time.time_ns()
    try:
        os.utime(fd, ns=(now, now))
    except OSError:
        try:
            os.utime(fd)  # all that is allowed on another user's file that we may write
        except OSError:
            pass  # a folder that we may only read: its owner decides what counts as used


class Shard:
    """The descriptor of a folder that holds entries, None while there is none. Closed at the end of the `with`."""

    __slots__ = ("_fd",)

    def __init__(self, root: int, name: str) -> None:
        self._fd: int | None = None
        try:
            self._fd = open_below(root, name, FOLDER)
        except OSError as error:
            if error.errno not in GONE:
                raise

    def __enter__(self) -> int | None:
        return self._fd

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            os.close(self._fd)


def publish(workshop: int, temporary: str, root: int, name: str, folder: int | None = None) -> bool:
    """Give a temporary the entry's name; False if another file already has it. `folder`: the destination folder, if
    the caller has it open."""
    above, _, last = name.rpartition("/")
    if folder is not None:
        try:
            return _name(workshop, temporary, folder, last)
        except FileNotFoundError:
            pass  # it is being removed
    problem: FileNotFoundError | None = None
    for _ in range(_ATTEMPTS):
        with Descriptor(open_or_make(root, above)) as folder:
            try:
                return _name(workshop, temporary, folder, last)
            except FileNotFoundError as error:
                problem = error  # the folder is being removed
    assert problem is not None
    raise problem


def publish_over(workshop: int, temporary: str, root: int, name: str) -> int:
    """Give a temporary the entry's name, whatever file or link has it: the length of the replaced file."""
    above, _, last = name.rpartition("/")
    with Descriptor(open_or_make(root, above)) as folder, _renaming:
        try:
            status = os.stat(last, dir_fd=folder, follow_symlinks=False)
            replaced = status.st_size if stat.S_ISREG(status.st_mode) else 0
        except FileNotFoundError:
            replaced = 0
        os.rename(temporary, last, src_dir_fd=workshop, dst_dir_fd=folder)
    return replaced


def _name(workshop: int, temporary: str, folder: int, name: str) -> bool:
    try:
        os.link(temporary, name, src_dir_fd=workshop, dst_dir_fd=folder, follow_symlinks=False)
        return True
    except FileExistsError:
        replaces = False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        replaces = True
    with _renaming:
        kind = _kind(folder, name)
        if kind not in (None, stat.S_IFREG, stat.S_IFLNK):
            raise FileExistsError(errno.EEXIST, "something that is not a regular file has its name")
        if kind == stat.S_IFREG or (kind is None and not replaces):
            return False  # if it has been removed since, it was a regular file when it was in the way
        os.rename(temporary, name, src_dir_fd=workshop, dst_dir_fd=folder)
    return True


def _kind(folder: int, name: str) -> int | None:
    """The type of the file with this name, None if there is none."""
    try:
        return stat.S_IFMT(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return None


def _read_full(fd: int, buffer: memoryview) -> bool:
    """Fill `buffer` from the file; False if the file is too short."""
    while buffer:
        count = os.readv(fd, [buffer])
        if count == 0:
            return False
        buffer = buffer[count:]
    return True


def _unlink(folder: int, name: str) -> bool:
    """Whether it was there."""
    try:
        os.unlink(name, dir_fd=folder)
    except OSError as error:
        if error.errno not in GONE:
            raise
        return False
    return True


# ---- listed and swept


@contextmanager
def listing(folder: int, name: str) -> Iterator[tuple[int, list[os.DirEntry[str]]]]:
    """A folder below `folder`, and what it holds; nothing if it was removed, or is not a folder."""
    try:
        fd = open_below(folder, name, LISTED)
    except OSError as error:
        if error.errno not in GONE:
            raise
        yield folder, []
        return
    with Descriptor(fd):
        yield fd, scan(fd)


def scan(folder: int) -> list[os.DirEntry[str]]:
    """What an open folder holds. The status of what was found can be read only while it is open."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError as error:
        if error.errno in GONE:
            return []
        raise


def namespaces_in(root: int) -> list[str]:
    """The folders that may be namespaces, in alphabetical order."""
    with listing(root, ".") as (_, found):
        return sorted(one.name for one in found if is_namespace(one.name) and one.is_dir(follow_symlinks=False))


def shards_of(root: int, namespace: str) -> list[str]:
    """The folders with entries, as `<namespace>/<aa>`; none if the namespace is a link or a mount."""
    try:
        with listing(root, namespace) as (_, found):
            names = [one.name for one in found if _SHARD.fullmatch(one.name) and one.is_dir(follow_symlinks=False)]
    except Foreign:
        return []
    return [f"{namespace}/{name}" for name in names]


def check_no_stranger(root: int, namespace: str) -> None:
    """Foreign if this namespace is a link or a mount."""
    try:
        os.close(open_below(root, namespace, FOLDER))
    except OSError as error:
        if error.errno not in GONE:
            raise


def entries_in(root: int, shard: str) -> Iterator[tuple[str, bytes, os.stat_result]]:
    """Name, digest and status of the entries in a shard; none if it has become a link or a mount."""
    try:
        with listing(root, shard) as (_, found):
            for file in found:
                name = f"{shard}/{file.name}"
                entry = parse_object_name(name)
                status = _status(file) if entry is not None else None
                if entry is not None and status is not None and stat.S_ISREG(status.st_mode):
                    yield name, entry.digest, status
    except Foreign:
        return


def _status(file: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return file.stat(follow_symlinks=False)
    except OSError as error:
        if error.errno in GONE:
            return None
        raise


def sweep(root: int, namespace: str) -> list[tuple[int, os.stat_result]]:
    """Remove the temporaries that no living writer holds; return the reserved length and status of those that stay.

    Only regular files with our names count, and none in a folder that is a link or a mount.
    """
    left = []
    try:
        with listing(root, f"{namespace}/.tmp") as (folder, found):
            for file in found:
                match = _TEMPORARY.fullmatch(file.name)
                status = _left(folder, file.name) if match is not None else None
                if match is not None and status is not None:
                    left.append((int(match[1]), status))
    except Foreign:
        pass
    return left


def _left(folder: int, name: str) -> os.stat_result | None:
    """The status of a temporary that stays; None if it has been removed, or is not ours."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode) or _removed_as_dead(folder, name):
            return None
    except OSError:
        return None  # published or swept meanwhile
    return status


def _removed_as_dead(folder: int, name: str) -> bool:
    try:
        with Descriptor(open_file(folder, name, os.O_WRONLY)) as fd:
            locked = try_lock(fd)
            if locked is False or (locked is None and present(folder) - os.fstat(fd).st_mtime < _DEAD_AFTER_S):
                return False
            os.unlink(name, dir_fd=folder)
    except PermissionError:
        return False  # another user's
    return True


def remove_empty(root: int, namespace: str) -> None:
    """Remove the folders of an empty namespace; a writer that misses its folder makes it again."""
    try:
        os.close(open_below(root, f"{namespace}/.tmp", FOLDER))  # without it the folder is a stranger's
        for name in (*shards_of(root, namespace), f"{namespace}/.tmp"):
            above, _, last = name.rpartition("/")
            with Descriptor(open_below(root, above, FOLDER)) as folder:
                os.rmdir(last, dir_fd=folder)
        os.rmdir(namespace, dir_fd=root)
    except OSError:
        pass  # in use after all, or not ours to remove
