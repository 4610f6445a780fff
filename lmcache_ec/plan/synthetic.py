# SPDX-License-Identifier: Apache-2.0
"""Synthetic traces: a few popular items and a long tail, drifting popularity, crawls, conversations.

Sizes and encode times are assumptions: replace them with those of your model; see `ITEMS`. The same `Synthetic` makes
the same trace every time.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmcache_ec.plan.traces import BATCH, Batch, Trace, TraceError

_Ints = NDArray[np.uint64]
_Floats = NDArray[np.float64]


class Kind(NamedTuple):
    """One kind of item: its share of all items, and the size and encode time of each."""

    name: str
    share: float
    bytes: int
    encode_s: float


ITEMS = (
    Kind("picture", 0.70, 1_310_720, 0.015),  # 256 rows of 2560 values of 2 bytes
    Kind("page", 0.20, 9_318_400, 0.060),  # 1300 rows of 3584
    Kind("speech", 0.05, 3_840_000, 0.020),  # 1500 rows of 1280
    Kind("video", 0.05, 10_485_760, 0.480),  # 32 frames of 64 pooled rows of 2560
)


@dataclass(frozen=True, slots=True)
class Synthetic:
    """The parameters of a trace. Shares are of all requests; the remaining requests follow popularity."""

    requests: int = 1_000_000
    hours: float = 24.0
    pictures: int = 100_000
    """How many exist at a time, of all kinds."""
    exponent: float = 0.9
    """Zipf exponent: the picture of rank r is requested r to the power of -exponent times as often as the first."""
    lifetime_h: float = 0.0
    """After this time another picture takes over each rank; 0: never."""
    scan: float = 0.0
    """Share of a crawl over pictures that are requested once, all within the middle third of the time."""
    conversations: float = 0.0
    """Share of turns of conversations, each about its own picture."""
    turns: float = 6.0
    """Mean number per conversation."""
    gap_s: float = 45.0
    """Mean time between two turns."""
    seed: int = 1

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise TraceError(f"{name}={value:g} of a synthetic trace: must be {least:g} to {most:g}")
        if self.scan + self.conversations > 1:
            raise TraceError(f"scan={self.scan:g} and conversations={self.conversations:g}: together at most 1")


_RANGES = {
    "requests": (1, 1e12),
    "hours": (1e-3, 1e6),
    "pictures": (1, 1e12),
    "exponent": (0, 4),
    "lifetime_h": (0, 1e6),
    "scan": (0, 1),
    "conversations": (0, 1),
    "turns": (1, 1e6),
    "gap_s": (1e-3, 1e6),
    "seed": (0, 1e12),
}

NAMED = {
    "zipf": Synthetic(),
    "drift": Synthetic(lifetime_h=6.0),
    "scan": Synthetic(scan=0.3),
    "conversations": Synthetic(conversations=0.6, pictures=30_000),
    "mixed": Synthetic(lifetime_h=12.0, scan=0.2, conversations=0.3),
}
"""Presets, named by their main feature."""


def parse(text: str) -> Synthetic:
    """`NAME` or `NAME:key=value,…`: one of `NAMED` with other values. TraceError for anything else."""
    name, _, rest = text.partition(":")
    if name not in NAMED:
        raise TraceError(f"{text!r}: is neither a file nor one of {', '.join(NAMED)}")
    types: dict[str, type] = {each.name: type(getattr(NAMED[name], each.name)) for each in fields(Synthetic)}
    values: dict[str, Any] = {each.name: getattr(NAMED[name], each.name) for each in fields(Synthetic)}
    given: set[str] = set()
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in types:
            near = difflib.get_close_matches(key, types, 1)
            meant = f"did you mean {near[0]}?" if near else f"must be one of {', '.join(types)}"
            raise TraceError(f"{key!r} is no key of a synthetic trace: {meant}")
        if key in given:
            raise TraceError(f"{text}: {key} is given twice: must be given once")
        given.add(key)
        try:
            values[key] = types[key](float(value))
        except (ValueError, OverflowError):
            raise TraceError(f"{key}={value}: must be a number") from None
    return Synthetic(**values)


def generate(trace: Synthetic, share: float = 1.0, items: Sequence[Kind] = ITEMS) -> Trace:
    """About `trace.requests` requests, of which only those for a random `share` of the identifiers are yielded."""
    dice = np.random.default_rng(trace.seed)
    whole_s = trace.hours * 3600
    pending_times: _Floats = np.empty(0)
    pending: _Ints = np.empty(0, np.uint64)
    made, crawled = 0, 0
    while made < trace.requests:
        count = min(BATCH, trace.requests - made)
        begin_s, end_s = (whole_s * number / trace.requests for number in (made, made + count))
        made += count
        scan_begin_s, scan_end_s = (min(max(edge_s, begin_s), end_s) for edge_s in (whole_s / 3, 2 * whole_s / 3))
        scans = round(3 * trace.scan * trace.requests * (scan_end_s - scan_begin_s) / whole_s)
        begun = round(count * trace.conversations / trace.turns)
        alone = round(count * (1 - trace.scan - trace.conversations))
        alone_s = dice.uniform(begin_s, end_s, alone)
        scan_s = dice.uniform(scan_begin_s, scan_end_s, scans)
        turn_s, talks = _turns(trace, dice, np.sort(dice.uniform(begin_s, end_s, begun)), made)
        times = np.concatenate((pending_times, alone_s, scan_s, turn_s))
        names = np.concatenate((pending, _popular(trace, dice, alone_s), _once(crawled, scans), talks))
        crawled += scans
        now = times < end_s
        pending_times, pending = times[~now], names[~now]
        yield from _batch(times[now], names[now], share, items)


def _popular(trace: Synthetic, dice: np.random.Generator, times_s: _Floats) -> _Ints:
    ranks = _zipf(dice, trace.pictures, trace.exponent, len(times_s))
    if not trace.lifetime_h:
        return _scattered(ranks)
    phase = (_scattered(ranks) >> np.uint64(11)).astype(np.float64) / (1 << 53)
    generation = np.floor(times_s / (trace.lifetime_h * 3600) + phase).astype(np.uint64)
    return _scattered(ranks + generation * np.uint64(trace.pictures + 1))


def _once(begin: int, count: int) -> _Ints:
    return _scattered(np.arange(begin, begin + count, dtype=np.uint64) + np.uint64(1 << 62))


def _turns(trace: Synthetic, dice: np.random.Generator, begun_s: _Floats, number: int) -> tuple[_Floats, _Ints]:
    """The times of conversation turns, and the picture of each."""
    turns = dice.geometric(1 / trace.turns, len(begun_s))
    gaps = dice.exponential(trace.gap_s, int(turns.sum()))
    first = np.cumsum(turns) - turns
    gaps[first] = 0.0
    since = np.cumsum(gaps)
    times = np.repeat(begun_s, turns) + since - np.repeat(since[first], turns)
    names = np.arange(len(begun_s), dtype=np.uint64) + np.uint64((1 << 61) + number * 2)
    return times, np.repeat(_scattered(names), turns)


def _zipf(dice: np.random.Generator, most: int, exponent: float, count: int) -> _Ints:
    """Ranks from 1 to `most`, by rejection inversion (Hörmann and Derflinger 1996): no table, whatever `most` is."""

    def area(x: _Floats) -> _Floats:
        return np.log(x) if exponent == 1 else (x ** (1 - exponent) - 1) / (1 - exponent)

    def inverse(u: _Floats) -> _Floats:
        return np.exp(u) if exponent == 1 else (1 + u * (1 - exponent)) ** (1 / (1 - exponent))

    low, high = (float(area(np.array([x]))[0]) for x in (1.5, most + 0.5))
    ranks: _Floats = np.empty(0)
    while len(ranks) < count:
        u = dice.uniform(low - 1, high, count - len(ranks) + 16)
        rank = np.clip(np.floor(inverse(u) + 0.5), 1, most)
        ranks = np.concatenate((ranks, rank[u >= area(rank + 0.5) - rank**-exponent]))
    return ranks[:count].astype(np.uint64)


def _batch(times_s: _Floats, names: _Ints, share: float, items: Sequence[Kind]) -> Iterator[Batch]:
    if share < 1:
        kept = (_scattered(names) & np.uint64(0xFFFFFF)) < np.uint64(int(share * (1 << 24)))
        times_s, names = times_s[kept], names[kept]
    if not len(names):
        return
    order = np.argsort(times_s, kind="stable")
    times_s, names = times_s[order], names[order]
    lots = (_scattered(names ^ np.uint64(0x5BD1E995)) >> np.uint64(11)).astype(np.float64) / (1 << 53)
    kind = np.searchsorted(np.cumsum([item.share for item in items])[:-1], lots, side="right")
    sizes = np.array([item.bytes for item in items])[kind]
    encodes = np.array([item.encode_s for item in items])[kind]
    yield Batch(times_s.tolist(), names.tolist(), sizes.tolist(), encodes.tolist())


def _scattered(numbers: _Ints) -> _Ints:
    """As `traces.scattered`, for many at once."""
    with np.errstate(over="ignore"):
        numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
        numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return numbers ^ (numbers >> np.uint64(31))
