# SPDX-License-Identifier: Apache-2.0
"""A catalog of a namespace in its bucket, in place of a listing by each replica (`catalog=true` in the URL).

    <prefix>/.catalog/<namespace>/delta/<writer>-<number>     keys that one writer has put since its last delta
    <prefix>/.catalog/<namespace>/shard/<aa>                  bits of all keys that begin with this byte
    <prefix>/.catalog/<namespace>/writer                      the lease of the one that lists (s3_compactor.py)

Who owns what, and the consequences:

1. A delta has no owner once it is written: it never changes, and only the compactor removes it. A writer puts its
   keys first and then the delta. If it dies between the two, its keys are found by the next full listing.
2. A shard is replaced by the holder of the lease, with `If-Match` on what it found when it began: if two believe that
   they hold it, one is refused and ends. A lost or unfinished shard has all bits set: its keys are requested.
3. The compactor notes which deltas there are, *then* lists, *then* replaces all shards, *then* removes these deltas. So
   whatever a removed delta named is in the shards. It may die anywhere: what it has not replaced is older, not wrong.
4. A reader lists the catalog, deltas before shards (in sort order), then reads what changed. A delta that is missing
   was removed before the list reached the shards, so the list has the new ones. If one is missing when it is to be
   read, the reader starts again.
5. No clock decides about the lease: it is stale if it has not changed for `lease_s` of the observer's own time.
   The store's clock decides when the next listing is due; a wrong clock costs extra listings.
6. A deleted entry stays in its shard until the next listing and costs requests. A shard that is torn, forged (where
   entries are signed), too long or of another name counts as lost, a delta as never written: requests and misses.
7. `lmcache-ec namespaces remove` removes the catalog, including the lease: a running compactor fails to renew it, and
   ends. The shards that it wrote meanwhile are incomplete: requests, until the next one finds the namespace small.
8. For a small namespace nothing is written: one request for a sample shows that it is small, and it is listed.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from lmcache_ec.presence import KEY_BYTES, SHARDS, UNKNOWN_SHARD
from lmcache_ec.signing import SigningKey
from lmcache_ec.tiers.base import TierError
from lmcache_ec.tiers.catalog import Catalog, Shard
from lmcache_ec.tiers.filter_shard import (
    MAX_OBJECT_BYTES,
    MOST_KEYS,
    NoCatalogObject,
    decode_delta,
    decode_shard,
    encode,
)

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import S3Store

_FOLDER = ".catalog"  # no namespace begins with a dot
_READERS = 16
_PAGE = 1000
_LOOKS = 5
_MOST_DELTAS = 8192
"""Any beyond these are not read: their keys are misses until the next listing."""
_MOST_PENDING = 1 << 20
_DIGEST_REST = bytes(32 - KEY_BYTES)


@dataclass(frozen=True, slots=True)
class Pace:
    """After `lease_s` without a sign of the compactor, another may take over. `compact_s` between two full listings, or
    sooner once there are `deltas`. `large`: the number of entries from which a catalog is cheaper than listings."""

    lease_s: float = 120.0
    compact_s: float = 3600.0
    deltas: int = 4096
    large: int = 4096
    again_s: float = 10.0


@dataclass(slots=True)
class Look:
    """What is in a catalog's folder now."""

    deltas: dict[str, ObjectMeta] = field(default_factory=dict)
    shards: dict[int, ObjectMeta] = field(default_factory=dict)
    lease: ObjectMeta | None = None


class _Removed(Exception):
    """A delta has been removed since it was listed."""


class CatalogFolder:
    """A namespace's catalog as objects. Any thread may call it. Errors are obstore's."""

    def __init__(self, client: S3Store, lister: S3Store, namespace: str) -> None:
        self.namespace = namespace
        self.path = f"{_FOLDER}/{namespace}"
        self._client = client
        self._lister = lister

    def look(self) -> Look:
        """One request for up to 1,000 objects."""
        look = Look()
        for found in chain.from_iterable(self._lister.list(self.path, chunk_size=_PAGE)):
            kind, _, name = found["path"].removeprefix(f"{self.path}/").partition("/")
            if kind == "delta" and len(look.deltas) < _MOST_DELTAS and found["size"] <= MAX_OBJECT_BYTES:
                look.deltas[name] = found
            elif kind == "shard" and len(name) == 2 and not name.strip("0123456789abcdef"):
                look.shards[int(name, 16)] = found
            elif kind == "writer" and not name:
                look.lease = found
        return look

    def read(self, name: str) -> tuple[bytes, str | None]:
        """An object and its version. FileNotFoundError if it was removed."""
        found = self._client.get(f"{self.path}/{name}")
        if found.meta["size"] > MAX_OBJECT_BYTES:
            raise NoCatalogObject(f"{name}: {found.meta['size']} bytes")
        return bytes(found.bytes()), found.meta["e_tag"]

    def write(self, name: str, data: bytes, over: str | None) -> str | None:
        """Write an object in place of version `over` (None: of no object). Its version. AlreadyExistsError,
        PreconditionError or FileNotFoundError if something else is there by now."""
        mode = "create" if over is None else {"e_tag": over}
        return self._client.put(f"{self.path}/{name}", data, mode=mode, use_multipart=False)["e_tag"]  # type: ignore[arg-type]

    def remove(self, names: Sequence[str]) -> None:
        for begin in range(0, len(names), _PAGE):
            self._lister.delete([f"{self.path}/{name}" for name in names[begin : begin + _PAGE]])

    def remove_all(self) -> None:
        found = chain.from_iterable(self._lister.list(self.path, chunk_size=_PAGE))
        self.remove([one["path"].removeprefix(f"{self.path}/") for one in found])


