# SPDX-License-Identifier: Apache-2.0
"""Reused buffers: touching fresh memory takes five times as long as copying into it."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Scratch:
    """Lends buffers of at least a given length, and keeps up to `keep_bytes` of returned ones.

    Any thread may call it. Pages never written take no memory, so a buffer may be twice as long as requested.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._room = keep_bytes
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._lock = threading.Lock()

    def take(self, length: int) -> mmap.mmap:
        size = 1 << max(16, (length - 1).bit_length())
        with self._lock:
            if idle := self._idle.get(size):
                self._room += size
                return idle.pop()
        return mmap.mmap(-1, size)

    def give_back(self, buffer: mmap.mmap) -> None:
        """Return a buffer that is no longer used."""
        with self._lock:
            if self._room >= len(buffer):
                self._room -= len(buffer)
                self._idle.setdefault(len(buffer), []).append(buffer)

    @contextmanager
    def lend(self, length: int) -> Iterator[memoryview]:
        """Exactly `length` bytes, until the block ends."""
        buffer = self.take(length)
        try:
            with memoryview(buffer)[:length] as data:
                yield data
        finally:
            self.give_back(buffer)
