# SPDX-License-Identifier: Apache-2.0
"""The figures of a run: rows, bars, a table for people and two pictures for the documentation."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot
from rich.console import Console
from rich.table import Table

from benchmarks.engine.hits import Measured, servers_of
from benchmarks.engine.mixed import Batch
from benchmarks.engine.paired import Ratio, ratio

HITS = ("LocalCPU", "disk", "Redis", "S3", "ECExample")
_OURS, _OTHERS, _PLAIN = "#1f6f8b", "#c98b3c", "#9a9a9a"


@dataclass(frozen=True)
class Row:
    """Medians of one kind of request. `beside_floor` is the ratio of times to first token: of a hit to a hit in vLLM's
    own cache, of a miss to one without the cache."""

    kind: str
    first_token_ms: float
    quartiles_ms: tuple[float, float]
    between_tokens_ms: float
    requests_per_s: float
    """With one request at a time."""
    beside_floor: Ratio | None
    by_servers: Ratio | None = None
    """The same ratio, from the medians of several pairs of servers: its interval includes the difference between two
    servers of one kind. Its `pairs` counts pairs of servers."""
    beside_nothing: Ratio | None = None
    """Ratio of a miss to one with a connector that does nothing, by servers."""


@dataclass(frozen=True)
class Bar:
    text: str
    value: str
    met: bool


def rows(measured: Measured, pairs: int = 1) -> list[Row]:
    """One row per kind, two for a hit in vLLM's own cache: without this cache, with it. `pairs`: see `hits.Counts`."""
    floors = {"miss": "off", "nothing": "off", "LocalCPU own": "off own", **{kind: f"{kind} own" for kind in HITS}}
    kinds = ("off", "nothing", "miss", "off own", "LocalCPU own", *HITS)
    return [_row(kind, measured, floors.get(kind), pairs) for kind in kinds if kind in measured]


def _row(kind: str, measured: Measured, floor: str | None, pairs: int) -> Row:
    first = [timing.first_token_s * 1e3 for timing in measured[kind].values()]
    whole = [timing for (_, number), timing in measured[kind].items() if number == 0]  # later rounds: few tokens
    low, _, high = statistics.quantiles(first, n=4, method="inclusive") if len(first) > 1 else first * 3
    beside = None
    if floor is not None:
        both = measured[kind].keys() & measured[floor].keys()  # a floor in another server has one round only
        first_tokens = ([measured[each][key].first_token_s for key in both] for each in (kind, floor))
        beside = ratio(*first_tokens)
    return Row(
        kind,
        round(statistics.median(first), 3),
        (round(low, 3), round(high, 3)),
        round(statistics.median(timing.between_tokens_s for timing in whole) * 1e3, 3),
        round(1 / statistics.median(timing.total_s for timing in whole), 3),
        beside,
        _by_servers(measured, kind, "off", pairs) if kind in ("miss", "nothing") else None,
        _by_servers(measured, kind, "nothing", pairs) if kind == "miss" else None,
    )


def _by_servers(measured: Measured, kind: str, floor: str, pairs: int) -> Ratio | None:
    """The ratio where the median of each pair of servers counts as one value."""
    if pairs < 2 or floor not in measured:
        return None
    of_servers: dict[int, list[float]] = {}
    for (seed, number), timing in measured[kind].items():
        if beside := measured[floor].get((seed, number)):
            of_servers.setdefault(servers_of(seed, pairs), []).append(timing.first_token_s / beside.first_token_s)
    medians = [statistics.median(ratios) for ratios in of_servers.values()]
    return ratio(medians, [1.0] * len(medians)) if medians else None


def bars(by_model: Mapping[str, Sequence[Row]]) -> list[Bar]:
    """The promised limits: for a hit with an encoder of usual cost, and for a miss with a tiny one."""
    promised = (("gemma3_so400m_lm", "LocalCPU", 1.02), ("gemma3_so400m_lm", "disk", 1.02), ("gemma3", "miss", 1.03))
    found = {(model, row.kind): row.beside_floor for model, of_model in by_model.items() for row in of_model}
    return [
        Bar(
            f"{model}, {kind}: <= {limit:g} x its floor, interval +- 0.02",
            str(beside),
            beside.median <= limit and beside.half_width <= 0.02,
        )
        for model, kind, limit in promised
        if (beside := found.get((model, kind)))
    ]


def summary(batch: Batch) -> dict[str, Any]:
    """A batch as it is written to the file: times in ms."""
    first = sorted(timing.first_token_s * 1e3 for timing in batch.timings)
    return {
        "party": batch.party,
        "rate": round(batch.rate, 3),
        "reuse": round(batch.reuse, 3),
        "requests": len(first),
        "encodes": batch.encodes,
        "completed_per_s": round(len(first) / batch.elapsed_s, 3),
        "first_token_ms": {"median": round(statistics.median(first), 1), "p90": round(first[int(0.9 * len(first))], 1)},
        "between_tokens_ms": round(statistics.median(one.between_tokens_s for one in batch.timings) * 1e3, 2),
    }


