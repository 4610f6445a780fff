# SPDX-License-Identifier: Apache-2.0
"""How much a folder holds: the account, a small file shared by all processes that write to the folder.

It is changed under a lock (flock) that is held for an addition and never across other I/O, so a put learns whether
there is room without reading the folder. The rule that makes it safe to be killed anywhere: room is reserved before
bytes are written and given back after they are removed. So the account never states less than the folder holds. What a
killed writer reserved and did not use, or removed and did not give back, is found by the next survey of the folder.

A survey takes time while other processes continue. It yields bounds for the true total: what it saw minus what was
given back meanwhile, and what it saw plus what was reserved meanwhile. `settle` moves the total into these bounds and
no further: if nothing happened they are one number, and the account equals the folder.

The folder may be removed while in use, or another one mounted in its place: a new account is then begun. Each account
has its own number (`born`), so that room reserved in one is not given back to another. If a survey misses more than
half of what was held and not given back, the folder was emptied by hand (the account's own file may have stayed): the
account then gets a new number, too.
"""

import errno
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from random import SystemRandom
from typing import NamedTuple

from lmcache_ec.tiers.disk_folder import (
    FORBIDDEN,
    Descriptor,
    Foreign,
    create_file,
    is_its_only_name,
    open_file,
    open_root,
    try_lock,
    unlock,
)

_FIELDS = struct.Struct("<8sQQQQQ")
_CHECKSUM = struct.Struct("<I")
_SIZE = _FIELDS.size + _CHECKSUM.size
_MAGIC = b"LMCECUS2"
_LOCK_TIMEOUT_S = 5.0
_LOCK_RETRY_S = 0.0002
_REMADE = 16
"""How often the file is made again for one call, if it is removed each time."""
_MOST = 1 << 62
"""Bytes; the upper limit for what a survey saw, which sparse files of strangers may exceed."""


class Account(NamedTuple):
    """One state of the account, in bytes. `corrections` counts how often a survey has changed the total."""

    total: int = 0
    reserved: int = 0  # ever
    released: int = 0  # ever
    corrections: int = 0
    born: int = 0


