# SPDX-License-Identifier: Apache-2.0
"""A busy machine is no slow store process: these tests ask for what must come, not for how fast."""

import os

import pytest

from benchmarks.testbed.engine_env import PLUGIN


@pytest.fixture(autouse=True)
def _disks_may_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store processes find PLUGIN's sitecustomize.py."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(PLUGIN), os.environ.get("PYTHONPATH")))))


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_ec.supervisor._SLOW_PONG_S", 5.0)
