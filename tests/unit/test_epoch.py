# SPDX-License-Identifier: Apache-2.0
"""The file `.epoch` and the command `lmcache-ec epoch`: a number that only rises, and refused input."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from lmcache_ec.cli.commands import app
from lmcache_ec.cli.doctor import examine
from lmcache_ec.config import EncoderCacheConfig
from lmcache_ec.engine import Engine
from lmcache_ec.key import MAX_EPOCH
from lmcache_ec.signing import SigningKey
from lmcache_ec.tiers.disk import DiskTier
from lmcache_ec.tiers.disk_epoch import EpochError, raise_epoch, read_epoch


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("LMCACHE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that an engine has used."""
    DiskTier(tmp_path / "disk", 1 << 30).close()
    return tmp_path / "disk"


def run(*arguments: str, answer: str = "", **keys: Any) -> Result:
    extra = json.dumps(keys, default=str)
    result = CliRunner().invoke(app, ["epoch", "--extra", extra, *arguments], input=answer)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result


def words(text: str) -> str:
    """The text without the frame and line breaks of an 80-column terminal."""
    return " ".join(text.replace("│", " ").split())


# ---- the file


def test_without_a_file_or_a_folder_the_epoch_is_0_and_what_is_written_is_read(folder: Path) -> None:
    assert read_epoch(folder / "missing") == read_epoch(folder) == 0
    for epoch in (1, 2, 700, MAX_EPOCH):
        raise_epoch(folder, epoch)
        assert read_epoch(folder) == epoch
    assert {file.name for file in folder.iterdir()} == {".usage", ".epoch"}
    assert (folder / ".epoch").read_text() == f"{MAX_EPOCH}\n"  # the format that a person may write, too


@pytest.mark.parametrize(
    "text", ["", "\n", "-1\n", "1.5", "4 ", "0x4", "four", "4\n5\n", "1000000001", "9" * 17, "\xff"]
)
def test_an_invalid_epoch_is_an_error_that_names_the_file_its_content_and_what_is_accepted(
    folder: Path, text: str
) -> None:
    (folder / ".epoch").write_bytes(text.encode("latin-1"))
    for call in (read_epoch, lambda folder: raise_epoch(folder, 9)):
        with pytest.raises(EpochError) as raised:
            call(folder)
        assert f"{folder}/.epoch holds " in str(raised.value)
        assert "a whole number from 0 to 1000000000" in str(raised.value)
        assert "Write the number into it, or remove it and set ec.epoch" in str(raised.value)


def link(file: Path) -> None:
    (file.parent.parent / "elsewhere").write_text("7\n")
    file.symlink_to("../elsewhere")


@pytest.mark.parametrize("plant", [link, os.mkfifo, os.mkdir], ids=["link", "pipe", "folder"])
def test_a_stranger_under_the_files_name_is_not_followed_waited_for_or_replaced(
    folder: Path, plant: Callable[[Path], None]
) -> None:
    plant(folder / ".epoch")
    kind = (folder / ".epoch").lstat().st_mode
    for call in (read_epoch, lambda folder: raise_epoch(folder, 9)):
        with pytest.raises(
            EpochError, match=r"\.epoch cannot be read: .*not touched\. .*or remove it and set ec\.epoch"
        ):
            call(folder)
    assert (folder / ".epoch").lstat().st_mode == kind


def test_the_highest_of_epochs_raised_at_once_remains_and_a_reader_never_sees_it_fall(folder: Path) -> None:
    begun, seen, done = threading.Barrier(9), [0], threading.Event()

    def raise_to(epoch: int) -> None:
        begun.wait()
        with suppress(ValueError):  # it is not above the current one
            raise_epoch(folder, epoch)

    def read() -> None:
        begun.wait()
        while not done.is_set():
            seen.append(read_epoch(folder))

    threads = [threading.Thread(target=raise_to, args=(epoch,)) for epoch in range(1, 8)]
    reader = threading.Thread(target=read)
    for thread in (reader, *threads):
        thread.start()
    begun.wait()
    for thread in threads:
        thread.join()
    done.set()
    reader.join()
    assert read_epoch(folder) == 7
    assert seen == sorted(seen)


