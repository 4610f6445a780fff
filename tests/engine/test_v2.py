# SPDX-License-Identifier: Apache-2.0
"""A real engine on vLLM's V2 model runner, the default on GPUs; here its Triton kernels are interpreted."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.testbed.engine_env import Layout
from benchmarks.testbed.engine_runner import Call
from benchmarks.testbed.media import Prompt
from benchmarks.testbed.triton_interpreter import ENVIRONMENT
from tests.engine.rig import Reference, Rig, needs_v2_runner

pytestmark = needs_v2_runner

MODEL = "qwen2vl"


def image(*seeds: int) -> Prompt:
    return Prompt(images=seeds)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, reference: Reference) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("v2")
    with Rig(MODEL, Layout.ONE_PROCESS, folder, reference, environment=ENVIRONMENT) as rig:
        rig.scanned()
        yield rig
        assert rig.left_over() == {}


def runner(engine: object) -> str:
    """In the engine's process: the module of its model runner."""
    return type(engine.runner).__mro__[1].__module__  # type: ignore[attr-defined]


def test_an_item_is_encoded_once_and_loaded_beside_new_ones(rig: Rig) -> None:
    assert rig.engine.do(Call(f"{__name__}:runner", {})).value == "vllm.v1.worker.gpu.model_runner"
    assert rig.ask(image(1, 2), image(3)) == 3
    rig.settle()
    rig.forget(noticed=True)
    assert rig.ask(image(2), image(4, 1)) == 1
    assert rig.counts()["loads_cpu"] >= 2


def fail_loads(engine: object) -> None:
    """In the engine's process: make every load of the rank fail."""
    side = engine.worker_connector._worker  # type: ignore[attr-defined]

    def broken(*_: object) -> None:
        raise RuntimeError("no memory")

    side._copier.load = broken


def test_an_item_that_cannot_be_loaded_is_encoded_in_the_same_step(tmp_path: Path, reference: Reference) -> None:
    with Rig(MODEL, Layout.ONE_PROCESS, tmp_path, reference, environment=ENVIRONMENT) as rig:
        rig.scanned()
        assert rig.ask(image(1, 2)) == 2
        rig.settle()
        rig.forget(noticed=True)
        rig.engine.do(Call(f"{__name__}:fail_loads", {}))
        assert rig.ask(image(2, 3)) == 2
        assert rig.counts()["loads_failed"] == 1
        rig.restart()
        rig.scanned()
        assert rig.ask(image(1), image(2, 3)) == 0


@pytest.mark.slow
def test_items_are_encoded_once_and_loaded_over_several_processes(tmp_path: Path, reference: Reference) -> None:
    with Rig(MODEL, Layout.MULTI_PROCESS, tmp_path, reference, environment=ENVIRONMENT) as rig:
        rig.scanned()
        assert rig.ask(image(1, 2), image(3)) == 3
        rig.settle()
        rig.forget(noticed=True)
        assert rig.ask(image(2), image(4, 1)) == 1
        rig.restart()
        rig.scanned()
        assert rig.ask(image(4), image(3, 2, 1)) == 0
