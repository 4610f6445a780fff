# SPDX-License-Identifier: Apache-2.0
"""What carries the messages between processes."""

import sys
import threading
import time
from collections.abc import Iterator

import pytest

from lmcache_ec.channel import Ping
from lmcache_ec.link import Link, LinkClosed, pair


@pytest.fixture
def running() -> Iterator[list[int]]:
    """A thread that runs whenever another lets it, and how often it has run. None is interrupted."""
    ran, over, interval = [0], threading.Event(), sys.getswitchinterval()

    def run() -> None:
        while not over.is_set():
            ran[0] += 1
            time.sleep(0)

    sys.setswitchinterval(1000.0)
    thread = threading.Thread(target=run)
    thread.start()
    yield ran
    over.set()
    thread.join()
    sys.setswitchinterval(interval)


def test_to_find_that_no_message_has_come_lets_no_other_thread_run(running: list[int]) -> None:
    """vLLM's thread that serializes a step's outputs would run before the next step, while the workers wait."""
    link, _theirs = pair()
    time.sleep(0)
    before = running[0]
    assert [link.receive() for _ in range(1000)] == [None] * 1000
    assert running[0] == before


def test_a_message_and_the_end_of_a_link_are_found() -> None:
    link, theirs = pair()
    other = Link(theirs)
    assert link.receive() is None
    other.send(Ping(1))
    other.send(Ping(2))
    assert [link.receive(), link.receive(), link.receive()] == [(Ping(1), []), (Ping(2), []), None]
    other.send(Ping(3))
    other.close()
    assert link.receive() == (Ping(3), [])
    with pytest.raises(LinkClosed):
        link.receive()


def test_a_link_that_was_closed_on_this_side_is_found_closed() -> None:
    """Whatever has its descriptor's number by then."""
    link, theirs = pair()
    link.close()
    _another = pair()
    with pytest.raises(LinkClosed):
        link.receive()
    theirs.close()
