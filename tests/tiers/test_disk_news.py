# SPDX-License-Identifier: Apache-2.0
"""Announcements of neighbours on a folder: a follower loses nothing that it could read, and no log does any harm."""

import errno
import fcntl
import os
import random
import select
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.tiers import disk_news
from lmcache_ec.tiers.disk import DiskTier
from lmcache_ec.tiers.disk_news import FolderNews
from tests.tiers.conformance import fetch, value
from tests.tiers.test_disk import any_user_but_root

LOG_NAME = "0" * 24
RECORD_BYTES = 36
LOG_BYTES = 65_536
MINUTE_S = 61.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / ".news"


@pytest.fixture
def writer(folder: Path) -> FolderNews:
    return FolderNews(folder)


@pytest.fixture
def follower(folder: Path) -> FolderNews:
    """A follower that began before anything was announced."""
    follower = FolderNews(folder)
    assert follower.hear("ns") == []
    return follower


def digest(number: int) -> bytes:
    return EncoderCacheKey("ns", str(number)).digest


def key(identifier: str) -> EncoderCacheKey:
    return EncoderCacheKey("ns", identifier)


def record(*numbers: int, namespace: str = "ns") -> bytes:
    """The log of a writer that announced these entries."""
    with tempfile.TemporaryDirectory() as elsewhere:
        news = FolderNews(Path(elsewhere))
        for number in numbers:
            news.announce(namespace, digest(number))
        return b"".join(path.read_bytes() for path in sorted(Path(elsewhere).iterdir()))


