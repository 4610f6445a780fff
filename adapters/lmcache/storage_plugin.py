# SPDX-License-Identifier: Apache-2.0
"""The disk and remote tiers as one storage backend of LMCache, for memory objects of any shape and dtype.

LMCache's CPU backend stays above it: it allocates what is read here, and LMCache's storage manager puts into it what
it got from here. Each object is an entry (`lmcache_ec.entry`), named by the whole text of LMCache's key in a namespace
of the model's own, and verified whenever it is read. configs/lmcache-plugin.yaml switches it on.

*Puts.* The caller's thread copies the object, and no more: LMCache frees the memory of its CPU backend before it closes
this one, so no thread may be left with a reference into it. `_sealer` completes the entry, each tier's own threads
write it. What does not fit into `max_pending_size` meanwhile is not stored, and counted.

*Gets.* In the caller's thread, or for several keys in `_readers`: the tiers in order; what verifies is copied into an
object of LMCache's, and written to the tiers before the one that had it. What does not is deleted, and the next tier is
asked. A tier that failed is left alone for a while (`lmcache_ec.lane`).

*Pins* are counted, and keep this process from removing an entry unless it is forced. They hold off neither eviction by
others on the same store nor the end of its time to live: a get then finds nothing, which LMCache takes as a miss.

`_lock` guards the counters and what is pending; it is never held across I/O or a copy.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
from lmcache.logging import init_logger
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from lmcache_ec import __version__, entry
from lmcache_ec.complaints import Complaints
from lmcache_ec.fingerprint import FingerprintError, checkpoint_fingerprint
from lmcache_ec.key import EncoderCacheKey, namespace_of
from lmcache_ec.lane import NEVER, Habits, Lane, Lookup
from lmcache_ec.presence import PresenceFilter
from lmcache_ec.tiers.base import Tier, TierAway
from lmcache_ec.tiers.disk import DiskTier
from lmcache_ec.tiers.remote import AwaitedTier, open_remote, tier_name

from .layout import Layout
from .scratch import Scratch
from .settings import PluginSettings, read_settings, remote_options

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

OnComplete = Callable[[CacheEngineKey], None]

_GIB = 1 << 30
_READERS = 16
_WINDOW = 32
"""Keys that are asked about at once, at most; the first time it is one, then twice as many each time."""
_KNOWN_LENGTHS = 8192
_DISK_RESCAN_S = 600.0
_TICK_S = 1.0

_logger = init_logger(__name__)


@dataclass(eq=False)
class _Write:
    """An entry on its way into tiers, in a buffer of its own until the last of them has it. Guarded by `_lock`."""

    key: EncoderCacheKey
    data: memoryview
    buffer: mmap.mmap
    outstanding: int
    stored: bool = False
    removed: bool = False
    done: Future[None] = field(default_factory=Future)


class _NoRoomError(Exception):
    """LMCache's CPU memory cannot take what was read."""


