# SPDX-License-Identifier: Apache-2.0
"""Entries on their way into tiers."""

from __future__ import annotations

import errno
import mmap
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial

from lmcache_ec import __version__, entry
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.lane import Lane

from .scratch import Scratch
from .tiers import Tiers

_PRODUCER = f"lmcache-ec {__version__}, lmcache plugin"


@dataclass(eq=False)
class Write:
    """One entry, in a buffer of its own until the last tier has it or will not have it; then `done` ends."""

    key: EncoderCacheKey
    data: memoryview
    buffer: mmap.mmap
    lanes: Sequence[Lane]
    outstanding: int
    stored: bool = False
    removed: bool = False
    done: Future[None] = field(default_factory=Future)


class Writes:
    """At most `limit_bytes` of them, or a single larger one. Any thread may call it.

    `_sealer` completes entries, each tier's own threads write them, so that none waits for another. `_lock` guards what
    is pending and is never held across I/O or a copy.
    """

    def __init__(self, tiers: Tiers, scratch: Scratch, limit_bytes: int) -> None:
        self._tiers = tiers
        self._scratch = scratch
        self._limit_bytes = limit_bytes
        self._pending: dict[EncoderCacheKey, Write] = {}
        self._pending_bytes = 0
        self._closed = False
        self._lock = threading.Lock()
        self._sealer = ThreadPoolExecutor(1, "entry-seal")

    def __contains__(self, key: EncoderCacheKey) -> bool:
        return key in self._pending

    def copied(
        self, key: EncoderCacheKey, length: int, lanes: Sequence[Lane], copy: Callable[[memoryview], None]
    ) -> Write | None:
        """A write of `length` bytes, once `copy` has filled them in; then `seal` or `spread` it. None if it is under
        way already, or there is no room. Raises what `copy` raises."""
        with self._lock:
            if key in self._pending or self._closed:
                return None
            full = self._pending_bytes + length > self._limit_bytes and self._pending
            if not full:
                buffer = self._scratch.take(length)
                write = self._pending[key] = Write(key, memoryview(buffer)[:length], buffer, lanes, len(lanes))
                self._pending_bytes += length
        if full:
            self._tiers.count("puts_dropped")
            return None
        try:
            copy(write.data)
        except BaseException:
            self._delivered(write, len(lanes), False)
            raise
        return write

    def seal(self, write: Write, spec: entry.TensorSpec) -> None:
        """Complete the entry whose payload has been copied, then spread it."""

        def run() -> None:
            try:
                entry.seal(write.data, write.key, spec, _PRODUCER)
            except Exception as error:
                self._tiers.complain("put_errors", f"an entry cannot be sealed: {error}")
                self._delivered(write, write.outstanding, False)
            else:
                self.spread(write)

        try:
            self._sealer.submit(run)
        except RuntimeError:  # closed meanwhile
            self._delivered(write, write.outstanding, False)

    def spread(self, write: Write) -> None:
        """Have each tier's threads write it."""
        for lane in write.lanes:
            try:
                queued = lane.enqueue(len(write.data), partial(self._write, lane, write))
            except RuntimeError:  # closed meanwhile
                queued = False
            if not queued:
                self._tiers.count(f"{lane.name}_writes_dropped")
                self._delivered(write, 1, False)

    def cancel(self, key: EncoderCacheKey) -> bool:
        """Have an entry removed as soon as it has been written, if it is on its way."""
        with self._lock:
            write = self._pending.get(key)
            if write is not None:
                write.removed = True
        return write is not None

    def close(self, patience_s: float) -> int:
        """Take nothing more, and wait for what is under way. How many were not written in time."""
        with self._lock:
            self._closed = True
            writes = [write.done for write in self._pending.values()]
        late = wait(writes, patience_s).not_done
        self._sealer.shutdown(wait=False, cancel_futures=True)
        return len(late)

    def _write(self, lane: Lane, write: Write) -> None:
        stored, tiers = False, self._tiers
        try:
            if not write.removed:
                new = lane.tier.put(write.key, write.data)
                tiers.count(f"{lane.name}_{'writes' if new else 'present'}")
                lane.has(write.key.digest, new)
                stored = True
            if write.removed:  # asked again: `cancel` may have come meanwhile
                lane.tier.delete(write.key)
        except Exception as error:
            tiers.complain(f"{lane.name}_write_errors", f"{lane.name}: {error}")
            if getattr(error, "errno", None) != errno.EFBIG:  # too large for this tier, which is none the worse for it
                lane.failed()
        finally:
            self._delivered(write, 1, stored)

    def _delivered(self, write: Write, lanes: int, stored: bool) -> None:
        """So many tiers more have it, or will not have it."""
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
