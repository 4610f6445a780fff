# SPDX-License-Identifier: Apache-2.0
"""Jobs over many entries: all are done, progress is shown, and Ctrl-C loses no job that has begun."""

import io
import threading
import time
from collections.abc import Iterator

import pytest

from benchmarks.testbed.waiting import wait_until
from lmcache_ec.cli.progress import Progress, results


def _nothing() -> None:
    pass


@pytest.mark.parametrize("threads", [1, 8])
def test_every_item_is_done_once_however_few_there_are(threads: int) -> None:
    for number in (0, 1, 500):
        assert sorted(results(iter(range(number)), lambda item: item * 2, threads, _nothing)) == [
            2 * item for item in range(number)
        ]


def test_if_the_caller_ends_early_no_more_jobs_begin_and_those_begun_are_finished() -> None:
    begun, finished, taken = [], [], []

    def job(item: int) -> int:
        begun.append(item)
        time.sleep(0.01)
        finished.append(item)
        return item

    def endless() -> Iterator[int]:
        for item in range(1_000_000):
            taken.append(item)
            yield item

    def interrupted() -> None:
        if len(finished) > 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        for _ in results(endless(), job, 4, interrupted):
            pass
    assert sorted(begun) == sorted(finished)
    assert len(taken) < 100  # it does not run ahead
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("(work)") and thread.is_alive()]


def test_an_error_of_the_listing_or_of_a_job_reaches_the_caller() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise OSError("the listing")

    with pytest.raises(OSError, match="the listing"):
        list(results(broken(), lambda item: item, 2, _nothing))
    with pytest.raises(ZeroDivisionError):
        list(results(iter([1, 0]), lambda item: 1 // item, 2, _nothing))


def test_progress_is_seen_while_every_job_is_stuck() -> None:
    stream, release = io.StringIO(), threading.Event()
    progress = Progress(lambda passed_s: f"after {passed_s:.1f} s", stream)

    def tick() -> None:
        progress.tick()
        if stream.getvalue():
            release.set()

    began = time.monotonic()
    assert list(results(iter([1]), lambda item: release.wait(30), 1, tick)) == [True]
    wait_until("a line was printed", lambda: stream.getvalue().startswith("after"))
    assert time.monotonic() - began < 10
