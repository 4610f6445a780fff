# SPDX-License-Identifier: Apache-2.0
"""The presence filter: it rules out entries that no tier has without asking one.

A memfd holds a Bloom filter and a "complete" flag for each tier. The store process writes it, the scheduler side reads
it, with neither a lock nor a message between the two. Why there are no false negatives:

- A tier has two regions of the memory. One is live; the other is empty, except while a listing fills it. The tier's
  *shape*, one aligned 8-byte word, states which region is live and how much of it is in use; its value never repeats.
- The writer's lock of a tier covers each change: keys added during a listing go into both regions, so that at the swap
  the new one holds what was listed and what was added since the listing began. The swap is one store to the shape.
- A live filter grows in place: the lower half is copied to the upper half, then the shape is updated. A reader that
  still uses the smaller shape finds in the lower half all that was there before.
- A reader reads the shape, looks, and reads the shape again before it returns "no"; if the shape has changed, it starts
  over. So "no" is about a filter that was live throughout, and the region that is given up may be emptied at once.
- Both words of a key have indexes whose low 8 bits are the first byte of its digest. So the words of all keys that
  begin with one byte, a *shard*, are every 256th word of a region, whatever its size, and a catalog that holds shards
  is copied into a region without looking at single keys.

Memory: between 12.5 and 25 bits per key at a listing, at least 128 KiB per tier; so 16 MiB for 10^7 keys, and both
regions while a listing runs. The false positive rate is 0.4 % at 12.5 bits per key. A region ends at 128 MiB, 86
million keys; beyond that, false positives increase and memory does not.
"""

import fcntl
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations, islice
from typing import Final, Self

_REGION_BYTES = 1 << 27
_SMALLEST_BYTES = 1 << 17
_FIRST_BYTES = 1 << 24
"""Size for a tier's first listing, when its count is unknown: enough for 10^7 keys, cut down afterwards."""

SHARDS = 256
_SHARD_BITS_A_KEY = 10
_SMALLEST_SHARD, _LARGEST_SHARD = _SMALLEST_BYTES // 8 // SHARDS, _REGION_BYTES // 8 // SHARDS
"""In words."""
MAX_SHARD_BYTES = 8 * _LARGEST_SHARD
UNKNOWN_SHARD = b"\xff" * 8 * _SMALLEST_SHARD
"""A shard that may contain every key: its keys are always asked for."""

_BITS_A_KEY = 12.5
"""At least, after a listing."""
_FULL_AT = 10
"""Bits per key at which a filter doubles: by then 1.2 % of other keys appear to be present."""

_HEADER_BYTES = 4096
_HEADER = struct.Struct("<8sIII")  # magic, version, number of tiers, checksum of their names
_MAGIC, _VERSION = b"LMCECPRE", 3
_COMPLETE_AT = 64  # in bytes: one flag per tier
_SHAPES_AT = 128  # in words of 8 bytes: one shape per tier
_MOST_TIERS = _HEADER_BYTES // 8 - _SHAPES_AT

_PROBES = struct.Struct("<QQ16x")
_SHARD_PROBES = struct.Struct("<QQ")
KEY_BYTES = _SHARD_PROBES.size
"""Bytes of a digest that a filter uses."""
_PATTERNS: Final = tuple(1 << a | 1 << b | 1 << c for a, b, c in islice(combinations(range(64), 3), 0, 40_960, 10))
"""4096 ways to set three bits of a word. A key sets one such pattern in each of two words: the false positive rate is
that of six bits anywhere, in a third of the time."""

_CHUNK_WORDS = 8192  # copied at a time, so that the other threads of the process can run
_Shape = tuple[int, int, int]  # the word itself; the first word of the live region; a mask for the index in it


