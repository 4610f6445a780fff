# SPDX-License-Identifier: Apache-2.0
"""What an entry is worth to the tier that holds it: seconds that keeping it is expected to save, for each byte or row.

Pure arithmetic, for every tier that weighs: no clock, no I/O. It never decides what is right, only what is quicker.
"""

from __future__ import annotations

import enum
from collections import OrderedDict

_GUESSED_ENCODE_S_A_ROW = 1e-4
"""Where nobody has measured: only its ratio to what loads cost matters."""

_REMEMBERED = 8192


class Below(enum.Enum):
    """What has an entry once this tier has dropped it. Value: (latency s, bytes/s), as guessed."""

    MEMORY = (0.0002, 5e9)
    DISK = (0.001, 1e9)
    NOTHING = (0.0, 0.0)


def restore_s(below: Below, length: int, rows: int, encode_s: float | None = None) -> float:
    """Seconds that having the entry back will cost: a load of `length` bytes from `below`, or the encode of its `rows`
    if nothing has it or that is quicker. `encode_s` is what the encode was measured to cost; None: nobody knows."""
    encode = rows * _GUESSED_ENCODE_S_A_ROW if encode_s is None else encode_s
    if below is Below.NOTHING:
        return encode
    latency_s, bytes_a_s = below.value
    return min(encode, float(latency_s + length / bytes_a_s))


def worth(size: int, restore_s: float, uses: float = 1.0) -> float:
    """What keeping an entry is worth, in seconds for each unit of `size`: bytes or rows, whatever the tier is short of.
    The lowest is evicted first.

    `uses`: how often it was used lately (see `Uses`), so that one which was used once and just now (a scan) does not
    outweigh one that is used again and again.
    """
    return restore_s * uses / max(size, 1)


class Uses:
    """How often each name was used lately, also of what is held no more: a use counts half after `half_life` others.

    Remembers the 8192 names that were used last. Runs on one thread.
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
        """Zero for what was never used or is forgotten."""
        uses, at = self._uses.get(name, (0.0, 0))
        return float(uses * 0.5 ** ((self._clock - at) / self._half_life))
