# SPDX-License-Identifier: Apache-2.0
"""redis-py's connections with three additions: where a payload is received, a deadline for a call, and a fast path.

Where: the reply to a command that was sent with `into` is received straight into that buffer (`PayloadParser`, RESP2);
its length is the answer. Everything else that a connection does, from authentication to redirects, is redis-py's.

Deadline: `until` sets one deadline for all requests of this thread to any connection. A socket's own timeout starts
again with every byte, and redis-py connects, retries and requests the topology inside one command.

Fast path: `ask` and `answer`, on a connection that is `ready`, do what `send_command` and `read_response` do in a
third of the steps. After an entry of megabytes the interpreter's own data is in no cache, and each step counts.
"""

import select
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from redis._parsers import BaseParser, Encoder
from redis.connection import AbstractConnection, Connection, PythonRespSerializer, SSLConnection
from redis.connection import UnixDomainSocketConnection as UnixConnection
from redis.exceptions import AuthenticationError, InvalidResponse, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection

from lmcache_ec.tiers.redis_commands import Command, packed

CLOSED = "the server closed the connection"
_BUFFER_BYTES = 64 << 10
_HEAD_BYTES = 512  # read at once if a payload follows: payload that comes with them is copied once more
_CHUNK_BYTES = 256 << 10
_DISCARD_BYTES = 4 << 20  # up to here, reading unwanted data is cheaper than reconnecting
_TEXT_BYTES = 16 << 20  # limit for a reply received into no buffer: a page of a listing, the topology
_ELEMENT_BYTES = 64  # the least that an element of a list counts for
_NESTED = 8
_SHORTEST_S = 0.001  # 0 would mean non-blocking, which a socket reports differently


class _Deadline(threading.local):
    ends_at = float("inf")


this_thread = _Deadline()
"""`ends_at`: the deadline for what a thread is doing (monotonic seconds)."""


class until:
    """This thread's requests to connections inside the `with` end at `moment` (monotonic seconds) at the latest."""

    __slots__ = ("_moment", "_outer")

    def __init__(self, moment: float) -> None:
        self._moment = moment

    def __enter__(self) -> None:
        self._outer = this_thread.ends_at
        this_thread.ends_at = min(self._moment, self._outer)

    def __exit__(self, *_: object) -> None:
        this_thread.ends_at = self._outer


def left(longest_s: float) -> float:
    """How long this thread may wait for the next byte, at most `longest_s`. TimeoutError if no time is left."""
    seconds = min(longest_s, this_thread.ends_at - time.monotonic())
    if seconds <= 0:
        raise TimeoutError("this call has used up its time")
    return seconds


