# SPDX-License-Identifier: Apache-2.0
"""Histograms of integers, as flat counts: for each bucket how many values fell into it, and their sum.

Buckets rather than samples: memory and message size do not depend on the number of values, and no value is left out.
With a sum per bucket, observing each bucket's mean as often as it was hit gives the exact total.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

NS = 1_000_000_000

LATENCY_NS = tuple(
    int(seconds * NS) for seconds in (5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
)
SIZE_BYTES = tuple(1 << shift for shift in range(14, 30, 2))
"""16 KiB to 256 MiB, each four times the previous one."""


def names_of(name: str, bounds: tuple[int, ...]) -> list[str]:
    """The names of a histogram's counts: for each bucket, the last one unbounded, number of values and their sum."""
    return [f"{name}_{kind}{bucket}" for bucket in range(len(bounds) + 1) for kind in ("n", "s")]


class Histogram:
    """Counts values up to and including each of the ascending `bounds`, and those above all. Runs on one thread."""

    def __init__(self, name: str, bounds: tuple[int, ...]) -> None:
        self._bounds = bounds
        self._names = names_of(name, bounds)
        self._counts = [0] * len(self._names)

    def add(self, value: int) -> None:
        bucket = bisect_left(self._bounds, value)
        self._counts[2 * bucket] += 1
        self._counts[2 * bucket + 1] += value

    def counts(self) -> Iterator[tuple[str, int]]:
        """Each count by its name, see `names_of`."""
        return zip(self._names, self._counts, strict=True)