def test_leftovers_of_a_killed_command_are_removed_by_the_next_one_and_nothing_else_is(folder: Path) -> None:
    code = (
        "import os, pathlib, signal, sys\n"
        "from lmcache_ec.tiers import disk_epoch\n"
        "disk_epoch.os.rename = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"
        "disk_epoch.raise_epoch(pathlib.Path(sys.argv[1]), 7)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False).returncode == -signal.SIGKILL
    [left] = folder.glob(".epoch.*")
    others = {folder / ".epoch.md", folder / f".epoch.{'0' * 23}", folder / f"epoch.{'0' * 24}"}
    for other in others:
        other.touch()
    raise_epoch(folder, 1)
    assert not left.exists()
    assert {*folder.iterdir()} == others | {folder / ".epoch", folder / ".usage"}


def test_the_file_is_for_those_who_may_use_the_folder(folder: Path) -> None:
    folder.chmod(0o2770)
    raise_epoch(folder, 1)
    status = (folder / ".epoch").stat()
    assert (status.st_mode & 0o777, status.st_gid) == (0o660, folder.stat().st_gid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write for another user")
def test_a_file_written_by_root_belongs_to_the_folders_owner_who_can_read_it(folder: Path) -> None:
    os.chown(folder, 12345, 12345)
    raise_epoch(folder, 1)
    status = (folder / ".epoch").stat()
    assert (status.st_uid, status.st_mode & 0o777) == (12345, 0o600)


# ---- the namespace


def test_the_id_of_a_key_ends_the_namespace_of_every_epoch_however_long_the_models_name() -> None:
    key = SigningKey(bytes(32), "0123456789ab")
    engine = Engine("engine", "m" * 48 + "-0123456789abcdef", "producer", 1, 1 << 20).signing_with(key)
    named = {engine.namespace_at(epoch) for epoch in (0, 1, MAX_EPOCH)}
    assert len(named) == 3
    assert all(key.signs(name) and "-0123456789abcdef" in name for name in named)


# ---- the command


def test_the_command_begins_the_next_epoch_above_the_folders_and_the_configurations(folder: Path) -> None:
    assert run("--yes", local_disk=folder).stdout == f"{folder} is now in epoch 1 (before: 0).\n"
    assert "is now in epoch 6 (before: 5)" in run("--yes", local_disk=folder, epoch=5).stdout
    assert "is now in epoch 20 (before: 6)" in run("--yes", "--to", "20", local_disk=folder).stdout
    assert read_epoch(folder) == 20


def test_above_the_highest_epoch_the_command_names_another_way_and_no_option_that_was_not_given(folder: Path) -> None:
    refused = run("--yes", local_disk=folder, epoch=MAX_EPOCH)
    assert refused.exit_code == 1
    assert "there is none above it: change ec.salt" in refused.stderr
    assert "--to" not in refused.stderr


def test_a_person_is_asked_and_reminded_of_what_the_command_does_not_do(folder: Path) -> None:
    refused = run(local_disk=folder, answer="n\n")
    assert refused.exit_code == 1
    assert "is in epoch 0. Begin 1?" in refused.stdout
    assert "No epoch was begun." in refused.stderr
    assert read_epoch(folder) == 0
    done = run(local_disk=folder, answer="y\n")
    assert done.exit_code == 0
    assert "reset the encoder cache" in done.stderr
    assert "set ec.epoch: 1 in the configuration" in done.stderr


def test_a_program_gets_one_object(folder: Path) -> None:
    assert "required with --json" in words(run("--json", local_disk=folder).stderr)
    done = run("--json", "--yes", local_disk=folder)
    report = json.loads(done.stdout)
    assert len(report.pop("notes")) == 2
    assert report == {"folder": str(folder), "before": 0, "epoch": 1, "refusal": ""}
    assert done.stderr == ""
    refused = run("--json", "--yes", local_disk=folder / "missing")
    assert refused.exit_code == 1
    assert json.loads(refused.stdout)["refusal"].startswith(
        f"local_disk={folder}/missing: no engine has used this folder"
    )


@pytest.mark.parametrize("number", ["3", "2", "0", "-1", "1000000001"])
def test_a_number_that_is_not_above_the_present_one_is_refused_with_what_is_accepted(folder: Path, number: str) -> None:
    raise_epoch(folder, 3)
    refused = run("--yes", "--to", number, local_disk=folder)
    assert refused.exit_code == 2
    assert f"must be above the present epoch, 3: a whole number up to 1000000000, not {number}" in words(refused.stderr)
    assert read_epoch(folder) == 3


@pytest.mark.parametrize(
    ("keys", "given", "accepted"),
    [
        ({"remotes": ["redis://127.0.0.1:1"]}, "local_disk is not set (remotes only)", "Raise ec.epoch, which is 0"),
        ({"epoch": 4}, "local_disk is not set (no tier)", "Raise ec.epoch, which is 4"),
        (
            {"namespace": "vouched"},
            "namespace=vouched: an explicit namespace has no epochs",
            "Change it in the configuration",
        ),
    ],
)
def test_an_engine_without_epochs_of_its_own_is_refused_with_what_to_do(
    folder: Path, keys: dict[str, Any], given: str, accepted: str
) -> None:
    if "namespace" in keys:
        keys = {**keys, "local_disk": folder}
    refused = run("--yes", **keys)
    assert refused.exit_code == 1
    assert given in refused.stderr
    assert accepted in refused.stderr
    assert read_epoch(folder) == 0


def test_a_folder_that_no_engine_has_used_is_left_as_it_is(tmp_path: Path) -> None:
    for folder in (tmp_path / "missing", tmp_path):
        refused = run("--yes", local_disk=folder)
        assert refused.exit_code == 1
        assert f"local_disk={folder}: no engine has used this folder" in refused.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_whose_account_is_a_strangers_is_left_as_it_is(folder: Path) -> None:
    (folder / ".usage").unlink()
    (folder / ".usage").symlink_to("/etc/hostname")
    assert "was not touched" in run("--yes", local_disk=folder).stderr
    assert not (folder / ".epoch").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused_with_who_may_write(folder: Path) -> None:
    folder.chmod(0o500)
    refused = run("--yes", local_disk=folder)
    assert refused.exit_code == 1
    assert f"user {os.geteuid()} cannot write there" in refused.stderr
    folder.chmod(0o700)


def test_damage_is_reported_by_the_command_and_by_doctor_as_preventing_a_start(folder: Path) -> None:
    raise_epoch(folder, 3)
    extra = json.dumps({"local_disk": str(folder)})
    assert examine(extra, {}).disk["epoch"] == 3
    (folder / ".epoch").write_text("garbage")
    assert f"{folder}/.epoch holds 'garbage'" in run("--yes", local_disk=folder).stderr
    assert any(".epoch holds 'garbage'" in problem for problem in examine(extra, {}).prevents_start)
    named = json.dumps({"local_disk": str(folder), "namespace": "vouched"})
    assert not any(".epoch" in problem for problem in examine(named, {}).problems), "it has no epochs"


def test_the_configuration_takes_every_epoch_that_the_file_may_hold() -> None:
    assert EncoderCacheConfig(epoch=MAX_EPOCH).epoch == MAX_EPOCH
    with pytest.raises(ValueError, match="epoch"):
        EncoderCacheConfig(epoch=MAX_EPOCH + 1)
