# SPDX-License-Identifier: Apache-2.0
"""Ratios of paired measurements, with a confidence interval that assumes nothing about their distribution."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """Median of the ratios of pairs, and its 95 % interval, which is infinite if there are too few pairs."""

    median: float
    low: float
    high: float
    pairs: int

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f}, {self.pairs} pairs)"


def ratio(measured: Sequence[float], beside: Sequence[float]) -> Ratio:
    """Ratio of each value of `measured` to the one at the same position of `beside`.

    The interval lies between two order statistics: how many of n ratios are below the true median is binomial with
    p = 1/2, whatever the ratios are.
    """
    ratios = sorted(one / other for one, other in zip(measured, beside, strict=True))
    left_out = _outside(len(ratios))
    low, high = (-math.inf, math.inf) if left_out < 1 else (ratios[left_out - 1], ratios[-left_out])
    return Ratio(statistics.median(ratios), low, high, len(ratios))


def _outside(count: int) -> int:
    """The largest k such that the interval from the k-th smallest to the k-th largest ratio covers the median with
    the required confidence; 0 if there is none."""
    below, found = 0.0, 0
    for k in range(1, count // 2 + 1):
        below += math.comb(count, k - 1) / 2**count
        if 2 * below > 1 - _CONFIDENCE:
            break
        found = k
    return found
