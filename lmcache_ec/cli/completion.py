# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec completion`: a script that has a shell complete its commands and options."""

from __future__ import annotations

import enum

import typer

# What `--show-completion` prints, too; but that asks which shell it runs under, and finds none in a script.
from typer._completion_shared import get_completion_script

_PROGRAM = "lmcache-ec"


class Shell(enum.StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Shell = typer.Argument(..., help="The shell that will read it.")) -> None:  # noqa: B008
    """A script that has a shell complete commands and options: `eval "$(lmcache-ec completion bash)"`."""
    variable = f"_{_PROGRAM.replace('-', '_')}_COMPLETE".upper()
    typer.echo(get_completion_script(prog_name=_PROGRAM, complete_var=variable, shell=shell.value))
