# SPDX-License-Identifier: Apache-2.0
"""The processes that share the tests, forked from one that has imported what nearly all of them need: importing vLLM
takes longer than most test files take to run.

A pytest plugin used with xdist: `-p tests.warm_workers --numprocesses 3`. `WarmWorkers` is used in the process that
distributes the tests. The process behind it starts no thread; its children continue like the new interpreter that
execnet would start.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
from types import ModuleType

import anyio
from execnet import gateway_io
from execnet.gateway_base import ExecModel, Popen2IO

from benchmarks.testbed.engine_env import apply_environment
from benchmarks.testbed.models import ROOT

PRELOADED = (
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.gpu.ec_connector",
    "vllm.v1.worker.gpu.mm.encoder_runner",
    "vllm.distributed.ec_transfer.ec_connector.factory",
    "lmcache_ec.adapters.vllm.connector",
    "lmcache_ec.cli.commands",
    "benchmarks.testbed.stand_ins",
    "benchmarks.testbed.core",
    "benchmarks.testbed.servers.authority",
    "benchmarks.testbed.servers.redis",
    "benchmarks.testbed.servers.seaweed",
    "matplotlib.axes",
    "typer.testing",
)
"""No modules that pytest rewrites: no tests, and no pytest plugins."""


def pytest_xdist_setupnodes() -> None:
    """Called before the workers are started."""
    warm = WarmWorkers()
    atexit.register(warm.close)

    class ForkedIO(gateway_io.Popen2IOMaster):
        def __init__(self, args: object, execmodel: ExecModel) -> None:
            self.popen = warm.begin()
            Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel)

    gateway_io.Popen2IOMaster = ForkedIO  # type: ignore[misc]


class WarmWorkers:
    """Starts workers, for one thread, until it is closed. The first one waits for the imports."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm_workers", str(theirs.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def begin(self) -> Forked:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"."], [theirs.fileno()])
        _, pidfds, *_ = socket.recv_fds(self._control, 1, 1)
        if not pidfds:
            raise ChildProcessError(f"what workers are forked from ended: {self._process.wait()}")
        return Forked(pidfds[0], ours)

    def close(self) -> None:
        self._control.close()
        self._process.wait()


class Forked:
    """The part of `subprocess.Popen` that execnet needs; it is the child of another process."""

    def __init__(self, pidfd: int, link: socket.socket) -> None:
        self._pidfd = pidfd
        self.stdin, self.stdout = link.makefile("wb"), link.makefile("rb")
        link.close()

    def wait(self) -> int:
        select.select([self._pidfd], [], [])
        return 0

    def kill(self) -> None:
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


# ---- the process behind it


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the process that distributes the tests
    gc.disable()
    apply_environment()
    for module in PRELOADED:
        importlib.import_module(module)
    anyio.__doc__ = "PYTEST_DONT_REWRITE"  # it has a plugin, and pytest would warn that it can no longer rewrite it
    gc.freeze()
    atexit.register(gc.unfreeze)  # objects still frozen at interpreter exit count as leaks
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # their exit status is not used
    while True:
        message, links, *_ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        pid = os.fork()
        if not pid:
            control.close()
            become_worker(links[0])
            return
        pidfd = os.pidfd_open(pid)
        socket.send_fds(control, [b"."], [pidfd])
        for fd in (pidfd, *links):
            os.close(fd)


def become_worker(link: int) -> None:
    """Become a pytest worker, until it has run its tests."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in (0, 1):
        os.dup2(link, number)
    os.close(link)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.argv[:] = ["-c"]
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(gateway_io.popen_bootstrapline, vars(main))


if __name__ == "__main__":
    main()
