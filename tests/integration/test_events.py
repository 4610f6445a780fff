# SPDX-License-Identifier: Apache-2.0
"""Events that a real store process publishes over real sockets, with subscribers that die, stop, or join late."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from typer.testing import CliRunner

from benchmarks.testbed.core import Bench, Remote, Scheduler, Worker, length, names, stopped
from benchmarks.testbed.waiting import DEADLINE_S, wait_until
from lmcache_ec.channel import CpuChanges
from lmcache_ec.cli.commands import app
from lmcache_ec.cli.doctor import examine
from lmcache_ec.events.batch import END, decode
from lmcache_ec.events.endpoints import Publishing, why_unusable
from lmcache_ec.events.publisher import Publisher
from lmcache_ec.events.warm_index import WarmIndex
from lmcache_ec.weights import Weights

SUBSCRIBER = """
import sys
from lmcache_ec.events.warm_index import WarmIndex
index = WarmIndex(sys.argv[1:])
assert index.wait(30)
print("following", flush=True)
for _ in sys.stdin:
    [state] = index.replicas()
    print(state.entries, flush=True)
"""


@pytest.fixture
def endpoint() -> Iterator[str]:
    """An endpoint in a short path, since the kernel does not accept long ones."""
    with tempfile.TemporaryDirectory(prefix="ec-") as folder:
        yield f"ipc://{folder}/events"


def free_port() -> int:
    """A port that is free, together with the port of its snapshots."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            if port <= 64535 and why_unusable(f"tcp://127.0.0.1:{port + 1000}") == "":
                other.close()
                return port


def live(bench: Bench) -> dict[str, int]:
    return dict(bench.cache.book.entries())


def known(index: WarmIndex, endpoint: str) -> dict[str, int] | None:
    """What is known about a replica that is followed in step."""
    followed = index._followed.get(endpoint)
    return dict(followed.mirror.entries) if followed is not None and followed.mirror.in_step else None


def equal(bench: Bench, index: WarmIndex, endpoint: str) -> None:
    bench.until("the index knows what the book holds", lambda: known(index, endpoint) == live(bench))


@contextmanager
def subscriber(endpoint: str) -> Iterator[subprocess.Popen[str]]:
    """A subscriber in its own process, following in step."""
    command = [sys.executable, "-c", SUBSCRIBER, endpoint]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "following\n"
            yield process
        finally:
            process.kill()


