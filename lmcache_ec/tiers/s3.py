# SPDX-License-Identifier: Apache-2.0
"""S3: one object per entry, in a bucket of AWS or of any store that speaks its protocol.

    s3://<bucket>/<prefix>/<namespace>/<aa>/<sha256>.safetensors

The bytes go through obstore, whose requests run outside the interpreter; boto3 finds the credentials and the address of
the bucket, as it does for every program of an AWS user, and performs administrative requests. Neither is imported
before an S3 remote is opened.

An object is written with `If-None-Match: *`, so that a fleet writes it once, and with the SHA-256 of its bytes, so
that the server refuses what was torn or altered in transit. The object `<prefix>/lmcache-ec-born` holds the name of
the store's content (see `Tier.born`).

The age of an object is measured by the store's clock (`s3_clock.py`).

Every request has a time limit. A read is aborted when nothing arrives for `timeout_s`. Silence cannot be detected in an
upload, so it has a total limit that grows with its length; a page of a list has its own total limit.
"""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from lmcache_ec.key import EncoderCacheKey, EntryName, check_namespace, is_namespace, parse_object_name
from lmcache_ec.signing import SigningKey
from lmcache_ec.tiers.base import (
    UNREACHABLE,
    Held,
    Listed,
    NamespaceUse,
    Tier,
    TierError,
    TierNotReady,
    TierUnreachable,
)
from lmcache_ec.tiers.catalog import Catalog, Shard
from lmcache_ec.tiers.remote import TIMEOUT_S
from lmcache_ec.tiers.s3_access import S3Access
from lmcache_ec.tiers.s3_catalog import CatalogFolder
from lmcache_ec.tiers.s3_catalog_tier import Cataloged
from lmcache_ec.tiers.s3_clock import StoreClock
from lmcache_ec.tiers.s3_faults import Fault, OfAnotherKey, reported
from lmcache_ec.tiers.s3_lifecycle import lifecycle_ttl_s, set_lifecycle_ttl
from lmcache_ec.tiers.s3_listing import pages
from lmcache_ec.tiers.s3_url import S3Options, s3_options

if TYPE_CHECKING:
    from obstore import Attributes, ObjectMeta, PutMode
    from obstore.store import S3Store

_LIST_PATIENCE = 6  # a page of a list may take this many times as long as a read may be silent
_SLOWEST_UPLOAD = 4 << 20  # bytes a second; slower is a hang
_CHUNK = 256 << 10  # stays in the processor's cache between obstore's buffer and the caller's
_NEVER_WRITTEN = "lmcache-ec-probe"
_WRITE_PROBE = "lmcache-ec-write-probe"
_BORN = "lmcache-ec-born"
_BORN_REWRITTEN_S = 6 * 3600.0
"""Soon enough that a lifecycle rule, which counts in days, does not remove it as an aged entry."""

_Answer = TypeVar("_Answer")


def open_s3(
    url: str | S3Options,
    extra_config: Mapping[str, object] | None = None,
    *,
    ttl_s: float | None = None,
    timeout_s: float = TIMEOUT_S,
) -> S3Tier:
    """The tier at an S3 URL (see `s3_options`), after one request that shows that it can be read.

    ValueError states what is wrong: URL, credentials, bucket, region, clock, TLS, or no answer. Takes half a second for
    the imports, and `timeout_s` more if nothing answers. Call it in the process that uses the tier: obstore's threads
    do not survive a fork.
    """
    if timeout_s <= 0 or (ttl_s is not None and ttl_s <= 0):
        raise ValueError(f"S3: timeout_s={timeout_s} and ttl_s={ttl_s} must be above 0")
    options = url if isinstance(url, S3Options) else s3_options(url, extra_config)
    access = S3Access.of(options)
    tier = S3Tier(access, ttl_s=ttl_s, timeout_s=timeout_s)
    tier.check()
    return tier


