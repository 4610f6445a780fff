# SPDX-License-Identifier: Apache-2.0
"""The store process held, hung, killed, or unable to start: misses and dropped saves, all recovered later."""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count, pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.testbed.core import (
    MIB,
    NAMESPACE,
    Bench,
    Step,
    length,
    names,
    path_of,
    payload,
    process_state,
    stopped,
    store_processes,
    stored,
    stuck,
    temporaries,
)
from benchmarks.testbed.engine_env import PLUGIN
from benchmarks.testbed.waiting import DEADLINE_S, wait_until
from lmcache_ec.channel import AnyMessage, StoreLink
from lmcache_ec.link import Link


def places(*steps: Step) -> list[tuple[int, int]]:
    return sorted((save.offset, save.offset + save.length) for step in steps for save in step.saves)


def apart(extents: list[tuple[int, int]]) -> bool:
    return all(end <= begin for (_, end), (begin, _) in pairwise(extents))


def stuck_writes(folder: Path) -> Path:
    """Path of a file that blocks the scan, and with it every write."""
    return folder / NAMESPACE / ".tmp" / "stuck"


def all_made_up_for(bench: Bench, folder: Path, expected: set[str]) -> None:
    """Repeat dropped saves; then every entry is on disk, and a new engine finds them all."""
    while owed := bench.unsaved():
        bench.encode(owed)
        bench.settle()
    bench.until("all is on disk", lambda: not bench.snapshot()["unwritten"] and not bench.snapshot()["dirty_bytes"])
    assert stored(folder) == expected
    assert not temporaries(folder)
    with Bench(folder) as successor:
        assert all(successor.serves(identifier) for identifier in expected)
        successor.settle()


def noticed(bench: Bench, losses: int) -> bool:
    return bench.snapshot()["store_losses"] > losses


# ---- held by SIGSTOP


@pytest.mark.fault(
    "stopped for two seconds, with fifty saves waiting",
    "store process",
    "all are sealed and written when it resumes",
    recovery="all is written",
)
def test_sealing_held_for_two_seconds_with_fifty_saves_behind_it(tmp_path: Path) -> None:
    """The arena is small, so places are reused: none before the store's answer, and each file holds its own bytes."""
    saves = names("held", 50)
    with Bench(tmp_path, arena_bytes=60 * 8192, store_timeout_s=60) as bench:
        bench.encode(names("before", 20))
        bench.settle()
        pid = bench.serving()
        with stopped(pid):
            steps = [bench.encode([identifier]) for identifier in saves]
            until = time.monotonic() + 2.0
            wanted = count()

            def held_long_enough() -> bool:
                steps.append(bench.encode([f"wanted-{next(wanted) % 200}"]))
                return time.monotonic() > until

            bench.until("two seconds are over", held_long_enough)
            assert bench.snapshot()["saves"] == 20
            assert bench.snapshot()["places_sealing"] >= 50
        assert apart(places(*steps))
        bench.settle()
        handed = {save.identifier for step in steps for save in step.saves}
        assert handed >= set(saves)
        bench.until("all is written", lambda: not bench.snapshot()["unwritten"])
        assert {name for name in handed if bench.live(name)} <= stored(tmp_path)
        for identifier in filter(bench.live, handed):
            assert bench.serves(identifier)
        while owed := bench.unsaved():  # the arena is far smaller than all entries together
            bench.encode(owed[:10])
            bench.settle()
        assert stored(tmp_path) >= handed