def known_to(process: subprocess.Popen[str]) -> int:
    """How many entries the subscriber knows."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return int(process.stdout.readline())


# ---- the engine


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_encoded_entries_are_warm_here_and_evicted_ones_are_not(scheme: str, tmp_path: Path, endpoint: str) -> None:
    """Also for late subscribers, and for an entry that comes from the disk and not from an encode."""
    endpoint = endpoint if scheme == "ipc" else f"tcp://127.0.0.1:{free_port()}"
    with (
        Bench(tmp_path / "disk", events_endpoint=endpoint, arena_bytes=12 * 4096) as bench,
        WarmIndex([endpoint]) as index,
    ):
        bench.encode(["first"])
        bench.until("it is warm", lambda: index.where(["first", "other"]) == {"first": [endpoint], "other": []})
        bench.settle()
        for name in names("later", 24):
            bench.encode([name])
            bench.settle()
        bench.until("it is evicted", lambda: index.where(["first"]) == {"first": []})
        equal(bench, index, endpoint)
        with WarmIndex([endpoint]) as late:
            assert late.wait(DEADLINE_S)
            assert known(late, endpoint) == live(bench)
        assert bench.fetch("first")
        bench.until("it is warm again", lambda: index.where(["first"]) == {"first": [endpoint]})
        assert known(index, endpoint)["first"] == length("first")  # type: ignore[index]
        [state] = index.replicas()
        assert (state.state, state.namespace, state.gaps) == ("following", bench.cache.namespace, 0)


def test_an_engine_that_publishes_nothing_has_neither_zeromq_nor_a_thread_for_it(tmp_path: Path, endpoint: str) -> None:
    def of_store(bench: Bench) -> tuple[bool, int]:
        pid = bench.serving()
        return "libzmq" in Path(f"/proc/{pid}/maps").read_text(), len(os.listdir(f"/proc/{pid}/task"))

    with Bench(tmp_path / "off") as bench:
        bench.encode(["picture"])
        bench.settle()
        loaded, threads = of_store(bench)
        assert (loaded, bench.status()["events"], bench.cache.book.changes) == (False, None, None)
    with Bench(tmp_path / "on", events_endpoint=endpoint) as bench:
        bench.encode(["picture"])
        bench.settle()
        loaded, more = of_store(bench)
        assert (loaded, bench.status()["events"]["endpoint"]) == (True, endpoint)
        assert more > threads


def test_a_store_process_that_was_killed_is_a_new_session_with_the_same_entries(tmp_path: Path, endpoint: str) -> None:
    with Bench(tmp_path / "disk", events_endpoint=endpoint) as bench, WarmIndex([endpoint]) as index:
        bench.encode(names("kept", 3))
        bench.settle()
        equal(bench, index, endpoint)
        session = index._followed[endpoint].mirror.session
        os.kill(bench.serving(), signal.SIGKILL)
        bench.until("another one publishes", lambda: index._followed[endpoint].mirror.session not in ("", session))
        equal(bench, index, endpoint)
        assert all(held == [endpoint] for held in index.where(names("kept", 3)).values())
        bench.encode(["new"])
        bench.settle()
        equal(bench, index, endpoint)


def test_an_engine_that_was_killed_is_known_to_hold_nothing(tmp_path: Path, endpoint: str) -> None:
    """Its store process publishes that before it finishes its writes, and releases the address at once."""
    engine = str(uuid.uuid4())
    worker, scheduler = Worker(engine), Remote(Scheduler, tmp_path / "disk", engine, events_endpoint=endpoint)
    try:
        with WarmIndex([endpoint]) as index:
            scheduler.call("ready")
            worker.run(scheduler.call("save", ["picture"]))
            scheduler.call("settle")
            wait_until("it is warm", lambda: index.where(["picture"])["picture"])
            scheduler.kill()
            wait_until("it is not", lambda: known(index, endpoint) == {})
            wait_until("the address is free", lambda: why_unusable(endpoint) == "")
            wait_until(
                "nothing is left of it", lambda: not list(Path(endpoint.removeprefix("ipc://")).parent.iterdir())
            )
    finally:
        scheduler.kill()
        worker.close()


def test_other_weights_clear_what_was_known_and_change_the_namespace(tmp_path: Path, endpoint: str) -> None:
    with Bench(tmp_path / "disk", events_endpoint=endpoint) as bench, WarmIndex([endpoint]) as index:
        cache = bench.cache
        before = cache.namespace
        bench.encode(["picture"])
        bench.settle()
        equal(bench, index, endpoint)
        assert index.where(["picture"], before) == {"picture": [endpoint]}
        cache.weights = Weights(1, before, False)
        cache.weights.report(0, 0, "of the start")
        cache.weights.report(0, 1, "others")
        assert cache.follow_weights()
        sent: list[CpuChanges] = []
        assert cache.book.changes is not None

        def send(message: CpuChanges) -> bool:
            sent.append(message)
            return True

        cache.book.changes.hand(cache.namespace, send)
        assert sent == [CpuChanges(cache.namespace, True, [], [])]
        cache.book.changes.begin_anew()
        bench.until("it is cleared", lambda: index.where(["picture"]) == {"picture": []})
        bench.encode(["picture"])
        bench.until("it is warm", lambda: index.where(["picture"], cache.namespace) == {"picture": [endpoint]})
        assert index.where(["picture"], before) == {"picture": []}


def test_an_address_in_use_costs_events_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line is logged, and once the address is free the held entries are published."""
    port = free_port()
    endpoint = f"tcp://127.0.0.1:{port}"
    with (
        socket.create_server(("127.0.0.1", port + 1000)) as other,
        Bench(tmp_path / "disk", events_endpoint=endpoint) as bench,
        WarmIndex([endpoint]) as index,
    ):
        bench.until("it is logged", lambda: "Address already in use" in caplog.text)
        bench.encode(["picture"])
        bench.settle()
        assert bench.serves("picture")
        assert bench.status()["events"]["problem"] == f"tcp://127.0.0.1:{port + 1000}: Address already in use"
        assert index.where(["picture"]) == {"picture": []}
        shown = CliRunner().invoke(app, ["status"]).stdout
        assert f"  events         {endpoint}: tcp://127.0.0.1:{port + 1000}: Address already in use" in shown
        notes = examine(json.dumps({"events_endpoint": endpoint}), environ={}).notes
        busy = f"tcp://127.0.0.1:{port + 1000}: Address already in use; an engine would"
        assert any(note.startswith(busy) for note in notes)
        other.close()
        equal(bench, index, endpoint)
        bench.until("that is logged", lambda: f"events are published at {endpoint} now" in caplog.text)
    assert caplog.text.count("Address already in use") == 1


