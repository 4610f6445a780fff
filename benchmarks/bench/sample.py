# SPDX-License-Identifier: Apache-2.0
"""Definitions for all measurements: sizes, samples, and a busy Python thread. Imports only the standard library."""

import os
import random
import time
from collections.abc import Callable

WIDTH = 5376
"""Row width of the entries: 256 rows of BF16 are one image of Gemma3-27B, 2.75 MB."""

MEGABYTES = (0.5, 2.75, 16.0, 134.0)
BATCHED_MEGABYTES = 0.5
"""Size of an entry in a batch."""

BACK_TO_BACK_S = 0.0001
"""Time between passes where time is measured: short compared with everything that is waited for."""

PASS_S = 0.005
"""Length of a scheduling pass where passes are counted: a decode step of a small model on a GPU."""

_order = random.Random(0)

Samples = dict[tuple[str, str], list[float]]
"""(row, party) -> seconds; with "passes" as the party, scheduling passes."""


Pause = Callable[[float], object]
"""What an engine's main thread does between two passes, for the given number of seconds."""


def rows_of(megabytes: float) -> int:
    return round(megabytes * 1e6 / (2 * WIDTH))


def times_of(rows: int) -> int:
    """Samples per round: the smaller the entry, the more."""
    return max(1, min(8, round(48e6 / (2 * WIDTH * rows))))


def run_python(seconds: float) -> None:
    """Hold the GIL, as a scheduler's thread does."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        sum(number * number for number in range(100))


def pause_of(busy: bool) -> Pause:
    return run_python if busy else time.sleep


def timed(samples: Samples, row: str, whose: str, work: Callable[[], object]) -> None:
    began = time.perf_counter()
    work()
    samples.setdefault((row, whose), []).append(time.perf_counter() - began)


def in_any_order(*works: Callable[[], None]) -> None:
    """Run all in random order: the first finds cold caches, the last a busy disk."""
    for work in _order.sample(works, len(works)):
        work()


def noise(length: int) -> bytes:
    """Bytes that a file system cannot compress or store as holes."""
    block = os.urandom(min(length, 1 << 20))
    return (block * (length // len(block) + 1))[:length]
