# SPDX-License-Identifier: Apache-2.0
"""LocalDisk with real processes that write, delete and evict in one folder, and are stopped and killed."""

import json
import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.tiers.base import TierError
from lmcache_ec.tiers.disk import DiskTier
from tests.examples import examples

LARGEST = 40_000
LIMITS = {"small": 500_000, "large": 800_000}

STORM = """
import random, sys; from pathlib import Path
from lmcache_ec.key import EncoderCacheKey; from lmcache_ec.tiers.base import TierError
from lmcache_ec.tiers.disk import DiskTier
chance, tier, refused = random.Random(), DiskTier(Path(sys.argv[1]), int(sys.argv[2])), 0
buffer = memoryview(bytearray(40_000))
print("ready", flush=True)
while True:
    key = EncoderCacheKey(chance.choice(["ns", "other"]), str(chance.randrange(80)))
    what = chance.random()
    try:
        if what < 0.7:
            tier.put(key, buffer[: chance.randrange(40_001)])
        elif what < 0.8:
            tier.get_into(key, buffer[: tier.contains(key) or 0])
        elif what < 0.99:
            tier.delete(key)
        else:
            sum(1 for _ in tier.list("ns"))
            tier.maintain()
    except TierError as error:
        if "no room" not in str(error):
            raise
"""


