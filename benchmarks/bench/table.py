# SPDX-License-Identifier: Apache-2.0
"""What a person reads at the end of a run."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.bench.result import BUSY, Bar, Row, mb, ms


def show(rows: Sequence[Row], bars: Sequence[Bar]) -> None:
    console = Console(width=None if Console().is_terminal else 140)
    table = Table(title="medians (quartiles)", caption="beside: what LMCache 0.5.6 and vLLM bring, and the floor")
    for column in ("row", "size", "lmcache_ec", "passes of 5 ms", "LMCache", "vLLM example", "floor", "x floor"):
        table.add_column(column, justify="left" if column == "row" else "right")
    for row in rows:
        times, passes = row.times_floor, row.passes
        table.add_row(
            row.name,
            mb(row.size_bytes),
            _spread(row),
            "" if passes is None else f"{passes:g}",
            ms(row.peer_ms),
            ms(row.example_ms),
            ms(row.floor_ms),
            "" if times is None else f"{times:.2f}",
            style="dim" if row.name.endswith(BUSY) else "",
        )
    console.print(table)
    verdicts = Table(title="bars")
    for column in ("bar", "measured", "met"):
        verdicts.add_column(column)
    for bar in bars:
        verdict = {True: "[green]yes[/]", False: "[red]NO[/]", None: "?"}[bar.met]
        verdicts.add_row(bar.text, bar.value, verdict)
    console.print(verdicts)


def _spread(row: Row) -> str:
    if row.ours_ms is None or "ours" not in row.quartiles_ms:
        return ms(row.ours_ms)
    first, third = row.quartiles_ms["ours"]
    return f"{ms(row.ours_ms)} ({ms(first)}, {ms(third)})"
