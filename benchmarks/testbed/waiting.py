# SPDX-License-Identifier: Apache-2.0
"""Waiting for other threads and processes, for tests and the testbed."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

DEADLINE_S = 20.0
"""Deadline for conditions that should hold at once: a hang becomes a failure that names what it waited for. On a busy
machine a process may take ten seconds to start."""

T = TypeVar("T")

observers: list[Callable[[str, float], None]] = []
"""Called after each successful wait, with its description and its seconds."""


def wait_until(
    what: str,
    condition: Callable[[], T],
    deadline_s: float = DEADLINE_S,
    *,
    doing: Callable[[], object] = lambda: None,
    pause_s: float | None = None,
    despite: type[Exception] | tuple[type[Exception], ...] = (),
) -> T:
    """Returns what `condition` returns, once that is truthy. `doing` and then `condition` are called repeatedly, with a
    pause of `pause_s`, or by default a twentieth of the time waited so far, from one to twenty milliseconds. Raises
    AssertionError at the deadline. If either of them raises one of `despite`, the condition does not hold yet.
    """
    began, raised = time.monotonic(), ""
    deadline = began + deadline_s
    while True:
        try:
            doing()
            if met := condition():
                for observe in observers:
                    observe(what, time.monotonic() - began)
                return met
        except despite as error:
            raised = f"; last: {error!r}"
        now = time.monotonic()
        if now > deadline:
            raise AssertionError(f"waited {deadline_s:g} s until {what}{raised}")
        time.sleep(min(max(0.001, (now - began) / 20), 0.02) if pause_s is None else pause_s)


def freeze(pid: int) -> None:
    """Stop a process, and wait until all of its threads have stopped: on a busy machine they run on for a while."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    wait_until("it has stopped", lambda: {state(thread) for thread in threads.iterdir()} <= {"T", "Z"})


def state(folder: Path) -> str:
    """State of the process or thread with this folder in /proc: one letter, as ps shows it."""
    try:
        return (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"  # it has ended


def wait_for_server(
    name: str,
    process: subprocess.Popen[bytes],
    answers: Callable[[], object],
    log: Path,
    kill: Callable[[], object],
    deadline_s: float = 60.0,
) -> None:
    """Wait until it answers. If it ends, or at the deadline, it is killed: RuntimeError with the end of its log."""
    try:
        wait_until(f"{name} answers", lambda: process.poll() is not None or answers(), deadline_s, pause_s=0.05)
        if process.poll() is not None:
            raise RuntimeError(f"{name} has ended with status {process.returncode}")
    except BaseException as error:
        kill()
        raise RuntimeError(f"{error}; the end of its log:\n{log.read_text(errors='replace')[-2000:]}") from error
