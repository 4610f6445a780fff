# SPDX-License-Identifier: Apache-2.0
"""Engines' processes, forked from one that has imported vLLM: the import is three quarters of an engine's start.

`WarmStart` is the test's side. The process behind it imports what any engine needs, starts no thread and no engine, and
forks: the child has its own environment, log and link, and runs and ends like a new interpreter. EngineCore and the
workers are forked in turn, which is vLLM's default except on CPU, where it starts new interpreters for them
(`VLLM_WORKER_MULTIPROC_METHOD` in vllm/envs.py, vllm/platforms/cpu.py). An engine that begins by `new_interpreter` is
started by vLLM's rule for CPU.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

import setproctitle

from benchmarks.testbed.engine_env import engine_environment
from benchmarks.testbed.engine_runner import Process, new_interpreter, serve_on
from benchmarks.testbed.models import ROOT
from benchmarks.testbed.triton_interpreter import WANTED

PRELOADED = (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.distributed.ec_transfer.ec_connector.factory",
    "transformers.models.auto.processing_auto",
)
READ_AT_IMPORT = ("PYTHON", "LD_", "OMP_", "MKL_", "TORCH", "HF_", "TRANSFORMERS_", "VLLM_LOGGING", WANTED)
"""Prefixes of variables: an engine with other values than this process began with needs a separate start."""


_latest: WarmStart | None = None


def begin(environment: Mapping[str, str], log: int, link: int) -> Process:
    """`begin` for `EngineProcess`: the first call waits for the import, later ones only fork."""
    global _latest
    if _latest is None or not _latest.runs:
        _latest = WarmStart()
        atexit.register(_latest.close)
    return (_latest.start if _latest.suits(environment) else new_interpreter)(environment, log, link)


class WarmStart:
    """Starts processes for one thread, until it is closed. Each is reported on its own socket, first its pid and then
    its exit status, so that an abandoned start, as at a test's time limit, leaves nothing for the next one to read.
    """

    def __init__(self) -> None:
        self._environment = engine_environment()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.warm_start", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=self._environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )

    def suits(self, environment: Mapping[str, str]) -> bool:
        def read_at_import(variables: Mapping[str, str]) -> dict[str, str]:
            return {name: value for name, value in variables.items() if name.startswith(READ_AT_IMPORT)}

        return read_at_import(environment) == read_at_import(self._environment)

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def start(self, environment: Mapping[str, str], log: int, link: int) -> Forked:
        """`log` and `link` are descriptors, which the caller still owns."""
        reports, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            message = json.dumps(dict(environment)).encode()
            socket.send_fds(self._control, [message], [log, link, theirs.fileno()])
        pid = reports.recv(64)
        if not pid:
            raise RuntimeError(f"the process that has imported vLLM ended with status {self._process.wait()}")
        return Forked(int(pid), reports)

    def close(self) -> None:
        self._control.close()
        self._process.wait()


class Forked:
    """The part of `subprocess.Popen` that an engine's process needs; it is the child of another process."""

    def __init__(self, pid: int, reports: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._reports = reports

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            poller = select.poll()
            poller.register(self._reports, select.POLLIN)
            if not poller.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = int(self._reports.recv(64) or b"-1")
            self._reports.close()
        return self.returncode


# ---- the process behind it


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    for module in PRELOADED:
        importlib.import_module(module)
    setproctitle.getproctitle()  # finds the memory of the title, while the environment is still where exec put it
    if link := Forks(control).serve():
        fork_the_others(link)
        serve_on(link)


def fork_the_others(link: socket.socket) -> None:
    """Fork EngineCore and workers, too. They must not hold the link, whose end signals the end of the first process."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_fork(platform: type[CpuPlatform], config: object) -> None:
        check(platform, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check_and_fork)
    os.register_at_fork(after_in_child=lambda: os.close(link.fileno()))


class Forks:
    """The loop that forks. Single-threaded: signals are handled between its calls."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._reports: dict[int, socket.socket] = {}
        self._handler = signal.signal(signal.SIGCHLD, self._reap)

    def serve(self) -> socket.socket | None:
        """Fork until the test's side hangs up; then returns None. In each child it returns the child's link."""
        while True:
            message, descriptors, *_ = socket.recv_fds(self._control, 1 << 20, 3)
            if not message:
                return None
            log, link, reports = descriptors
            sys.stdout.flush()
            sys.stderr.flush()
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # no end is handled before its pid is known
            pid = os.fork()
            if not pid:
                self._become(json.loads(message), log, reports)
                return socket.socket(fileno=link)
            self._reports[pid] = socket.socket(fileno=reports)
            report(self._reports[pid], pid)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            os.close(log)
            os.close(link)

    def _become(self, environment: dict[str, str], log: int, reports: int) -> None:
        signal.signal(signal.SIGCHLD, self._handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.close(reports)
        for inherited in (self._control, *self._reports.values()):
            inherited.close()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.environ.clear()
        os.environ.update(environment)

    def _reap(self, *_: object) -> None:
        while self._reports:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            with self._reports.pop(pid) as reports:
                report(reports, os.waitstatus_to_exitcode(status))


def report(reports: socket.socket, number: int) -> None:
    try:
        reports.send(str(number).encode())
    except OSError:
        pass  # no longer waited for


if __name__ == "__main__":
    main()
