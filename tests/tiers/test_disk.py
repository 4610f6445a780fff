# SPDX-License-Identifier: Apache-2.0
import errno
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.tiers import disk, disk_files, disk_folder, disk_survey
from lmcache_ec.tiers.base import TierError, WritesRefused
from lmcache_ec.tiers.disk import DiskTier
from tests.tiers.conformance import MIB, TierConformance, fetch, value

GIB = 1 << 30


def key(identifier: str) -> EncoderCacheKey:
    return EncoderCacheKey("ns", identifier)


def files(root: Path) -> list[Path]:
    """All files except the account and the news."""
    found = [path for path in root.rglob("*") if path.is_file() and path.parent != root / ".news"]
    return [path for path in found if path != root / ".usage"]


def temporaries(root: Path) -> list[Path]:
    return [path for path in files(root) if path.parent.name == ".tmp"]


def use_at(root: Path, identifier: str, when: float) -> None:
    os.utime(root / key(identifier).object_name, (when, when))


@contextmanager
def any_user_but_root() -> Iterator[None]:
    """Permissions do not apply to root."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)


def order_of_use(root: Path) -> list[str]:
    """Names of the entries' files, the least recently used first."""
    return [path.name for path in sorted(files(root), key=lambda path: path.stat().st_mtime_ns)]


class TestDiskTier(TierConformance):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> DiskTier:
        return DiskTier(tmp_path / "made" / "on" / "demand", GIB)


