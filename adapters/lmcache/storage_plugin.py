# SPDX-License-Identifier: Apache-2.0
"""The disk and remote tiers as one storage backend of LMCache, for memory objects of any shape and dtype.

LMCache's CPU backend stays above it: it allocates memory for what is read here, and LMCache's storage manager puts into
it what it read from here. Each object is an entry (`lmcache_ec.entry`), named by the whole text of LMCache's key in the
model's own namespace, and verified on every read. configs/lmcache-plugin.yaml enables it.

*Puts.* The caller's thread only copies the object: LMCache frees the memory of its CPU backend before it closes this
one, so no thread may keep a reference into it. An object whose copy does not fit into `max_pending_size` is not stored,
and is counted.

*Gets.* In the caller's thread, or for several keys in `_readers`: the tiers are asked in order. An entry that verifies
is copied into an LMCache object, and written to the tiers before the one that had it. One that does not is deleted, and
the next tier is asked. A tier that failed is left alone for a while (`lmcache_ec.tiers.lane`).

*Pins* are counted, and keep this process from removing an entry unless forced. They prevent neither eviction by other
users of the store nor expiry: a get then finds nothing, which LMCache treats as a miss.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
from lmcache.logging import init_logger
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from lmcache_ec import entry
from lmcache_ec.fingerprint import FingerprintError, checkpoint_fingerprint
from lmcache_ec.key import EncoderCacheKey, namespace_of
from lmcache_ec.signing import read_key
from lmcache_ec.sizes import GIB
from lmcache_ec.standalone.scratch import Scratch
from lmcache_ec.standalone.tiers import DISK_RESCAN_S, NoRoomError, Tiers
from lmcache_ec.standalone.writes import Writes
from lmcache_ec.tiers.opening import Opening
from lmcache_ec.version import __version__

from .layout import Layout
from .settings import PREFIX, PluginSettings, read_settings, remote_tiers

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

OnComplete = Callable[[CacheEngineKey], None]

_READERS = 16
_WINDOW = 32
"""Maximum number of keys looked up at once: one at first, then twice as many each time."""

_PRODUCER = f"lmcache-ec {__version__}, lmcache plugin"
_logger = init_logger(__name__)


class ShapeAgnosticBackend(StoragePluginInterface):
    """LMCache's storage backend over our tiers. ValueError for settings or tiers that cannot be used.

    Lives in each process that has an LMCache storage manager; any thread may call its methods. None of them raises on a
    fault of a store. `_lock` guards the pins.
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
        if local_cpu_backend is None and metadata.role != "scheduler":  # the scheduler only looks up
            raise ValueError("storage plugin: reads need LMCache's CPU memory: set max_local_cpu_size above 0")
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        settings = read_settings(config.extra_config or {})
        self.namespace = settings.namespace or _namespace(metadata.model_name, settings)
        self._drain_s, self._pool_bytes = settings.drain_s, int(config.max_local_cpu_size * GIB)
        pending_bytes = int(settings.max_pending_size * GIB)
        openings = _openings(settings, config.extra_config or {})
        try:
            signing = read_key(settings.signing_key_file) if settings.signing_key_file else None
            if signing is not None:
                self.namespace = signing.namespace(self.namespace)
            self._tiers = Tiers(openings, self.namespace, pending_bytes // 2, _logger, signing)
        except ValueError as error:
            raise ValueError(f"storage plugin: {error}") from None
        self._scratch = Scratch(pending_bytes // 2)
        self._writes = Writes(self._tiers, self._scratch, pending_bytes, _PRODUCER)
        self._readers = ThreadPoolExecutor(_READERS, "entry-read")
        self._pins: Counter[EncoderCacheKey] = Counter()
        self._lock = threading.Lock()
        self._closed = False
        tiers = ", ".join(lane.name for lane in self._tiers.stack.lanes)
        _logger.info("%s: namespace %s, tiers %s", self, self.namespace, tiers)

    def __str__(self) -> str:
        return type(self).__name__

    @property
    def counts(self) -> Counter[str]:
        """Hits, writes, drops and failures of each tier so far."""
        return self._tiers.journal.counts

    def get_allocator_backend(self) -> LocalCPUBackend:
        return self.local_cpu_backend

    def close(self) -> None:
        """Refuse new objects, give those being written `drain_s` to finish, release the tiers. Idempotent."""
        if self._closed:
            return
        self._closed = True
        late = self._writes.close(self._drain_s)
        if late:
            _logger.warning(
                "%s: %d entries were not in every tier after %g s, and were given up", self, late, self._drain_s
            )
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._tiers.close()

    # ---- what is there

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        return self.batched_contains([key], pin) == 1

    def batched_contains(self, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """How many leading `keys` are stored, up to the first that is not."""
        names = [self._name(key) for key in keys]
        found, window = 0, 1
        while found < len(names) and not self._closed:
            asked = names[found : found + window]
            answers = self._readers.map(self._tiers.hold, asked) if window > 1 else map(self._tiers.hold, asked)
            there = [*answers, False].index(False)
            found += there
            if there < len(asked):
                break
            window = min(2 * window, _WINDOW)
        if pin:
            with self._lock:
                self._pins.update(names[:found])
        return found

    async def batched_async_contains(self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False) -> int:
        return await asyncio.to_thread(self.batched_contains, keys, pin)

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        return self._name(key) in self._writes

    def pin(self, key: CacheEngineKey) -> bool:
        return self.contains(key, pin=True)

    def unpin(self, key: CacheEngineKey) -> bool:
        name = self._name(key)
        with self._lock:
            pinned = self._pins.pop(name, 0)
            if pinned > 1:
                self._pins[name] = pinned - 1
        return pinned > 0

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Remove an entry from every tier; one still being written is removed once it has been written."""
        name = self._name(key)
        if self._closed or (name in self._pins and not force):
            return False
        there = self._writes.cancel(name) or self._tiers.hold(name)
        self._tiers.remove(name)
        return there

    # ---- puts

    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: object = None,
        on_complete_callback: OnComplete | None = None,
    ) -> list[Future[None]] | None:
        """Copy the objects that there is room for. A future ends when every tier has the entry, or will not have it."""
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
        """Copy one object; None if it will not be stored. The callback is called in the end if any tier has it."""
        name = self._name(key)
        try:
            spec = Layout.of(memory_obj).spec
            write = self._writes.copied(
                name,
                entry.entry_length(name.identifier, spec),
                lambda data: _copy(entry.payload(data, name.identifier), memory_obj.byte_array),
            )
        except Exception as error:  # a kind of object that does not hold bytes in memory
            self._tiers.complain("put_errors", f"an object cannot be stored: {type(error).__name__}: {error}")
            return None
        if write is None:
            return None
        if on_complete_callback is not None:
            complete = on_complete_callback
            write.done.add_done_callback(lambda _: complete(key) if write.stored else None)  # exceptions are logged
        self._writes.seal(write, spec)
        return write.done

    # ---- gets

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        return self._get(self._name(key))

    def get_non_blocking(self, key: CacheEngineKey, location: str | None = None) -> Future[MemoryObj | None] | None:
        return None if self._closed else self._readers.submit(self._get, self._name(key))

    def batched_get_blocking(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        names = [self._name(key) for key in keys]
        return list(map(self._get, names) if len(names) < 2 or self._closed else self._readers.map(self._get, names))

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[CacheEngineKey], transfer_spec: object = None
    ) -> list[MemoryObj]:
        """The objects of the leading `keys`, up to the first that could not be read: LMCache pairs both in order.

        Only this releases the pins of the preceding look-up.
        """
        objects = await asyncio.to_thread(self.batched_get_blocking, keys)
        for key in keys:
            self.unpin(key)
        there = [*objects, None].index(None)
        for memory_object in objects[there:]:
            if memory_object is not None:
                memory_object.ref_count_down()
        return [memory_object for memory_object in objects[:there] if memory_object is not None]

    def _get(self, key: EncoderCacheKey) -> MemoryObj | None:
        """An LMCache object, which the caller must release, or None."""
        if self._closed or self.local_cpu_backend is None:
            return None
        try:
            return self._tiers.get(key, partial(self._lend, key), partial(self._handed_over, key))
        except NoRoomError:
            return None

    def _lend(self, key: EncoderCacheKey, length: int) -> AbstractContextManager[memoryview]:
        payload_bytes = length - entry.room(key.identifier)
        if payload_bytes > self._pool_bytes:
            raise NoRoomError(f"an object of {payload_bytes} bytes is larger than all of LMCache's CPU memory")
        return self._scratch.lend(length)

    def _handed_over(
        self, key: EncoderCacheKey, number: int, data: memoryview, spec: entry.TensorSpec
    ) -> MemoryObj | None:
        """A verified entry's payload as an LMCache object; None if its layout does not match, and the entry is deleted.
        Never waits for room: LMCache would wait forever."""
        stack, layout = self._tiers.stack, Layout.read(spec.layout)
        if layout.nbytes != spec.nbytes:
            error = entry.EntryError(entry.Reason.SHAPE, "its layout does not match the length of its tensor")
            stack.refuse(stack.lanes[number], key, error)
            return None
        memory_object = self.local_cpu_backend.allocate(
            layout.shapes, layout.dtypes, layout.memory_format, eviction=True, busy_loop=False
        )
        if memory_object is None:
            raise NoRoomError(f"LMCache's CPU memory has no room for {layout.nbytes} bytes")
        _copy(memory_object.byte_array, entry.payload(data, key.identifier))
        stack.writes.promote(number, key, data)
        return memory_object

    def _name(self, key: CacheEngineKey) -> EncoderCacheKey:
        """The entry's key. A tag may hold text that UTF-8 cannot encode."""
        return EncoderCacheKey(self.namespace, key.to_string().encode(errors="backslashreplace").decode())


def _namespace(model: str, settings: PluginSettings) -> str:
    """If LMCache names the model by a folder, the folder's content counts: another checkpoint may replace it there."""
    try:
        checkpoint = checkpoint_fingerprint(Path(model)) if Path(model).is_dir() else ""
    except FingerprintError as error:
        text = str(error).replace("ec.namespace", f"{PREFIX}namespace")
        raise ValueError(f"storage plugin: {text}") from None
    facts = {"of": "lmcache", "format": entry.FORMAT, "model": model, "checkpoint": checkpoint}
    return namespace_of(f"{model}-lmcache", {**facts, "salt": settings.salt, "epoch": settings.epoch})


def _openings(settings: PluginSettings, extra_config: Mapping[str, object]) -> list[Opening]:
    openings = list(map(Opening.of_remote, remote_tiers(settings, extra_config)))
    if settings.local_disk is not None:
        size, free = int(settings.max_local_disk_size * GIB), int(settings.min_free_disk_size * GIB)
        openings.insert(0, Opening.of_disk(settings.local_disk, size, free, DISK_RESCAN_S))
    return openings


def _copy(target: memoryview | bytearray, source: memoryview | bytes) -> None:
    """Copy bytes of the same length, while other threads can run; LMCache's buffers are of several kinds."""
    numpy.copyto(numpy.frombuffer(target, numpy.uint8), numpy.frombuffer(source, numpy.uint8))
