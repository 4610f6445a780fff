# SPDX-License-Identifier: Apache-2.0
"""The resources that an engine takes from its host, all of which it returns."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks.testbed.core import (
    MIB,
    Bench,
    abstract_sockets,
    arena_resident_bytes,
    length,
    names,
    own_arenas,
    store_processes,
)
from benchmarks.testbed.waiting import wait_until
from lmcache_ec.link import rank_address

pytestmark = pytest.mark.usefixtures("new_interpreters")


def mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "lmcache-ec" in line]


def descriptors() -> dict[str, str]:
    return {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _open(fd)}


def _open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_memory_follows_what_is_stored_and_not_the_limit(tmp_path: Path) -> None:
    before = own_arenas()
    with Bench(tmp_path, ranks=3, arena_bytes=2048 * MIB) as bench:
        assert len(own_arenas() - before) == 1
        assert arena_resident_bytes(bench.arena) == 0
        for name in names("image", 200):
            bench.encode([name])
        bench.settle()
        assert 200 * length("image-0") <= arena_resident_bytes(bench.arena) <= 200 * (length("image-0") + 8192)
        high = arena_resident_bytes(bench.arena)
        for name in names("image", 200):
            assert bench.serves(name)
        bench.settle()
        assert arena_resident_bytes(bench.arena) == high


def test_the_limit_holds_while_far_more_is_stored(tmp_path: Path) -> None:
    with Bench(tmp_path, arena_bytes=2 * MIB) as bench:
        for name in names("image", 400):
            bench.encode([name])
            bench.settle()
        assert arena_resident_bytes(bench.arena) <= 2 * MIB
        assert bench.snapshot()["evictions"] > 100
        assert all(bench.serves(name) for name in names("image", 400))
        bench.settle()


def test_an_engine_that_ends_leaves_nothing_in_its_processes_nor_on_the_host(tmp_path: Path) -> None:
    def engine() -> None:
        with Bench(tmp_path, ranks=2, arena_bytes=8 * MIB) as bench:
            bench.encode(names("image", 20))
            bench.settle()
            os.kill(bench.serving(), 9)  # a lost store process leaves nothing either
            sockets.append(f"status-{bench.serving()}-")
            sockets.append(rank_address(bench.engine, 0)[1:-1])
            assert len(set(abstract_sockets(*sockets))) == 3
            arenas.append(bench.arena)
            assert all(bench.serves(name) for name in names("image", 20))

    arenas, sockets = list[int](), list[str]()
    before = (descriptors(), mappings(), {thread.name for thread in threading.enumerate()})
    engine()
    assert (descriptors(), mappings(), {thread.name for thread in threading.enumerate()}) == before
    wait_until("the store process has ended", lambda: not store_processes(arenas[0]))
    wait_until("its sockets are closed", lambda: not abstract_sockets(*sockets))


def test_a_start_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    before = (descriptors(), mappings(), {thread.name for thread in threading.enumerate()})
    with pytest.raises(ValueError, match="local_disk"):
        Bench(tmp_path / "file")
    assert (descriptors(), mappings(), {thread.name for thread in threading.enumerate()}) == before


def test_the_store_process_is_detached_scrubbed_and_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-secret")
    monkeypatch.setenv("HF_TOKEN", "canary-token")
    with Bench(tmp_path) as bench:
        bench.encode(["image"])
        bench.settle()
        pid = bench.serving()
        assert os.getpgid(pid) == pid
        assert os.getpid() not in ancestors(pid)
        assert b"canary" not in Path(f"/proc/{pid}/environ").read_bytes()
        loaded = Path(f"/proc/{pid}/maps").read_text()
        assert not [name for name in ("torch", "numpy", "vllm", "lmcache/", "pydantic") if name in loaded]
        assert os.readlink(f"/proc/{pid}/cwd") == "/"


def ancestors(pid: int) -> set[int]:
    found: set[int] = set()
    while pid > 1:
        status = Path(f"/proc/{pid}/status").read_text()
        pid = int(status.split("PPid:")[1].split()[0])
        found.add(pid)
    return found


def test_the_store_process_imports_no_serving_engine() -> None:
    code = "import sys, lmcache_ec.store, lmcache_ec.tiers.disk; print(*{name.split('.')[0] for name in sys.modules})"
    imported = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"torch", "vllm", "lmcache", "numpy", "pydantic", "yaml"} & set(imported)


def test_the_counts_of_the_book_can_be_queried_on_the_host(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        bench.encode(names("image", 5))
        bench.settle()
        pid = bench.serving()

        bench.until("the ledger is reported", lambda: bench.status()["book"] == {**bench.snapshot(), "steps": 1})
        status = bench.status()
        assert status["pid"] == pid
        assert (status["book"]["saves"], status["store"]["sealed"], status["store"]["disk_writes"]) == (5, 5, 5)