def logs(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


# ---- announced and read


def test_news_is_read_once_by_each_neighbour_and_not_by_its_writer(folder: Path, writer: FolderNews) -> None:
    others = [FolderNews(folder) for _ in range(2)]
    assert [each.hear("ns") for each in (writer, *others)] == [[], [], []]
    for number in range(3):
        writer.announce("ns", digest(number))
    for other in others:
        assert other.hear("ns") == [digest(number) for number in range(3)]
        assert other.hear("ns") == []
    assert writer.hear("ns") == []
    others[0].announce("ns", digest(3))
    assert writer.hear("ns") == [digest(3)]


def test_news_from_before_a_follower_began_is_left_to_the_listing(folder: Path, writer: FolderNews) -> None:
    writer.announce("ns", digest(0))
    late = FolderNews(folder)
    assert late.hear("ns") == []
    writer.announce("ns", digest(1))
    assert late.hear("ns") == [digest(1)]


def test_entries_of_another_namespace_are_no_news(writer: FolderNews, follower: FolderNews) -> None:
    writer.announce("other", digest(0))
    writer.announce("ns", digest(1))
    assert follower.hear("ns") == [digest(1)]


def test_a_log_ends_and_another_begins_and_a_writer_has_three_at_most(
    folder: Path, writer: FolderNews, follower: FolderNews
) -> None:
    heard, most = [], 0
    for number in range(10_000):
        writer.announce("ns", digest(number))
        if number % 700 == 0:
            heard += follower.hear("ns")
            most = max(most, len(logs(folder)))
            assert all(path.stat().st_size <= LOG_BYTES for path in logs(folder))
    heard += follower.hear("ns")
    assert sorted(heard) == sorted(map(digest, range(10_000)))
    assert most == len(logs(folder)) == 3


def test_a_follower_that_lags_reads_what_is_left_and_goes_on(writer: FolderNews, follower: FolderNews) -> None:
    for number in range(10_000):
        writer.announce("ns", digest(number))
    heard = follower.hear("ns")
    assert 3_640 < len(heard) < 10_000
    assert set(heard) == set(map(digest, range(10_000 - len(heard), 10_000)))
    writer.announce("ns", digest(10_000))
    assert follower.hear("ns") == [digest(10_000)]


def test_more_news_than_is_read_at_once_is_read_over_several_calls(
    folder: Path, follower: FolderNews, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_news, "_TURN_BYTES", 100 * RECORD_BYTES)
    for writer in range(3):
        news = FolderNews(folder)
        for number in range(150):
            news.announce("ns", digest(1000 * writer + number))
    turns = [follower.hear("ns") for _ in range(6)]
    assert [len(turn) for turn in turns] == [100, 100, 100, 100, 50, 0]
    assert len({key for turn in turns for key in turn}) == 450


# ---- writers that end


def test_the_tail_of_a_writer_that_was_killed_is_passed_over(folder: Path, follower: FolderNews) -> None:
    """If it was not torn but only read in the middle of an append, it is read again once it is complete."""
    folder.mkdir()
    for torn in range(RECORD_BYTES):
        log, whole = folder / f"{torn:024}", record(2 * torn, 2 * torn + 1)
        log.write_bytes(whole[: RECORD_BYTES + torn])
        assert follower.hear("ns") == [digest(2 * torn)]
        assert follower.hear("ns") == []
        log.write_bytes(whole)
        assert follower.hear("ns") == [digest(2 * torn + 1)]


ANNOUNCES = """
import os, sys; from io import FileIO
from pathlib import Path
from lmcache_ec.tiers.disk_news import FolderNews
news, number = FolderNews(Path(sys.argv[1])), int(sys.argv[2])
while True:
    news.announce("ns", number.to_bytes(32, "big"))
    os.write(1, number.to_bytes(8, "big"))
    number += 1
"""


def test_news_written_before_a_kill_is_read(folder: Path, follower: FolderNews) -> None:
    """Writers are killed anywhere, even in the middle of an append. In the end only logs remain, which are swept."""
    moments, announced, heard = random.Random(0), set[int](), list[bytes]()
    for start in range(10):
        command = [sys.executable, "-c", ANNOUNCES, str(folder), str(start * 1_000_000)]
        # A small pipe, so that the writer never gets further ahead than the logs that it keeps.
        with subprocess.Popen(command, stdout=subprocess.PIPE, pipesize=4096) as process:
            assert process.stdout is not None
            announced.add(int.from_bytes(process.stdout.read(8), "big"))
            end = time.monotonic() + moments.uniform(0, 0.02)
            while (left := end - time.monotonic()) > 0:
                if select.select([process.stdout], [], [], left)[0]:
                    announced.add(int.from_bytes(process.stdout.read(8), "big"))
                heard += follower.hear("ns")
            process.kill()
            rest = process.stdout.read()
        announced |= {int.from_bytes(rest[at : at + 8], "big") for at in range(0, len(rest) - 7, 8)}
        heard += follower.hear("ns")
    assert len(heard) == len(set(heard))
    assert announced <= {int.from_bytes(key, "big") for key in heard}
    for path in logs(folder):
        age(path, MINUTE_S)
    follower.sweep()
    assert logs(folder) == []


def test_logs_without_a_writer_are_removed_after_a_minute_and_those_of_the_living_never(
    folder: Path, writer: FolderNews, follower: FolderNews
) -> None:
    writer.announce("ns", digest(0))
    [living] = logs(folder)
    dead, fresh, stranger = folder / ("d" * 24), folder / ("f" * 24), folder / "notes.txt"
    for path in (dead, fresh, stranger):
        path.write_bytes(b"")
    for path in (living, dead, stranger):
        age(path, MINUTE_S)
    follower.sweep()
    assert logs(folder) == sorted([living, fresh, stranger])
    writer.announce("ns", digest(1))
    assert logs(folder) == sorted([living, fresh, stranger])


@pytest.mark.parametrize("ahead_s", [0, 9000, -9000])
def test_without_locks_a_log_is_dead_when_it_is_an_hour_old_and_its_writer_begins_another(
    folder: Path, writer: FolderNews, follower: FolderNews, monkeypatch: pytest.MonkeyPatch, ahead_s: int
) -> None:
    """By the clock that dates files: this machine's may be ahead of a share's server or behind it."""
    server_s = time.time()
    monkeypatch.setattr("time.time", lambda: server_s + ahead_s)

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    writer.announce("ns", digest(0))
    [log] = logs(folder)
    for seconds, left in ((3500, [log]), (3700, [])):
        os.utime(log, (server_s - seconds,) * 2)
        follower.sweep()
        assert logs(folder) == left
    writer.announce("ns", digest(1))
    assert follower.hear("ns") == [digest(1)]


# ---- folders


@pytest.mark.parametrize("how", ["removed", "renamed", "replaced", "copied", "only the log"])
def test_where_the_folder_is_removed_or_replaced_by_hand_news_goes_on(
    folder: Path, writer: FolderNews, follower: FolderNews, how: str
) -> None:
    writer.announce("ns", digest(0))
    assert follower.hear("ns") == [digest(0)]
    if how == "only the log":
        logs(folder)[0].unlink()
    elif how == "removed":
        shutil.rmtree(folder.parent)
    else:
        folder.parent.rename(f"{folder.parent}-away")
        if how == "replaced":
            folder.mkdir(parents=True)
        elif how == "copied":
            shutil.copytree(f"{folder.parent}-away", folder.parent)
    assert follower.hear("ns") == []
    writer.announce("ns", digest(1))
    assert follower.hear("ns") == [digest(1)]


@pytest.mark.parametrize("what", ["link", "dangling link", "file", "pipe"])
def test_something_else_in_the_folders_place_is_left_alone_and_entries_are_written_all_the_same(
    tmp_path: Path, what: str
) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir()
    place = root / ".news"
    if what == "file":
        place.write_bytes(record(0))
    elif what == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(elsewhere)
        if what == "link":
            elsewhere.mkdir()
            (elsewhere / LOG_NAME).write_bytes(record(0))
            age(elsewhere / LOG_NAME, 100_000)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    tiers = [DiskTier(root, 1000) for _ in range(2)]
    for tier in tiers:
        assert tier.news("ns") == []
    assert tiers[0].put(key("a"), value("a", 100))
    assert tiers[1].news("ns") == []
    assert len(list(tiers[1].list("ns"))) == 1
    tiers[1].maintain()
    entry = Path(key("a").object_name)
    made = [".usage", "ns", ".tmp", entry.parent.name, entry.name]
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted([*before, *made])


def test_a_folder_that_can_only_be_read_is_followed(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as name:  # other users cannot enter tmp_path
        root = Path(name)
        root.chmod(0o755)
        mine = DiskTier(root, 1000)
        with any_user_but_root():
            theirs = DiskTier(root, 1000)
            assert theirs.news("ns") == []
        assert mine.put(key("a"), value("a", 100))
        for path in (root / ".news", *(root / ".news").iterdir()):
            path.chmod(0o555 if path.is_dir() else 0o444)
            age(path, MINUTE_S)
        with any_user_but_root():
            assert theirs.news("ns") == [key("a").digest]
            theirs._news.sweep()
            theirs._news.announce("ns", digest(1))
        assert len(logs(root / ".news")) == 1
        (root / ".news").chmod(0o755)


def test_logs_that_another_user_may_not_read_are_passed_over(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / ".news"
        folder.mkdir()
        Path(name).chmod(0o755)
        with any_user_but_root():
            follower = FolderNews(folder)
            assert follower.hear("ns") == []
        (folder / LOG_NAME).write_bytes(record(0))
        (folder / LOG_NAME).chmod(0o600)
        (folder / ("1" * 24)).write_bytes(record(1))
        (folder / ("1" * 24)).chmod(0o644)
        with any_user_but_root():
            assert follower.hear("ns") == [digest(1)]


OUT_OF_ROOM = """
import resource, sys; from io import FileIO
from pathlib import Path
from lmcache_ec.key import EncoderCacheKey; from lmcache_ec.tiers.disk import DiskTier
tier = DiskTier(Path(sys.argv[1]), 1 << 20)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
for number in range(100):
    assert tier.put(EncoderCacheKey("ns", str(number)), memoryview(bytes(100)))
"""


def test_where_a_log_finds_no_room_entries_are_written_and_only_the_torn_record_is_lost(tmp_path: Path) -> None:
    """Files may grow to 1000 bytes: the 28th record of a log is cut short by the kernel."""
    other = DiskTier(tmp_path, 1 << 20)
    assert other.news("ns") == []
    subprocess.run([sys.executable, "-c", OUT_OF_ROOM, str(tmp_path)], check=True)
    assert len(list(other.list("ns"))) == 100
    assert {path.stat().st_size for path in logs(tmp_path / ".news")} <= {1000, 100 % 27 * RECORD_BYTES}
    heard = other.news("ns")
    assert set(heard) == {digest(number) for number in range(100 - len(heard), 100)}
    assert len(heard) > 50


def test_where_no_news_can_be_written_a_put_succeeds_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    tier, other = (DiskTier(tmp_path, 10_000) for _ in range(2))
    assert other.news("ns") == []
    with monkeypatch.context() as patch:
        patch.setattr(disk_news._Log, "_begin", refuse)
        assert tier.put(key("a"), value("a", 100)) is True
        assert fetch(tier, key("a")) == value("a", 100)
    assert other.news("ns") == []
    tier._news._log._file, tier._news._log._room = FileIO("/dev/full", "w"), 100
    assert tier.put(key("c"), value("c", 100)) is True
    assert other.news("ns") == []
    assert tier.put(key("b"), value("b", 100)) is True
    assert other.news("ns") == [key("b").digest]
    assert tier.put(key("b"), value("b", 100)) is False
    assert other.news("ns") == [], "it was there"


# ---- logs of strangers


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=100),
            st.integers(0, 3).map(record),
            st.integers(0, 3).map(lambda number: record(number, namespace="other")),
        ),
        max_size=8,
    )
)
@settings(deadline=None)
def test_whatever_a_log_holds_only_whole_records_that_verify_are_read(parts: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as name:
        follower, data = FolderNews(Path(name)), b"".join(parts)
        assert follower.hear("ns") == []
        (Path(name) / LOG_NAME).write_bytes(data)
        records = [data[at : at + RECORD_BYTES] for at in range(0, len(data) - RECORD_BYTES + 1, RECORD_BYTES)]
        verified = {record(number): digest(number) for number in range(4)}
        assert follower.hear("ns") == [verified[record] for record in records if record in verified]


@pytest.fixture
def hostile(folder: Path, tmp_path: Path) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    (tmp_path / "secret").write_bytes(record(1))
    (folder / ("a" * 24)).symlink_to(tmp_path / "secret")
    os.mkfifo(folder / ("b" * 24))
    (folder / ("c" * 24)).mkdir()
    with (folder / ("d" * 24)).open("wb") as sparse:
        sparse.truncate(1 << 42)
    os.link(tmp_path / "secret", folder / ("not a log" + "e" * 15))
    (folder / ("f" * 24)).write_bytes(record(2) * 10_000)
    for path in folder.iterdir():
        if not path.is_symlink():
            age(path, 100_000)
    yield folder
    (folder / ("d" * 24)).unlink(missing_ok=True)


def test_files_of_strangers_hold_up_nobody_and_take_no_memory(
    folder: Path, follower: FolderNews, hostile: Path, writer: FolderNews
) -> None:
    """Links, pipes, folders, other names, and oversized logs."""
    writer.announce("ns", digest(0))
    tracemalloc.start()
    heard = [key for _ in range(20) for key in follower.hear("ns")]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert heard.count(digest(0)) == 1
    assert 0 < heard.count(digest(2)) <= LOG_BYTES // RECORD_BYTES
    assert len(heard) == heard.count(digest(0)) + heard.count(digest(2))
    assert most < 3 << 20


def test_a_sweep_removes_only_logs(folder: Path, follower: FolderNews, hostile: Path) -> None:
    (hostile / ("d" * 24)).touch()
    follower.sweep()
    kinds = {path.name[0]: stat.S_IFMT(path.lstat().st_mode) for path in folder.iterdir()}
    regular = {"d": stat.S_IFREG, "n": stat.S_IFREG}
    assert kinds == {"a": stat.S_IFLNK, "b": stat.S_IFIFO, "c": stat.S_IFDIR, **regular}
    assert (folder.parent / "secret").read_bytes() == record(1)


def test_more_logs_than_a_folder_may_have_are_not_all_looked_at(
    folder: Path, follower: FolderNews, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_news, "_FOLLOWED", 10)
    folder.mkdir()
    for number in range(30):
        (folder / f"{number:024}").write_bytes(record(number))
    assert len(follower.hear("ns")) == 10
    assert follower.hear("ns") == []


def test_descriptors_do_not_pile_up(folder: Path, writer: FolderNews, follower: FolderNews, hostile: Path) -> None:
    writer.announce("ns", digest(0))
    before = len(os.listdir("/proc/self/fd"))
    for number in range(2000):
        writer.announce("ns", digest(number))
        follower.hear("ns")
        if number % 100 == 0:
            follower.sweep()
    assert len(os.listdir("/proc/self/fd")) == before


# ---- the account


def test_logs_are_not_in_the_account_and_are_unlocked_once_their_tier_has_ended(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 1000)
    for number in range(50):
        tier.put(key(str(number)), value("a", 100))
    tier.maintain()
    assert tier.stored_bytes == 1000
    [log] = logs(tmp_path / ".news")
    fd = os.open(log, os.O_WRONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    del tier
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)
    age(log, MINUTE_S)
    DiskTier(tmp_path, 1000).maintain()
    assert logs(tmp_path / ".news") == []
