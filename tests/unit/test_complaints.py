# SPDX-License-Identifier: Apache-2.0
"""What a log shows about recurring faults, and about their end."""

import logging
import time

import pytest

from lmcache_ec.complaints import Complaints


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage().removeprefix("encoder cache: ") for record in caplog.records]
    caplog.clear()
    return found


def test_a_kind_is_logged_once_a_minute_and_another_is_not_held_up_by_it(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    complaints = Complaints(logging.getLogger("tests"))
    for number in range(100):
        complaints.warn("redis-read", f"read {number}")
        complaints.warn("disk-read", f"file {number}")
        complaints.report_withheld()
    assert lines(caplog) == ["read 0", "file 0"]
    clock.now += 61
    complaints.warn("redis-read", "read again")
    assert lines(caplog) == ["read again (99 more lines of this kind since the last)"]
    complaints.warn("disk-read", "file again")
    lines(caplog)
    complaints.warn("disk-read", "withheld")
    clock.now += 61
    complaints.warn("disk-read", "file at last")
    assert lines(caplog) == ["file at last (1 more line of this kind since the last)"]


def test_the_log_ends_on_the_last_state_even_if_its_line_was_withheld(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """A remote becomes unreachable and returns three times within a minute: the log ends with its return."""
    complaints = Complaints(logging.getLogger("tests"))
    for number in range(3):
        complaints.warn("redis-read", f"gone {number}")
        complaints.warn("redis-back", f"back {number}")
        clock.now += 5
    assert lines(caplog) == ["gone 0", "back 0"]
    complaints.report_withheld()
    assert lines(caplog) == []
    clock.now += 60
    complaints.report_withheld()
    assert lines(caplog) == ["back 2 (3 more lines of this kind since the last)"]
    complaints.report_withheld()
    assert lines(caplog) == []
