# SPDX-License-Identifier: Apache-2.0
"""Weights that change under a running engine: nothing of the old ones is served, nothing of the new ones is stored
under the old name."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine import weights
from tests.engine.rig import Reference, Rig
from tests.engine.test_namespace import overwrite_vision_tower
from tests.engine_env import Layout, Output
from tests.engine_runner import Call, EngineProcess, Generate
from tests.media import Prompt
from tests.models import model_path

MODEL = "gemma3"
P1, P2, P3, P4 = (Prompt(images=(number,)) for number in range(101, 105))
LAYOUTS = [Layout.ONE_PROCESS, Layout.MULTI_PROCESS, pytest.param(Layout.TP2, marks=pytest.mark.slow)]


class Twin:
    """An engine without a cache whose weights go through the same changes."""

    def __init__(self, folder: Path, model: str | Path = MODEL) -> None:
        self.engine = EngineProcess(model, Layout.ONE_PROCESS, folder=folder)

    def outputs(self, *prompts: Prompt) -> list[Output]:
        self.engine.do(Call("tests.engine.test_weights:forget"))
        return self.engine.do(Generate(prompts, one_by_one=True)).outputs


def forget(engine: Any) -> None:
    engine.forget()


@pytest.fixture
def twin(tmp_path: Path) -> Iterator[Twin]:
    twin = Twin(tmp_path / "twin")
    yield twin
    twin.engine.kill()


class Changing:
    """A rig and its twin."""

    def __init__(self, rig: Rig, twin: Twin) -> None:
        self.rig = rig
        self.twin = twin

    def call(self, function: Callable[..., None], **arguments: Any) -> None:
        """The same change in both engines."""
        call = Call(f"tests.engine.weights:{function.__name__}", arguments)
        self.rig.engine.do(call)
        self.twin.engine.do(call)

    def ask(self, *prompts: Prompt) -> int:
        """How many were encoded. The outputs are those of the weights that the engine has now."""
        report = self.rig.engine.do(Generate(prompts, one_by_one=True))
        for output, right, prompt in zip(report.outputs, self.twin.outputs(*prompts), prompts, strict=True):
            assert output.equals(right), f"{prompt}: {output}, without the cache {right}"
        return self.rig.encodes(report.encodes)

    def count(self, name: str) -> int:
        return self.rig.counts().get(name, 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whenever_vllms_caches_are_reset_new_weights_encode_anew_and_leave_nothing_on_disk(
    layout: Layout, tmp_path: Path, reference: Reference, twin: Twin
) -> None:
    with Rig(MODEL, layout, tmp_path / "engine", reference, environment=weights.INSECURE) as rig:
        engine = Changing(rig, twin)
        assert engine.ask(P1) == 1
        rig.settle()
        stored = rig.files()
        rig.forget()  # vLLM's own order: pause and reset, then the update
        engine.call(weights.apply, factor=2.0)
        assert engine.ask(P1, P2) == 2
        engine.call(weights.apply, factor=2.0)
        rig.forget()  # the other way round
        assert engine.ask(P1, P2) == 2
        engine.call(weights.apply, factor=2.0)
        assert engine.ask(P3) == 1  # not at all: what vLLM itself holds is vLLM's affair, what is new is not
        rig.forget()
        assert engine.ask(P1, P2, P3) == 2, "in memory it is kept all the same"
        assert rig.left_over() == {}
        assert rig.files() == stored
        rig.restart()
        rig.scanned()
        assert rig.ask(P1) == 0, "what was stored before the change is right for the weights of the checkpoint"
        assert rig.ask(P2, P3) == 2
