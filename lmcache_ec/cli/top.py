# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec top`: what the engines on this host are doing, per second."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lmcache_ec.cli.arguments import number
from lmcache_ec.cli.status import engines, hit_rate, short_names, tier_state
from lmcache_ec.cli.wording import counted
from lmcache_ec.sizes import MIB, precise_size, rounded_size

_COLUMNS = ("held", "hits", "rate", "errors", "writes", "read\nMiB", "written\nMiB", "unsaved")
"""`held` and `unsaved` are sizes, `rate` is the percentage of hits; the others are per second."""
_RATES = ("hits", "misses", "errors", "writes", "read_bytes", "written_bytes")


@dataclass(frozen=True, slots=True)
class TierRates:
    """A tier's activity per second since the last look. `held_bytes`: None if it is not counted."""

    name: str
    state: str
    held_bytes: int | None
    hits: float
    misses: float
    errors: float
    writes: float
    read_bytes: float
    written_bytes: float
    backlog: int
    backlog_bytes: int


@dataclass(frozen=True, slots=True)
class EngineRates:
    """An engine's activity per second since the last look."""

    engine: str
    namespace: str
    state: str
    loads: float
    saves: float
    cpu_bytes: int
    cpu_limit_bytes: int
    tiers: Sequence[TierRates]


Look = tuple[float, Sequence[Mapping[str, Any]]]
"""The time (monotonic seconds), and the result of `engines`."""


def top(
    interval: float = typer.Option(
        2.0, "--interval", parser=number(0.2, 3600), metavar="SECONDS", help="Seconds between updates."
    ),
    once: bool = typer.Option(False, "--once", help="Print the rates of one interval, and exit."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON list per interval, each on its own line."),
) -> None:
    """Show what the caches of the engines on this host are doing: each tier's rates per second. Ctrl-C ends it."""
    try:
        if as_json or once:
            _print(interval, once=once, as_json=as_json)
        else:
            _redraw(interval)
    except KeyboardInterrupt:
        pass  # the intended way to end it


def look() -> Look:
    return time.monotonic(), engines()


def rates(before: Look, after: Look) -> list[EngineRates]:
    """For each engine that was there both times, with the same store process."""
    passed_s = max(1e-6, after[0] - before[0])
    known = {engine["pid"]: engine for engine in before[1]}
    return [_rates(known[now["pid"]], now, passed_s) for now in after[1] if now["pid"] in known]


def _rates(then: Mapping[str, Any], now: Mapping[str, Any], passed_s: float) -> EngineRates:
    def loads(engine: Mapping[str, Any]) -> int:
        book: Mapping[str, int] = engine["book"]
        return sum(number for name, number in book.items() if name.startswith("loads_") and name != "loads_failed")

    old, new = Counter(then["book"]), Counter(now["book"])
    earlier = {tier["name"]: tier for tier in then["tiers"]}
    return EngineRates(
        engine=now["engine"],
        namespace=now["namespace"],
        state=now["state"],
        loads=max(0, loads(now) - loads(then)) / passed_s,
        saves=max(0, new["saves"] - old["saves"]) / passed_s,
        cpu_bytes=new["used_bytes"],
        cpu_limit_bytes=new["capacity_bytes"],
        tiers=[_tier_rates(earlier.get(tier["name"], tier), tier, passed_s) for tier in now["tiers"]],
    )


def _tier_rates(then: Mapping[str, Any], now: Mapping[str, Any], passed_s: float) -> TierRates:
    return TierRates(
        name=now["name"],
        state=tier_state(now),
        held_bytes=now["bytes"],
        **{name: max(0, now.get(name, 0) - then.get(name, 0)) / passed_s for name in _RATES},
        backlog=now.get("backlog", 0),
        backlog_bytes=now.get("backlog_bytes", 0),
    )


# ---- what is printed


def _print(interval: float, *, once: bool, as_json: bool) -> None:
    before = look()
    while True:
        time.sleep(interval)
        after = look()
        found = rates(before, after)
        if as_json:
            typer.echo(json.dumps([asdict(engine) for engine in found]))
        else:
            Console(highlight=False).print(view(found))
        if once:
            return
        before = after


def _redraw(interval: float) -> None:
    console = Console(highlight=False)
    before = look()
    with Live(Text("looking …"), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            after = look()
            live.update(view(rates(before, after)), refresh=True)
            before = after


def view(found: Sequence[EngineRates]) -> Group:
    if not found:
        return Group(Text("No engine with an encoder cache runs on this host under this user."))
    short = short_names([engine.engine for engine in found])
    parts: list[Text | Table] = []
    for engine in found:
        parts.append(Text(f"engine {short[engine.engine]}: {engine.state}, {engine.namespace}"))
        parts.append(Text(f"  per second: {engine.loads:,.1f} loads, {engine.saves:,.1f} saves"))
        parts += [_table(engine), Text()]
    return Group(*parts)


def _table(engine: EngineRates) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)  # must fit 80 columns
    table.add_column("tier", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=column != "unsaved")
    if engine.cpu_limit_bytes:
        table.add_row("cpu", rounded_size(engine.cpu_bytes), *[""] * (len(_COLUMNS) - 1))
    for tier in engine.tiers:
        waits = f"{counted(tier.backlog, 'write')}, {precise_size(tier.backlog_bytes)}" if tier.backlog else ""
        numbers = (_figure(tier.errors), _figure(tier.writes))
        moved = (_figure(tier.read_bytes / MIB), _figure(tier.written_bytes / MIB))
        held = "" if tier.held_bytes is None else rounded_size(tier.held_bytes)
        state = "" if tier.state == "serving" else f" ({tier.state})"
        table.add_row(f"{tier.name}{state}", held, _figure(tier.hits), hit_rate(asdict(tier)), *numbers, *moved, waits)
    return table


def _figure(rate: float) -> str:
    return f"{rate:,.1f}" if rate < 100 else f"{rate:,.0f}"
