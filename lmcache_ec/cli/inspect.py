# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec inspect`: the header of one entry, which tiers have it, and whether it verifies there."""

from __future__ import annotations

import calendar
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import typer

from lmcache_ec import entry
from lmcache_ec.cli.arguments import Extra
from lmcache_ec.cli.entries import OpenTiers, check_namespaces, header_of, signing_of, verified
from lmcache_ec.cli.ls import printable
from lmcache_ec.cli.named_tiers import wanted_tiers
from lmcache_ec.cli.wording import span, table
from lmcache_ec.key import EncoderCacheKey, EntryName, ObjectName, parse_object_name
from lmcache_ec.signing import SigningKey
from lmcache_ec.sizes import precise_size
from lmcache_ec.standalone.layout import shape_of
from lmcache_ec.tiers.base import Tier, TierError, message

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Copy:
    """What a tier has under a name. `problem` is empty if it is an entry that verifies, as far as it was read;
    `header` is None if it could not be read."""

    tier: str
    name: EntryName
    length: int
    header: entry.Header | None
    problem: str

    def as_record(self) -> dict[str, object]:
        return {"tier": self.tier, "object": self.name.object_name, "bytes": self.length, "problem": self.problem}


def inspect(
    wanted: str = typer.Argument(
        ..., metavar="ENTRY", help="The entry's identifier, the sha256 of that, or its object name."
    ),
    namespace: str = typer.Option(
        "", "--namespace", metavar="NAMESPACE", help="Look only in this one; by default in all that the tiers list."
    ),
    tier: str = typer.Option("", "--tier", metavar="NAME", help="Look only at this tier."),
    header_only: bool = typer.Option(False, "--header-only", help="Do not read and verify the payload."),
    extra: Extra = "{}",
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Show an entry's header, which tiers have the entry, and whether it verifies there.

    The header is that of a copy that verifies. If none does, or with --header-only, it is not verified, and the output
    says so: anyone who can write to the tier may have written it. The exit status is 1 if no tier has the entry, if it
    does not verify in one of them, or if a tier could not be reached.
    """
    check_namespaces([namespace] if namespace else [], "--namespace")
    _check_wanted(wanted, namespace)
    signing = signing_of(extra)
    with OpenTiers(wanted_tiers(extra, tier), listed=False) as opened:
        copies = list(_copies(opened, wanted, namespace, signing, whole=not header_only))
    absent = "" if copies else _absent(printable(wanted), namespace, tier, opened)
    if as_json:
        record = _record(copies, opened, whole=not header_only)
        typer.echo(json.dumps({**record, "problem": absent}, indent=2))
    else:
        for name in dict.fromkeys(copy.name.object_name for copy in copies):
            _print([copy for copy in copies if copy.name.object_name == name], whole=not header_only)
        if absent:
            typer.echo(absent, err=True)
        opened.report()
    raise typer.Exit(1 if opened.errors or not copies or any(copy.problem for copy in copies) else 0)


def _check_wanted(wanted: str, namespace: str) -> None:
    """End the command if no entry can have this name."""
    if not wanted:
        raise typer.BadParameter("must not be empty", param_hint="ENTRY")
    name = parse_object_name(wanted)
    if name is not None and namespace not in ("", name.namespace):
        raise typer.BadParameter(
            f"{namespace}, but ENTRY is the object name of an entry of {name.namespace}: give one of both",
            param_hint="--namespace",
        )


def _absent(wanted: str, namespace: str, tier: str, opened: OpenTiers) -> str:
    where = f" in namespace {namespace}" if namespace else ""
    readable = "No tier that could be read has" if opened.errors else "No tier has"
    holder = f"{tier} does not have" if tier and not opened.errors else readable
    return f"{holder} {wanted!r}{where}."


def _copies(
    opened: OpenTiers, wanted: str, namespace: str, signing: SigningKey | None, *, whole: bool
) -> Iterator[Copy]:
    for tier_name, tier in opened.tiers.items():
        try:
            for name in _names(tier, wanted, namespace):
                length = tier.contains(name)
                if length is not None:
                    yield _copy(tier_name, tier, name, length, signing, whole=whole)
        except TierError as error:
            opened.errors[tier_name] = message(error)


def _names(tier: Tier, wanted: str, namespace: str) -> Iterator[EntryName]:
    """The names that the entry may have in a tier."""
    name = parse_object_name(wanted)
    if name is not None:
        yield name
        return
    for each in [namespace] if namespace else tier.namespace_names():
        if _is_text(wanted):
            yield EncoderCacheKey(each, wanted)
        if _SHA256.fullmatch(wanted):
            yield ObjectName(each, bytes.fromhex(wanted))


def _is_text(argument: str) -> bool:
    """Whether it is UTF-8, as every identifier is."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def _copy(tier_name: str, tier: Tier, name: EntryName, length: int, signing: SigningKey | None, *, whole: bool) -> Copy:
    header, problem = None, ""
    try:
        header = header_of(tier, name)
        if header is not None and whole:
            header, problem = verified(tier, name, length, signing) or header, ""
    except entry.OtherVersion as error:
        problem = f"cannot be judged here: {error}"
    except entry.EntryError as error:
        problem = f"does not verify: {error}"
    return Copy(tier_name, name, length, header, problem)


def _shown(copies: Sequence[Copy]) -> entry.Header | None:
    """The header to show: that of a copy that verifies, if one does."""
    ordered = sorted(copies, key=lambda copy: bool(copy.problem))
    return next((copy.header for copy in ordered if copy.header), None)


def _is_verified(copies: Sequence[Copy], whole: bool) -> bool:
    return whole and any(copy.header and not copy.problem for copy in copies)


def _record(copies: Sequence[Copy], opened: OpenTiers, *, whole: bool) -> dict[str, object]:
    header = _shown(copies)
    described = header and {
        "identifier": header.identifier,
        "namespace": header.namespace,
        "shape": _shape(header.spec),
        "dtype": header.spec.dtype,
        "layout": header.spec.layout,
        "created": header.created,
        "producer": header.producer,
        "digest": header.digest,
        "bytes": header.length,
    }
    tiers = [copy.as_record() for copy in copies]
    verified = _is_verified(copies, whole)
    return {"header": described, "verified": verified, "tiers": tiers, "errors": opened.errors, "notes": opened.notes}


def _print(copies: Sequence[Copy], *, whole: bool) -> None:
    rows = [("object", copies[0].name.object_name)]
    header = _shown(copies)
    if header is not None:
        spec = header.spec
        if not _is_verified(copies, whole):
            rows.append(("header", "not verified: do not rely on what follows"))
        rows += [
            ("identifier", printable(header.identifier)),
            ("namespace", printable(header.namespace)),
            ("shape", str(_shape(spec))),
            ("dtype", spec.dtype),
            *([("layout", spec.layout)] if shape_of(spec) is None else []),
            ("size", precise_size(header.length)),
            ("created", f"{printable(header.created)}{_ago(header.created)}"),
            ("written by", printable(header.producer)),
            ("digest", printable(header.digest)),
        ]
    good = "verifies" if whole else "has it"
    rows += [(copy.tier, copy.problem or good) for copy in copies]
    typer.echo("\n".join((*table(rows), "")))


def _shape(spec: entry.TensorSpec) -> list[int]:
    """The stored tensor's shape, or rows and width of its bytes if only the writer knows their layout."""
    shape = shape_of(spec)
    return [spec.rows, spec.width] if shape is None else list(shape)


def _ago(created: str) -> str:
    try:
        written = calendar.timegm(time.strptime(created, "%Y-%m-%dT%H:%M:%SZ"))
    except ValueError:
        return ""  # its writer may have put anything there
    return f", {span(time.time() - written)} ago"