def show(figures: Mapping[str, Any], by_model: Mapping[str, Sequence[Row]], verdicts: Sequence[Bar]) -> None:
    console = Console(width=None if Console().is_terminal else 140)
    for model, of_model in by_model.items():
        table = Table(title=f"{model}: one request at a time, medians")
        for column in ("picture's encoder output", "TTFT", "quartiles", "between tokens", "requests/s", "x its floor"):
            table.add_column(column, justify="left" if column.startswith("picture") else "right")
        for row in of_model:
            low, high = row.quartiles_ms
            table.add_row(
                row.kind,
                f"{row.first_token_ms:.1f} ms",
                f"{low:.1f} to {high:.1f}",
                f"{row.between_tokens_ms:.2f} ms",
                f"{row.requests_per_s:.2f}",
                "" if row.beside_floor is None else str(row.beside_floor),
            )
        console.print(table)
        for row in of_model:
            for ratio_of, text in ((row.by_servers, "no cache"), (row.beside_nothing, "a connector that does nothing")):
                if ratio_of is not None:
                    console.print(f"{row.kind}, compared with {text}, by pairs of servers: {ratio_of}")
    for name, title in (("mixed", "a catalogue of 500 pictures"), ("throughput", "four users without a pause")):
        if batches := figures.get(name):
            table = Table(title=title)
            for column in (
                "",
                "sent/s",
                "seen before",
                "encoded",
                "completed/s",
                "TTFT median",
                "p90",
                "between tokens",
            ):
                table.add_column(column, justify="right")
            for batch in batches:
                first = batch["first_token_ms"]
                table.add_row(
                    batch["party"],
                    f"{batch['rate']:.2f}" if batch["rate"] else "-",
                    f"{batch['reuse']:.0%}",
                    f"{batch['encodes']} of {batch['requests']}",
                    f"{batch['completed_per_s']:.2f}",
                    f"{first['median']:,.0f} ms",
                    f"{first['p90']:,.0f} ms",
                    f"{batch['between_tokens_ms']:.1f} ms",
                )
            console.print(table)
    for bar in verdicts:
        console.print(f"{'met   ' if bar.met else 'MISSED'}  {bar.text}: {bar.value}")


def kept(row: Row) -> dict[str, Any]:
    return asdict(row)


# ---- the pictures


def draw_hits(of_model: Sequence[Row], path: Path, title: str) -> None:
    """Times to first token, by where the encoder output was."""
    of_model = [row for row in of_model if row.kind not in ("nothing", "LocalCPU own")]
    labels = {"off": "no cache: encoded", "miss": "cache, first seen", "off own": "vLLM's own cache"}
    names = [
        labels.get(row.kind, f"{row.kind}, after a restart" if row.kind != "LocalCPU" else row.kind) for row in of_model
    ]
    colours = [
        _OTHERS if row.kind in ("off", "miss") else _PLAIN if row.kind in ("off own", "ECExample") else _OURS
        for row in of_model
    ]
    with _figure(path, (8, 3.6)) as axes:
        values = [row.first_token_ms for row in of_model]
        below = [max(0.0, row.first_token_ms - row.quartiles_ms[0]) for row in of_model]
        above = [max(0.0, row.quartiles_ms[1] - row.first_token_ms) for row in of_model]
        bars = axes.barh(names, values, xerr=(below, above), color=colours)
        axes.bar_label(bars, [f"{value:,.0f} ms" for value in values], padding=4)
        axes.invert_yaxis()
        axes.set_xlabel("ms to the first token: median and quartiles")
        axes.set_title(title)
        axes.margins(x=0.15)


def draw_throughput(batches: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    with _figure(path, (6, 3.6)) as axes:
        for party, colour, label in (("off", _OTHERS, "no cache"), ("cache", _OURS, "lmcache_ec")):
            points = [(batch["reuse"], batch["completed_per_s"]) for batch in batches if batch["party"] == party]
            axes.plot(
                [100 * reuse for reuse, _ in points], [rate for _, rate in points], "o-", color=colour, label=label
            )
        axes.set_xlabel("% of requests whose picture was seen before")
        axes.set_ylabel("requests a second")
        axes.set_ylim(bottom=0)
        axes.set_title(title)
        axes.legend(frameon=False)


class _figure:
    """A figure with one set of axes, saved at the end."""

    def __init__(self, path: Path, size: tuple[float, float]) -> None:
        pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "lmcache-ec", "font.size": 9})
        self._path = path
        self._figure, self._axes = pyplot.subplots(figsize=size)

    def __enter__(self) -> Any:
        self._axes.spines[["top", "right"]].set_visible(False)
        return self._axes

    def __exit__(self, *_: object) -> None:
        self._figure.tight_layout()
        self._figure.savefig(self._path, metadata={"Date": None})
        pyplot.close(self._figure)
