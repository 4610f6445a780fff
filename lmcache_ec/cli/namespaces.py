# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec namespaces`: how much each namespace takes in each tier, and removal of those that no engine uses."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import typer

from lmcache_ec.cli.arguments import Extra, number
from lmcache_ec.cli.named_tiers import NamedTier, wanted_tiers
from lmcache_ec.cli.progress import confirmed
from lmcache_ec.cli.status import engines
from lmcache_ec.cli.wording import counted, table
from lmcache_ec.key import check_namespace
from lmcache_ec.link import STATUS_PREFIX
from lmcache_ec.sizes import precise_size
from lmcache_ec.tiers.base import NamespaceUse, message

_DAY_S = 86_400
_HEADINGS = ("tier", "namespace", "entries", "size", "last used", "in use here")


@dataclass(frozen=True, slots=True)
class Row:
    """A namespace in a tier. `in_use_by`: the store processes of engines on this host that currently use it."""

    tier: str
    use: NamespaceUse
    in_use_by: Sequence[int]

    @property
    def moment(self) -> float | None:
        """When it was last used, as far as the tier knows (Unix)."""
        return self.use.written if self.use.used is None else self.use.used

    @property
    def last_used(self) -> str:
        if self.moment is None:
            return "unknown"
        text = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.moment))
        return text if self.use.used is not None else f"{text} (written)"

    @property
    def as_record(self) -> dict[str, Any]:
        return {"tier": self.tier, **asdict(self.use), "in_use_by": list(self.in_use_by)}


@dataclass(slots=True)
class Report:
    """What was found and done. `errors` and `notes` are by tier; `removed` has tier, namespace and entries."""

    rows: list[Row] = field(default_factory=list)
    removed: list[dict[str, Any]] = field(default_factory=list)
    looked: list[str] = field(default_factory=list)
    """Tiers that answered."""
    errors: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    refusal: str = ""
    """Why nothing is removed; empty if removal was not requested, or was done."""

    def to_json(self) -> str:
        rest = {"removed": self.removed, "errors": self.errors, "notes": self.notes, "refusal": self.refusal}
        return json.dumps({"namespaces": [row.as_record for row in self.rows], **rest}, indent=2)


