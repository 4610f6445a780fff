# SPDX-License-Identifier: Apache-2.0
"""Items with nothing to encode, in an engine whose device fails: only their request ends."""

from pathlib import Path

import pytest

from benchmarks.testbed.engine_env import Layout
from benchmarks.testbed.engine_runner import Call
from benchmarks.testbed.media import Prompt
from benchmarks.testbed.triton_interpreter import ENVIRONMENT
from tests.engine.drive import Request
from tests.engine.rig import Reference, Rig, needs_v2_runner

MODEL = "qwen2vl"
PICTURE, OTHER = Prompt(images=(1,)), Prompt(images=(2,))
WHOLE = Request(PICTURE, uuids=("the client's picture",))
BARE = Request(PICTURE, uuids=WHOLE.uuids, grid=(1, 8, 8))


def fail_copies(engine: object) -> None:
    """In the engine's process: make every copy from the arena to the device fail."""
    copier = engine.worker_connector._worker._copier  # type: ignore[attr-defined]

    def broken(*_: object) -> None:
        raise RuntimeError("the device has no memory left")

    copier.load = copier.load_plainly = copier.load_ahead = broken


def forget_payloads(engine: object) -> None:
    """In the engine's process: empty vLLM's processor cache. In vLLM 0.30 an engine would use the item that it has kept
    under the same name, with its pixels, as if the request carried it."""
    engine.llm.llm_engine.reset_mm_cache()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "runner",
    [pytest.param({}, id="v1"), pytest.param(ENVIRONMENT, id="v2", marks=[pytest.mark.slow, needs_v2_runner])],
)
def test_a_failed_load_of_an_item_without_media_fails_its_request_and_never_the_engine(
    tmp_path: Path, reference: Reference, runner: dict[str, str]
) -> None:
    with Rig(MODEL, Layout.ONE_PROCESS, tmp_path, reference, environment=runner) as rig:
        rig.scanned()
        assert [ending.reason for ending in rig.play(WHOLE, Request(OTHER)).endings] == ["length", "length"]
        rig.settle()
        rig.forget(noticed=True)
        rig.engine.do(Call(f"{__name__}:forget_payloads", {}))
        played = rig.play(BARE)
        assert ([ending.reason for ending in played.endings], played.encodes) == (["length"], [])
        rig.forget(noticed=True)
        rig.engine.do(Call(f"{__name__}:fail_copies", {}))
        played = rig.play(BARE, Request(OTHER))
        assert [ending.reason for ending in played.endings] == ["error", "length"]
        assert len(played.encodes) == 1, "what carries its pixels is encoded in the same step"
        assert rig.ask(OTHER) == 0
        counts = rig.counts()
        assert (counts["unavailable"], counts["loads_failed"]) == (1, 1)
        assert rig.left_over() == {}
