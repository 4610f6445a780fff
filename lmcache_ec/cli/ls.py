# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec ls`: which entries the tiers hold."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import typer

from lmcache_ec import entry
from lmcache_ec.cli.arguments import Extra, whole
from lmcache_ec.cli.entries import Held, Namespaces, OpenTiers, check_namespaces, header_of, held_in
from lmcache_ec.cli.named_tiers import wanted_tiers
from lmcache_ec.cli.progress import Progress, results
from lmcache_ec.cli.wording import counted, span, table
from lmcache_ec.key import ObjectName
from lmcache_ec.sizes import precise_size
from lmcache_ec.tiers.base import Tier, TierError, message

_HEADINGS = ("sha256 of the identifier", "size", "age", "tiers", "identifier")
_SHOWN = 100
_FOREIGN = "names another entry: inspect it"
_THREADS = 8


@dataclass(slots=True)
class Row:
    """An entry, in one or several tiers. `modified` is the latest time of all tiers. `identifier` is empty if it was
    not read, or belongs to another name (`foreign`)."""

    name: ObjectName
    length: int
    modified: float
    tiers: list[str] = field(default_factory=list)
    identifier: str = ""
    foreign: bool = False

    def as_record(self) -> dict[str, object]:
        return {
            "namespace": self.name.namespace,
            "sha256": self.name.digest.hex(),
            "object": self.name.object_name,
            "bytes": self.length,
            "modified": self.modified,
            "tiers": self.tiers,
            "identifier": self.identifier or None,
        }


def list_entries(
    namespaces: Namespaces = None,
    tier: str = typer.Option("", "--tier", metavar="NAME", help="Look only at this tier."),
    count: int = typer.Option(
        _SHOWN, "--count", parser=whole(0), metavar="N", help="At most this many, the newest first; 0: all."
    ),
    identifiers: bool = typer.Option(
        False, "--identifiers", help="Also read identifiers from slow tiers: one request to S3 per entry."
    ),
    extra: Extra = "{}",
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """List the entries of the tiers: size, age and tiers of each, and its identifier where that is cheap to read.

    The age is the time since the last use; in S3, since the write. Each identifier is checked against its entry's name;
    nothing else is verified: see `inspect` and `verify`. The exit status is 1 if a tier could not be reached, or if no
    tier has a namespace that you name.
    """
    check_namespaces(namespaces or ())
    with OpenTiers(wanted_tiers(extra, tier)) as opened:
        found = _found(opened, namespaces or ())
        rows = sorted(found.values(), key=lambda row: (-row.modified, row.name))[: count or None]
        _read_identifiers(rows, opened, slow=identifiers)
    opened.miss(namespaces or (), {name.namespace for name in found})
    if as_json:
        listed = {"entries": [row.as_record() for row in rows], "found": len(found)}
        typer.echo(json.dumps({**listed, "errors": opened.errors, "notes": opened.notes}, indent=2))
    else:
        _print(rows, len(found))
        opened.report()
    raise typer.Exit(1 if opened.errors else 0)


def _found(opened: OpenTiers, namespaces: Sequence[str]) -> dict[ObjectName, Row]:
    found: dict[ObjectName, Row] = {}
    progress = Progress(lambda passed_s: f"{counted(len(found), 'entry')} listed so far")
    for name, tier in opened.tiers.items():
        try:
            for held in results(held_in(tier, namespaces), _itself, 1, progress.tick):
                row = found.setdefault(held.name, Row(held.name, held.length, held.modified))
                row.modified = max(row.modified, held.modified)
                row.tiers.append(name)
        except TierError as error:
            opened.errors[name] = message(error)
    progress.clear()
    return found


def _itself(held: Held) -> Held:
    return held


def _read_identifiers(rows: Sequence[Row], opened: OpenTiers, *, slow: bool) -> None:
    """Read each from its first tier that answers quickly; with `slow`, from its first tier."""

    def quick(name: str) -> bool:
        kind = opened.named[name].kind
        return slow or kind is None or kind.quick

    def read(asked: tuple[Row, Tier]) -> None:
        row, tier = asked
        try:
            header = header_of(tier, row.name)
            identifier = header.identifier if header else ""
            row.foreign = (
                bool(identifier)
                and hashlib.sha256(identifier.encode(errors="surrogatepass")).digest() != row.name.digest
            )
            row.identifier = "" if row.foreign else identifier
        except (TierError, entry.EntryError):
            pass  # `inspect` and `verify` report what is wrong with it

    readable = [(row, name) for row in rows if (name := next(filter(quick, row.tiers), None)) is not None]
    if not readable:
        return
    progress = Progress(lambda passed_s: f"reading the headers of {counted(len(readable), 'entry')}")
    for _ in results(((row, opened.tiers[name]) for row, name in readable), read, _THREADS, progress.tick):
        pass
    progress.clear()


def _print(rows: Sequence[Row], found: int) -> None:
    now = time.time()
    for namespace in dict.fromkeys(row.name.namespace for row in rows):
        cells = [
            (
                row.name.digest.hex(),
                precise_size(row.length),
                span(now - row.modified),
                ", ".join(row.tiers),
                _FOREIGN if row.foreign else printable(row.identifier),
            )
            for row in rows
            if row.name.namespace == namespace
        ]
        typer.echo("\n".join((namespace, *table([_HEADINGS, *cells], indent="  "), "")))
    newest = "is" if len(rows) == 1 else f"{len(rows):,} are"
    more = f" Only the newest {newest} listed; --count 0 lists all."
    typer.echo(f"{counted(found, 'entry')}." + (more if found > len(rows) else ""))


def printable(text: str) -> str:
    """An identifier, which may be any text, on one line without terminal control characters."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
