# SPDX-License-Identifier: Apache-2.0
"""Engines on one folder, one system call at a time: in any order, and killed between any two calls.

Each engine is a tier and a coroutine that stops before every system call until it is resumed, so that an
interleaving is a list of numbers. A killed engine makes no further call; the kernel closes its files, which releases
its locks. The folders are in memory if the host has /dev/shm: there are hundreds of them, and a disk would be slower.
"""

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import pytest
from greenlet import getcurrent, greenlet

from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.tiers import disk, disk_account, disk_files, disk_folder, disk_survey
from lmcache_ec.tiers.base import TierError
from lmcache_ec.tiers.disk import DiskTier
from tests.tiers.conformance import value

LIMIT = 1000
CALLS = {"open", "close", "stat", "fstat", "scandir", "makedirs", "rmdir", "write", "utime", "link", "rename", "unlink"}
CALLS |= {"pread", "pwrite", "flock", "sleep", "mkdir", "dup", "_openat2"}
OPENS = {"open", "dup", "_openat2"}
ALL = 1000
MEMORY = Path("/dev/shm")


class Killed(BaseException):
    """Not caught by `except OSError`; system calls in a `finally` raise it again."""


class Engine(greenlet):
    """Runs `job` of its tier, one system call per step."""

    def __init__(self, tier: DiskTier, job: Callable[[DiskTier], object]) -> None:
        super().__init__(self._run)
        self._tier, self._job = tier, job
        tier.close()  # descriptors opened from here on are in `fds`
        self.killed = False
        self.waits = False
        self.fds: set[int] = set()
        self.step()

    def _run(self) -> None:
        try:
            self.before_a_call()
            self._job(self._tier)
        except (TierError, Killed):
            pass

    def before_a_call(self) -> None:
        if not self.killed:
            self.parent.switch()
        if self.killed:
            raise Killed

    def step(self) -> None:
        """Make the pending call, and run up to the next one."""
        self.switch()

    def kill(self) -> None:
        self.killed = True
        self._tier.close()  # otherwise it would close its files again when it is freed
        for fd in self.fds:
            with suppress(OSError):  # already closed if no call of the engine was using it
                os.close(fd)
        self.switch()
        assert self.dead


class Stepped:
    """A module whose system calls wait until the engine that makes them is resumed."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> object:
        call = getattr(self._module, name)
        if name not in CALLS:
            return call

        def stepped(*args: object, **keys: object) -> object:
            engine = getcurrent()
            if not isinstance(engine, Engine):
                return call(*args, **keys)
            if engine.killed and name == "close":
                return None  # already closed, see `kill`
            engine.before_a_call()
            engine.waits = name == "sleep"
            if engine.waits:
                return None
            result = call(*args, **keys)
            if name in OPENS:
                engine.fds.add(result)
            elif name == "close":
                engine.fds.discard(args[0])
            return result

        return stepped


@contextmanager
def stepped() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (disk, disk_account, disk_files, disk_folder, disk_survey):
            for name in ("os", "time", "fcntl"):
                if hasattr(module, name):
                    patch.setattr(module, name, Stepped(getattr(module, name)))
        patch.setattr(disk_folder, "_openat2", Stepped(disk_folder)._openat2)
        yield


def key(number: int) -> EncoderCacheKey:
    return EncoderCacheKey(f"ns{number % 2}", str(number))


def held(folder: str) -> int:
    """Bytes in entries and temporaries, as `du` counts them: a file with two names once."""
    sizes, folders = dict[int, int](), [folder]
    while folders:
        for found in os.scandir(folders.pop()):
            if found.name == ".news":
                continue
            if found.is_dir():
                folders.append(found.path)
            elif found.name != ".usage":
                sizes[found.inode()] = found.stat().st_size
    return sum(sizes.values())


def size(number: int) -> int:
    return 300 + 50 * number


class Folder:
    """A folder with entries 0 and 1, room for one more of this size or for none, and engines working on it."""

    def __init__(self, root: Path, jobs: Sequence[tuple[str, int]]) -> None:
        self.root = root
        self.watcher = self.tier()
        self.watcher.maintain()
        for number in (0, 1):
            self.watcher.put(key(number), value(str(number), size(number)))
        self.engines = [Engine(self.tier(), self.job(*job)) for job in jobs]

    def tier(self) -> DiskTier:
        return DiskTier(self.root, LIMIT)

    def job(self, what: str, number: int) -> Callable[[DiskTier], object]:
        if what == "put":
            return lambda tier: tier.put(key(number), value(str(number), size(number)))
        return DiskTier.maintain if what == "maintain" else lambda tier: tier.delete(key(number))

    def run(self, engine: Engine, calls: int = ALL) -> int:
        """Let it make up to `calls` calls, until it waits for something that another engine holds; how many it made."""
        for made in range(calls):
            if engine.dead or (made and engine.waits):
                return made
            engine.step()
            self.check()
        return calls

    def finish(self) -> None:
        for _ in self.engines:
            for engine in self.engines:
                self.run(engine)
        assert all(engine.dead for engine in self.engines), "something holds them up"

    def check(self) -> None:
        account = self.watcher.stored_bytes
        assert account is not None
        assert held(str(self.root)) <= account <= LIMIT

    def corrections(self) -> int:
        account = self.watcher._account.read()
        assert account is not None
        return account.corrections

    def settle(self, exact: bool) -> None:
        """`exact`: no engine was killed, so that a survey has nothing to correct."""
        assert not exact or self.watcher.stored_bytes == held(str(self.root))
        self.watcher.maintain()
        assert self.watcher.stored_bytes == held(str(self.root))
        assert not [path for path in self.root.rglob("*") if path.parent.name == ".tmp"]


SCENARIOS = [
    [("put", 2), ("maintain", 0), ("put", 3)],  # both evict
    [("put", 2), ("put", 2), ("maintain", 0)],  # one of them in vain
    [("delete", 0), ("maintain", 0), ("put", 2)],
    [("delete", 1), ("delete", 1), ("put", 3)],
    [("maintain", 0), ("put", 3), ("delete", 1)],
    [("put", 2), ("delete", 2), ("maintain", 0)],  # of an entry that still has a temporary name
]


@pytest.mark.parametrize("jobs", SCENARIOS, ids=lambda jobs: "-".join(what for what, _ in jobs))
@pytest.mark.parametrize("killed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_at_every_instant_the_folder_holds_at_most_its_account_and_that_at_most_the_limit(
    tmp_path: Path, jobs: Sequence[tuple[str, int]], killed: bool
) -> None:
    """The first engine is interrupted (or killed) after each of its calls by the second; then in many other ways."""
    chance, crossed = random.Random(0), any(("delete", number) in jobs for what, number in jobs if what == "put")
    place = MEMORY if os.access(MEMORY, os.W_OK) else tmp_path

    def first_ends_by_itself(*order: int) -> bool:
        with TemporaryDirectory(dir=place) as root:
            folder = Folder(Path(root), jobs)
            before = folder.corrections()
            for engine, calls in zip(folder.engines, order, strict=True):
                folder.run(engine, calls)
            ended: bool = folder.engines[0].dead
            if killed and not ended:
                folder.engines[0].kill()
                folder.check()
            folder.finish()
            folder.settle(exact=not (killed or crossed) and folder.corrections() == before)
            return ended

    with stepped():
        for calls in range(ALL):
            if first_ends_by_itself(calls, ALL, 0):
                break
        for _ in range(20):
            third = chance.choice([0, chance.randrange(60), ALL])
            first_ends_by_itself(chance.randrange(40), chance.randrange(60), third)
