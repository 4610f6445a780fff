# SPDX-License-Identifier: Apache-2.0
"""Entries removed behind an engine's back are available to the next engine again, if they were in memory."""

import shutil
from pathlib import Path

import pytest

from benchmarks.testbed.engine_env import Layout
from benchmarks.testbed.media import Prompt
from benchmarks.testbed.servers.redis import redis_server
from tests.engine.rig import Reference, Rig, wait_until

pytestmark = pytest.mark.slow

PROMPTS = (Prompt(images=(1,)), Prompt(images=(2, 3)))
ITEMS = 3
NEW = Prompt(images=(4,))


@pytest.mark.fault(
    "folder and remote are emptied",
    "all tiers",
    "refilled from memory; the restart is warm",
    engine="restarted",
)
def test_a_restart_is_warm_though_the_folder_and_the_remote_were_emptied(tmp_path: Path, reference: Reference) -> None:
    """Both are written again while other requests run. Entries encoded while the remote was down reach it, too."""
    with redis_server(tmp_path / "redis") as redis:

        def in_redis() -> int:
            return len(redis.client().keys("*.safetensors"))

        keys = {"remotes": [redis.url]}
        with Rig("gemma3", Layout.ONE_PROCESS, tmp_path / "one", reference, keys=keys) as rig:
            assert rig.ask(*PROMPTS) == ITEMS
            wait_until("all is written", lambda: rig.settle() or in_redis() == ITEMS)
            wait_until("the tiers are known", lambda: rig.status()["store"].get("redis_looks", 0) > 1)
            rig.settle()
            shutil.rmtree(rig.disk)
            redis.client().flushall()
            wait_until("the folder has all again", lambda: rig.settle() or len(rig.files()) == ITEMS)
            wait_until("Redis has all again", lambda: rig.settle() or in_redis() == ITEMS)
            redis.kill()
            assert rig.ask(NEW) == 1
            redis.start()
            wait_until("Redis has all once more", lambda: rig.settle() or in_redis() == ITEMS + 1)
            assert rig.left_over() == {}
            rig.restart()
            assert rig.ask(*PROMPTS, NEW) == 0
        with Rig("gemma3", Layout.ONE_PROCESS, tmp_path / "other", reference, keys=keys) as other:
            assert other.ask(*PROMPTS, NEW) == 0
            assert other.counts()["loads_redis"] == ITEMS + 1
