# SPDX-License-Identifier: Apache-2.0
"""What remains in a too small arena after a crawl, depending on `cache_policy` in LMCache's file."""

from pathlib import Path

import pytest

from benchmarks.testbed.engine_env import Layout
from benchmarks.testbed.media import Prompt
from tests.engine.rig import PATIENCE, Reference, Rig

MODEL = "qwen3vl"
ROUNDS, CRAWLED = 8, 5
POPULAR = tuple(Prompt(images=(seed,)) for seed in (1, 2))
ARENA_FOR_SIX = "0.00032"


def crawled(round_: int) -> list[Prompt]:
    return [Prompt(images=(1000 + CRAWLED * round_ + number,)) for number in range(CRAWLED)]


@pytest.mark.parametrize("policy", ["LRU", "cost"])
def test_pictures_in_steady_use_survive_a_crawl_if_eviction_is_by_cost(
    policy: str, tmp_path: Path, reference: Reference
) -> None:
    """Two pictures in use, and between two uses five others that are never asked for again: there is room for five or
    six."""
    file = tmp_path / "lmcache.yaml"
    file.write_text(f"ec:\n  max_local_cpu_size: {ARENA_FOR_SIX}\n  cache_policy: {policy}\n")
    with Rig(
        MODEL,
        Layout.ONE_PROCESS,
        tmp_path,
        reference,
        environment={"LMCACHE_CONFIG_FILE": str(file)},
        connector={"ec_connector_extra_config": PATIENCE},  # type: ignore[dict-item]
    ) as rig:
        encodes = []
        for round_ in range(ROUNDS):
            encodes.append(rig.ask(*POPULAR, max_tokens=1))
            assert rig.ask(*crawled(round_), max_tokens=1, one_by_one=True) == CRAWLED
            rig.settle()
            rig.forget()
        assert encodes[0] == len(POPULAR)
        assert encodes[-3:] == [0 if policy == "cost" else len(POPULAR)] * 3, encodes
        assert rig.counts()["evictions"] > ROUNDS
        assert rig.left_over() == {}


def test_entries_evicted_from_memory_come_from_the_disk_once_vllm_has_emptied_its_own_cache(
    tmp_path: Path, reference: Reference
) -> None:
    """Even for the first request, although vLLM does not notify a connector that its cache was emptied."""
    keys = {"max_local_cpu_size": float(ARENA_FOR_SIX)}
    with Rig(MODEL, Layout.ONE_PROCESS, tmp_path, reference, keys=keys) as rig:
        assert rig.ask(*POPULAR, max_tokens=1) == len(POPULAR)
        assert rig.ask(*crawled(0), *crawled(1), max_tokens=1, one_by_one=True) == 2 * CRAWLED
        rig.settle()
        for round_ in range(3):
            rig.forget()
            assert rig.ask(POPULAR[round_ % 2], *crawled(0), max_tokens=1, one_by_one=True) == 0
        assert rig.counts()["evictions"] > CRAWLED
        assert rig.left_over() == {}
