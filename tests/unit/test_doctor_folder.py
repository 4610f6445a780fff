# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec doctor` and an engine report the same about a folder, in the same words."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_ec.cli.doctor import examine


def looping(root: Path) -> Path:
    (root / "loop").symlink_to("loop")
    return root / "loop"


def below_a_loop(root: Path) -> Path:
    return looping(root) / "below"


def a_file(root: Path) -> Path:
    (root / "file").write_text("")
    return root / "file"


def below_a_file(root: Path) -> Path:
    return a_file(root) / "below" / "it"


def a_link_to_a_file(root: Path) -> Path:
    (root / "link").symlink_to(a_file(root))
    return root / "link"


def too_long(root: Path) -> Path:
    return root / ("x" * 300)


def below_what_is_not_writable(root: Path) -> Path:
    (root / "theirs").mkdir(0o555)
    return root / "theirs" / "below" / "it"


def a_link_to_where_nothing_can_be_made(root: Path) -> Path:
    (root / "link").symlink_to(below_what_is_not_writable(root))
    return root / "link"


def behind_a_closed_folder(root: Path) -> Path:
    (root / "closed").mkdir(0o700)
    return root / "closed" / "secretdir" / "x"


def where_no_files_are(root: Path) -> Path:
    return Path("/proc/x")


def unreadable(root: Path) -> Path:
    (root / "unreadable").mkdir(0o333)
    (root / "unreadable" / "ns").mkdir()
    return root / "unreadable"


def not_writable(root: Path) -> Path:
    (root / "theirs").mkdir(0o555)
    return root / "theirs"


def an_account_that_is_not_writable(root: Path) -> Path:
    (root / "shared").mkdir()
    (root / "shared").chmod(0o777)
    (root / "shared" / ".usage").touch(0o644)
    return root / "shared"


def an_account_that_is_not_readable(root: Path) -> Path:
    folder = an_account_that_is_not_writable(root)
    (folder / ".usage").chmod(0o600)
    return folder


def an_epoch_that_is_none(root: Path) -> Path:
    (root / ".epoch").write_text("last Tuesday\n")
    return root


_BOTH = """
import json, os, sys
from pathlib import Path
from lmcache_ec.cli.doctor import examine
from lmcache_ec.opening_check import _disk_and_epoch
from lmcache_ec.tiers.opening import Opening, opened
from dataclasses import replace
from functools import partial
folder = Path(sys.argv[1])
examine("{}", {})  # imports what root alone may be able to read
disk = Opening.of_disk(folder, 1 << 20, 0, 60.0)
import lmcache_ec.tiers.disk, lmcache_ec.tiers.disk_epoch
disk = replace(disk, open=partial(_disk_and_epoch, disk.open, folder))
os.geteuid() or os.setresuid(*[65534] * 3)
extra = {"local_disk": str(folder), "max_local_disk_size": 0.001, "min_free_disk_size": 0}
report = examine(json.dumps(extra), {})
refused, noticed = [], []
opened([disk], lambda kind, text: noticed.append(text), refused.append)
prevents = [text for text in report.prevents_start if text.startswith("local_disk")]
notes = [text for text in report.notes if "disk tier at" in text]
print(json.dumps([prevents, refused, notes, noticed]))
"""


def doctor_and_engine(folder: Path) -> list[list[str]]:
    """Problems and notes, from doctor and engine, in a process of a user other than root."""
    done = subprocess.run([sys.executable, "-c", _BOTH, str(folder)], capture_output=True, text=True, check=True)
    found: list[list[str]] = json.loads(done.stdout)
    return found


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder in which any user may do anything. (Each pytest run closes its own folders to others.)"""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (looping, "loop is a link that leads to itself: name another folder"),
        (below_a_loop, "loop is a link that leads to itself: name another folder"),
        (a_file, "/file is a file, name a folder"),
        (below_a_file, "/file/below/it cannot be made: {root}/file is a file, name a folder"),
        (a_link_to_a_file, "/link is a file, name a folder"),
        (too_long, "File name too long: name another folder"),
        (below_what_is_not_writable, "{root}/theirs is not writable for user {user}: make the folder for that user"),
        (a_link_to_where_nothing_can_be_made, "/link cannot be made: {root}/theirs is not writable for user {user}"),
        (behind_a_closed_folder, "/secretdir/x cannot be opened: user {user} may not enter {root}/closed: allow it"),
        (where_no_files_are, "/proc/x cannot be made: /proc is on proc, which cannot hold files"),
        (unreadable, "/unreadable: nothing in this folder can be read: Permission denied"),
        (an_epoch_that_is_none, "which is not an epoch"),
    ],
)
def test_doctor_reports_what_ends_a_start_in_the_same_words(
    root: Path, made: Callable[[Path], Path], expected: str
) -> None:
    doctors, engines, *_ = doctor_and_engine(made(root))
    (problem,) = engines
    assert doctors == engines
    assert expected.format(root=root, user=os.geteuid() or 65534) in problem


@pytest.mark.parametrize("made", [not_writable, an_account_that_is_not_writable, an_account_that_is_not_readable])
def test_a_folder_that_is_only_read_is_noted_by_doctor_in_the_words_of_the_engine(
    root: Path, made: Callable[[Path], Path]
) -> None:
    folder = made(root)
    before = sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*"))
    prevents, refused, doctors, engines = doctor_and_engine(folder)
    (note,) = engines
    assert (prevents, refused, doctors) == ([], [], engines)
    assert "read only, because it cannot be written to: Permission denied" in note
    assert f"until user {os.geteuid() or 65534} may write to it" in note
    assert sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*")) == before


@pytest.mark.parametrize("key", ["local_disk", "signing_key_file"])
def test_a_null_byte_in_a_path_is_a_wrong_value(key: str) -> None:
    (problem,) = examine(json.dumps({key: "/tmp/a\0b"}), {}).problems
    assert problem.startswith(f"{key}='/tmp/a\\x00b' in ec_connector_extra_config: must not contain a null byte")


@pytest.mark.parametrize("path", ["$HOME/cache", "${HOME}/cache", "/data/$USER", "/data/${USER", "~/$CACHE"])
def test_a_variable_in_a_path_is_to_be_written_out(path: str) -> None:
    (problem,) = examine(json.dumps({"local_disk": path}), {}).problems
    assert problem.endswith("must be written out: variables are replaced in addresses of remotes only")
