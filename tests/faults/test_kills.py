# SPDX-License-Identifier: Apache-2.0
"""Deaths of an engine's processes right after a save was handed over: the entry reaches the disk; nothing else is left.

The store process is held from before the request until after the deaths, so that the whole write happens afterwards.
"""

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from benchmarks.testbed.core import process_state, stopped
from benchmarks.testbed.engine_env import Layout
from benchmarks.testbed.engine_runner import Call, new_interpreter
from tests.faults.harness import NAMESPACE, Served, Traces, Truth, wait_until


@pytest.fixture(scope="module")
def served(truth: Truth, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An engine in vLLM's default layout. The last test to use it kills part of it."""
    folder = tmp_path_factory.mktemp("parts")
    with Served(truth, folder, Layout.MULTI_PROCESS, arena_entries=4, store_timeout_s=600) as served:
        yield served.ready()


@pytest.mark.fault("a load fails in another process", "worker", "encoded in the same step", engine="alive")
def test_a_load_that_fails_in_the_worker_is_replaced_by_an_encode(served: Served) -> None:
    served.ask(11)
    served.settle()
    fault = served.fail_next_load()
    assert served.ask(11) == {11}
    assert not fault.exists()
    assert served.ask(11) == set()
    assert served.settle()["loads_failed"] == 1


def test_places_are_not_reused_while_their_copies_are_held_in_another_process(served: Served) -> None:
    with stopped(served.store_pid()):
        with served.copies_held():
            assert served.engine.do(Call("tests.faults.inside:abort_after_first_token", {"seed": 1})).value
            assert served.ask(*range(2, 10)) == set(range(2, 10))
        assert served.ask(10) == {10}
    served.settle()
    assert served.truth.names([1]) <= served.stored()


def dies_and_leaves_its_entry(served: Served, title: str, seed: int) -> None:
    """vLLM ends the other processes, although the store process is held. The front end stays until it is closed."""
    traces = Traces(served)
    others = {name: pid for name, pid in served.engine.processes().items() if name.startswith("VLLM::")}
    [victim] = [pid for name, pid in others.items() if name.startswith(title)]
    with stopped(traces.store):
        assert served.ask(seed) == {seed}
        os.kill(victim, signal.SIGKILL)
        wait_until("the others have ended", lambda: all(process_state(pid) == "Z" for pid in others.values()))
        served.engine.close()
        wait_until("the engine has ended", lambda: traces.running() == [traces.store])
    traces.assert_gone()
    assert served.truth.names([seed]) <= served.stored()


@pytest.mark.fault(
    "killed",
    "worker",
    "vLLM ends the engine; saves already handed over are written",
    engine="ended by vLLM",
)
def test_entries_handed_over_are_written_if_the_worker_is_killed(served: Served) -> None:
    dies_and_leaves_its_entry(served, "VLLM::Worker", 20)


@pytest.mark.fault(
    "killed",
    "EngineCore",
    "the engine ends; saves already handed over are written",
    engine="ended",
)
def test_entries_handed_over_are_written_if_the_engine_core_is_killed(truth: Truth, tmp_path: Path) -> None:
    with Served(truth, tmp_path, Layout.MULTI_PROCESS) as served:
        dies_and_leaves_its_entry(served, "VLLM::EngineCore", 20)


@pytest.mark.fault(
    "all killed at once; then all, with the store process",
    "engine's processes",
    "nothing is left behind; the next engine serves",
    engine="restarted",
)
def test_all_are_killed_at_once_then_with_the_store_process_too(truth: Truth, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with Served(truth, tmp_path / "first", Layout.MULTI_PROCESS, disk=disk) as served:
        traces = Traces(served)
        with stopped(traces.store):
            assert served.ask(1, 2) == {1, 2}
            served.engine.kill()
            wait_until("the engine has ended", lambda: traces.running() == [traces.store])
        traces.assert_gone()
    assert truth.stored(disk) == truth.names([1, 2])
    half_written(truth, disk)
    with Served(truth, tmp_path / "second", disk=disk) as served:
        assert served.ready().ask(1, 2) == set()
        traces = Traces(served)
        with stopped(traces.store):
            assert served.ask(3) == {3}
            os.kill(traces.store, signal.SIGKILL)
            served.engine.kill()
        traces.assert_gone()
    assert truth.stored(disk) <= truth.names([1, 2, 3])
    with Served(truth, tmp_path / "third", disk=disk) as served:
        assert served.ready().ask(1, 2, 3) <= {3}
        assert served.ask(1, 2, 3) == set()


def half_written(truth: Truth, disk: Path) -> None:
    """Leave a file as from a store process killed in mid-write: its name is no entry's, and the next one removes it."""
    whole = truth.path(disk, 1).read_bytes()
    workshop = disk / NAMESPACE / ".tmp"
    workshop.mkdir(exist_ok=True)
    (workshop / f"{len(whole)}.{1:024x}").write_bytes(whole[: len(whole) // 2])


@pytest.mark.fault(
    "Ctrl-C to the process group",
    "engine's processes",
    "the store process writes what it holds, and exits",
    engine="exited cleanly",
)
def test_ctrl_c_reaches_all_but_the_store_process(truth: Truth, tmp_path: Path) -> None:
    """A terminal sends SIGINT to its whole foreground process group."""

    def heed() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # whatever the tests inherited

    in_a_group_of_its_own = partial(new_interpreter, process_group=0, preexec_fn=heed)
    with Served(truth, tmp_path, Layout.MULTI_PROCESS, begin=in_a_group_of_its_own) as served:
        traces = Traces(served)
        group = served.engine.process.pid
        assert {os.getpgid(pid) for pid in traces.family} == {group}
        with stopped(traces.store):
            assert served.ask(1) == {1}
            os.killpg(group, signal.SIGINT)
            wait_until("the engine has ended", lambda: served.engine.process.poll() is not None)
            wait_until("all of it", lambda: traces.running() == [traces.store])
        traces.assert_gone()
    assert served.stored() == truth.names([1])


@pytest.mark.fault(
    "one of two ranks fails to load",
    "worker",
    "both agree to encode",
    engine="alive",
)
def test_one_of_two_ranks_fails_to_load_and_an_orderly_end_writes_all(truth: Truth, tmp_path: Path) -> None:
    """Both ranks then have to encode: otherwise the encoder's collectives would hang."""
    disk = tmp_path / "disk"
    truth.store(disk, [1, 2])
    with Served(truth, tmp_path, Layout.TP2) as served:
        fault = served.ready().fail_next_load(rank=1)
        assert served.ask(1) == {1}
        assert not fault.exists()
        assert served.ask(1, 2) == set()
        assert served.settle()["loads_failed"] == 1
        traces = Traces(served)
        with stopped(traces.store):
            assert served.ask(3) == {3}
            served.engine.close()
            wait_until("the engine has ended", lambda: traces.running() == [traces.store])
        traces.assert_gone()
    assert truth.stored(disk) == truth.names([1, 2, 3])
