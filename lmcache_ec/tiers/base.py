# SPDX-License-Identifier: Apache-2.0
"""What a tier is."""

import abc
import enum
import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from lmcache_ec.key import EncoderCacheKey, EntryName
from lmcache_ec.signing import SigningKey
from lmcache_ec.tiers.catalog import Catalog


class TierError(OSError):
    """A tier could not do what was asked. Never a plain miss.

    Of this class itself: what it says is about one entry, or one call (too large, unreadable, throttled); the next may
    go well. What it says about the tier has a class of its own, below. `errno` gives the cause.
    """


class WritesRefused(TierError):
    """The store takes no writes, whatever they are, and can be read: it is full, a replica, or the user may only read.

    Raised by what writes. A store that is nearly full may take the next one.
    """


class TierUnreachable(TierError, ValueError):
    """The tier cannot be used: its store does not answer, or refuses access. An outage that may pass.

    What opens a tier raises it only for what is worth waiting for; ValueError for what somebody has to fix first.
    """


class TierNotReady(TierUnreachable):
    """The store answers that it cannot serve yet: it loads its data, is overloaded, or reports an error of its own."""


def message(error: BaseException) -> str:
    """What a tier's error says, in one line."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(text.split())


UNREACHABLE = frozenset(
    {
        *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ETIMEDOUT),
        *(errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH),
    }
)
"""The numbers of errors that say so."""


class Landing(enum.IntEnum):
    """What became of the write of an entry to one tier.

    A tier refuses what it will never take: an entry that is too large for it, or whose name another one has there.
    """

    TOOK = 0
    REFUSED = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class Listed:
    """One entry that a tier holds: digest of its key, length in bytes, and when it was last written or read (Unix)."""

    digest: bytes
    length: int
    modified: float


@dataclass(frozen=True, slots=True)
class NamespaceUse:
    """What a namespace takes in a tier: entries, bytes, and (Unix) when one of them was last written, and when used.

    None for what the store does not distinguish or know; to be written is a use.
    """

    namespace: str
    entries: int
    bytes: int
    written: float | None = None
    used: float | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """What a tier has under the name of an entry, as it was when it was read, so that it can be replaced.

    `data` is None for what is no value, or longer than was asked for. `version` distinguishes it from whatever takes
    its place, where the store knows such a thing.
    """

    length: int
    data: memoryview | None
    version: object = None


Answer = int | None | TierError
"""Of one entry among several: what `get_into` or `contains` returns for it, or the error that it raises."""

Answers = list[Answer]


class Tier(abc.ABC):
    """Moves whole entries into and out of buffers that it is given; knows no tensors and verifies nothing.

    Runs in the store process only, on the tier's own threads, and may block there. Safe to call from several threads
    at once, and beside other processes on the same store. An entry appears whole or not at all, and only `replace` puts
    another in its place.
    Every method but `close` raises TierError if the store fails or does not answer; its subclasses say what is meant.
    """

    name: str
    batches: bool = False
    """Whether several entries are asked for in one round trip, so that it pays to ask for them together."""
    notice: str = ""
    """What a user has to know about how this tier serves. Reported when it is opened, and when it changes."""
    read_only: bool = False
    """Whether it takes no writes, as configured or as far as it knows: nobody puts into it, or deletes from it.
    Where that may change, `maintain` finds out."""

    evicted: Callable[[int], None] = staticmethod(lambda length: None)
    """Called with the length of each entry that the tier has evicted, on its threads."""

    @property
    def stored_bytes(self) -> int | None:
        """What all namespaces take, where the tier keeps count; else None. May ask the store."""
        return None

    @abc.abstractmethod
    def get_into(self, key: EntryName, buffer: memoryview) -> int | None:
        """The length in bytes of the entry that is stored, or None if there is none.

        If that is the length of `buffer`, then `buffer` now holds the entry. Otherwise nothing useful is in it,
        nothing was written past it, and the caller may ask again with a buffer of that length.
        """

    @abc.abstractmethod
    def put(self, key: EncoderCacheKey, data: memoryview) -> bool:
        """Store an entry: True if this call wrote it, False if one was there (which stays, whatever its bytes)."""

    @abc.abstractmethod
    def contains(self, key: EntryName) -> int | None:
        """The length in bytes of the entry that is stored, or None if there is none."""

    def peek(self, key: EntryName, most: int) -> bytes | None:
        """The first `most` bytes of an entry, at least one; all of it if it is shorter; None if there is none. For
        programs that look after a store: that is no use of the entry where the tier can distinguish the two."""
        length = self.contains(key)
        if length is None:
            return None
        buffer = memoryview(bytearray(length))
        return bytes(buffer[:most]) if self.get_into(key, buffer) == length else None

    def get_each_into(self, wanted: Sequence[tuple[EncoderCacheKey, memoryview]]) -> Answers:
        """`get_into` for several entries. What fails is the answer for its entry; TierError is raised only where
        nothing could be asked."""
        return [_answered(partial(self.get_into, key, buffer)) for key, buffer in wanted]

    def contains_each(self, keys: Sequence[EntryName]) -> Answers:
        """`contains` for several entries, as `get_each_into`."""
        return [_answered(partial(self.contains, key)) for key in keys]

    def check_writes(self) -> bool:
        """Ask whether writes are accepted at all, with one request that changes nothing. WritesRefused if they are not;
        False where that cannot be asked."""
        return False

    def held(self, key: EncoderCacheKey, most_bytes: int) -> Held | None:
        """What is there under this name, with its bytes if they are no more than `most_bytes`; None if nothing is
        there, or if it changes just now."""
        length = self.contains(key)
        if length is None or length > most_bytes:
            return None if length is None else Held(length, None)
        data = memoryview(bytearray(length))
        return Held(length, data) if self.get_into(key, data) == length else None

    def replace(self, key: EncoderCacheKey, data: memoryview, held: Held) -> bool:
        """Store an entry in the place of `held`. False, and nothing is written, if something else is there by now, as
        far as the tier knows."""
        self.delete(key)
        return self.put(key, data)

    @abc.abstractmethod
    def delete(self, key: EntryName) -> bool:
        """Remove an entry; none there is no error. Whether there was one; True, too, if the store does not say."""

    @abc.abstractmethod
    def list(self, namespace: str) -> Iterator[Listed]:
        """All entries of a namespace, in any order; those that come or go meanwhile may be left out."""

    def catalog(self, namespace: str, signing: SigningKey | None = None) -> Catalog | None:
        """What a namespace holds, where the store keeps that ready; None where it is to be listed. On one thread.
        Entries that were deleted may be in it, and those that were written lately may be missing."""
        return None

    def announce(self) -> None:
        """Publish what was written here and others cannot know yet: this process is about to end."""
        return

    def news(self, namespace: str) -> Sequence[bytes]:
        """Digests of entries of a namespace that others have written since the last call, where the tier learns of
        them at little cost; else none. One that is written after the first call and before a `list` begins is in one
        of the two; but some may be left out, and only a later `list` has them. Of one namespace at a time."""
        return ()

    def namespaces(self) -> Iterator[NamespaceUse]:
        """What each namespace with an entry takes. Counting does not update the last-used time, and changes nothing."""
        raise self._unlisted()

    def namespace_names(self) -> Sequence[str]:
        """The namespaces, without a count of their entries, which some may lack."""
        return [use.namespace for use in self.namespaces()]

    def remove(self, namespace: str) -> int:
        """Delete all entries of a namespace, and nothing else: how many it found. Those that are written meanwhile may
        stay. An engine that uses it goes on, and misses."""
        raise self._unlisted()

    def _unlisted(self) -> TierError:
        return TierError(errno.EOPNOTSUPP, f"the {self.name} tier cannot be listed")

    def born(self) -> str | None:
        """What the store holds goes by this name until somebody empties it as a whole (removes the folder, flushes the
        server, deletes all of the bucket): then by another. Neither `delete` nor `remove`, nor eviction or the end of
        an entry's time changes it. None where the store does not show it, or while it is unknown.

        For engines that write alone: a store that has no name yet is given one.
        """
        return None

    def maintain(self) -> None:
        """Housekeeping that nobody waits for: called in the background after each complete list. Changes no entry,
        unless the tier holds more than it may."""
        return

    @abc.abstractmethod
    def close(self) -> None:
        """Release the store. No other call is under way or follows; what was put stays."""


def _answered(ask: Callable[[], int | None]) -> Answer:
    try:
        return ask()
    except TierError as error:
        return error
