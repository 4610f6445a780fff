# SPDX-License-Identifier: Apache-2.0
"""Identifiers that say nothing of the content alone: a client's own, and those of a tower that an adapter changes."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.engine import lora
from tests.engine.drive import Request
from tests.engine.rig import Reference, Rig
from tests.engine_env import Layout, Output
from tests.engine_runner import Call, EngineProcess
from tests.media import Prompt

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("persist", [False, True], ids=["in memory", "persisted"])
def test_a_clients_own_names(persist: bool, tmp_path: Path, reference: Reference) -> None:
    """They serve as long as the engine lives, and leave its memory only where the operator vouches for them."""
    named = Request(Prompt(images=(1,)), uuids=("../../the client's own name",))
    keys = {"persist_client_ids": persist}
    with Rig("gemma3", Layout.ONE_PROCESS, tmp_path, reference, keys=keys) as rig:
        assert rig.encodes(rig.play(named).encodes) == 1
        rig.settle()
        rig.forget()
        assert rig.encodes(rig.play(named).encodes) == 0
        assert rig.left_over() == {}
        assert len(rig.files()) == persist
        assert all(file.is_relative_to(rig.disk) for file in tmp_path.rglob("*.safetensors"))
        rig.restart()
        assert rig.encodes(rig.play(named).encodes) == (not persist)


def test_adapters_of_a_tower_stay_apart_and_in_memory(tmp_path: Path, reference: Reference) -> None:
    """An adapter's name says nothing about its weights: under the same name, a new process encodes anew."""
    names = [("one", 1, str(lora.adapter(tmp_path / "a1", 1))), ("two", 2, str(lora.adapter(tmp_path / "a2", 2)))]
    renamed = [("one", 1, names[1][2])]
    prompt = Prompt(images=(1,))

    def asked(engine: EngineProcess, adapters: list[Any]) -> tuple[list[Output], list[str]]:
        arguments = {"prompt": msgspec.to_builtins(prompt), "adapters": adapters}
        report = engine.do(Call("tests.engine.lora:generate", arguments))
        return msgspec.convert(report.value, list[Output]), report.encodes

    with EngineProcess(lora.MODEL, Layout.ONE_PROCESS, folder=tmp_path / "off", **lora.ENGINE) as plain:
        right, _ = asked(plain, names)
    assert not right[0].equals(right[1]), "the adapters make no difference, so this proves nothing"
    with Rig(lora.MODEL, Layout.ONE_PROCESS, tmp_path, reference, **lora.ENGINE) as rig:
        for encodes in (2, 0):
            outputs, encoded = asked(rig.engine, names)
            assert all(output.equals(expected) for output, expected in zip(outputs, right, strict=True))
            assert len(encoded) == encodes
            rig.settle()
            rig.forget()
        assert rig.files() == []
        rig.restart()
        [output], encoded = asked(rig.engine, renamed)
        assert output.equals(right[1])
        assert len(encoded) == 1