class TestDiskTierWithoutLocks(TierConformance):
    """As on a network mount whose server has no lock service."""

    examples = 10

    @pytest.fixture
    def tier(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskTier:
        no_locks(monkeypatch)
        return DiskTier(tmp_path, GIB)


class TestDiskTierWithoutHardLinks(TierConformance):
    """As on FAT file systems or some network mounts: published by rename."""

    examples = 10

    @pytest.fixture
    def tier(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskTier:
        def link(*_: object, **__: object) -> None:
            raise OSError(errno.EPERM, "no hard links here")

        monkeypatch.setattr(os, "link", link)
        return DiskTier(tmp_path, GIB)

    def test_one_of_many_writers_at_once_wins_however_slow_a_rename(
        self, tier: DiskTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rename = os.rename

        def slow(*args: Any, **keys: Any) -> None:
            time.sleep(0.1)  # lets the others catch up, unless something holds them
            rename(*args, **keys)

        monkeypatch.setattr(os, "rename", slow)
        self.test_one_of_many_writers_at_once_wins(tier)


def test_the_name_of_a_file_is_the_keys_object_name_and_nothing_else_is_left(tmp_path: Path) -> None:
    DiskTier(tmp_path, GIB).put(key("a"), value("a", 100))
    assert files(tmp_path) == [tmp_path / key("a").object_name]
    assert (tmp_path / key("a").object_name).read_bytes() == value("a", 100)


WRITER = """
import sys; from pathlib import Path
from lmcache_ec.key import EncoderCacheKey; from lmcache_ec.tiers.disk import DiskTier
tier, data = DiskTier(Path(sys.argv[1]), 1 << 40), memoryview(b"x" * (4 << 20))
print("ready", flush=True)
for number in range(1 << 30):
    tier.put(EncoderCacheKey("ns", str(number % 8)), data)
    tier.delete(EncoderCacheKey("ns", str((number + 4) % 8)))
"""


def writer(root: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(root)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert process.stdout is not None
    process.stdout.close()


def test_look_ups_of_many_threads_find_what_is_there(tmp_path: Path) -> None:
    tier, keys = DiskTier(tmp_path, MIB), [EncoderCacheKey("ns", f"picture {number}") for number in range(50)]
    for key in keys:
        tier.put(key, value("a", 10))

    def look(key: EncoderCacheKey) -> set[int | None]:
        return {tier.contains(key) for _ in range(100)}

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as threads:
            assert set.union(*threads.map(look, keys)) == {10}
    finally:
        sys.setswitchinterval(interval)


def test_a_living_neighbours_temporary_is_left_alone(tmp_path: Path) -> None:
    """The neighbour is stopped in the middle of a write, then resumed."""
    code = """
import os, sys; from pathlib import Path
from lmcache_ec.key import EncoderCacheKey; from lmcache_ec.tiers.disk import DiskTier
write = os.write
def slow(fd, data):
    print("writing", flush=True); sys.stdin.read(); return write(fd, data)
os.write = slow
print(DiskTier(Path(sys.argv[1]), 1 << 40).put(EncoderCacheKey("ns", "a"), memoryview(b"x" * 100)))
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as neighbour:
        assert neighbour.stdout is not None
        assert neighbour.stdout.readline() == "writing\n"
        tier = DiskTier(tmp_path, GIB)
        assert list(tier.list("ns")) == []
        assert len(temporaries(tmp_path)) == 1
        assert neighbour.communicate()[0] == "True\n"
    assert fetch(tier, key("a")) == b"x" * 100


def test_two_processes_on_one_folder_see_each_others_entries_and_never_a_torn_one(tmp_path: Path) -> None:
    process = writer(tmp_path)
    tier, buffer, hits = DiskTier(tmp_path, GIB), memoryview(bytearray(4 * MIB)), 0
    while hits < 50:
        length = tier.get_into(key(str(hits % 8)), buffer)
        assert length in (None, len(buffer))
        if length is not None:
            assert buffer == b"x" * len(buffer)
            buffer[:] = bytes(len(buffer))
            hits += 1
        assert process.poll() is None
        for _ in tier.list("ns"):
            pass
        tier.put(key("8"), memoryview(b"mine"))
    kill(process)


def test_the_folder_never_holds_more_than_its_limit_and_the_least_recently_used_goes(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 1000)
    for name in "abc":
        tier.put(key(name), value(name, 300))
    fetch(tier, key("a"))
    tier.put(key("d"), value("d", 400))
    assert {name for name in "abcd" if tier.contains(key(name))} == {"a", "c", "d"}
    tier.put(key("e"), value("e", 1000))
    assert [path.stat().st_size for path in files(tmp_path)] == [1000]


def test_deleted_entries_make_room(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 1000)
    for name in "ab":
        tier.put(key(name), value(name, 500))
    tier.delete(key("a"))
    (tmp_path / key("b").object_name).unlink()
    assert fetch(tier, key("b")) is None
    for name in "cd":
        tier.put(key(name), value(name, 500))
    assert all(tier.contains(key(name)) for name in "cd")


@pytest.mark.parametrize("listed", [True, False])
def test_the_limit_and_the_order_of_use_survive_a_restart(tmp_path: Path, listed: bool) -> None:
    first = DiskTier(tmp_path, 1000)
    for when, name in enumerate("abc"):
        first.put(key(name), value(name, 300))
        use_at(tmp_path, name, 1_000_000 + when)
    fetch(first, key("a"))  # now the most recent on disk, too
    tier = DiskTier(tmp_path, 1000)
    if listed:
        assert len(list(tier.list("ns"))) == 3
    tier.put(EncoderCacheKey("another-model", "d"), value("d", 300))
    assert {name for name in "abc" if tier.contains(key(name))} == {"a", "c"}
    tier.put(key("e"), value("e", 300))
    assert {name for name in "abc" if tier.contains(key(name))} == {"a"}


def test_a_list_notices_what_neighbours_wrote_and_deleted(tmp_path: Path) -> None:
    tier, neighbour = DiskTier(tmp_path, 1000), DiskTier(tmp_path, 1000)
    neighbour.put(key("old"), value("old", 400))
    tier.put(key("new"), value("new", 400))
    use_at(tmp_path, "old", 1_000_000)
    neighbour.delete(key("new"))
    assert [found.digest for found in tier.list("ns")] == [key("old").digest]
    tier.put(key("c"), value("c", 600))  # `new` no longer takes room, so that `old` may stay
    assert tier.contains(key("old")) == 400
    tier.put(key("d"), value("d", 100))
    assert tier.contains(key("old")) is None


def test_an_entry_that_a_neighbour_has_just_used_is_not_evicted(tmp_path: Path) -> None:
    tier, neighbour = DiskTier(tmp_path, 1000), DiskTier(tmp_path, 1000)
    for name in "abc":
        tier.put(key(name), value(name, 300))
    tier.maintain()  # as far as it knows, `a` will be evicted first
    fetch(neighbour, key("a"))
    tier.put(key("d"), value("d", 300))
    assert {name for name in "abcd" if tier.contains(key(name))} == {"a", "c", "d"}


def test_the_least_recently_used_go_first_across_engines_and_restarts(tmp_path: Path) -> None:
    chance, names = random.Random(0), [str(number) for number in range(200)]
    tiers = [DiskTier(tmp_path, 200 * 50) for _ in range(3)]
    for name in names:
        chance.choice(tiers).put(key(name), value(name, 50))
    for round_ in range(20):
        if round_ % 5 == 0:
            tiers[chance.randrange(3)] = DiskTier(tmp_path, 200 * 50)
        if round_ % 4 == 0:
            chance.choice(tiers).maintain()
        for name in chance.choices(names, k=30):
            fetch(chance.choice(tiers), key(name))
        expected = order_of_use(tmp_path)
        fresh = [f"{round_} {number}" for number in range(7)]
        for name in fresh:
            assert chance.choice(tiers).put(key(name), value(name, 50))
        names += fresh
        assert order_of_use(tmp_path)[:-7] == expected[7:]


def test_in_a_folder_too_large_to_look_through_a_put_evicts_the_oldest_of_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a survey is complete: from then on it evicts the oldest of all again."""
    monkeypatch.setattr(disk, "_SAMPLE", 64)
    looked_at, status = list[str](), disk_files._status

    def look(file: os.DirEntry[str]) -> object:
        looked_at.append(file.name)
        return status(file)

    monkeypatch.setattr(disk_files, "_status", look)
    for number in range(400):
        DiskTier(tmp_path, 400 * 50).put(key(str(number)), value(str(number), 50))
    before, tier = order_of_use(tmp_path), DiskTier(tmp_path, 400 * 50)
    assert tier.put(key("new"), value("new", 50))
    assert len(looked_at) <= 65
    [evicted] = set(before) - set(order_of_use(tmp_path))
    assert before.index(evicted) < 200
    tier.maintain()
    before = order_of_use(tmp_path)
    assert tier.put(key("newer"), value("newer", 50))
    assert set(before) - set(order_of_use(tmp_path)) == {before[0]}


def test_a_survey_remembers_only_the_least_recently_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_survey, "_VICTIMS", 10)
    tier = DiskTier(tmp_path, 100 * 50)
    for number in range(100):
        tier.put(key(str(number)), value(str(number), 50))
    expected = order_of_use(tmp_path)
    tier.maintain()
    assert [Path(path).name for _, path in tier._victims] == expected[:10]


def test_replicas_whose_random_generators_were_seeded_alike_do_not_sample_the_same_part_of_a_folder(
    tmp_path: Path,
) -> None:
    tier = DiskTier(tmp_path, 1000 * 50)
    for number in range(200):
        tier.put(key(str(number)), value(str(number), 50))
    samples = set[frozenset[str]]()
    root = os.open(tmp_path, os.O_RDONLY)
    for _ in range(4):
        random.seed(0)
        survey = disk_survey.Survey(root, tier._account)
        survey.sample(root, 20)
        samples.add(frozenset(name for _, name in survey._found))
    os.close(root)
    assert len(samples) == 4


def test_a_limit_that_was_lowered_is_kept_once_the_folder_is_surveyed(tmp_path: Path) -> None:
    larger = DiskTier(tmp_path, 1000)
    for name in "abcd":
        larger.put(EncoderCacheKey("model-" + name, name), value(name, 250))
    smaller = DiskTier(tmp_path, 600)
    list(smaller.list("model-d"))
    smaller.maintain()
    assert [smaller.contains(EncoderCacheKey("model-" + name, name)) for name in "abcd"] == [None, None, 250, 250]
    assert smaller.stored_bytes == 500


def test_a_removed_namespace_leaves_no_folder_and_room_for_others_at_once(tmp_path: Path) -> None:
    """While one tier writes into the same folder, and another into the removed namespace again."""
    running, other = DiskTier(tmp_path, 30_000), EncoderCacheKey("other", "one")
    for number in range(20):
        running.put(key(str(number)), value("a", 1000))
    running.put(other, value("b", 1000))
    (tmp_path / "ns" / ".tmp" / f"9.{'0' * 24}").write_bytes(b"of a dead")
    administrator = DiskTier(tmp_path, 1, make=False)
    assert administrator.remove("ns") == 20
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [".news", "other"]
    assert running.stored_bytes == 1000
    assert running.put(key("large"), value("c", 29_000)) is True  # without evicting anything
    assert running.contains(other) == 1000

    stranger = tmp_path / "ns" / "README"
    stranger.write_text("not ours")
    assert administrator.remove("ns") == 1
    assert stranger.read_text() == "not ours"
    shutil.copytree(tmp_path / "other", tmp_path / "Not ours")
    assert [use.namespace for use in administrator.namespaces()] == ["other"]
    running.maintain()
    assert running.stored_bytes == 1000


def test_looking_into_a_folder_creates_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        DiskTier(tmp_path / "none", 1, make=False)
    assert list(DiskTier(tmp_path, 1, make=False).namespaces()) == []
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_served_no_longer_leaves_no_folders_once_its_entries_are_evicted(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 100)
    tier.put(EncoderCacheKey("old", "a"), value("a", 100))
    tier.put(key("b"), value("b", 100))
    assert (tmp_path / "old").exists()
    list(tier.list("ns"))
    tier.maintain()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".news", ".usage", "ns"]
    assert tier.put(EncoderCacheKey("old", "a"), value("a", 100))


@pytest.mark.parametrize("account", [None, b"", b"x" * 44, b"x" * 4096])
def test_a_folder_whose_account_is_missing_or_damaged_is_counted_again(tmp_path: Path, account: bytes | None) -> None:
    tier = DiskTier(tmp_path, 1000)
    for name in "abc":
        tier.put(key(name), value(name, 300))
    (tmp_path / ".usage").unlink()
    if account is not None:
        (tmp_path / ".usage").write_bytes(account)
    for one in (tier, DiskTier(tmp_path, 1000)):
        assert one.put(key("d" + str(id(one))), value("d", 400))
        assert one.stored_bytes == sum(path.stat().st_size for path in files(tmp_path)) <= 1000


def test_files_added_or_removed_by_others_are_in_the_account_after_a_survey(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 1000)
    tier.put(key("a"), value("a", 300))
    copied = tmp_path / key("b").object_name
    copied.parent.mkdir(parents=True, exist_ok=True)
    copied.write_bytes(value("b", 500))
    (tmp_path / key("a").object_name).unlink()
    tier.maintain()
    assert tier.stored_bytes == 500


def test_where_too_little_is_free_nothing_is_written_and_nothing_evicted(tmp_path: Path) -> None:
    DiskTier(tmp_path, 1000).put(key("a"), value("a", 1000))
    status = os.statvfs(tmp_path)
    tier = DiskTier(tmp_path, 1000, min_free_bytes=status.f_blocks * status.f_frsize)
    with pytest.raises(TierError, match="bytes are free on its file system") as caught:
        tier.put(key("b"), value("b", 1000))
    assert caught.value.errno == errno.ENOSPC
    assert fetch(tier, key("a")) == value("a", 1000)
    assert tier.put(key("a"), value("a", 1000)) is False
    assert DiskTier(tmp_path, 1000, min_free_bytes=1).put(key("b"), value("b", 1000))


@pytest.mark.parametrize("ahead_s", [0, 9000, -9000])
def test_without_locks_a_temporary_is_dead_when_it_is_an_hour_old_by_the_clock_that_dates_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: int
) -> None:
    """On a network share that is the server's clock; this machine's may be ahead of it or behind."""
    no_locks(monkeypatch)
    server_s = time.time()
    monkeypatch.setattr("time.time", lambda: server_s + ahead_s)
    tier = DiskTier(tmp_path, 1000)
    assert "no locks on this file system" in tier.notice
    tier.put(key("a"), value("a", 600))
    for name, age in (("cafe", 3700), ("beef", 3500)):
        path = tmp_path / "ns" / ".tmp" / f"100.{name}{0:020}"
        path.write_bytes(bytes(100))
        os.utime(path, (server_s - age,) * 2)
    assert len(list(tier.list("ns"))) == 1
    assert [path.name for path in temporaries(tmp_path)] == ["100.beef" + "0" * 20]
    tier.maintain()
    assert tier.stored_bytes == 700


def test_an_entry_larger_than_the_tier_is_refused_and_evicts_nothing(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 1000)
    tier.put(key("a"), value("a", 1000))
    with pytest.raises(TierError, match="1001 bytes does not fit: the disk tier may hold 1000"):
        tier.put(key("b"), value("b", 1001))
    assert tier.contains(key("a")) == 1000


@pytest.mark.parametrize("call", ["write", "link", "open", "pwrite"])
def test_a_full_disk_is_an_error_that_leaves_nothing_and_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    tier = DiskTier(tmp_path, 1000)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(TierError, match="No space left") as caught:
            tier.put(key("a"), value("a", 1000))
    assert caught.value.errno == errno.ENOSPC
    assert files(tmp_path) == []
    assert tier.put(key("a"), value("a", 1000)) is True  # the failed write takes no room


def test_short_writes_and_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, readv = os.write, os.readv
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    monkeypatch.setattr(os, "readv", lambda fd, buffers: readv(fd, [buffers[0][:5]]))
    tier = DiskTier(tmp_path, 1000)
    tier.put(key("a"), value("a", 100))
    assert fetch(tier, key("a")) == value("a", 100)


def test_a_file_cut_short_while_it_is_read_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, readv = DiskTier(tmp_path, 1000), os.readv
    tier.put(key("a"), value("a", 100))

    def cut(fd: int, buffers: list[memoryview]) -> int:
        os.truncate(tmp_path / key("a").object_name, 40)
        return readv(fd, buffers)

    monkeypatch.setattr(os, "readv", cut)
    assert tier.get_into(key("a"), memoryview(bytearray(100))) is None


def test_a_handle_that_becomes_stale_while_it_is_read_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path, 1000)
    tier.put(key("a"), value("a", 100))

    def stale(*_: object) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "readv", stale)
    assert tier.get_into(key("a"), memoryview(bytearray(100))) is None


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOENT, errno.ENOTDIR])
def test_a_file_that_disappears_before_it_is_opened_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    tier = DiskTier(tmp_path, 1000)
    tier.put(key("a"), value("a", 100))

    def missing(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    for module, call in ((os, "open"), (os, "stat"), (disk_folder, "_openat2")):
        monkeypatch.setattr(module, call, missing)
    assert tier.get_into(key("a"), memoryview(bytearray(100))) is None
    assert tier.contains(key("a")) is None


def test_a_disk_that_fails_is_an_error_and_not_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path, 1000)
    tier.put(key("a"), value("a", 100))

    def broken(*_: object, **__: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for call in ("open", "readv", "stat", "unlink", "scandir"):
        monkeypatch.setattr(os, call, broken)
    for use in (lambda: fetch(tier, key("a")), lambda: tier.contains(key("a")), lambda: tier.delete(key("a"))):
        with pytest.raises(TierError, match="Input/output error"):
            use()
    with pytest.raises(TierError, match="could not list"):
        list(tier.list("ns"))


def test_a_read_only_folder_is_a_read_only_tier() -> None:
    """One line is logged. Each put is refused as read-only at once, and the next survey notices that this has changed.

    Nothing is tried: not even a temporary file is created.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        assert DiskTier(root, 1000).notice == ""
        DiskTier(root, 1000).put(key("a"), value("a", 100))
        for path in (root, *root.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        with any_user_but_root():
            tier = DiskTier(root, 1000)
            assert tier.read_only
            assert "read only, because it cannot be written to: Permission denied" in tier.notice
            assert fetch(tier, key("a")) == value("a", 100)
            assert len(list(tier.list("ns"))) == 1
            tier.maintain()
            for length in (100, 1000):
                with pytest.raises(WritesRefused, match="is read only: Permission denied") as caught:
                    tier.put(key("b"), value("b", length))
                assert caught.value.errno == errno.EROFS
            assert tier.put(key("a"), value("a", 100)) is False, "it is there"
            assert fetch(tier, key("a")) == value("a", 100)
            with pytest.raises(TierError, match="Permission denied"):
                tier.delete(key("a"))
        for path in (root, *root.rglob("*")):
            path.chmod(0o755)
        tier.maintain()
        assert not tier.read_only
        assert tier.put(key("b"), value("b", 100))  # allowed by now


def test_a_folder_that_becomes_read_only_is_noticed_at_the_first_write() -> None:
    """A single folder in it that belongs to another user affects only its own entries."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o777)
        with any_user_but_root():
            tier = DiskTier(root, 1000)
            assert tier.put(key("a"), value("a", 100))
        (root / "other").mkdir()
        with any_user_but_root():
            with pytest.raises(TierError, match="Permission denied") as caught:
                tier.put(EncoderCacheKey("other", "a"), value("a", 100))
            assert not isinstance(caught.value, WritesRefused)
            assert tier.put(key("b"), value("b", 100))
        for path in (root, *root.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        with any_user_but_root():
            with pytest.raises(WritesRefused):
                tier.put(key("c"), value("c", 100))
            assert tier.read_only
            assert fetch(tier, key("a")) == value("a", 100)
        for path in (root, *root.rglob("*")):
            path.chmod(0o755)


@pytest.mark.parametrize(("closed", "mode"), [(".", 0o000), (".", 0o333), (".", 0o444), ("ns", 0o333)])
def test_a_folder_in_which_nothing_can_be_read_is_an_error_at_the_start(closed: str, mode: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        DiskTier(root, 1000).put(key("a"), value("a", 100))
        (root / closed).chmod(mode)
        with (
            any_user_but_root(),
            pytest.raises(ValueError, match="nothing in this folder can be read: Permission denied"),
        ):
            DiskTier(root, 1000)
        (root / closed).chmod(0o755)


def test_a_folder_that_cannot_be_created_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file/cache cannot be made: .*/file is a file, name a folder"):
        DiskTier(tmp_path / "file" / "cache", 1000)
    with pytest.raises(ValueError, match=r"file is a file, name a folder"):
        DiskTier(tmp_path / "file", 1000)
    with pytest.raises(ValueError, match="must be a positive number of bytes, not 0"):
        DiskTier(tmp_path, 0)


def test_files_of_strangers_are_neither_listed_nor_evicted(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 100)
    tier.put(key("a"), value("a", 100))
    entry = tmp_path / key("a").object_name
    strangers = [
        tmp_path / "README",
        tmp_path / "NOT OURS" / entry.relative_to(tmp_path / "ns"),
        tmp_path / "ns" / "note.txt",
        tmp_path / "ns" / "zz" / entry.name,
        tmp_path / "ns" / entry.parent.name / "01" / entry.name,
        tmp_path / "datasets" / "00" / "picture.png",
        tmp_path / "datasets" / ".tmp" / "picture.png",
        entry.with_suffix(".bin"),
    ]
    for path in strangers:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x" * 200)
    (tmp_path / "checkpoints" / "00").mkdir(parents=True)
    fresh = DiskTier(tmp_path, 100)
    assert [found.digest for found in fresh.list("ns")] == [key("a").digest]
    fresh.maintain()
    assert fresh.stored_bytes == 100
    assert (tmp_path / "checkpoints" / "00").exists()
    fresh.put(key("b"), value("b", 100))
    assert all(path.exists() for path in strangers)
    assert not entry.exists()


def test_many_threads_keep_the_limit_and_the_account_is_exact(tmp_path: Path) -> None:
    """Ten times, since it is a matter of chance whether a look coincides with a removal."""
    for root in (tmp_path / str(number) for number in range(10)):
        tier = DiskTier(root, 10_000)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda number: tier.put(key(str(number)), value(str(number), 500 + number)), range(300)))  # noqa: B023
        assert 7_000 < sum(path.stat().st_size for path in files(root)) <= 10_000
        assert tier.stored_bytes == sum(path.stat().st_size for path in files(root))


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_anything_but_a_file_in_an_entrys_place_is_a_miss_and_a_failed_write(tmp_path: Path, kind: str) -> None:
    """A pipe must not block a reader forever, nor may the entry count as stored."""
    tier = DiskTier(tmp_path, GIB)
    path = tmp_path / key("picture").object_name
    path.parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert fetch(tier, key("picture")) is None
    assert tier.contains(key("picture")) is None
    with pytest.raises(TierError, match="not a regular file"):
        tier.put(key("picture"), value("a", 100))
    assert not temporaries(tmp_path)
