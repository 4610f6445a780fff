# SPDX-License-Identifier: Apache-2.0
"""The arena takes only what control groups and limits leave: no engine is killed or ends with a traceback for it."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_ec.host_memory import Growing, fitting

MIB, GIB = 1 << 20, 1 << 30


def group(root: Path, limit: int | str, usage: int, name: str = "") -> Path:
    """A host with cgroup v2 on which this process is in the control group /pod, with these numbers in group `name`."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text("0::/pod\n")
    folder = root / "sys/fs/cgroup" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    return root


def test_without_a_limit_or_with_room_enough_the_arena_takes_what_is_configured(tmp_path: Path) -> None:
    assert fitting(GIB, tmp_path).bytes == GIB
    assert fitting(GIB, group(tmp_path, "max", 5 * GIB)).bytes == GIB
    fit = fitting(GIB, group(tmp_path, 4 * GIB, GIB))
    assert (fit.bytes, fit.message) == (GIB, "")


def test_the_arena_leaves_a_reserve_in_the_tightest_group_above_it(tmp_path: Path) -> None:
    group(tmp_path, 300 * MIB, 100 * MIB, "pod")
    fit = fitting(GIB, group(tmp_path, 64 * GIB, GIB))
    assert fit.bytes == 136 * MIB
    expected = "LocalCPU gets 136 MiB instead of 1 GiB: memory.max of control group /pod leaves no room for more"
    assert fit.message.replace("1.0 GiB", "1 GiB").replace("136.0", "136") == expected


def test_where_no_memory_is_left_the_arena_takes_next_to_nothing_and_the_engine_starts(tmp_path: Path) -> None:
    assert fitting(GIB, group(tmp_path, 300 * MIB, 290 * MIB)).bytes == MIB


def allowed(growing: Growing, length: int) -> bool:
    """Its answer once it has read the limits: the first call only starts reading them."""
    growing.allows(length)
    assert growing._reader is not None
    growing._reader.join()
    return growing.allows(length)


def test_growth_checks_again_and_follows_what_others_take_and_give_back(tmp_path: Path) -> None:
    """The caller itself never reads a file."""
    now = [100.0]
    growing = Growing(group(tmp_path, GIB, 0), lambda: now[0])
    assert growing.allows(MIB) is False, "not known yet"
    assert allowed(growing, 256 * MIB)
    group(tmp_path, GIB, 900 * MIB)
    now[0] += 70
    assert not allowed(growing, 256 * MIB)
    assert "memory.max of control group /" in growing.refusal
    group(tmp_path, GIB, 100 * MIB)
    now[0] += 70
    assert allowed(growing, 256 * MIB)
    assert growing.refusal == ""
    group(tmp_path, "max", 0)
    now[0] += 70
    assert allowed(growing, 1 << 50)


def test_where_no_group_has_a_limit_growth_checks_nothing(tmp_path: Path) -> None:
    growing = Growing(group(tmp_path, "max", 0))
    assert growing.allows(1 << 50)
    assert growing._reader is None


SERVES = """
import logging, resource, sys
logging.basicConfig(level=logging.WARNING, format="%(message)s")
{before}
from benchmarks.testbed.core import Bench, names
with Bench(None, arena_bytes=1 << 30) as bench:
    for name in names("image", {images}):
        bench.encode([name], rows={rows}, persist=False)
        bench.settle()
    assert bench.serves(name, rows={rows})
    print("capacity", bench.cache.book.capacity)
"""


def serves(before: str = "", rows: int = 8, images: int = 4, within: Path | None = None) -> tuple[int, str]:
    """Capacity and log of a cache in its own process, configured for 1 GiB, that saves these images."""
    code = SERVES.format(before=before, rows=rows, images=images)
    enter = f"echo $$ > {within}/cgroup.procs && exec" if within else "exec"
    command = ["sh", "-c", f'{enter} "$0" -c "$1"', sys.executable, code]
    folder = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return int(done.stdout.split()[-1]), done.stderr


def test_under_a_limit_of_file_sizes_the_arena_is_as_small_as_that_and_reports_it() -> None:
    capacity, log = serves("resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, 64 << 20))")
    assert capacity == 64 * MIB
    assert "LocalCPU gets 64" in log
    assert "RLIMIT_FSIZE (ulimit -f)" in log


def test_under_a_limit_of_addresses_the_arena_leaves_half_of_them_and_reports_it() -> None:
    before = """
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (900 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
"""
    capacity, log = serves(before)
    assert capacity < 512 * MIB
    assert "RLIMIT_AS (ulimit -v)" in log


def test_an_arena_that_cannot_be_mapped_is_reported_in_one_sentence() -> None:
    """In whichever process it happens; here in the store process."""
    code = """
import os, resource
from lmcache_ec import arena
fd = arena.create(1 << 40)
resource.setrlimit(resource.RLIMIT_AS, (1 << 38, 1 << 38))
try:
    arena.attach(fd)
except OSError as error:
    print(error.strerror)
os.execl(__import__("sys").executable, "python", "-c", '''
import sys, socket
from lmcache_ec import store
ends = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)[0].detach() for _ in range(2)]
store.os.fork = lambda: 0
sys.argv = ["store", sys.argv[1], *map(str, ends)]
store.main()
''', str(fd))
"""
    code = code.replace(
        "fd = arena.create(1 << 40)", "fd = os.dup(arena.create(1 << 40)); os.set_inheritable(fd, True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    for text in (done.stdout, done.stderr):
        assert "of LocalCPU cannot be mapped (Cannot allocate memory): lower max_local_cpu_size" in text
        assert len(text.splitlines()) == 1


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A real control group of 300 MiB, below that of this process."""
    groups = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    if "memory" in groups:
        parent, limit = Path("/sys/fs/cgroup/memory") / groups["memory"].strip("/"), "memory.limit_in_bytes"
    else:
        parent, limit = Path("/sys/fs/cgroup") / groups.get("", "").strip("/"), "memory.max"
    folder = parent / f"lmcache-ec-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(300 * MIB))
    except OSError as error:
        if folder.exists():
            folder.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield folder
    deadline = time.monotonic() + 20
    while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    folder.rmdir()


def test_an_engine_in_a_control_group_smaller_than_its_arena_fills_it_and_survives(small_group: Path) -> None:
    """400 MiB of entries are stored; without a check of the limit, the kernel would kill it."""
    capacity, log = serves(rows=65_536, images=50, within=small_group)
    assert capacity < 240 * MIB
    assert "of control group" in log
