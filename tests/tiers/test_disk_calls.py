# SPDX-License-Identifier: Apache-2.0
"""How many system calls an entry takes on disk: each costs a microsecond or two, including Python's overhead."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.tiers import disk, disk_account, disk_files, disk_folder, disk_news
from lmcache_ec.tiers.disk import DiskTier
from tests.tiers.conformance import value

LIMIT = 1 << 20
CALLS = {"open", "close", "stat", "lstat", "fstat", "read", "readv", "pread", "write", "pwrite", "utime", "flock"}
CALLS |= {"link", "unlink", "rename", "mkdir", "dup", "scandir", "statvfs", "urandom", "fchmod", "_openat2"}


class Counted:
    """A module whose system calls are recorded."""

    def __init__(self, module: ModuleType, made: list[str]) -> None:
        self._module, self._made = module, made

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._module, name)
        if name not in CALLS:
            return real

        def call(*args: Any, **keys: Any) -> Any:
            self._made.append(name)
            return real(*args, **keys)

        return call


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls, in order, including those for the news, except the write of the record itself."""
    if not disk_folder._kernel_resolves():
        pytest.skip("without openat2 each folder on a path is opened in turn")
    made = list[str]()
    for module in (disk, disk_account, disk_files, disk_folder, disk_news):
        for name in ("os", "fcntl"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, Counted(getattr(module, name), made))
    monkeypatch.setattr(disk_folder, "_openat2", Counted(disk_folder, made)._openat2)
    monkeypatch.setattr(disk_folder, "_TRUSTED_S", 60.0)
    return made


def two_of_a_shard() -> list[EncoderCacheKey]:
    first = EncoderCacheKey("ns", "a")
    others = (EncoderCacheKey("ns", str(number)) for number in count())
    return [first, next(key for key in others if key.digest[0] == first.digest[0])]


def test_an_entry_costs_no_more_system_calls_than_it_has_to(tmp_path: Path, made: list[str]) -> None:
    """In a folder in use: nothing has to be created, and the root is open."""
    tier, (first, second) = DiskTier(tmp_path, LIMIT), two_of_a_shard()
    tier.put(first, value("a", 100))
    jobs: dict[str, tuple[int, Callable[[], object]]] = {
        "put": (22, lambda: tier.put(second, value("b", 100))),
        "get": (5, lambda: tier.get_into(second, memoryview(bytearray(100)))),
        "put again": (4, lambda: tier.put(second, value("b", 100))),
        "contains": (4, lambda: tier.contains(second)),
        "delete": (12, lambda: tier.delete(second)),
    }
    for name, (most, job) in jobs.items():
        made.clear()
        job()
        assert len(made) <= most, f"{name}: {' '.join(made)}"
