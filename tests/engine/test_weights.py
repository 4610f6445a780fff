# SPDX-License-Identifier: Apache-2.0
"""Weights that change in a running engine: no output of the old ones is served, and no output of the new ones is stored
under the old name. All outputs are compared with those of an engine without a cache, changed in the same way."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed.engine_env import Layout
from benchmarks.testbed.engine_runner import Call, EngineProcess, Forget, Generate
from benchmarks.testbed.media import Prompt
from benchmarks.testbed.models import model_path
from tests import warm_start
from tests.engine import weights
from tests.engine.rig import Reference, Rig
from tests.engine.test_namespace import overwrite_vision_tower

MODEL = "gemma3"
P1, P2, P3, P4, P5, P6 = (Prompt(images=(number,)) for number in range(101, 107))
LAYOUTS = [Layout.ONE_PROCESS, Layout.MULTI_PROCESS, pytest.param(Layout.TP2, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """The engine without a cache. Tests that change its weights change them back."""
    twin = EngineProcess(MODEL, Layout.ONE_PROCESS, folder=tmp_path_factory.mktemp("twin"), begin=warm_start.begin)
    yield twin
    twin.kill()


class Changing:
    """An engine under test and its twin, with the same weight changes applied to both."""

    def __init__(self, rig: Rig, twin: EngineProcess) -> None:
        self.rig = rig
        self._twin = twin
        self._changes: list[tuple[Callable[..., None], float]] = []

    def change(self, function: Callable[..., None], factor: float) -> None:
        self._changes.append((function, factor))
        for engine in (self.rig.engine, self._twin):
            call(engine, function, factor=factor)

    def reload(self, path: str) -> None:
        for engine in (self.rig.engine, self._twin):
            call(engine, weights.reload, path=path)

    def restart(self) -> None:
        """Restart the engine under test; it and its twin then have the checkpoint's weights again."""
        self.rig.restart()
        self.rig.scanned()
        self.undo()

    def undo(self) -> None:
        """Undo the twin's weight changes."""
        while self._changes:
            function, factor = self._changes.pop()
            call(self._twin, function, factor=1 / factor)

    def ask(self, *prompts: Prompt) -> int:
        """Ask one by one; returns how many were encoded. The outputs have to match the engine's current weights."""
        report = self.rig.engine.do(Generate(prompts, one_by_one=True))
        self._twin.do(Forget())
        expected = self._twin.do(Generate(prompts, one_by_one=True)).outputs
        for output, right, prompt in zip(report.outputs, expected, prompts, strict=True):
            assert output.equals(right), f"{prompt}: {output}, without the cache {right}"
        self.rig.settle()
        return self.rig.encodes(report.encodes)

    def count(self, name: str) -> int:
        return self.rig.counts().get(name, 0)


def call(engine: EngineProcess, function: Callable[..., None], **arguments: Any) -> None:
    engine.do(Call(f"tests.engine.weights:{function.__name__}", arguments))


Build = Callable[..., Changing]


@pytest.fixture
def build(tmp_path: Path, reference: Reference, twin: EngineProcess) -> Iterator[Build]:
    built: list[Changing] = []

    def engine(layout: Layout = Layout.ONE_PROCESS, name: str = "engine", **keys: Any) -> Changing:
        disk, environment = tmp_path / "disk", weights.INSECURE
        rig = Rig(MODEL, layout, tmp_path / name, reference, disk=disk, keys=keys, environment=environment)
        built.append(Changing(rig, twin))
        rig.scanned()
        return built[-1]

    yield engine
    for each in built:
        each.rig.__exit__()
        each.undo()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_new_weights_encode_again_and_leave_nothing_on_disk_whenever_vllms_caches_are_reset(
    layout: Layout, build: Build
) -> None:
    """First, calls that do not change the encoder: the entry of P1 stays where it is."""
    engine = build(layout)
    assert engine.ask(P1) == 1
    stored = engine.rig.files()
    call(engine.rig.engine, weights.read)
    engine.change(weights.apply_to_language_model, 2.0)
    engine.rig.forget()
    assert engine.ask(P1) == 0
    assert (engine.count("loads_cpu"), engine.count("weight_changes")) == (1, 0)

    engine.rig.forget()  # vLLM's own order: pause, reset, update
    engine.change(weights.apply, 2.0)
    assert engine.ask(P1, P2) == 2
    engine.change(weights.apply, 2.0)
    engine.rig.forget()  # reset after the update
    assert engine.ask(P1, P2) == 2
    engine.change(weights.apply, 2.0)
    assert engine.ask(P3) == 1  # no reset: vLLM may serve what it holds itself; new items are ours
    engine.rig.forget()
    assert engine.ask(P1, P2, P3) == 2, "in memory it is kept all the same"
    assert engine.rig.left_over() == {}
    assert engine.rig.files() == stored

    engine.restart()
    assert engine.ask(P1) == 0, "what was stored before the change is right for the weights of the checkpoint"
    assert engine.ask(P2, P3) == 2


