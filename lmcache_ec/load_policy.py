# SPDX-License-Identifier: Apache-2.0
"""Whether an entry is worth waiting for: recently measured load times of tiers against costs of encodes.

Pure arithmetic over bounded memory: no clock, no I/O. It affects only speed, never correctness: either way the item
reaches the model.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lmcache_ec.eviction import Below, restore_s

_FORGETTING = 0.15
"""Weight of the latest figure, once there are several: the last four items make up half of an estimate."""

_ENOUGH = 3
"""Minimum number of figures for an estimate: the first connection and the first encode of a process are slow."""

_REFUSALS = 16
_REMEASURED_S = 10.0
"""A refused tier is measured again after `_REFUSALS` refusals, or at the first one after `_REMEASURED_S`."""

_NOTICEABLE_S = 0.003
_TRIALS = 8
"""While the cost of encodes is unknown, one in `_TRIALS` noticeably long loads is replaced by an encode."""

_READERS = 8
"""Entries that a tier reads in parallel (see `tiers/lane.py`): the others wait for their turn."""

_MODALITIES = 16
_STEPS = 256
_CLASSES = 48


class Seconds:
    """How long something takes, by size: one exponentially forgetting geometric mean for each power of two.

    Geometric, so that one figure a hundred times too large does not hide the others.
    """

    def __init__(self) -> None:
        self.figures = 0
        self._means: dict[int, tuple[float, float]] = {}  # class -> logarithm, weight of the next figure
        self._latest = 0

    def add(self, size: int, seconds: float) -> None:
        self.figures += 1
        number = self._latest = _class_of(size)
        value = math.log(max(seconds, 1e-6))
        mean, weight = self._means.get(number, (value, 1.0))
        self._means[number] = mean + weight * (value - mean), max(weight / (1 + weight), _FORGETTING)

    def expect(self, size: int) -> float | None:
        """Seconds for `size`, from the nearest size with figures; if that is smaller, scaled up in proportion. None
        until there are enough figures."""
        if self.figures < _ENOUGH:
            return None
        number = _class_of(size)
        nearest = min(self._means, key=lambda known: (abs(known - number), known))
        return math.exp(self._means[nearest][0]) * 2.0 ** max(0, number - nearest)

    @property
    def latest_us(self) -> int:
        """The estimate for the latest size, in microseconds, for people to read."""
        return round(math.exp(self._means[self._latest][0]) * 1e6) if self._means else 0


def _class_of(size: int) -> int:
    return min(max(size, 1).bit_length(), _CLASSES)


@dataclass(frozen=True, slots=True)
class Decision:
    """The tiers that are worth asking for an entry, a bit each; none: encode.

    `refused`: the first one that may have it and takes too long. `measure`: read the entry from this tier anyway; no
    request waits for it.
    """

    tiers: int
    refused: int | None = None
    measure: int | None = None


class LoadPolicy:
    """Runs only while the caller has the scheduler side's turn. Tiers are numbers, in the order in which they are
    asked; a load of unknown cost is expected to be worth it."""

    def __init__(self, always: bool = False) -> None:
        """With `always` nothing is ever refused."""
        self.always = always
        self.counts = dict.fromkeys(("waits", "encodes_instead", "trials", "measurements"), 0)
        self.refusals: dict[int, int] = {}
        """Refusals of each tier, since the start."""
        self._encoding: deque[tuple[int, list[tuple[str, int]]]] = deque(maxlen=_STEPS)
        self._encodes: dict[str, Seconds] = {}
        self._tiers: dict[int, Seconds] = {}
        self._unmeasured: dict[int, int] = {}  # tier -> refusals since it was last measured
        self._measured_at: dict[int, float] = {}
        self._untried = 0

    @property
    def refused(self) -> int:
        """How often an encode was preferred to a load from a tier that may have had the entry."""
        return self.counts["encodes_instead"] + self.counts["trials"]

    # ---- what was measured

    def begin_encodes(self, step: int, items: list[tuple[str, int]]) -> None:
        """A step encodes these items, (modality, rows) each; `encoded` reports how long that took."""
        self._encoding.append((step, items))

    def encoded(self, step: int, seconds: float) -> None:
        """All steps up to this one are over; in it the encoder took `seconds`, 0 if unknown."""
        while self._encoding and self._encoding[0][0] <= step:
            begun, items = self._encoding.popleft()
            if begun == step and seconds > 0:
                self._learn(items, seconds)

    def _learn(self, items: list[tuple[str, int]], seconds: float) -> None:
        total = sum(rows for _, rows in items)
        for modality, rows in items if total else ():
            if modality in self._encodes or len(self._encodes) < _MODALITIES:
                self._encodes.setdefault(modality, Seconds()).add(rows, seconds * rows / total)

    def delivered(self, tier: int, length: int, seconds: float, now: float) -> None:
        """A tier took `seconds` for an entry of `length` bytes, excluding time in its queue."""
        self._tiers.setdefault(tier, Seconds()).add(length, seconds)
        self._unmeasured[tier], self._measured_at[tier] = 0, now

    def late(self, tier: int, length: int, waited_s: float) -> None:
        """A tier has not delivered within `waited_s`: it takes longer, but how much longer may never be known."""
        self._tiers.setdefault(tier, Seconds()).add(length, 2 * waited_s)

    # ---- what is decided

    def encode_s(self, items: Iterable[tuple[str, int]]) -> float:
        """Seconds that encoding these items, (modality, rows) each, is expected to cost; infinite if not known yet."""
        total = 0.0
        for modality, rows in items:
            figures = self._encodes.get(modality)
            seconds = figures.expect(rows) if figures is not None else None
            if seconds is None:
                return math.inf
            total += seconds
        return total

    def decide(self, tiers: Sequence[int], length: int, encode_s: float, waiting: dict[int, int]) -> Decision:
        """Which of `tiers`, those that may have an entry of `length` bytes, are worth waiting for instead of an encode
        of `encode_s`. `waiting`: tier to number of outstanding entries."""
        asked, refused = 0, None
        for tier in tiers:
            if self._load_s(tier, length, waiting) <= encode_s:
                asked |= 1 << tier
            elif refused is None:
                refused = tier
        return Decision(asked, refused)

    def _load_s(self, tier: int, length: int, waiting: dict[int, int]) -> float:
        figures = self._tiers.get(tier)
        seconds = figures.expect(length) if figures is not None else None
        return 0.0 if seconds is None else seconds * (1 + waiting.get(tier, 0) // _READERS)

    def restore_s(self, held: int, length: int, modality: str, rows: int) -> float:
        """The cost of a miss of an entry that the tiers in `held`, a bit each, have: the quickest way to get it back.
        Unmeasured costs are guessed."""
        encode_s = self.encode_s([(modality, rows)])
        known_s = None if math.isinf(encode_s) else encode_s
        tiers = (tier for tier in range(held.bit_length()) if held >> tier & 1)
        reads = (self._tiers[tier].expect(length) if tier in self._tiers else None for tier in tiers)
        guessed_s = restore_s(Below.DISK, length, rows, known_s)
        read_s = [guessed_s if measured_s is None else measured_s for measured_s in reads]
        return min([restore_s(Below.NOTHING, length, rows, known_s), *read_s])

    def settle(self, decision: Decision, tiers: Sequence[int], length: int, encode_s: float, now: float) -> Decision:
        """Count a decision, and now and then override it to measure the alternative: an encode of unknown cost, or a
        tier that is no longer asked."""
        if decision.tiers:
            if math.isinf(encode_s) and self._is_trial(tiers, length):
                self.counts["trials"] += 1
                return Decision(0)
            self.counts["waits"] += 1
            return decision
        tier = decision.refused
        self.counts["encodes_instead"] += 1
        if tier is None:
            return decision
        self.refusals[tier] = self.refusals.get(tier, 0) + 1
        self._unmeasured[tier] = self._unmeasured.get(tier, 0) + 1
        if self._unmeasured[tier] < _REFUSALS and now - self._measured_at.get(tier, now) < _REMEASURED_S:
            return decision
        self.counts["measurements"] += 1
        self._unmeasured[tier], self._measured_at[tier] = 0, now
        return Decision(0, tier, measure=tier)

    def _is_trial(self, tiers: Sequence[int], length: int) -> bool:
        if self._load_s(tiers[0], length, {}) < _NOTICEABLE_S:
            return False
        self._untried += 1
        return self._untried % _TRIALS == 0

    # ---- for people

    def snapshot(self, names: Sequence[str]) -> dict[str, int]:
        """Counts of decisions and their reasons, and the figures behind them (microseconds). `names` are the tiers'."""
        figures = {f"policy_{name}": number for name, number in self.counts.items()}
        for tier, name in enumerate(names):
            if tier in self.refusals:
                figures[f"policy_refused_{name}"] = self.refusals[tier]
            if tier in self._tiers:
                figures[f"policy_us_{name}"] = self._tiers[tier].latest_us
        return figures | {f"policy_encode_us_{name}": known.latest_us for name, known in self._encodes.items()}
