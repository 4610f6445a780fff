# SPDX-License-Identifier: Apache-2.0
"""The table at the end of a run. `python -m benchmarks.bench.table` prints the excerpt that the README shows."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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


RESULTS = Path(__file__).resolve().parent.parent / "results"
_LABELS = {
    "has_cache_item": "a look-up (`has_cache_item`)",
    "ensure_idle_step": "a pass over 256 requests x 4 images with nothing to do",
    "hook_p99_promoting": "the slowest of 100 hooks while entries are promoted",
    "load_cpu": "arena to encoder cache",
    "load_in_engine": "arena to encoder cache, in a step of a vLLM engine",
    "save": "encoder output to arena",
    "disk_get": "disk, read and verified",
    "disk_put": "disk, written",
    "redis_get": "Redis, read and verified",
    "redis_put": "Redis, written",
    "redis_get_16": "Redis, 16 entries in one call",
    "redis_get_64": "Redis, 64 entries in one call",
    "s3_get": "S3, read and verified",
    "s3_put": "S3, written",
    "s3_get_16": "S3, 16 entries in one call",
    "s3_get_64": "S3, 64 entries in one call",
    "fetch_to_live": "on disk, asked for, to loadable",
    "fetch_on_arrival": "on disk, from the arrival of its request 5 ms before its first pass, to loadable",
    "save_to_written": "encoded, to on disk",
}

_VERDICTS = {True: "yes", False: "no", None: "not measured"}


def excerpt(figures: Mapping[str, Any]) -> str:
    """A Markdown table of `latest.json`: rows that do not depend on size, one image, one long video."""
    rows = [Row(**row) for row in figures["rows"]]
    sizes = sorted({row.size_bytes for row in rows})
    shown = {0, sizes[min(2, len(sizes) - 1)], sizes[-1]}
    lines = ["| | size | lmcache_ec | LMCache | vLLM's example | floor |", "|---|---|---|---|---|---|"]
    for row in rows:
        if row.size_bytes in shown and row.name in _LABELS:
            cells = (_LABELS[row.name], mb(row.size_bytes), _spread(row), ms(row.peer_ms), ms(row.example_ms))
            lines.append(f"| {' | '.join((*cells, ms(row.floor_ms)))} |")
    lines += ["", "| bar | measured | met |", "|---|---|---|"]
    lines += [f"| {bar['text']} | {bar['value']} | {_VERDICTS[bar['met']]} |" for bar in figures["bars"]]
    return "\n".join(lines)


def _spread(row: Row) -> str:
    if row.ours_ms is None or "ours" not in row.quartiles_ms:
        return ms(row.ours_ms)
    first, third = row.quartiles_ms["ours"]
    return f"{ms(row.ours_ms)} ({ms(first)}, {ms(third)})"


if __name__ == "__main__":
    print(excerpt(json.loads((RESULTS / "latest.json").read_text())))
