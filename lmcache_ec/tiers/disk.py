# SPDX-License-Identifier: Apache-2.0
"""LocalDisk: one file an entry, on a file system that may be shared with other engines.

    <root>/.usage                                   how much the folder holds (see disk_account.py)
    <root>/.news/                                   what was written lately (see disk_news.py)
    <root>/<namespace>/<aa>/<sha256>.safetensors    an entry; its time of modification is that of its last use
    <root>/<namespace>/.tmp/<length>.<random>       an entry being written; its writer holds a lock (flock) on it

There is one level of folders: with a second one nearly every put would make a folder first, for 0.13 ms and 4 KiB.

A file is written under .tmp and then linked to its name, so that it appears whole and never replaces another (where
the file system has no links it is renamed, and two processes that write one entry at once may both succeed). A
temporary without a lock is what a writer left that was killed; where there are no locks, one an hour old. Nothing is
synced: an entry outlives its processes; the loss of power may tear it, and then its digest tells. What does not verify
is deleted, not kept aside: it would take room that nothing accounts for. The folder, or any in it, may be removed by
hand while engines run, or another mounted in its place: what was there is missed, and what is written makes it again.

There is no index: the file's name alone decides whether an entry is there, the account whether there is room. What to
evict is known from surveys, walks over the whole folder in the background: each leaves the paths of the least recently
used entries with their times. Whichever of them still has that time when its turn comes is the least recently used of
all, whoever used the others meanwhile. A put that finds no such list looks for itself, at a few thousand entries of
shards drawn by chance, however many there are; what is oldest among them will do until a survey is through.

Locking: `_guard` guards the list of victims and is never held across I/O; `_looking` lets one put look
at a time, and nothing be removed meanwhile: of a file that goes just then the account could not tell whether the look
has seen it.
"""

import errno
import os
import random
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lmcache_ec.key import EncoderCacheKey, check_namespace
from lmcache_ec.tiers.base import Listed, NamespaceUse, Tier, TierError
from lmcache_ec.tiers.disk_account import Account, FolderAccount, in_folder, try_lock
from lmcache_ec.tiers.disk_news import FolderNews

_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}
_renaming = threading.Lock()  # where links are not to be had: a rename replaces what another thread just published
_SHARD = re.compile(r"[0-9a-f]{2}")
_FILE_NAME = re.compile(r"([0-9a-f]{64})\.safetensors")
_TEMPORARY = re.compile(r"([0-9]+)\.[0-9a-f]{24}")
_ATTEMPTS = 16
_VICTIMS = 16_384
"""Entries a survey remembers, about 300 bytes each."""
_SAMPLE = 4096
"""Entries a put looks at itself, about 20 µs each. Of a larger folder it takes the oldest sixteenth of them."""
_DEAD_AFTER_S = 3600.0


