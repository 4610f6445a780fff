# SPDX-License-Identifier: Apache-2.0
"""The rows of a run: medians and quartiles of the samples, and the bars that they have to meet."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from benchmarks.bench.churn import Utilisation

BUSY = "_busy"
LEAST = "_least"
"""Not this cache: the minimum that its design requires, as plain system calls, to show how low a bar can be."""
_PARTIES = ("ours", "peer", "example", "floor")
_OF_ANY_SIZE = {"report"}


@dataclass(frozen=True)
class Row:
    """Medians in ms, None where a party has no such operation. `quartiles_ms`: 25 % and 75 %, by party.

    `size_bytes` is the tensor's size; 0 if the row does not depend on it. `passes` counts scheduling passes of 5 ms.
    """

    name: str
    size_bytes: int
    ours_ms: float | None
    peer_ms: float | None
    example_ms: float | None
    floor_ms: float | None
    quartiles_ms: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    samples: int = 0
    passes: float | None = None

    @property
    def times_floor(self) -> float | None:
        return self.ours_ms / self.floor_ms if self.ours_ms and self.floor_ms else None


@dataclass(frozen=True)
class Bar:
    """The promised limit of a figure. `met` is None if it was not measured."""

    text: str
    value: str
    met: bool | None


class Collected:
    """All samples of a run, in seconds, by (row, size) and party."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, int], dict[str, list[float]]] = {}

    def add(self, samples: Mapping[tuple[str, str], list[float]], size_bytes: int) -> None:
        for (name, whose), values in samples.items():
            size = 0 if name.removesuffix(BUSY) in _OF_ANY_SIZE else size_bytes
            self._samples.setdefault((name, size), {}).setdefault(whose, []).extend(values)

    def rows(self) -> list[Row]:
        """In the order in which names and sizes were first added, each busy row after its idle one."""
        names = list(dict.fromkeys(name.removesuffix(BUSY) for name, _ in self._samples))
        order = sorted(self._samples, key=lambda key: (names.index(key[0].removesuffix(BUSY)), key[0], key[1]))
        return [_row(name, size, self._samples[name, size]) for name, size in order]


def _row(name: str, size_bytes: int, samples: Mapping[str, list[float]]) -> Row:
    taken = {whose: [second * 1e3 for second in samples[whose]] for whose in _PARTIES if whose in samples}
    medians = {whose: round(statistics.median(values), 6) for whose, values in taken.items()}
    passes = statistics.median(samples["passes"]) if "passes" in samples else None
    ours, peer, example, floor = (medians.get(whose) for whose in _PARTIES)
    quartiles = {whose: _quartiles(values) for whose, values in taken.items()}
    return Row(name, size_bytes, ours, peer, example, floor, quartiles, len(taken.get("ours", ())), passes)


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return round(first, 6), round(third, 6)


# ---- the bars


def bars(rows: Iterable[Row], arena: Utilisation) -> list[Bar]:
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    images = {name: [row for row in of_name if 2e6 < row.size_bytes < 3e6] for name, of_name in by_name.items()}
    return [
        _at_most(by_name, "has_cache_item", 0.002),
        _at_most(by_name, "ensure_idle_step", 0.1),
        _at_most(by_name, "hook_p99_promoting", 1.0),
        *(_busy(by_name, name) for name in by_name if name + BUSY in by_name and not name.endswith(LEAST)),
        _near_floor("load_cpu", images.get("load_cpu", ()), 1.15, "memcpy"),
        _with_least(by_name, "disk_get", 1.3, "read + xxh3"),
        _with_least(by_name, "disk_put", 1.2, "write + rename"),
        _with_least(images, "redis_get", 1.3, "bare socket"),
        _with_least(images, "redis_put", 1.3, "bare socket"),
        _near_floor("s3_get", images.get("s3_get", ()), 1.15, "bare obstore"),
        Bar(
            "arena >= 85 % live",
            f"{arena.least:.1%} at least, {arena.mean:.1%} on average",
            arena.least >= 0.85,
        ),
    ]


def _at_most(by_name: Mapping[str, list[Row]], name: str, limit_ms: float) -> Bar:
    value = next((row.ours_ms for row in by_name.get(name, ())), None)
    return Bar(f"{name} <= {ms(limit_ms)}", ms(value), None if value is None else value <= limit_ms)


def _busy(by_name: Mapping[str, list[Row]], name: str) -> Bar:
    idle = {row.size_bytes: row.ours_ms for row in by_name[name]}
    ratios = [
        (row.ours_ms / before, row.size_bytes)
        for row in by_name[name + BUSY]
        if row.ours_ms and (before := idle.get(row.size_bytes))
    ]
    return _worst(f"{name}{BUSY} <= 2 x idle", ratios, 2.0)


def _with_least(by_name: Mapping[str, list[Row]], name: str, limit: float, floor: str) -> Bar:
    """A bar relative to a floor, together with the least that is achievable."""
    bar = _near_floor(name, by_name.get(name, ()), limit, floor)
    least = [f"{row.times_floor:.2f}" for row in by_name.get(name + LEAST, ()) if row.times_floor is not None]
    return replace(bar, value=f"{bar.value}; the least: {', '.join(least)}") if least else bar


def _near_floor(name: str, rows: Iterable[Row], limit: float, floor: str) -> Bar:
    ratios = [(row.times_floor, row.size_bytes) for row in rows if row.times_floor is not None]
    return _worst(f"{name} <= {limit:g} x ({floor})", ratios, limit)


def _worst(text: str, ratios: list[tuple[float, int]], limit: float) -> Bar:
    if not ratios:
        return Bar(text, "not measured", None)
    ratio, _ = max(ratios)
    return Bar(text, ", ".join(f"{each:.2f} ({mb(size)})" for each, size in ratios), ratio <= limit)


# ---- how figures are written


def ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.2f} µs" if value < 0.01 else f"{value:.3f} ms" if value < 10 else f"{value:.1f} ms"


def mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.3g} MB" if size_bytes else "-"
