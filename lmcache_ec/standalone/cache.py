# SPDX-License-Identifier: Apache-2.0
"""The cache for a program: a batch job, another engine, a test. Public as `lmcache_ec.Cache`.

The same configuration, entries, tiers and accounts as an engine's, without its arena: a program manages its own
memory. Who owns what:

1. `put` copies before it returns: the caller may change its tensor at once. The copy belongs to `Writes` until a tier
   has it, or none will.
2. `get` reads into the caller's memory or that of the answer; the cache keeps no reference to it.
3. `put` may wait for room among the copies, and so for the tiers: never call it in an engine's thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from numbers import Real
from os import PathLike
from typing import Self

import numpy

from lmcache_ec import entry
from lmcache_ec.config import ConfigError, EncoderCacheConfig, Source, resolve
from lmcache_ec.config.sources import FILE_VARIABLE
from lmcache_ec.key import MAX_IDENTIFIER_BYTES, EncoderCacheKey, check_namespace
from lmcache_ec.standalone.scratch import Scratch
from lmcache_ec.standalone.tensor import Tensor
from lmcache_ec.standalone.tiers import DISK_RESCAN_S, Tiers
from lmcache_ec.standalone.writes import Write, Writes
from lmcache_ec.status_server import Status, tier_statuses
from lmcache_ec.tiers.opening import Opening
from lmcache_ec.version import __version__

_UNDER_WAY_BYTES = 256 << 20
_UNDER_WAY = 1024
"""Entries. Both limits are below what a tier queues before it refuses more."""

_READERS = 16
_LISTED_S = 10.0
_logger = logging.getLogger(__name__)


class Cache:
    """Tensors under a namespace and an identifier, in the disk and remote tiers of a configuration.

    `config` is LMCache's YAML file (default: the file that LMCACHE_CONFIG_FILE names, if any); `keys` are keys of its
    `ec:` map, and override it. `namespace` is a folder name chosen by the caller, or an engine's (`lmcache-ec
    namespaces`); default: `ec.namespace`; with `ec.signing_key_file` the key's id is appended. An identifier is any
    text of 1 to 4096 bytes; the caller guarantees that it means one content. ConfigError for what cannot be used.

    Any thread may call any method, and all may wait for I/O. A store's faults raise nothing: they are misses,
    counted, and logged. After `close` all methods raise ValueError, except `close`, which does nothing.
    """

    def __init__(
        self, config: str | PathLike[str] | None = None, *, namespace: str | None = None, **keys: object
    ) -> None:
        self._config = resolve(keys, _environment(config), Source.ARGUMENTS).config
        self.namespace = _namespace(namespace, self._config)
        signing = self._config.signing_key()
        try:
            if signing is not None:
                self.namespace = signing.namespace(self.namespace)
            self._tiers = Tiers(_openings(self._config), self.namespace, _UNDER_WAY_BYTES // 2, _logger, signing)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._scratch = Scratch(_UNDER_WAY_BYTES // 2)
        self._writes = Writes(self._tiers, self._scratch, _UNDER_WAY_BYTES, f"lmcache-ec {__version__}")
        self._readers = ThreadPoolExecutor(_READERS, "entry-read")
        self._closed = False
        self._under_way = self._under_way_bytes = 0
        self._landed = threading.Condition()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- put

    def put(self, identifier: str, tensor: object) -> Future[tuple[str, ...]]:
        """Store a tensor: anything that `Tensor.of` takes, of any shape, up to a store's own limit.

        Returns once it is copied, or joins a write of the same identifier that is already in progress. The future
        gives the names of the tiers that have an entry of this identifier and length in the end. An entry is written
        once: another tensor under a stored identifier is not stored (`delete` it first), which is not reported if it
        has the same length. Waits while 256 MiB or 1024 entries are in progress.

        TypeError for what is not a tensor, ValueError for an identifier that is empty or too long, or a closed cache.
        """
        plain, key = Tensor.of(tensor), self._key(identifier)
        length = entry.entry_length(identifier, plain.spec)
        result: Future[tuple[str, ...]] = Future()
        self._begin(length)
        try:
            write = self._writes.copied(key, length, partial(_fill, plain, identifier))
        except BaseException:
            self._end(length)
            raise
        if write is None:
            self._end(length)
            return self._already(key, result)
        write.done.add_done_callback(lambda _: self._settle(write, length, result))
        self._writes.seal(write, plain.spec)
        return result

    def _begin(self, length: int) -> None:
        with self._landed:
            self._landed.wait_for(lambda: self._closed or self._has_room(length))
            self._check_open()
            self._under_way += 1
            self._under_way_bytes += length

    def _end(self, length: int) -> None:
        with self._landed:
            self._under_way -= 1
            self._under_way_bytes -= length
            self._landed.notify_all()

    def _has_room(self, length: int) -> bool:
        fits = self._under_way_bytes + length <= _UNDER_WAY_BYTES and self._under_way < _UNDER_WAY
        return fits or not self._under_way

    def _settle(self, write: Write, length: int, result: Future[tuple[str, ...]]) -> None:
        lanes = self._tiers.stack.lanes
        result.set_result(tuple(lane.name for number, lane in enumerate(lanes) if write.put.took >> number & 1))
        self._end(length)

    def _already(self, key: EncoderCacheKey, result: Future[tuple[str, ...]]) -> Future[tuple[str, ...]]:
        """Another thread is storing this entry, or it is being promoted from a later tier."""
        lanes = self._tiers.stack.lanes

        def settle(_: object = None) -> None:
            lengths = [self._tiers.stack.lengths(number, [key])[0] for number in range(len(lanes))]
            result.set_result(tuple(lane.name for lane, has in zip(lanes, lengths, strict=True) if has is not None))

        pending = self._writes.done(key)
        if pending is None:
            settle()
        else:
            pending.add_done_callback(settle)
        return result

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until every tier has answered for all that was put, at most `timeout` seconds. Whether all have.

        TypeError or ValueError for a timeout that is neither a number of seconds from 0 nor None (no limit).
        """
        limit_s = None if timeout is None else _seconds(timeout)
        with self._landed:
            self._check_open()
            return self._landed.wait_for(lambda: not self._under_way, limit_s)

    # ---- get

    def get(self, identifier: str) -> Tensor | None:
        """The tensor, verified to the last bit, in its own memory; None if no tier that answers has it.

        Waits for a `put` of this cache that is in progress, for at most `ec.drain_s`. What is found in a later tier is
        copied to those before it, in the background.
        """
        self._check_open()
        key = self._key(identifier)
        under_way = self._writes.done(key)
        tensor = self._tiers.get(key, _fresh, partial(self._taken, key), insist=True)
        if tensor is None and under_way is not None:
            wait([under_way], self._config.drain_s)  # with a limit: what is queued when the cache is closed never ends
            tensor = self._tiers.get(key, _fresh, partial(self._taken, key), insist=True)
        return tensor

    def get_into(self, identifier: str, target: object) -> Tensor | None:
        """As `get`, into the caller's memory: a writable contiguous buffer of exactly the tensor's length in bytes.

        ValueError if the length differs, with nothing written.
        """
        found = self.get(identifier)
        if found is None:
            return None
        room = memoryview(target).cast("B")  # type: ignore[arg-type]
        if room.readonly:
            raise TypeError(f"target of type {type(target).__name__}: must be a buffer that can be written")
        if room.nbytes != found.data.nbytes:
            raise ValueError(f"{identifier}: a buffer of {room.nbytes} bytes for a tensor of {found.data.nbytes} bytes")
        room[:] = found.data
        return Tensor(found.shape, found.dtype, room)

    def get_each(self, identifiers: Iterable[str]) -> list[Tensor | None]:
        """Several at once, in their order; up to 16 in parallel."""
        self._check_open()
        if isinstance(identifiers, str):
            raise TypeError("get_each takes several identifiers; for one, use get")
        return list(self._readers.map(self.get, identifiers))

    def __contains__(self, identifier: str) -> bool:
        """Whether a tier that answers has an entry with this identifier. It is not verified."""
        self._check_open()
        return self._tiers.hold(self._key(identifier), insist=True)

    def _taken(self, key: EncoderCacheKey, number: int, data: memoryview, spec: entry.TensorSpec) -> Tensor | None:
        tensor = Tensor.read(spec, entry.payload(data, key.identifier))
        if tensor is None:
            self._tiers.complain("layouts", f"{key.object_name}: its layout {spec.layout!r} is not one of a tensor")
            return None
        self._tiers.stack.writes.promote(number, key, data)
        return tensor

    def delete(self, identifier: str) -> bool:
        """Remove an entry from every tier, and one in progress as soon as it is written. Whether there was one."""
        self._check_open()
        key = self._key(identifier)
        there = self._writes.cancel(key) or self._tiers.hold(key, insist=True)
        self._tiers.remove(key)
        return there

    # ---- the whole cache

    def report(self) -> Status:
        """Its content and activity: `namespace`, `tiers` as in `lmcache-ec status --json`, `counts` of this object, and
        `under_way`, entries in progress. The disk is listed when the cache is opened; waits until that is done."""
        self._check_open()
        stack, counts = self._tiers.stack, dict(self._tiers.journal.counts)
        deadline = time.monotonic() + _LISTED_S
        while time.monotonic() < deadline and not all(
            stack.presence.complete(lane.name) for lane in stack.lanes if lane.habits.local
        ):
            time.sleep(0.01)
        for lane in stack.lanes:
            if lane.habits.local:
                stack.writes.weigh(lane)
        tiers = tier_statuses(stack, self._tiers.journal, self._config.max_local_disk_bytes)
        return {"namespace": self.namespace, "tiers": tiers, "counts": counts, "under_way": self._under_way}

    def close(self) -> None:
        """Give writes in progress `ec.drain_s`, then release the tiers."""
        with self._landed:
            if self._closed:
                return
            self._closed = True
            self._landed.notify_all()
        late = self._writes.close(self._config.drain_s)
        if late:
            _logger.warning(
                "%d entries were not in every tier after %g s, and were given up", late, self._config.drain_s
            )
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._tiers.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this cache is closed")

    def _key(self, identifier: str) -> EncoderCacheKey:
        if not isinstance(identifier, str):
            raise TypeError(f"identifier of type {type(identifier).__name__}: must be text")
        try:
            size = len(identifier.encode())
        except UnicodeEncodeError as error:
            raise ValueError(f"identifier {identifier!r}: must be text that UTF-8 can express") from error
        if not 0 < size <= MAX_IDENTIFIER_BYTES:
            raise ValueError(f"identifier of {size} bytes: must be 1 to {MAX_IDENTIFIER_BYTES}")
        return EncoderCacheKey(self.namespace, identifier)


def _seconds(timeout: object) -> float:
    """A timeout that Python can wait for. NaN and negative values would end a wait at once."""
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise TypeError(f"timeout of type {type(timeout).__name__}: must be a number of seconds, or None")
    seconds = float(timeout)
    if not seconds >= 0:
        raise ValueError(f"timeout {timeout}: must be a number of seconds, at least 0, or None")
    return min(seconds, threading.TIMEOUT_MAX)


def _environment(config: str | PathLike[str] | None) -> Mapping[str, str]:
    """This process's environment, with the file that the caller names. ConfigError if there is no such file."""
    if config is None:
        return os.environ
    if not isinstance(config, str | PathLike):
        raise ConfigError(f"the configuration of Cache: must be the path of a file, not {type(config).__name__}")
    path = os.fspath(config)
    if not os.path.isfile(path):
        raise ConfigError(f"the configuration of Cache: there is no file {path}")
    return {**os.environ, FILE_VARIABLE: path}


def _namespace(given: str | None, config: EncoderCacheConfig) -> str:
    if not config.enabled:
        raise ConfigError("ec.enabled is false: the cache is switched off in this configuration")
    if not (config.local_disk or config.remotes):
        raise ConfigError("no tier: neither local_disk nor remotes is set, and there is no memory tier in a program")
    namespace = given if given is not None else config.namespace
    if namespace is None:
        raise ConfigError(
            "no namespace: give a name for the model that makes the tensors, as namespace= or ec.namespace"
        )
    if not isinstance(namespace, str):
        raise ConfigError(f"the namespace of Cache: must be text, not {type(namespace).__name__}")
    try:
        return check_namespace(namespace)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _openings(config: EncoderCacheConfig) -> list[Opening]:
    openings = list(map(Opening.of_remote, config.remote_tiers))
    if config.local_disk is not None:
        size, free = config.max_local_disk_bytes, config.min_free_disk_bytes
        openings.insert(0, Opening.of_disk(config.local_disk, size, free, DISK_RESCAN_S))
    return openings


def _fill(tensor: Tensor, identifier: str, data: memoryview) -> None:
    entry.payload(data, identifier)[:] = tensor.data


def _fresh(length: int) -> AbstractContextManager[memoryview]:
    """Memory that the tensor's receiver keeps; not zeroed first, as a bytearray would be."""
    return nullcontext(numpy.empty(length, numpy.uint8).data)