class DiskTier(Tier):
    """Entries in the files under `root`, at most `max_bytes` of them; the least recently used go first.

    The limit is one for the folder, whoever wrote what is in it; bytes are the sizes of the files. Engines with
    different limits each keep the folder to their own when they write. Where less than `min_free_bytes` of the file
    system would stay free, nothing is written, and nothing evicted for it. A folder that can be read and not written
    is served so, and `notice` says it. ValueError if `root` cannot be made, or nothing in it can be read; without
    `make`, nothing is made or written there before something is put or removed.

    Runs in the store process, on the tier's own threads.
    """

    name = "disk"

    def __init__(self, root: Path, max_bytes: int, min_free_bytes: int = 0, *, make: bool = True) -> None:
        if max_bytes <= 0:
            raise ValueError(f"size of the disk tier: {max_bytes} bytes given, a positive number is accepted")
        try:
            if make:
                root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"disk tier at {root}: cannot make this folder: {error.strerror}") from error
        try:
            _check_readable(root)
        except OSError as error:
            raise ValueError(f"disk tier at {root}: nothing in this folder can be read: {error.strerror}") from error
        self.root = root
        self._prefix = f"{root}/"
        self.max_bytes = max_bytes
        self.min_free_bytes = min_free_bytes
        self._account = FolderAccount(root / ".usage")
        self._news = FolderNews(root / ".news")
        self._victims: deque[tuple[int, str]] = deque()  # time of last use in ns, path; the least recently used first
        self._total: int | None = None  # of the folder as last seen: a guess, which spares most writes to look it up
        self._guard = threading.Lock()
        self._looking = threading.Lock()
        self._swept: set[str] = set()  # namespaces
        self._begun: _Survey | None = None
        self.notice = self._open_account() if make else ""

    @property
    def stored_bytes(self) -> int | None:
        """What the folder holds and writes under way will add, all engines together; None if nobody has counted."""
        with _Reporting("read the account of", self.root):
            account = self._account.read()
        return None if account is None else account.total

    def get_into(self, key: EncoderCacheKey, buffer: memoryview) -> int | None:
        path = self._prefix + key.object_name
        with _Reporting("read", path):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # else a pipe would hold the thread
                try:
                    length = _length(os.fstat(fd))
                    if length == len(buffer):
                        if not _read_full(fd, buffer):
                            return None  # cut short by somebody since it was opened
                        _mark_used(fd)
                    return length
                finally:
                    os.close(fd)
            except OSError as error:
                if error.errno not in _GONE:
                    raise
        return None

    def put(self, key: EncoderCacheKey, data: memoryview) -> bool:
        path, length = self._prefix + key.object_name, len(data)
        with _Reporting("write", path):
            if _find(path) is not None:
                return False
            if length > self.max_bytes:
                text = f"an entry of {length} bytes does not fit: the disk tier may hold {self.max_bytes} bytes"
                raise TierError(errno.EFBIG, text)
            self._leave_free(length)
            workshop = f"{self._prefix}{key.namespace}/.tmp"
            if key.namespace not in self._swept:
                self._swept.add(key.namespace)
                _sweep(workshop, ours=True)
            problem: OSError = _no_room(length, self.max_bytes)
            for _ in range(_ATTEMPTS):
                try:
                    if self._total is None or self._total + length > self.max_bytes:
                        self._make_room(length)
                    written = self._write(workshop, path, data)
                except FileNotFoundError as error:
                    problem = error  # somebody removes the folder at this moment
                    continue
                if written:
                    self._news.tell(key.namespace, key.digest)
                if written is not None:
                    return written
            raise problem

    def contains(self, key: EncoderCacheKey) -> int | None:
        path = self._prefix + key.object_name
        with _Reporting("look for", path):
            return _find(path)

    def delete(self, key: EncoderCacheKey) -> None:
        path = self._prefix + key.object_name
        with _Reporting("delete", path):
            self._remove(path)

    def list(self, namespace: str) -> Iterator[Listed]:
        """As every tier; and removes what killed writers left. The walk is the first part of a survey."""
        folder = self.root / check_namespace(namespace)
        with _Reporting("list", folder):
            survey = _Survey(self.root, self._account, namespace)
            yield from survey.walk(namespace)
        self._begun = survey

    def news(self, namespace: str) -> Sequence[bytes]:
        return self._news.hear(namespace)

    def namespaces(self) -> Iterator[NamespaceUse]:
        """As every tier; without a survey, and so without the sweep that goes with one."""
        with _Reporting("list", self.root):
            for folder in sorted(folder.name for folder in _scan(self.root) if _is_namespace(folder.name)):
                entries, length, used_ns = 0, 0, 0
                for shard in _shards(self.root / folder):
                    for _, _, status in _entries(shard):
                        entries, length = entries + 1, length + status.st_size
                        used_ns = max(used_ns, status.st_mtime_ns)
                if entries:
                    yield NamespaceUse(folder, entries, length, used=used_ns / 1e9)

    def remove(self, namespace: str) -> int:
        """As every tier; the folders go too, unless a writer or a stranger has something in them."""
        folder = self.root / check_namespace(namespace)
        removed = 0
        with _Reporting("remove", folder):
            for shard in _shards(folder):
                for path, _, _ in _entries(shard):
                    self._remove(path)
                    removed += 1
            _sweep(folder / ".tmp", ours=False)
            _remove_empty(folder)
        return removed

    def born(self) -> str | None:
        """As every tier: the account's number. A folder without an account is counted first."""
        with _Reporting("read the account of", self.root):
            account = self._account.read()
            if account is None:
                self.maintain()
                account = self._account.read()
        return None if account is None else f"{account.born:016x}"

    def maintain(self) -> None:
        """Survey the folder, bring the account in line with it, evict what is over the limit."""
        survey, self._begun = self._begun, None
        with _Reporting("survey", self.root):
            try:
                self._account.open()
            except OSError as error:
                if error.errno in _FORBIDDEN:
                    return  # nothing is written, so there is nothing to keep; `notice` has said it
                raise
            survey = survey or _Survey(self.root, self._account)
            for namespace in sorted(survey.unseen):
                if not sum(1 for _ in survey.walk(namespace)):
                    _remove_empty(self.root / namespace)
            self._settle(survey)
            self._news.sweep()
            account = self._account.read()
            if account is not None:
                self._evict(account.total - self.max_bytes)

    def close(self) -> None:
        """There is nothing to let go of."""

    def _open_account(self) -> str:
        """What the user has to know about the folder, if anything."""
        try:
            self._account.open()
        except OSError as error:
            if error.errno not in _FORBIDDEN:
                return ""  # the first write will tell, if it is still so
            return f"disk tier at {self.root}: only read, as nothing can be written there: {error.strerror}"
        if not self._account.shared:
            return f"disk tier at {self.root}: no locks on this file system, so each engine counts what it has seen"
        return ""

    def _leave_free(self, length: int) -> None:
        """TierError if the file system is too full to write `length` bytes."""
        if not self.min_free_bytes:
            return
        status = in_folder(self.root, lambda: os.statvfs(self.root))
        free = status.f_bavail * status.f_frsize
        if status.f_blocks and free - length < self.min_free_bytes:
            text = f"{free} bytes are free on its file system, and {self.min_free_bytes} have to stay so"
            raise TierError(errno.ENOSPC, f"the disk tier does not write {length} bytes: {text}")

    def _make_room(self, length: int) -> None:
        """Evict what is in the way of `length` bytes. TierError if that cannot be done."""
        for _ in range(_ATTEMPTS):
            account = self._account.read()
            if account is not None:
                missing = account.total + length - self.max_bytes
                if missing <= 0:
                    return
                if self._evict(missing):
                    continue
            self._look()
        raise _no_room(length, self.max_bytes)

    def _write(self, workshop: str, path: str, data: memoryview) -> bool | None:
        """Make `data` appear at `path`: as `put`, or None if a neighbour was quicker to take the room."""
        reserved, published = None, False
        try:
            with _temporary(workshop, len(data)) as (fd, temporary):
                reserved = self._account.reserve(len(data), self.max_bytes)
                self._total = reserved.total if reserved is not None else None
                if reserved is None:
                    return None
                _write_full(fd, data)
                _mark_used(fd)
                published = _publish(temporary, path)
        finally:
            if reserved is not None and not published:
                self._give_back(len(data), reserved)
        return published

    def _evict(self, wanted: int) -> bool:
        """Evict at least `wanted` bytes, as far as victims are known; False if none was."""
        known = False
        while wanted > 0:
            with self._guard:
                if not self._victims:
                    break
                used, path = self._victims.popleft()
            known = True
            wanted -= self._remove(path, used)
        return known

    def _remove(self, path: str, used: int | None = None) -> int:
        """Remove a file and give its room back: its length, or 0 if it is gone, or was used since `used` (ns)."""
        with self._looking:
            account = self._account.read()
            try:
                status = os.stat(path)
                if used is not None and status.st_mtime_ns != used:
                    return 0
                os.unlink(path)
            except OSError as error:
                if error.errno in _GONE:
                    return 0
                raise
            self._give_back(status.st_size, account)
            return status.st_size

    def _give_back(self, length: int, since: Account | None) -> None:
        try:
            self._account.release(length, since)
        except OSError:
            pass  # the account says too much until the next survey

    def _look(self) -> None:
        """Find victims among a sample of the folder; look at all of it where nobody has counted it yet."""
        with self._looking:
            counted = self._account.read() is not None
            if counted and self._victims:
                return  # found by another thread meanwhile
            survey = _Survey(self.root, self._account)
            survey.sample(_SAMPLE if counted else None)
            self._settle(survey)

    def _settle(self, survey: "_Survey") -> None:
        survey.settle(self._account)
        with self._guard:
            self._victims = deque(survey.oldest())


