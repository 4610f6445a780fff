# SPDX-License-Identifier: Apache-2.0
"""The arena's memory: anonymous, shared, sealed against shrinking, freed with its last process.

The scheduler side creates it and never maps it; the store process and the ranks attach. Its full length is given at
once and costs nothing: pages come into being where an entry is written, or where a device registers them (`growth`).
"""

from __future__ import annotations

import fcntl
import mmap
import os

from lmcache_ec.place import ALIGNMENT
from lmcache_ec.sizes import rounded_size

GRANULE_BYTES = 32 << 20
"""What a device registers at a time. A registration may hold the driver's lock against the model's launches, so it is
kept short; a copy is cut where two of them meet, which costs a 32 MiB copy of a millisecond a few microseconds more."""

_MADV_POPULATE_WRITE = 23
"""<linux/mman.h>; Python's mmap module does not know it."""

# <linux/fcntl.h>; Python's fcntl module knows them since 3.8 only under these values.
_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 0x1, 0x2, 0x4


def create(capacity: int) -> int:
    """A memory file of `capacity` bytes that nobody can resize. Returns its descriptor."""
    fd = os.memfd_create("lmcache-ec-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, capacity)
    fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW)
    return fd


def attach(fd: int) -> mmap.mmap:
    """Map the whole arena, shared and writable. OSError that says what to do where there are no addresses for it."""
    length = os.fstat(fd).st_size
    try:
        return mmap.mmap(fd, length)
    except OSError as error:
        advice = "lower max_local_cpu_size, or raise RLIMIT_AS (ulimit -v)"
        text = f"the {rounded_size(length)} of LocalCPU cannot be mapped ({error.strerror}): {advice}"
        raise OSError(error.errno, text) from None


def populate(memory: mmap.mmap, offset: int, length: int) -> None:
    """Have the kernel make the pages of a range (Linux 5.14 and later); their bytes stay as they are. Other threads run
    meanwhile.

    Raises OSError where that cannot be done; then the pages are made by whoever touches them first.
    """
    import ctypes  # only where a device registers memory; Python's own `madvise` would keep all threads waiting

    start = ctypes.addressof(ctypes.c_char.from_buffer(memory, offset))
    library = ctypes.CDLL(None, use_errno=True)
    if library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE):
        raise OSError(ctypes.get_errno(), "the pages cannot be made")


def within(offset: int, length: int, capacity: int) -> bool:
    """Whether a place named by a message lies in the arena."""
    return offset >= 0 and length > 0 and offset % ALIGNMENT == 0 and offset + length <= capacity
