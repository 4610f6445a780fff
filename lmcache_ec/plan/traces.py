# SPDX-License-Identifier: Apache-2.0
"""Traces of requests for encoder outputs, in batches: read from or written to CSV. None is ever held as a whole.

A trace has a header and the columns `time_s, identifier, bytes, encode_s`: when an output was needed (seconds, never
decreasing), its identifier, the length of its entry, and how long the encoder takes for it. A path that ends in `.gz`
is compressed.
"""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

import xxhash

COLUMNS = ("time_s", "identifier", "bytes", "encode_s")
BATCH = 1 << 16


class TraceError(ValueError):
    """A trace that cannot be replayed. States where, what was found, and what is expected."""


@dataclass(slots=True)
class Batch:
    """Requests in order of time, one list per column. Identifiers are 64-bit numbers."""

    times_s: list[float] = field(default_factory=list)
    identifiers: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    encodes_s: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.times_s)

    def add(self, time_s: float, identifier: int, size: int, encode_s: float) -> None:
        self.times_s.append(time_s)
        self.identifiers.append(identifier)
        self.sizes.append(size)
        self.encodes_s.append(encode_s)


Trace = Iterator[Batch]


def number_of(identifier: str) -> int:
    """63 bits of an identifier's digest."""
    return xxhash.xxh3_64_intdigest(identifier.encode()) >> 1


def read(path: Path) -> Trace:
    """The batches of a CSV file. TraceError for an invalid line, OSError for a file that cannot be read."""
    with opened(path, "rt") as file:
        rows = csv.reader(file)
        header = tuple(name.strip() for name in next(rows, []))
        if header != COLUMNS:
            raise TraceError(f"{path} line 1: expected {','.join(COLUMNS)}; found {','.join(header)[:80] or 'nothing'}")
        batch, latest_s = Batch(), -math.inf
        for row in rows:
            if not row:
                continue
            try:
                time_s, identifier, size, encode_s = float(row[0]), row[1], int(row[2]), float(row[3])
                sound = len(row) == 4 and latest_s <= time_s < math.inf and size > 0 and 0 <= encode_s < math.inf
            except (ValueError, IndexError):
                sound = False
            if not sound:
                raise TraceError(
                    f"{path} line {rows.line_num}: expected time (not before the line above), identifier, bytes > 0, "
                    f"seconds >= 0; found {','.join(row)[:80]}"
                )
            latest_s = time_s
            batch.add(time_s, number_of(identifier), size, encode_s)
            if len(batch) >= BATCH:
                yield batch
                batch = Batch()
        if batch:
            yield batch


def write(trace: Iterable[Batch], path: Path) -> Trace:
    """Yield the batches, after writing each to a CSV file."""
    with opened(path, "wt") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        for batch in trace:
            times = (f"{time_s:.3f}" for time_s in batch.times_s)
            names = (f"{identifier:016x}" for identifier in batch.identifiers)
            rows.writerows(zip(times, names, batch.sizes, batch.encodes_s, strict=True))
            yield batch


def sampled(trace: Iterable[Batch], share: float) -> Trace:
    """The requests for a random `share` of the identifiers, always the same ones. With tiers scaled by that share,
    their hit rate is that of the whole trace with full tiers (SHARDS, Waldspurger et al. 2015)."""
    limit = int(share * (1 << 24))
    for batch in trace:
        kept = Batch()
        columns = zip(batch.times_s, batch.identifiers, batch.sizes, batch.encodes_s, strict=True)
        for time_s, identifier, size, encode_s in columns:
            if scattered(identifier) & 0xFFFFFF < limit:
                kept.add(time_s, identifier, size, encode_s)
        if kept:
            yield kept


def scattered(number: int) -> int:
    """A pseudorandom 64-bit number for each number (splitmix64)."""
    number = (number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return number ^ (number >> 31)


def opened(path: Path, mode: str) -> IO[str]:
    """The file, opened in a text `mode`. OSError if that fails."""
    if path.suffix == ".gz":
        return cast(IO[str], gzip.open(path, mode, newline="", encoding="utf-8"))
    return path.open(mode, newline="", encoding="utf-8")