class _Survey:
    """One walk over the folder: how much it holds, and what of it was used least recently. Belongs to one thread.

    Writes under way are counted first: what is published before its shard is walked is then seen in one of the two
    places at least, and what is reserved later the account itself knows.
    """

    def __init__(self, root: Path, account: FolderAccount, own: str = "") -> None:
        """`own` is a namespace that is ours for certain; others may be folders of strangers that happen to fit."""
        self._root = root
        self._since = account.read()
        self.unseen = {folder.name for folder in _scan(root) if _is_namespace(folder.name)}
        self._writing: set[tuple[int, int]] = set()
        self._least = self._most = 0
        self._found: list[tuple[int, str]] = []
        self._cutoff: int | None = None
        self._seen = 0
        self._cut = False
        for namespace in self.unseen:
            for length, status in _sweep(root / namespace / ".tmp", ours=namespace == own):
                self._writing.add((status.st_dev, status.st_ino))
                self._least += status.st_size
                self._most += max(length, status.st_size)

    def walk(self, namespace: str) -> Iterator[Listed]:
        """Everything in one namespace."""
        self.unseen.discard(namespace)
        for shard in _shards(self._root / namespace):
            for path, digest, status in _entries(shard):
                self._add(path, status)
                yield Listed(bytes.fromhex(digest), status.st_size, status.st_mtime)

    def sample(self, at_most: int | None) -> None:
        """All namespaces, shard by shard in an order drawn by chance, until `at_most` entries have been seen."""
        shards = [shard for namespace in self.unseen for shard in _shards(self._root / namespace)]
        random.shuffle(shards)
        for shard in shards:
            for path, _, status in _entries(shard):
                if self._seen == at_most:
                    self._cut = True
                    return
                self._add(path, status)

    def oldest(self) -> list[tuple[int, str]]:
        """Time of last use (ns) and path of the least recently used entries, in this order."""
        self._found.sort()
        return self._found[: max(1, self._seen // 16) if self._cut else _VICTIMS]

    def settle(self, account: FolderAccount) -> None:
        """Correct the account, if the whole folder has been seen."""
        if not self._cut:
            account.settle(self._since, self._least, self._most)

    def _add(self, path: str, status: os.stat_result) -> None:
        self._seen += 1
        if (status.st_dev, status.st_ino) in self._writing:
            return  # counted as a write under way
        self._least += status.st_size
        self._most += status.st_size
        used = status.st_mtime_ns
        if self._cutoff is None or used < self._cutoff:
            self._found.append((used, path))
            if len(self._found) == 2 * _VICTIMS:
                self._found.sort()
                del self._found[_VICTIMS:]
                self._cutoff = self._found[-1][0]


class _Reporting:
    """What the system says of a call comes out as a TierError that says what was to be done to what."""

    __slots__ = ("_action", "_what")

    def __init__(self, action: str, what: Path | str) -> None:
        self._action, self._what = action, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, TierError):
            text = f"disk tier could not {self._action} {self._what}: {error.strerror}"
            raise TierError(error.errno, text) from error


def _no_room(length: int, max_bytes: int) -> TierError:
    text = f"no room for an entry of {length} bytes: other writes fill the {max_bytes} that the disk tier may hold"
    return TierError(errno.EAGAIN, text)


def _is_namespace(name: str) -> bool:
    try:
        check_namespace(name)
    except ValueError:
        return False  # not ours
    return True


def _check_readable(root: Path) -> None:
    """OSError if the folder cannot be searched, or if it holds namespaces and none of them can be listed."""
    os.stat(root / ".")
    problem: OSError | None = None
    for folder in _scan(root):
        if _is_namespace(folder.name):
            try:
                _scan(folder.path)
                return
            except OSError as error:
                problem = error
    if problem is not None:
        raise problem


def _find(path: str) -> int | None:
    """The length of the file at `path`, None if there is none."""
    try:
        return _length(os.stat(path))
    except OSError as error:
        if error.errno not in _GONE:
            raise
    return None


def _length(status: os.stat_result) -> int | None:
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _read_full(fd: int, buffer: memoryview) -> bool:
    """Fill `buffer` from the file; False if the file ends before."""
    while buffer:
        count = os.readv(fd, [buffer])
        if count == 0:
            return False
        buffer = buffer[count:]
    return True


def _write_full(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _mark_used(fd: int) -> None:
    """Now, to the nanosecond: the kernel's own stamps are milliseconds apart, uses are not."""
    now = time.time_ns()
    try:
        os.utime(fd, ns=(now, now))
    except OSError:
        try:
            os.utime(fd)  # all that may be done to a file of another user that we may write
        except OSError:
            pass  # a folder that we may only read: its owner decides what is used


def _publish(temporary: str, path: str) -> bool:
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
def _temporary(workshop: str, length: int) -> Iterator[tuple[int, str]]:
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
        if error.errno not in _GONE:
            raise


def _sweep(workshop: Path | str, *, ours: bool) -> list[tuple[int, os.stat_result]]:
    """Remove the temporaries that no living writer holds; of those that stay the length reserved and the status.

    All files where the folder is `ours` for certain, else those of our names.
    """
    left = []
    for file in _scan(workshop):
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


def _shards(folder: Path) -> list[str]:
    return [shard.path for shard in _scan(folder) if _SHARD.fullmatch(shard.name)]


def _entries(shard: str) -> Iterator[tuple[str, str, os.stat_result]]:
    """Path, digest in hex and status of the entries in a shard."""
    for file in _scan(shard):
        match = _FILE_NAME.fullmatch(file.name)
        if match and shard.endswith(match[1][:2]):
            status = _status(file)
            if status is not None and stat.S_ISREG(status.st_mode):
                yield file.path, match[1], status


def _status(file: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return file.stat()
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise


def _remove_empty(folder: Path) -> None:
    """Remove the folders of a namespace that holds nothing; a writer that finds its folder gone makes it again."""
    workshop = folder / ".tmp"
    if not workshop.is_dir():
        return  # a stranger's
    try:
        for shard in _shards(folder):
            os.rmdir(shard)
        os.rmdir(workshop)
        os.rmdir(folder)
    except OSError:
        pass  # in use after all, or not ours to remove


def _scan(folder: Path | str) -> list[os.DirEntry[str]]:
    """What a folder holds; nothing if it is gone, or is no folder."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError as error:
        if error.errno in _GONE:
            return []
        raise