def storm(root: Path, limit: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", STORM, str(root), str(limit)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert process.stdout is not None
    process.stdout.close()


def held(root: Path) -> int:
    """Bytes in entries and temporaries, as `du --apparent-size` counts them: a file with two names once."""
    files = [path for path in root.rglob("*") if path.is_file() and path.name != ".usage"]
    statuses = [path.stat() for path in files if path.parent.name != ".news"]
    return sum({status.st_ino: status.st_size for status in statuses}.values())


def test_two_storms_with_limits_of_their_own_keep_the_folder_within_the_larger_one(tmp_path: Path) -> None:
    """Checked while both are stopped at arbitrary points; now and then one of them is killed."""
    moments, watcher, most = random.Random(0), DiskTier(tmp_path, LIMITS["large"]), 0
    watcher.maintain()
    writers = {name: storm(tmp_path, limit) for name, limit in LIMITS.items()}
    for number in range(examples(120)):
        select.select([], [], [], moments.uniform(0, 0.02))
        for writer in writers.values():
            writer.send_signal(signal.SIGSTOP)
            _, status = os.waitpid(writer.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status), "it has ended"
        bytes_now, account = held(tmp_path), watcher.stored_bytes
        assert account is not None
        assert bytes_now <= account <= LIMITS["large"]
        most = max(most, bytes_now)
        if number % 12 == 11:
            name = moments.choice(list(writers))
            end(writers[name])
            writers[name] = storm(tmp_path, LIMITS[name])
        for writer in writers.values():
            writer.send_signal(signal.SIGCONT)
    for writer in writers.values():
        end(writer)
    assert most > LIMITS["small"] - LARGEST
    watcher.maintain()
    assert watcher.stored_bytes == held(tmp_path)
    smaller = DiskTier(tmp_path, LIMITS["small"])
    smaller.maintain()
    assert held(tmp_path) <= LIMITS["small"]
    assert smaller.stored_bytes == held(tmp_path)


KILLS = """
import itertools, json, os, random, select, signal, sys; from pathlib import Path
from lmcache_ec import entry; from lmcache_ec.key import EncoderCacheKey; from lmcache_ec.tiers.disk import DiskTier
root, limit, spec = Path(sys.argv[1]), 40 * 8192, entry.TensorSpec(32, 32, "F32")

def sealed(key):
    data = memoryview(bytearray(entry.entry_length(key.identifier, spec)))
    entry.seal(data, key, spec, "test")
    return data

def fetched(tier, key):
    data = memoryview(bytearray(entry.entry_length(key.identifier, spec)))
    return tier.get_into(key, data) == len(data) and entry.verify(data, key) == spec

def write(start):
    tier = DiskTier(root, limit)
    for number in itertools.count(start):
        key = EncoderCacheKey("ns", str(number % 100))
        tier.put(key, sealed(key))
        tier.delete(EncoderCacheKey("ns", str((number + 50) % 100)))

moments, found = random.Random(0), dict(kills=0, left_over=0, entries=0)
for number in range(200):
    pid = os.fork()
    if not pid:
        write(moments.randrange(100))
    select.select([], [], [], moments.uniform(0, 0.01))
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    found["kills"] += 1
    found["left_over"] += len(list(root.glob("ns/.tmp/*")))
    tier = DiskTier(root, limit)
    listed = {one.digest for one in tier.list("ns")}
    assert not list(root.glob("ns/.tmp/*"))
    keys = [key for key in (EncoderCacheKey("ns", str(number)) for number in range(100)) if key.digest in listed]
    assert len(keys) == len(listed) and all(fetched(tier, key) for key in keys)
    found["entries"] += len(keys)
    tier.maintain()
    assert tier.stored_bytes == sum(path.stat().st_size for path in root.rglob("*.safetensors")) <= limit
    probe = EncoderCacheKey("ns", f"probe {number}")
    assert tier.put(probe, sealed(probe)) and fetched(tier, probe)
    tier.delete(probe)
print(json.dumps(found))
"""


@pytest.mark.fault("writers are killed 200 times", "LocalDisk", "every entry verifies; no temporary file is left")
def test_two_hundred_kills_leave_entries_that_verify_no_temporary_and_a_folder_that_serves(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLS, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] == 200
    assert found["left_over"] > 5
    assert found["entries"] > 1000


@pytest.mark.fault("another engine is stopped while it holds the account", "LocalDisk", "the others give up after 5 s")
def test_an_engine_stopped_while_it_holds_the_account_blocks_no_other_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes fail in time and look-ups continue; afterwards everything is as before."""
    monkeypatch.setattr("lmcache_ec.tiers.disk_account._LOCK_TIMEOUT_S", 0.3)
    tier = DiskTier(tmp_path, LARGEST)
    assert tier.put(EncoderCacheKey("ns", "a"), memoryview(b"a"))
    code = "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / ".usage")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"\n"
        with pytest.raises(TierError, match="another process has held the account"):
            tier.put(EncoderCacheKey("ns", "b"), memoryview(b"b"))
        assert tier.get_into(EncoderCacheKey("ns", "a"), memoryview(bytearray(1))) == 1
        holder.kill()
    assert tier.put(EncoderCacheKey("ns", "b"), memoryview(b"b"))
    assert tier.stored_bytes == held(tmp_path) == 2


FORKS = """
import fcntl, os, sys; from pathlib import Path
from lmcache_ec.tiers import disk_account
disk_account._LOCK_TIMEOUT_S = 0.1
account = disk_account.FolderAccount(Path(sys.argv[1]))
account.settle(None, 0, 0)
fcntl.flock(account._file.fd, fcntl.LOCK_EX)
if not os.fork():
    try:
        account.reserve(100, 1000)
    except TimeoutError:
        os._exit(0)
    os._exit(1)
waited = os.waitstatus_to_exitcode(os.wait()[1])
fcntl.flock(account._file.fd, fcntl.LOCK_UN)
if not os.fork():
    os._exit(account.reserve(100, 1000) is None)
sys.exit(waited or os.waitstatus_to_exitcode(os.wait()[1]) or account.reserve(200, 1000).total != 300)
"""


def test_a_process_that_was_forked_waits_for_the_account_while_its_parent_has_it(tmp_path: Path) -> None:
    """The file is open before the fork, and a descriptor that both share has only one lock."""
    done = subprocess.run([sys.executable, "-c", FORKS, str(tmp_path / ".usage")], check=False, timeout=60)
    assert done.returncode == 0
