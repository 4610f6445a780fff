# SPDX-License-Identifier: Apache-2.0
"""Two engines on one host that share only a disk folder."""

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from benchmarks.testbed.engine_env import Layout, Output, engine_environment, read_encodes
from benchmarks.testbed.engine_runner import Generate
from benchmarks.testbed.media import Prompt
from benchmarks.testbed.models import ROOT
from tests.engine import data_parallel
from tests.engine.rig import Reference, Rig, wait_until

MODEL = "gemma3"
SOON_S = 5.0
"""It takes a second on an idle machine; waiting for the next listing would take half a minute."""


def test_two_engines_share_a_folder_and_no_arena(tmp_path: Path, reference: Reference) -> None:
    """The second engine loads what the first has stored, before it started and since; an item that both encode at once
    becomes one entry; when one ends, the other still serves."""
    disk = tmp_path / "disk"
    stored, both, new, later = (Prompt(images=(number,)) for number in range(4))
    with Rig(MODEL, Layout.ONE_PROCESS, tmp_path / "one", reference, disk=disk) as one:
        assert one.ask(stored) == 1
        one.settle()
        with Rig(MODEL, Layout.ONE_PROCESS, tmp_path / "two", reference, disk=disk) as two:
            two.scanned()
            assert two.ask(stored) == 0
            assert two.counts()["loads_disk"] == 1
            assert one.arenas().keys().isdisjoint(two.arenas())
            assert one.status()["namespace"] == two.status()["namespace"]
            for rig in (one, two):
                rig.engine.send(Generate((both,)))
            for rig in (one, two):
                rig.compare(rig.engine.receive().outputs, [both], 8)
            for rig in (one, two):
                assert rig.left_over() == {}
            assert len(one.files()) == 2
            assert one.ask(new) == 1
            one.settle()
            written = time.monotonic()
            wait_until("the other knows of it", lambda: two.status()["tiers"][0]["entries"] == 3)
            assert time.monotonic() - written < SOON_S
            assert two.ask(new) == 0
        assert one.ask(stored, both, new, later) == 1
        assert one.left_over() == {}
        assert len(one.files()) == 4


def test_data_parallel_engines_share_a_folder_and_no_arena(tmp_path: Path, reference: Reference) -> None:
    """They share an `engine_id`, but each has its own name, store process and arena."""
    log, disk = tmp_path / "encodes", tmp_path / "disk"
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.data_parallel", str(disk)],
        cwd=ROOT,
        env=engine_environment(Layout.MULTI_PROCESS, encode_log=log),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    expected = reference.outputs(data_parallel.MODEL, data_parallel.PROMPTS, data_parallel.MAX_TOKENS)
    for output, right in zip(found["outputs"], [*expected, *expected], strict=True):
        assert Output(*output).equals(right)
    one, two = found["engines"]
    assert {one["engine"].rpartition("/")[2], two["engine"].rpartition("/")[2]} == {"0", "1"}
    assert one["namespace"] == two["namespace"]
    assert one["pid"] != two["pid"]
    endpoints = {engine["engine"].rpartition("/")[2]: engine["events"]["endpoint"] for engine in (one, two)}
    assert endpoints["1"] == f"{endpoints['0']}_dp1"
    (arena,), (other,) = found["arenas"]
    assert arena != other
    encoded = Counter(read_encodes(log))
    assert len(encoded) == 2
    assert set(encoded.values()) <= {1, 2}, "once by each, or the later one finds what the other has stored"
    wait_until("both images are on disk", lambda: len(list(disk.rglob("*.safetensors"))) == 2)
