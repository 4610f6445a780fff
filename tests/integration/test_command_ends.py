# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec` ends quietly when it is interrupted or its output is closed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# A shell's background jobs and their children ignore Ctrl-C.
HANDLED = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
FIRST = """
import os, signal
handle = signal.signal
def first_moment(*given):
    handle(*given)
    signal.signal = handle
    os.write(2, b"begun\\n")
"""
COMMAND = [
    sys.executable,
    "-c",
    f"{HANDLED}; from lmcache_ec.cli import main{FIRST}signal.signal = first_moment; main()",
]
"""It prints a line once it handles the signal, which it does first of all."""


@pytest.mark.parametrize("after_s", [0.005, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3])
def test_ctrl_c_ends_a_command_quietly_from_its_first_moment_on(after_s: float) -> None:
    """Even while modules are loaded. A shell shows status 130 either way."""
    with subprocess.Popen([*COMMAND, "top", "--interval", "60"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as top:
        assert top.stderr is not None
        assert top.stderr.readline() == b"begun\n"
        time.sleep(after_s)
        top.send_signal(signal.SIGINT)
        out, err = top.communicate(timeout=60)
    assert (err, top.returncode in (-signal.SIGINT, 130, 0)) == (b"", True), (out, err, top.returncode)


@pytest.mark.parametrize("arguments", [["keys"], ["keys", "--json"], ["status"], ["top", "--once"]], ids=" ".join)
def test_a_command_whose_output_has_no_room_reports_it_in_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "-c", "from lmcache_ec.cli import main; main()", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    assert (ended.returncode, ended.stderr) == (1, b"Standard output cannot be written: No space left on device\n")


@pytest.mark.parametrize(
    "arguments",
    [["keys"], ["keys", "--markdown"], ["keys", "--json"], ["--help"], ["doctor"], ["status"], ["top", "--once"]],
    ids=" ".join,
)
@pytest.mark.parametrize("both", [False, True], ids=["output", "output and errors"])
def test_a_command_whose_reader_has_closed_the_pipe_ends_quietly(
    arguments: list[str], both: bool, tmp_path: Path
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(tmp_path / "errors", "w+b") as errors:
        ended = subprocess.run(
            [sys.executable, "-c", "from lmcache_ec.cli import main; main()", *arguments],
            stdout=writer,
            stderr=writer if both else errors,
            timeout=60,
        )
        os.close(writer)
        errors.seek(0)
        assert (ended.returncode, errors.read()) == (128 + signal.SIGPIPE, b"")


def test_a_command_imports_only_what_it_needs() -> None:
    """A monitor polls the status: importing the modules of all commands would take longer than the command itself."""
    code = """
import sys
from lmcache_ec.cli.commands import app
app(["status"], standalone_mode=False)
print(*{"numpy", "redis", "yaml", "boto3"} & {name.split(".")[0] for name in sys.modules}, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "\n"
