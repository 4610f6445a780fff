# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec verify`: whether the entries of the tiers are unchanged since they were sealed."""

from __future__ import annotations

import enum
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from random import SystemRandom

import typer

from lmcache_ec import entry
from lmcache_ec.cli.arguments import Extra, whole
from lmcache_ec.cli.entries import (
    Held,
    Namespaces,
    OpenTiers,
    check_namespaces,
    held_in,
    signing_of,
    verified,
)
from lmcache_ec.cli.named_tiers import wanted_tiers
from lmcache_ec.cli.progress import INTERRUPTED, Progress, results
from lmcache_ec.cli.wording import counted, span
from lmcache_ec.signing import SigningKey
from lmcache_ec.sizes import precise_size
from lmcache_ec.tiers.base import Tier, TierError, TierUnreachable, message

_THREADS = 4
_LISTED = 100
"""How many entries of each tier the report names; all are counted."""
_FAILURES = 8
"""After this many consecutive unreachable errors the verification of a tier ends."""
_chance = SystemRandom()
_SAMPLE = re.compile(r"([0-9]+)|([0-9]+(?:\.[0-9]+)?)%")


class Verdict(enum.StrEnum):
    GOOD = "good"
    CORRUPT = "corrupt"
    NOT_SIGNED = "not_signed"
    """Unsigned, or signed with another key than the configured one. Others may accept it."""
    UNCHECKED = "signature_not_checked"
    """The digest is correct; the namespace belongs to another key, or to none."""
    OTHER_VERSION = "other_version"
    UNREADABLE = "unreadable"
    GONE = "gone"
    """Evicted, expired or removed since it was listed."""


_BAD = (Verdict.CORRUPT, Verdict.NOT_SIGNED, Verdict.UNREADABLE)


@dataclass(frozen=True, slots=True)
class Judged:
    """One entry. `problem` is why it is not good; `lost`: the store did not answer."""

    held: Held
    verdict: Verdict
    problem: str = ""
    removed: bool = False
    lost: bool = False


@dataclass(slots=True)
class Report:
    """For one tier: entries listed, entries read by verdict, bytes read, and the first that are not good."""

    listed: int | None = None
    """None until the listing has ended."""
    verdicts: Counter[str] = field(default_factory=Counter)
    removed: int = 0
    bytes: int = 0
    problems: list[dict[str, str]] = field(default_factory=list)
    namespaces: set[str] = field(default_factory=set)
    """Those of the listed entries."""

    @property
    def read(self) -> int:
        return self.verdicts.total() - self.verdicts[Verdict.GONE]

    @property
    def failed(self) -> bool:
        return any(self.verdicts[verdict] for verdict in _BAD)

    def listing(self, found: Iterator[Held]) -> Iterator[Held]:
        """Yield the same entries, and count them."""
        number = 0
        for held in found:
            number += 1
            self.namespaces.add(held.name.namespace)
            yield held
        self.listed = number

    def add(self, judged: Judged) -> None:
        self.verdicts[judged.verdict] += 1
        self.removed += judged.removed
        self.bytes += judged.held.length if judged.verdict is not Verdict.GONE else 0
        if judged.problem and len(self.problems) < _LISTED:
            found = {"object": judged.held.name.object_name, "verdict": str(judged.verdict), "problem": judged.problem}
            self.problems.append(found)

    def as_record(self) -> dict[str, object]:
        counts = {str(verdict): self.verdicts[verdict] for verdict in Verdict}
        return {
            "listed": self.listed,
            **counts,
            "removed": self.removed,
            "bytes": self.bytes,
            "problems": self.problems,
        }


