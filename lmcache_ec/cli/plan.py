# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec plan`: what tiers of which sizes would save, before they are bought."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lmcache_ec.cli.arguments import number, whole
from lmcache_ec.cli.wording import span
from lmcache_ec.plan.money import Prices, monthly, parse_prices
from lmcache_ec.plan.picture import draw
from lmcache_ec.plan.simulate import MEDIA, POLICIES, ROUTINGS, Outcome, Scenario, Simulation
from lmcache_ec.plan.synthetic import NAMED, generate, parse
from lmcache_ec.plan.traces import Trace, TraceError, read, sampled, write
from lmcache_ec.sizes import GIB, precise_size

_DEFAULT_TIERS = ["gpu=0.05,cpu=2", "gpu=0.05,cpu=8", "gpu=0.05,cpu=2,disk=16", "gpu=0.05,cpu=2,disk=16,s3=inf"]
_UNBOUNDED = 1000
"""In characters: wider than any table."""
_FEW_ENTRIES = 50
"""With fewer entries in the sample, a tier's results mean little."""


def plan(
    trace: str = typer.Argument(..., metavar="TRACE", help=f"A CSV file, or {', '.join(NAMED)} with :key=value,…"),
    tiers: list[str] = typer.Option(  # noqa: B008
        _DEFAULT_TIERS,
        "--tiers",
        metavar="NAME=GIB,…",
        help="Sizes of gpu, cpu, disk, redis, s3, once per row; redis and s3 are for all replicas together.",
    ),
    policies: list[str] = typer.Option(  # noqa: B008
        ["lru"],
        "--policy",
        metavar="NAME",
        help="How memory evicts, lru or cost; give it twice for both.",
    ),
    replicas: int = typer.Option(
        1, "--replicas", parser=whole(1, 10_000), metavar="N", help="Engines that serve the trace together."
    ),
    routing: str = typer.Option(
        "random", "--routing", metavar="NAME", help=f"How requests are spread over them: {' or '.join(ROUTINGS)}."
    ),
    sample: float = typer.Option(
        1.0, "--sample", parser=number(1e-6, 1), metavar="SHARE", help="Replay this share of the identifiers."
    ),
    prices: list[str] = typer.Option([], "--price", metavar="NAME=NUMBER", help="A price; --json shows all of them."),  # noqa: B008
    picture: Path | None = typer.Option(None, "--picture", metavar="FILE", help="Write an SVG file here."),  # noqa: B008
    keep: Path | None = typer.Option(  # noqa: B008
        None, "--write-trace", metavar="FILE", help="Write what is replayed to this CSV file."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Estimate what tiers of these sizes would save for a trace: hits by tier, encoder time, network and money.

    A trace has the columns time_s, identifier, bytes, encode_s. The exit status is 2 if it cannot be read.
    """
    try:
        paid = parse_prices(prices)
        _check_writable(picture, "--picture")
        _check_writable(keep, "--write-trace")
        scenarios = [
            Scenario(
                _sizes(text), _one_of(policy, POLICIES, "--policy"), replicas, _one_of(routing, ROUTINGS, "--routing")
            )
            for text in tiers
            for policy in policies
        ]
        simulations = [Simulation(scenario, sample) for scenario in scenarios]
        batches = _batches(trace, sample)
        for batch in batches if keep is None else write(batches, keep):
            for simulation in simulations:
                simulation.replay(batch)
    except OSError as error:
        typer.echo(f"{error.filename or trace}: {error.strerror}", err=True)
        raise typer.Exit(2) from None
    except TraceError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    outcomes = [simulation.outcome for simulation in simulations]
    if not outcomes[0].requests:
        typer.echo(f"{trace}: no request to replay", err=True)
        raise typer.Exit(2)
    labels = [_label(scenario, several=len(policies) > 1) for scenario in scenarios]
    if picture is not None:
        picture.write_text(draw(labels, outcomes), encoding="utf-8")
    if as_json:
        rows = [_record(outcome, paid, sample) for outcome in outcomes]
        rest = {"scenarios": rows, "notes": _notes(outcomes, sample)}
        typer.echo(json.dumps({"prices": _prices(paid), "sample": sample, **rest}, indent=2))
    else:
        _show(labels, outcomes, paid, sample)


def _check_writable(path: Path | None, option: str) -> None:
    """Check before the replay, which may take long."""
    try:
        if path is not None:
            path.open("ab").close()
    except OSError as error:
        raise TraceError(f"{option} {path}: must be a file that can be written: {error.strerror}") from None


def _batches(trace: str, share: float) -> Trace:
    path = Path(trace)
    if path.exists() or path.suffix in (".csv", ".gz"):
        return read(path) if share == 1 else sampled(read(path), share)
    return generate(parse(trace), share)


def _sizes(text: str) -> dict[str, float]:
    """Name -> bytes."""
    sizes: dict[str, float] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in MEDIA:
            raise TraceError(f"--tiers {text}: no tier is called {name!r}: must be one of {', '.join(MEDIA)}")
        if name in sizes:
            raise TraceError(f"--tiers {text}: {name} is given twice: must be given once")
        if not re.fullmatch(r"\d+\.?\d*|\.\d+|inf", size):
            raise TraceError(f"--tiers {text}: {name}={size}: must be a number of GiB, 0 or more, or inf")
        sizes[name] = float(size) * GIB
    return sizes


def _one_of(text: str, known: Sequence[str], option: str) -> str:
    if text.lower() not in known:
        raise TraceError(f"{option} {text}: must be {' or '.join(known)}")
    return text.lower()


def _label(scenario: Scenario, several: bool) -> str:
    sizes = ", ".join(
        f"{name} {'any' if math.isinf(size) else f'{size / GIB:g}'}" for name, size in scenario.tiers.items() if size
    )
    return f"{sizes}: {scenario.policy}" if several else sizes


def _prices(prices: Prices) -> dict[str, float]:
    return {name: float(getattr(prices, name)) for name in Prices.__dataclass_fields__}


def _record(outcome: Outcome, prices: Prices, share: float) -> dict[str, object]:
    scenario = outcome.scenario
    costs = monthly(outcome, prices, share)
    return {
        "tiers_gib": {n: None if math.isinf(size) else size / GIB for n, size in scenario.tiers.items()},
        "policy": scenario.policy,
        "replicas": scenario.replicas,
        "routing": scenario.routing,
        "requests": round(outcome.requests / share),
        "hits": {name: round(served.requests / share) for name, served in outcome.by_tier.items()},
        "encodes": round(outcome.encoder.requests / share),
        "encoder_s": outcome.encoder.encode_s / share,
        "encoder_s_saved": outcome.saved_s / share,
        "saved_share": outcome.saved_share,
        "read_s": sum(served.read_s for served in outcome.by_tier.values()) / share,
        "network_bytes": round(outcome.network_bytes / share),
        "cost_per_month": {
            name: cost if math.isfinite(cost) else None
            for name, cost in (costs | {"total": sum(costs.values())}).items()
        },
    }


def _show(labels: Sequence[str], outcomes: Sequence[Outcome], prices: Prices, share: float) -> None:
    console = Console(highlight=False, width=max(Console().width, 120))
    first = outcomes[0]
    part = "" if share == 1 else f", estimated from {first.requests:,} of them"
    console.print(
        f"{first.requests / share:,.0f} requests in {span(first.end_s - first.begin_s)}{part}; sizes in GiB",
        markup=False,
    )
    used = _used(outcomes)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("tiers", no_wrap=True)
    for column in (*used, "encoded", "encoder h", "saved", "network", "cost per month"):
        table.add_column(column, justify="right", no_wrap=True)
    for label, outcome in zip(labels, outcomes, strict=True):
        hits = [
            f"{100 * outcome.by_tier[name].requests / outcome.requests:.1f} %" if name in outcome.by_tier else ""
            for name in used
        ]
        table.add_row(
            label,
            *hits,
            f"{100 * outcome.encoder.requests / outcome.requests:.1f} %",
            f"{outcome.encoder.encode_s / share / 3600:,.2f}",
            f"{100 * outcome.saved_share:.1f} %",
            precise_size(round(outcome.network_bytes / share)),
            f"{total:,.0f}" if math.isfinite(total := sum(monthly(outcome, prices, share).values())) else "-",
        )
    unbounded = console.options.update_width(_UNBOUNDED)
    console.width = max(console.width, console.measure(table, options=unbounded).maximum)  # else figures are cut off
    console.print(table)
    for note in _notes(outcomes, share):
        console.print(note, markup=False)


def _notes(outcomes: Sequence[Outcome], share: float) -> list[str]:
    """Which tiers are too small in the sample for meaningful results."""
    first, found = outcomes[0], []
    for name in _used(outcomes):
        mean = (first.encoder.bytes + sum(served.bytes for served in first.by_tier.values())) / first.requests
        sizes = [outcome.scenario.tiers[name] * share for outcome in outcomes if outcome.scenario.tiers.get(name)]
        if share < 1 and min(sizes) / mean < _FEW_ENTRIES:
            room = f"{min(sizes) / mean:.0f}"
            found.append(f"{name}: in the sample there is room for {room} entries; take a larger --sample")
    return found


def _used(outcomes: Sequence[Outcome]) -> list[str]:
    return [name for name in MEDIA if any(name in outcome.by_tier for outcome in outcomes)]
