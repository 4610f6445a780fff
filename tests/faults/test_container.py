# SPDX-License-Identifier: Apache-2.0
"""An engine whose process is PID 1, as in most containers: its end kills all other processes."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from benchmarks.testbed.engine_env import Layout
from benchmarks.testbed.engine_runner import EngineProcess, Generate, descendants, new_interpreter
from benchmarks.testbed.media import Prompt
from benchmarks.testbed.servers.redis import RedisServer, redis_server
from benchmarks.testbed.servers.relay import relay
from lmcache_ec.cli.status import engines
from lmcache_ec.store_process import PROCESS_NAME
from tests.engine.rig import NOTHING, PATIENCE, wait_until

pytestmark = pytest.mark.slow

PICTURES = tuple(Prompt(images=(seed,)) for seed in range(1, 9))
NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def store_pids(engine: EngineProcess, state: str = "") -> Iterator[int]:
    for pid in descendants(engine.process.pid):
        before, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        if before.endswith(f"({PROCESS_NAME}") and after.split()[0].startswith(state):
            yield pid


def entries_in(server: RedisServer) -> int:
    """Count the entries only: the name of the store's content is a key, too."""
    return len(server.client().keys("*.safetensors"))


@pytest.mark.fault(
    "the engine is PID 1 and gets SIGTERM",
    "container",
    "everything handed over is written; no zombies",
    recovery="those that were killed are collected",
    engine="exited cleanly",
    outputs=False,
)
def test_entries_that_were_handed_over_are_stored_and_nothing_is_left_behind(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server, relay(server.port) as slow:
        connector = {
            "ec_connector": "ECLMCacheConnector",
            "ec_role": "ec_both",
            "ec_connector_extra_config": {"remote_url": f"redis://127.0.0.1:{slow.port}", **PATIENCE},
        }
        folder = tmp_path / "engine"
        begin = partial(new_interpreter, inside=NAMESPACE)
        with EngineProcess("gemma3", Layout.MULTI_PROCESS, folder=folder, connector=connector, begin=begin) as one:
            for _ in range(2):
                [pid] = store_pids(one, "S")
                os.kill(pid, signal.SIGKILL)
                wait_until("the next serves", lambda: one.do(Generate((NOTHING,))) and list(store_pids(one, "S")))
            wait_until("those that were killed are collected", lambda: not list(store_pids(one, "Z")))
            slow.delay_s = 0.2
            one.do(Generate(PICTURES, 1))
            assert entries_in(server) < len(PICTURES)
        assert entries_in(server) == len(PICTURES)
        assert engines() == []
