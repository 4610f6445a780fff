# SPDX-License-Identifier: Apache-2.0
"""The links that carry messages between processes."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_ec.channel import Ledger, Ping
from lmcache_ec.link import Link, LinkClosed, pair


@pytest.fixture
def running() -> Iterator[list[int]]:
    """A thread that runs whenever another releases the GIL; yields its run count. No thread is preempted."""
    ran, over, interval = [0], threading.Event(), sys.getswitchinterval()

    def run() -> None:
        while not over.is_set():
            ran[0] += 1
            time.sleep(0)  # releases the GIL, without waiting

    sys.setswitchinterval(1000.0)
    thread = threading.Thread(target=run)
    thread.start()
    yield ran
    over.set()
    thread.join()
    sys.setswitchinterval(interval)


def test_messages_come_and_leave_without_letting_another_thread_run(running: list[int]) -> None:
    """Otherwise vLLM's thread that serializes a step's outputs would run before the next step, while workers wait."""
    link, theirs = pair()
    other = Link(theirs)
    before = running[0]
    for number in range(1000):
        assert link.receive() is None
        assert other.send(Ping(number))
        assert link.receive() == (Ping(number), [])
    assert running[0] == before


def test_a_full_link_takes_no_more_and_loses_nothing() -> None:
    link, theirs = pair()
    other = Link(theirs)
    sent = 0
    while link.send(Ledger({f"{sent:08d}" * 1000: sent})):
        sent += 1
    received = [other.receive() for _ in range(sent)]
    assert received == [(Ledger({f"{number:08d}" * 1000: number}), []) for number in range(sent)]
    assert other.receive() is None
    assert link.send(Ping(1))


def test_descriptors_travel_beside_a_message_and_with_no_other(tmp_path: Path) -> None:
    link, theirs = pair()
    other = Link(theirs)
    with (tmp_path / "one").open("w") as one, (tmp_path / "two").open("w") as two:
        link.send(Ping(1), [one.fileno(), two.fileno()])
        link.send(Ping(2))
        with_fds, without = other.receive(), other.receive()
    assert with_fds is not None
    message, fds = with_fds
    assert (message, without) == (Ping(1), (Ping(2), []))
    for fd, name in zip(fds, ("one", "two"), strict=True):
        assert not os.get_inheritable(fd)
        os.write(fd, name.encode())
        os.close(fd)
        assert (tmp_path / name).read_text() == name


def test_sending_where_nobody_reads_any_more_is_an_error() -> None:
    link, theirs = pair()
    theirs.close()
    with pytest.raises(LinkClosed, match="Broken pipe"):
        link.send(Ping(1))


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
    """Whatever its descriptor's number refers to by then."""
    link, theirs = pair()
    link.close()
    _another = pair()
    with pytest.raises(LinkClosed):
        link.receive()
    theirs.close()