def find_and_remove(
    remove: str = typer.Option("", "--remove", metavar="NAMESPACE", help="Remove this namespace; asks first."),
    remove_unused: bool = typer.Option(False, "--remove-unused", help="Remove everything that --unused-for finds."),
    unused_for: float = typer.Option(
        0.0,
        "--unused-for",
        parser=number(0),
        metavar="DAYS",
        help="Only those that no tier reports as used in this many days.",
    ),
    tier: str = typer.Option("", "--tier", metavar="NAME", help="Look only at this tier."),
    yes: bool = typer.Option(False, "--yes", help="Do not ask first."),
    force: bool = typer.Option(False, "--force", help="Remove even what an engine on this host uses now."),
    extra: Extra = "{}",
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Show how much each namespace takes in the tiers of this configuration, and when it was last used.

    Changes nothing, unless you ask for a removal. The exit status is 1 if a tier could not be reached, or if something
    that should have been removed was not.
    """
    removal = bool(remove or remove_unused)
    _check_options(remove, remove_unused, unused_for, needs_yes=removal and as_json and not yes)
    tiers = wanted_tiers(extra, tier)
    look_and_remove(tiers, remove, unused_for, removal=removal, yes=yes, force=force, as_json=as_json)


def look_and_remove(
    tiers: Sequence[NamedTier],
    namespace: str,
    unused_for: float,
    *,
    removal: bool,
    yes: bool,
    force: bool,
    as_json: bool,
) -> NoReturn:
    """Print what the tiers hold of a namespace, or of all; with `removal`, remove it after asking. Ends the
    command."""
    using, silent = _in_use()
    report = _looked(tiers, using)
    _select(report, namespace, unused_for)
    if not as_json:
        _print(report, unused_for, namespace, removal=removal)
    if removal:
        report.refusal = _refusal(report, namespace, unused_for, () if force else silent, force=force)
        if report.rows and not report.refusal and (yes or confirmed(_question(report))):
            _remove(report, tiers, err=as_json)
    if as_json:
        typer.echo(report.to_json())
    elif report.refusal:
        typer.echo(report.refusal, err=True)
    raise typer.Exit(1 if report.errors or report.refusal else 0)


# ---- what is there


def _check_options(remove: str, remove_unused: bool, unused_for: float, *, needs_yes: bool) -> None:
    if remove:
        try:
            check_namespace(remove)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--remove") from None
    if remove_unused and not unused_for:
        raise typer.BadParameter("give the number of days, above 0, with --unused-for", param_hint="--remove-unused")
    if needs_yes:
        raise typer.BadParameter("required with --json, which cannot ask", param_hint="--yes")


def _in_use() -> tuple[dict[str, list[int]], list[int]]:
    """For the engines on this host: namespace to store processes; and the store processes that do not report theirs."""
    using: dict[str, list[int]] = {}
    for engine in engines():
        using.setdefault(engine["namespace"], []).append(engine["pid"])
    found = set(map(int, re.findall(rf"@{STATUS_PREFIX}(\d+)-", Path("/proc/net/unix").read_text())))
    return using, sorted(found.difference(*using.values()))


def _looked(tiers: Sequence[NamedTier], using: Mapping[str, Sequence[int]]) -> Report:
    report = Report()
    for tier in tiers:
        if tier.unlisted:
            report.notes[tier.name] = f"{tier.where}: {tier.unlisted}"
            continue
        try:
            with tier.opened() as opened:
                uses = list(opened.namespaces())
        except (OSError, ValueError) as error:
            report.errors[tier.name] = message(error)
            continue
        report.looked.append(tier.name)
        rows = [Row(tier.name, use, using.get(use.namespace, ())) for use in uses]
        report.rows += sorted(rows, key=lambda row: (row.moment or 0.0, row.use.namespace))
    return report


def _select(report: Report, namespace: str, unused_for: float) -> None:
    """Keep what was requested. A namespace is used if a tier reports it or does not know, or an engine here uses it."""
    used = {
        row.use.namespace
        for row in report.rows
        if row.in_use_by or row.moment is None or row.moment > time.time() - unused_for * _DAY_S
    }
    report.rows = [
        row
        for row in report.rows
        if namespace in ("", row.use.namespace) and not (unused_for and row.use.namespace in used)
    ]


# ---- what is removed


def _refusal(report: Report, namespace: str, unused_for: float, silent: Sequence[int], *, force: bool) -> str:
    """Why nothing may be removed; empty if it may."""
    if namespace and not report.rows:
        return f"{namespace}: nothing to remove, " + (
            f"no tier here has it, or it was used in the last {unused_for:g} days"
            if unused_for
            else f"none of the tiers that were looked at has it: {', '.join(report.looked)}"
        )
    if report.errors and unused_for:
        names = ", ".join(report.errors)
        return f"nothing is removed: {names} may know of a later use (--tier lets one tier decide alone)"
    if silent:
        pids = ", ".join(map(str, silent))
        return (
            f"nothing is removed: store process {pids} on this host does not report its namespace (it may be another "
            f"user's); --force removes anyway"
        )
    for row in report.rows:
        if row.in_use_by and not force:
            pids = ", ".join(map(str, row.in_use_by))
            return (
                f"{row.use.namespace}: in use by the engine of store process {pids} on this host; --force removes it "
                f"anyway, and the engine encodes again"
            )
    return ""


def _question(report: Report) -> str:
    entries, size = (sum(numbers) for numbers in zip(*((r.use.entries, r.use.bytes) for r in report.rows), strict=True))
    return f"Remove {counted(entries, 'entry')}, {precise_size(size)}? (Engines on other hosts are not checked.)"


def _remove(report: Report, tiers: Sequence[NamedTier], *, err: bool) -> None:
    """Remove, and print each removal as it is done; an error of one tier does not stop the others."""
    for tier in tiers:
        names = [row.use.namespace for row in report.rows if row.tier == tier.name]
        if not names:
            continue
        try:
            with tier.opened() as opened:
                for name in names:
                    entries = opened.remove(name)
                    report.removed.append({"tier": tier.name, "namespace": name, "entries": entries})
                    typer.echo(f"{tier.name}: removed {counted(entries, 'entry')} of {name}", err=err)
        except (OSError, ValueError) as error:
            report.errors[tier.name] = message(error)
            typer.echo(f"{tier.name}: {message(error)}", err=True)


# ---- what is printed


def _print(report: Report, unused_for: float, namespace: str, *, removal: bool) -> None:
    """Print what was found. If a namespace named for removal is nowhere, the refusal states that."""
    rows = [_cells(row) for row in report.rows]
    if rows:
        typer.echo("\n".join(table([_HEADINGS, *rows])))
    elif not (removal and namespace) and not report.errors:
        days = f"{unused_for:g} {'day' if unused_for == 1 else 'days'}"
        empty = "There is nothing to remove." if removal else "No namespace was found."
        typer.echo(f"No namespace has been unused for {days}." if unused_for else empty)
    for texts in (report.notes, report.errors):
        for name, text in texts.items():
            typer.echo(f"{name}: {text}", err=True)


def _cells(row: Row) -> tuple[str, ...]:
    use = row.use
    size, in_use = precise_size(use.bytes), _engines(row.in_use_by)
    return row.tier, use.namespace, f"{use.entries:,}", size, row.last_used, in_use


def _engines(pids: Sequence[int]) -> str:
    return f"by {', '.join(map(str, pids))}" if pids else "no"
