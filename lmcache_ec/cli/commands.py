# SPDX-License-Identifier: Apache-2.0
"""The commands of `lmcache-ec`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import typer

from lmcache_ec.cli.arguments import number, one_of
from lmcache_ec.cli.clear import clear
from lmcache_ec.cli.completion import completion
from lmcache_ec.cli.doctor import examine, render
from lmcache_ec.cli.epoch import begin_epoch
from lmcache_ec.cli.inspect import inspect
from lmcache_ec.cli.keys import list_keys
from lmcache_ec.cli.lifecycle import check_and_set
from lmcache_ec.cli.ls import list_entries
from lmcache_ec.cli.namespaces import find_and_remove
from lmcache_ec.cli.plan import plan
from lmcache_ec.cli.record import record_trace
from lmcache_ec.cli.status import all_engines, show
from lmcache_ec.cli.top import top
from lmcache_ec.cli.verify import verify
from lmcache_ec.cli.warm import warm
from lmcache_ec.cli.where import where
from lmcache_ec.sizes import MIB
from lmcache_ec.version import __version__

_ROLES = ("ec_both", "ec_producer", "ec_consumer")
"""vLLM's `ec_role`."""


_MOST_MIB = 256
"""Of a recording, if nothing else is said."""

# Without typer's own tracebacks: they may show local variables, and so the environment.
app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="The encoder cache on this host.",
)


def _add(name: str, command: Callable[..., None]) -> None:
    """Its docstring is the help, in which typer would keep the ends of lines."""
    paragraphs = re.split(r"\n\s*\n", command.__doc__ or "")
    app.command(name, help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lmcache-ec {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


def status(
    as_json: bool = typer.Option(
        False, "--json", help="Print one JSON list, one object per engine; with --record, one object."
    ),
    record: Path | None = typer.Option(  # noqa: B008
        None,
        "--record",
        metavar="FILE",
        help="Write what requests need to FILE, .csv or .csv.gz, for `lmcache-ec plan`.",
    ),
    seconds: float | None = typer.Option(
        None, "--for", parser=number(0.1), metavar="SECONDS", help="End the recording after this many seconds."
    ),
    engine: str = typer.Option("", "--engine", help="Record only engines whose names begin with this."),
    most_mib: float | None = typer.Option(
        None,
        "--most",
        parser=number(0.001),
        metavar="MIB",
        help=f"End it at this many MiB, before compression. {_MOST_MIB} if not given.",
    ),
) -> None:
    """What each engine's cache holds and has counted, as of its last scheduling pass.

    With --record, record what requests need, until Ctrl-C. No names are written, only their digests with a secret salt.
    """
    if record is not None:
        most_bytes = int((most_mib or _MOST_MIB) * MIB)
        raise typer.Exit(record_trace(record, engine, seconds or math.inf, most_bytes, as_json))
    for option, given in (("--for", seconds), ("--engine", engine), ("--most", most_mib)):
        if given:
            raise typer.BadParameter("is about a recording: needs --record", param_hint=option)
    found = all_engines()
    if as_json:
        typer.echo(json.dumps(found))
    else:
        show(found)


def doctor(
    extra: str = typer.Option("{}", "--extra", help="The ec_connector_extra_config that vLLM will be given, as JSON."),
    role: str = typer.Option(
        _ROLES[0],
        "--role",
        parser=one_of(*_ROLES),
        autocompletion=lambda: [*_ROLES],
        metavar="|".join(_ROLES),
        help="The ec_role for the command that is printed.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """What an engine started in this environment would find: configuration, versions, memory and disk.

    The exit status is 1 if there are problems.
    """
    report = examine(extra, role=role)
    typer.echo(report.to_json() if as_json else render(report))
    raise typer.Exit(1 if report.problems else 0)


_add("status", status)
_add("doctor", doctor)
_add("ls", list_entries)
_add("inspect", inspect)
_add("verify", verify)
_add("warm", warm)
_add("clear", clear)
_add("epoch", begin_epoch)
_add("keys", list_keys)
_add("namespaces", find_and_remove)
_add("lifecycle", check_and_set)
_add("top", top)
_add("where", where)
_add("plan", plan)
_add("completion", completion)
