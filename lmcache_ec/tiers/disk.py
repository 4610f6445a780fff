# SPDX-License-Identifier: Apache-2.0
"""LocalDisk: one file per entry, on a file system that may be shared with other engines.

    <root>/.usage                                   how much the folder holds (see disk_account.py)
    <root>/.epoch                                   what its users' namespaces end with (see disk_epoch.py)
    <root>/.news/                                   recent writes (see disk_news.py)
    <root>/<namespace>/<aa>/<sha256>.safetensors    an entry; its time of modification is that of its last use
    <root>/<namespace>/.tmp/<length>.<random>       an entry being written; its writer holds a lock (flock) on it

There is one level of folders: with a second one, nearly every put would first make a folder, for 0.13 ms and 4 KiB.

Engines of other users, and people, may also write to the folder. Anything under one of these names that is a link, a
pipe, a device, a mount or a file with a second name is not followed, opened for writing, or removed: see
disk_folder.py, and for entries disk_files.py.

A file is written under .tmp and then linked to its name, so that it appears whole and never replaces another (where
the file system has no links it is renamed, and two processes that write one entry at once may both succeed). A
temporary without a lock, or an hour old where there are no locks, was left by a writer that was killed. Nothing is
synced: an entry outlives its processes; a power loss may tear it, which its digest shows. An entry that does not
verify is deleted, not quarantined: it would take space that is not accounted for. The folder, or any in it, may be
removed by hand while engines run, or another mounted in its place: its entries become misses (after 50 ms at most if
the old folder still exists), and the next write makes it again.

There is no index: the file's name alone decides whether an entry is there, the account whether there is room. What to
evict is known from surveys, walks over the whole folder in the background: each yields the paths and times of the least
recently used entries. The first of them whose time is still the same when its turn comes is the least recently used of
all, regardless of later uses of others. A put that finds no such list samples a few thousand entries from randomly
chosen shards, however many there are; the oldest of these will do until a survey has finished.

Locking: `_guard` guards the list of victims and is never held across I/O; `_looking` lets one put sample at a time, and
nothing be removed meanwhile: the account could not know whether the sample has seen a file that is removed just then.
"""

import errno
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from lmcache_ec.key import EncoderCacheKey, EntryName, check_namespace
from lmcache_ec.tiers.base import Held, Listed, NamespaceUse, Tier, TierError, WritesRefused
from lmcache_ec.tiers.disk_account import Account, FolderAccount
from lmcache_ec.tiers.disk_files import (
    NewEntry,
    Shard,
    TemporaryFile,
    check_no_stranger,
    entries_in,
    find,
    find_in,
    listing,
    mark_used,
    namespaces_in,
    publish,
    publish_over,
    read_into,
    read_start,
    remove_empty,
    remove_entry,
    shards_of,
    sweep,
    write_full,
)
from lmcache_ec.tiers.disk_folder import FORBIDDEN, GONE, Descriptor, Foreign, KeptRoot, Root, open_or_make, open_root
from lmcache_ec.tiers.disk_news import FolderNews
from lmcache_ec.tiers.disk_place import check_place
from lmcache_ec.tiers.disk_survey import Survey

_ATTEMPTS = 16
_SAMPLE = 4096
"""Entries that a put samples itself, about 20 µs each. In a larger folder it takes the oldest sixteenth of them."""


