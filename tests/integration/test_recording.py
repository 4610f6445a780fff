# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec status --record`: what requests need, as a trace that `lmcache-ec plan` reads."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.testbed.stand_ins import Served, digest, request
from benchmarks.testbed.waiting import wait_until
from lmcache_ec.accesses import Accesses
from lmcache_ec.channel import Accessed, Follow, Notice, ToStore
from lmcache_ec.cli.commands import app
from lmcache_ec.cli.status import sockets
from lmcache_ec.link import RECORD_PREFIX, Link, LinkClosed
from lmcache_ec.plan.traces import COLUMNS
from lmcache_ec.recording import Recording

X, Y, Z = digest("x"), digest("y"), digest("z")
PATIENCE_S = 30.0
SALT = bytes(16)
HANDLED = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
"""A shell's background jobs and their children ignore Ctrl-C."""
COMMAND = [sys.executable, "-c", f"{HANDLED}; from lmcache_ec.cli import main; main()", "status", "--record"]


@contextmanager
def recorder(file: Path, served: Served, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The running command, once the engine is being recorded."""
    command = [*COMMAND, str(file), "--engine", served.name, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            served.until("the engine is recorded", lambda: served.cache.accesses is not None)
            yield process
        finally:
            process.kill()


def interrupted(process: subprocess.Popen[str], file: Path, lines: int) -> str:
    """Send Ctrl-C once the file has `lines` lines. Returns the output."""
    written(file, lines)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    return out


def written(file: Path, lines: int) -> None:
    wait_until(
        f"{lines} lines are written", lambda: file.exists() and len(file.read_text().splitlines()) > lines, PATIENCE_S
    )


def rows(file: Path) -> list[list[str]]:
    text = file.read_text()
    assert text.endswith("\n")
    header, *lines = [line.split(",") for line in text.splitlines()]
    assert tuple(header) == COLUMNS
    return lines


def replayed(file: Path) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["plan", str(file), "--tiers", "gpu=1,cpu=1", "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)["scenarios"][0]
    return found


def serve(served: Served, name: str, *identifiers: str) -> None:
    asking = request(name, *identifiers)
    served.schedule(asking)
    served.side.request_finished(asking)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path / "entries").ready()
    yield served
    served.close()


# ---- what is in it


def test_each_item_that_a_request_needs_is_a_line_that_plan_replays(served: Served, tmp_path: Path) -> None:
    """Also for items that vLLM's own cache holds; an item that is needed in many passes is one line."""
    file = tmp_path / "trace.csv"
    serve(served, "before", Z)
    with recorder(file, served) as process:
        serve(served, "one", X, Y)
        serve(served, "two", X)
        waiting = request("waiting", Y)
        for _ in range(5):
            served.vllm.offer(waiting, blocks=False)
            served.step()
        served.schedule(waiting)
        served.side.request_finished(waiting)
        out = interrupted(process, file, 4)
    found = rows(file)
    x, y = found[0][1], found[1][1]
    assert [name for _, name, _, _ in found] == [x, y, x, y]
    assert x != y
    times = [float(at) for at, *_ in found]
    assert times == sorted(times)
    assert all(
        0 < size < 1 << 20 and float(encode_s) > 0 for size, encode_s in ((int(row[2]), row[3]) for row in found)
    )
    scenario = replayed(file)
    assert (scenario["requests"], scenario["encodes"]) == (4, 2)
    assert f"{file}: 4 outputs" in out
    assert "guessed encode times: " in out, "the first were recorded when too few encodes had been measured"
    served.until("nobody records any more", lambda: served.cache.accesses is None)


def test_names_are_recorded_as_digests_that_no_other_recording_has(served: Served, tmp_path: Path) -> None:
    found = []
    for number in range(2):
        file = tmp_path / f"{number}.csv"
        with recorder(file, served) as process:
            serve(served, f"request {number}", X)
            interrupted(process, file, 1)
        served.until("nobody records any more", lambda: served.cache.accesses is None)
        assert X not in file.read_text()
        [row] = rows(file)
        found.append(row[1])
    assert found[0] != found[1]


def test_a_recording_ends_by_itself_at_the_given_time_or_size(served: Served, tmp_path: Path) -> None:
    short, small = tmp_path / "short.csv.gz", tmp_path / "small.csv"
    with recorder(short, served, "--for", "3") as process:
        serve(served, "one", X)
        assert process.wait(PATIENCE_S) == 0
    assert replayed(short)["requests"] == 1
    served.until("nobody records any more", lambda: served.cache.accesses is None)
    with recorder(small, served, "--most", "0.001") as process:
        for number in range(40):
            serve(served, f"request {number}", X)
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert small.stat().st_size <= 0.001 * (1 << 20)
    assert 0 < len(rows(small)) < 40
    assert "ended early: the file has the size that --most allows" in out
    assert "more are missing" in out


def test_a_store_process_that_is_replaced_is_recorded_again(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    with recorder(file, served) as process:
        serve(served, "one", X)
        written(file, 1)
        served.cache._store.process.kill()
        served.until("another one serves", lambda: served.cache._store.number > 1 and served.cache.ready)
        served.until("it is recorded, too", lambda: served.cache.accesses is not None)
        serve(served, "two", X)
        interrupted(process, file, 2)
    one, two = rows(file)
    assert one[1] == two[1]


@pytest.mark.parametrize("exists", [True, False], ids=["there is such a file", "there is no such folder"])
def test_only_a_new_file_is_written(served: Served, tmp_path: Path, exists: bool) -> None:
    file = tmp_path / "kept.csv" if exists else tmp_path / "none" / "trace.csv"
    if exists:
        file.write_text("kept")
    result = CliRunner().invoke(app, ["status", "--record", str(file), "--engine", served.name])
    assert result.exit_code == 2
    assert "must be a new file" in result.output
    assert not exists or file.read_text() == "kept"


def test_without_an_engine_there_is_nothing_to_record(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    result = CliRunner().invoke(app, ["status", "--record", str(file), "--engine", "no engine of this name"])
    assert (result.exit_code, file.exists()) == (1, False)
    assert "No engine" in result.stderr
    result = CliRunner().invoke(app, ["status", "--record", str(file), "--engine", "no engine of this name", "--json"])
    assert (result.exit_code, result.stderr) == (1, "")
    assert json.loads(result.stdout)["problem"].startswith("No engine whose name begins with 'no engine of this name'")


# ---- its cost, and losses


def test_while_nobody_records_nothing_is_kept_or_sent(served: Served) -> None:
    sent: list[object] = []
    send = served.cache._store.send

    def noted(message: ToStore) -> bool:
        sent.append(message)
        return send(message)

    served.cache._store.send = noted  # type: ignore[method-assign]
    serve(served, "one", X, Y)
    assert served.cache.accesses is None
    assert not any(isinstance(message, Accessed) for message in sent)


def test_accesses_that_find_no_room_are_counted_and_nothing_grows_without_bound() -> None:
    sent: list[Accessed] = []
    open_link = False

    def send(message: Accessed) -> bool:
        if open_link:
            sent.append(message)
        return open_link

    accesses = Accesses(send)
    for number in range(10_000):
        accesses.add(float(number), f"item {number}", 100, 0.1 if number % 2 else float("inf"), 4)
        accesses.hand_over()
    accesses.add(0.0, "of unknown size", 0, 0.1, 4)
    open_link = True
    while True:
        before = len(sent)
        accesses.hand_over()
        assert len(sent) - before <= 4, "one pass sends what it has time for"
        if len(sent) == before:
            break
    taken = [access for message in sent for access in message.accesses]
    assert len(taken) + sum(message.lost for message in sent) == 10_001
    assert len(taken) <= 8192
    assert taken == sorted(taken)
    assert sum(message.guessed for message in sent) == len(taken) // 2
    sent.clear()
    accesses.hand_over()
    assert sent == []


def test_the_longest_names_fit_the_link() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link, other = Link(ours), Link(theirs)
    accesses = Accesses(link.send)
    for number in range(100):
        accesses.add(0.0, "\N{SNOWMAN}" * 1300 + str(number), 1, 0.1, 1)
    taken = 0
    for _ in range(100):
        accesses.hand_over()
        while (received := other.receive()) is not None:
            assert isinstance(received[0], Accessed)
            taken += len(received[0].accesses)
    assert taken == 100


@pytest.fixture
def listening() -> Iterator[tuple[Recording, Any, list[bool]]]:
    """The store process's end, a function that runs its callbacks, and the messages sent to the scheduler side."""
    sent: list[bool] = []
    selector = selectors.DefaultSelector()
    recording = Recording(selector, lambda record: sent.append(record.on))

    def turn() -> None:
        for key, _ in selector.select(0.0):
            key.data()

    yield recording, turn, sent
    recording.close()


def connected() -> Link:
    [name] = {each.name for each in sockets() if each.name.startswith(f"{RECORD_PREFIX}{os.getpid()}-")}
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(f"\0{name}")
    return Link(connection)


def heard(link: Link) -> list[object]:
    messages: list[object] = []
    try:
        while (received := link.receive()) is not None:
            messages.append(received[0])
    except LinkClosed:
        messages.append("closed")
    return messages


def test_a_recorder_that_does_not_read_delays_nobody_and_learns_how_much_it_missed(listening: Any) -> None:
    recording, turn, _ = listening
    link = connected()
    link.send(Follow(SALT))
    turn()
    turn()
    for _ in range(1000):
        recording.pass_on(Accessed([(0.0, "name", 1, 0.1)] * 100, 0, 0))
    got = [message for message in heard(link) if isinstance(message, Accessed)]
    assert 0 < len(got) < 1000
    recording.pass_on(Accessed([(0.0, "name", 1, 0.1)] * 100, 0, 0))
    got += [message for message in heard(link) if isinstance(message, Accessed)]
    assert sum(len(message.accesses) + message.lost for message in got) == 100_100
    link.close()


def test_one_recorder_is_served_at_a_time_and_the_engine_is_notified_when_it_leaves(listening: Any) -> None:
    recording, turn, sent = listening
    first = connected()
    first.send(Follow(SALT))
    turn()
    turn()
    second = connected()
    turn()
    replies = heard(second)
    assert isinstance(replies[0], Notice)
    assert replies[1:] == ["closed"]
    assert sent == [True]
    first.close()
    turn()
    assert sent == [True, False]
    third = connected()
    third.send(Follow(SALT))
    turn()
    turn()
    assert sent == [True, False, True]
    recording.close()
    assert heard(third) == ["closed"]


@pytest.mark.parametrize("message", [Follow(b""), Follow(bytes(65)), Notice("kind", "text")], ids=str)
def test_a_recorder_that_sends_an_invalid_message_is_not_served(listening: Any, message: Any) -> None:
    recording, turn, sent = listening
    link = connected()
    link.send(message)
    turn()
    turn()
    assert heard(link) == ["closed"]
    assert sent == [False]
    recording.pass_on(Accessed([(0.0, "name", 1, 0.1)], 0, 0))