@pytest.mark.fault(
    "stopped, with look-ups and saves in progress",
    "store process",
    "no call waits; all are answered when it resumes",
    recovery="what was handed over is sealed",
)
def test_a_stopped_store_process_delays_no_call_and_all_works_again_once_it_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = names("old", 20), names("new", 20)
    with Bench(tmp_path) as bench:
        bench.encode(old)
        bench.settle()
    with (
        stuck(stuck_writes(tmp_path)) as release,
        Bench(tmp_path, store_timeout_s=60) as bench,  # no scan: everything is looked up
    ):
        with stopped(bench.serving()), monkeypatch.context() as impatient:
            impatient.setattr("lmcache_ec.supervisor._SLOW_PONG_S", 0.5)
            assert bench.cache.fetch(old[0], length(old[0]), time.monotonic())  # not known yet
            bench.until("nobody waits", lambda: not bench.cache.fetch(old[0], length(old[0]), time.monotonic()))
            asked = bench.snapshot()["fetches"]
            assert not any(bench.cache.fetch(name, length(name), time.monotonic()) for name in old[1:])
            steps = [bench.encode([name]) for name in new]
            bench.until("all reports are in", lambda: not bench.cache.book.outstanding())
            assert bench.snapshot()["fetches"] == asked
            assert bench.snapshot()["places_sealing"] == len(new)
            assert apart(places(*steps))
            assert not any(map(bench.live, new))
        bench.until("what was asked is answered", lambda: not bench.snapshot()["fetches_under_way"])
        assert all(bench.serves(name) for name in old)
        bench.until("what was handed over is sealed", lambda: all(map(bench.live, new)))
        assert all(bench.serves(name) for name in new)
        release()
        bench.settle()  # all is written
        assert bench.snapshot()["store_losses"] == 0
    with Bench(tmp_path) as bench:
        bench.settle()
        assert all(bench.serves(name) for name in [*old, *new])


@pytest.mark.fault(
    "stopped, with its link full, while the engine is idle", "store process", "it resumes, and is not killed"
)
def test_a_store_process_that_resumes_while_the_engine_is_idle_is_not_killed_over_a_ping_it_never_got(
    tmp_path: Path,
) -> None:
    with stuck(stuck_writes(tmp_path)), Bench(tmp_path, store_timeout_s=2) as bench:  # no scan: everything is looked up
        fresh = (f"nowhere-{number}" for number in count())
        with stopped(bench.serving()):
            while bench.cache.fetch(next(fresh), 0, time.monotonic()):
                pass
            bench.until("a ping is due", lambda: bench.cache._store._ping_waits)
        pinged = time.monotonic()
        wait_until("no pass has come for longer than it may be silent", lambda: time.monotonic() > pinged + 2.1)
        bench.settle()
        assert bench.snapshot()["store_losses"] == 0


@pytest.mark.fault(
    "stays stopped", "store process", "killed and replaced; pending writes are made", recovery="it is replaced"
)
def test_a_store_process_that_stays_stopped_is_killed_and_the_next_does_the_pending_work(tmp_path: Path) -> None:
    old, unwritten, unsealed = names("old", 5), names("unwritten", 5), names("unsealed", 5)
    with Bench(tmp_path) as bench:
        bench.encode(old)
        bench.settle()
    with stuck(stuck_writes(tmp_path)), Bench(tmp_path, store_timeout_s=2) as bench:
        pid = bench.serving()
        bench.encode(unwritten)
        bench.until("they are sealed", lambda: all(map(bench.live, unwritten)))
        assert stored(tmp_path) == set(old)
        with stopped(pid):
            bench.encode(unsealed)
            assert bench.cache.fetch(old[0], length(old[0]), time.monotonic())
            stuck_writes(tmp_path).unlink()  # the next one gets through
            bench.until("it is replaced", lambda: store_processes(bench.arena) not in ([pid], []))
            assert bench.serving() != pid
        assert process_state(pid) == "Z"
        bench.settle()
        assert bench.snapshot()["store_losses"] == 1
        assert set(bench.unsaved()) == set(unsealed)
        assert not bench.live(old[0])
        assert all(bench.serves(name) for name in [*unwritten, old[1]])
        bench.until("the write is made up for", lambda: stored(tmp_path) == {*old, *unwritten})
        all_made_up_for(bench, tmp_path, {*old, *unwritten, *unsealed})


