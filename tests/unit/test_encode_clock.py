# SPDX-License-Identifier: Apache-2.0
"""The encoder's time in a step, without that of any other."""

import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks.testbed.stand_ins import Encoder, Served, digest, request
from lmcache_ec.adapters.vllm.encode_clock import EncodeClock

SLOW_S = 0.05


class Event:
    """A device's event: its time is known once its work is done."""

    made: ClassVar[list["Event"]] = []

    def __init__(self) -> None:
        self.recorded = self.waited_for = False
        Event.made.append(self)

    def record(self) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        self.waited_for = True

    def elapsed_time(self, end: "Event") -> float:
        assert self.recorded
        assert end.waited_for, "its time is not there before"
        return 1500.0


def test_a_device_is_asked_when_the_step_s_copies_are_over_and_not_in_the_forward_pass() -> None:
    Event.made = []
    clock = EncodeClock(Event)
    clock.begin()
    clock.end()
    clock.end()
    reading = clock.take()
    assert len(Event.made) == 2, "the first output ends it"
    assert not any(event.waited_for for event in Event.made)
    assert reading() == 1.5
    assert clock.take()() == 0.0


def test_outputs_that_nobody_saves_are_timed_to_the_step_s_end() -> None:
    """As on a consumer with the V2 runner, which passes no outputs to the connector."""
    clock = EncodeClock()
    clock.begin()
    time.sleep(SLOW_S)
    assert clock.take()() >= SLOW_S


def test_a_step_without_encodes_has_no_time() -> None:
    clock = EncodeClock()
    clock.end()
    assert clock.take()() == 0.0


@pytest.fixture
def served(tmp_path: Path) -> Any:
    served = Served(tmp_path, keys={"load_policy": "auto"}).ready()
    served.runner.encode_with(Encoder(SLOW_S))
    yield served
    served.close()


def test_the_scheduler_side_learns_what_each_item_costs(served: Served) -> None:
    """Two items in a step that takes twice as long."""
    for number in range(3):
        asking = request(f"asking {number}", *(digest(f"{number} {one}") for one in range(2)))
        served.schedule(asking)
        served.side.request_finished(asking)
    served.settle()
    assert served.cache.policy.encode_s([("image", 4)]) == pytest.approx(SLOW_S)
    assert served.side.snapshot()["policy_encode_us_image"] == SLOW_S * 1e6


def test_a_step_that_encodes_more_than_was_planned_teaches_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load has failed, so vLLM encodes that item, too."""
    served.store(stored := digest("stored"))
    learned = served.cache.policy._encodes["image"].figures
    monkeypatch.setattr(served.runner.worker._copier, "load", lambda payload: 1 / 0)
    asking = request("asking", stored, digest("new"))
    assert served.schedule(asking) == "load encode"
    served.side.request_finished(asking)
    served.settle()
    assert served.cache.policy._encodes["image"].figures == learned
