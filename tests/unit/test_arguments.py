# SPDX-License-Identifier: Apache-2.0
"""A command's error about its arguments names the option, the given value and the required one."""

from __future__ import annotations

import re

import pytest
from typer.main import get_group
from typer.testing import CliRunner

from lmcache_ec.cli.commands import app

CANARY = "hunter2-canary"


def refusal(*arguments: str) -> str:
    """A command's error message for a wrong command line, joined into one line."""
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    return " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["ls", "--count", "-1"], "'--count': must be a whole number, 0 or more, not '-1'"),
        (["ls", "--count", "ten"], "'--count': must be a whole number, 0 or more, not 'ten'"),
        (["ls", "--count", "9" * 5000], "'--count': must be a whole number, 0 or more, not"),
        (["warm", "--count", "1.5"], "'--count': must be a whole number, 0 or more, not '1.5'"),
        (["warm", "--threads", "0"], "'--threads': must be a whole number from 1 to 256, not '0'"),
        (["verify", "--threads", "257"], "'--threads': must be a whole number from 1 to 256, not '257'"),
        (["epoch", "--to", "next"], "'--to': must be a whole number, not 'next'"),
        (["top", "--interval", "0"], "'--interval': must be a number from 0.2 to 3600, not '0'"),
        (["top", "--interval", "nan"], "'--interval': must be a number from 0.2 to 3600, not 'nan'"),
        (["where", "--replica", "tcp://a:1", "--timeout", "soon"], "must be a number from 0.1 to 60, not 'soon'"),
        (["namespaces", "--unused-for", "-1"], "'--unused-for': must be a number, 0 or more, not '-1'"),
        (["status", "--record", "x.csv", "--for", "0"], "'--for': must be a number, 0.1 or more, not '0'"),
        (["status", "--record", "x.csv", "--most", "inf"], "'--most': must be a number, 0.001 or more, not 'inf'"),
        (["plan", "zipf", "--sample", "2"], "'--sample': must be a number from 0.000001 to 1, not '2'"),
        (["plan", "zipf", "--replicas", "0"], "'--replicas': must be a whole number from 1 to 10000, not '0'"),
        (["doctor", "--role", "both"], "'--role': must be one of ec_both, ec_producer, ec_consumer, not 'both'"),
        (["status", "--for", "3"], "--for: applies only to a recording: needs --record"),
        (["status", "--json", "--engine", "5c41"], "--engine: applies only to a recording: needs --record"),
        (["status", "--most", "1"], "--most: applies only to a recording: needs --record"),
        (["keys", "--json", "--markdown"], "--markdown: must be given without --json"),
        (["warm", "--bytes", "10GB"], "--bytes: must be a number of bytes, KiB, MiB, GiB or TiB, for example 500MiB"),
        (["inspect", ""], "ENTRY: must not be empty"),
        (
            ["inspect", f"ns/00/{'0' * 64}.safetensors", "--namespace", "other"],
            "--namespace: other, but ENTRY is the object name of an entry of ns: give one of both",
        ),
        (["completion", "pwsh"], "must be one of bash, zsh, fish, not 'pwsh'"),
    ],
)
def test_a_value_out_of_range_is_named_with_the_range(arguments: list[str], expected: str) -> None:
    assert expected in refusal(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "--tier", "disk", "--tier", "redis"],
        ["ls", "--count", "1", "--count=1"],
        ["inspect", "picture", "--extra", "{}", "--extra", "{}"],
    ],
)
def test_an_option_that_takes_one_value_is_refused_if_it_is_given_twice(arguments: list[str]) -> None:
    option = next(argument for argument in arguments if argument.startswith("--"))
    assert f"'{option}': is given twice: must be given once" in refusal(*arguments)


def test_a_flag_may_be_given_twice_and_so_may_an_option_that_takes_several_values() -> None:
    arguments = ["plan", "zipf:requests=9", "--tiers", "cpu=1", "--tiers", "cpu=2", "--json", "--json"]
    assert CliRunner().invoke(app, arguments).exit_code == 0


TAKES_EXTRA = [
    name for name, command in get_group(app).commands.items() if any("--extra" in one.opts for one in command.params)
]


@pytest.mark.parametrize("command", TAKES_EXTRA)
@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (f"{{{CANARY}", '--extra: is not JSON (character 2): must be a map, for example \'{"local_disk": "/data"}\''),
        (f'["{CANARY}"]', "--extra: is <list>: must be a map"),
    ],
)
def test_an_extra_configuration_that_is_no_map_ends_every_command_in_the_same_way(
    command: str, extra: str, expected: str
) -> None:
    arguments = {"inspect": ["picture"], "clear": ["disk"]}.get(command, [])
    text = refusal(command, *arguments, "--extra", extra)
    assert expected in text
    assert CANARY not in text


@pytest.mark.parametrize("command", ["", *get_group(app).commands])
def test_help_shows_flags_as_they_are_typed_and_no_type_of_python(command: str) -> None:
    shown = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "120"}).stdout
    assert re.search(r"--help +Show this message", shown)
    assert "<" not in shown


@pytest.mark.parametrize("command", get_group(app).commands)
def test_the_help_of_a_command_breaks_its_lines_where_the_terminal_ends(command: str) -> None:
    text = get_group(app).commands[command].help
    assert text
    assert "\n" not in text.replace("\n\n", "")
