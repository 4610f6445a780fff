# SPDX-License-Identifier: Apache-2.0
"""Items with nothing to encode are on every rank's device before they are promised; see `lmcache_ec/staging.py`."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.testbed.stand_ins import PATIENCE_S, SILENT, Clock, Request, Served, digest, embedding, request
from benchmarks.testbed.waiting import wait_until
from lmcache_ec import staging
from lmcache_ec.adapters.vllm import scheduler as module
from lmcache_ec.adapters.vllm.copier import HostCopier
from lmcache_ec.channel import Stage, Staged, Unstage
from lmcache_ec.complaints import Complaints
from lmcache_ec.entry import TensorSpec
from lmcache_ec.staging import Readiness, Staging

X, Y = digest("x"), digest("y")


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served(None).ready()
    served.store(X, Y)
    yield served
    try:
        assert served.held() == {}
        assert copier(served)._staged == {}
    finally:
        served.close()


def copier(served: Served) -> HostCopier:
    found = served.runner.worker._copier
    assert isinstance(found, HostCopier)
    return found


def bare(name: str, *identifiers: str) -> Request:
    return request(name, *identifiers, data=None)


def finish(served: Served, *requests: Request) -> None:
    for each in requests:
        served.side.request_finished(each)


def unavailable(served: Served, asking: Request) -> None:
    """Run passes until the request is failed."""

    def failed() -> bool:
        assert served.vllm.offer(asking) is None
        served.step()
        return served.side.take_unavailable_requests() == {asking.request_id}

    wait_until("the request is failed", failed, PATIENCE_S)
    finish(served, asking)


def broken(*_: object) -> torch.Tensor:
    raise RuntimeError("out of memory")


def test_once_an_item_is_promised_no_copy_can_fail(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asking = bare("asking", X)
    served.stage(asking)
    for way in ("load", "load_plainly", "load_ahead"):
        monkeypatch.setattr(copier(served), way, broken)
    assert served.vllm.offer(asking) == "load"
    served.step(asking)
    assert torch.equal(served.runner.cache[X], embedding(X))
    assert served.settle()["loads_failed"] == 0
    finish(served, asking)


def test_a_device_that_cannot_load_an_item_fails_its_request_and_no_other(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(copier(served), "load_ahead", broken)
        beside = request("beside", Y)
        assert served.vllm.offer(beside) == "load"
        unavailable(served, bare("asking", X))
        finish(served, beside)
    again = bare("again", X)
    assert served.schedule(again) == "load", "the next one is asked of the device anew"
    finish(served, again)


def test_a_rank_that_does_not_answer_fails_the_request_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(None, deadline_s=3.0).ready()
    served.store(X)
    clock = Clock(module, monkeypatch)
    answering = threading.Event()

    def hanging(source: torch.Tensor) -> torch.Tensor:
        answering.wait(PATIENCE_S)
        return source.clone()

    monkeypatch.setattr(copier(served), "load_ahead", hanging)
    asking = bare("asking", X)
    for passed_s in (0.0, 2.9):
        clock.now += passed_s
        assert served.vllm.offer(asking) is None
        served.step()
        assert served.side.take_unavailable_requests() == set()
    clock.now += 0.2
    unavailable(served, asking)
    answering.set()
    later = bare("later", X)
    assert served.schedule(later) == "load"
    finish(served, later)
    assert served.held() == {}
    served.close()


def test_an_item_staged_for_a_request_that_leaves_is_released(served: Served) -> None:
    asking = bare("asking", X, Y)
    served.stage(asking)
    assert len(copier(served)._staged) == served.side.snapshot()["staged"] == 2
    finish(served, asking)
    wait_until("the rank has let go of it", lambda: not copier(served)._staged, PATIENCE_S)


def test_an_item_taken_by_a_load_is_released_if_no_step_carries_it_out(served: Served) -> None:
    asking = bare("asking", X)
    served.stage(asking)
    assert served.vllm.offer(asking) == "load"
    served.vllm.preempt(asking)
    served.runner.run(served.vllm.end_pass())
    finish(served, asking)
    served.vllm.evict(X)
    served.step()
    wait_until("the rank has let go of it", lambda: not copier(served)._staged, PATIENCE_S)


def test_requests_for_one_item_share_the_staged_copy(served: Served) -> None:
    first, second = bare("first", X), bare("second", X)
    served.stage(first)
    served.stage(second)
    assert len(copier(served)._staged) == 1
    finish(served, first)
    served.step()
    assert len(copier(served)._staged) == 1
    assert served.vllm.offer(second) == "load"
    served.step(second)
    finish(served, second)


def test_beyond_the_limit_of_staging_a_request_waits_and_is_then_loaded_within_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "STAGED_BYTES", 1)
    served = Served(None, deadline_s=3.0).ready()
    served.store(X, Y)
    clock = Clock(module, monkeypatch)
    holding, waiting = bare("holding", X), bare("waiting", Y)
    served.stage(holding)
    for passed_s in (0.0, 2.9):
        clock.now += passed_s
        assert served.vllm.offer(waiting) is None
        served.step()
    clock.now += 0.2
    assert served.schedule(waiting) == "load"
    assert served.side.snapshot()["deferred_passes"] > 0
    assert (served.side.take_unavailable_requests(), len(copier(served)._staged)) == (set(), 1)
    assert torch.equal(served.runner.cache[Y], embedding(Y))
    finish(served, holding, waiting)
    assert served.held() == {}
    served.close()


# ---- several ranks


class FullLink:
    """A link with room for `room` messages."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.taken: list[Any] = []

    def send(self, message: Any) -> bool:
        if len(self.taken) == self.room:
            return False
        self.taken.append(message)
        return True


PLACE: Any = SimpleNamespace(id=7, offset=8192, identifier=X, spec=TensorSpec(4, 8, "F32"))


def test_an_item_is_ready_once_every_rank_has_staged_it_and_fails_if_one_cannot() -> None:
    links: Any = [FullLink(9), FullLink(9)]
    over = Staging(links, Complaints(SILENT))
    assert over.ask(PLACE, "one") is Readiness.PENDING
    over.answered(0, Staged(1))
    assert over.ask(PLACE, "one") is Readiness.PENDING
    assert over.take(PLACE, "one") == 0
    over.answered(1, Staged(1))
    assert over.ask(PLACE, "one") is Readiness.READY
    assert over.take(PLACE, "another") == 0, "it asked for nothing"
    assert over.take(PLACE, "one") == 1
    assert over.ask(PLACE, "two") is Readiness.PENDING
    over.answered(0, Staged(1, "late, and of another"))
    over.answered(1, Staged(2, "out of memory"))
    assert over.ask(PLACE, "two") is Readiness.FAILED
    over.release(PLACE, "two")
    assert len(over) == 0
    assert links[0].taken == links[1].taken
    assert [type(message) for message in links[0].taken] == [Stage, Stage, Unstage]


def test_messages_that_find_a_link_full_are_sent_later_in_order() -> None:
    links: Any = [FullLink(9), FullLink(1)]
    over = Staging(links, Complaints(SILENT))
    for name in ("one", "two"):
        over.ask(PLACE, name)
        over.release(PLACE, name)
    assert [len(link.taken) for link in links] == [4, 1]
    links[1].room = 3
    over.advance()
    links[1].room = 9
    over.advance()
    assert links[1].taken == links[0].taken
