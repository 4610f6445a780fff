# SPDX-License-Identifier: Apache-2.0
"""The end of a container: entries handed to a store process are still written, though the end of PID 1 would kill it.

vLLM's front end kills its processes without waiting for them (`shutdown_timeout` is 0), so no connector can wait in its
`shutdown`. The front end itself can, at the very end: `atexit` runs handlers in reverse order, and this one is
registered before vLLM starts anything. If the front end is PID 1, orphans become its children: it also reaps the store
processes that were killed and replaced, which would otherwise stay as zombies.

Runs in the process that builds vLLM's configuration. Nothing here touches processes other than store processes.
"""

from __future__ import annotations

import atexit
import os
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from lmcache_ec.store_process import PROCESS_NAME

_INITS = frozenset({"tini", "docker-init", "dumb-init", "catatonit"})
"""Init programs that run as PID 1 of a container for one child, and end with that child."""

_COLLECT_EVERY_S = 10.0
_PATIENCE_S = 5.0
"""Time for a store process to notice that its engine has ended."""

_lock = threading.Lock()
_registered = False
_drain_s = 0.0


def ends_with_this_process(proc: Path = Path("/proc")) -> bool:
    """Whether its container or process namespace ends with this process: it is PID 1, or the child of an init that ends
    with it, or was put into the namespace from outside, like the first process of a container in a pod that shares
    one."""
    if os.getpid() == 1 or os.getppid() == 0:
        return True
    return os.getppid() == 1 and _name_and_state(proc / "1")[0] in _INITS


def finish_before_exit(drain_s: float) -> None:
    """When this process exits, wait until the store processes are done, for at most `drain_s` and a few seconds."""
    global _registered, _drain_s
    with _lock:
        _drain_s = max(_drain_s, drain_s)
        if _registered or not ends_with_this_process():
            return
        _registered = True
    atexit.register(lambda: wait_for_stores(_drain_s + _PATIENCE_S))
    if os.getpid() == 1:
        threading.Thread(target=_collect_for_ever, name="lmcache-ec-collect", daemon=True).start()


def wait_for_stores(timeout_s: float) -> None:
    """Wait until no store process runs in this process namespace, or the timeout has passed."""
    deadline = time.monotonic() + timeout_s
    for pid in list(_stores()):
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
        finally:
            os.close(pidfd)
    collect()


def collect() -> None:
    """Reap the store processes that have ended as children of this one. Other children are left to vLLM."""
    for pid in list(_stores(state="Z", parent=os.getpid())):
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue  # another thread reaped it


def _collect_for_ever() -> None:
    while True:
        time.sleep(_COLLECT_EVERY_S)
        collect()


def _stores(state: str = "", parent: int = 0) -> Iterator[int]:
    """The pids of store processes; zombies only if asked for."""
    for folder in Path("/proc").glob("[0-9]*"):
        name, found, of = _name_and_state(folder)
        wanted = found == state if state else found not in ("Z", "X", "")
        if name == PROCESS_NAME and wanted and parent in (0, of):
            yield int(folder.name)


def _name_and_state(folder: Path) -> tuple[str, str, int]:
    """Name, state and parent of a process; empty if it has ended in the meantime."""
    try:
        before, _, after = (folder / "stat").read_text().rpartition(")")
    except OSError:
        return "", "", 0
    state, parent, *_ = after.split()
    return before.partition("(")[2], state, int(parent)
