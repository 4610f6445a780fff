# SPDX-License-Identifier: Apache-2.0
"""The epoch of a folder: a number that only rises, and is part of the namespace of every engine that uses the folder.

    <root>/.epoch    the number in decimal digits and a newline; without the file it is 0

A process that raises it holds a lock (flock) on the folder, writes a temporary and renames it: so a reader finds the
number before or the one after, and two processes that raise it at once leave the higher one. A temporary that a killed
process left is removed by the next. File and folder are synced, unlike entries: a power loss must not restore an old
epoch. Plain functions, which block as long as the file system does.
"""

import errno
import os
import re
import time
from contextlib import suppress
from pathlib import Path

from lmcache_ec.key import MAX_EPOCH
from lmcache_ec.tiers.disk_folder import LISTED, Descriptor, create_file, open_below, open_file, open_root, try_lock

EPOCH_FILE = ".epoch"
_ACCOUNT = ".usage"
_TEMPORARY = re.compile(r"\.epoch\.[0-9a-f]{24}")
_TEXT = re.compile(rb"[0-9]{1,10}\n?")
_MOST_BYTES = 16
_REMEDY = "Write the number into it, or remove it and set ec.epoch"
_LOCK_TIMEOUT_S = 5.0
_LOCK_RETRY_S = 0.01


class EpochError(ValueError):
    """The file cannot be read, or holds no epoch. The text names it and states what is accepted."""


def read_epoch(folder: Path) -> int:
    """The folder's epoch: 0 without a file, or without a folder. EpochError for anything else."""
    try:
        with Descriptor(open_root(str(folder))) as root:
            return _read(root, folder)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise EpochError(f"{folder / EPOCH_FILE} cannot be read: {error.strerror}") from error


def present_epoch(folder: Path) -> int:
    """As `read_epoch`, for a folder that an engine has used: FileNotFoundError for any other folder, OSError for one
    that cannot be read."""
    with Descriptor(open_root(str(folder))) as root:
        return _present(root, folder)


def raise_epoch(folder: Path, to: int) -> None:
    """Set the folder's epoch to `to`. ValueError if that is not above the present one; OSError if the file cannot be
    written, and whatever `present_epoch` raises."""
    with Descriptor(open_root(str(folder))) as root, Descriptor(open_below(root, ".", LISTED)) as locked:
        alone = _lock(locked)
        check_above(to, _present(root, folder))
        if alone:
            _sweep(locked)
        _write(root, to)
        with suppress(OSError):  # a file system that syncs no folders
            os.fsync(locked)


def check_above(epoch: int, present: int) -> None:
    """ValueError if `epoch` cannot follow the present one."""
    if not present < epoch <= MAX_EPOCH:
        raise ValueError(f"must be above the present epoch, {present}: a whole number up to {MAX_EPOCH}, not {epoch}")


def _present(root: int, folder: Path) -> int:
    with Descriptor(open_file(root, _ACCOUNT, os.O_RDONLY)):
        pass  # every engine makes one when it starts
    return _read(root, folder)


def _read(root: int, folder: Path) -> int:
    try:
        with Descriptor(open_file(root, EPOCH_FILE, os.O_RDONLY)) as fd:
            data = os.pread(fd, _MOST_BYTES, 0)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise EpochError(f"{folder / EPOCH_FILE} cannot be read: {error.strerror}. {_REMEDY}") from error
    number = int(data) if _TEXT.fullmatch(data) else -1
    if not 0 <= number <= MAX_EPOCH:
        raise EpochError(
            f"{folder / EPOCH_FILE} holds {data.decode(errors='replace')!r}, which is not an epoch: must be a whole "
            f"number from 0 to {MAX_EPOCH}. {_REMEDY}"
        )
    return number


def _write(root: int, epoch: int) -> None:
    temporary = f"{EPOCH_FILE}.{os.urandom(12).hex()}"
    with Descriptor(create_file(root, temporary, os.fstat(root))) as fd:
        try:
            os.write(fd, f"{epoch}\n".encode())
            owner = os.fstat(root).st_uid
            if owner != os.fstat(fd).st_uid:
                with suppress(OSError):  # only root may; otherwise the group's rights have to suffice
                    os.fchown(fd, owner, -1)
            os.fsync(fd)
            os.rename(temporary, EPOCH_FILE, src_dir_fd=root, dst_dir_fd=root)
        except BaseException:
            os.unlink(temporary, dir_fd=root)
            raise


def _sweep(folder: int) -> None:
    """Remove temporaries of processes killed before the rename: with the lock held, no other process writes there."""
    for name in os.listdir(folder):
        if _TEMPORARY.fullmatch(name):
            with suppress(OSError):  # a folder of that name, or another user's file
                os.unlink(name, dir_fd=folder)


def _lock(folder: int) -> bool:
    """Take the folder's lock; False if there are no locks."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while (locked := try_lock(folder)) is False:
        if time.monotonic() > deadline:
            text = f"another process has held its lock for {_LOCK_TIMEOUT_S:g} s; try again"
            raise TimeoutError(errno.ETIMEDOUT, text)
        time.sleep(_LOCK_RETRY_S)
    return locked is True