# ---- subscribers


def test_a_subscriber_that_stops_or_dies_holds_up_neither_the_engine_nor_the_others(
    tmp_path: Path, endpoint: str
) -> None:
    with (
        Bench(tmp_path / "disk", events_endpoint=endpoint, arena_bytes=64 * 4096) as bench,
        WarmIndex([endpoint]) as index,
        subscriber(endpoint) as stuck,
        subscriber(endpoint) as doomed,
    ):
        with stopped(stuck.pid):
            for number in range(30):
                bench.encode([f"picture-{number}"])
                bench.settle()
            doomed.kill()
            doomed.wait()
            equal(bench, index, endpoint)
            assert bench.serves("picture-29")
        bench.until("it has caught up", lambda: known_to(stuck) == len(live(bench)))
        assert bench.snapshot()["store_losses"] == 0


@pytest.fixture
def publisher(endpoint: str) -> Iterator[Publisher]:
    lines: list[str] = []
    publisher = Publisher(
        Publishing(endpoint, f"{endpoint}.snapshots", "ec", 0), "ns", lambda kind, text: lines.append(text)
    )
    yield publisher
    publisher.close()
    publisher.wait_closed(5)
    assert lines == []


def admit(*identifiers: str) -> CpuChanges:
    return CpuChanges("ns", False, [(identifier, 1000) for identifier in identifiers], [])


def test_a_subscriber_that_missed_more_than_waits_for_it_gets_a_snapshot(publisher: Publisher, endpoint: str) -> None:
    """It is stopped while far more is published than its queue and the kernel's buffers hold."""
    with WarmIndex([endpoint]) as index, subscriber(endpoint) as stuck:
        with stopped(stuck.pid):
            for number in range(20_000):
                publisher.publish(admit(f"picture-{number}" + "x" * 100))
                if number >= 1000:
                    publisher.publish(CpuChanges("ns", False, [], [f"picture-{number - 1000}" + "x" * 100]))
            wait_until("all is published", lambda: not publisher._pending, 60.0)
            wait_until("the other one has followed", lambda: len(known(index, endpoint) or ()) == 1000, 60.0)
        wait_until("it knows what is held", lambda: known_to(stuck) == 1000)


def test_a_publisher_that_comes_after_its_subscribers_is_found(endpoint: str) -> None:
    with WarmIndex([endpoint]) as index:
        assert not index.wait(0.3)
        assert [state.state for state in index.replicas()] == ["silent"]
        publisher = Publisher(Publishing(endpoint, f"{endpoint}.snapshots", "", 3), "ns", lambda kind, text: None)
        publisher.publish(admit("picture"))
        try:
            wait_until("it is followed", lambda: index.where(["picture"])["picture"])
            assert [state.data_parallel_rank for state in index.replicas()] == [3]
        finally:
            publisher.close()
    publisher.wait_closed(5)


def test_replicas_come_and_go_while_others_are_followed(publisher: Publisher, endpoint: str) -> None:
    publisher.publish(admit("picture"))
    with WarmIndex() as index:
        assert index.wait(0)
        assert index.add(endpoint) == endpoint
        assert index.wait(DEADLINE_S)
        assert index.where(["picture"]) == {"picture": [endpoint]}
        index.remove(endpoint)
        wait_until("it is removed", lambda: index.replicas() == [])
        assert index.where(["picture"]) == {"picture": []}
        with pytest.raises(ValueError, match="must be"):
            index.add("nonsense")
    index.close()
    index.add(endpoint)  # after the end: no effect


def test_a_client_of_vllms_kv_events_reads_a_snapshot_as_it_reads_a_replay(publisher: Publisher, endpoint: str) -> None:
    """Frames as in vllm/distributed/kv_events.py: a DEALER sends an empty one and a number; then batches, up to -1."""
    publisher.publish(admit("one", "two"))
    with zmq.Context() as context, context.socket(zmq.DEALER) as replay:
        replay.setsockopt(zmq.LINGER, 0)
        replay.connect(f"{endpoint}.snapshots")
        replay.send_multipart((b"", (0).to_bytes(8, "big")))
        answered = []
        while True:
            assert replay.poll(int(DEADLINE_S * 1000))
            _, topic, place, payload = replay.recv_multipart()
            if place == END:
                break
            answered.append((topic, int.from_bytes(place, "big"), decode(payload)))
    [(topic, number, batch)] = answered
    assert (topic, number > 0, batch.namespace) == (b"ec", True, "ns")
    assert [type(event).__name__ for event in batch.events] == ["AllEntriesCleared", "EntriesAdmitted"]