@pytest.mark.parametrize("call", ["fork", "setpgid"])
@pytest.mark.fault(
    "hangs before its first message",
    "store process",
    "replaced; it touches nothing in the arena",
    recovery="the next one serves, and the arena is used again and again",
)
def test_a_store_process_that_hangs_before_its_first_message_is_replaced_and_touches_no_place_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It hangs during its start, before or after it has detached itself, with saves already handed over to it."""
    hanging_call = f"lambda *given: os.kill(os.getpid(), {signal.SIGSTOP:d}) or hang(*given)"
    code = f"import os\nhang = os.{call}\nos.{call} = {hanging_call}\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setattr("lmcache_ec.supervisor._RESTART_PAUSE_S", (0.0, 0.1))
    folder = tmp_path / "disk"
    with Bench(folder, arena_bytes=MIB, store_timeout_s=2, drain_s=2) as bench:
        old = bench.serving()
        with monkeypatch.context() as broken:
            broken.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
            os.kill(old, signal.SIGKILL)
            bench.until("the next one hangs", lambda: "T" in map(process_state, store_processes(bench.arena)))
            [hanging] = [pid for pid in store_processes(bench.arena) if process_state(pid) == "T"]
        with stopped(hanging):
            steps = [bench.encode(names("early", 40))]
            assert len(steps[0].saves) == 40
            with monkeypatch.context() as impatient:
                impatient.setattr("lmcache_ec.supervisor._OPENING_S", 0.0)
                bench.until("it is replaced", lambda: bench.workers[0].rank.incarnation == 3)

            def reused() -> bool:
                steps.append(bench.encode([f"other-{len(steps)}"]))
                return bench.snapshot()["evictions"] > 150

            bench.until("the next one serves, and the arena is used again and again", reused)
            held = {place for place in places(steps[0]) if process_state(hanging) != "Z"}
            assert all(apart(sorted([*held, place])) for place in set(places(*steps[1:])))
        bench.until("the one that hung has ended", lambda: process_state(hanging) == "Z")
        bench.settle()
        assert bench.snapshot()["store_losses"] == 2
        for name in filter(bench.live, {save.identifier for step in steps for save in step.saves}):
            assert bench.serves(name)
        bench.settle()
        stored(folder)


@pytest.mark.fault(
    "its tiers take longer to open than store_timeout_s", "store process", "it is not killed, and serves"
)
def test_a_store_process_whose_tiers_take_longer_to_open_than_it_may_be_silent_still_comes_to_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not answer while it opens them. If it were killed for that, no successor would ever be ready either."""
    code = "import time\nfrom lmcache_ec.tiers import disk\nopen_now = disk.DiskTier.__init__\n"
    code += "disk.DiskTier.__init__ = lambda *args: time.sleep(3) or open_now(*args)\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    folder = tmp_path / "disk"
    with Bench(folder, store_timeout_s=0.5) as bench:
        with monkeypatch.context() as slow:
            slow.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
            os.kill(bench.serving(), signal.SIGKILL)
            bench.until("the loss is noticed", partial(noticed, bench, 0))
            bench.serving()
        assert bench.snapshot()["store_losses"] == 1
        bench.encode(["a"])
        bench.settle()
    assert stored(folder) == {"a"}


# ---- killed


@pytest.mark.fault(
    "killed while it reads an entry into the arena",
    "store process",
    "a miss; read again",
    recovery="it is asked for again",
)
def test_a_store_process_killed_while_it_fills_costs_a_miss_and_no_entry(tmp_path: Path) -> None:
    old = names("old", 5)
    with Bench(tmp_path) as bench:
        bench.encode(old)
        bench.settle()
    with Bench(tmp_path) as bench:
        bench.scanned()
        assert bench.fetch(old[1])
        pid = bench.serving()
        with stopped(pid):
            assert bench.cache.fetch(old[0], length(old[0]), time.monotonic())
            bench.drain()
            assert bench.snapshot()["places_filling"] == 1
            os.kill(pid, signal.SIGKILL)
        bench.settle()
        assert (bench.snapshot()["fetch_misses"], bench.snapshot()["store_losses"]) == (1, 1)
        assert bench.serves(old[2])
        bench.until("it is asked for again", lambda: bench.fetch(old[0]))
        all_made_up_for(bench, tmp_path, set(old))


