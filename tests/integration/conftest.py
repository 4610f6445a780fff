# SPDX-License-Identifier: Apache-2.0
"""Patience for a busy machine, which is not a slow store process: these tests check results, not speed."""

import pytest


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_ec.supervisor._SLOW_PONG_S", 5.0)
