# SPDX-License-Identifier: Apache-2.0
"""A relay between client and server, which adds TLS for a server without it, and fails where a test requires it."""

import enum
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_PIECE = 64 << 10


class Then(enum.Enum):
    """What happens to a connection once the allowed response bytes are used up."""

    CUT = "both ends are closed"
    SILENCE = "nothing comes any more, and nothing is closed"


class Relay:
    """Forwards bytes to a port of 127.0.0.1, on its own threads."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.target = port
        self.turns = 0
        """Round trips: how often a client began to send after its server had sent."""
        self.delay_s = 0.0
        """Delay before anything is forwarded to the server."""
        self.passes_on = threading.Event()
        """Nothing is forwarded as long as it is not set."""
        self.passes_on.set()
        self._tls = tls
        self._allowed: int | None = None
        self._then = Then.CUT
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def allow(self, answer_bytes: int, then: Then = Then.CUT) -> None:
        """From now on all connections together may carry `answer_bytes` of responses; then `then` happens to one."""
        with self._lock:
            self._allowed, self._then = answer_bytes, then

    def close(self) -> None:
        self._listener.close()
        for one in self._open:
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            if self._tls:
                client = self._tls.wrap_socket(client, server_side=True)
            server = socket.create_connection(("127.0.0.1", self.target))
        except OSError:
            client.close()
            return
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._open += [client, server]
        spoke = threading.Event()
        back = threading.Thread(target=self._answers, args=(server, client, spoke), daemon=True)
        back.start()
        try:
            spoke.set()
            while piece := client.recv(_PIECE):
                if spoke.is_set():
                    spoke.clear()
                    self.turns += 1
                time.sleep(self.delay_s)
                self.passes_on.wait()
                server.sendall(piece)
        except OSError:
            pass
        _shut(server)

    def _answers(self, server: socket.socket, client: socket.socket, spoke: threading.Event) -> None:
        try:
            while piece := server.recv(_PIECE):
                spoke.set()
                with self._lock:
                    used_up = self._allowed is not None and self._allowed <= len(piece)
                    if used_up:
                        piece, self._allowed = piece[: self._allowed], None
                    elif self._allowed is not None:
                        self._allowed -= len(piece)
                client.sendall(piece)
                if used_up and self._then is Then.SILENCE:
                    return
                if used_up:
                    break
        except OSError:
            pass
        _shut(client)
        _shut(server)


def _shut(one: socket.socket) -> None:
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    one.close()


@contextmanager
def relay(port: int, tls: ssl.SSLContext | None = None) -> Iterator[Relay]:
    between = Relay(port, tls)
    try:
        yield between
    finally:
        between.close()