class ShapeAgnosticBackend(StoragePluginInterface):
    """LMCache's storage backend over our tiers. ValueError for settings or tiers that cannot be used.

    Lives in each process that has a storage manager of LMCache's; its methods may be called by any thread.
    """

    def __init__(
        self,
        dst_device: str = "cpu",
        config: LMCacheEngineConfig | None = None,
        metadata: LMCacheMetadata | None = None,
        local_cpu_backend: LocalCPUBackend | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if config is None or metadata is None:
            raise ValueError("storage plugin: LMCache's configuration and metadata are needed")
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        extra_config = config.extra_config or {}
        settings = read_settings(extra_config)
        self.namespace = settings.namespace or _namespace(metadata.model_name, settings)
        self.counts: Counter[str] = Counter()
        self._producer = f"lmcache-ec {__version__}, lmcache plugin"
        self._pool_bytes = int(config.max_local_cpu_size * _GIB)
        self._pending_limit, self._drain_s = int(settings.max_pending_size * _GIB), settings.drain_s
        self._lock = threading.Lock()
        self._complaints, self._complaining = Complaints(_logger), threading.Lock()
        self._scratch = Scratch(self._pending_limit // 2)
        self._pending: dict[EncoderCacheKey, _Write] = {}
        self._pending_bytes = 0
        self._pins: Counter[EncoderCacheKey] = Counter()
        self._lengths: OrderedDict[EncoderCacheKey, int] = OrderedDict()  # of entries lately seen, to save a question
        self._lanes, self._presence = _open_lanes(settings, extra_config)
        self._sealer = ThreadPoolExecutor(1, "entry-seal")
        self._readers = ThreadPoolExecutor(_READERS, "entry-read")
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep_house, name="entry-tiers", daemon=True)
        self._keeper.start()
        _logger.info("%s: namespace %s, tiers %s", self, self.namespace, ", ".join(lane.name for lane in self._lanes))

    def __str__(self) -> str:
        return type(self).__name__

    # ---- what is there

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        named = self._name(key)
        if self._closing.is_set() or not self._holds(named):
            return False
        if pin:
            self._pin(named)
        return True

    def batched_contains(self, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """How many of `keys`, from the first on, are there."""
        found, window = 0, 1
        while found < len(keys) and not self._closing.is_set():
            asked = [self._name(key) for key in keys[found : found + window]]
            answers = list(self._readers.map(self._holds, asked) if len(asked) > 1 else map(self._holds, asked))
            there = [*answers, False].index(False)
            found += there
            if there < len(asked):
                break
            window = min(2 * window, _WINDOW)
        if pin:
            for key in keys[:found]:
                self._pin(self._name(key))
        return found

    async def batched_async_contains(self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False) -> int:
        return await asyncio.to_thread(self.batched_contains, keys, pin)

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        return self._name(key) in self._pending

    def pin(self, key: CacheEngineKey) -> bool:
        return self.contains(key, pin=True)

    def unpin(self, key: CacheEngineKey) -> bool:
        named = self._name(key)
        with self._lock:
            pinned = self._pins.pop(named, 0)
            if pinned > 1:
                self._pins[named] = pinned - 1
        return pinned > 0

    def _pin(self, key: EncoderCacheKey) -> None:
        with self._lock:
            self._pins[key] += 1

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Remove an entry from every tier, and one that is still being written as soon as it is there."""
        named = self._name(key)
        with self._lock:
            if not force and named in self._pins:
                return False
            pending = self._pending.get(named)
            if pending:
                pending.removed = True
        there = bool(pending) or self._holds(named)
        for lane in self._lanes:
            self._delete(lane, named)
        return there

    # ---- puts

    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: object = None,
        on_complete_callback: OnComplete | None = None,
    ) -> list[Future[None]] | None:
        """Copy what there is room for. The futures end when an entry is in all tiers that took it."""
        writes = [self.submit_put_task(key, obj, on_complete_callback) for key, obj in zip(keys, objs, strict=False)]
        return [write for write in writes if write] or None

    async def async_batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: object = None,
        on_complete_callback: OnComplete | None = None,
    ) -> None:
        self.batched_submit_put_task(keys, objs, transfer_spec, on_complete_callback)

    def submit_put_task(
        self, key: CacheEngineKey, memory_obj: MemoryObj, on_complete_callback: OnComplete | None = None
    ) -> Future[None] | None:
        """Copy one object; None if it is not going to be stored. The callback is called once a tier has it."""
        named = self._name(key)
        try:
            spec = Layout.of(memory_obj).spec
        except ValueError as error:
            self._complain("put_unsupported", f"an object cannot be stored: {error}")
            return None
        length = entry.entry_length(named.identifier, spec)
        write = self._admit(named, length, self._lanes)
        if write is None:
            return None
        try:
            _copy(entry.payload(write.data, named.identifier), memory_obj.byte_array)
            if on_complete_callback:
                write.done.add_done_callback(partial(self._call_back, write, on_complete_callback, key))
            self._sealer.submit(self._seal, write, spec)
        except Exception as error:  # no bytes to be had of this kind of object; or closed meanwhile
            self._complain("put_errors", f"an object cannot be copied: {type(error).__name__}: {error}")
            self._delivered(write, len(self._lanes), False)
            return None
        return write.done

    def _admit(self, key: EncoderCacheKey, length: int, lanes: Sequence[Lane]) -> _Write | None:
        """A place for an entry on its way into `lanes`; None if it is under way already, or there is no room."""
        with self._lock:
            if key in self._pending or self._closing.is_set():
                return None
            if self._pending and self._pending_bytes + length > self._pending_limit:
                self.counts["puts_dropped"] += 1
                return None
            buffer = self._scratch.take(length)
            write = self._pending[key] = _Write(key, memoryview(buffer)[:length], buffer, len(lanes))
            self._pending_bytes += length
        return write

    def _seal(self, write: _Write, spec: entry.TensorSpec) -> None:
        try:
            entry.seal(write.data, write.key, spec, self._producer)
        except Exception as error:
            self._complain("put_errors", f"an entry cannot be sealed: {error}")
            self._delivered(write, len(self._lanes), False)
            return
        self._spread(write, self._lanes)

    def _spread(self, write: _Write, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            try:
                queued = lane.enqueue(len(write.data), partial(self._write, lane, write))
            except RuntimeError:  # its threads have been told to end
                queued = False
            if not queued:
                self._count(f"{lane.name}_writes_dropped")
                self._delivered(write, 1, False)

    def _write(self, lane: Lane, write: _Write) -> None:
        stored = False
        try:
            if not write.removed:
                self._count(f"{lane.name}_{'writes' if lane.tier.put(write.key, write.data) else 'present'}")
                self._presence.add(write.key.digest)
                stored = True
            if write.removed:
                lane.tier.delete(write.key)
        except Exception as error:
            self._complain(f"{lane.name}_write_errors", f"{lane.name}: {error}")
            if getattr(error, "errno", None) != errno.EFBIG:  # too large for this tier, which is none the worse for it
                lane.failed()
        finally:
            self._delivered(write, 1, stored)

    def _delivered(self, write: _Write, lanes: int, stored: bool) -> None:
        """So many tiers more have an entry, or will not have it. After the last its buffer is free."""
        with self._lock:
            write.outstanding -= lanes
            write.stored |= stored
            if write.outstanding:
                return
            del self._pending[write.key]
            self._pending_bytes -= len(write.data)
        write.data.release()
        self._scratch.give_back(write.buffer)
        write.done.set_result(None)

    def _call_back(self, write: _Write, on_complete: OnComplete, key: CacheEngineKey, done: Future[None]) -> None:
        if write.stored:
            on_complete(key)  # concurrent.futures logs what it raises

    # ---- gets

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        return self._get(self._name(key))

    def get_non_blocking(self, key: CacheEngineKey, location: str | None = None) -> Future[MemoryObj | None] | None:
        return None if self._closing.is_set() else self._readers.submit(self._get, self._name(key))

    def batched_get_blocking(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        if len(keys) < 2 or self._closing.is_set():
            return [self.get_blocking(key) for key in keys]
        return list(self._readers.map(self._get, map(self._name, keys)))

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[CacheEngineKey], transfer_spec: object = None
    ) -> list[MemoryObj]:
        """As many of `keys`, from the first on, as could be read: LMCache pairs keys and answers in order."""
        objects = await asyncio.to_thread(self.batched_get_blocking, keys)
        there = [*objects, None].index(None)
        for memory_object in objects[there:]:
            if memory_object is not None:
                memory_object.ref_count_down()
        return [memory_object for memory_object in objects[:there] if memory_object is not None]

    def _get(self, key: EncoderCacheKey) -> MemoryObj | None:
        """An object of LMCache's that is the caller's to release, or None; never an exception."""
        for index, lane in enumerate(self._lanes):
            if self._closing.is_set() or self.local_cpu_backend is None:
                break
            if not lane.asks(key.digest):
                continue
            try:
                memory_object = self._read(lane, key, self._lanes[:index])
                if memory_object is not None:
                    return memory_object
            except _NoRoomError as error:
                self._complain("no_room", str(error))
                break
            except entry.EntryError as error:
                text = f"{lane.name}: {key.object_name} does not verify ({error}); deleted"
                self._complain(f"{lane.name}_corrupt", text)
                self._delete(lane, key)
            except OSError as error:
                self._complain(f"{lane.name}_read_errors", f"{lane.name}: {error}")
                lane.failed()
            except Exception as error:  # the tier is none the worse for it
                self._complain(f"{lane.name}_read_errors", f"{lane.name}: {type(error).__name__}: {error}")
        self._count("misses")
        return None

    def _read(self, lane: Lane, key: EncoderCacheKey, before: Sequence[Lane]) -> MemoryObj | None:
        """Read, verify, hand over, promote. None if the tier does not have it, EntryError for what is not the entry."""
        with self._lock:
            length = self._lengths.pop(key, None)
        length = length or self._ask(lane, key)
        while length is not None:
            room = entry.room(key.identifier)
            if length < room:
                raise entry.EntryError(entry.Reason.LENGTH, f"{length} bytes are no entry")
            if length - room > self._pool_bytes:
                raise _NoRoomError(f"an object of {length - room} bytes is larger than all of LMCache's CPU memory")
            buffer = self._scratch.take(length)
            with memoryview(buffer)[:length] as data:
                found = lane.tier.get_into(key, data)
                if found == length:
                    memory_object = self._handed_over(key, data)
                    self._promote(key, data, before)
            self._scratch.give_back(buffer)
            if found == length:
                self._count(f"{lane.name}_hits")
                return memory_object
            length = found  # it is not any more what was told of it
        return None

    def _handed_over(self, key: EncoderCacheKey, data: memoryview) -> MemoryObj:
        """What an entry holds as an object of LMCache's, once it has been verified. Never waits for room: LMCache
        would wait without end."""
        spec = entry.verify(data, key)
        layout = Layout.read(spec.layout)
        if layout.nbytes != spec.nbytes:
            raise entry.EntryError(entry.Reason.SHAPE, "its layout is of another length than its tensor")
        memory_object = self.local_cpu_backend.allocate(
            layout.shapes, layout.dtypes, layout.memory_format, eviction=True, busy_loop=False
        )
        if memory_object is None:
            raise _NoRoomError(f"LMCache's CPU memory has no room for {layout.nbytes} bytes")
        _copy(memory_object.byte_array, entry.payload(data, key.identifier))
        return memory_object

    def _promote(self, key: EncoderCacheKey, data: memoryview, lanes: Sequence[Lane]) -> None:
        write = self._admit(key, len(data), lanes) if lanes else None
        if write is not None:
            _copy(write.data, data)
            self._spread(write, lanes)

    # ---- the tiers

    def _name(self, key: CacheEngineKey) -> EncoderCacheKey:
        return EncoderCacheKey(self.namespace, key.to_string())

    def _holds(self, key: EncoderCacheKey) -> bool:
        for lane in self._lanes:
            if not lane.asks(key.digest):
                continue
            try:
                length = self._ask(lane, key)
            except Exception as error:
                self._complain(f"{lane.name}_read_errors", f"{lane.name}: {error}")
                lane.failed()
                continue
            if length is not None:
                with self._lock:
                    self._lengths[key] = length
                    if len(self._lengths) > _KNOWN_LENGTHS:
                        self._lengths.popitem(last=False)
                return True
        return False

    def _ask(self, lane: Lane, key: EncoderCacheKey) -> int | None:
        began = time.monotonic()
        length = lane.tier.contains(key)
        lane.answered(time.monotonic() - began)
        return length

    def _delete(self, lane: Lane, key: EncoderCacheKey) -> None:
        try:
            lane.tier.delete(key)
        except Exception as error:
            self._complain(f"{lane.name}_delete_errors", f"{lane.name}: {error}")
            lane.failed()

    def _keep_house(self) -> None:
        """List the tiers that are due for it, on threads of theirs."""
        while not self._closing.is_set():
            for lane in self._lanes:
                if lane.due_at <= time.monotonic():
                    lane.due_at = NEVER
                    lane.scans.submit(self._survey, lane)
            self._closing.wait(_TICK_S)

    def _survey(self, lane: Lane) -> None:
        try:
            lane.survey(self.namespace)
        except Exception as error:
            self._complain(f"{lane.name}_survey_errors", f"{lane.name}: {error}")

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def _complain(self, kind: str, text: str) -> None:
        self._count(kind)
        if not self._closing.is_set():
            with self._complaining:
                self._complaints.warn(kind, f"storage plugin: {text}")

    # ---- the end

    def get_allocator_backend(self) -> LocalCPUBackend:
        return self.local_cpu_backend

    def close(self) -> None:
        """Refuse what is new, give the writes under way `drain_s`, then let go of the tiers. May be called again."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            writes = [write.done for write in self._pending.values()]
        late = wait(writes, self._drain_s).not_done
        if late:
            _logger.warning("%s: %d entries were not written within %g s", self, len(late), self._drain_s)
        self._keeper.join()
        pools = (pool for lane in self._lanes for pool in (lane.reads, lane.writes, lane.scans))
        for pool in (self._sealer, self._readers, *pools):
            pool.shutdown(wait=False, cancel_futures=True)
        for lane in self._lanes:
            lane.tier.close()  # a listing may still be under way, and fails then


def _namespace(model: str, settings: PluginSettings) -> str:
    """Of a model that LMCache names by a folder its content counts: the next checkpoint may lie in the same place."""
    try:
        checkpoint = checkpoint_fingerprint(Path(model)) if Path(model).is_dir() else ""
    except FingerprintError as error:
        raise ValueError(f"storage plugin: {error}, as lmcache_ec.namespace") from None
    facts = {"of": "lmcache", "format": entry.FORMAT, "model": model, "checkpoint": checkpoint}
    return namespace_of(f"{model}-lmcache", {**facts, "salt": settings.salt, "epoch": settings.epoch})


def _open_lanes(settings: PluginSettings, extra_config: Mapping[str, object]) -> tuple[Sequence[Lane], PresenceFilter]:
    """The tiers in order. ValueError for one that cannot be used; a remote that is merely away is tried again later."""
    tiers: list[tuple[Tier, Habits]] = []
    if settings.local_disk is not None:
        size, free = int(settings.max_local_disk_size * _GIB), int(settings.min_free_disk_size * _GIB)
        tiers.append((DiskTier(settings.local_disk, size, free), Habits(Lookup.CATALOG, _DISK_RESCAN_S, local=True)))
    options = remote_options(settings, extra_config)
    for url in settings.remotes:
        name = tier_name(url)
        lookup = Lookup.CATALOG if (name, settings.remote_lookup) == ("s3", "auto") else Lookup(settings.remote_lookup)
        opener = partial(open_remote, url, options)
        try:
            tier = opener()
        except TierAway as error:
            _logger.warning("storage plugin: %s; tried again in the background", error.strerror)
            tier = AwaitedTier(name, opener)
        tiers.append((tier, Habits(lookup, settings.catalog_refresh_s)))
    names = [tier.name for tier, _ in tiers]
    names = [name if names.index(name) == index else f"{name}_{index}" for index, name in enumerate(names)]
    presence = PresenceFilter.create(names)
    lanes = [Lane(tier, name, presence, habits) for (tier, habits), name in zip(tiers, names, strict=True)]
    for lane in lanes:
        if lane.tier.notice:
            _logger.warning("storage plugin: %s", lane.tier.notice)
        if isinstance(lane.tier, AwaitedTier):
            lane.failed()
    return lanes, presence


def _copy(target: memoryview | bytearray, source: memoryview | bytes) -> None:
    """Bytes of the same length, while other threads go on; LMCache's buffers are not of one kind."""
    numpy.copyto(numpy.frombuffer(target, numpy.uint8), numpy.frombuffer(source, numpy.uint8))
