# SPDX-License-Identifier: Apache-2.0
"""redis-py's connection pools, with a fast path for a connection that is ready to be used.

redis-py's own path counts each connection, notifies listeners and polls the socket: some thirty calls a command. After
an entry has passed through the processor's caches, they take longer than the server takes for a small command.
"""

from typing import Any

from redis.connection import ConnectionPool
from redis.sentinel import SentinelConnectionPool


class ReadyFirst(ConnectionPool):
    """A pool of `PayloadConnection`s. Any thread; a connection belongs to one thread between the two calls."""

    def get_connection(self, *args: Any, **options: Any) -> Any:
        self._checkpid()
        with self._lock:
            idle = self._available_connections
            connection = idle.pop() if idle else None
            if connection is not None:
                self._in_use_connections.add(connection)
        if connection is None or connection.ready:
            return connection or super().get_connection(*args, **options)
        super().release(connection)
        return super().get_connection(*args, **options)

    def release(self, connection: Any) -> None:
        with self._lock:
            kept = connection in self._in_use_connections and self.owns_connection(connection)
            kept = kept and not connection.should_reconnect()
            if kept:
                self._in_use_connections.remove(connection)
                self._available_connections.append(connection)
        if not kept:
            super().release(connection)


class SentinelReadyFirst(ReadyFirst, SentinelConnectionPool):
    """Connections to the master that the Sentinels name."""
