# SPDX-License-Identifier: Apache-2.0
"""The remote ends of a rank's links: the scheduler side's and the store process's."""

import os
import select
import socket
from typing import Any

from msgspec.structs import replace

from benchmarks.testbed.stand_ins import PATIENCE_S
from lmcache_ec import arena
from lmcache_ec.channel import Attach, Report, Segment, SegmentReady, StoreLink
from lmcache_ec.link import Link, rank_address


class SchedulerEnd:
    """The scheduler's end of the links to an engine's ranks, and the store's end of the saving rank's link."""

    def __init__(self, engine: str, ranks: int = 1, arena_id: str = "arena", capacity: int = 1 << 20) -> None:
        fd = arena.create(capacity)
        self.memory = arena.attach(fd)
        store_end, saver_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.store = Link(store_end)
        self.links: list[Link] = []
        for rank in range(ranks):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.connect(rank_address(engine, rank))
            self.links.append(Link(sock))
            self.links[rank].send(Attach(arena_id), [fd])
            if rank == 0:
                self.links[rank].send(StoreLink(7), [saver_end.fileno()])
            self.links[rank].send(Segment(0, capacity))
            self.take(self.links[rank])
            assert self.take(self.links[rank]) == SegmentReady(0, capacity)  # so the rank has processed everything
        saver_end.close()
        os.close(fd)

    @staticmethod
    def take(link: Link) -> Any:
        """Wait for the next message, and return it."""
        poller = select.poll()
        poller.register(link, select.POLLIN)
        assert poller.poll(PATIENCE_S * 1000), "no message"
        received = link.receive()
        assert received is not None
        return received[0]

    def report(self, rank: int = 0) -> Any:
        """The next message, without the durations of copies."""
        message = self.take(self.links[rank])
        return replace(message, load_ns=0, save_ns=0) if isinstance(message, Report) else message

    def saved(self) -> Any:
        return self.take(self.store)

    def silent(self) -> bool:
        """Whether neither a report nor a save is waiting."""
        return all(link.receive() is None for link in (*self.links, self.store))

    def close(self) -> None:
        for link in (*self.links, self.store):
            link.close()
