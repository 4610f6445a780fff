# SPDX-License-Identifier: Apache-2.0
"""A busy machine is no slow store process: these tests ask for what must come, not for how fast."""

import pytest


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_ec.supervisor._SLOW_PONG_S", 5.0)
