# SPDX-License-Identifier: Apache-2.0
"""Links, which carry the messages of `channel.py` between processes, and the addresses at which they are made.

A link is one end of a connected AF_UNIX sequenced-packet socket: a message is sent whole or not at all, in order, and
a send never waits. File descriptors travel beside a message.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
import select
import socket
import struct
from collections.abc import Sequence

import msgspec

from lmcache_ec.channel import AnyMessage

_MESSAGE_BYTES = 128 * 1024
"""The longest message. A kernel's default send buffer (208 KiB) holds it."""

_FDS = 4

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)

_poll = ctypes.PyDLL(None).poll
"""Called with the GIL held, as it does not wait. What releases the GIL in a scheduler's pass, as every call of `socket`
does, hands it to vLLM's thread that serializes the outputs of the pass before, and the workers wait for both."""


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class LinkClosed(ConnectionError):
    """The other end has closed, or sent what is no message."""


class Link:
    """One end of a link. Not thread-safe, except that one thread may send while another receives."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._socket = sock
        self._polled = ctypes.pointer(_PollFd(sock.fileno(), select.POLLIN))
        self._buffer = bytearray(_MESSAGE_BYTES)
        self._ancillary = socket.CMSG_SPACE(_FDS * 4)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: AnyMessage, fds: Sequence[int] = ()) -> bool:
        """Send now, or not at all: False when the link is full. Raises LinkClosed when nobody is there."""
        data = _encoder.encode(message)
        if len(data) > _MESSAGE_BYTES:
            raise ValueError(f"a message of {len(data)} bytes does not fit a link ({_MESSAGE_BYTES} bytes)")
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
        try:
            self._socket.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise LinkClosed(str(error)) from None
        return True

    def receive(self) -> tuple[AnyMessage, list[int]] | None:
        """The next message and its descriptors, now owned by the caller; None if none waits. Raises LinkClosed."""
        if not _poll(self._polled, 1, 0) and self.fileno() >= 0:
            return None
        try:
            size, ancillary, _, _ = self._socket.recvmsg_into([self._buffer], self._ancillary, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return None
        except ConnectionResetError:
            return self.receive()  # it closed with messages unread: reported once, ahead of what it had sent
        except OSError as error:
            raise LinkClosed(str(error)) from None
        fds: list[int] = []
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds += struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4])
        if not size:
            raise LinkClosed("the other end is closed")
        try:
            return _decoder.decode(memoryview(self._buffer)[:size]), fds
        except msgspec.DecodeError as error:
            for fd in fds:
                os.close(fd)
            raise LinkClosed(f"not a message: {error}") from None

    def finish(self) -> None:
        """Send nothing more: the other end finds this one closed once it has read what was sent."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()


def pair() -> tuple[Link, socket.socket]:
    """A new link: this process's end, and the other end's socket to hand over."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Link(ours), theirs


def rank_address(engine: str, rank: int) -> str:
    """The abstract socket name at which a rank waits for the scheduler side. `engine` names one engine on this host."""
    return "\0lmcache-ec-" + hashlib.sha256(engine.encode()).hexdigest()[:32] + f"-{rank}"


STATUS_PREFIX = "lmcache-ec-status-"


def status_address(pid: int) -> str:
    """An abstract socket name at which the store process `pid` answers with the engine's counts.

    Made unique: processes of several containers may share a network namespace and have the same pid.
    """
    return f"\0{STATUS_PREFIX}{pid}-{secrets.token_hex(4)}"


RECORD_PREFIX = "lmcache-ec-record-"


def record_address(pid: int) -> str:
    """As `status_address`, of the socket at which the store process passes on what requests need."""
    return f"\0{RECORD_PREFIX}{pid}-{secrets.token_hex(4)}"


def same_user(sock: socket.socket) -> bool:
    """Whether the peer of a connected AF_UNIX socket runs as this process's user."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.geteuid())
