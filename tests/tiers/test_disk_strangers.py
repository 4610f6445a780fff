# SPDX-License-Identifier: Apache-2.0
"""Whatever an attacker plants in the folder, and whenever: nothing outside is touched, and the tier keeps serving."""

import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.tiers import disk, disk_account, disk_files, disk_folder, disk_news, disk_survey
from lmcache_ec.tiers.base import TierError
from lmcache_ec.tiers.disk import DiskTier
from lmcache_ec.tiers.journal import Journal
from lmcache_ec.tiers.lane import Habits
from lmcache_ec.tiers.remote import Lookup
from lmcache_ec.tiers.stack import Stack
from tests.tiers.conformance import fetch, value

LIMIT = 2000
A, B, OTHER = EncoderCacheKey("ns", "a"), EncoderCacheKey("ns", "b"), EncoderCacheKey("other", "c")
TEMPORARY = f"100.{'0' * 24}"
LOG = "0" * 24
NAMES = {
    "account": ".usage",
    "news": ".news",
    "log": f".news/{LOG}",
    "namespace": "ns",
    "temporaries": "ns/.tmp",
    "temporary": f"ns/.tmp/{TEMPORARY}",
    "shard": f"ns/{A.digest.hex()[:2]}",
    "entry": A.object_name,
}