@pytest.mark.fault("killed while it seals an entry", "store process", "the save is repeated")
def test_a_store_process_killed_while_it_seals_costs_no_entry(tmp_path: Path) -> None:
    saves = names("sealing", 5)
    with Bench(tmp_path) as bench:
        pid = bench.serving()
        with stopped(pid):
            bench.encode(saves)
            bench.drain()
            assert bench.snapshot()["places_sealing"] == len(saves)
            os.kill(pid, signal.SIGKILL)
        bench.settle()
        assert set(bench.unsaved()) == set(saves)
        assert bench.snapshot()["saves_dropped"] == len(saves)
        all_made_up_for(bench, tmp_path, set(saves))


@pytest.mark.fault(
    "killed while a rank's link is full",
    "store process",
    "the rank is connected to its successor once there is room",
    recovery="the rank knows it",
)
def test_a_new_store_process_is_introduced_to_the_saving_rank_even_if_that_link_is_full_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank reads its link in its own thread, so a full link has to be simulated."""
    send, refusals = Link.send, count()

    def full_at_first(link: Link, message: AnyMessage, fds: Sequence[int] = ()) -> bool:
        return not (isinstance(message, StoreLink) and next(refusals) < 3) and send(link, message, fds)

    with Bench(tmp_path) as bench:
        monkeypatch.setattr(Link, "send", full_at_first)
        os.kill(bench.serving(), signal.SIGKILL)
        bench.until("the loss is noticed", partial(noticed, bench, 0))
        bench.serving()
        bench.until("the rank knows it", lambda: bench.workers[0].rank.incarnation == 2)
        bench.encode(["a"])
        bench.settle()
        assert stored(tmp_path) == {"a"}


@pytest.mark.fault(
    "killed while it writes",
    "store process",
    "the partial file is removed; the entry is written again",
    recovery="the torn file is swept",
)
def test_a_store_process_killed_while_it_writes_leaves_no_torn_file(tmp_path: Path) -> None:
    """A half-written file is never served. The next store process removes it and writes the entry: at the latest when
    it lists the folder again, since a dying process may still hold its file at the first look."""
    rows, big = 32 * MIB // 128, (f"big-{number}" for number in count())
    with Bench(tmp_path, arena_bytes=128 * MIB) as bench:
        pid = bench.serving()

        def killed_while_it_writes() -> str:
            """Name of the entry that it was writing; empty if it finished first."""
            bench.encode([name := next(big)], rows)
            written = path_of(tmp_path, name).exists
            wait_until("it is being written", lambda: bool(temporaries(tmp_path)) or written())
            with stopped(pid):
                if not temporaries(tmp_path) or written():
                    return ""
                os.kill(pid, signal.SIGKILL)
            return name

        name = wait_until("one is caught", killed_while_it_writes)
        assert temporaries(tmp_path)
        assert name not in stored(tmp_path)
        bench.settle()
        written = path_of(tmp_path, name).exists
        bench.until("the torn file is swept", lambda: written() and not temporaries(tmp_path), 60.0)
        assert bench.serves(name, rows)
        bench.settle()
    assert name in stored(tmp_path)


@pytest.mark.fault("killed at random moments", "store process", "no entry is damaged or lost")
def test_a_store_process_killed_at_random_moments_leaves_no_torn_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifteen times, while it fills, seals and writes."""
    monkeypatch.setattr("lmcache_ec.supervisor._RESTART_PAUSE_S", (0.0,))
    dice = random.Random(2)
    old, saved = names("old", 30), list[str]()
    with Bench(tmp_path) as bench:
        bench.encode(old)
        bench.settle()
    with Bench(tmp_path) as bench:
        for number in range(15):
            pid, losses = bench.serving(), bench.snapshot()["store_losses"]
            fresh = names(f"round-{number}", 20)
            for name in fresh:
                bench.encode([name])
            bench.cache.fetch(old[number], length(old[number]), time.monotonic())
            moment = time.monotonic() + dice.random() * 0.02
            while time.monotonic() < moment:
                bench.drain()
            os.kill(pid, signal.SIGKILL)
            saved += fresh
            bench.until("the loss is noticed", partial(noticed, bench, losses))
            bench.settle()
            stored(tmp_path)
            assert all(bench.serves(name) for name in filter(bench.live, fresh))
        bench.settle()
        all_made_up_for(bench, tmp_path, {*old, *saved})