class PresenceFilter:
    """The reader's view of what the tiers hold: one process, one thread, no wait.

    A tier's flag is set when all that the tier held has been added, or when it is not worth waiting for; until then
    "no" means nothing.
    """

    _protection = mmap.PROT_READ

    def __init__(self, fd: int, tiers: Sequence[str]) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, _size(tiers), prot=self._protection)
        self._words = memoryview(self._map).cast("Q")
        self._flags = {tier: _COMPLETE_AT + index for index, tier in enumerate(tiers)}
        self._all = tuple(_Section(index) for index in range(len(tiers)))
        self._sections = {tier: (section,) for tier, section in zip(tiers, self._all, strict=True)}

    @classmethod
    def attach(cls, fd: int, tiers: Sequence[str]) -> Self:
        """The filter that a writer created over the same `tiers`; `fd` is ours to close from here on.

        ValueError if `fd` is something else; it is then still the caller's.
        """
        if os.fstat(fd).st_size != _size(tiers) or os.pread(fd, _HEADER.size, 0) != _header(tiers):
            raise ValueError(f"no presence filter of version {_VERSION} over {list(tiers)} at this descriptor")
        return cls(fd, tiers)

    def may_contain(self, digest: bytes, tier: str | None = None) -> bool:
        """Whether the given tier (None: any) may hold the key with this 32-byte digest.

        False: it was never added. True: it was, or this is a false positive. KeyError for a tier that was not named at
        creation. 0.3 µs for the first tier and half of that for each other; runs on the scheduler thread.
        """
        one, other = _PROBES.unpack(digest)
        words, pattern = self._words, _PATTERNS[one >> 52]
        for section in self._all if tier is None else self._sections[tier]:
            while True:
                shape, first, mask = section.seen
                if words[section.shape_at] != shape:
                    shape, first, mask = section.look(words)
                if words[first + (one & mask)] & pattern == pattern:
                    another = _PATTERNS[other >> 52]
                    if words[first + ((other & -SHARDS | one & SHARDS - 1) & mask)] & another == another:
                        return True
                if words[section.shape_at] == shape:
                    break  # a no: on to the next tier
        return False

    def candidates(self, digest: bytes) -> list[int]:
        """Which tiers, by number, may hold the key: those not complete, and those for which `may_contain` is true."""
        return [
            number
            for number, tier in enumerate(self._sections)
            if not self.complete(tier) or self.may_contain(digest, tier)
        ]

    def complete(self, tier: str) -> bool:
        """Whether all that `tier` holds has been added. KeyError for a tier that was not named at creation."""
        return self._map[self._flags[tier]] == 1

    @property
    def all_complete(self) -> bool:
        """Whether a False of `may_contain` can be relied on; true if there are no tiers."""
        return all(map(self.complete, self._flags))

    def close(self) -> None:
        """Unmap the filter and close its descriptor; a second call does nothing."""
        if not self._map.closed:
            self._words.release()
            self._map.close()
            os.close(self.fd)