@pytest.fixture(params=["one call", pytest.param("folder by folder", marks=pytest.mark.slow)])
def resolution(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernel's own check of a whole path, and without it, as on kernels before 5.6."""
    if request.param == "folder by folder":
        monkeypatch.setattr(disk_folder, "_kernel_resolves", lambda: False)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A user's folder, with names in it that could be ours."""
    folder = tmp_path / "outside"
    entry = folder / A.object_name.partition("/")[2]
    for path in (
        folder / "thesis.txt",
        folder / TEMPORARY,
        folder / LOG,
        entry,
        folder / entry.name,
        folder / ".tmp" / TEMPORARY,
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value(str(path), 100))
    age(folder)
    return folder


def age(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (1_000_000, 1_000_000))


def state(folder: Path) -> dict[Path, object]:
    """Everything in a folder that could change, except access times."""
    found: dict[Path, object] = {}
    for path in (folder, *folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        found[path] = (status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, content)
    return found


# ---- what is planted


def link_to_folder(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def link_to_file(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "thesis.txt")


def dangling_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "nothing")


def hard_link(path: Path, outside: Path) -> None:
    os.link(outside / "thesis.txt", path)


def pipe(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def in_use_pipe(path: Path, outside: Path) -> None:
    """With a process at its other end, so that it can be opened for writing, too."""
    os.mkfifo(path)
    OPEN.append(os.open(path, os.O_RDWR | os.O_NONBLOCK))


def socket_(path: Path, outside: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        here = os.open(path.parent, os.O_PATH)  # its whole path may be too long for a socket
        try:
            bound.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


def device(path: Path, outside: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("only root may make a device")


def folder_(path: Path, outside: Path) -> None:
    path.mkdir()
    (path / "in the way").write_text("")


OPEN: list[int] = []
KINDS = [link_to_folder, link_to_file, dangling_link, hard_link, pipe, in_use_pipe, socket_, device, folder_]
Kind = Callable[[Path, Path], None]


def plant(path: Path, kind: Kind, outside: Path) -> None:
    """Plant something. Whatever had the name before is renamed, so that the tier does not see it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(path):
        path.rename(f"{path}.aside")
    kind(path, outside)


@pytest.fixture(autouse=True)
def close_pipes() -> Iterator[None]:
    yield
    while OPEN:
        os.close(OPEN.pop())


# ---- what the tier then does


def use(tier: DiskTier) -> list[str]:
    """Call everything. Returns the errors; any other exception is a failure."""
    errors = []
    buffer = memoryview(bytearray(100))
    for call in (
        lambda: tier.put(A, value("a", 100)),
        lambda: tier.get_into(A, buffer),
        lambda: tier.contains(A),
        lambda: list(tier.list("ns")),
        tier.maintain,
        lambda: tier.news("ns"),
        lambda: list(tier.namespaces()),
        lambda: tier.stored_bytes,
        tier.born,
        lambda: tier.delete(A),
        lambda: tier.put(B, value("b", 100)),
        lambda: tier.remove("ns"),
        lambda: tier.put(A, value("a", 100)),
        lambda: tier.get_into(A, buffer),
    ):
        try:
            call()
        except TierError as error:
            errors.append(str(error.strerror))
    return errors


def in_time(job: Callable[[], object], seconds: float = 20.0) -> None:
    """AssertionError if the job does not end, for example because it blocks on a pipe; its errors are raised here."""
    problems: list[BaseException] = []

    def run() -> None:
        try:
            job()
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it waits"
    for problem in problems:
        raise problem


@pytest.mark.parametrize("moment", ["before", "meanwhile"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__.strip("_"))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("resolution")
def test_nothing_outside_is_touched_and_the_tier_serves_on(
    tmp_path: Path, outside: Path, name: str, kind: Kind, moment: str
) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    if moment == "before":
        plant(root / NAMES[name], kind, outside)
        before = state(outside)
    tier = DiskTier(root, LIMIT)
    if moment == "meanwhile":
        assert tier.put(A, value("a", 100))
        assert tier.put(B, value("b", 100))
        list(tier.list("ns"))
        plant(root / NAMES[name], kind, outside)
        before = state(outside)
    planted = (root / NAMES[name]).lstat()

    def job() -> None:
        use(tier)
        assert tier.put(OTHER, value("c", 100))
        assert fetch(tier, OTHER) == value("c", 100)
        assert {entry.digest for entry in tier.list("other")} == {OTHER.digest}
        tier.maintain()

    in_time(job)
    assert state(outside) == before
    removable = name == "entry" or kind is folder_ or (kind is hard_link and name in ("log", "temporary"))
    if not removable:
        after = (root / NAMES[name]).lstat()
        assert (after.st_ino, after.st_mode) == (planted.st_ino, planted.st_mode), "it is somebody's, and stays"
    shutil.rmtree(root)
    assert state(outside).keys() == before.keys()
    assert tier.put(A, value("a", 100))
    assert fetch(tier, A) == value("a", 100)


@pytest.mark.parametrize("kind", [link_to_file, link_to_folder, dangling_link], ids=lambda kind: kind.__name__)
@pytest.mark.usefixtures("resolution")
def test_a_link_in_an_entrys_place_is_a_miss_and_the_next_write_replaces_it(
    tmp_path: Path, outside: Path, kind: Kind
) -> None:
    """The link is removed, its target stays, and the account is exact."""
    root = tmp_path / "root"
    tier = DiskTier(root, LIMIT)
    plant(root / A.object_name, kind, outside)
    before = state(outside)
    assert tier.contains(A) is None
    assert tier.get_into(A, memoryview(bytearray(100))) is None
    assert list(tier.list("ns")) == []
    assert tier.put(A, value("a", 100)) is True
    assert fetch(tier, A) == value("a", 100)
    assert tier.stored_bytes == 100
    assert state(outside) == before


@pytest.mark.parametrize("name", ["namespace", "temporaries", "shard"])
def test_a_folder_that_is_a_link_is_refused_in_one_line_that_names_it(tmp_path: Path, outside: Path, name: str) -> None:
    root = tmp_path / "root"
    plant(root / NAMES[name], link_to_folder, outside)
    errors = use(DiskTier(root, LIMIT))
    assert errors
    for error in errors:
        assert error.startswith(f"disk tier at {root} could not ")
        assert error.endswith("is a link or another mount, or behind one, and was not touched")


@pytest.mark.parametrize(
    "kind", [link_to_file, dangling_link, hard_link, pipe, folder_], ids=lambda kind: kind.__name__
)
def test_where_the_account_is_not_ours_the_engine_logs_it_and_counts_for_itself(
    tmp_path: Path, outside: Path, kind: Kind
) -> None:
    """It shares the account again once that is ours."""
    root = tmp_path / "root"
    plant(root / ".usage", kind, outside)
    tier = DiskTier(root, 250)
    assert "each engine counts only what it has seen: .usage" in tier.notice
    for name in "abcd":
        assert tier.put(EncoderCacheKey("ns", name), value(name, 100))
    assert tier.stored_bytes == sum(path.stat().st_size for path in root.rglob("*.safetensors")) == 200
    if (root / ".usage").is_dir():
        shutil.rmtree(root / ".usage")
    else:
        (root / ".usage").unlink()
    tier.maintain()
    assert DiskTier(root, 250).stored_bytes == tier.stored_bytes == 200


@pytest.mark.fault(
    "another user replaces the account while it is in use",
    "LocalDisk",
    "it is not touched; each engine counts for itself",
)
def test_an_account_that_a_stranger_replaces_while_it_is_used_is_reported_once(tmp_path: Path, outside: Path) -> None:
    """It is reported again if that happens another time, after the account was ours in between."""
    root = tmp_path / "root"
    before, reports = state(outside), list[str]()
    journal = Journal(lambda kind, text: reports.append(text))
    stack = Stack([(DiskTier(root, LIMIT), Habits(Lookup.CATALOG, refresh_s=0.0, local=True))], journal, "ns")

    def survey() -> list[str]:
        stack.relist("ns")  # now, not after twenty times the duration of the last listing
        stack._survey(stack.lanes[0])
        return [text for text in reports if "each engine counts only what it has seen: .usage" in text]

    try:
        assert survey() == []
        for kind, count in ((link_to_file, 1), (pipe, 2)):
            (root / ".usage").unlink()
            plant(root / ".usage", kind, outside)
            stack.lanes[0].tier.put(EncoderCacheKey("ns", f"{count}"), value("new", 100))
            assert [len(survey()) for _ in range(2)] == [count] * 2
            (root / ".usage").unlink()
            assert len(survey()) == count
    finally:
        stack.close()
    assert state(outside) == before


def test_an_entry_with_a_second_name_is_read_and_its_time_of_use_is_left_alone(tmp_path: Path, outside: Path) -> None:
    """The file may also belong to others: to a backup by hard links, or to an attacker."""
    root, victim = tmp_path / "root", outside / "thesis.txt"
    tier = DiskTier(root, LIMIT)
    plant(root / A.object_name, hard_link, outside)
    before = state(outside)
    assert fetch(tier, A) == victim.read_bytes()
    assert state(outside) == before


def test_numbers_that_strangers_made_up_do_not_stop_a_survey(tmp_path: Path) -> None:
    """A temporary file that claims an enormous size, and enormous files: the sum counts as very large."""
    tier = DiskTier(tmp_path, LIMIT)
    (tmp_path / "ns" / ".tmp").mkdir(parents=True)
    with (tmp_path / "ns" / ".tmp" / f"{'9' * 200}.{'0' * 24}").open("wb"):
        for number in range(5):
            path = tmp_path / EncoderCacheKey("other", str(number)).object_name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as sparse:
                sparse.truncate(1 << 43)
        list(tier.list("ns"))
        tier.maintain()
        tier.maintain()
    assert tier.put(A, value("a", 100))
    assert tier.stored_bytes == 100


# ---- races


class Interrupted:
    """A module whose system calls are counted; before one of them something else happens."""

    calls = 0
    at = 0

    def __init__(self, module: ModuleType, happens: Callable[[], None]) -> None:
        self._module, self._happens = module, happens

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._module, name)
        if not callable(real) or name in ("fspath", "strerror", "urandom", "stat_result", "DirEntry"):
            return real

        def call(*args: Any, **keys: Any) -> Any:
            Interrupted.calls += 1
            if Interrupted.calls == Interrupted.at:
                self._happens()
            return real(*args, **keys)

        return call


def _races() -> Iterator[Any]:
    """Races with a link to a folder run by default, the others with the slow tests."""
    for name in NAMES:
        for kind in (link_to_folder, dangling_link, hard_link, pipe):
            marks = [] if kind is link_to_folder else [pytest.mark.slow]
            if name not in ("log", "temporary"):
                yield pytest.param(name, kind, marks=marks, id=f"{name}-{kind.__name__}")


@pytest.mark.parametrize(("name", "kind"), list(_races()))
@pytest.mark.usefixtures("resolution")
def test_anything_that_takes_a_names_place_between_any_two_system_calls_does_no_harm_either(
    tmp_path: Path, outside: Path, name: str, kind: Kind
) -> None:
    """A put, a read, a survey and a removal are each interrupted before each of their calls."""
    before: dict[Path, object] = {}

    def happens() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Interrupted, "at", 0)
            path = root / NAMES[name]
            if path.parent.is_dir():
                plant(path, kind, outside)
        before.update(state(outside))

    def survey(tier: DiskTier) -> None:
        list(tier.list("ns"))
        tier.maintain()

    jobs: list[Callable[[DiskTier], object]] = [
        lambda tier: tier.put(A, value("a", 100)),
        lambda tier: tier.get_into(B, memoryview(bytearray(100))),
        survey,
        lambda tier: tier.remove("ns"),
    ]
    for number, job in enumerate(jobs):
        for moment in range(1, 400):
            root = Path(tempfile.mkdtemp(dir=tmp_path))
            tier = DiskTier(root, LIMIT)
            tier.put(B, value("b", 100))
            before.clear()
            with pytest.MonkeyPatch.context() as patch:
                for module in (disk, disk_account, disk_files, disk_folder, disk_news, disk_survey):
                    patch.setattr(module, "os", Interrupted(os, happens))
                patch.setattr(disk_folder, "_openat2", Interrupted(disk_folder, happens)._openat2)
                patch.setattr(Interrupted, "calls", 0)
                patch.setattr(Interrupted, "at", moment)
                try:
                    job(tier)
                except TierError:
                    pass
                made = Interrupted.calls
            if before:
                assert state(outside) == before, f"job {number}, before call {moment}"
            assert tier.put(OTHER, value("c", 100))
            assert fetch(tier, OTHER) == value("c", 100)
            shutil.rmtree(root)
            age(outside)
            if made < moment:
                break
        assert moment > 5


# ---- mounts


MOUNTS = """
import sys; from pathlib import Path
from tests.tiers.test_disk_strangers import *
root, outside, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
tier = DiskTier(root, LIMIT)
tier.put(A, value("a", 100)); tier.put(B, value("b", 100))
path = root / name
path.parent.mkdir(parents=True, exist_ok=True)
source = outside
if name in (".usage", A.object_name):
    source = outside / "thesis.txt"
    path.touch()
else:
    path.mkdir(exist_ok=True)
subprocess.run(["mount", "--bind", str(source), str(path)], check=True)
before = state(outside)
print(*use(tier), *use(DiskTier(root, LIMIT)), sep="\\n")
assert tier.put(OTHER, value("c", 100)) and fetch(tier, OTHER) == value("c", 100)
assert state(outside) == before
"""


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("log", "temporary")])
def test_a_file_system_mounted_on_a_name_is_left_alone(tmp_path: Path, outside: Path, name: str) -> None:
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mounts may be made here")
    if not disk_folder._kernel_resolves():
        pytest.skip("this kernel has no openat2: mounts are not seen")
    command = ["unshare", "--mount", sys.executable, "-c", MOUNTS, str(tmp_path / "root"), str(outside), NAMES[name]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr


# ---- rights


@pytest.mark.parametrize(
    ("root_mode", "folders", "files"),
    [(0o700, 0o700, 0o600), (0o755, 0o750, 0o640), (0o2775, 0o2770, 0o660), (0o777, 0o770, 0o660)],
)
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_created_files_have_the_rights_of_the_roots_group_and_none_for_others(
    tmp_path: Path, root_mode: int, folders: int, files: int, umask: int
) -> None:
    """Whatever the umask. A folder that belongs to a group, as set up by Kubernetes, is shared by that group."""
    root = tmp_path / "root"
    root.mkdir()
    if os.geteuid() == 0:
        os.chown(root, 0, 4711)
    root.chmod(root_mode)
    before = os.umask(umask)
    try:
        assert DiskTier(root, LIMIT).put(A, value("a", 100))
    finally:
        os.umask(before)
    for path in root.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (folders if path.is_dir() else files), path
        assert path.stat().st_gid == root.stat().st_gid or not root_mode & 0o070


def test_a_folder_that_the_tier_creates_is_for_its_user_only(tmp_path: Path) -> None:
    root = tmp_path / "made"
    assert DiskTier(root, LIMIT).put(A, value("a", 100))
    for path in (root, *root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
