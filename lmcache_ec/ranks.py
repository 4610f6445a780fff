# SPDX-License-Identifier: Apache-2.0
"""The engine's ranks as the scheduler side knows them: the links to them, orders to them and their reports."""

from __future__ import annotations

import socket
from collections.abc import Callable

from lmcache_ec.book import Book
from lmcache_ec.channel import Attach, Attached, Report, SegmentReady, Staged, StoreLink, WeightsReport
from lmcache_ec.complaints import Complaints
from lmcache_ec.copies import CopyTimes
from lmcache_ec.growth import Growth
from lmcache_ec.host_memory import Growing
from lmcache_ec.link import Link, LinkClosed, rank_address, same_user
from lmcache_ec.load_policy import LoadPolicy
from lmcache_ec.staging import Staging
from lmcache_ec.supervisor import Supervisor
from lmcache_ec.weights import Weights


class Ranks:
    """All ranks of one engine. Runs on the scheduler side's one thread; no call waits.

    Each report is passed to the part it concerns: book, policy, weights; growth, staging and copies belong to this
    class. If a rank is lost nothing can be promised: `give_up` is called with the reason, maybe more than once.
    """

    def __init__(
        self,
        number: int,
        book: Book,
        policy: LoadPolicy,
        weights: Weights,
        store: Supervisor,
        complaints: Complaints,
        give_up: Callable[[str], None],
    ) -> None:
        self.links: list[Link] = []
        """By rank; empty before `connect` and after `close`."""
        self.growth = Growth(book, number, store.send, complaints, Growing())
        self.staging = Staging(self.links, complaints)
        self.copies = CopyTimes()
        self._number = number
        self._book = book
        self._policy = policy
        self._weights = weights
        self._store = store
        self._give_up = give_up

    def connect(self, engine: str, arena_id: str, arena_fd: int) -> None:
        """Connect to all ranks of the engine: they have been listening since before the scheduler side began."""
        for rank in range(self._number):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                sock.connect(rank_address(engine, rank))
                if not same_user(sock):
                    raise PermissionError("its address is held by another user")
                link = Link(sock)
                self.links.append(link)
                link.send(Attach(arena_id), [arena_fd])
            except OSError as error:
                sock.close()
                self._give_up(f"rank {rank} cannot be reached on this host ({error})")
                return

    def drain(self) -> None:
        """Process the ranks' reports."""
        for rank, link in enumerate(self.links):
            try:
                while (received := link.receive()) is not None:
                    self._take(rank, received[0])
            except LinkClosed:
                self._give_up("the link to a rank has ended")

    def advance(self) -> None:
        """Send the ranks what is due, as far as the links have room."""
        self.introduce_saver()
        self.growth.advance(self.links)
        self.staging.advance()

    def introduce_saver(self) -> None:
        """Hand the saving rank its end of the store process's link, now or when its own link has room."""
        socket_ = self._store.process.saver_socket
        if socket_.fileno() < 0 or not self.links:
            return
        try:
            if self.links[0].send(StoreLink(self._store.number), [socket_.fileno()]):
                socket_.close()
        except LinkClosed:
            pass  # noticed and handled by the next drain

    def _take(self, rank: int, message: object) -> None:
        match message:
            case Report(step=step, outcomes=outcomes, encode_s=encode_s):
                self._book.report(rank, step, outcomes, self._store.alive())
                if rank == 0:  # all ranks do the same work, and this one also saves
                    self.copies.add(message.load_ns, message.save_ns)
                    self._policy.encoded(step, encode_s)
            case Attached(registers=registers):
                self.growth.rank_attached(rank, registers)
            case WeightsReport(calls=calls, digest=digest):
                self._weights.report(rank, calls, digest)
            case SegmentReady():
                self.growth.answered(rank, message)
            case Staged():
                self.staging.answered(rank, message)

    def close(self) -> None:
        """Close the links. Each rank notices that the engine has ended, and goes on by itself (see `rank.py`)."""
        for link in self.links:
            link.close()
        self.links.clear()
