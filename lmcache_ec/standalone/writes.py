# SPDX-License-Identifier: Apache-2.0
"""Writes of entries to the tiers."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from lmcache_ec import entry
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.standalone.scratch import Scratch
from lmcache_ec.standalone.tiers import Tiers
from lmcache_ec.tiers.write_through import Put


@dataclass(eq=False)
class Write:
    """One entry in its own buffer, which is given back once no tier reads it any more. `done` completes when every tier
    has the entry, or will not have it; `stored`: one has."""

    put: Put
    buffer: mmap.mmap
    length: int
    done: Future[None] = field(default_factory=Future)

    @property
    def stored(self) -> bool:
        return self.put.took != 0


class Writes:
    """At most `limit_bytes` in buffers, or a single larger one. Any thread may call it. `producer` goes into entries.

    `_sealer` completes entries, the tiers' own threads write them. `_lock` guards what is pending and is never held
    across I/O or a copy.
    """

    def __init__(self, tiers: Tiers, scratch: Scratch, limit_bytes: int, producer: str) -> None:
        self._tiers = tiers
        self._scratch = scratch
        self._limit_bytes = limit_bytes
        self._producer = producer
        self._pending: dict[EncoderCacheKey, Write] = {}
        self._pending_bytes = 0
        self._closed = False
        self._lock = threading.Lock()
        self._sealer = ThreadPoolExecutor(1, "entry-seal")

    def __contains__(self, key: EncoderCacheKey) -> bool:
        return key in self._pending or self._tiers.stack.writes.writing(key)

    def copied(self, key: EncoderCacheKey, length: int, copy: Callable[[memoryview], None]) -> Write | None:
        """A write of `length` bytes, after `copy` has filled them in; then `seal` it. None if one is in progress
        already, or there is no room. Raises what `copy` raises."""
        with self._lock:
            if key in self or self._closed:
                return None
            full = self._pending_bytes + length > self._limit_bytes and self._pending_bytes
            if not full:
                write = self._pending[key] = self._begun(key, length)
                self._pending_bytes += length
        if full:
            self._tiers.journal.count("puts_dropped")
            return None
        try:
            copy(write.put.data)
        except BaseException:
            self._abandon(write)
            raise
        return write

    def seal(self, write: Write, spec: entry.TensorSpec) -> None:
        """Complete the entry whose payload has been copied, then write it through."""

        def run() -> None:
            try:
                entry.seal(write.put.data, write.put.key, spec, self._producer, self._tiers.stack.signing)
            except Exception as error:
                self._tiers.complain("put_errors", f"an entry cannot be sealed: {error}")
                self._abandon(write)
            else:
                self._tiers.stack.writes.write(write.put)

        try:
            self._sealer.submit(run)
        except RuntimeError:  # closed meanwhile
            self._abandon(write)

    def done(self, key: EncoderCacheKey) -> Future[None] | None:
        """A future that completes with that entry's write; None if there is none in progress."""
        write = self._pending.get(key)
        return write.done if write else None

    def cancel(self, key: EncoderCacheKey) -> bool:
        """Remove an entry as soon as it has been written, if its write is in progress. Whether it is."""
        with self._lock:
            write = self._pending.get(key)
            if write is not None:
                write.put.cancelled = True
        return self._tiers.stack.writes.cancel(key) or write is not None

    def close(self, patience_s: float) -> int:
        """Accept no more writes, and wait for those in progress. How many were not written in time."""
        with self._lock:
            self._closed = True
            writes = [write.done for write in self._pending.values()]
        late = wait(writes, patience_s).not_done
        self._sealer.shutdown(wait=False, cancel_futures=True)
        return len(late)

    def _begun(self, key: EncoderCacheKey, length: int) -> Write:
        buffer = self._scratch.take(length)
        write = Write(Put(key, memoryview(buffer)[:length]), buffer, length)
        write.put.released = lambda _: self._give_back(write)
        write.put.done = lambda: self._finish(write)
        return write

    def _abandon(self, write: Write) -> None:
        self._give_back(write)
        self._finish(write)

    def _give_back(self, write: Write) -> None:
        write.put.data.release()
        self._scratch.give_back(write.buffer)
        with self._lock:
            self._pending_bytes -= write.length

    def _finish(self, write: Write) -> None:
        with self._lock:
            del self._pending[write.put.key]
        write.done.set_result(None)
