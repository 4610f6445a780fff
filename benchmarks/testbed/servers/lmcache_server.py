# SPDX-License-Identifier: Apache-2.0
"""LMCache's own `lm://` server for tests: a real process on a free port, which tests may disturb."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.testbed.waiting import freeze, wait_for_server

_RUN = """
import runpy, socket

def bind(self, address, bind=socket.socket.bind):
    self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bind(self, address)

socket.socket.bind = bind
runpy.run_module("lmcache.v1.server", run_name="__main__")
"""
"""LMCache's server with SO_REUSEADDR: without it, a killed server's port would be unavailable for a minute."""


class LMCacheServer:
    """One server process on 127.0.0.1, which keeps its data in memory. Used by the test's thread."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self.port = int(taken.getsockname()[1])
        self.log = log
        self.start()

    @property
    def url(self) -> str:
        return f"lm://127.0.0.1:{self.port}"

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _RUN, "127.0.0.1", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "LMCACHE_LOG_LEVEL": "INFO"},
            )
        wait_for_server("LMCache's server", self._process, self._listens, self.log, self.kill)

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()
        except ConnectionRefusedError:
            return False  # it imports torch first
        return True

    def freeze(self) -> None:
        freeze(self._process.pid)

    def thaw(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def lmcache_server(log: Path) -> Iterator[LMCacheServer]:
    server = LMCacheServer(log)
    try:
        yield server
    finally:
        server.kill()
