# SPDX-License-Identifier: Apache-2.0
"""A shell completes every command and its options, and the completions contain no credential of the environment."""

import os
import shutil
import subprocess
import sys

import pytest
from typer.main import get_group
from typer.testing import CliRunner

from lmcache_ec.cli.commands import app

CANARY = "hunter2-canary"
COMMAND = [sys.executable, "-c", "import sys; sys.argv[0] = 'lmcache-ec'; from lmcache_ec.cli import main; main()"]

COMMANDS = get_group(app).commands


def run(*arguments: str, **variables: str) -> str:
    environment = {**os.environ, "LMCACHE_EC_REMOTE_URL": f"redis://:{CANARY}@host", "SECRET": CANARY, **variables}
    done = subprocess.run([*COMMAND, *arguments], env=environment, capture_output=True, text=True, check=True)
    assert CANARY not in done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_that_its_shell_reads(shell: str) -> None:
    script = CliRunner().invoke(app, ["completion", shell]).stdout
    assert "_LMCACHE_EC_COMPLETE" in script
    if found := shutil.which(shell):
        subprocess.run([found, "-n"], input=script, text=True, check=True)


def test_commands_and_options_are_completed() -> None:
    asked = {"_LMCACHE_EC_COMPLETE": "complete_bash"}
    commands = run(**asked, COMP_WORDS="lmcache-ec ", COMP_CWORD="1").split()
    assert {*commands} == {*COMMANDS}
    assert "--sample" in run(**asked, COMP_WORDS="lmcache-ec verify --", COMP_CWORD="2").split()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_answer_for_programs(command: str) -> None:
    options = [option for parameter in COMMANDS[command].params for option in parameter.opts]
    assert "--json" in options or command == "completion"
