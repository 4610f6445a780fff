# SPDX-License-Identifier: Apache-2.0
"""Identifiers that say nothing about the content: a client's own.

Those of a tower that a LoRA adapter changes are of the same kind, and tested without an engine: vLLM 0.32's CPU kernels
for adapters fail in a tower, with and without a connector.
"""

from pathlib import Path

import pytest

from tests.engine.drive import Request
from tests.engine.rig import Reference, Rig
from tests.engine_env import Layout
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
