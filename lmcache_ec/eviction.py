# SPDX-License-Identifier: Apache-2.0
"""What an entry is worth to the tier that holds it: seconds that keeping it is expected to save, per byte or row.

Pure arithmetic, for every tier that weighs costs: no clock, no I/O. It affects only speed, never correctness.
"""

from __future__ import annotations

import enum
from collections import OrderedDict

_GUESSED_ENCODE_S_A_ROW = 1e-4
"""Used until encodes have been measured: only its ratio to the cost of loads matters."""

_REMEMBERED = 8192


class Below(enum.Enum):
    """Where an entry still is once this tier has dropped it. Value: guessed (latency s, bytes/s)."""

    MEMORY = (0.0002, 5e9)
    DISK = (0.001, 1e9)
    NOTHING = (0.0, 0.0)


def restore_s(below: Below, length: int, rows: int, encode_s: float | None = None) -> float:
    """Seconds it will cost to get the entry back: a load of `length` bytes from `below`, or the encode of its `rows` if
    nothing has it or that is quicker. `encode_s` is the measured cost of the encode; None: unknown."""
    encode = rows * _GUESSED_ENCODE_S_A_ROW if encode_s is None else encode_s
    if below is Below.NOTHING:
        return encode
    latency_s, bytes_a_s = below.value
    return min(encode, float(latency_s + length / bytes_a_s))


def worth(size: int, restore_s: float, uses: float = 1.0) -> float:
    """What keeping an entry is worth, in seconds per unit of `size`: bytes or rows, whichever limits the tier. The
    lowest is evicted first.

    `uses`: how often it was used recently (see `Uses`), so that an entry used only once, just now (a scan), does not
    outweigh one that is used repeatedly.
    """
    return restore_s * uses / max(size, 1)


class Uses:
    """How often each name was used recently, even if no longer held: a use counts half after `half_life` others.

    Remembers the 8192 most recently used names. Runs on one thread.
    """

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        self._clock = 0
        self._uses: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def add(self, name: str) -> None:
        self._clock += 1
        self._uses[name] = self.count(name) + 1.0, self._clock
        self._uses.move_to_end(name)
        if len(self._uses) > _REMEMBERED:
            self._uses.popitem(last=False)

    def count(self, name: str) -> float:
        """Zero for a name that was never used or is forgotten."""
        uses, at = self._uses.get(name, (0.0, 0))
        return float(uses * 0.5 ** ((self._clock - at) / self._half_life))
