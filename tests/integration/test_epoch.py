# SPDX-License-Identifier: Apache-2.0
"""A new epoch for running engines: no entry of the previous one is found, and none of the new one is lost."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.testbed.core import NAMESPACE, Bench, names, temporaries
from lmcache_ec.cli.commands import app
from lmcache_ec.config import ConfigError
from lmcache_ec.entry import verify
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.tiers.disk_epoch import raise_epoch

IMAGES = names("image", 3)


def begin(folder: Path, *arguments: str) -> int:
    """Begin an epoch by the command. Returns the new epoch."""
    extra = json.dumps({"local_disk": str(folder)})
    done = CliRunner().invoke(app, ["epoch", "--yes", "--json", "--extra", extra, *arguments])
    assert done.exit_code == 0, done.output
    return int(json.loads(done.stdout)["epoch"])


def follows(bench: Bench, epoch: int) -> None:
    bench.until(f"it is in epoch {epoch}", lambda: bench.snapshot()["epoch"] == epoch)


def on_disk(folder: Path) -> dict[str, set[str]]:
    """Namespace -> identifiers; each entry verifies, and only under its own name."""
    found: dict[str, set[str]] = {}
    for path in folder.rglob("*.safetensors"):
        data = path.read_bytes()
        fields = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        key = EncoderCacheKey(fields["namespace"], fields["identifier"])
        verify(memoryview(data), key)
        assert path == folder / key.object_name
        found.setdefault(key.namespace, set()).add(key.identifier)
    return found


def test_a_running_engine_finds_no_older_entries_and_keeps_what_it_encodes_from_then_on(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        bench.encode(IMAGES)
        bench.settle()
        assert all(map(bench.serves, IMAGES))
        follows(bench, begin(tmp_path))
        assert bench.cache.namespace == f"{NAMESPACE}-e1"
        bench.scanned()
        assert not any(map(bench.serves, IMAGES))
        bench.encode(IMAGES[:1])
        bench.settle()
        assert bench.serves(IMAGES[0])
        assert on_disk(tmp_path) == {NAMESPACE: {*IMAGES}, f"{NAMESPACE}-e1": {IMAGES[0]}}
        assert (bench.snapshot()["weight_changes"], bench.status()["namespace"]) == (0, f"{NAMESPACE}-e1")
    with Bench(tmp_path) as successor:
        successor.scanned()
        assert [successor.serves(image) for image in IMAGES] == [True, False, False], "a restart stays in it"
        assert not temporaries(tmp_path)


def test_saves_under_way_are_finished_under_the_old_name_and_are_not_served(tmp_path: Path) -> None:
    """The step was planned before the epoch began, and its rank copies after that."""
    with Bench(tmp_path) as bench:
        step = bench.save(IMAGES)
        follows(bench, begin(tmp_path))
        for worker in bench.workers:
            worker.run(step)
        bench.settle()
        assert not any(map(bench.live, IMAGES))
        assert not any(map(bench.serves, IMAGES))
        bench.encode(IMAGES)
        bench.settle()
        assert all(map(bench.serves, IMAGES))
        assert on_disk(tmp_path) == {NAMESPACE: {*IMAGES}, f"{NAMESPACE}-e1": {*IMAGES}}


def test_all_engines_of_a_folder_follow_and_go_on_sharing(tmp_path: Path) -> None:
    with Bench(tmp_path) as one, Bench(tmp_path) as other:
        one.encode(IMAGES)
        one.settle()
        other.until("the neighbour has it", lambda: other.serves(IMAGES[0]))
        for arguments in ((), ("--to", "7")):
            epoch = begin(tmp_path, *arguments)
            follows(one, epoch)
            follows(other, epoch)
            assert not other.serves(IMAGES[0])
        one.encode(IMAGES)
        one.settle()
        other.until("the neighbour has it", lambda: other.serves(IMAGES[0]))


def test_the_higher_epoch_of_the_folder_and_the_configuration_applies(tmp_path: Path) -> None:
    with Bench(tmp_path, epoch=2) as bench:
        assert bench.cache.namespace == f"{NAMESPACE}-e2"
        raise_epoch(tmp_path, 1)  # by hand: the command reads the configuration
        bench.encode(IMAGES)
        bench.settle()
    with Bench(tmp_path, epoch=2) as bench:
        assert bench.cache.namespace == f"{NAMESPACE}-e2"
        assert all(map(bench.serves, IMAGES))
    raise_epoch(tmp_path, 3)
    with Bench(tmp_path, epoch=2) as bench:
        assert bench.cache.namespace == bench.status()["namespace"] == f"{NAMESPACE}-e3"
        assert not bench.serves(IMAGES[0])


def test_an_epoch_that_begins_while_no_store_process_serves_is_followed_by_the_next_one(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        bench.encode(IMAGES)
        bench.settle()
        os.kill(bench.serving(), signal.SIGKILL)
        begin(tmp_path)
        follows(bench, 1)
        bench.serving()
        bench.encode(IMAGES[:1])
        bench.settle()
        os.kill(bench.serving(), signal.SIGKILL)
        bench.serving()
        assert bench.cache.namespace == bench.status()["namespace"] == f"{NAMESPACE}-e1"
        assert bench.serves(IMAGES[0])
        assert not bench.serves(IMAGES[1])
        assert on_disk(tmp_path) == {NAMESPACE: {*IMAGES}, f"{NAMESPACE}-e1": {IMAGES[0]}}


def test_a_namespace_that_was_given_by_name_has_no_epochs(tmp_path: Path) -> None:
    with Bench(tmp_path):
        pass
    (tmp_path / ".epoch").write_text("garbage")
    with Bench(tmp_path, namespace="vouched") as bench:
        bench.encode(IMAGES)
        bench.settle()
        assert bench.cache.namespace == NAMESPACE
        assert all(map(bench.serves, IMAGES))


def test_garbage_in_the_file_ends_the_start_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / ".epoch").write_text("garbage")
    words = rf"local_disk: {re.escape(str(tmp_path))}/\.epoch holds 'garbage'.*must be a whole number from 0 to"
    with pytest.raises(ConfigError, match=words):
        Bench(tmp_path)


def test_garbage_in_the_file_of_a_running_engine_is_one_line_in_the_log_and_the_epoch_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if ".epoch holds" in record.getMessage()]

    file = tmp_path / ".epoch"
    file.write_text("1\n")
    with Bench(tmp_path) as bench:
        bench.encode(IMAGES)
        bench.settle()
        (tmp_path / "new").write_text("garbage")
        (tmp_path / "new").rename(file)  # atomically: a partial file would be reported, too
        bench.until("that is reported", lines)
        os.kill(bench.serving(), signal.SIGKILL)  # the next store process still serves
        bench.serving()
        assert all(map(bench.serves, IMAGES))
        bench.cache.book.forget_all()
        assert all(map(bench.serves, IMAGES)), "the disk is used, too"
        file.unlink()
        assert begin(tmp_path, "--to", "2") == 2
        follows(bench, 2)
    assert len(lines()) == 1
    assert "This engine stays in epoch 1" in lines()[0]
