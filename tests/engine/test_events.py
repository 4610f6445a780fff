# SPDX-License-Identifier: Apache-2.0
"""A real engine publishes which pictures it holds. Subscribers do not change its answers."""

import subprocess
import sys
import uuid
from pathlib import Path

from benchmarks.testbed.engine_env import Layout
from benchmarks.testbed.media import Prompt
from lmcache_ec.events.warm_index import WarmIndex
from tests.engine.drive import Request
from tests.engine.rig import Reference, Rig, wait_until

MODEL = "gemma3"
LISTENS = "import sys, time; from lmcache_ec.events.warm_index import WarmIndex\n"
LISTENS += "index = WarmIndex(sys.argv[1:]); print(index.wait(30), flush=True); time.sleep(600)"


def test_a_router_learns_which_pictures_an_engine_holds(tmp_path: Path, reference: Reference) -> None:
    """By vLLM's identifiers of encoded items. Entries that come from disk count as held, too."""
    endpoint = f"ipc:///tmp/ec-{uuid.uuid4()}"
    first, second = Prompt(images=(1,)), Prompt(images=(2,))
    keys = {"events_endpoint": endpoint}
    with (
        WarmIndex([endpoint]) as index,
        Rig(MODEL, Layout.MULTI_PROCESS, tmp_path / "engine", reference, keys=keys) as rig,
    ):
        wait_until("it is followed", lambda: index.wait(0))
        command = [sys.executable, "-c", LISTENS, endpoint]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as doomed:
            assert doomed.stdout is not None
            assert doomed.stdout.readline() == "True\n"
            played = [rig.play(*requests) for requests in ([Request(first)], [Request(second)])]
            doomed.kill()
        identifiers = [identifier for each in played for identifier in each.encodes]
        assert len(identifiers) == 2
        assert rig.left_over() == {}
        wait_until("both are warm", lambda: all(index.where(identifiers).values()))
        assert all(held == [endpoint] for held in index.where(identifiers).values())
        assert index.where(["never-seen"]) == {"never-seen": []}
        rig.forget()
        assert rig.ask(first, second) == 0
        rig.restart()
        wait_until("its memory is known to be empty", lambda: not any(index.where(identifiers).values()))
        rig.scanned()
        assert rig.ask(first) == 0
        rig.settle()
        wait_until("what came from disk is warm", lambda: index.where(identifiers)[identifiers[0]])
        assert index.where(identifiers)[identifiers[1]] == []
        assert rig.left_over() == {}
