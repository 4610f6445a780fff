# SPDX-License-Identifier: Apache-2.0
"""How much of a full arena holds live entries when sizes are mixed."""

import random
import statistics
from dataclasses import dataclass

from benchmarks.bench.sample import MEGABYTES, WIDTH, rows_of
from lmcache_ec.book import Book
from lmcache_ec.channel import Outcome
from lmcache_ec.entry import TensorSpec

_CAPACITY = 2 << 30
_WEIGHTS = (40, 30, 20, 10)
_FILLED_AFTER = 500


@dataclass(frozen=True)
class Utilisation:
    """Live bytes as a fraction of the arena: minimum and mean of the samples taken once it was full."""

    least: float
    mean: float


def churn(entries: int = 3000, seed: int = 0) -> Utilisation:
    """Save entries of 0.5 to 134 MB, one after another, into the book of an arena of 2 GiB."""
    book, sizes, seen = Book(_CAPACITY, _CAPACITY, 1), random.Random(seed), []
    book.open(0, _CAPACITY)
    for number in range(entries):
        megabytes = sizes.choices(MEGABYTES, _WEIGHTS)[0]
        _save(book, f"{number:064x}", TensorSpec(rows_of(megabytes), WIDTH, "BF16"))
        book.evict_ahead()
        if number >= _FILLED_AFTER:
            seen.append(book.snapshot()["live_bytes"] / book.capacity)
    return Utilisation(min(seen), statistics.fmean(seen))


def _save(book: Book, identifier: str, spec: TensorSpec) -> None:
    """A whole save, with rank and store process simulated; there may be no room for it."""
    place = book.reserve_save(identifier, spec, persist=False)
    if place is not None:
        book.send_save(place, place.id, 0)
        book.report(0, place.id, [(place.id, Outcome.COPIED, 1)], frozenset({1}))
        book.sealed(place.id, 1, ok=True)
