# SPDX-License-Identifier: Apache-2.0
"""Two engines on one host share a disk folder, and nothing else."""

from pathlib import Path

from tests.engine.rig import Reference, Rig
from tests.engine_env import Layout
from tests.engine_runner import Generate
from tests.media import Prompt

MODEL = "gemma3"


def test_two_engines_share_a_folder_and_no_arena(tmp_path: Path, reference: Reference) -> None:
    """The second loads what the first has stored; what both encode at once is one entry; one ends, the other serves."""
    disk = tmp_path / "disk"
    stored, both, later = (Prompt(images=(number,)) for number in range(3))
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
        assert one.ask(stored, both, later) == 1
        assert one.left_over() == {}
        assert len(one.files()) == 3