@pytest.mark.parametrize("interpreter", ["/bin/false", "/no/such/interpreter"])
@pytest.mark.fault("cannot be started", "store process", "misses; retried until it starts")
def test_a_store_process_that_cannot_be_started_costs_misses_and_is_started_once_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreter: str
) -> None:
    monkeypatch.setattr("lmcache_ec.supervisor._RESTART_PAUSE_S", (0.0, 0.1, 0.2, 0.3))
    with Bench(tmp_path) as bench:
        bench.encode(["before"])
        bench.settle()
        with monkeypatch.context() as broken:
            broken.setattr(sys, "executable", interpreter)
            os.kill(bench.serving(), signal.SIGKILL)
            bench.until("it has ended", lambda: not store_processes(bench.arena))
            bench.encode(["meanwhile"])
            again = time.monotonic() + 0.5
            bench.until("it was tried again and again", lambda: time.monotonic() > again)
            assert bench.serves("before")
            assert not bench.fetch("nowhere")
            bench.settle()
            losses = bench.snapshot()["store_losses"]
            assert 1 <= losses <= 4
        bench.serving()
        bench.encode(["after"])
        all_made_up_for(bench, tmp_path, {"before", "meanwhile", "after"})


@pytest.mark.fault(
    "exits right after its first message, every time", "store process", "restarted after longer and longer pauses"
)
def test_a_store_process_that_ends_right_after_its_first_message_is_restarted_after_longer_and_longer_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_ec.supervisor._RESTART_PAUSE_S", (0.0, 0.0, 60.0))
    monkeypatch.setattr("lmcache_ec.supervisor._PING_INTERVAL_S", 3600.0)  # on a busy host it might answer a ping
    with Bench(tmp_path) as bench:
        for losses in range(3):
            os.kill(bench.serving(), signal.SIGKILL)
            bench.until("the loss is noticed", partial(noticed, bench, losses))
        bench.until("it has ended", lambda: not store_processes(bench.arena))
        later = time.monotonic() + 1.0
        bench.until("nothing happened for a while", lambda: time.monotonic() > later)
        assert not store_processes(bench.arena)
        assert bench.snapshot()["store_losses"] == 3


