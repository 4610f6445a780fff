# SPDX-License-Identifier: Apache-2.0
"""The presence filter: what no tier has is known without asking one."""

import fcntl
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Sequence
from typing import Self

_HEADER_BYTES = 4096
_FILTER_BITS = 1 << 24
_SIZE = _HEADER_BYTES + _FILTER_BITS // 8
_MASK = _FILTER_BITS - 1
_FIRST_BIT = _HEADER_BYTES * 8
_PROBES = struct.Struct("<8I")
_HEADER = struct.Struct("<8sIII")  # magic, version, number of tiers, checksum of their names
_MAGIC, _VERSION = b"LMCECPRE", 1
_COMPLETE_AT = 64


class PresenceFilter:
    """A Bloom filter over key digests in shared memory (a memfd), with one "complete" byte a tier.

    2 MiB of bits hold 1.4 million keys at 12 bits a key: 8 probes then err in 3 of 1000 answers, and in none that
    matters below 100 000 keys. Keys cannot be taken out again: what was deleted is asked for in vain, no more.

    One process writes (the store process; `add` may be called from each of its threads), any number reads, without a
    lock: bits only ever go from 0 to 1. A tier's flag is set when all that the tier held has been added, or when it is
    not worth waiting for; until then "no" means nothing.
    """

    def __init__(self, fd: int, tiers: Sequence[str]) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, _SIZE)
        self._adding = threading.Lock()
        self._complete_at = {tier: _COMPLETE_AT + index for index, tier in enumerate(tiers)}

    @classmethod
    def create(cls, tiers: Sequence[str]) -> Self:
        """An empty filter over `tiers`, none of them complete. OSError if there is no memory to be had."""
        header = _header(tiers)
        fd = os.memfd_create("lmcache-ec-presence", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, _SIZE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            os.pwrite(fd, header, 0)
            return cls(fd, tiers)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, tiers: Sequence[str]) -> Self:
        """The filter that another process created over the same `tiers`; `fd` is ours to close from here on.

        ValueError if `fd` is something else; it is then still the caller's.
        """
        if os.fstat(fd).st_size != _SIZE or os.pread(fd, _HEADER.size, 0) != _header(tiers):
            raise ValueError(f"no presence filter of version {_VERSION} over {list(tiers)} at this descriptor")
        return cls(fd, tiers)

    def add(self, digest: bytes) -> None:
        """Remember a key by its 32-byte digest."""
        memory = self._memory
        with self._adding:  # two threads of this process must not lose one another's bits of a byte
            for word in _PROBES.unpack(digest):
                bit = (word & _MASK) + _FIRST_BIT
                memory[bit >> 3] |= 1 << (bit & 7)

    def may_contain(self, digest: bytes) -> bool:
        """False: never added. True: added, or by chance."""
        memory = self._memory
        for word in _PROBES.unpack(digest):
            bit = (word & _MASK) + _FIRST_BIT
            if not memory[bit >> 3] & (1 << (bit & 7)):
                return False
        return True

    def set_complete(self, tier: str, complete: bool = True) -> None:
        """All that `tier` holds has been added; or, with False, it is to be asked again."""
        self._memory[self._complete_at[tier]] = complete

    def complete(self, tier: str) -> bool:
        """Whether all that `tier` holds has been added. KeyError for a tier that was not named at creation."""
        return self._memory[self._complete_at[tier]] == 1

    @property
    def all_complete(self) -> bool:
        """Whether a "no" of `may_contain` can be relied on; true if there are no tiers."""
        return all(map(self.complete, self._complete_at))

    def close(self) -> None:
        """Unmap the filter and close its descriptor; a second call does nothing."""
        if not self._memory.closed:
            self._memory.close()
            os.close(self.fd)


def _header(tiers: Sequence[str]) -> bytes:
    if len(set(tiers)) != len(tiers) or len(tiers) > _HEADER_BYTES - _COMPLETE_AT:
        raise ValueError(f"tiers {list(tiers)}: each name once is accepted")
    return _HEADER.pack(_MAGIC, _VERSION, len(tiers), zlib.crc32("\0".join(tiers).encode()))
