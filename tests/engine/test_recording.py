# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec status --record` with a real engine."""

import json
import signal
import subprocess
import sys
from pathlib import Path

from benchmarks.testbed.engine_env import Layout
from benchmarks.testbed.media import Prompt
from tests.engine.rig import Reference, Rig, wait_until

HANDLED = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
"""A shell's background jobs and their children ignore Ctrl-C."""
COMMAND = [sys.executable, "-c", f"{HANDLED}; from lmcache_ec.cli import main; main()"]


def test_a_recording_of_an_engine_is_a_trace_that_plan_replays(tmp_path: Path, reference: Reference) -> None:
    """First five pictures, so that encodes have been measured. Then two pictures, one of them twice, in order."""
    file = tmp_path / "trace.csv"
    prompts = [Prompt(images=(seed,)) for seed in range(7)]
    with Rig("gemma3", Layout.MULTI_PROCESS, tmp_path, reference) as rig:
        assert rig.ask(*prompts[:5], max_tokens=1, one_by_one=True) == 5
        rig.settle()
        with subprocess.Popen(
            [*COMMAND, "status", "--record", str(file), "--engine", rig.name], stdout=subprocess.PIPE, text=True
        ) as recorder:
            wait_until("the recorder is connected", file.exists)
            rig.settle()  # its pass notices the recorder
            assert rig.ask(prompts[5], prompts[6], prompts[5], max_tokens=1, one_by_one=True) == 2
            recorder.send_signal(signal.SIGINT)
            out, _ = recorder.communicate(timeout=60)
        assert recorder.returncode == 0
        assert "guess" not in out
        assert rig.left_over() == {}
    lines = [line.split(",") for line in file.read_text().splitlines()[1:]]
    names = [name for _, name, _, _ in lines]
    assert names == [names[0], names[1], names[0]]
    assert names[0] != names[1]
    assert all(0.0 < float(encode_s) < 60.0 for *_, encode_s in lines)
    planned = subprocess.run(
        [*COMMAND, "plan", str(file), "--tiers", "gpu=1", "--json"], capture_output=True, text=True, timeout=60
    )
    assert planned.returncode == 0, planned.stderr
    [scenario] = json.loads(planned.stdout)["scenarios"]
    assert (scenario["requests"], scenario["encodes"]) == (3, 2)
