# SPDX-License-Identifier: Apache-2.0
"""Events within a scheduling pass, in an engine with one process, where each step follows its pass directly."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.testbed.core import stopped
from benchmarks.testbed.engine_env import Layout
from benchmarks.testbed.media import Prompt
from tests.engine.drive import Request
from tests.engine.rig import Reference, Rig
from tests.engine.test_layouts import KEYS, LARGE, MODEL, TIGHT, images

OLDER = Request(Prompt(text="c" * 24), max_tokens=30)
"""Needs two of the 11 blocks until its end."""

URGENT = Request(Prompt(text="b" * 49), arrives=2, max_tokens=20)
"""Needs its third block, which is not free, in the step in which the victim's last image is due."""


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, reference: Reference) -> Iterator[Rig]:
    with Rig(MODEL, Layout.ONE_PROCESS, tmp_path_factory.mktemp("engine"), reference, keys=KEYS, **TIGHT) as rig:
        rig.scanned()
        yield rig


@pytest.fixture(autouse=True)
def nothing_is_left_over(rig: Rig) -> Iterator[None]:
    yield
    assert rig.left_over() == {}


def victim(*seeds: int, aborted: int | None = None) -> Request:
    """277 tokens, nine blocks; the last image begins in the 13th chunk."""
    return Request(images(*seeds, size=LARGE), priority=10, arrives=1, max_tokens=2, aborted=aborted)


def test_preempted_in_the_step_that_loads(rig: Rig) -> None:
    """The load is sent although its request is not: from then on vLLM counts the item as cached."""
    assert rig.ask(images(1, 2, size=LARGE), images(3, 4, size=LARGE)) == 4
    rig.settle()
    rig.forget()
    before = rig.counts()
    played = rig.play(OLDER, victim(1, 2, 3, 4), URGENT)
    assert played.preemptions == 1
    assert not played.encodes
    assert rig.counts()["loads_cpu"] == before.get("loads_cpu", 0) + 4


def test_preempted_in_the_step_that_encodes(rig: Rig) -> None:
    """No encode follows the allocation, so the place is freed in the same pass. vLLM 0.32 itself counts the item as
    cached and dies when the request resumes ("Encoder cache miss", even without a connector): here it is aborted.
    """
    played = rig.play(OLDER, victim(11, 12, 13, 14, aborted=20), URGENT)
    assert [ending.reason for ending in played.endings] == ["length", "abort", "length"]
    assert rig.encodes(played.encodes) == 3
    rig.forget()
    assert rig.ask(images(14, size=LARGE)) == 1
    rig.settle()
    rig.forget()
    assert rig.ask(images(14, 12, size=LARGE)) == 0


def test_a_zero_token_pass_between_reservation_and_copy(rig: Rig) -> None:
    """15 tokens: one chunk. vLLM 0.30 also splits the prompt of a single request into chunks, and a pass amid a longer
    prompt would schedule its next chunk."""
    new = Request(images(20, size=(64, 64), text="h"), max_tokens=1)
    saves = rig.counts()["saves"]
    assert rig.encodes(rig.play(new, idle_pass_amid=True).encodes) == 1
    assert rig.counts()["saves"] == saves + 1
    rig.forget()
    stored = rig.play(new, idle_pass_amid=True)
    assert not stored.encodes


def test_a_save_that_found_no_room_is_done_later(tmp_path: Path, reference: Reference) -> None:
    """An arena for two entries, held by a stopped store process: the third is not saved, but it is hot, and vLLM's own
    cache avoids its encode until the engine is restarted.
    """
    keys = {**KEYS, "max_local_cpu_size": 0.000105}
    with Rig(MODEL, Layout.ONE_PROCESS, tmp_path, reference, keys=keys) as rig:
        rig.scanned()
        with stopped(rig.status()["pid"]):
            assert rig.ask(*(images(number) for number in range(3)), one_by_one=True) == 3
        counts = rig.counts()
        assert counts["saves_dropped"] > 0
        assert rig.ask(images(2)) == 0
        rig.settle()
        assert rig.left_over() == {}
        rig.restart()
        assert rig.ask(*(images(number) for number in range(3)), one_by_one=True) == 0
