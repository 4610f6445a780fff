# SPDX-License-Identifier: Apache-2.0
"""The commands of `lmcache-ec`."""

from __future__ import annotations

import functools
import importlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from lmcache_ec.cli.arguments import Extra, number, one_of
from lmcache_ec.sizes import MIB
from lmcache_ec.version import __version__

_ROLES = ("ec_both", "ec_producer", "ec_consumer")
"""vLLM's `ec_role`."""


_MOST_MIB = 256
"""Default size of a recording."""

_COMMANDS = {
    "status": "commands:status",
    "doctor": "commands:doctor",
    "ls": "ls:list_entries",
    "inspect": "inspect:inspect",
    "verify": "verify:verify",
    "warm": "warm:warm",
    "clear": "clear:clear",
    "epoch": "epoch:begin_epoch",
    "keys": "keys:list_keys",
    "namespaces": "namespaces:find_and_remove",
    "lifecycle": "lifecycle:check_and_set",
    "top": "top:top",
    "where": "where:where",
    "plan": "plan:plan",
    "completion": "completion:completion",
}
"""Each command's function, in a module next to this one."""


def _untyped(params: list[Any]) -> list[Any]:
    """The same, without the type that typer shows after flags (`--json <bool>`) and arguments (`ENTRY <str>`)."""
    for param in params:
        if getattr(param, "is_flag", True):  # arguments have no such attribute
            param.display_type_rich = lambda ctx: ""
    return params


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _untyped(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """An option that takes one value must be given once: the last one would silently replace the others."""
        if not ctx.resilient_parsing:
            given: set[Any] = set()
            order: list[Any] = self.make_parser(ctx).parse_args(args=[*args])[2]
            for param in order:
                if param in given and not getattr(param, "multiple", True) and not getattr(param, "is_flag", True):
                    raise typer.BadParameter("is given twice: must be given once", ctx=ctx, param=param)
                given.add(param)
        return super().parse_args(ctx, args)


@functools.cache
def _command(name: str) -> Any:
    """The function as a typer command. Its docstring is the help, in which typer would keep the line ends."""
    module, _, function = _COMMANDS[name].partition(":")
    run = getattr(importlib.import_module(f"lmcache_ec.cli.{module}"), function)
    paragraphs = re.split(r"\n\s*\n", run.__doc__ or "")
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name, cls=_Command, help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))(run)
    return typer.main.get_command(alone)


class _Commands(Mapping[str, Any]):
    """Each is imported on demand: importing what all of them need takes longer than most of them run."""

    def __getitem__(self, name: str) -> Any:
        return _command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


class _Program(TyperGroup):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands()  # type: ignore[assignment]  # nothing is added later

    def get_params(self, ctx: Any) -> list[Any]:
        return _untyped(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)


# Without typer's own tracebacks: they may show local variables, and so the environment.
app = typer.Typer(
    cls=_Program,
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Inspect and manage the encoder cache of this host.",
)


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
        help="Record what requests need in FILE, .csv or .csv.gz, for `lmcache-ec plan`.",
    ),
    seconds: float | None = typer.Option(
        None, "--for", parser=number(0.1), metavar="SECONDS", help="End the recording after this many seconds."
    ),
    engine: str = typer.Option("", "--engine", metavar="NAME", help="Record only engines whose names begin with this."),
    most_mib: float | None = typer.Option(
        None,
        "--most",
        parser=number(0.001),
        metavar="MIB",
        help=f"End the recording at this many MiB, before compression; by default {_MOST_MIB}.",
    ),
) -> None:
    """Show what each engine's cache holds and has counted, as of its last scheduling pass.

    With --record, record what requests need, until Ctrl-C. No names are written, only digests with a secret salt.
    """
    if record is not None:
        from lmcache_ec.cli.record import record_trace

        most_bytes = int((most_mib or _MOST_MIB) * MIB)
        raise typer.Exit(record_trace(record, engine, seconds or math.inf, most_bytes, as_json))
    for option, given in (("--for", seconds), ("--engine", engine), ("--most", most_mib)):
        if given:
            raise typer.BadParameter("applies only to a recording: needs --record", param_hint=option)
    from lmcache_ec.cli.status import all_engines, show

    found = all_engines()
    if as_json:
        typer.echo(json.dumps(found))
    else:
        show(found)


def doctor(
    extra: Extra = "{}",
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
    """Show what an engine started in this environment would find: configuration, versions, memory and disk.

    The exit status is 1 if there are problems.
    """
    from lmcache_ec.cli.doctor import examine, render

    report = examine(extra, role=role)
    typer.echo(report.to_json() if as_json else render(report))
    raise typer.Exit(1 if report.problems else 0)
