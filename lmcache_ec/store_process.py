# SPDX-License-Identifier: Apache-2.0
"""One store process, as seen by the scheduler side: starting it, killing it, and detecting its end."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Protocol

from lmcache_ec.link import pair

_KEPT = ("PATH", "HOME", "LANG", "TZ", "TMPDIR", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
"""Variables that a store process gets from the engine: enough to import itself and to name files. No secrets."""

_LAST_ERRORS_BYTES = 2000

PROCESS_NAME = "lmcache-ec"
"""As shown by `ps -o comm` and /proc/<pid>/stat; 15 characters at most."""


def environment(passed_on: tuple[str, ...]) -> dict[str, str]:
    """The part of this process's environment that a store process gets; `passed_on` are further name prefixes."""
    return {name: value for name, value in os.environ.items() if name in _KEPT or name.startswith(("LC_", *passed_on))}


class Starter(Protocol):
    """The process that detaches a store process from this one, and ends."""

    def poll(self) -> int | None:
        """None while it runs. Never waits."""

    def kill(self) -> None:
        """SIGKILL."""


def begin(fds: tuple[int, int, int], errors: int, environ: Mapping[str, str]) -> Starter:
    """Start an interpreter that runs `store.main` with these descriptors and writes its errors to `errors`. Takes about
    a millisecond; OSError if it cannot be started."""
    return subprocess.Popen(
        [sys.executable, "-m", "lmcache_ec.store", *map(str, fds)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        pass_fds=fds,
        env=environ,
    )


class StoreProcess:
    """A store process and the scheduler side's end of its link. Runs on the scheduler side's one thread.

    The process detaches itself (see store.main), so that a signal to the engine's process tree does not reach it. It
    sends its pidfd with its first message; that is used to kill it and to detect its end.
    """

    def __init__(self, number: int, arena_fd: int, passed_on: tuple[str, ...] = ()) -> None:
        """Start it. Returns at once (about a millisecond); raises OSError if the interpreter cannot be started.

        `passed_on`: prefixes of further environment variables that it gets.
        """
        self.number = number
        self.link, link_end = pair()
        saver_end, self.saver_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = os.memfd_create("lmcache-ec-store-errors", os.MFD_CLOEXEC)
        self._pidfd = -1
        self.closed = False
        fds = (arena_fd, link_end.fileno(), saver_end.fileno())
        try:
            self._starter = begin(fds, self._errors, environment(passed_on))
        except OSError:
            self.link.close()
            self.saver_socket.close()
            os.close(self._errors)
            raise
        finally:
            link_end.close()
            saver_end.close()

    def own(self, pidfd: int) -> None:
        """Take the pidfd that came with its first message, or with a later one."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._pidfd = pidfd

    @property
    def introduced(self) -> bool:
        """Whether it has sent its first message."""
        return self._pidfd >= 0

    @property
    def ended(self) -> bool:
        """Whether the *process* has ended, so that it can no longer access the arena.

        Before its first message, the end of its link shows the same: no other process holds that descriptor.
        """
        poller = select.poll()
        if self._pidfd < 0:
            poller.register(self.link, 0)  # 0: only report hang-up
        else:
            poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def kill(self) -> None:
        """Kill it. Before its first message the only way is to close its link, which it notices if it runs on."""
        if self._pidfd < 0:
            self._starter.kill()
            self.link.finish()
            return
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def last_errors(self) -> str:
        """The end of its standard error output."""
        size = os.fstat(self._errors).st_size
        return os.pread(self._errors, _LAST_ERRORS_BYTES, max(0, size - _LAST_ERRORS_BYTES)).decode(errors="replace")

    def reap(self) -> None:
        """Reap the short-lived process that started it, once that has ended. Never waits."""
        self._starter.poll()

    def close(self) -> None:
        """Close the link and the descriptors. Idempotent. The process finishes its work and ends by itself."""
        self.link.close()
        self.saver_socket.close()
        for fd in (self._errors, self._pidfd):
            if fd >= 0:
                os.close(fd)
        self._errors = self._pidfd = -1
        self.reap()