@pytest.mark.fault(
    "exits before a rank reports what it handed over",
    "store process",
    "the place in the arena is freed",
    recovery="the report is in",
)
def test_a_report_that_comes_after_the_end_of_the_process_it_names_holds_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No successor can be started meanwhile. Saves handed over to the last one are void, and no pass waits for them."""
    with Bench(tmp_path) as bench:
        worker, pid = bench.workers[0], bench.serving()
        with monkeypatch.context() as broken:
            broken.setattr(sys, "executable", "/no/such/interpreter")
            step = bench.save(["a"])
            with stopped(pid):
                outcomes, _ = worker.copy(step)
                handed = worker.hand_over(step, outcomes)
                os.kill(pid, signal.SIGKILL)
            bench.until("the loss is noticed", partial(noticed, bench, 0))
            bench.until("it has ended", lambda: not store_processes(bench.arena) and not bench.cache._store._old)
            worker.report(step, outcomes, handed)
            bench.until("the report is in", lambda: not bench.cache.book.outstanding())
        assert bench.snapshot()["places_sealing"] == 0
        assert not bench.cache.book.under_way("a")
        bench.settle()
        assert bench.unsaved() == ["a"]


# ---- a disk that hangs


@pytest.mark.fault(
    "writes hang",
    "LocalDisk",
    "sealing and reuse continue; no file holds another entry's bytes",
    recovery="all is written",
)
def test_a_disk_that_hangs_holds_up_neither_sealing_nor_reuse_and_no_file_holds_anothers_bytes(tmp_path: Path) -> None:
    """Far more is encoded than may wait to be written, in an arena whose places are needed again and again."""
    with Bench(tmp_path, arena_bytes=60 * 8192) as bench:
        with stuck(stuck_writes(tmp_path)):
            for name in names("image", 200):
                bench.encode([name])
                bench.until("it is sealed", partial(bench.live, name))
            assert bench.snapshot()["evictions"] > 100
            assert bench.snapshot()["dirty_bytes"] <= 15 * 8192
        bench.settle()
        assert bench.unsaved()
        while owed := bench.unsaved():
            bench.encode(owed[:10])
            bench.settle()
        bench.until("all is written", lambda: not bench.snapshot()["unwritten"])
        bench.settle()
        assert stored(tmp_path) == set(names("image", 200))


def test_writes_that_were_put_off_are_done_when_the_engine_ends(tmp_path: Path) -> None:
    """Even though the store process notices the engine's end, with answers unread, before it reads its orders."""
    images = names("image", 40)
    with (
        stuck(stuck_writes(tmp_path)) as release,
        ExitStack() as later,
        Bench(tmp_path, arena_bytes=60 * 8192) as bench,
    ):
        bench.encode(images)
        bench.until("all is sealed", lambda: all(map(bench.live, images)))
        owed, arena, pid = bench.snapshot()["unwritten"], bench.arena, bench.serving()
        assert owed >= 20
        release()
        wait_until("the others are written", lambda: bench.status()["jobs"] == 0)
        assert len(stored(tmp_path)) == len(images) - owed
        later.enter_context(stopped(pid))  # it resumes once the engine has ended
    wait_until("the store process has ended", lambda: not store_processes(arena))
    assert stored(tmp_path) == set(images)


@pytest.mark.fault("does not answer", "LocalDisk", "only a bounded number of look-ups wait for it")
def test_requests_to_a_disk_that_never_answers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store process answers every ping. The number of waiting requests is bounded; further ones do not wait."""
    code = f"""
import runpy, time
runpy.run_path({str(PLUGIN / "sitecustomize.py")!r})
from lmcache_ec.tiers.disk import DiskTier
DiskTier.contains = lambda *_: time.sleep(3600)
"""
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    folder = tmp_path / "disk"
    fresh = (f"image-{number}" for number in count())

    def ask() -> bool:
        return bench.cache.fetch(next(fresh), 0, time.monotonic())

    def under_way() -> int:
        return bench.snapshot()["fetches_under_way"]

    with stuck(stuck_writes(folder)), Bench(folder, drain_s=0) as bench:  # no scan: everything is looked up
        bench.until("as many are asked as may be", lambda: ([ask() for _ in range(20)], under_way() >= 4096)[1])
        asked_at = time.monotonic()
        bench.until("its link has room", lambda: bench.cache._store._ping_answered > asked_at)
        assert not any(ask() for _ in range(100))
        assert under_way() == 4096
        assert bench.cache.fetch("image-0", 0, time.monotonic()), "it is still under way"


@pytest.mark.fault(
    "missing while the store process restarts", "LocalDisk", "the engine serves without it, and uses it once it is back"
)
def test_a_disk_that_is_unreachable_while_the_store_process_restarts_is_used_once_it_is_back(tmp_path: Path) -> None:
    folder, away = tmp_path / "disk", tmp_path / "away"
    with Bench(folder) as bench:
        bench.encode(["before"])
        bench.settle()
        pid = bench.serving()
        folder.rename(away)
        folder.write_text("in the way")
        os.kill(pid, signal.SIGKILL)
        bench.until("the loss is noticed", partial(noticed, bench, 0))
        bench.serving()
        bench.encode(["meanwhile"])
        bench.settle()
        assert not bench.fetch("nowhere")
        folder.unlink()
        away.rename(folder)
        bench.encode(["after"])
        bench.settle()
        assert stored(folder) == {"before", "after"}


# ---- full links


def in_time(work: Callable[[], None]) -> None:
    """Run `work` while this thread checks that it ends."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), "a call on the model's path waits"
    if failures:
        raise failures[0]