def test_reloading_the_same_weights_keeps_the_entries_and_another_checkpoint_does_not(
    build: Build, tmp_path: Path
) -> None:
    """By vLLM's own method. On a CPU vLLM packs the tower's linear layers out of reach: here only these differ."""
    engine = build()
    assert engine.ask(P1) == 1
    own, other = str(model_path(MODEL)), tmp_path / "other" / MODEL
    shutil.copytree(own, other)
    overwrite_vision_tower(other, only="fc1.weight")
    for path, encodes in ((own, 0), (str(other), 1), (own, 0)):
        engine.rig.forget()
        engine.reload(path)
        assert engine.ask(P1) == encodes, path
    assert len(engine.rig.files()) == 1


def test_updated_weights_that_may_persist_have_a_namespace_made_from_their_digest(build: Build) -> None:
    """Once the checkpoint's weights are back, the engine finds the entries that it had stored for them."""
    engine = build(persist_updated_weights=True)
    assert engine.ask(P1) == 1
    start = engine.rig.status()["namespace"]
    engine.change(weights.apply, 2.0)
    engine.rig.forget()
    assert engine.ask(P1, P2) == 2
    updated = engine.rig.status()["namespace"]
    assert updated != start
    engine.change(weights.apply, 0.5)
    engine.rig.forget()
    engine.rig.scanned()
    assert engine.ask(P1) == 0
    assert engine.ask(P2) == 1
    assert engine.rig.status()["namespace"] == start
    engine.restart()
    assert engine.ask(P1, P2) == 0
    engine.change(weights.apply, 2.0)
    engine.rig.forget()
    engine.rig.scanned()
    assert engine.ask(P1, P2) == 0
    assert {file.parents[1].name for file in engine.rig.files()} == {start, updated}
    assert engine.rig.left_over() == {}


def test_a_version_names_the_weights_that_it_is_set_for_and_no_others(build: Build) -> None:
    engine = build(persist_updated_weights="by_version")
    engine.change(weights.apply, 2.0)
    assert engine.ask(P1) == 1
    call(engine.rig.engine, weights.set_version, version="step-1")
    engine.rig.forget()
    assert engine.ask(P2) == 1
    named = engine.rig.status()["namespace"]
    engine.change(weights.apply, 2.0)
    assert engine.ask(P3) == 1
    assert {file.parents[1].name for file in engine.rig.files()} == {named}
    assert len(engine.rig.files()) == 1, "weights without a version of their own stay in memory"
    engine.restart()
    engine.change(weights.apply, 2.0)
    call(engine.rig.engine, weights.set_version, version="step-1")
    engine.rig.scanned()
    assert engine.ask(P2) == 0
    assert engine.ask(P1, P3) == 2
    assert engine.rig.status()["namespace"] == named


def test_weight_writes_that_bypass_all_calls_are_noticed_before_an_entry_is_copied(build: Build) -> None:
    """`load_weights` of the model at once; direct writes in the next step that copies, once a check is due again."""
    engine = build(weights_check_s=0.001)
    assert engine.ask(P1) == 1
    stored = engine.rig.files()
    for write in (weights.load_in_process, weights.write_in_process):
        engine.rig.forget()
        engine.change(write, 2.0)
        assert engine.ask(P1, P2) == 2
        engine.rig.forget()
        assert engine.ask(P2, P3) == 1
        engine.rig.forget()
        assert engine.ask(P1, P2, P3) == 1, "what the first step encoded was not kept: it was made up for other weights"
    assert engine.rig.files() == stored
    assert engine.count("weight_changes") == 2
    assert engine.rig.left_over() == {}
