# SPDX-License-Identifier: Apache-2.0
"""The guard behind "no I/O and no digest in the engine's processes" catches each, however it was imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.testbed.engine_env import engine_environment
from benchmarks.testbed.models import ROOT

LOAD_PLUGINS = "from importlib.metadata import entry_points as e; [p.load()() for p in e(name='ec_guard_tiers')]"
CALLS = {
    "seal": "from lmcache_ec.entry import seal as forbidden",
    "verify": "from lmcache_ec.entry import verify as forbidden",
    "DiskTier.get_into": "from lmcache_ec.tiers.disk import DiskTier; forbidden = DiskTier.get_into",
    "DiskTier.put": "from lmcache_ec.tiers.disk import DiskTier; forbidden = DiskTier.put",
}


@pytest.mark.parametrize("imported_first", [True, False], ids=["imported before", "imported after"])
@pytest.mark.parametrize("name", CALLS)
def test_a_forbidden_call_raises_and_is_written_down(tmp_path: Path, name: str, imported_first: bool) -> None:
    log = tmp_path / "guard"
    order = [CALLS[name], LOAD_PLUGINS] if imported_first else [LOAD_PLUGINS, CALLS[name]]
    child = [sys.executable, "-c", "\n".join([*order, "forbidden()"])]
    done = subprocess.run(child, cwd=ROOT, env=engine_environment(guard_log=log), capture_output=True, text=True)
    assert f"RuntimeError: {name} was called in an engine process" in done.stderr
    assert [line.split()[1] for line in log.read_text().splitlines()] == [name]