def verify(
    namespaces: Namespaces = None,
    tier: str = typer.Option("", "--tier", metavar="NAME", help="Verify only this tier."),
    sample: str = typer.Option(
        "100%",
        "--sample",
        metavar="N|P%",
        help="Only this many entries of each tier, or about this share: at random, at least one.",
    ),
    remove: bool = typer.Option(False, "--remove", help="Delete what is corrupt; entries of other versions are kept."),
    threads: int = typer.Option(
        _THREADS, "--threads", parser=whole(1, 256), metavar="N", help="Entries to read at the same time."
    ),
    extra: Extra = "{}",
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Check that the entries of the tiers are intact: read them whole and compare them with their digests.

    Verifying does not count as a use. Ctrl-C ends it at any time and shows what was found so far. The exit status is
    1 if an entry is corrupt or unreadable, a tier could not be reached, or no tier has a namespace that you name; 130
    after Ctrl-C.
    """
    check_namespaces(namespaces or ())
    choose = _sampling(sample)
    signing = signing_of(extra)
    reports: dict[str, Report] = {}
    interrupted = False
    with OpenTiers(wanted_tiers(extra, tier)) as opened:
        for name, one in opened.tiers.items():
            report = reports[name] = Report()
            progress = Progress(partial(_progress, name, report))
            job = partial(_judged, one, signing, remove=remove)
            chosen = choose(report.listing(held_in(one, namespaces or ())))
            try:
                _collect(results(chosen, job, threads, progress.tick), report)
            except TierError as error:
                opened.errors[name] = message(error)
            except KeyboardInterrupt:
                interrupted = True
            progress.clear()
            if not as_json:
                _print(name, report, progress.passed_s)
            if interrupted:
                break
    if not interrupted:
        opened.miss(namespaces or (), frozenset[str]().union(*(report.namespaces for report in reports.values())))
    if as_json:
        tiers = {name: report.as_record() for name, report in reports.items()}
        rest = {"errors": opened.errors, "notes": opened.notes, "interrupted": interrupted}
        typer.echo(json.dumps({"tiers": tiers, **rest}, indent=2))
    else:
        opened.report()
    if interrupted:
        typer.echo("interrupted: the rest was not checked", err=True)
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(1 if opened.errors or any(report.failed for report in reports.values()) else 0)


# ---- which entries


class _Sampling:
    """Chooses a number of entries; or each with the same probability, in the order of the listing and without waiting
    for its end, but at least one if there are any."""

    def __init__(self, number: int | None, share: float) -> None:
        self._number = number
        self._share = share

    def __call__(self, listed: Iterator[Held]) -> Iterator[Held]:
        return self._by_share(listed) if self._number is None else self._so_many(listed, self._number)

    def _by_share(self, listed: Iterator[Held]) -> Iterator[Held]:
        some, instead = False, list[Held]()
        for index, held in enumerate(listed):
            if self._share >= 1 or _chance.random() < self._share:
                some = True
                yield held
            elif not some and not _chance.randrange(index + 1):
                instead = [held]
        if not some:
            yield from instead

    @staticmethod
    def _so_many(listed: Iterator[Held], number: int) -> Iterator[Held]:
        chosen: list[Held] = []
        for index, held in enumerate(listed):
            if index < number:
                chosen.append(held)
            elif (place := _chance.randrange(index + 1)) < number:
                chosen[place] = held
        yield from chosen


def _sampling(text: str) -> _Sampling:
    match = _SAMPLE.fullmatch(text)
    if match is None or not 0 < float(match[1] or match[2]) <= (100 if match[2] else math.inf):
        raise typer.BadParameter(
            f"must be a number of entries or a percentage above 0 and up to 100, like 1000 or 5%, not {text!r}",
            param_hint="--sample",
        )
    return _Sampling(int(match[1]), 0.0) if match[1] else _Sampling(None, float(match[2]) / 100)


# ---- one entry


def _judged(tier: Tier, signing: SigningKey | None, held: Held, *, remove: bool) -> Judged:
    whole = Verdict.GOOD if signing is None or signing.signs(held.name.namespace) else Verdict.UNCHECKED
    try:
        return Judged(held, whole if verified(tier, held.name, held.length, signing) else Verdict.GONE)
    except entry.OtherVersion as error:
        return Judged(held, Verdict.OTHER_VERSION, str(error))
    except entry.EntryError as error:
        if error.reason is entry.Reason.SIGNATURE:
            return Judged(held, Verdict.NOT_SIGNED, str(error))
        return Judged(held, Verdict.CORRUPT, str(error), remove and _removed(tier, held))
    except TierError as error:
        return Judged(held, Verdict.UNREADABLE, message(error), lost=isinstance(error, TierUnreachable))


def _removed(tier: Tier, held: Held) -> bool:
    """Delete a corrupt entry, unless it has been replaced since, or another version may verify it. Whether it was
    deleted."""
    if tier.read_only:
        return False
    try:
        verified(tier, held.name, held.length)
    except entry.OtherVersion:
        return False
    except entry.EntryError:
        try:
            tier.delete(held.name)
        except TierError:
            return False
        return True
    except TierError:
        return False
    return False


def _collect(judged: Iterator[Judged], report: Report) -> None:
    """Count the results to the end; TierUnreachable if the store no longer answers."""
    lost = 0
    for one in judged:
        report.add(one)
        lost = lost + 1 if one.lost else 0
        if lost >= _FAILURES:
            raise TierUnreachable(None, f"{one.problem}; the rest was not checked")


# ---- what is printed


def _not_good(verdicts: Counter[str]) -> int:
    return verdicts.total() - sum(verdicts[each] for each in (Verdict.GOOD, Verdict.UNCHECKED, Verdict.GONE))


def _progress(name: str, report: Report, passed_s: float) -> str:
    if not report.read:
        return f"{name}: listing the entries"
    bad = sum(report.verdicts[verdict] for verdict in _BAD)
    rate = report.read / passed_s if passed_s else 0.0
    return f"{name}: {report.read:,} verified, {bad:,} not good, {rate:,.0f} a second"


def _print(name: str, report: Report, passed_s: float) -> None:
    verdicts = report.verdicts
    parts = [f"{verdicts[Verdict.GOOD]:,} good", f"{verdicts[Verdict.CORRUPT]:,} corrupt"]
    if report.removed:
        parts[-1] += f" ({report.removed:,} removed)"
    parts += [f"{verdicts[Verdict.OTHER_VERSION]:,} of another version", f"{verdicts[Verdict.UNREADABLE]:,} unreadable"]
    if verdicts[Verdict.NOT_SIGNED]:
        parts.append(f"{verdicts[Verdict.NOT_SIGNED]:,} not signed with the key of this configuration")
    if verdicts[Verdict.UNCHECKED]:
        parts.append(f"{verdicts[Verdict.UNCHECKED]:,} intact, signature not checked (namespace without this key's id)")
    if verdicts[Verdict.GONE]:
        parts.append(f"{verdicts[Verdict.GONE]:,} removed meanwhile by others")
    all_read = report.listed in (None, report.verdicts.total())
    number = counted(report.read, "entry") if all_read else f"{report.read:,} of {counted(report.listed or 0, 'entry')}"
    read = f"{number} read, {precise_size(report.bytes)} in {span(passed_s)}"
    typer.echo(f"{name}: {read}: {', '.join(parts)}")
    for problem in report.problems:
        typer.echo(f"  {problem['object']}: {problem['problem']}")
    if report.problems and (more := _not_good(verdicts) - _LISTED) > 0:
        typer.echo(f"  and {more:,} more")
