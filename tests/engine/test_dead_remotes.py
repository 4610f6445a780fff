# SPDX-License-Identifier: Apache-2.0
"""A remote that is dead from the start or dies later: its cost for a real engine's scheduling, in counts."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.testbed.engine_env import Layout
from benchmarks.testbed.media import Prompt
from benchmarks.testbed.servers.redis import redis_server
from tests.engine.drive import Request
from tests.engine.rig import Reference, Rig, wait_until

pytestmark = pytest.mark.slow

CLOCK = Request(Prompt(text="tick"), max_tokens=60)
COUNTS = ("deferred_passes", "fetches", "timeouts", "promises", "saves", "saves_dropped")
_numbers = itertools.count(500)


def engine(folder: Path, reference: Reference, remotes: Sequence[str]) -> Rig:
    keys = {"remotes": list(remotes), "load_deadline_ms": 30_000}
    return Rig("qwen3vl", Layout.ONE_PROCESS, folder, reference, keys=keys)


def costs(rig: Rig) -> tuple[list[int], int, list[int]]:
    """For two requests with new images next to one that decodes: in which of the latter's steps each has its first
    token, the number of encodes, and the scheduler side's counts."""
    prompts = [Prompt(images=tuple(itertools.islice(_numbers, images))) for images in (1, 2)]
    before = rig.counts()
    played = rig.play(
        CLOCK, *(Request(prompt, arrives=arrives) for prompt, arrives in zip(prompts, (3, 20), strict=True))
    )
    assert rig.left_over() == {}
    after = rig.counts()
    moved = [after[name] - before[name] for name in COUNTS]
    return [ending.first for ending in played.endings], rig.encodes(played.encodes), moved


@pytest.mark.fault(
    "down from the start, under a real engine",
    "Valkey",
    "same steps, encodes and counts as without it; no scheduling pass is deferred",
    engine="alive",
)
def test_a_remote_that_is_dead_from_the_start_costs_no_more_than_having_none(
    tmp_path: Path, reference: Reference
) -> None:
    with redis_server(tmp_path / "redis") as server:
        server.kill()
        with engine(tmp_path / "with", reference, [server.url]) as rig:
            rig.scanned()
            rig.ask(Prompt(images=(next(_numbers),)))  # the first image shows how large images are
            dead = costs(rig)
    with engine(tmp_path / "without", reference, []) as rig:
        rig.scanned()
        rig.ask(Prompt(images=(next(_numbers),)))
        assert dead == costs(rig)
    assert dead[2][COUNTS.index("deferred_passes")] == 0


@pytest.mark.fault(
    "goes down and comes back, under a real engine",
    "Valkey",
    "once the outage is noticed, no scheduling pass is deferred; then read and written again",
    recovery="it is written again",
    engine="alive",
)
def test_a_remote_that_dies_costs_nothing_once_its_death_is_noticed(tmp_path: Path, reference: Reference) -> None:
    with redis_server(tmp_path / "redis") as server, engine(tmp_path / "disk", reference, [server.url]) as rig:
        rig.ask(Prompt(images=(next(_numbers),)))
        server.kill()
        rig.ask(Prompt(images=(next(_numbers),)))  # this request discovers that the remote is dead
        wait_until("that is seen", lambda: rig.status()["tiers"][1]["rests"])
        _, encodes, (deferred, fetches, timeouts, *_) = costs(rig)
        assert (encodes, deferred, fetches, timeouts) == (3, 0, 0, 0)
        server.start()
        wait_until("it is written again", lambda: rig.settle() or server.client().keys("*.safetensors"))