class PresenceWriter(PresenceFilter):
    """The store process's end, which creates the memory. Each method may be called from any of its threads."""

    _protection = mmap.PROT_READ | mmap.PROT_WRITE

    def __init__(self, fd: int, tiers: Sequence[str]) -> None:
        super().__init__(fd, tiers)
        self._bits = {tier: _Bits(self._map, self._words, index) for index, tier in enumerate(tiers)}

    @classmethod
    def create(cls, tiers: Sequence[str]) -> Self:
        """An empty filter over `tiers`, none of them complete. OSError if no memory can be allocated."""
        header = _header(tiers)
        fd = os.memfd_create("lmcache-ec-presence", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, _size(tiers))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            os.pwrite(fd, header, 0)
            return cls(fd, tiers)
        except BaseException:
            os.close(fd)
            raise

    def add(self, tier: str, digest: bytes) -> bool:
        """Note that `tier` holds the key with this 32-byte digest. Returns whether that changed the filter."""
        return self._bits[tier].add(digest)

    @contextmanager
    def listing(self, tier: str) -> Iterator[Callable[[bytes], object]]:
        """Replace what is known of `tier` by its listing: the context is a function that takes each digest.

        Listed keys count at once; keys neither listed nor added meanwhile are forgotten when the context is left
        normally. If it is left by an exception, nothing is forgotten. One listing of a tier at a time.
        """
        bits = self._bits[tier]
        bits.begin()
        try:
            yield bits.add
        except BaseException:
            bits.abandon()
            raise
        bits.finish()

    @contextmanager
    def laying(self, tier: str, longest: int) -> Iterator[Callable[[int, int, bytes | None], None]]:
        """Like `listing`, but from a catalog: the context is a function that takes, for each of the `SHARDS`, its
        number, its count of keys and its bits (`shard_of`; None: unchanged). `longest`: bytes of the longest shard."""
        bits = self._bits[tier]
        bits.begin(max(1, longest // 8) * SHARDS)
        try:
            yield bits.lay
        except BaseException:
            bits.abandon()
            raise
        bits.finish()

    def set_complete(self, tier: str, complete: bool = True) -> None:
        """Note that all that `tier` holds has been added; with False, that it must be asked again."""
        self._map[self._flags[tier]] = complete


def shard_of(keys: bytes | bytearray) -> bytes:
    """The shard with these keys: the first `KEY_BYTES` of each digest, concatenated; all begin with the same byte."""
    size = _SMALLEST_SHARD
    while size < _LARGEST_SHARD and size * 64 < len(keys) // KEY_BYTES * _SHARD_BITS_A_KEY:
        size *= 2
    words, mask = [0] * size, size - 1
    for one, other in _SHARD_PROBES.iter_unpack(keys):
        words[one >> 8 & mask] |= _PATTERNS[one >> 52]
        words[other >> 8 & mask] |= _PATTERNS[other >> 52]
    return struct.pack(f"<{size}Q", *words)


def is_shard(data: bytes) -> bool:
    """Whether `data` has a valid length for a shard."""
    words, rest = divmod(len(data), 8)
    return not rest and _SMALLEST_SHARD <= words <= _LARGEST_SHARD and not words & words - 1


class _Section:
    """A tier's part of the memory, as it was at the last look."""

    __slots__ = ("_index", "seen", "shape_at")

    def __init__(self, index: int) -> None:
        self._index = index
        self.shape_at = _SHAPES_AT + index
        self.seen: _Shape = (0, 0, 0)
        """Replaced as a whole: threads of the writer share it."""

    def look(self, words: memoryview) -> _Shape:
        word: int = words[self.shape_at]
        self.seen = word, _first_word(self._index, word & 1), (1 << (word >> 1 & 127)) - 1
        return self.seen


class _Bits:
    """A tier's part of the memory, for writing: the live region and the one a listing fills. `_lock` covers both."""

    def __init__(self, memory: mmap.mmap, words: memoryview, index: int) -> None:
        self._words = words
        self._shape_at = _SHAPES_AT + index
        self._index = index
        self._regions = tuple(_Region(memory, words, _first_word(index, number)) for number in range(2))
        self._live = 0
        self._filling: _Region | None = None
        self._listed = False
        self._lock = threading.Lock()
        self._regions[0].clear(_SMALLEST_BYTES // 8)
        self._publish()

    def add(self, digest: bytes) -> bool:
        one, other = _PROBES.unpack(digest)
        with self._lock:
            if self._filling is not None:
                self._filling.add(one, other)
            live = self._regions[self._live]
            size = live.size
            new = live.add(one, other)
            if live.size != size:
                self._publish()
            return new

    def begin(self, size: int = 0) -> None:
        """Begin a listing: key by key, or in shards if a `size` in words is given."""
        with self._lock:
            filling, live = self._regions[1 - self._live], self._regions[self._live]
            if not size:
                size = _words_for(live.count) if self._listed else min(_FIRST_BYTES, _REGION_BYTES) // 8
            else:
                size = min(max(1 << size.bit_length() - 1, live.size), _REGION_BYTES // 8)
            filling.clear(size)
            self._filling = filling

    def lay(self, number: int, keys: int, shard: bytes | None) -> None:
        """Add a shard to the region being filled; None: as it is in the live region."""
        with self._lock:
            if self._filling is not None:
                self._filling.lay(number, self._regions[self._live].shard(number) if shard is None else shard)
                self._filling.count += keys

    def abandon(self) -> None:
        with self._lock:
            self._regions[1 - self._live].clear(0)
            self._filling = None

    def finish(self) -> None:
        with self._lock:
            old, new = self._regions[self._live], self._regions[1 - self._live]
            new.fold(_words_for(new.count))
            self._live, self._filling, self._listed = 1 - self._live, None, True
            self._publish()
            old.clear(0)

    def _publish(self) -> None:
        turn = (self._words[self._shape_at] >> 8) + 1
        size = self._regions[self._live].size.bit_length() - 1
        self._words[self._shape_at] = turn << 8 | size << 1 | self._live


class _Region:
    """A Bloom filter in the first `size` words of a region, a power of two. The caller has the lock."""

    def __init__(self, memory: mmap.mmap, words: memoryview, first: int) -> None:
        self._memory = memory
        self._words = words
        self._first = first
        self.size = 0
        self.count = 0
        """Number of distinct keys added."""

    def add(self, one: int, other: int) -> bool:
        words, pattern, another = self._words, _PATTERNS[one >> 52], _PATTERNS[other >> 52]
        first, mask = self._first, self.size - 1
        one_word, other_word = first + (one & mask), first + ((other & -SHARDS | one & SHARDS - 1) & mask)
        if words[one_word] & pattern == pattern and words[other_word] & another == another:
            return False
        words[one_word] |= pattern
        words[other_word] |= another
        self.count += 1
        if self.count * _FULL_AT > self.size * 64 and self.size < _REGION_BYTES // 8:
            self._double()
        return True

    def shard(self, number: int) -> bytes:
        return self._words[self._first + number : self._first + self.size : SHARDS].tobytes()

    def lay(self, number: int, shard: bytes) -> None:
        """Add all that a shard holds. It is first resized to this filter's shard size."""
        length = self.size // SHARDS * 8
        while len(shard) > length:
            half = len(shard) // 2
            low, high = int.from_bytes(shard[:half], "little"), int.from_bytes(shard[half:], "little")
            shard = (low | high).to_bytes(half, "little")
        shard *= length // len(shard)
        places = slice(self._first + number, self._first + self.size, SHARDS)
        laid = int.from_bytes(self._words[places].tobytes(), "little") | int.from_bytes(shard, "little")
        self._words[places] = memoryview(laid.to_bytes(length, "little")).cast("Q")

    def clear(self, size: int) -> None:
        """Forget all keys, give the memory back, and set the size to `size` words."""
        self._give_back(0, self.size)
        self.size, self.count = size, 0

    def fold(self, size: int) -> None:
        """Shrink the filter to `size` words if it is larger: each part cut off is ORed into what stays."""
        words, first, whole = self._words, self._first, self.size
        while self.size > size:
            self.size //= 2
            for low, high in _chunks(first, first + self.size, self.size):
                if cut := int.from_bytes(words[high], "little"):
                    laid = int.from_bytes(words[low], "little") | cut
                    words[low] = memoryview(laid.to_bytes(words[low].nbytes, "little")).cast("Q")
        self._give_back(self.size, whole)

    def _double(self) -> None:
        for low, high in _chunks(self._first, self._first + self.size, self.size):
            self._words[high] = self._words[low]
        self.size *= 2

    def _give_back(self, begin: int, end: int) -> None:
        if begin >= end:
            return
        start, length = (self._first + begin) * 8, (end - begin) * 8
        try:
            self._memory.madvise(mmap.MADV_REMOVE, start, length)
        except OSError:  # not supported in some sandboxes: the memory stays, but is cleared
            self._memory[start : start + length] = bytes(length)


def _chunks(low: int, high: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Two runs of `size` words each, beginning at `low` and `high`, in pieces."""
    for begin in range(0, size, _CHUNK_WORDS):
        end = min(begin + _CHUNK_WORDS, size)
        yield slice(low + begin, low + end), slice(high + begin, high + end)


def _words_for(count: int) -> int:
    """The size in words of a filter for `count` keys."""
    most, size = _REGION_BYTES // 8, _SMALLEST_BYTES // 8
    while size < most and size * 64 < count * _BITS_A_KEY:
        size *= 2
    return size


def _first_word(index: int, region: int) -> int:
    return (_HEADER_BYTES + (2 * index + region) * _REGION_BYTES) // 8


def _size(tiers: Sequence[str]) -> int:
    return _HEADER_BYTES + 2 * len(tiers) * _REGION_BYTES


def _header(tiers: Sequence[str]) -> bytes:
    if len(set(tiers)) != len(tiers) or len(tiers) > _MOST_TIERS:
        raise ValueError(f"tiers {list(tiers)}: must be distinct names, at most {_MOST_TIERS}")
    return _HEADER.pack(_MAGIC, _VERSION, len(tiers), zlib.crc32("\0".join(tiers).encode()))