class PayloadParser(BaseParser):
    """Reads RESP2 replies from one connection's socket; used by the thread that holds the connection.

    A reply that is not read to its end leaves the stream at an unknown position: after any error, and if `abandoned`
    is set, the connection has to be closed. Values are bytes, never decoded.
    """

    def __init__(self, socket_read_size: int) -> None:
        self.targets: deque[memoryview | None] = deque()
        """Where the payloads of the next replies go, in order; if none is given, or None: into new bytes."""
        self.abandoned = False
        self._sock: Any = None
        self._timeout_s = 0.0
        self._scatters = False
        self._buffer = bytearray(max(socket_read_size, _BUFFER_BYTES))
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._text_left = 0
        self._ahead = _HEAD_BYTES

    def on_connect(self, connection: Any) -> None:
        self.on_disconnect()
        self._sock = connection._sock
        self._scatters = not isinstance(self._sock, ssl.SSLSocket)
        self._timeout_s = connection._socket_timeout

    def on_disconnect(self) -> None:
        self._sock = None
        self._start = self._end = 0
        self.targets.clear()
        self.abandoned = False

    @property
    def holds_more(self) -> bool:
        """Whether bytes were received that belong to no reply so far."""
        return self._start < self._end

    def can_read(self, timeout: float = 0) -> bool:
        """Whether unrequested data has arrived. redis' ConnectionError if the connection has ended."""
        if self.holds_more:
            return True
        if self._sock is None:
            return False
        self._sock.settimeout(timeout)
        try:
            self._start, self._end = 0, self._sock.recv_into(self._view)
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        if self._end == 0:
            raise RedisConnectionError(CLOSED)
        return True

    def read_response(self, disable_decoding: bool = False, **_: object) -> Any:
        self._text_left = _TEXT_BYTES
        target = self.targets.popleft() if self.targets else None
        self._ahead = len(self._buffer)
        if target is not None:
            self._ahead = _HEAD_BYTES
            if self._start == self._end:
                self._more()
            expected = b"$%d\r\n" % len(target)
            if self._buffer.startswith(expected, self._start, self._end):  # nearly always
                self._start += len(expected)
                return self._fill(target)
        return self._reply(target, 0)

    def _reply(self, target: memoryview | None, depth: int) -> Any:
        if self._start == self._end:
            self._more()
        kind = bytes(self._view[self._start : self._start + 1])
        if kind not in (b"-", b"$", b"+", b":", b"*"):  # at once: a line from what is not Redis may never end
            raise InvalidResponse(f"no reply of Redis begins with {kind!r}")
        rest = self._line()[1:]
        if kind == b"-":
            error = self.parse_error(rest.decode(errors="replace"))
            if isinstance(error, RedisConnectionError):
                raise error
            return error
        if kind == b"$":
            return self._bulk(_number(rest), target)
        if target is None and kind == b"+":
            return rest
        if target is None and kind == b":":
            return _number(rest)
        if target is None and kind == b"*" and depth < _NESTED:
            count = _number(rest)
            self._take_text(max(0, count) * _ELEMENT_BYTES)
            return None if count < 0 else [self._reply(None, depth + 1) for _ in range(count)]
        raise InvalidResponse(f"a reply of another kind was expected, this one begins with {kind!r}")

    def _bulk(self, length: int, target: memoryview | None) -> int | bytes | None:
        if length == -1:
            return None
        if target is None:
            if length < 0:
                raise InvalidResponse(f"a value of {length} bytes")
            self._take_text(length)
            text = bytearray(length)
            self._fill(memoryview(text))
            return bytes(text)
        if length < 0:
            raise InvalidResponse(f"a value of {length} bytes")
        if length <= len(target):
            return self._fill(target[:length])
        if length <= _DISCARD_BYTES:
            return self._fill(memoryview(bytearray(length)))
        self.abandoned = True
        return length

    def _take_text(self, length: int) -> None:
        """InvalidResponse if a reply has more text than any request can return, in one value or in many."""
        self._text_left -= length
        if self._text_left < 0:
            raise InvalidResponse(f"a value of {length} bytes where text was expected")

    def _line(self) -> bytes:
        """The next line, without its line end."""
        while (end := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            self._more()
        line = bytes(self._view[self._start : end])
        self._start = end + 2
        return line

    def _more(self) -> None:
        """Wait for more of a reply to arrive in the buffer."""
        unread = self._buffer[self._start : self._end]
        self._buffer[: len(unread)] = unread
        self._start, self._end = 0, len(unread)
        if self._end == len(self._buffer):
            raise InvalidResponse(f"a line of more than {self._end} bytes")
        self._end += self._wait(self._view[self._end : self._end + self._ahead])

    def _fill(self, target: memoryview) -> int:
        """Receive a payload and the line end after it. Its length."""
        have = min(len(target), self._end - self._start)
        target[:have] = self._view[self._start : self._start + have]
        self._start += have
        while have < len(target):
            have += self._wait(target[have:], self._view[:_HEAD_BYTES])
        if have > len(target):  # what came after it
            self._start, self._end = 0, have - len(target)
        if self._line():
            raise InvalidResponse(f"a value of more than the {len(target)} bytes that were announced")
        return len(target)

    def _wait(self, *views: memoryview) -> int:
        """Receive into these in turn, or only into the first; the number of bytes."""
        if self._sock is None:
            raise RedisConnectionError("the connection is closed")
        self._sock.settimeout(left(self._timeout_s))
        count: int = self._sock.recvmsg_into(views)[0] if self._scatters else self._sock.recv_into(views[0])
        if count == 0:
            raise RedisConnectionError(CLOSED)  # of no class of its own: a Cluster's client retries by the exact class
        return count


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidResponse("a number was expected") from None


class PayloadConnection(AbstractConnection):
    """What every kind of connection here adds to redis-py's; its pool ensures that one thread uses it at a time."""

    _parser: PayloadParser
    _arrivals: select.poll

    def __init__(self, **settings: Any) -> None:
        # The packer is set because with hiredis installed redis-py would choose one that copies each payload.
        packer = PythonRespSerializer(_BUFFER_BYTES, Encoder("utf-8", "strict", False).encode)
        super().__init__(parser_class=PayloadParser, command_packer=packer, **settings)

    @property
    def socket_timeout(self) -> float:
        """The longest silence, in seconds, and never past the deadline of the current call."""
        return self._capped(self._socket_timeout)

    @socket_timeout.setter
    def socket_timeout(self, seconds: float) -> None:
        self._socket_timeout = seconds

    @property
    def socket_connect_timeout(self) -> float:
        return self._capped(self._socket_connect_timeout)

    @socket_connect_timeout.setter
    def socket_connect_timeout(self, seconds: float) -> None:
        self._socket_connect_timeout = seconds

    @staticmethod
    def _capped(seconds: float) -> float:
        # Never an error: pools read this while they make a connection, and would lose count of them.
        return max(_SHORTEST_S, min(seconds, this_thread.ends_at - time.monotonic()))

    def on_connect_check_health(self, *args: Any, **options: Any) -> None:
        """As redis-py's; notifies the source of refused credentials, and no error repeats them.

        A server that does not know AUTH may echo what it was sent.
        """
        source = self.credential_provider
        self._arrivals = select.poll()
        self._arrivals.register(self._sock, select.POLLIN)
        try:
            super().on_connect_check_health(*args, **options)
        except RedisError as error:
            if source is None:
                raise
            if isinstance(error, AuthenticationError):
                source.refused()
            raise type(error)(source.hidden(str(error))) from None

    @property
    def ready(self) -> bool:
        """Whether a command can be sent at once: connected, not due for reconnection, and no unrequested data."""
        if self._sock is None or self.should_reconnect() or self._parser.holds_more:
            return False
        return not self._arrivals.poll(0)

    def send_command(self, *args: Any, into: memoryview | None = None, **options: Any) -> None:
        """As redis-py's; with `into` the reply is the length of the payload, which is received there if it fits."""
        super().send_command(*args, **options)
        if into is not None:
            self._parser.targets.append(into)

    def ask(self, commands: Sequence[Command]) -> None:
        """Send all of these at once, on a connection that is `ready`. Like `answer`, for callers that close it after
        any error; does not raise redis-py's own errors."""
        self._parser.targets.extend([command.into for command in commands])
        for piece in packed(commands):
            unsent = memoryview(piece)
            while unsent:
                self._sock.settimeout(left(self._socket_timeout))
                unsent = unsent[self._sock.send(unsent) :]

    def answer(self) -> Any:
        """The next reply, an error if that is what the server replied."""
        reply = self._parser.read_response()
        if self._parser.abandoned:
            self.disconnect()
        return reply

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        super().send_packed_command(self._paced(command), check_health)

    def _paced(self, pieces: Iterable[Any]) -> Iterator[memoryview]:
        """Large values in pieces, each with the time left at that point: TLS applies a timeout to each record."""
        for piece in pieces:
            view = memoryview(piece)
            for start in range(0, len(view), _CHUNK_BYTES):
                self._sock.settimeout(left(self._socket_timeout))
                yield view[start : start + _CHUNK_BYTES]

    def read_response(self, *args: Any, **options: Any) -> Any:
        options["disconnect_on_error"] = True  # or a Sentinel's connections would be kept, in the middle of a reply
        reply = super().read_response(*args, **options)
        if self._parser.abandoned:
            self.disconnect()
        return reply


class PlainConnection(PayloadConnection, Connection):
    """TCP."""


class TlsConnection(PayloadConnection, SSLConnection):
    """TLS over TCP."""


class SocketFileConnection(PayloadConnection, UnixConnection):
    """A Unix socket."""


class SentinelPlainConnection(PayloadConnection, SentinelManagedConnection):
    """TCP to the master that the Sentinels name."""


class SentinelTlsConnection(PayloadConnection, SentinelManagedSSLConnection):
    """TLS to the master that the Sentinels name."""
