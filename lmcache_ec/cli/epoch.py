# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec epoch`: makes engines stop using everything stored so far, without a restart."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import typer

from lmcache_ec.cli.arguments import Extra, whole
from lmcache_ec.cli.named_tiers import configured
from lmcache_ec.cli.progress import confirmed
from lmcache_ec.config import EncoderCacheConfig
from lmcache_ec.tiers.disk_epoch import EPOCH_FILE, EpochError, check_above, present_epoch, raise_epoch

_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


@dataclass(slots=True)
class Report:
    """What was done: the folder's epoch `before` and now. `refusal` is why nothing was done; empty if it was."""

    folder: str = ""
    before: int | None = None
    epoch: int | None = None
    refusal: str = ""
    notes: list[str] = field(default_factory=list)


class _Refused(Exception):
    """Its text states what was given, and what is accepted."""


def begin_epoch(
    to: int | None = typer.Option(
        None, "--to", parser=whole(), metavar="N", help="Number of the new epoch; by default the current one plus 1."
    ),
    yes: bool = typer.Option(False, "--yes", help="Do not ask first."),
    extra: Extra = "{}",
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Begin a new epoch; asks first. Engines on this disk folder, even running ones, then use nothing stored so far.

    The number is kept in the folder; the higher of it and ec.epoch applies. The exit status is 1 if none was begun.
    """
    if as_json and not yes:
        raise typer.BadParameter("required with --json, which cannot ask", param_hint="--yes")
    config, report = configured(extra), Report()
    try:
        _begin(config, to, yes, report)
    except _Refused as refused:
        report.refusal = str(refused)
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
    elif report.refusal:
        typer.echo(report.refusal, err=True)
    else:
        typer.echo(f"{report.folder} is now in epoch {report.epoch} (before: {report.before}).")
        for note in report.notes:
            typer.echo(note, err=True)
    raise typer.Exit(1 if report.refusal else 0)


def _begin(config: EncoderCacheConfig, to: int | None, yes: bool, report: Report) -> None:
    folder = _folder(config)
    report.folder = str(folder)
    try:
        present = max(config.epoch, present_epoch(folder))
        wanted = present + 1 if to is None else to
        check_above(wanted, present)
        question = f"{folder} is in epoch {present}. Begin {wanted}? Engines on it will use nothing stored so far."
        if yes or confirmed(question, "No epoch was begun."):
            raise_epoch(folder, wanted)
    except EpochError as error:
        raise _Refused(str(error)) from None
    except ValueError as error:
        if to is None:
            raise _Refused(
                f"{folder} is in epoch {present}, and there is none above it: change ec.salt in the configuration of "
                f"all engines, and restart them"
            ) from None
        raise typer.BadParameter(str(error), param_hint="--to") from None
    except OSError as error:
        raise _Refused(f"local_disk={folder}: {_described(error)}") from None
    report.before, report.epoch, report.notes = present, wanted, _notes(wanted)


def _folder(config: EncoderCacheConfig) -> Path:
    if config.namespace is not None:
        raise _Refused(
            f"namespace={config.namespace}: an explicit namespace has no epochs. Change it in the configuration of "
            f"all engines that share it, and restart them"
        )
    if config.local_disk is None:
        given = "remotes only" if config.remotes else "no tier"
        raise _Refused(
            f"local_disk is not set ({given}), and the epoch of running engines is kept in its folder. Raise ec.epoch, "
            f"which is {config.epoch}, in the configuration of all engines, and restart them"
        )
    return config.local_disk


def _described(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return (
            "no engine has used this folder (there is no .usage in it): must be the local_disk of an engine that was "
            "started. For an engine that has not been started yet, set ec.epoch"
        )
    if error.errno in _FORBIDDEN:
        return (
            f"user {os.geteuid()} cannot write there ({error.strerror}): must be a folder that can be written. "
            f"Run this as the engines' user, or as root"
        )
    return str(error.strerror)


def _notes(epoch: int) -> list[str]:
    return [
        "Engines on this folder follow within two seconds, an idle one with its next request. vLLM's own caches on the "
        "device do not: reset the encoder cache and the prefix cache of each engine (docs/weights.md).",
        f"The number is stored in {EPOCH_FILE} in this folder only. Engines with other folders: run `lmcache-ec epoch "
        f"--to {epoch}` there. If the folder may be lost, set ec.epoch: {epoch} in the configuration, too.",
    ]
