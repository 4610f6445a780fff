# SPDX-License-Identifier: Apache-2.0
"""Links, which carry the messages of `channel.py` between processes, and the socket addresses they use.

A link is one end of a connected AF_UNIX sequenced-packet socket: a message is sent whole or not at all, in order, and
a send never waits. File descriptors are sent along with a message.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import secrets
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

_libc = ctypes.PyDLL(None, use_errno=True)
"""Called with the GIL held, as these calls do not wait. A call that releases the GIL during a scheduling pass, as those
of `socket` do, lets vLLM's output-serializing thread run for the previous pass, and the workers wait for both."""
_LATER = (errno.EAGAIN, errno.EINTR)
_SENDING = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_RECEIVING = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
"""Computed once: otherwise each message would construct an `enum.IntFlag`."""


class _Vector(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Header(ctypes.Structure):
    """struct msghdr."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("vectors", ctypes.POINTER(_Vector)),
        ("count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_send, _recvmsg = _libc.send, _libc.recvmsg
_send.restype = _recvmsg.restype = ctypes.c_ssize_t
_send.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]
_recvmsg.argtypes = [ctypes.c_int, ctypes.POINTER(_Header), ctypes.c_int]

_CONTROL = struct.Struct("@Nii")
"""struct cmsghdr: length with the descriptors behind it, level, type."""


class _Inbox:
    """A link's receive buffer."""

    def __init__(self) -> None:
        self.data = bytearray(_MESSAGE_BYTES)
        self._control = ctypes.create_string_buffer(socket.CMSG_SPACE(_FDS * 4))
        memory = (ctypes.c_char * len(self.data)).from_buffer(self.data)
        self._vector = _Vector(ctypes.addressof(memory), len(self.data))
        self._header = _Header(None, 0, ctypes.pointer(self._vector), 1, ctypes.addressof(self._control), 0, 0)
        self._reference = ctypes.byref(self._header)

    def receive(self, fileno: int) -> int:
        """Bytes received; negative on an error, whose number `ctypes.get_errno` returns."""
        self._header.control_length = len(self._control)
        return int(_recvmsg(fileno, self._reference, _RECEIVING))

    def fds(self) -> list[int]:
        """The descriptors that came with the last message received."""
        if not self._header.control_length:
            return []
        length, level, kind = _CONTROL.unpack_from(self._control)
        if (level, kind) != (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            return []
        return list(struct.unpack_from(f"{(length - _CONTROL.size) // 4}i", self._control, _CONTROL.size))


class LinkClosed(ConnectionError):
    """The other end has closed the link, or sent something that is not a valid message."""


class Link:
    """One end of a link: the scheduler's thread, the link thread of a rank and the store process have one each. Not
    thread-safe, except that one thread may send while another receives."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._socket = sock
        self._inbox = _Inbox()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: AnyMessage, fds: Sequence[int] = ()) -> bool:
        """Send now or not at all: False when the link is full. Raises LinkClosed when the other end is closed."""
        data = _encoder.encode(message)
        if len(data) > _MESSAGE_BYTES:
            raise ValueError(f"a message of {len(data)} bytes does not fit a link ({_MESSAGE_BYTES} bytes)")
        if fds:
            return self._send_with(data, fds)
        if _send(self.fileno(), data, len(data), _SENDING) < 0:
            if (number := ctypes.get_errno()) not in _LATER:
                raise LinkClosed(os.strerror(number))
            return False
        return True

    def _send_with(self, data: bytes, fds: Sequence[int]) -> bool:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))]
        try:
            self._socket.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise LinkClosed(str(error)) from None
        return True

    def receive(self) -> tuple[AnyMessage, list[int]] | None:
        """The next message and its descriptors, now owned by the caller; None if none waits. Raises LinkClosed."""
        size = self._inbox.receive(self.fileno())
        if size < 0:
            number = ctypes.get_errno()
            if number in _LATER:
                return None
            if number == errno.ECONNRESET:
                return self.receive()  # the peer closed with unread messages: reported once, before what it had sent
            raise LinkClosed(os.strerror(number))
        fds = self._inbox.fds()
        if not size:
            raise LinkClosed("the other end is closed")
        try:
            return _decoder.decode(memoryview(self._inbox.data)[:size]), fds
        except msgspec.DecodeError as error:
            for fd in fds:
                os.close(fd)
            raise LinkClosed(f"not a message: {error}") from None

    def finish(self) -> None:
        """Shut down sending: the other end sees the link closed once it has read everything sent."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()


def pair() -> tuple[Link, socket.socket]:
    """A new link: this process's end, and the socket of the other end, to be handed over."""
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
    """Like `status_address`, for the socket at which the store process passes on what requests need."""
    return f"\0{RECORD_PREFIX}{pid}-{secrets.token_hex(4)}"


def same_user(sock: socket.socket) -> bool:
    """Whether the peer of a connected AF_UNIX socket runs as this process's user."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.geteuid())
