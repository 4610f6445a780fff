# SPDX-License-Identifier: Apache-2.0
"""The interface of a tier."""

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

    An error of this class itself concerns one entry or one call (too large, unreadable, throttled); the next may
    succeed. Errors that concern the tier as a whole have the classes below. `errno` gives the cause.
    """


class WritesRefused(TierError):
    """The store accepts no writes at all, but can be read: it is full, is a replica, or the user may only read.

    Raised by methods that write. A store that is nearly full may accept the next write.
    """


class TierUnreachable(TierError, ValueError):
    """The tier cannot be used: its store does not answer, or refuses access. An outage that may pass.

    Opening a tier raises it only if retrying may help, and ValueError for what has to be fixed first.
    """


class TierNotReady(TierUnreachable):
    """The store answers that it cannot serve yet: it is loading its data, is overloaded, or has an internal error."""


def message(error: BaseException) -> str:
    """The text of a tier's error, on one line."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(text.split())


UNREACHABLE = frozenset(
    {
        *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ETIMEDOUT),
        *(errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH),
    }
)
"""Error numbers that mean unreachable."""


class Landing(enum.IntEnum):
    """The outcome of writing an entry to one tier.

    A tier refuses what it will never take: an entry that is too large for it, or whose name another entry has there.
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
    """What a namespace takes in a tier: entries, bytes, and the times (Unix) of the last write and the last use.

    A time that the store does not know, or cannot tell from the other, is None. A write counts as a use.
    """

    namespace: str
    entries: int
    bytes: int
    written: float | None = None
    used: float | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """What a tier had under an entry's name when it was read, so that it can be replaced.

    `data` is None if it is not a value, or is longer than was asked for. `version` distinguishes it from whatever takes
    its place, if the store has versions.
    """

    length: int
    data: memoryview | None
    version: object = None


Answer = int | None | TierError
"""For one entry among several: what `get_into` or `contains` returns for it, or the error that it raises."""

Answers = list[Answer]


class Tier(abc.ABC):
    """Moves whole entries into and out of the caller's buffers; knows nothing of tensors and verifies nothing.

    Runs in the store process only, on the tier's own threads, and may block there. Safe to call from several threads
    at once, and while other processes use the same store. An entry appears whole or not at all, and only `replace`
    overwrites one.
    Every method but `close` raises TierError, or a subclass of it, if the store fails or does not answer.
    """

    name: str
    batches: bool = False
    """Whether one round trip can request several entries, so that batching pays."""
    notice: str = ""
    """What a user has to know about how this tier works. Reported when it is opened, and when it changes."""
    read_only: bool = False
    """Whether it takes no writes, as configured or as far as it knows: no caller puts into it or deletes from it.
    Where that may change, `maintain` finds out."""

    evicted: Callable[[int], None] = staticmethod(lambda length: None)
    """Called with the length of each entry that the tier has evicted, on its threads."""

    @property
    def stored_bytes(self) -> int | None:
        """The size of all namespaces, if the tier keeps count; else None. May query the store."""
        return None

    @abc.abstractmethod
    def get_into(self, key: EntryName, buffer: memoryview) -> int | None:
        """The length in bytes of the stored entry, or None if there is none.

        If that is the length of `buffer`, then `buffer` now holds the entry. Otherwise the content of `buffer` is
        undefined, nothing was written past it, and the caller may ask again with a buffer of that length.
        """

    @abc.abstractmethod
    def put(self, key: EncoderCacheKey, data: memoryview) -> bool:
        """Store an entry: True if this call wrote it, False if one was there (it stays, whatever its bytes)."""

    @abc.abstractmethod
    def contains(self, key: EntryName) -> int | None:
        """The length in bytes of the stored entry, or None if there is none."""

    def peek(self, key: EntryName, most: int) -> bytes | None:
        """The first `most` (at least 1) bytes of an entry, all of it if it is shorter, None if there is none. For
        maintenance programs: does not count as a use of the entry where the tier can tell the difference."""
        length = self.contains(key)
        if length is None:
            return None
        buffer = memoryview(bytearray(length))
        return bytes(buffer[:most]) if self.get_into(key, buffer) == length else None

    def get_each_into(self, wanted: Sequence[tuple[EncoderCacheKey, memoryview]]) -> Answers:
        """`get_into` for several entries. An error is the answer for its entry; TierError is raised only if
        nothing could be requested."""
        return [_answered(partial(self.get_into, key, buffer)) for key, buffer in wanted]

    def contains_each(self, keys: Sequence[EntryName]) -> Answers:
        """`contains` for several entries, as `get_each_into`."""
        return [_answered(partial(self.contains, key)) for key in keys]

    def check_writes(self) -> bool:
        """Test whether writes are accepted at all, with one request that changes nothing. WritesRefused if they are
        not; False if that cannot be tested."""
        return False

    def held(self, key: EncoderCacheKey, most_bytes: int) -> Held | None:
        """What is stored under this name, with its bytes if they are no more than `most_bytes`; None if nothing is
        stored, or if it is changing right now."""
        length = self.contains(key)
        if length is None or length > most_bytes:
            return None if length is None else Held(length, None)
        data = memoryview(bytearray(length))
        return Held(length, data) if self.get_into(key, data) == length else None

    def replace(self, key: EncoderCacheKey, data: memoryview, held: Held) -> bool:
        """Store an entry in place of `held`. Returns False and writes nothing if something else is there by now, as
        far as the tier knows."""
        self.delete(key)
        return self.put(key, data)

    @abc.abstractmethod
    def delete(self, key: EntryName) -> bool:
        """Remove an entry; a missing one is no error. Whether there was one; also True if the store does not tell."""

    @abc.abstractmethod
    def list(self, namespace: str) -> Iterator[Listed]:
        """All entries of a namespace, in any order; those added or removed meanwhile may be left out."""

    def catalog(self, namespace: str, signing: SigningKey | None = None) -> Catalog | None:
        """What a namespace holds, if the store keeps a catalog; None if it has to be listed. On one thread.
        Deleted entries may still be in it, and recently written ones may be missing."""
        return None

    def announce(self) -> None:
        """Publish what was written here and others cannot know of yet: this process is about to end."""
        return

    def news(self, namespace: str) -> Sequence[bytes]:
        """Digests of entries of a namespace that others have written since the last call, if the tier learns of
        them cheaply; else none. An entry written after the first call and before a `list` begins is in one of the
        two; but some may be left out, and only a later `list` has them. One namespace at a time."""
        return ()

    def namespaces(self) -> Iterator[NamespaceUse]:
        """The use of each namespace with an entry. Counting does not update the last-used time, and changes nothing."""
        raise self._unlisted()

    def namespace_names(self) -> Sequence[str]:
        """The namespaces, without counting their entries; some may have none."""
        return [use.namespace for use in self.namespaces()]

    def remove(self, namespace: str) -> int:
        """Delete all entries of a namespace, and nothing else: how many it found. Entries written meanwhile may
        stay. An engine that uses the namespace keeps running, with misses."""
        raise self._unlisted()

    def _unlisted(self) -> TierError:
        return TierError(errno.EOPNOTSUPP, f"the {self.name} tier cannot be listed")

    def born(self) -> str | None:
        """A name for the store's content, which changes only when the store is emptied as a whole (folder removed,
        server flushed, all of the bucket deleted). `delete`, `remove`, eviction and the expiry of an entry do not
        change it. None if the store does not show it, or while it is unknown.

        Only for engines that write: a store that has no name yet is given one.
        """
        return None

    def maintain(self) -> None:
        """Housekeeping that no caller waits for: runs in the background after each complete list. Changes no entry,
        unless the tier is over its limit."""
        return

    @abc.abstractmethod
    def close(self) -> None:
        """Release the store. No other call is in progress or follows; stored entries stay."""


def _answered(ask: Callable[[], int | None]) -> Answer:
    try:
        return ask()
    except TierError as error:
        return error
