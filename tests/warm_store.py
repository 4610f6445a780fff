# SPDX-License-Identifier: Apache-2.0
"""Store processes of the tests, forked from one that has imported what they import: otherwise starting interpreters
would be half the cost of a test of the cache.

`WarmStore` is the test's side. The process behind it starts no thread; its children have the environment, descriptors
and standard error of the store process, run its `main`, and end like a new interpreter. Tests that depend on how one
starts (command line, imports, memory) use the fixture `new_interpreters`. Engines start their own store processes
themselves.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from threading import Lock

from benchmarks.testbed.models import ROOT
from lmcache_ec.store_process import PROCESS_NAME, Starter, begin, environment

PRELOADED = ("lmcache_ec.tiers.disk", "lmcache_ec.tiers.redis", "lmcache_ec.tiers.redis_client", "lmcache_ec.tiers.s3")
CLIENTS = ("boto3", "botocore.session", "obstore.store", "obstore.auth.boto3")
"""Modules that are imported when an S3 remote is opened."""


class WarmStore:
    """Starts store processes, for any thread. The process that it forks them from is started on the first request."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._environ, self._interpreter = environment(()), sys.executable
        self._control: socket.socket | None = None

    def begin(self, fds: tuple[int, int, int], errors: int, environ: Mapping[str, str]) -> Starter:
        with self._lock:
            if not self._suits(environ):
                return begin(fds, errors, environ)
            if self._control is None:
                self._control = self._started()
            socket.send_fds(self._control, [json.dumps(dict(environ)).encode()], [errors, *fds])
            _, pidfds, *_ = socket.recv_fds(self._control, 1, 1)
            if not pidfds:
                raise ChildProcessError(f"what store processes are forked from ended: {self._process.wait()}")
            return Forked(pidfds[0])

    def _suits(self, environ: Mapping[str, str]) -> bool:
        """Whether a fork will do: not if another interpreter has to run, or has to find other modules."""
        same_path = environ.get("PYTHONPATH") == self._environ.get("PYTHONPATH")
        return same_path and sys.executable == self._interpreter

    def _started(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.warm_store", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=self._environ, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        return ours

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
            self._process.wait()


class Forked:
    """The part of `subprocess.Popen` that a starter needs; it is the child of another process."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd

    def poll(self) -> int | None:
        if self._pidfd >= 0:
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            if not poller.poll(0):
                return None
            os.close(self._pidfd)
            self._pidfd = -1
        return 0

    def kill(self) -> None:
        if self._pidfd >= 0:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


# ---- the process behind it


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    for module in (*PRELOADED, *CLIENTS):
        importlib.import_module(module)
    from lmcache_ec import store

    Path("/proc/self/comm").write_text(PROCESS_NAME)  # so that its forks have this name from the start
    gc.freeze()
    while True:
        message, fds, *_ = socket.recv_fds(control, 1 << 20, 4)
        if not message:
            return
        reap()
        pid = os.fork()
        if not pid:
            control.close()
            become(json.loads(message), *fds)
            store.main()
        pidfd = os.pidfd_open(pid)  # it is reaped with the next one
        socket.send_fds(control, [b"."], [pidfd])
        for fd in (pidfd, *fds):
            os.close(fd)


def reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def become(environ: Mapping[str, str], errors: int, *fds: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for number, fd in enumerate((nothing, nothing, errors)):
        os.dup2(fd, number)
    os.close(nothing)
    os.close(errors)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv[1:] = map(str, fds)


if __name__ == "__main__":
    main()
