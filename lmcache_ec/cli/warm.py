# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec warm`: copies entries of a remote to the disk, before an engine asks for them."""

from __future__ import annotations

import enum
import errno
import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TextIO

import typer

from lmcache_ec import entry
from lmcache_ec.cli.arguments import Extra, whole
from lmcache_ec.cli.entries import Held, check_namespaces, held_in
from lmcache_ec.cli.named_tiers import NamedTier, configured, named_tiers
from lmcache_ec.cli.progress import INTERRUPTED, Progress, results
from lmcache_ec.cli.wording import counted, span
from lmcache_ec.config import EncoderCacheConfig
from lmcache_ec.key import EncoderCacheKey, ObjectName
from lmcache_ec.signing import SigningKey
from lmcache_ec.sizes import GIB, KIB, MIB, TIB, precise_size
from lmcache_ec.tiers.base import Tier, TierError, TierUnreachable, message
from lmcache_ec.tiers.disk import DiskTier

_THREADS = 8
_FAILURES = 16
"""After this many consecutive unreachable errors the command ends."""
_NAMED = 20
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(KiB|MiB|GiB|TiB)?")
_UNITS = {None: 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_NO_ROOM = (errno.EDQUOT, errno.ENOSPC)


class Outcome(enum.StrEnum):
    COPIED = "copied"
    PRESENT = "present"
    """Already on the disk."""
    ABSENT = "absent"
    """Not in the remote, or no longer."""
    CORRUPT = "corrupt"
    NOT_SIGNED = "not_signed"
    OTHER_VERSION = "other_version"
    UNREADABLE = "unreadable"
    NO_ROOM = "no_room"


@dataclass(frozen=True, slots=True)
class Wanted:
    """An entry to copy to the disk. Its length and last use are known if it was listed."""

    name: ObjectName
    length: int | None = None
    modified: float | None = None


@dataclass(frozen=True, slots=True)
class Done:
    outcome: Outcome
    length: int = 0
    problem: str = ""
    lost: bool = False
    """Whether the remote did not answer."""


@dataclass(slots=True)
class Report:
    """The outcome for the chosen entries. `problem` is why not all were processed; empty if they were."""

    namespace: str = ""
    chosen: int = 0
    chosen_bytes: int = 0
    listed: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    """The first problems with single entries."""
    copied_bytes: int = 0
    seen_bytes: int = 0
    problem: str = ""
    note: str = ""
    full: str = ""
    interrupted: bool = False
    began: float = 0.0

    def add(self, done: Done) -> None:
        self.outcomes[done.outcome] += 1
        if done.problem and done.outcome is not Outcome.NO_ROOM and len(self.problems) < _NAMED:
            self.problems.append(done.problem)
        self.seen_bytes += done.length
        self.copied_bytes += done.length if done.outcome is Outcome.COPIED else 0

    @property
    def failed(self) -> bool:
        bad = (Outcome.CORRUPT, Outcome.NOT_SIGNED, Outcome.UNREADABLE)
        return bool(self.problem) or any(self.outcomes[outcome] for outcome in bad)

    def as_record(self) -> dict[str, object]:
        return {
            "namespace": self.namespace,
            "chosen": self.chosen,
            **{str(outcome): self.outcomes[outcome] for outcome in Outcome if outcome is not Outcome.NO_ROOM},
            "copied_bytes": self.copied_bytes,
            "full": self.full,
            "problem": self.problem,
            "note": self.note,
            "problems": self.problems,
            "interrupted": self.interrupted,
        }


def warm(
    namespace: str = typer.Argument(
        "", metavar="NAMESPACE", help="Of this namespace only; needed if the remote holds several."
    ),
    source: str = typer.Option("", "--from", metavar="TIER", help="The remote to read; by default the first."),
    count: int = typer.Option(
        0, "--count", parser=whole(0), metavar="N", help="At most this many entries, the newest; 0: all."
    ),
    size: str = typer.Option("", "--bytes", metavar="SIZE", help="At most this much of the newest, for example 10GiB."),
    identifiers: typer.FileText | None = typer.Option(  # noqa: B008
        None,
        "--identifiers",
        metavar="FILE",
        help="Only these: a file with one identifier per line, - for standard input.",
    ),
    evict: bool = typer.Option(False, "--evict", help="Make room on a full disk, as an engine does."),
    threads: int = typer.Option(
        _THREADS, "--threads", parser=whole(1, 256), metavar="N", help="Entries to copy at the same time."
    ),
    extra: Extra = "{}",
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Copy entries from a remote to the disk, verified, the newest first.

    Entries already on the disk are skipped, so after Ctrl-C the same command continues. Without --evict nothing is
    evicted, and the command ends when the disk is full. The exit status is 1 if entries could not be read or did not
    verify, or a tier could not be reached; 130 after Ctrl-C. A namespace of which the remote has nothing is only noted.
    """
    check_namespaces([namespace] if namespace else [])
    most_bytes = _bytes(size)
    config = configured(extra)
    remote = _remote(config, source)
    report = Report(namespace)
    try:
        with remote.opened() as tier, closing(_disk(config, evict=evict)) as disk:
            report.namespace = namespace or _only_namespace(tier, remote.name)
            wanted = _listed_in(identifiers, report.namespace) if identifiers else _newest(tier, report)
            chosen = _chosen(wanted, count, min(most_bytes, disk.max_bytes))
            if not wanted and identifiers is None:
                there = ", ".join(sorted(tier.namespace_names())) or "none"
                report.note = f"{remote.name} has no entry of {report.namespace}; namespaces that it has: {there}"
            elif not chosen and identifiers is None:
                limit = "--bytes" if most_bytes <= disk.max_bytes else "max_local_disk_size"
                report.note = (
                    f"nothing is copied: the newest entry takes {precise_size(wanted[0].length or 0)}, and {limit} "
                    f"allows {precise_size(min(most_bytes, disk.max_bytes))}"
                )
            report.chosen, report.chosen_bytes = len(chosen), sum(one.length or 0 for one in chosen)
            signing = config.signing_key()
            if signing is not None and not signing.signs(report.namespace):
                signing = None
            _copy_all(tier, disk, chosen, signing, threads, report, keep_age=not evict)
    except (OSError, ValueError) as error:
        report.problem = message(error)
    except KeyboardInterrupt:
        report.interrupted = True
    if as_json:
        typer.echo(json.dumps(report.as_record(), indent=2))
    else:
        _print(report, remote.name)
    raise typer.Exit(INTERRUPTED if report.interrupted else 1 if report.failed else 0)


# ---- what is requested


def _bytes(text: str) -> int:
    if not text:
        return 1 << 62
    match = _SIZE.fullmatch(text)
    if match is None:
        raise typer.BadParameter(
            f"must be a number of bytes, KiB, MiB, GiB or TiB, for example 500MiB or 10GiB, not {text!r}",
            param_hint="--bytes",
        )
    return int(float(match[1]) * _UNITS[match[2]])


def _remote(config: EncoderCacheConfig, source: str) -> NamedTier:
    """The named remote, or the first that can be listed. Ends the command if there is none, or no disk."""
    remotes = [tier for tier in named_tiers(config) if tier.kind is not None and not tier.unlisted]
    if not remotes or config.local_disk is None:
        missing = "no local_disk" if remotes else "no Redis and no S3 remote"
        typer.echo(f"{missing} is configured here: is LMCACHE_CONFIG_FILE set?", err=True)
        raise typer.Exit(1)
    found = [tier for tier in remotes if source in ("", tier.name)]
    if not found:
        names = ", ".join(tier.name for tier in remotes)
        raise typer.BadParameter(f"must be one of {names}, not {source!r}", param_hint="--from")
    return found[0]


def _disk(config: EncoderCacheConfig, *, evict: bool) -> DiskTier:
    assert config.local_disk is not None
    disk = DiskTier(config.local_disk, config.max_local_disk_bytes, config.min_free_disk_bytes, evicts=evict)
    if disk.read_only:
        raise ValueError(disk.notice)
    return disk


def _only_namespace(tier: Tier, name: str) -> str:
    found = tier.namespace_names()
    if len(found) == 1:
        return found[0]
    what = f"holds {len(found)} namespaces, name one: {', '.join(sorted(found))}" if found else "holds no entries"
    raise ValueError(f"{name} {what}")


def _listed_in(lines: TextIO, namespace: str) -> Sequence[Wanted]:
    try:
        identifiers = dict.fromkeys(line.rstrip("\r\n") for line in lines)
    except UnicodeDecodeError:
        text = f"{lines.name}: must be text in UTF-8 with one identifier per line"
        raise typer.BadParameter(text, param_hint="--identifiers") from None
    keys = [EncoderCacheKey(namespace, identifier) for identifier in identifiers if identifier]
    return [Wanted(ObjectName(namespace, key.digest)) for key in keys]


def _newest(tier: Tier, report: Report) -> Sequence[Wanted]:
    found: list[Held] = []
    progress = Progress(lambda passed_s: f"{counted(len(found), 'entry')} of {report.namespace} listed")
    for held in results(held_in(tier, [report.namespace]), _itself, 1, progress.tick):
        found.append(held)
    progress.clear()
    report.listed = len(found)
    found.sort(key=lambda held: (-held.modified, held.name))
    return [Wanted(held.name, held.length, held.modified) for held in found]


def _itself(held: Held) -> Held:
    return held


def _chosen(wanted: Sequence[Wanted], count: int, most_bytes: int) -> Sequence[Wanted]:
    """The first `count` of them (0: all) that total at most `most_bytes`."""
    chosen: list[Wanted] = []
    for one in wanted[: count or None]:
        most_bytes -= one.length or 0
        if most_bytes < 0:
            break
        chosen.append(one)
    return chosen


# ---- what is done


def _copy_all(
    remote: Tier,
    disk: DiskTier,
    chosen: Sequence[Wanted],
    signing: SigningKey | None,
    threads: int,
    report: Report,
    *,
    keep_age: bool,
) -> None:
    def copy(wanted: Wanted) -> Done:
        return _copied(remote, disk, wanted, signing, keep_age=keep_age)

    report.began = time.monotonic()
    progress = Progress(lambda passed_s: _progress(report, passed_s))
    lost = 0
    try:
        with closing(results(iter(chosen), copy, threads, progress.tick)) as copies:
            for done in copies:
                report.add(done)
                lost = lost + 1 if done.lost else 0
                if lost >= _FAILURES:
                    raise TierUnreachable(errno.EHOSTDOWN, done.problem)
                if done.outcome is Outcome.NO_ROOM:
                    report.full = done.problem
                    break
    finally:
        progress.clear()


def _copied(remote: Tier, disk: DiskTier, wanted: Wanted, signing: SigningKey | None, *, keep_age: bool) -> Done:
    """Copy one entry to the disk, if it verifies."""
    length = wanted.length or 0
    try:
        if (there := disk.contains(wanted.name)) is not None:
            return Done(Outcome.PRESENT, length or there)
    except TierError as error:
        return Done(Outcome.UNREADABLE, length, message(error))
    try:
        data = _fetched(remote, wanted)
        if data is None:
            return Done(Outcome.ABSENT, length)
        header = entry.verify_named(data, wanted.name, signing)
    except entry.OtherVersion as error:
        return Done(Outcome.OTHER_VERSION, length, f"{wanted.name.object_name}: {error}")
    except entry.EntryError as error:
        signed = error.reason is not entry.Reason.SIGNATURE
        outcome = Outcome.CORRUPT if signed else Outcome.NOT_SIGNED
        return Done(outcome, length, f"{wanted.name.object_name}: {error}")
    except TierError as error:
        return Done(Outcome.UNREADABLE, length, message(error), isinstance(error, TierUnreachable))
    try:
        key = EncoderCacheKey(wanted.name.namespace, header.identifier)
        stored = disk.put(key, data, wanted.modified if keep_age else None)
        return Done(Outcome.COPIED if stored else Outcome.PRESENT, len(data))
    except TierError as error:
        full = error.errno in _NO_ROOM
        return Done(Outcome.NO_ROOM if full else Outcome.UNREADABLE, length, message(error))


def _fetched(remote: Tier, wanted: Wanted) -> memoryview | None:
    length = wanted.length
    for _ in range(2):  # it may have been rewritten since it was listed
        if length is None:
            length = remote.contains(wanted.name)
        if length is None:
            return None
        buffer = memoryview(bytearray(length))
        length = remote.get_into(wanted.name, buffer)
        if length == len(buffer):
            return buffer
    return None


# ---- what is printed


def _progress(report: Report, passed_s: float) -> str:
    done = report.outcomes.total()
    copied = report.outcomes[Outcome.COPIED]
    text = f"{done:,} of {report.chosen:,}: {copied:,} copied, {precise_size(report.copied_bytes)}"
    if not done or not passed_s:
        return text
    share = report.seen_bytes / report.chosen_bytes if report.chosen_bytes else done / report.chosen
    left_s = passed_s / share - passed_s if share else 0.0
    rate = f"{precise_size(int(report.copied_bytes / passed_s))}/s, {done / passed_s:,.0f} entries/s"
    return f"{text}, {rate}, {span(left_s)} left"


def _print(report: Report, source: str) -> None:
    outcomes, passed_s = report.outcomes, time.monotonic() - report.began
    parts = [f"{outcomes[Outcome.COPIED]:,} copied", f"{outcomes[Outcome.PRESENT]:,} there already"]
    for outcome, text in (
        (Outcome.ABSENT, "not in the remote"),
        (Outcome.CORRUPT, "corrupt, not copied"),
        (Outcome.NOT_SIGNED, "not signed with the key of this configuration, not copied"),
        (Outcome.OTHER_VERSION, "of another version, not copied"),
        (Outcome.UNREADABLE, "unreadable"),
    ):
        if outcomes[outcome]:
            parts.append(f"{outcomes[outcome]:,} {text}")
    if report.began:
        copied = f"{precise_size(report.copied_bytes)} in {span(passed_s)}"
        typer.echo(f"{report.namespace}: {counted(report.chosen, 'entry')} of {source}: {', '.join(parts)}; {copied}")
    for problem in report.problems:
        typer.echo(f"  {problem}", err=True)
    if report.note:
        typer.echo(report.note, err=True)
    if report.full:
        typer.echo(f"the disk is full: {report.full} (--evict makes room)", err=True)
    if report.problem:
        typer.echo(report.problem, err=True)
    if report.interrupted:
        typer.echo("interrupted: the same command continues from here", err=True)
