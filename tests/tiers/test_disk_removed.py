# SPDX-License-Identifier: Apache-2.0
"""LocalDisk while its folder, or one in it, is removed by hand or replaced: nothing has to be restarted."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed.core import Bench, names, path_of, stored
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.tiers import disk_account
from lmcache_ec.tiers.base import TierError
from lmcache_ec.tiers.disk import DiskTier
from lmcache_ec.tiers.disk_account import Account, FolderAccount
from lmcache_ec.tiers.disk_folder import try_lock
from tests.tiers.conformance import fetch, value

LIMIT = 1000


def key(identifier: str) -> EncoderCacheKey:
    return EncoderCacheKey("ns", identifier)


def held(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*.safetensors"))


def scan(tier: DiskTier) -> set[bytes]:
    """Scan as the store process does every half minute."""
    found = {entry.digest for entry in tier.list("ns")}
    tier.maintain()
    return found


REMOVED: list[Callable[[Path], Path]] = [
    lambda root: root,
    lambda root: root.parent,
    lambda root: root / "ns",
    lambda root: root / "ns" / ".tmp",
    lambda root: (root / key("a").object_name).parent,
]


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("which", REMOVED, ids=["root", "above", "namespace", "temporaries", "shard"])
def test_a_folder_removed_under_a_tier_means_misses_and_the_next_put_creates_it_again(
    tmp_path: Path, which: Callable[[Path], Path], scanned: bool
) -> None:
    """All its room is available again, too: entries lost with the folder stop counting."""
    root = tmp_path / "above" / "root"
    tier = DiskTier(root, LIMIT, min_free_bytes=1)
    assert tier.put(key("a"), value("a", LIMIT))
    lost = key("a").object_name in {str(path.relative_to(root)) for path in which(root).rglob("*.safetensors")}
    shutil.rmtree(which(root))
    if lost:
        assert fetch(tier, key("a")) is None
        assert tier.contains(key("a")) is None
        tier.delete(key("a"))
    if scanned:
        assert len(scan(tier)) == (not lost)
    for name in "bc" if lost else "b":
        assert tier.put(key(name), value(name, LIMIT // 2))
        assert fetch(tier, key(name)) == value(name, LIMIT // 2)
    assert tier.stored_bytes == held(root) == FolderAccount(root / ".usage").read().total  # type: ignore[union-attr]
    for name in "defg":
        assert tier.put(key(name), value(name, 300))
    assert tier.stored_bytes == held(root) == 900


def test_where_a_link_outlives_the_folder_that_it_names_that_folder_is_created_again(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "there")
    tier = DiskTier(tmp_path / "root", LIMIT)
    shutil.rmtree(tmp_path / "there")
    assert tier.put(key("a"), value("a", 100))
    assert held(tmp_path / "there") == 100


@pytest.mark.parametrize("call", ["statvfs", "scandir", "pwrite", "write", "utime", "link"])
def test_a_put_under_way_when_the_folder_is_removed_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    root, real = tmp_path / "root", getattr(os, call)
    tier, removals = DiskTier(root, LIMIT, min_free_bytes=1), [root]

    def removing(*arguments: Any, **keys: Any) -> Any:
        if removals:
            monkeypatch.setattr(os, call, real)
            shutil.rmtree(removals.pop())
        return real(*arguments, **keys)

    monkeypatch.setattr(os, call, removing)
    assert tier.put(key("a"), value("a", 600))
    assert not removals
    assert fetch(tier, key("a")) == value("a", 600)
    assert tier.stored_bytes == 600


def test_an_account_that_is_removed_each_time_fails_a_put_and_is_shared_again_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    one, other = DiskTier(root, LIMIT), DiskTier(root, LIMIT)

    def remove_and_lock(fd: int) -> bool | None:
        (root / ".usage").unlink()
        return try_lock(fd)

    with monkeypatch.context() as patched:
        patched.setattr(disk_account, "try_lock", remove_and_lock)
        with pytest.raises(TierError) as caught:
            one.put(key("a"), value("a", 600))
        assert caught.value.errno == errno.EAGAIN
        scan(one)
    assert one.put(key("a"), value("a", 600))
    assert other.put(key("b"), value("b", 600)), "it evicts what the other has written"
    assert held(root) == 600
    assert one.stored_bytes == other.stored_bytes == 600


def test_engines_whose_folder_is_removed_again_and_again_keep_the_limit_and_go_on_as_soon_as_that_ends(
    tmp_path: Path,
) -> None:
    """Meanwhile reads are misses, scans report no error, and a put that can never complete fails."""
    root, names, size = tmp_path / "root", [str(number) for number in range(40)], 50
    tiers = [DiskTier(root, 20 * size, min_free_bytes=1) for _ in range(2)]
    code = "import shutil, sys\nprint(flush=True)\nwhile True: shutil.rmtree(sys.argv[1], ignore_errors=True)"

    def use(number: int) -> int:
        tier, written, buffer = tiers[number % 2], 0, memoryview(bytearray(size))
        for turn in range(4):
            for name in names:
                try:
                    written += tier.put(key(name), value(name, size))
                except TierError as error:
                    if error.errno not in (errno.ENOENT, errno.EAGAIN):
                        raise
                assert tier.get_into(key(name), buffer) is None or buffer == value(name, size)
            if turn % 4 == number % 4:
                scan(tier)
        return written

    with subprocess.Popen([sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE) as remover:
        try:
            assert remover.stdout is not None
            assert remover.stdout.readline() == b"\n"
            with ThreadPoolExecutor(4) as threads:
                assert sum(threads.map(use, range(4))) > len(names), "nothing was removed"
        finally:
            remover.kill()
    for number in range(60):
        assert tiers[number % 2].put(key(f"after {number}"), value("after", size))
        assert held(root) <= 20 * size
    scan(tiers[1])
    assert tiers[0].stored_bytes == held(root)


def test_another_folder_mounted_in_its_place_is_known_from_the_next_scan_on(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    tier = DiskTier(root, LIMIT)
    for name in "ab":
        tier.put(key(name), value(name, 400))
    scan(tier)
    for name in "cde":
        DiskTier(other, LIMIT).put(key(name), value(name, 300))
    root.rename(tmp_path / "away")
    other.rename(root)
    assert scan(tier) == {key(name).digest for name in "cde"}
    assert tier.stored_bytes == 900
    assert tier.put(key("f"), value("f", 400))
    assert {name for name in "cdef" if tier.contains(key(name))} == {"d", "e", "f"}
    assert tier.stored_bytes == held(root) == 1000
    root.rename(other)
    (tmp_path / "away").rename(root)
    assert scan(tier) == {key(name).digest for name in "ab"}
    assert tier.stored_bytes == 800


def test_a_folder_with_locks_in_the_place_of_one_without_is_shared_from_the_next_scan_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    root = tmp_path / "root"
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        tier = DiskTier(root, LIMIT)
        tier.put(key("a"), value("a", 900))
    root.rename(tmp_path / "away")
    neighbour = DiskTier(root, LIMIT)
    neighbour.put(key("b"), value("b", 400))
    assert scan(tier) == {key("b").digest}
    assert tier.put(key("c"), value("c", 500))
    assert neighbour.stored_bytes == tier.stored_bytes == 900


def test_a_root_that_was_moved_is_released_and_the_one_in_its_place_is_read_at_once(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    DiskTier(other, LIMIT).put(key("b"), value("b", 200))
    tier = DiskTier(root, LIMIT)
    tier.put(key("a"), value("a", 100))
    assert fetch(tier, key("a")) == value("a", 100)
    root.rename(tmp_path / "moved")
    assert fetch(tier, key("b")) is None
    other.rename(root)
    assert fetch(tier, key("b")) == value("b", 200)
    assert fetch(tier, key("a")) is None
    (tmp_path / "moved").rename(tmp_path / "moved again")
    assert str(tmp_path / "moved again") not in open_files()
    tier.close()
    assert str(root) not in open_files()


def test_writes_and_deletions_go_to_the_folder_that_the_path_leads_to_now(tmp_path: Path) -> None:
    """At once, although the previous folder is kept open for the next look-up."""
    root, moved, link = tmp_path / "root", tmp_path / "moved", tmp_path / "link"
    link.symlink_to(root)
    tier = DiskTier(link, LIMIT)
    tier.put(key("a"), value("a", 100))
    root.rename(moved)
    DiskTier(root, LIMIT).put(key("a"), value("other", 200))
    assert tier.put(key("b"), value("b", 300))
    assert tier.delete(key("a"))
    assert held(root) == tier.stored_bytes == 300
    assert held(moved) == 100
    shutil.rmtree(root)
    assert not tier.delete(key("a"))
    link.unlink()
    link.symlink_to(moved)
    assert tier.delete(key("a"))
    assert tier.put(key("c"), value("c", 400))
    assert held(moved) == tier.stored_bytes == 400


def test_changed_rights_of_the_folder_are_those_of_the_next_entry(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, LIMIT)
    for name, mode in (("a", 0o700), ("b", 0o770), ("c", 0o750)):
        tmp_path.chmod(mode)
        tier.put(key(name), value(name, 100))
        assert (tmp_path / key(name).object_name).stat().st_mode & 0o777 == mode & 0o666


def open_files() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            pass  # the listing's own descriptor
    return found


def test_nothing_is_given_back_to_an_account_that_it_was_not_reserved_in(tmp_path: Path) -> None:
    """Otherwise the folder would hold more than its account counts."""
    account = FolderAccount(tmp_path / "folder" / ".usage")
    account.settle(None, 0, 0)
    before = account.read()
    reserved = account.reserve(300, LIMIT)
    shutil.rmtree(tmp_path / "folder")
    account.settle(None, 0, 500)
    account.release(300, reserved)
    account.settle(before, 0, 0)
    assert isinstance(after := account.read(), Account)
    assert after.total == 500


def test_a_second_first_survey_of_a_folder_does_not_lower_what_the_earlier_one_counted(
    tmp_path: Path,
) -> None:
    """A writer may have reserved its room in an account that was created and removed between the two."""
    account = FolderAccount(tmp_path / ".usage")
    account.settle(None, 0, 300)
    account.settle(None, 0, 0)
    assert isinstance(after := account.read(), Account)
    assert after.total == 300


def test_an_engine_whose_folder_is_removed_misses_encodes_and_writes_on(tmp_path: Path) -> None:
    """No error is counted or logged."""
    root, (first, second, third) = tmp_path / "root", names("image", 3)
    with Bench(root, min_free_disk_size=0.001) as bench:
        bench.scanned()
        bench.encode([first])
        bench.settle()
        assert path_of(root, first).exists()
        shutil.rmtree(root)
        bench.encode([second])
        bench.settle()
        assert stored(root) == {second}
        assert not bench.fetch(third)
        assert not [name for name in bench.status()["store"] if "error" in name]
        assert bench.serves(first), "it is in memory still"
    with Bench(root) as bench:
        assert bench.serves(second)


def test_an_account_removed_before_it_was_locked_is_not_the_one_that_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account, flock = FolderAccount(tmp_path / ".usage"), fcntl.flock

    def too_late(*arguments: Any) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        (tmp_path / ".usage").unlink()
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", too_late)
    account.settle(None, 0, 500)
    assert isinstance(after := account.read(), Account)
    assert after.total == 500


def test_an_entry_that_a_neighbour_published_first_and_lost_at_once_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, neighbour, link = DiskTier(tmp_path, LIMIT), DiskTier(tmp_path, LIMIT), os.link

    def second(*paths: Any, **keys: Any) -> None:
        monkeypatch.setattr(os, "link", link)
        assert neighbour.put(key("a"), value("a", 100))
        try:
            link(*paths, **keys)
        finally:
            shutil.rmtree(tmp_path / "ns")

    monkeypatch.setattr(os, "link", second)
    assert tier.put(key("a"), value("a", 100)) is False
    assert tier.put(key("a"), value("a", 100)) is True
