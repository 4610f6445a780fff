# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec status --record`: what requests to this host's engines need, as a trace for `lmcache-ec plan`."""

from __future__ import annotations

import json
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import IO

import typer

from lmcache_ec.channel import Access, Accessed, Follow, Notice
from lmcache_ec.cli.progress import Progress
from lmcache_ec.cli.status import engines, sockets
from lmcache_ec.cli.wording import counted
from lmcache_ec.link import RECORD_PREFIX, Link, LinkClosed, same_user
from lmcache_ec.plan.traces import COLUMNS, opened
from lmcache_ec.sizes import precise_size

_CONNECT_S = 2.0
_TICK_S = 0.2
_WRITTEN_S = 1.0
"""How often what has arrived is written, in order of time, and new store processes are looked for."""
_REPLACED_S = 10.0
"""How long there may be none to record: a store process that has ended is replaced in its engine's next pass."""


@dataclass
class Trace:
    """What has arrived, and what is in the file."""

    file: IO[str]
    most_bytes: int
    begun: float
    """Monotonic seconds, as for accesses."""
    requests: int = 0
    guessed: int = 0
    lost: int = 0
    bytes: int = 0
    full: bool = False
    _coming: list[Access] = field(default_factory=list)
    _latest_s: float = 0.0

    def __post_init__(self) -> None:
        self._put(",".join(COLUMNS))

    def add(self, batch: Accessed) -> None:
        self._coming += [access for access in batch.accesses if access[0] >= self.begun]
        self.guessed += batch.guessed
        self.lost += batch.lost

    def write(self) -> None:
        """Write what has arrived, in whole lines, until the file has its size. Times never decrease: an access that one
        engine reports late gets the time of the last one."""
        coming, self._coming = sorted(self._coming, key=itemgetter(0)), []
        for at, name, size, encode_s in coming:
            self._latest_s = max(self._latest_s, at - self.begun)
            if self.full or not self._put(f"{self._latest_s:.3f},{name},{size},{encode_s:.6f}"):
                self.lost += 1
                self.full = True
            else:
                self.requests += 1
        self.file.flush()

    def _put(self, line: str) -> bool:
        if self.bytes + len(line) + 1 > self.most_bytes:
            return False
        self.file.write(f"{line}\n")
        self.bytes += len(line) + 1
        return True


class Followed:
    """The links to the store processes of this user on this host whose engines are recorded."""

    def __init__(self, engine: str) -> None:
        """`engine` is the prefix of the names of the wanted ones."""
        self._engine = engine
        self._salt = secrets.token_bytes(32)
        self._names: set[str] = set()  # of all that were ever linked
        self._selector = selectors.DefaultSelector()
        self.said: list[str] = []
        """Why an engine is not recorded."""

    def __len__(self) -> int:
        return len(self._selector.get_map())

    def look(self) -> None:
        """Connect to new ones."""
        names = {each.name for each in sockets() if each.name.startswith(RECORD_PREFIX)}
        new = sorted(names - self._names)
        if new and self._engine:
            meant = [f"{RECORD_PREFIX}{each['pid']}-" for each in engines() if each["engine"].startswith(self._engine)]
            new = [name for name in new if name.startswith(tuple(meant))]
        for name in new:
            link = _connected(name)
            if link is not None:
                self._names.add(name)
                link.send(Follow(self._salt))
                self._selector.register(link, selectors.EVENT_READ)

    def hear(self, trace: Trace, timeout: float) -> None:
        """Take in what arrives within `timeout` seconds."""
        for key, _ in self._selector.select(timeout):
            link = key.fileobj
            assert isinstance(link, Link)
            try:
                while (received := link.receive()) is not None:
                    match received[0]:
                        case Accessed() as batch:
                            trace.add(batch)
                        case Notice(text=text):
                            self.said.append(text)
            except LinkClosed:
                self._selector.unregister(link)
                link.close()

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, Link)
            key.fileobj.close()
        self._selector.close()


def record_trace(path: Path, engine: str, seconds: float, most_bytes: int, as_json: bool) -> int:
    """Write what requests need to a new file, for `seconds`, until Ctrl-C, or until it has `most_bytes`.

    Returns the exit status: 1 without an engine whose name begins with `engine`, 2 if the file cannot be made.
    """
    begun, followed = time.monotonic(), Followed(engine)
    followed.look()
    if not followed:
        named = f" whose name begins with {engine!r}" if engine else ""
        problem = f"No engine{named} with an encoder cache of this version runs on this host under this user."
        typer.echo(json.dumps({"file": None, "problem": problem}) if as_json else problem, err=not as_json)
        return 1
    try:
        with opened(path, "xt") as file, _interrupts() as interrupted:
            trace = Trace(file, most_bytes, begun)
            ended = _record(followed, trace, seconds, interrupted)
    except OSError as error:
        typer.echo(f"--record {path}: must be a new file that can be written: {error.strerror or error}", err=True)
        return 2
    finally:
        followed.close()
    if as_json:
        counts = {"outputs": trace.requests, "bytes": trace.bytes, "lost": trace.lost, "guessed": trace.guessed}
        rest = {"ended_early": ended, "notes": followed.said, "problem": ""}
        typer.echo(json.dumps({"file": str(path), **counts, **rest}))
        return 0
    for line in (
        f"{path}: {_what(trace)}; `lmcache-ec plan {path}` replays it",
        ended,
        *followed.said,
        *_dropped(trace),
    ):
        if line:
            typer.echo(line)
    return 0


def _record(followed: Followed, trace: Trace, seconds: float, interrupted: threading.Event) -> str:
    """Returns why it ended early; empty if it did not."""
    progress = Progress(lambda passed_s: f"recording for {passed_s:.0f} s: {_what(trace)}; Ctrl-C ends it")
    now = written = there = time.monotonic()
    while not interrupted.is_set() and not trace.full and now - there < _REPLACED_S and now - trace.begun < seconds:
        followed.hear(trace, min(_TICK_S, trace.begun + seconds - now))
        progress.tick()
        now = time.monotonic()
        if now - written >= _WRITTEN_S:
            written = now
            trace.write()
            followed.look()
        if followed:
            there = now
    followed.hear(trace, 0.0)
    trace.write()
    progress.clear()
    if trace.full:
        return "it ended early: the file has the size that --most allows"
    return "" if now - there < _REPLACED_S else "it ended early: none of the recorded engines runs any more"


def _what(trace: Trace) -> str:
    return f"{counted(trace.requests, 'output')}, {precise_size(trace.bytes)}"


def _dropped(trace: Trace) -> Iterator[str]:
    if trace.lost:
        yield f"{trace.lost:,} more are missing: there was no room for them, or their size was unknown"
    if trace.guessed:
        yield f"guessed encode times: {trace.guessed:,}, because their engines had measured none"


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Set by Ctrl-C or SIGTERM, in place of their usual effect, so that the file ends with a whole line."""
    interrupted = threading.Event()
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _connected(name: str) -> Link | None:
    """A link; None for another user's process, or one that has ended meanwhile."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(_CONNECT_S)
        connection.connect(f"\0{name}")
        if same_user(connection):
            return Link(connection)
    except OSError:
        pass
    connection.close()
    return None
