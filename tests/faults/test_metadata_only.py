# SPDX-License-Identifier: Apache-2.0
"""A request with only metadata that names no stored item: it fails alone, whatever the store process does."""

import os
import signal
from pathlib import Path

import pytest

from benchmarks.testbed.core import stopped
from benchmarks.testbed.engine_runner import Call, Generate
from benchmarks.testbed.media import Prompt
from tests.faults.harness import Served, Truth


@pytest.mark.fault(
    "stopped or dead, and a request comes without its picture",
    "store process",
    "only that request fails",
    engine="alive",
)
def test_a_metadata_only_request_fails_alone_with_the_store_process_stopped_or_dead(
    truth: Truth, tmp_path: Path
) -> None:
    picture = Generate((Prompt(images=(1,)),), 4)
    with Served(truth, tmp_path, model="qwen3vl", load_deadline_ms=500, store_timeout_s=600) as served:
        [expected] = served.engine.do(picture).outputs

        def fails_alone(identifier: str) -> None:
            outcome = served.engine.do(Call("tests.faults.inside:metadata_only", {"identifier": identifier}))
            assert outcome.value == ["error", 0]
            served.engine.do(Generate((Prompt(images=(2,)),), 4))
            [output] = served.engine.do(picture).outputs
            assert output.equals(expected)

        fails_alone("nobody has stored this")
        with stopped(served.store_pid()):
            fails_alone("nor this, and nobody answers")
        served.settle()
        os.kill(served.store_pid(), signal.SIGKILL)
        fails_alone("nor this, and nobody is there")
        served.until("the loss is counted", lambda book, _: book["store_losses"] == 1)
        fails_alone("nor this, after a new start")
