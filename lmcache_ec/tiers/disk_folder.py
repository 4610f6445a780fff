# SPDX-License-Identifier: Apache-2.0
"""A folder that others may also write to, used so that nothing outside it is touched.

Every name below the root is opened from a descriptor of the root, in one call that follows no link and enters no other
mount (openat2, Linux 5.6): the kernel refuses, so there is no gap between check and use. Where that call is missing
(older kernels, some sandboxes), each folder on the path is opened in turn with O_NOFOLLOW, which excludes links but
does not detect mounts. Every open is non-blocking, and its result is used only if the descriptor shows a regular file,
or a folder. What is not ours is left in place: `Foreign` states what it was.

The root is what the user configured: it may be reached through links, may be a mount, and may have any owner. What is
made below it gets the root's group and that group's rights on the root, and no rights for others. A root that is made
here is accessible to its user only.
"""

import ctypes
import errno
import fcntl
import os
import stat
import struct
import time
from functools import cache

GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}
"""Error numbers for what is absent, or was removed."""
FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
"""Error numbers for what may not be changed."""
FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
"""Flags for a folder in which names are used, and which may be unreadable."""
LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Flags for whatever should be a file: opening it never blocks, and changes nothing except for devices."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
NO_FILE = {errno.EISDIR, errno.ENXIO, errno.ENODEV}
"""Error numbers from opening as a file what is something else."""
_REMADE = 16
"""How often a folder is made again for one call, if it is removed each time."""

_TRUSTED_S = 0.05
"""How long an open root is assumed to be the folder that its path leads to."""

# <linux/openat2.h>. The number is the same on every architecture that Linux added calls to in 2020.
_OPENAT2 = 437
_AT_FDCWD = -100
_HOW = struct.Struct("=QQQ")
_RESOLVE_NO_XDEV, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x01, 0x04, 0x08
_RESOLVE = _RESOLVE_NO_XDEV | _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
_libc.syscall.restype = ctypes.c_long


class Foreign(OSError):
    """Something that is not ours has one of our names, or that of a folder on the path to it. It was left as it is."""


class Descriptor:
    """An open file or folder, closed at the end of the `with`."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


class Root:
    """An open root, and its status when it was last checked. Closed with its last reference, so that no thread uses
    a descriptor number that by then belongs to another file."""

    __slots__ = ("checked", "fd", "status")

    def __init__(self, path: str, *, make: bool = False) -> None:
        self.fd = open_root(path, make=make)
        self.checked = time.monotonic()
        self.status = os.fstat(self.fd)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)

    def is_at(self, path: str) -> bool:
        """Whether the path leads to this folder. While it is open, no other has its inode number."""
        now = time.monotonic()
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return False
        if status.st_ino != self.status.st_ino or status.st_dev != self.status.st_dev:
            return False
        self.checked, self.status = now, status
        return True


class KeptRoot:
    """The root, kept open: it is used far more often than it is replaced. Any thread; no lock.

    A call that finds an entry below a root checked in the last 50 ms reads it, even if another folder has taken the
    root's place since: it is still that entry (`recent`). A call that writes, removes, or reports that nothing
    is there checks the path first (`current`): one call, while opening and closing the root takes two.

    The descriptor belongs to a `Root`, which is shared by all that refer to it: this object, until it finds another
    folder at the path or is closed, and each call in progress. The last of them closes it, in any thread. Nothing else
    is kept: what is opened below the root is closed by the call that opened it, except the log of disk_news.py.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._root: Root | None = None

    def recent(self) -> Root:
        """The root as it was at most 50 ms ago. OSError if there is none."""
        root = self._root
        return root if root is not None and time.monotonic() - root.checked < _TRUSTED_S else self.current()

    def current(self, *, make: bool = False) -> Root:
        """The root as it is, made if it is missing and `make` is set. OSError if there is none."""
        root, self._root = self._root, None
        if root is None or not root.is_at(self._path):
            root = Root(self._path, make=make)
        self._root = root
        return root

    def close(self) -> None:
        self._root = None


def open_root(path: str, *, make: bool = False) -> int:
    """A descriptor of the root, even if reached by links; made if it is missing and `make` is set."""
    for _ in range(_REMADE if make else 0):
        try:
            return os.open(path, FOLDER)
        except FileNotFoundError:
            _make_root(path)
    return os.open(path, FOLDER)


def _make_root(path: str) -> None:
    """Make the root, for its user only. If a link has outlived its target folder, the target is made again."""
    try:
        os.makedirs(os.path.realpath(path), 0o700, exist_ok=True)
    except (FileNotFoundError, FileExistsError):
        pass  # removed while it was made; if something that is no folder has its name, opening it fails


def open_below(folder: int, name: str, flags: int, mode: int = 0) -> int:
    """Open `name`, a path relative to `folder`. Foreign if a link or another mount is on the path, or at its end (with
    one exception: O_PATH with O_NOFOLLOW opens a link at the end as the link itself)."""
    try:
        return (_openat2 if _kernel_resolves() else _walk)(folder, name, flags, mode)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EXDEV):
            raise
        text = f"{name} is a link or another mount, or behind one, and was not touched"
        raise Foreign(error.errno, text) from None