def test_events_can_be_selected_by_their_topic(publisher: Publisher, endpoint: str) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as ours, context.socket(zmq.SUB) as other:
        for each, topic in ((ours, b"ec"), (other, b"kv")):
            each.setsockopt(zmq.LINGER, 0)
            each.subscribe(topic)
            each.connect(endpoint)
        assert ours.poll(int(DEADLINE_S * 1000))  # a heartbeat, at the latest
        assert ours.recv_multipart()[0] == b"ec"
        assert not other.poll(0)


def test_a_client_that_sends_a_thousand_requests_at_once_takes_only_a_share_of_the_threads_time(
    publisher: Publisher, endpoint: str
) -> None:
    publisher.publish(admit(*(f"picture-{number}" for number in range(20_000))))
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking, WarmIndex([endpoint]) as index:
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(f"{endpoint}.snapshots")
        for _ in range(1000):
            asking.send_multipart((b"", bytes(8)))
        publisher.publish(admit("last"))
        wait_until("another subscriber follows all the same", lambda: index.where(["last"])["last"])


@pytest.mark.parametrize("frames", [[b"x"], [b"", b""], [b"", b"", b"", b""], [b"", b"x" * 2000]])
def test_a_malformed_request_does_no_harm(publisher: Publisher, endpoint: str, frames: list[bytes]) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(f"{endpoint}.snapshots")
        asking.send_multipart(frames)
        publisher.publish(admit("picture"))
        with WarmIndex([endpoint]) as index:
            assert index.wait(DEADLINE_S)
            assert index.where(["picture"]) == {"picture": [endpoint]}


def test_an_address_that_sends_nonsense_counts_as_silent_and_the_others_are_followed(
    publisher: Publisher, endpoint: str
) -> None:
    publisher.publish(admit("picture"))
    other = f"{endpoint}-other"
    with zmq.Context() as context, context.socket(zmq.PUB) as events, context.socket(zmq.ROUTER) as snapshots:
        for each, at in ((events, other), (snapshots, f"{other}.snapshots")):
            each.setsockopt(zmq.LINGER, 0)
            each.bind(at)
        with WarmIndex([other, endpoint]) as index:

            def talks() -> bool:
                for frames in ([b"?"], [b"", b"12345678", b"\xc1"], [b"", b"short", b""]):
                    events.send_multipart(frames)
                while snapshots.poll(0):
                    peer, *_ = snapshots.recv_multipart()
                    snapshots.send_multipart((peer, b"", b"", bytes(8), b"nonsense"))
                return index.replicas()[0].unreadable > 1

            wait_until("it has sent something", talks)
            wait_until("the other's entries are known", lambda: index.where(["picture"]) == {"picture": [endpoint]})
            assert index.replicas()[0].state == "silent"


# ---- the command


def asked(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["where", *arguments, "--json"])
    return result.exit_code, json.loads(result.stdout)


def test_the_command_shows_which_replicas_hold_an_entry(publisher: Publisher, endpoint: str) -> None:
    publisher.publish(admit("picture"))
    status, found = asked("picture", "--replica", endpoint)
    assert (status, found["identifiers"]) == (0, {"picture": [endpoint]})
    assert [(each["replica"], each["state"]) for each in found["replicas"]] == [(endpoint, "following")]
    assert asked("picture", "other", "--replica", endpoint)[0] == 1
    assert asked("picture", "--replica", endpoint, "--namespace", "others")[1]["identifiers"] == {"picture": []}
    assert asked("--replica", endpoint)[0] == 0
    dead = f"{endpoint}-nobody"

    def answer_about_both() -> tuple[int, dict[str, Any]] | None:
        status, found = asked("picture", "--replica", dead, "--replica", endpoint, "--timeout", "0.3")
        states = [each["state"] for each in found["replicas"]]
        assert states in (["silent", "following"], ["silent", "silent"])
        return (status, found) if "following" in states else None

    status, found = wait_until("a third of a second is enough for the other", answer_about_both) or (0, {})
    assert (status, found["identifiers"]) == (1, {"picture": [endpoint]})
    shown = CliRunner().invoke(app, ["where", "picture", "gone", "--replica", endpoint]).stdout
    assert f"picture     {endpoint}" in shown
    assert "gone        held by none" in shown
    assert CliRunner().invoke(app, ["where", "picture", "--replica", "nonsense"]).exit_code == 2
    assert CliRunner().invoke(app, ["where", "picture"]).exit_code == 2