class S3Catalog:
    """The side of readers and writers. `read` runs on the tier's scan thread, `wrote` on its write threads.

    `_lock` guards keys written but not yet in a delta; everything else belongs to the scan thread.
    """

    def __init__(self, folder: Callable[[str], CatalogFolder], sample: Callable[[str], int]) -> None:
        """`folder` opens that of a namespace; `sample` counts the entries of its shard 00, up to a page."""
        self.pace = Pace()
        self.due = False
        """Whether a full listing is due, as of the last `read`."""
        self.look = Look()
        self.now: Callable[[], float] = time.time
        """The store's clock."""
        self._folder = folder
        self._sample = sample
        self.writes = True
        """Whether deltas and shards may be written."""
        self.failure: Exception | None = None
        """Why the last announcement of what was put here failed, if it did."""
        self._writer, self._number = os.urandom(8).hex(), 0
        self._pending: dict[str, bytearray] = {}
        self._lock = threading.Lock()
        self._lease: tuple[str | None, float] = (None, 0.0)
        self._forget("")

    def _forget(self, namespace: str) -> None:
        self._namespace = namespace
        self._versions: dict[int, str | None] = {}
        self._keys: dict[int, int] = {}
        self._deltas: dict[str, bytes] = {}
        self._unreadable: set[int] = set()

    def wrote(self, namespace: str, digest: bytes) -> None:
        """An entry has been written. Others learn of it with the next delta."""
        with self._lock:
            pending = self._pending.setdefault(namespace, bytearray())
            if len(pending) < _MOST_PENDING * KEY_BYTES:
                pending += digest[:KEY_BYTES]

    def read(self, namespace: str, signing: SigningKey | None) -> Catalog | None:
        """What changed since the last call; None if the namespace has to be listed."""
        if namespace != self._namespace:
            self._forget(namespace)
        folder = self._folder(namespace)
        for _ in range(_LOOKS):
            pending = self._taken(namespace)  # before the look: a listing begun later includes these keys
            try:
                look = self.look = folder.look()
                absent = not look.shards and not self._leased(look.lease)
                if absent and not self._large(namespace):
                    self._forget(namespace)
                    self.due = False
                    return None
                changed_deltas = self._read_deltas(folder, look, signing)
            except _Removed:
                self._give_back(namespace, pending)
                continue
            except BaseException:
                self._give_back(namespace, pending)
                raise
            break
        else:
            raise TierError(errno.EAGAIN, f"s3 tier could not read the catalog of {namespace}: it keeps changing")
        if not absent:
            changed_deltas += self._announce(folder, pending, signing)
        return self._catalog(folder, look, changed_deltas, signing)

    def _catalog(self, folder: CatalogFolder, look: Look, new: list[bytes], signing: SigningKey | None) -> Catalog:
        versions = {number: meta["e_tag"] or str(meta["last_modified"]) for number, meta in look.shards.items()}
        changed = [number for number in range(SHARDS) if self._is_new(number, versions.get(number))]
        self.due = self._is_due(look)
        again_s = self.pace.again_s if len(look.shards) < SHARDS else None
        if not changed:
            return Catalog(digests=_digests(new), again_s=again_s)
        sizes = (look.shards[number]["size"] for number in changed if number in look.shards)
        longest = max((size for size in sizes if size <= MAX_OBJECT_BYTES), default=1)  # longer ones are not read
        return Catalog(
            self._shards(folder, look, changed, versions, signing),
            longest,
            _digests(self._deltas.values()),
            again_s,
        )

    def _is_due(self, look: Look) -> bool:
        oldest = min((meta["last_modified"].timestamp() for meta in look.shards.values()), default=0.0)
        return self.writes and (
            len(look.shards) < SHARDS
            or bool(self._unreadable)
            or oldest < self.now() - self.pace.compact_s
            or len(look.deltas) > self.pace.deltas
        )

    def _is_new(self, number: int, version: str | None) -> bool:
        return number not in self._versions or self._versions[number] != version

    def _shards(
        self,
        folder: CatalogFolder,
        look: Look,
        changed: Sequence[int],
        versions: Mapping[int, str | None],
        signing: SigningKey | None,
    ) -> Iterator[Shard]:
        read: dict[int, tuple[str | None, int, bool]] = {}
        unchanged = set(range(SHARDS)).difference(changed)
        yield from (Shard(number, self._keys[number], None) for number in unchanged)

        def shard(number: int) -> Shard:
            name, version = f"shard/{number:02x}", versions.get(number)
            if version is not None:
                try:
                    data, version = folder.read(name)
                    keys, bits = decode_shard(f"{folder.namespace}/{name}", data, signing)
                    read[number] = version, keys, True
                    return Shard(number, keys, bits)
                except (FileNotFoundError, NoCatalogObject):
                    pass
            read[number] = version, 0, version is None
            return Shard(number, 0, UNKNOWN_SHARD)

        with ThreadPoolExecutor(_READERS, "s3-catalog") as pool:
            for begin in range(0, len(changed), _READERS):  # at most this many in memory
                yield from pool.map(shard, changed[begin : begin + _READERS])
        for number, (version, keys, readable) in read.items():
            self._versions[number], self._keys[number] = version, keys
            (self._unreadable.discard if readable else self._unreadable.add)(number)
        self.due = self._is_due(look)

    def _read_deltas(self, folder: CatalogFolder, look: Look, signing: SigningKey | None) -> list[bytes]:
        """The keys of deltas that were not there at the last call."""
        self._deltas = {name: keys for name, keys in self._deltas.items() if name in look.deltas}
        unread = [name for name in look.deltas if name not in self._deltas]

        def delta(name: str) -> bytes:
            try:
                return decode_delta(f"{folder.namespace}/delta/{name}", folder.read(f"delta/{name}")[0], signing)
            except NoCatalogObject:
                return b""
            except FileNotFoundError:
                raise _Removed from None

        if not unread:
            return []
        with ThreadPoolExecutor(_READERS, "s3-catalog") as pool:
            found = list(pool.map(delta, unread))
        self._deltas.update(zip(unread, found, strict=True))
        return found

    def _announce(self, folder: CatalogFolder, pending: bytes, signing: SigningKey | None) -> list[bytes]:
        """Write what was put here since the last delta. Keys that cannot be written now are kept for the next call."""
        from obstore.exceptions import BaseError

        announced = []
        self.failure = None
        for begin in range(0, len(pending), MOST_KEYS * KEY_BYTES):
            keys = pending[begin : begin + MOST_KEYS * KEY_BYTES]
            name, self._number = f"{self._writer}-{self._number:08x}", self._number + 1
            data = encode(f"{folder.namespace}/delta/{name}", len(keys) // KEY_BYTES, keys, signing)
            try:
                folder.write(f"delta/{name}", data, None)
                self._deltas[name] = keys
            except (BaseError, OSError) as error:
                self._give_back(folder.namespace, keys)
                self.failure = error
            announced.append(keys)
        return announced

    def announce(self, signing: SigningKey | None) -> None:
        """Write what was put here since the last delta, if there is a catalog: this writer is about to end."""
        if self._versions:
            self._announce(self._folder(self._namespace), self._taken(self._namespace), signing)

    def _taken(self, namespace: str) -> bytes:
        with self._lock:
            return bytes(self._pending.pop(namespace, b""))

    def _give_back(self, namespace: str, keys: bytes) -> None:
        with self._lock:
            self._pending[namespace] = bytearray(keys) + self._pending.get(namespace, bytearray())

    def _large(self, namespace: str) -> bool:
        return self.writes and self._sample(namespace) * SHARDS >= self.pace.large

    def _leased(self, lease: ObjectMeta | None) -> bool:
        """Whether a compactor is at work: a released lease is empty, one that is not renewed is stale."""
        if lease is None or not lease["size"]:
            return False
        if self._lease[0] != lease["e_tag"]:
            self._lease = lease["e_tag"], time.monotonic()
        return time.monotonic() - self._lease[1] < self.pace.lease_s

    @property
    def free(self) -> bool:
        """Whether the lease can be taken, as of the last `read`."""
        return not self._leased(self.look.lease)


def _digests(keys: Iterable[bytes]) -> list[bytes]:
    return [some[begin : begin + KEY_BYTES] + _DIGEST_REST for some in keys for begin in range(0, len(some), KEY_BYTES)]