def open_file(folder: int, name: str, flags: int) -> int:
    """Open an existing file for reading or writing. Foreign if it is not a regular file."""
    try:
        fd = open_below(folder, name, flags | FILE)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
    except OSError as error:
        if error.errno not in NO_FILE:
            raise
    raise Foreign(errno.EINVAL, f"{name} is not a regular file, and was not touched")


def create_file(folder: int, name: str, of_root: os.stat_result) -> int:
    """A new file for writing and reading, `name` directly in the folder; `of_root` is the root's status, which
    determines its rights. FileExistsError if anything has its name."""
    # Not by open_below: a new file is neither a link nor a mount.
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | FILE, _rights(of_root, 0o666), dir_fd=folder)
    _share(fd, of_root, 0o666)
    return fd


def present(folder: int) -> float:
    """The time (Unix) by the clock that dates files there: a share's server has its own, which may differ from ours by
    hours. Needs the right to make a file; without it, ours has to do."""
    name = f"0.{os.urandom(12).hex()}"  # named as a temporary, so that it is swept if it stays
    try:
        with Descriptor(open_below(folder, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | FILE, 0o600)) as fd:
            os.unlink(name, dir_fd=folder)
            return os.fstat(fd).st_mtime
    except OSError:
        return time.time()


def open_or_make(root: int, name: str) -> int:
    """A descriptor (FOLDER) of a folder below the root, made if it is missing or is removed meanwhile."""
    for _ in range(_REMADE):
        try:
            return open_below(root, name, FOLDER)
        except FileNotFoundError:
            _make(root, name)
    return open_below(root, name, FOLDER)


def is_its_only_name(opened: os.stat_result, folder: int, name: str) -> bool | None:
    """Whether the opened file has this name and no other: only then is it inaccessible from outside the folder.

    False if it has lost its name; None if it has it, but the file system counts no links (or it is being removed right
    now). Foreign if it has another name as well, wherever that is.
    """
    try:
        named = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    if named.st_ino != opened.st_ino or named.st_dev != opened.st_dev:
        return False
    if named.st_nlink > 1:
        raise Foreign(errno.EMLINK, f"{name} has a second name (a hard link), and was not touched")
    return named.st_nlink == 1 or None


def try_lock(fd: int) -> bool | None:
    """Lock the open file (flock): True if that was possible at once, False if another holds it, None if there are no
    locks. It is released when its holder ends, for whatever reason."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def unlock(fd: int) -> None:
    """Release a lock taken by `try_lock`."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def _make(root: int, name: str) -> None:
    above, _, last = name.rpartition("/")
    parent = open_or_make(root, above) if above else os.dup(root)
    with Descriptor(parent):
        try:
            of_root = os.fstat(root)
            os.mkdir(last, _rights(of_root, 0o777), dir_fd=parent)
            with Descriptor(open_below(parent, last, LISTED)) as made:
                _share(made, of_root, 0o777)
        except (FileExistsError, FileNotFoundError):
            pass  # made by another process, or removed already


def _rights(of_root: os.stat_result, full: int) -> int:
    return full & (0o700 | of_root.st_mode & 0o070)


def _share(fd: int, of_root: os.stat_result, full: int) -> None:
    """Give what was just made the root's group and its rights, whatever the umask; no group rights if that fails."""
    mode = _rights(of_root, full)
    if not mode & 0o070:
        return  # it was made with these rights
    made = os.fstat(fd)
    try:
        if made.st_gid != of_root.st_gid:
            os.fchown(fd, -1, of_root.st_gid)
    except OSError:
        mode &= 0o700
    if made.st_mode & 0o777 != mode:
        try:
            os.fchmod(fd, made.st_mode & 0o7000 | mode)
        except OSError:
            pass  # a file system without such rights


@cache
def _kernel_resolves() -> bool:
    try:
        os.close(_openat2(_AT_FDCWD, ".", FOLDER, 0))
    except OSError as error:
        return error.errno not in (errno.ENOSYS, errno.EPERM)
    return True


def _openat2(folder: int, name: str, flags: int, mode: int) -> int:
    how = _HOW.pack(flags, mode, _RESOLVE)
    while True:
        fd: int = _libc.syscall(_OPENAT2, folder, name.encode(), how, len(how))
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number), name)


def _walk(folder: int, name: str, flags: int, mode: int) -> int:
    first, _, rest = name.partition("/")
    if rest:
        with Descriptor(_open_no_link(folder, first, FOLDER, 0)) as inner:
            return _walk(inner, rest, flags, mode)
    return _open_no_link(folder, first, flags, mode)


def _open_no_link(folder: int, name: str, flags: int, mode: int) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW, mode, dir_fd=folder)
    except NotADirectoryError:  # Linux also raises this for a link where a folder is wanted
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
        raise
