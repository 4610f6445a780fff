# SPDX-License-Identifier: Apache-2.0
"""The disk tier as the store process uses it, against plain system calls. Imports what the store process would."""

import mmap
import os
import sys
from pathlib import Path

import xxhash

from benchmarks.bench import least
from benchmarks.bench.result import LEAST
from benchmarks.bench.sample import WIDTH, Samples, in_any_order, noise, timed, times_of
from lmcache_ec import entry
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.signing import SigningKey
from lmcache_ec.tiers.disk import DiskTier

_NAMESPACE = "bench"
_HELD = 1024


class Disk:
    """Runs in its own process, on one thread, in shared memory whose pages are resident, as in an arena in use. All
    parties write into the same folders, those of a tier with a thousand entries: the time to create a file depends on
    how many files were removed from the same folder in the last seconds.

    disk_get    ours: open, read into the place, verify. Floor: open, read into the place, xxh3_128
    disk_put    ours: put a sealed entry. Floor: write a file, rename it
    seal, verify                ours: of an entry in memory. Floor: xxh3_128
    seal_signed, verify_signed  the same with a signature, against the same floor

    In the rows *_least the system calls and digests that the design requires (see least.py) replace ours: they show
    what is achievable.
    """

    def __init__(self, folder: str, largest_rows: int) -> None:
        if "torch" in sys.modules:
            raise RuntimeError("the store process imports no torch, and so does what is measured in its place")
        self._folder = Path(folder)
        self._tier = DiskTier(self._folder / "tier", 1 << 40)
        length = entry.entry_length("0" * 64, entry.TensorSpec(largest_rows, WIDTH, "BF16"))
        fd = os.memfd_create("bench")
        os.ftruncate(fd, length)
        self._memory = memoryview(mmap.mmap(fd, length))
        self._memory[:] = noise(length)
        self._number = 0
        for shard in range(256):
            (self._tier.root / _NAMESPACE / f"{shard:02x}").mkdir(parents=True)
        while self._number < _HELD:
            key, place = self._sealed(1)
            self._tier.put(key, place)

    def measure(self, rows: int, suffix: str) -> Samples:
        samples: Samples = {}
        for _ in range(times_of(rows)):
            key, place = self._sealed(rows)
            self._floor(Samples(), suffix, key, place)  # all parties will reuse the pages that it frees
            in_any_order(
                lambda: self._ours(samples, suffix, key, place),  # noqa: B023
                lambda: self._least(samples, suffix, key, place),  # noqa: B023
                lambda: self._floor(samples, suffix, key, place),  # noqa: B023
            )
            self._digests(samples, suffix, key, rows, place)
        for name in ("disk_put", "disk_get"):
            samples[f"{name}{LEAST}{suffix}", "floor"] = samples[f"{name}{suffix}", "floor"]
        return samples

    def _ours(self, samples: Samples, suffix: str, key: EncoderCacheKey, place: memoryview) -> None:
        def get() -> None:
            if self._tier.get_into(key, place) != len(place):
                raise RuntimeError("what was put is not there")
            entry.verify(place, key)

        timed(samples, f"disk_put{suffix}", "ours", lambda: self._tier.put(key, place))
        timed(samples, f"disk_get{suffix}", "ours", get)
        self._tier.delete(key)  # at once: data not yet on disk is never written back, and so delays no other writer

    def _digests(self, samples: Samples, suffix: str, key: EncoderCacheKey, rows: int, place: memoryview) -> None:
        spec = entry.TensorSpec(rows, WIDTH, "BF16")
        for name, signing in ((suffix, None), (f"_signed{suffix}", SigningKey(bytes(32), "bench"))):
            timed(samples, f"seal{name}", "ours", lambda: entry.seal(place, key, spec, "bench", signing))  # noqa: B023
            timed(samples, f"verify{name}", "ours", lambda: entry.verify(place, key, signing))  # noqa: B023
            for what in ("seal", "verify"):
                timed(samples, f"{what}{name}", "floor", lambda: xxhash.xxh3_128_digest(place))

    def _least(self, samples: Samples, suffix: str, key: EncoderCacheKey, place: memoryview) -> None:
        root = str(self._tier.root)
        timed(samples, f"disk_put{LEAST}{suffix}", "ours", lambda: least.put(root, key, place))
        timed(samples, f"disk_get{LEAST}{suffix}", "ours", lambda: least.get(root, key, place))
        (self._tier.root / key.object_name).unlink()

    def _floor(self, samples: Samples, suffix: str, key: EncoderCacheKey, place: memoryview) -> None:
        path = str(self._tier.root / key.object_name)
        temporary = str(self._tier.root / key.namespace / ".tmp" / "floor")
        timed(samples, f"disk_put{suffix}", "floor", lambda: write(path, temporary, place))
        timed(samples, f"disk_get{suffix}", "floor", lambda: read(path, place))
        os.unlink(path)

    def _sealed(self, rows: int) -> tuple[EncoderCacheKey, memoryview]:
        """Key of the next entry, and the memory that holds it."""
        self._number += 1
        spec = entry.TensorSpec(rows, WIDTH, "BF16")
        key = EncoderCacheKey(_NAMESPACE, f"{self._number:064x}")
        place = self._memory[: entry.entry_length(key.identifier, spec)]
        entry.seal(place, key, spec, "bench")
        return key, place

    def close(self) -> None:
        self._tier.close()


def write(path: str, temporary: str, data: memoryview) -> None:
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        while data:
            data = data[os.write(fd, data) :]
    finally:
        os.close(fd)
    os.rename(temporary, path)


def read(path: str, buffer: memoryview) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        if os.readv(fd, [buffer]) != len(buffer):
            raise RuntimeError("a short read")
    finally:
        os.close(fd)
    xxhash.xxh3_128_digest(buffer)
