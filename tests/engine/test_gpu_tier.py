# SPDX-License-Identifier: Apache-2.0
"""vLLM's own cache in a real engine, with eviction in vLLM's order or in ours, as set by `--ec-manager-config`."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed.engine_env import Layout
from benchmarks.testbed.media import Prompt
from tests.engine.rig import PATIENCE, Reference, Rig

MANAGER = "lmcache_ec.adapters.vllm.encoder_cache_manager.TierAwareEncoderCacheManager"
MODEL = "gemma3"
ROUNDS, CRAWLED = 6, 8
POPULAR = tuple(Prompt(images=(seed,)) for seed in (1, 2))
ROOM_FOR_FOUR = 64
"""Rows of vLLM's cache, and tokens per step: an image of this model has 16 rows."""
ARENA_FOR_FIVE = 0.0001
LAYOUTS = [Layout.ONE_PROCESS, *(pytest.param(layout, marks=pytest.mark.slow) for layout in list(Layout)[1:])]


def crawled(round_: int) -> list[Prompt]:
    return [Prompt(images=(1000 + CRAWLED * round_ + number,)) for number in range(CRAWLED)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("manager", ["vllm", "cost"])
def test_the_cache_on_the_device_keeps_pictures_in_steady_use(
    manager: str, layout: Layout, tmp_path: Path, reference: Reference
) -> None:
    """Two pictures in use, and between two uses eight others that are never asked for again: neither the device nor the
    arena has room for all ten. `ask` compares the outputs with those of an engine without a cache."""
    chosen: dict[str, Any] = {}
    if manager != "vllm":
        chosen["ec_manager_config"] = {"encoder_cache_manager_cls": MANAGER, "manager_config": {"policy": manager}}
    with Rig(
        MODEL,
        layout,
        tmp_path,
        reference,
        connector={"ec_connector_extra_config": PATIENCE | {"max_local_cpu_size": ARENA_FOR_FIVE}},  # type: ignore[dict-item]
        max_num_batched_tokens=ROOM_FOR_FOUR,
        **chosen,
    ) as rig:
        encodes = []
        for round_ in range(ROUNDS):
            encodes.append(rig.ask(*POPULAR, max_tokens=1, one_by_one=True))
            assert rig.ask(*crawled(round_), max_tokens=1, one_by_one=True) == CRAWLED
            rig.settle()
        assert encodes[0] == len(POPULAR)
        assert encodes[-3:] == [0 if manager == "cost" else len(POPULAR)] * 3, encodes
        assert rig.left_over() == {}