class FolderAccount:
    """The account of one folder, at `path`. Any thread or process; on a file system without locks, one process each.

    It may block for as long as the file system does, and at most 5 s (one thread after another) for a neighbour that
    holds the lock. `root` is a descriptor of the folder, if the caller has one. OSError if the file cannot be read or
    changed. Anything with the account's name that is not a regular file with only this name is left untouched, and
    this process then counts for itself, as without locks.
    """

    def __init__(self, path: Path) -> None:
        self.shared = True
        """Whether neighbours see it; false once the file system is found to have no locks."""
        self.problem = ""
        """Why it is not shared."""
        self._folder, self._name = str(path.parent), path.name
        self._alone: Account | None = None
        self._file: _File | None = None
        self._guard = threading.Lock()

    def open(self) -> None:
        """Check whether the account can be changed (OSError if not), and whether it can be shared by now."""
        self.close()
        self.shared = True
        self._change(lambda account: account)
        if self.shared:
            self._alone, self.problem = None, ""

    def forbidden(self) -> str:
        """Why this user cannot change it, as far as that shows without writing; empty if no reason is found. OSError
        if the folder cannot be opened."""
        with Descriptor(open_root(self._folder)) as folder:
            try:
                with Descriptor(open_file(folder, self._name, os.O_RDWR)):
                    return ""
            except FileNotFoundError:
                if os.access(".", os.W_OK | os.X_OK, dir_fd=folder, effective_ids=True):
                    return ""
                mounted_so = os.fstatvfs(folder).f_flag & os.ST_RDONLY
                return os.strerror(errno.EROFS if mounted_so else errno.EACCES)
            except OSError as error:
                return (error.strerror or "") if error.errno in FORBIDDEN else ""

    def close(self) -> None:
        """Release the file. A later call opens it again."""
        self._file = None

    def read(self, root: int | None = None) -> Account | None:
        """The state, None while the folder has not been counted. With `root`, it may be slightly stale on a network
        file system."""
        if not self.shared:
            return self._alone
        file = self._file
        try:
            if root is not None and file is not None and is_its_only_name(file.status, root, self._name):
                data = os.pread(file.fd, _SIZE, 0)
            else:
                with (
                    Descriptor(open_root(self._folder)) if root is None else nullcontext(root) as folder,
                    Descriptor(open_file(folder, self._name, os.O_RDONLY)) as fd,
                ):
                    data = os.pread(fd, _SIZE, 0)
        except FileNotFoundError:
            return None
        except Foreign as error:
            self._count_alone(str(error.strerror))
            return self._alone
        account = _decode(data)
        if account is None and data:  # read during a change, or damaged
            account = self._change(lambda account: account, root)
        return account

    def reserve(self, length: int, limit: int, root: int | None = None) -> Account | None:
        """Reserve `length` bytes: the resulting state, or None if they do not fit under `limit` at this moment."""
        fits = False

        def change(account: Account | None) -> Account | None:
            nonlocal fits
            fits = account is not None and account.total + length <= limit
            if account is None or not fits:
                return account
            total, reserved, released, corrections, born = account
            return Account(total + length, reserved + length, released, corrections, born)

        after = self._change(change, root)
        return after if fits else None

    def release(self, length: int, since: Account | None, root: int | None = None) -> None:
        """Give back `length` bytes that were removed from the folder; `since` is a state from before the removal.

        If a survey has corrected the total in between, it may already have found them missing: then they are not
        subtracted a second time.
        """

        def change(account: Account | None) -> Account | None:
            if account is None:
                return None
            total, reserved, released, corrections, born = account
            if since is not None and since.born == born and since.corrections == corrections:
                total = max(0, total - length)
            return Account(total, reserved, released + length, corrections, born)

        self._change(change, root)

    def settle(self, since: Account | None, least: int, most: int) -> None:
        """A survey that began after `since` saw `least` to `most` bytes (writes in progress may count or not)."""
        least, most = min(least, _MOST), min(most, _MOST)

        def change(account: Account | None) -> Account | None:
            if (account and account.born) != (since and since.born):
                return account  # removed or begun anew meanwhile: this survey does not know earlier reservations
            if account is None:
                return Account(total=most, born=_new_number())
            before = since or Account()
            reserved, released = account.reserved - before.reserved, account.released - before.released
            total = min(max(account.total, least - released), most + reserved)
            if total == account.total:
                return account
            vanished = before.total - released - most
            born = _new_number() if vanished > before.total / 2 else account.born
            return account._replace(total=total, corrections=account.corrections + 1, born=born)

        self._change(change)

    def _change(self, change: Callable[[Account | None], Account | None], root: int | None = None) -> Account | None:
        """Replace the state with what `change` returns for it."""
        with self._guard:
            file = self._locked(root) if self.shared else None
            if file is None:
                self._alone = change(self._alone)
                return self._alone
            try:
                before = _decode(os.pread(file.fd, _SIZE, 0))
                after = change(before)
                if after is not None and after is not before:
                    os.pwrite(file.fd, _encode(after), 0)
                return after
            finally:
                unlock(file.fd)

    def _locked(self, root: int | None) -> "_File | None":
        """The file, locked, with only this one name; if that is impossible, None, and no longer `shared`.
        OSError if it is removed each time: neighbours share the next one."""
        removed = False
        try:
            for _ in range(_REMADE):
                with Descriptor(open_root(self._folder, make=True)) if root is None else nullcontext(root) as folder:
                    file, self._file = self._file, None
                    if file is None or file.process != os.getpid():
                        file = self._open(folder)
                    if file is None:
                        root, removed = None, True  # the folder may have been removed, too
                        continue
                    if not _lock(file.fd):
                        self._count_alone("no locks on this file system")
                        return None
                    try:
                        alone = is_its_only_name(file.status, folder, self._name)
                    except BaseException:
                        unlock(file.fd)  # the error may outlive this call, and keep the file
                        raise
                    if alone:
                        self._file = file
                        return file
                    removed |= alone is False  # since it was opened: no other process will see it again
            if removed:
                raise OSError(errno.EAGAIN, f"{self._name} is removed again and again")
            self._count_alone("this file system does not count links")
        except Foreign as error:
            self._count_alone(str(error.strerror))
        return None

    def _open(self, root: int) -> "_File | None":
        """The file, made if missing; None if it or the folder is being made or removed at this moment."""
        try:
            return _File(open_file(root, self._name, os.O_RDWR))
        except FileNotFoundError:
            pass
        try:
            return _File(create_file(root, self._name, os.fstat(root)))
        except (FileExistsError, FileNotFoundError):
            return None

    def _count_alone(self, problem: str) -> None:
        self.shared, self.problem = False, problem


class _File:
    """The account's file, open, and its status when it was opened. Closed with its last reference.

    It belongs to its `FolderAccount`, which keeps it until the file has lost its name or the account is closed, and to
    each call that uses it. It is used only while its name leads to it, in the folder that the caller has opened. A
    lock on it belongs to one thread of this process, which releases it when done. A forked child would share the lock,
    and so opens the file anew.
    """

    __slots__ = ("fd", "process", "status")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.process = os.getpid()
        self.status = os.fstat(fd)

    def __del__(self) -> None:
        os.close(self.fd)


def _new_number() -> int:
    return SystemRandom().getrandbits(64)


def _lock(fd: int) -> bool:
    """Lock the account; False if there are no locks. Never waits forever: a holder may have been stopped."""
    deadline = 0.0
    while (locked := try_lock(fd)) is False:
        deadline = deadline or time.monotonic() + _LOCK_TIMEOUT_S
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, f"another process has held the account for {_LOCK_TIMEOUT_S} s")
        time.sleep(_LOCK_RETRY_S)
    return locked is not None


def _encode(account: Account) -> bytes:
    fields = _FIELDS.pack(_MAGIC, *account)
    return fields + _CHECKSUM.pack(zlib.crc32(fields))


def _decode(data: bytes) -> Account | None:
    """None if this is no account: a new file, or a damaged one; the folder is then counted again."""
    if len(data) != _SIZE or _CHECKSUM.unpack_from(data, _FIELDS.size) != (zlib.crc32(data[: _FIELDS.size]),):
        return None
    magic, *numbers = _FIELDS.unpack_from(data)
    plausible = max(numbers[:-1]) < 2 * _MOST
    return Account(*numbers) if magic == _MAGIC and plausible else None
