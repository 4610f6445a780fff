# SPDX-License-Identifier: Apache-2.0
"""Models end to end: without the cache, cold, repeated, and in a new process after the first was killed."""

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.testbed.engine_env import Engine, Layout
from benchmarks.testbed.engine_runner import Call, Generate
from benchmarks.testbed.media import Prompt
from tests.engine.drive import Request
from tests.engine.rig import Reference, Rig, described, socket_kinds, wait_until

PROMPTS = (Prompt(images=(1,)), Prompt(images=(2, 3)), Prompt(images=(2,), text="once more"))


@pytest.mark.parametrize(
    "layout",
    [
        Layout.ONE_PROCESS,  # test_layouts.py has the others by default, with another model
        pytest.param(Layout.MULTI_PROCESS, marks=pytest.mark.slow),
        pytest.param(Layout.TP2, marks=pytest.mark.slow),
    ],
    ids=lambda layout: layout.name.lower(),
)
def test_gemma3(layout: Layout, tmp_path: Path, reference: Reference) -> None:
    with Rig("gemma3", layout, tmp_path, reference) as rig:
        assert rig.ask(*PROMPTS) == 3
        rig.settle()
        rig.forget()
        assert rig.ask(*PROMPTS) == 0
        assert rig.left_over() == {}
        rig.restart()
        assert rig.ask(*PROMPTS) == 0
        assert rig.left_over() == {}
        assert len(rig.files()) == 3
        assert rig.engine.refused == []
        rig.engine.close()
        wait_until("the store process has ended", lambda: not rig.statuses())


def widths(engine: Engine) -> list[dict[str, int]]:
    """In the engine's process: the widths measured at its start (by vLLM since 0.32), and those that we measure."""
    from lmcache_ec.adapters.vllm.versions import encoded_widths, output_widths

    worker = engine.llm.llm_engine.model_executor.driver_worker.worker
    return [output_widths(worker.vllm_config), encoded_widths(worker)]


def test_widths_are_known_before_anything_is_encoded(tmp_path: Path, reference: Reference) -> None:
    """Each row joins four layers, in both modalities. An output of unknown width is not saved."""
    with Rig("qwen3vl", Layout.ONE_PROCESS, tmp_path, reference) as rig:
        known, measured = rig.engine.do(Call(f"{__name__}:widths", {})).value
        assert known == measured
        assert known.keys() == {"image", "video"}


def test_whisper_is_served_as_without_the_cache(tmp_path: Path, reference: Reference) -> None:
    """vLLM would never load for it: the connector logs that it is off and does nothing."""
    prompts = tuple(Prompt(audios=(number,), text="") for number in (1, 2))
    with Rig("whisper", Layout.ONE_PROCESS, tmp_path, reference) as rig:
        for _ in range(2):
            rig.compare(rig.engine.do(Generate(prompts)).outputs, prompts, 8)
        assert "encoder cache: off: encoder-decoder models" in rig.engine.log_end()
        assert not rig.disk.exists()


def test_a_cache_that_is_switched_off_leaves_no_trace_and_outputs_are_right(
    tmp_path: Path, reference: Reference
) -> None:
    """`ec.enabled: false`: outputs are right, and no part of the cache exists: no arena, store process, link or folder.
    Switched on, vLLM's processes only have the links in addition, and no other socket or file.
    """
    prompts = (Prompt(images=(1, 2)), Prompt(videos=(3,)))
    unknown = Request(Prompt(images=(4,)), uuids=("never seen",), grid=(1, 8, 8))
    opened = {}
    for enabled in ("false", "true"):
        by_path = {"ec_connector_module_path": "lmcache_ec.adapters.vllm.connector"}
        environment = {"LMCACHE_EC_ENABLED": enabled}
        with Rig(
            "qwen3vl", Layout.MULTI_PROCESS, tmp_path, reference, environment=environment, connector=by_path
        ) as rig:
            assert rig.ask(*prompts) == 3
            if enabled == "false":
                assert rig.statuses() == []
                assert not rig.disk.exists()
                rig.forget()
                assert rig.ask(*prompts) == 3
                assert [ending.reason for ending in rig.play(unknown).endings] == ["error"]
            sockets = socket_kinds()
            opened[enabled] = {name: described(pid, sockets) for name, pid in rig.engine.processes().items()}
            assert rig.ask(*prompts) == 0
    assert opened["true"].keys() == opened["false"].keys()
    for name, targets in opened["true"].items():
        links = targets.count("unix seqpacket")
        assert reachable(targets) == reachable(opened["false"][name]) + Counter({"unix seqpacket": links})
        assert bool(links) == (name != "front end")
        assert not [target for target in opened["false"][name] if "lmcache" in target or target == "unix seqpacket"]


def reachable(targets: list[str]) -> Counter[str]:
    """Sockets and named files; the rest is memory, pipes and the like."""
    return Counter(
        target
        for target in targets
        if not target.startswith(("/dev/", "/memfd:", "anon_inode", "pipe")) and not target.endswith("(deleted)")
    )
