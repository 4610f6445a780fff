# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec status` distinguishes engines, shows what each holds, and omits no running one."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.live import Live
from typer.testing import CliRunner

from benchmarks.testbed.core import NAMESPACE, Bench, Worker, length, names, path_of, stuck
from benchmarks.testbed.waiting import wait_until
from lmcache_ec.cli.commands import app
from lmcache_ec.cli.top import EngineRates, TierRates, look, rates, view
from lmcache_ec.link import rank_address, status_address

KEYS = {"pid", "engine", "namespace", "incarnation", "scan_complete", "jobs", "store", "book"}
"""Keys that scripts read."""


def status(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["status", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def status_of(bench: Bench) -> dict[str, Any]:
    """The report on this engine, ignoring others on this host."""
    [found] = [engine for engine in json.loads(status("--json")) if engine["engine"] == bench.engine]
    assert found.keys() >= KEYS
    return dict(found)


def silent() -> list[dict[str, Any]]:
    """Engines in this process for which no store process answers."""
    found = [engine for engine in json.loads(status("--json")) if engine["pid"] is None]
    assert all(engine.keys() >= KEYS for engine in found)
    return [engine for engine in found if engine["worker_pid"] == os.getpid()]


def lines(output: str, engine: str) -> list[str]:
    """The lines about one engine."""
    after = output.splitlines()
    begin = next(number for number, line in enumerate(after) if f"engine {engine[:8]}" in line)
    end = next((n for n, line in enumerate(after[begin + 1 :], begin + 1) if line.startswith("engine ")), len(after))
    return after[begin:end]


def test_two_engines_of_one_namespace_are_distinguished(tmp_path: Path) -> None:
    began = time.time()
    with Bench(tmp_path) as one, Bench(tmp_path) as other:
        for bench in (one, other):
            found = status_of(bench)
            assert (found["namespace"], found["state"]) == (NAMESPACE, "serving")
            assert (found["pid"], found["engine_pid"]) == (bench.serving(), os.getpid())
            assert began - 1 < found["since"] <= time.time()
            shown = "\n".join(lines(status(), bench.engine))
            for fact in (
                f"engine {bench.engine[:8]}",
                NAMESPACE,
                f"process {os.getpid()}",
                f"{found['pid']}, since",
            ):
                assert fact in shown
        assert status_of(one)["pid"] != status_of(other)["pid"]


def test_one_line_shows_what_each_tier_holds_and_has_done_with_its_limit(tmp_path: Path) -> None:
    with Bench(tmp_path) as earlier:
        earlier.encode(names("kept", 3))
        earlier.settle()
    path_of(tmp_path, "kept-2").write_bytes(b"x" * 10_000)
    with Bench(tmp_path, max_local_disk_size=0.5) as bench:
        bench.scanned()
        found = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
        wait_until("the folder is weighed", lambda: status_of(bench)["tiers"][0]["bytes"] == found)
        assert [bench.fetch(name) for name in names("kept", 3)] == [True, True, False]
        bench.read(names("kept", 2))
        path_of(tmp_path, "kept-1").unlink()
        bench.encode(names("new", 4))
        bench.settle()
        bench.until("the ledger is reported", lambda: bench.status()["book"].get("saves") == 4)
        [disk] = status_of(bench)["tiers"]
        held = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
        entries = 2 + 4  # listed and not corrupt, plus those written since
        assert (disk["name"], disk["entries"], disk["limit_bytes"]) == ("disk", entries, 1 << 29)
        assert (disk["hits"], disk["writes"], disk["errors"]) == (2, 4, 1)
        assert held <= disk["bytes"] <= held + path_of(tmp_path, "kept-0").stat().st_size
        shown = lines(status(), bench.engine)
        [cpu_row] = [line.split() for line in shown if line.split()[:1] == ["cpu"]]
        [disk_row] = [line.split() for line in shown if line.split()[:1] == ["disk"]]
        assert cpu_row == ["cpu", "6", "48", "KiB", "64", "MiB", "0", "0", "4"]
        moved = [f"{disk[name]:.1f}" for name in ("read_ms", "write_ms")]
        counts = ["2", str(disk["misses"]), str(round(200 / (2 + disk["misses"]))), "%", "1", "4"]
        read, written = (f"{number * length('kept-0') / 1024:.1f}" for number in (2, 4))
        assert disk_row[0:2] + disk_row[4:8] == ["disk", "6", "512", "MiB", *counts[:2]]
        assert disk_row[8:] == [*counts[2:], read, "KiB", moved[0], written, "KiB", moved[1]]
        assert (disk["read_bytes"], disk["written_bytes"]) == (2 * length("kept-0"), 4 * length("kept-0"))
        assert "does not verify" in disk["last_error"]["text"]
        assert any(line.startswith("  last error     ") and " ago, disk: " in line for line in shown)
        assert any("loads          2: 2 from disk; 0 failed" in line for line in shown)
        assert any("saves          4; 0 dropped, 0 void" in line for line in shown)


def test_an_engine_without_requests_shows_how_old_its_own_counts_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_ec.cli.status._IDLE_S", 0.5)
    with Bench(tmp_path) as bench:
        bench.encode(["kept"])
        bench.settle()
        bench.until("its counts are there", lambda: bench.status()["book"].get("saves") == 1)
        bench.until("it is not idle", lambda: not any("idle" in line for line in lines(status(), bench.engine)))
        wait_until("it makes no pass for a while", lambda: status_of(bench)["book_age_s"] > 0.6)
        assert any("idle" in line and "the row cpu" in line for line in lines(status(), bench.engine))
        bench.until("it goes on", lambda: status_of(bench)["book_age_s"] < 0.5)


def test_the_replacement_of_a_corrupt_entry_is_counted_once(tmp_path: Path) -> None:
    with Bench(tmp_path) as earlier:
        earlier.encode(names("kept", 3))
        earlier.settle()
    path_of(tmp_path, "kept-2").write_bytes(b"x" * 10_000)
    with Bench(tmp_path) as bench:
        bench.scanned()
        assert not bench.fetch("kept-2")
        assert status_of(bench)["tiers"][0]["entries"] == 2
        bench.encode(["kept-2"])
        bench.settle()
        assert status_of(bench)["tiers"][0]["entries"] == 3


def test_no_heading_of_the_live_view_is_cut_in_eighty_columns() -> None:
    rate_s = 1234.5
    tier = TierRates("redis", "read only", 999 << 20, rate_s, rate_s, rate_s, rate_s, rate_s, rate_s, 12, 33 << 20)
    rate = EngineRates("engine", "ns", "serving", 1.0, 1.0, 1 << 30, 2 << 30, [tier])
    console = Console(width=80, file=io.StringIO())
    console.print(view([rate]))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    assert all(word in shown for word in ("held", "hits", "rate", "errors", "writes", "read", "written", "unsaved"))


def test_the_activity_of_each_tier_is_shown_as_a_rate_per_second(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        bench.scanned()
        at, before = look()
        bench.encode(names("new", 4))
        bench.settle()
        bench.read(names("new", 2))
        bench.until("the ledger is handed over", lambda: bench.status()["book"].get("loads_cpu") == 2)
        after = at + 2.0, look()[1]
        [found] = [engine for engine in rates((at, before), after) if engine.engine == bench.engine]
        assert (found.loads, found.saves) == (1.0, 2.0)
        [disk] = found.tiers
        assert (disk.writes, disk.written_bytes, disk.errors) == (2.0, 2 * length("new-0"), 0.0)
        restarted = [{**engine, "pid": 1} for engine in before]
        assert not rates((at, restarted), after)  # its counts restarted

        [line] = CliRunner().invoke(app, ["top", "--once", "--json", "--interval", "0.2"]).stdout.splitlines()
        assert bench.engine in [engine["engine"] for engine in json.loads(line)]
        shown = CliRunner().invoke(app, ["top", "--once", "--interval", "0.2"]).stdout
        assert f"engine {bench.engine[:8]}" in shown


def test_the_live_view_is_redrawn_until_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[object] = []

    def update(live: Live, view: object, *, refresh: bool = False) -> None:
        drawn.append(view)
        if len(drawn) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Live, "update", update)
    result = CliRunner().invoke(app, ["top", "--interval", "0.2"])
    assert (result.exit_code, len(drawn), "Traceback" in result.output) == (0, 3, False)


def test_an_engine_whose_store_process_was_killed_is_not_left_out(tmp_path: Path) -> None:
    """The next scheduling pass starts another store process, which reports that it is the second."""
    with Bench(tmp_path) as bench:
        pid = bench.serving()
        assert not silent()
        os.kill(pid, signal.SIGKILL)
        wait_until("it is seen to be missing", silent)
        [found] = silent()
        assert found["state"] == "replacing"
        assert f"engine of worker process {os.getpid()} runs, but its store process does not answer" in status()
        bench.until("another one answers", lambda: not silent())
        assert status_of(bench)["incarnation"] == 2
        assert any("1 before it ended" in line for line in lines(status(), bench.engine))


def test_a_store_process_that_outlives_its_engine_is_listed_as_finishing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, drain_s=60)
    bench.scanned()
    with stuck(tmp_path / NAMESPACE / ".tmp" / "stuck"):
        bench.encode(["last"])
        bench.until("it is being written", lambda: status_of(bench)["jobs"] == 1)
        bench.close()
        wait_until("the engine is seen to have ended", lambda: status_of(bench)["state"] == "finishing")
        assert f"process {os.getpid()}, ended" in "\n".join(lines(status(), bench.engine))
    wait_until("it has finished", lambda: bench.engine not in status("--json"))


def test_an_engine_that_is_starting_is_listed_as_starting(tmp_path: Path) -> None:
    worker = Worker(str(uuid.uuid4()))
    try:
        [found] = silent()
        assert found["state"] == "starting"
        assert f"engine of worker process {os.getpid()} is starting" in status()
    finally:
        worker.close()
    assert not silent()


def test_engines_of_another_user_are_not_listed() -> None:
    """Whether they answer or not; and root does not see that user's engines either."""
    become = "import os; os.geteuid() or os.setresuid(*[65534] * 3)\n"
    ask = "import json; from lmcache_ec.cli.status import all_engines; all_engines()\n" + become
    ask += "print(json.dumps(all_engines()))"
    listen = "import socket, sys\n" + become + "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
    listen += "s.bind('\\0' + sys.argv[1]); s.listen(); print(flush=True); sys.stdin.read()"
    worker, address = Worker(str(uuid.uuid4())), rank_address(str(uuid.uuid4()), 0)[1:]
    command = [sys.executable, "-c", listen, address]
    try:
        with Bench(None) as bench, subprocess.Popen(command, stdin=-1, stdout=-1) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"\n"
            done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
            theirs = {engine["engine"] or engine["worker_pid"] for engine in json.loads(done.stdout)}
            ours = {engine["engine"] or engine["worker_pid"] for engine in json.loads(status("--json"))}
            mine, root = {bench.engine, os.getpid()}, os.geteuid() == 0
            assert ours >= mine
            assert (other.pid in ours, theirs & mine) == ((False, set()) if root else (True, mine))
            other.communicate()
    finally:
        worker.close()


def test_an_engine_of_another_version_is_listed_with_what_it_reports() -> None:
    """An engine whose answer is not a JSON object is omitted."""
    reports = [{"pid": 7, "engine": "older", "namespace": "older-ns", "store": {"x": 1}, "book": {"saves": 3}}, ["odd"]]
    with ThreadPoolExecutor(2) as threads:
        sockets = [socket.socket(socket.AF_UNIX) for _ in reports]
        for each in sockets:
            each.bind(status_address(os.getpid()))
            each.listen()

        def answer(number: int) -> None:
            """Answer repeatedly: on a busy machine a single answer may come too late."""
            with suppress(OSError):
                while True:
                    connection, _ = sockets[number].accept()
                    with connection:
                        connection.sendall(json.dumps(reports[number]).encode())

        for number in range(len(reports)):
            threads.submit(answer, number)
        try:
            shown = "\n".join(wait_until("it is listed", lambda: lines(status(), "older"), despite=StopIteration))
        finally:
            for each in sockets:
                each.shutdown(socket.SHUT_RDWR)
                each.close()
    assert all(text in shown for text in ("engine older", "older-ns", "store process  7,", "saves          3;"))