class DiskTier(Tier):
    """Entries in the files under `root`, at most `max_bytes` in total; the least recently used are evicted first.

    The limit applies to the whole folder, whichever engine wrote the files; bytes are file sizes. Engines with
    different limits each enforce their own when they write. If less than `min_free_bytes` of the file system would
    stay free, nothing is written, and nothing is evicted for it. A folder that can be read but not written is served
    as `read_only`, which `notice` reports. ValueError if `root` cannot be made, or nothing in it can be read; without
    `make`, nothing is made or written there before the first put or removal. Without `evicts`, a put that finds no room
    fails with EDQUOT.

    Runs in the store process, on the tier's own threads.
    """

    name = "disk"

    def __init__(
        self, root: Path, max_bytes: int, min_free_bytes: int = 0, *, make: bool = True, evicts: bool = True
    ) -> None:
        if max_bytes <= 0:
            raise ValueError(f"size of the disk tier: must be a positive number of bytes, not {max_bytes}")
        check_place(root)
        try:
            if make:
                os.close(open_root(str(root), make=True))
        except OSError as error:
            raise ValueError(f"{root} cannot be made: {error.strerror}") from error
        try:
            with Descriptor(open_root(str(root))) as fd:
                _check_readable(fd)
        except OSError as error:
            raise ValueError(f"{root}: nothing in this folder can be read: {error.strerror}") from error
        self.root = root
        self._path = str(root)
        self._kept = KeptRoot(self._path)
        self.max_bytes = max_bytes
        self.min_free_bytes = min_free_bytes
        self._evicts = evicts
        self._account = FolderAccount(root / ".usage")
        self._news = FolderNews(root / ".news")
        self._victims: deque[tuple[int, str]] = deque()  # time of last use in ns, name; the least recently used first
        self._total: int | None = None  # of the folder as last seen: an estimate that saves most writes a look-up
        self._guard = threading.Lock()
        self._looking = threading.Lock()
        self._swept: set[str] = set()  # namespaces
        self._begun: Survey | None = None
        self._forbidden = ""
        self.notice = self._notice() if make else ""

    @property
    def stored_bytes(self) -> int | None:
        """What the folder holds plus writes in progress, of all engines; None if it was never counted."""
        with self._reporting("read the account of", "the folder"):
            try:
                root = self._kept.current()
            except FileNotFoundError:
                return None
            account = self._account.read(root.fd)
        return None if account is None else account.total

    def get_into(self, key: EntryName, buffer: memoryview) -> int | None:
        name = key.object_name
        with self._reporting("read", name):
            try:
                root = self._kept.recent()
                length = read_into(root.fd, name, buffer)
                if length is None and (current := self._kept.current()) is not root:
                    length = read_into(current.fd, name, buffer)
                return length
            except OSError as error:
                if error.errno not in GONE:
                    raise
        return None

    def put(self, key: EncoderCacheKey, data: memoryview, used: float | None = None) -> bool:
        """As every tier. `used` (Unix): when the entry was last used, if that was elsewhere; by default now."""
        return self._stored(NewEntry.of(key, data, used=used))

    def replace(self, key: EncoderCacheKey, data: memoryview, held: Held) -> bool:
        """As every tier; whatever took the place of `held` meanwhile is replaced, too."""
        return self._stored(NewEntry.of(key, data, over=True))

    def _stored(self, new: NewEntry) -> bool:
        with self._reporting("write", new.name):
            try:
                return self._put(new)
            except OSError as error:
                if error.errno not in FORBIDDEN or isinstance(error, TierError):
                    raise
                self._open_account()  # is it only this entry, or the whole folder?
                if self.read_only:
                    raise self._refusal() from error
                raise

    def contains(self, key: EntryName) -> int | None:
        """As every tier, in the folder that the path leads to now: a producer announces what is there."""
        name = key.object_name
        with self._reporting("look for", name):
            try:
                root = self._kept.current()  # held until the answer: its descriptor is closed with the last reference
                return find(root.fd, name)
            except OSError as error:
                if error.errno not in GONE:
                    raise
        return None

    def peek(self, key: EntryName, most: int) -> bytes | None:
        name = key.object_name
        with self._reporting("read", name):
            try:
                with Descriptor(open_root(self._path)) as root:
                    return read_start(root, name, most)
            except OSError as error:
                if error.errno not in GONE:
                    raise
        return None

    def delete(self, key: EntryName) -> bool:
        with self._reporting("delete", key.object_name):
            return self._remove(key.object_name) is not None

    def list(self, namespace: str) -> Iterator[Listed]:
        """As every tier; also removes what killed writers left. The walk is the first part of a survey."""
        with self._reporting("list", check_namespace(namespace)):
            try:
                root = open_root(self._path)
            except FileNotFoundError:
                return
            with Descriptor(root):
                check_no_stranger(root, namespace)
                survey = Survey(root, self._account)
                yield from survey.walk(root, namespace)
        self._begun = survey

    def news(self, namespace: str) -> Sequence[bytes]:
        return self._news.hear(namespace)

    def namespace_names(self) -> Sequence[str]:
        with self._reporting("list", "the folder"), Descriptor(open_root(self._path)) as root:
            return namespaces_in(root)

    def namespaces(self) -> Iterator[NamespaceUse]:
        """As every tier; without a survey, and so without its sweep."""
        with self._reporting("list", "the folder"), Descriptor(open_root(self._path)) as root:
            for namespace in namespaces_in(root):
                count, length, used_ns = 0, 0, 0
                for shard in shards_of(root, namespace):
                    for _, _, status in entries_in(root, shard):
                        count, length = count + 1, length + status.st_size
                        used_ns = max(used_ns, status.st_mtime_ns)
                if count:
                    yield NamespaceUse(namespace, count, length, used=used_ns / 1e9)

    def remove(self, namespace: str) -> int:
        """As every tier; also removes the folders, unless a writer or a stranger has something in them."""
        removed = 0
        with self._reporting("remove", check_namespace(namespace)), Descriptor(open_root(self._path)) as root:
            check_no_stranger(root, namespace)
            for shard in shards_of(root, namespace):
                for name, _, _ in entries_in(root, shard):
                    self._remove(name)
                    removed += 1
            sweep(root, namespace)
            remove_empty(root, namespace)
        return removed

    def born(self) -> str | None:
        """As every tier: the account's number. A folder without an account is first counted."""
        with self._reporting("read the account of", "the folder"):
            account = self._account.read()
            if account is None:
                self.maintain()
                account = self._account.read()
        return None if account is None else f"{account.born:016x}"

    def maintain(self) -> None:
        """Survey the folder, reconcile the account with it, evict what exceeds the limit."""
        survey, self._begun = self._begun, None
        with self._reporting("survey", "the folder"):
            self._open_account()
            self.notice = self._described()
            if self.read_only:
                return  # nothing is written, so there is nothing to maintain
            with Descriptor(open_root(self._path, make=True)) as root:
                survey = survey or Survey(root, self._account)
                for namespace in sorted(survey.unseen):
                    if not sum(1 for _ in survey.walk(root, namespace)):
                        remove_empty(root, namespace)
            self._settle(survey)
            self._news.sweep()
            account = self._account.read()
            if account is not None:
                self._evict(account.total - self.max_bytes)

    def close(self) -> None:
        """Release the folder. A later call opens it again."""
        self._kept.close()
        self._account.close()

    def _reporting(self, action: str, name: str) -> "_Reporting":
        return _Reporting(action, name, self._path)

    def _open_account(self) -> None:
        """Find out whether anything can be written to the folder. OSError if that cannot be found out."""
        try:
            self._account.open()
        except BlockingIOError:
            pass  # it is removed again and again: left to the next write
        except OSError as error:
            if error.errno not in FORBIDDEN:
                raise
            self.read_only, self._forbidden = True, error.strerror or ""
        else:
            self.read_only = False

    def _notice(self) -> str:
        """What the user has to know about the folder; empty if nothing."""
        try:
            self._open_account()
        except OSError:
            return ""  # the first write will show whether this persists
        return self._described()

    def look(self) -> str:
        """What `notice` would be, as far as that shows without writing anything. OSError if that is unknown."""
        self._forbidden = self._account.forbidden()
        self.read_only = bool(self._forbidden)
        if not self.read_only:
            self._account.read()
        return self._described()

    def _described(self) -> str:
        """What is wrong with the account, as far as known; empty if nothing."""
        if self.read_only:
            why = f"read only, because it cannot be written to: {self._forbidden}"
            return f"disk tier at {self.root}: {why}; nothing is saved there until user {os.geteuid()} may write to it"
        if not self._account.shared:
            return f"disk tier at {self.root}: each engine counts only what it has seen: {self._account.problem}"
        return ""

    def _refusal(self) -> WritesRefused:
        return WritesRefused(errno.EROFS, f"disk tier at {self.root} is read only: {self._forbidden}")

    def _check_room(self, root: int, length: int) -> None:
        """TierError if `length` bytes exceed the tier's limit, or if the file system is too full for them."""
        if length > self.max_bytes:
            text = f"an entry of {length} bytes does not fit: the disk tier may hold {self.max_bytes} bytes"
            raise TierError(errno.EFBIG, text)
        if not self.min_free_bytes:
            return
        status = os.statvfs(root)
        free = status.f_bavail * status.f_frsize
        if status.f_blocks and free - length < self.min_free_bytes:
            text = f"{free} bytes are free on its file system, and {self.min_free_bytes} must stay free"
            raise TierError(errno.ENOSPC, f"the disk tier does not write {length} bytes: {text}")

    def _put(self, new: NewEntry) -> bool:
        problem: OSError = _no_room(len(new.data), self.max_bytes)
        for _ in range(_ATTEMPTS):
            try:
                written = self._put_below(self._kept.current(make=True), new)
            except FileNotFoundError as error:
                problem = error  # the folder is being removed at this moment
                continue
            if written:
                self._news.announce(new.namespace, new.digest)
            if written is not None:
                return written
        raise problem

    def _put_below(self, root: Root, new: NewEntry) -> bool | None:
        """As `put`, or as `replace` if `new.over` is set; None if a neighbour took the room first."""
        above, _, last = new.name.rpartition("/")
        with Shard(root.fd, above) as shard:
            if not new.over and shard is not None and find_in(shard, last) is not None:
                return False
            if self.read_only:
                raise self._refusal()
            self._check_room(root.fd, len(new.data))
            if new.namespace not in self._swept:
                self._swept.add(new.namespace)
                sweep(root.fd, new.namespace)
            if self._total is None or self._total + len(new.data) > self.max_bytes:
                self._make_room(len(new.data))
            return self._write(root, shard, new)

    def _make_room(self, length: int) -> None:
        """Evict enough to make room for `length` bytes. TierError if that cannot be done."""
        for _ in range(_ATTEMPTS):
            account = self._account.read()
            if account is not None:
                missing = account.total + length - self.max_bytes
                if missing <= 0:
                    return
                if not self._evicts:
                    text = f"the disk tier may hold {self.max_bytes} bytes, and nothing is evicted for {length}"
                    raise TierError(errno.EDQUOT, text)
                if self._evict(missing):
                    continue
            self._look()
        raise _no_room(length, self.max_bytes)

    def _write(self, root: Root, shard: int | None, new: NewEntry) -> bool | None:
        reserved, published, length = None, False, len(new.data)
        try:
            with (
                Descriptor(open_or_make(root.fd, f"{new.namespace}/.tmp")) as workshop,
                TemporaryFile(root.status, workshop, length) as temporary,
            ):
                reserved = self._account.reserve(length, self.max_bytes, root.fd)
                self._total = reserved.total if reserved is not None else None
                if reserved is None:
                    return None
                write_full(temporary.fd, new.data)
                mark_used(temporary.fd)
                if new.over:
                    published = self._replace(workshop, temporary.name, root.fd, new.name)
                else:
                    published = publish(workshop, temporary.name, root.fd, new.name, shard)
                if new.used is not None:  # not earlier: a temporary of that age would be taken for a dead writer's
                    os.utime(temporary.fd, (new.used, new.used))
        finally:
            if reserved is not None and (not published or temporary.outlived_entry):
                self._give_back(length, reserved, root.fd)
        return published

    def _evict(self, wanted: int) -> bool:
        """Evict at least `wanted` bytes, as far as victims are known; False if none was known."""
        known = False
        while wanted > 0:
            with self._guard:
                if not self._victims:
                    break
                used, name = self._victims.popleft()
            known = True
            length = self._remove(name, used) or 0
            wanted -= length
            if length:
                self.evicted(length)
        return known

    def _remove(self, name: str, used: int | None = None) -> int | None:
        """Remove an entry and release its room: its length; None if it is absent, or was used since `used` (ns)."""
        with self._looking:
            try:
                root = self._kept.current()
            except OSError as error:
                if error.errno not in GONE:
                    raise
                return None
            account = self._account.read(root.fd)
            removed = remove_entry(root.fd, name, used)
            if removed is None:
                return None
            if removed.st_nlink == 1:  # else its writer gives them back: its temporary still has them
                self._give_back(removed.st_size, account, root.fd)
            return removed.st_size

    def _replace(self, workshop: int, temporary: str, root: int, name: str) -> bool:
        with self._looking:
            account = self._account.read(root)
            self._give_back(publish_over(workshop, temporary, root, name), account, root)
        return True

    def _give_back(self, length: int, since: Account | None, root: int) -> None:
        try:
            self._account.release(length, since, root)
        except OSError:
            pass  # the account is too high until the next survey

    def _look(self) -> None:
        """Find victims in a sample of the folder; walk all of it if it was never counted."""
        with self._looking:
            counted = self._account.read() is not None
            if counted and self._victims:
                return  # another thread found some meanwhile
            with Descriptor(open_root(self._path, make=True)) as root:
                survey = Survey(root, self._account)
                survey.sample(root, _SAMPLE if counted else None)
            self._settle(survey)

    def _settle(self, survey: Survey) -> None:
        with suppress(BlockingIOError):  # removed again and again: the next survey settles the next account
            survey.settle(self._account)
        with self._guard:
            self._victims = deque(survey.oldest())


class _Reporting:
    """Turns the OSError of a call into a TierError that names the action and its object."""

    __slots__ = ("_action", "_name", "_root")

    def __init__(self, action: str, name: str, root: str) -> None:
        self._action, self._name, self._root = action, name, root

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, TierError):
            text = f"disk tier at {self._root} could not {self._action} {self._name}: {error.strerror}"
            raise TierError(error.errno, text) from error


def _no_room(length: int, max_bytes: int) -> TierError:
    text = f"no room for an entry of {length} bytes: other writes fill the {max_bytes} that the disk tier may hold"
    return TierError(errno.EAGAIN, text)


def _check_readable(root: int) -> None:
    """OSError if the folder cannot be searched, or if it holds namespaces and none of them can be listed."""
    os.stat(".", dir_fd=root)
    problem: OSError | None = None
    for namespace in namespaces_in(root):
        try:
            with listing(root, namespace):
                return
        except Foreign:
            pass
        except OSError as error:
            problem = error
    if problem is not None:
        raise problem
