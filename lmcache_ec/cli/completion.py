# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec completion`: a script that makes a shell complete its commands and options."""

from __future__ import annotations

import typer

# `--show-completion` prints the same; but it detects the shell that it runs under, and finds none in a script.
from typer._completion_shared import get_completion_script

from lmcache_ec.cli.arguments import one_of

_PROGRAM = "lmcache-ec"


_SHELLS = ("bash", "zsh", "fish")


def completion(
    shell: str = typer.Argument(
        ...,
        parser=one_of(*_SHELLS),
        autocompletion=lambda: [*_SHELLS],
        metavar="SHELL",
        help=f"The shell that will read it: {', '.join(_SHELLS)}.",
    ),
) -> None:
    """Print a script with which a shell completes commands and options: `eval "$(lmcache-ec completion bash)"`."""
    variable = f"_{_PROGRAM.replace('-', '_')}_COMPLETE".upper()
    typer.echo(get_completion_script(prog_name=_PROGRAM, complete_var=variable, shell=shell))
