# SPDX-License-Identifier: Apache-2.0
"""Engines on one folder, one system call at a time: in any order, and killed between any two calls.

Each engine is a tier and a thread that stops before every system call until it is told to go on, so that an
interleaving is a list of numbers that hypothesis draws and shortens. A killed one makes no further call; the kernel
closes its files, and with them its locks.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers.conformance import value

from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.tiers import disk, disk_account
from lmcache_ec.tiers.base import TierError
from lmcache_ec.tiers.disk import DiskTier

LIMIT = 1000
CALLS = ("open", "close", "stat", "fstat", "link", "unlink", "rename", "rmdir", "makedirs", "scandir", "statvfs")
CALLS += ("write", "pread", "pwrite", "readv", "utime", "flock", "sleep")


class Killed(BaseException):
    """No `except OSError` sees it, and what a `finally` still calls raises it again."""


class Engine(threading.Thread):
    """Runs `job`, one system call a step. Stepped and killed by the test's thread, which meanwhile does nothing."""

    def __init__(self, job: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._job = job
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.fds: set[int] = set()
        self.ended = self.killed = False
        self.failure: BaseException | None = None
        self.start()
        self._stopped.acquire()

    def run(self) -> None:
        try:
            self.before_a_call()
            self._job()
        except (TierError, Killed):
            pass
        except BaseException as error:
            self.failure = error
        self.ended = True
        self._stopped.release()

    def before_a_call(self) -> None:
        if not self.killed:
            self._stopped.release()
            self._go.acquire()
        if self.killed:
            raise Killed

    def step(self) -> None:
        self._go.release()
        assert self._stopped.acquire(timeout=10), "neither ended nor at a system call"
        if self.failure is not None:
            raise self.failure

    def kill(self) -> None:
        self.killed = True
        for fd in self.fds:
            os.close(fd)
        self.step()
        assert self.ended


class Stepped:
    """A module whose system calls wait until the engine that makes them is told to go on."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> object:
        call = getattr(self._module, name)
        engine = threading.current_thread()
        if name not in CALLS or not isinstance(engine, Engine):
            return call

        def stepped(*args: object, **keys: object) -> object:
            engine.before_a_call()
            if name == "sleep":
                return None
            result = call(*args, **keys)
            if name == "open":
                engine.fds.add(result)
            elif name == "close":
                engine.fds.discard(args[0])  # type: ignore[arg-type]
            return result

        return stepped


@contextmanager
def stepped() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (disk, disk_account):
            for name in ("os", "time", "fcntl"):
                if hasattr(module, name):
                    patch.setattr(module, name, Stepped(getattr(module, name)))
        yield


def key(number: int) -> EncoderCacheKey:
    return EncoderCacheKey(f"ns{number % 2}", str(number))


def held(root: Path) -> int:
    """Bytes in entries and temporaries, as `du` counts them: a file with two names once."""
    files = [path.stat() for path in root.rglob("*") if path.is_file() and path.name != ".usage"]
    return sum({status.st_ino: status.st_size for status in files}.values())


def job(root: Path, what: str, number: int) -> Callable[[], object]:
    tier = DiskTier(root, LIMIT)
    match what:
        case "put":
            return lambda: tier.put(key(number), value(str(number), 300 + 50 * number))
        case "delete":
            return lambda: tier.delete(key(number))
        case _:
            return tier.maintain


jobs = st.tuples(st.sampled_from(["put", "put", "put", "delete", "maintain"]), st.integers(0, 5))
orders = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 25)), max_size=150)


@settings(max_examples=150, deadline=None)
@given(before=st.lists(st.integers(0, 5), max_size=3), after=st.lists(jobs, min_size=1, max_size=3), order=orders)
def test_at_every_instant_the_folder_holds_no_more_than_its_account_and_that_no_more_than_the_limit(
    before: list[int], after: list[tuple[str, int]], order: list[tuple[int, int]]
) -> None:
    with TemporaryDirectory() as folder, stepped():
        root = Path(folder)
        watcher = DiskTier(root, LIMIT)
        watcher.maintain()
        for number in before:
            watcher.put(key(number), value(str(number), 300 + 50 * number))
        engines = [Engine(job(root, what, number)) for what, number in after]

        def check() -> None:
            account = watcher.stored_bytes
            assert account is not None
            assert held(root) <= account <= LIMIT

        for index, chance in order:
            engine = engines[index % len(engines)]
            if not engine.ended:
                engine.kill() if chance == 0 else engine.step()
                check()
        deadline = time.monotonic() + 10
        while waiting := [engine for engine in engines if not engine.ended]:
            for engine in waiting:
                engine.step()
                check()
            assert time.monotonic() < deadline, "they hold one another up"
        watcher.maintain()
        assert watcher.stored_bytes == held(root)
        assert [path for path in root.rglob("*") if path.parent.name == ".tmp"] == []