class S3Tier(Tier):
    """Entries as objects under a prefix of a bucket; those written more than `ttl_s` ago count as absent.

    An aged object stays in the bucket until it is written again or a lifecycle rule (`set_lifecycle`) removes it.

    Runs in the store process, on the tier's own threads; `list` starts some of its own. Its state is the clients, one
    for each time limit, guarded by `_lock`, whether the store supports conditional writes, and its clock's offset.
    """

    name = "s3"

    def __init__(self, access: S3Access, *, ttl_s: float | None, timeout_s: float) -> None:
        """Use `open_s3`."""
        self._access = access
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s
        self.read_only = access.options.read_only
        self._conditions = True  # until the store refuses them
        self._clock = StoreClock(access)
        self._attributes: Attributes | None = None
        if access.options.storage_class:
            self._attributes = {"Storage-Class": access.options.storage_class}
        self._prompt = access.client(timeout_s, silence=True)
        self._patient: dict[int, S3Store] = {}
        self._lock = threading.Lock()
        self._cataloged: Cataloged | None = None
        if access.options.catalog:
            self._cataloged = Cataloged(self._prompt, self._lister, self._clock, self.check_writes, self._aged)

    def __repr__(self) -> str:
        return f"S3Tier({self._access.where})"

    def check(self) -> None:
        """Request an object that does not exist. ValueError for any answer but that, TierUnreachable for none."""
        from obstore.exceptions import BaseError

        access = self._access
        try:
            self._prompt.get(_NEVER_WRITTEN)
            advice = "it has an object for any name, as S3 never does"
        except (BaseError, OSError) as error:
            fault = Fault.of(error)
            if fault.code == "NoSuchKey":
                self._check_customer_key()
                self._compare_clocks()
                return
            advice = fault.advice(bucket=access.bucket, region=access.region, tls=access.tls)
            text = f"S3 at {access.where}: {advice}"
            if fault.number in UNREACHABLE:
                raise TierUnreachable(fault.number, text) from None
            if fault.not_ready:
                raise TierNotReady(errno.EAGAIN, text) from None
        raise ValueError(f"S3 at {access.where}: {advice}")

    def _check_customer_key(self) -> None:
        """ValueError if the objects were written with another key: none could be read or replaced."""
        from obstore.exceptions import BaseError

        try:
            if self._access.customer_key is not None:
                self._prompt.get(_BORN)
        except (BaseError, OSError) as error:
            if Fault.of(error).of_another_key:
                raise ValueError(
                    f"S3 at {self._access.where}: the objects there were written without this key of sse-c, or with "
                    f"another one: correct sse_c_key_file, or use another prefix in the URL"
                ) from None

    def _compare_clocks(self) -> None:
        self._clock.compare()
        self._give_notice()

    def _give_notice(self) -> None:
        unconditional = (
            f"S3 at {self._access.where}: it does not support conditional writes, so two engines may write one entry "
            f"twice"
        )
        self.notice = "; ".join(filter(None, ("" if self._conditions else unconditional, self._clock.notice)))

    def get_into(self, key: EntryName, buffer: memoryview) -> int | None:
        with self._reported_entry(f"read {key.object_name}"):
            found = _unless_absent(lambda: self._prompt.get(key.object_name))
            if found is None or self._aged(found.meta):
                return None
            length, position = found.meta["size"], 0
            if length != len(buffer):
                return length  # the connection is closed with the rest of the answer unread
            for chunk in found.stream(min_chunk_size=_CHUNK):
                end = position + len(chunk)
                if end > length:
                    break  # obstore resumes an interrupted read; no server is trusted to resume it correctly
                buffer[position:end] = chunk
                position = end
            if position != length:
                raise TierError(errno.EIO, f"s3 tier read {position} of {length} bytes of {key.object_name}")
        return length

    def put(self, key: EncoderCacheKey, data: memoryview) -> bool:
        with reported(f"write {key.object_name}, {len(data)} bytes", writes=True):
            try:
                with self._reported_entry(f"look for {key.object_name}"):
                    held = self._head(key)  # the bytes would be sent before the store refuses them
            except OfAnotherKey:
                return False
            if held is None:
                stored = self._created(self._uploader(data), key, data)
            else:
                stored = self._aged(held) and self._put_over(key, data, _unchanged(held))
        if self._cataloged is not None:
            self._cataloged.wrote(key)
        return stored

    def held(self, key: EncoderCacheKey, most_bytes: int) -> Held | None:
        with suppress(OfAnotherKey), self._reported_entry(f"read {key.object_name}"):
            found = _unless_absent(lambda: self._prompt.get(key.object_name))
            if found is None or self._aged(found.meta):
                return None
            data = memoryview(found.bytes()) if found.meta["size"] <= most_bytes else None
            return Held(found.meta["size"], data, _unchanged(found.meta))
        return Held(0, None, "overwrite")  # its version is unknown here

    def replace(self, key: EncoderCacheKey, data: memoryview, held: Held) -> bool:
        with reported(f"replace {key.object_name}, {len(data)} bytes", writes=True):
            stored = self._put_over(key, data, held.version)
        if self._cataloged is not None:
            self._cataloged.wrote(key)
        return stored

    def check_writes(self) -> bool:
        """As every tier: replaces an object that does not exist, which no store does; a store that does not support
        conditions creates an empty one, which is deleted."""
        from obstore.exceptions import BaseError

        with reported("write", writes=True):
            try:
                self._within(self._timeout_s).put(_WRITE_PROBE, b"", mode={"e_tag": '"none"'}, use_multipart=False)
            except (BaseError, OSError) as error:
                fault = Fault.of(error)
                if fault.status in ("404", "412"):
                    return True
                if fault.unconditional:
                    return False
                raise
            self._prompt.delete(_WRITE_PROBE)
        return True

    def contains(self, key: EntryName) -> int | None:
        with self._reported_entry(f"look for {key.object_name}"):
            held = self._head(key)
        return None if held is None or self._aged(held) else held["size"]

    def peek(self, key: EntryName, most: int) -> bytes | None:
        with self._reported_entry(f"look at {key.object_name}"):
            held = self._head(key)
            if held is None or self._aged(held):
                return None
            if not held["size"]:
                return b""  # S3 refuses any range of an empty object
            found = _unless_absent(lambda: self._prompt.get(key.object_name, options={"range": (0, most)}))
            return None if found is None else bytes(found.bytes())

    def delete(self, key: EntryName) -> bool:
        with reported(f"delete {key.object_name}"):
            _unless_absent(lambda: self._prompt.delete(key.object_name))
        return True

    def list(self, namespace: str) -> Iterator[Listed]:
        """As every tier. One request for up to 1,000 entries; else 257 and one for each further 1,000, in parallel. One
        more for the time."""
        self._compare_clocks()
        for page in pages(self._lister, check_namespace(namespace)):
            for found in page:
                entry = parse_object_name(found["path"])
                if entry and not self._aged(found):
                    yield Listed(entry.digest, found["size"], found["last_modified"].timestamp())

    def catalog(self, namespace: str, signing: SigningKey | None = None) -> Catalog | None:
        if self._cataloged is None or not self._conditions:
            return None
        self._compare_clocks()
        with reported(f"read the catalog of {namespace}"):
            found = self._cataloged.read(check_namespace(namespace), signing, writes=not self.read_only)
        if found is None or found.shards is None:
            return found
        return replace(found, shards=_each(found.shards, f"read the catalog of {namespace}"))

    def maintain(self) -> None:
        """As every tier: make a full listing for all replicas, in the background, if one is due and no other does."""
        if self._cataloged is not None and self._conditions:
            with reported("list for the catalog", writes=True):
                self._cataloged.maintain()

    def announce(self) -> None:
        if self._cataloged is not None:
            self._cataloged.announce()

    def close(self) -> None:
        """Idle connections end by themselves."""
        if self._cataloged is not None:
            self._cataloged.stop()

    def namespaces(self) -> Iterator[NamespaceUse]:
        """As every tier, aged objects included; S3 knows when an object was written, not when it was read."""
        for namespace in self.namespace_names():
            use = self._use(namespace)
            if use.entries:
                yield use

    def namespace_names(self) -> Sequence[str]:
        with reported("list the namespaces"):
            folders = self._lister.list_with_delimiter()["common_prefixes"]
        return [name for folder in folders if is_namespace(name := folder.strip("/"))]

    def remove(self, namespace: str) -> int:
        """As every tier, aged objects included."""
        removed = 0
        with reported(f"remove {namespace}"):
            for page in pages(self._lister, check_namespace(namespace)):
                names = [found["path"] for found in page if _is_entry(found)]
                if names:
                    self._lister.delete(names)
                removed += len(names)
            CatalogFolder(self._prompt, self._lister, namespace).remove_all()
        return removed

    def born(self) -> str | None:
        """As every tier. Not in a bucket that may not be listed: there S3 does not
        distinguish a missing object from a forbidden one."""
        self._compare_clocks()
        with reported("look whether it was emptied"):
            found = self._born()
            if found is None and self.read_only:
                return None
            name, meta = found or self._christened()
            if (
                meta is not None
                and not self.read_only
                and self._clock.now() - meta["last_modified"].timestamp() > _BORN_REWRITTEN_S
            ):
                self._rewrite_born(name, meta)
        return name

    def _born(self) -> tuple[str, ObjectMeta | None] | None:
        found = _unless_absent(lambda: self._prompt.get(_BORN))
        return None if found is None else (bytes(found.bytes()).decode(errors="replace"), found.meta)

    def _christened(self) -> tuple[str, ObjectMeta | None]:
        from obstore.exceptions import AlreadyExistsError

        name = os.urandom(8).hex()
        try:
            self._put(self._within(self._timeout_s), _BORN, name.encode(), "create")
        except AlreadyExistsError:
            return self._born() or (name, None)
        return name, None

    def _rewrite_born(self, name: str, meta: ObjectMeta) -> None:
        """Reset its age, unless it was removed. If this fails, another engine or a later check does it."""
        from obstore.exceptions import BaseError

        try:
            client = self._within(self._timeout_s)
            self._put(client, _BORN, name.encode(), _unchanged(meta))
        except (BaseError, OSError):
            pass

    def set_lifecycle(self, ttl_s: float) -> None:
        """Make the store delete what was written more than `ttl_s` ago, in whole days, rounded up.

        Other rules of the bucket stay as they are. ValueError without a prefix: the rule would empty the bucket.
        """
        if not self._access.prefix:
            raise ValueError("S3 lifecycle rule: the remote has no prefix, so the rule would apply to the whole bucket")
        with reported("set the lifecycle rule"):
            set_lifecycle_ttl(self._access, ttl_s)

    def lifecycle_s(self) -> float | None:
        """The age in seconds at which our rule makes the store delete entries; None if it is not in force."""
        with reported("read the lifecycle rules"):
            return lifecycle_ttl_s(self._access)

    def _use(self, namespace: str) -> NamespaceUse:
        entries, length, written = 0, 0, 0.0
        with reported(f"list {namespace}"):
            for page in pages(self._lister, namespace):
                for found in filter(_is_entry, page):
                    entries += 1
                    length += found["size"]
                    written = max(written, found["last_modified"].timestamp())
        return NamespaceUse(namespace, entries, length, written=written)

    def _created(self, client: S3Store, key: EncoderCacheKey, data: memoryview) -> bool:
        from obstore.exceptions import AlreadyExistsError

        for _ in range(2):
            try:
                self._put(client, key.object_name, data, "create")
                return True
            except AlreadyExistsError as error:
                if Fault.of(error).status != "409":  # 409: it was deleted during this request, try again
                    return False
        raise TierError(errno.EAGAIN, f"s3 tier could not write {key.object_name}: others keep writing and deleting it")

    def _put_over(self, key: EncoderCacheKey, data: memoryview, unchanged: Any) -> bool:
        """Replace an object, but nothing that another writer put there meanwhile."""
        from obstore.exceptions import PreconditionError

        try:
            self._put(self._uploader(data), key.object_name, data, unchanged)
            return True
        except (PreconditionError, FileNotFoundError):
            return False

    def _uploader(self, data: memoryview) -> S3Store:
        return self._within(self._timeout_s + len(data) / _SLOWEST_UPLOAD)

    def _put(self, client: S3Store, name: str, data: memoryview | bytes, mode: PutMode) -> None:
        """Write under a condition; without one if the store refused that and then accepted the same write without."""
        from obstore.exceptions import BaseError

        if self._conditions:
            try:
                client.put(name, data, mode=mode, use_multipart=False, attributes=self._attributes)
                return
            except (BaseError, OSError) as error:
                if not Fault.of(error).unconditional:
                    raise
        client.put(name, data, mode="overwrite", use_multipart=False, attributes=self._attributes)
        if self._conditions:
            self._conditions = False
            self._give_notice()

    def _head(self, key: EntryName) -> ObjectMeta | None:
        return _unless_absent(lambda: self._prompt.head(key.object_name))

    def _aged(self, found: ObjectMeta) -> bool:
        return self._ttl_s is not None and found["last_modified"].timestamp() < self._clock.now() - self._ttl_s

    def _reported_entry(self, action: str) -> AbstractContextManager[None]:
        """As `reported`. If each object has the key with which it was written, a refusal concerns that object."""
        return reported(action, keyed=self._access.customer_key is not None)

    @property
    def _lister(self) -> S3Store:
        return self._within(_LIST_PATIENCE * self._timeout_s)

    def _within(self, seconds: float) -> S3Store:
        """A client whose requests end within twice `seconds`: its limit is the next power of two."""
        limit = 1 << max(0, math.ceil(math.log2(seconds)))
        with self._lock:
            if limit not in self._patient:
                self._patient[limit] = self._access.client(limit, silence=False)
            return self._patient[limit]


def _each(shards: Iterator[Shard], action: str) -> Iterator[Shard]:
    with reported(action):
        yield from shards


def _unless_absent(request: Callable[[], _Answer]) -> _Answer | None:
    """The request's answer, None for a missing object; a bucket that no longer exists is an error."""
    try:
        return request()
    except FileNotFoundError as error:
        if Fault.of(error).code in ("", "NoSuchKey"):
            return None
        raise


def _unchanged(found: ObjectMeta) -> PutMode:
    """The condition that an object is still the one found; none if its store reports no versions."""
    return {"e_tag": found["e_tag"]} if found["e_tag"] else "overwrite"


def _is_entry(found: ObjectMeta) -> bool:
    return parse_object_name(found["path"]) is not None
