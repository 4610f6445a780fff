# SPDX-License-Identifier: Apache-2.0
"""A folder that others may write to as well, used so that nothing outside it is touched.

Every name below the root is opened from a descriptor of the root, in one call that follows no link and enters no other
mount (openat2, Linux 5.6): the kernel refuses, so there is no moment between a check and a use. Where that call is
missing (older kernels, some sandboxes), each folder on the way is opened in turn with O_NOFOLLOW, which keeps links out
and does not see mounts. Nothing is opened in a way that could wait, and what was opened is used only if its descriptor
says that it is a regular file, or a folder. What is not ours is left where it is: `Foreign` says what it was.

The root is what the user configured: it may be reached by links, may be a mount, and may belong to anybody. What is
made below it gets the root's group and that group's rights on the root, and no rights for others. A root that is made
here is for its user alone.
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
"""What the system says of what is not there, or not any more."""
FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
"""What the system says of what may not be changed."""
FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
"""Flags of a folder in which names are used, and which may be closed to readers."""
LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Flags of whatever should be a file: to open it never waits, and changes nothing but for devices."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
NO_FILE = {errno.EISDIR, errno.ENXIO, errno.ENODEV}
"""What the system says where a file was to be opened, and it is something else."""
_REMADE = 16
"""Times that a folder is made again for one call, if somebody removes it each time."""

_TRUSTED_S = 0.05
"""How long a root that is kept open is taken for the folder that its path leads to."""

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
    """Something that is not ours has a name of ours, or a folder on the way to it. It was left as it is."""


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
    """An open root, and its status when it was last looked at. Closed with its last reference, so that no thread uses
    a number that is another file's by then."""

    __slots__ = ("checked", "fd", "status")

    def __init__(self, path: str, *, make: bool = False) -> None:
        self.fd = open_root(path, make=make)
        self.checked = time.monotonic()
        self.status = os.fstat(self.fd)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)

    def is_at(self, path: str) -> bool:
        """Whether the path leads to this folder. As long as it is open, no other has its number."""
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

    Whoever finds an entry below a root that was checked in the last 50 ms reads it, even if another folder has taken
    the root's place since: it is that entry all the same (`recent`). Whoever writes, removes, or says that nothing is
    there looks at the path first (`current`): one call, where to open the root and to close it takes two.

    The descriptor belongs to a `Root`, and that to all who refer to it: this object, until it finds another folder at
    the path or is closed, and each call that is under way. The last of them closes it, in whatever thread. Nothing else
    is kept: what is opened below the root is closed by the call that opened it, but for the log of disk_news.py.
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
    """A descriptor of the root, whatever leads to it; made if it is missing and `make` is set."""
    for _ in range(_REMADE if make else 0):
        try:
            return os.open(path, FOLDER)
        except FileNotFoundError:
            _make_root(path)
    return os.open(path, FOLDER)


def _make_root(path: str) -> None:
    """Make the root, for its user alone. A link may outlive the folder that it names: that is made again."""
    try:
        os.makedirs(os.path.realpath(path), 0o700, exist_ok=True)
    except (FileNotFoundError, FileExistsError):
        pass  # removed while it was made; if something that is no folder has its name, to open it says so


def open_below(folder: int, name: str, flags: int, mode: int = 0) -> int:
    """Open `name`, a path relative to `folder`. Foreign if a link or another mount is on the way, or at its end (to
    which there is one exception: O_PATH with O_NOFOLLOW opens a link at the end as what it is)."""
    try:
        return (_openat2 if _kernel_resolves() else _walk)(folder, name, flags, mode)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EXDEV):
            raise
        text = f"{name} is a link or another mount, or behind one, and was not touched"
        raise Foreign(error.errno, text) from None


def open_file(folder: int, name: str, flags: int) -> int:
    """Open a file that is there, for reading or writing. Foreign if that is no regular file."""
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
    """A new file for writing and reading, `name` in the folder itself; `of_root` is the root's status, which decides
    its rights. FileExistsError if anything has its name."""
    # Not by open_below: what is made anew is neither a link nor a mount.
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | FILE, _rights(of_root, 0o666), dir_fd=folder)
    _share(fd, of_root, 0o666)
    return fd


def present(folder: int) -> float:
    """The time (Unix) by the clock that dates files there: a share's server has its own, and ours may be hours from
    it. Needs the right to make a file; without, ours has to do."""
    name = f"0.{os.urandom(12).hex()}"  # as a temporary, so that one which stays is swept
    try:
        with Descriptor(open_below(folder, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | FILE, 0o600)) as fd:
            os.unlink(name, dir_fd=folder)
            return os.fstat(fd).st_mtime
    except OSError:
        return time.time()


def open_or_make(root: int, name: str) -> int:
    """A descriptor (FOLDER) of a folder below the root, made where it is missing or being removed meanwhile."""
    for _ in range(_REMADE):
        try:
            return open_below(root, name, FOLDER)
        except FileNotFoundError:
            _make(root, name)
    return open_below(root, name, FOLDER)


def is_its_only_name(opened: os.stat_result, folder: int, name: str) -> bool | None:
    """Whether the file that was opened has this name and no other: only then nobody outside the folder has it.

    False if it has lost its name; None if it has that, and the file system counts none (or somebody removes it just
    now). Foreign if it has another one beside it, wherever that is.
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
    locks. Its holder's end releases it, however it comes."""
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
    """Release what `try_lock` has locked."""
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
            pass  # made by another, or removed already


def _rights(of_root: os.stat_result, full: int) -> int:
    return full & (0o700 | of_root.st_mode & 0o070)


def _share(fd: int, of_root: os.stat_result, full: int) -> None:
    """Give what was just made the root's group and its rights, whatever the umask; to no group if that cannot be."""
    mode = _rights(of_root, full)
    if not mode & 0o070:
        return  # it was made so
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
    except NotADirectoryError:  # so Linux says of a link, too, where a folder is wanted
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
        raise
