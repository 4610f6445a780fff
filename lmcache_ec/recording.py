# SPDX-License-Identifier: Apache-2.0
"""Passes on what requests of this engine need to a recorder of the same user, with all names hashed."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable
from hashlib import blake2b

from lmcache_ec.channel import Accessed, Follow, Notice, Record
from lmcache_ec.link import Link, LinkClosed, record_address, same_user

_SALT_BYTES = range(16, 65)
_NAME_BYTES = 8
_BUSY = Notice("recording", "one engine is missing: another command is already recording it")


class Recording:
    """Listens for one recorder at a time; while it is connected, the scheduler side reports what requests need. Runs on
    the store process's main thread and never waits: what a recorder does not read in time is lost, and counted."""

    def __init__(self, selector: selectors.BaseSelector, post: Callable[[Record], None]) -> None:
        """`selector` calls the function registered with a socket once that is readable."""
        self._selector = selector
        self._post = post
        self._link: Link | None = None
        self._salt = b""
        self._lost = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(record_address(os.getpid()))
        self._socket.listen(4)
        self._socket.setblocking(False)
        selector.register(self._socket, selectors.EVENT_READ, self._accept)

    def pass_on(self, batch: Accessed) -> None:
        if self._link is None or not self._salt:
            return
        accesses = [(at, self._digest(name), size, encode_s) for at, name, size, encode_s in batch.accesses]
        try:
            if self._link.send(Accessed(accesses, batch.guessed, batch.lost + self._lost)):
                self._lost = 0
            else:
                self._lost += batch.lost + len(accesses)
        except LinkClosed:
            self._end()

    def close(self) -> None:
        """Stop: the engine has ended, so there is nothing more to record."""
        self._end()
        if self._socket.fileno() >= 0:
            self._selector.unregister(self._socket)
            self._socket.close()

    def _digest(self, name: str) -> str:
        return blake2b(name.encode(), digest_size=_NAME_BYTES, key=self._salt).hexdigest()

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return  # the peer has closed the connection
        if not same_user(connection):
            connection.close()
            return
        link = Link(connection)
        if self._link is not None:
            _refuse(link)
            return
        self._link = link
        self._selector.register(link, selectors.EVENT_READ, self._hear)

    def _hear(self) -> None:
        try:
            while self._link is not None and (received := self._link.receive()) is not None:
                message, descriptors = received
                for descriptor in descriptors:
                    os.close(descriptor)
                if isinstance(message, Follow) and len(message.salt) in _SALT_BYTES:
                    self._salt = message.salt
                    self._post(Record(True))
                else:
                    self._end()
        except LinkClosed:
            self._end()

    def _end(self) -> None:
        """The recorder has disconnected, or sent something that is not a request."""
        link, self._link = self._link, None
        if link is not None:
            self._selector.unregister(link)
            link.close()
            self._salt, self._lost = b"", 0
            self._post(Record(False))


def _refuse(link: Link) -> None:
    try:
        link.send(_BUSY)
    except LinkClosed:
        pass
    link.close()
