# SPDX-License-Identifier: Apache-2.0
"""The arena's memory: anonymous, shared, sealed against shrinking, freed with its last process.

The scheduler side creates it and never maps it; the store process and the ranks attach. Its full length is set at once
and costs nothing: pages are allocated when an entry is written or a device registers them (`growth`).
"""

from __future__ import annotations

import fcntl
import mmap
import os

from lmcache_ec.place import ALIGNMENT
from lmcache_ec.sizes import rounded_size

GRANULE_BYTES = 32 << 20
"""How much a device registers at a time. A registration may hold a driver lock that the model's launches need, so it is
kept short. A copy is split where two of them meet, which adds a few microseconds to a 32 MiB copy of a millisecond."""

_MADV_POPULATE_WRITE = 23
"""<linux/mman.h>; Python's mmap module does not know it."""

# <linux/fcntl.h>; Python's fcntl module has had them only since 3.8, with these values.
_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 0x1, 0x2, 0x4


def create(capacity: int) -> int:
    """Create a memory file of `capacity` bytes that cannot be resized. Returns its descriptor."""
    fd = os.memfd_create("lmcache-ec-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, capacity)
    fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW)
    return fd


def attach(fd: int) -> mmap.mmap:
    """Map the whole arena, shared and writable. OSError, with advice, if the address space does not suffice."""
    length = os.fstat(fd).st_size
    try:
        return mmap.mmap(fd, length)
    except OSError as error:
        advice = "lower max_local_cpu_size, or raise RLIMIT_AS (ulimit -v)"
        text = f"the {rounded_size(length)} of LocalCPU cannot be mapped ({error.strerror}): {advice}"
        raise OSError(error.errno, text) from None


def populate(memory: mmap.mmap, offset: int, length: int) -> None:
    """Have the kernel allocate the pages of a range (Linux 5.14 and later); their content is unchanged. Other threads
    can run meanwhile.

    Raises OSError if that is not possible; then each page is allocated when it is first touched.
    """
    import ctypes  # only if a device registers memory; Python's own `madvise` would block all threads

    start = ctypes.addressof(ctypes.c_char.from_buffer(memory, offset))
    library = ctypes.CDLL(None, use_errno=True)
    if library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE):
        raise OSError(ctypes.get_errno(), "the pages cannot be made")


def within(offset: int, length: int, capacity: int) -> bool:
    """Whether a place named by a message lies in the arena."""
    return offset >= 0 and length > 0 and offset % ALIGNMENT == 0 and offset + length <= capacity