@pytest.mark.fault(
    "reads no messages",
    "store process",
    "saves are dropped, look-ups are misses, nothing waits",
    recovery="all reports are in",
)
def test_a_store_process_that_reads_no_messages_costs_saves_and_misses_but_no_wait(tmp_path: Path) -> None:
    """Both links to it are full. Accepted saves are done afterwards; the others are known to be pending."""
    many = names("image", 6000)
    asked: list[bool] = []
    with stuck(stuck_writes(tmp_path)), Bench(tmp_path, store_timeout_s=60) as bench:  # no scan: everything is asked

        def push() -> None:
            asked.extend(bench.cache.fetch(f"nowhere-{name}", 0, time.monotonic()) for name in many)
            for name in many:
                bench.encode([name], 1, persist=False)
            bench.drain()

        with stopped(bench.serving()):
            in_time(push)
            assert 200 < sum(asked) < len(many)
            bench.until("all reports are in", lambda: not bench.cache.book.outstanding())
            taken = set(many) - set(bench.unsaved())
            assert 200 < len(taken) < len(many)
            assert bench.snapshot()["places_sealing"] == len(taken)
        bench.settle()
        assert set(filter(bench.live, many)) == taken
        assert bench.snapshot()["fetch_misses"] == sum(asked)
        some = sorted(taken)[::100]
        assert bench.read(some) == {name: payload(name, 1) for name in some}
        bench.settle()


@pytest.mark.fault("reads no messages", "scheduler side", "ranks and store process carry on", recovery="all is sealed")
def test_a_scheduler_side_that_reads_no_messages_delays_neither_ranks_nor_the_store_process(tmp_path: Path) -> None:
    """There are more reports and answers than a link holds: all of them arrive late, and in order."""
    many = names("image", 5000)
    with Bench(tmp_path) as bench:
        bench.encode(["hot"])
        bench.settle()

        def push() -> None:
            for name in many:
                bench.encode([name], 1, persist=False)
                bench.read(["hot"])

        in_time(push)
        wait_until("all is sealed", lambda: bench.status()["store"]["sealed"] == 1 + len(many))
        assert bench.snapshot()["saves"] == 1
        bench.settle()
        assert bench.snapshot()["saves"] == 1 + len(many)
        assert bench.snapshot()["loads_cpu"] == len(many)
        assert bench.read(many[::100]) == {name: payload(name, 1) for name in many[::100]}
        bench.settle()


@pytest.mark.fault("a producer has no usable tier left", "tiers", "it finds out at once, and announces nothing")
def test_a_producer_with_no_tier_left_learns_it_at_once(tmp_path: Path) -> None:
    """The folder is unusable, which is discovered too late to abort the start."""
    (tmp_path / "in the way").write_text("")
    with Bench(tmp_path / "in the way", start_timeout_s=0.001) as bench:
        worker, _ = bench.workers[0], bench.serving()
        step = bench.save(["a"])
        outcomes, _ = worker.copy(step)
        handed = {save.place: worker.rank.hand_over(replace(save, flush=True)) for save in step.saves}
        durable: list[set[int]] = []
        in_time(lambda: durable.append(worker.rank.await_durable(set(handed), time.monotonic() + 600)))
        assert durable == [set()]
        worker.report(step, outcomes, handed)
        bench.settle()
        assert bench.live("a")
