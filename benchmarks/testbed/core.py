# SPDX-License-Identifier: Apache-2.0
"""The core without a serving engine: it is driven as by an engine, in this process or in ones that can be killed.

`Scheduler` plays the scheduler side over a real `EncoderCache`, `Worker` plays a rank over a real `Rank`, `Bench`
combines both in the test's process, and `Remote` runs either in its own process. Store process, arena, links and disk
folder are always real.
"""

import json
import multiprocessing
import os
import random
import re
import signal
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import safetensors
import xxhash

from benchmarks.testbed.waiting import DEADLINE_S, freeze, state, wait_until
from lmcache_ec.cache import EncoderCache
from lmcache_ec.channel import Outcome, Saved
from lmcache_ec.cli.status import engines
from lmcache_ec.config import EncoderCacheConfig
from lmcache_ec.engine import Engine
from lmcache_ec.entry import TensorSpec, entry_length, room, verify
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.place import Place
from lmcache_ec.rank import Rank
from lmcache_ec.store_process import PROCESS_NAME

NAMESPACE = "bench-0123456789abcdef"
WIDTH = 64
ROWS = 16
MIB = 1 << 20
LARGEST = 96 * MIB

_children = multiprocessing.get_context("forkserver")
"""Children are forked from a threadless process that has imported this module; they get the first one's environment."""
_children.set_forkserver_preload([__name__])


def spec(rows: int = ROWS) -> TensorSpec:
    """[rows, 64] in BF16: 128 bytes a row."""
    return TensorSpec(rows, WIDTH, "BF16")


def payload(identifier: str, rows: int = ROWS) -> bytes:
    """The encoder's output for `identifier`: always the same, and different for every identifier."""
    return random.Random(identifier).randbytes(spec(rows).nbytes)


def length(identifier: str, rows: int = ROWS) -> int:
    return entry_length(identifier, spec(rows))


def names(prefix: str, number: int) -> list[str]:
    return [f"{prefix}-{index}" for index in range(number)]


# ---- the two sides


@dataclass(frozen=True)
class Step:
    """The metadata of one step: orders with the fields that a rank needs, and no objects of the book."""

    arena: str
    number: int
    saves: list[Saved] = field(default_factory=list)
    loads: list[Saved] = field(default_factory=list)


class Worker:
    """A rank: copies between a dictionary, its encoder cache, and the arena."""

    def __init__(self, engine: str, number: int = 0) -> None:
        self.number = number
        self.rank = Rank(engine, number)

    def copy(self, step: Step) -> tuple[list[tuple[int, Outcome]], dict[str, bytes]]:
        """Carry out the step's copies into and out of the arena. Returns outcomes and loaded payloads."""
        memory, attached = self.rank.memory, self.rank.arena_id == step.arena
        outcomes, loaded = [], {}
        for order in (*step.saves, *step.loads):
            if memory is None or not attached:
                outcomes.append((order.place, Outcome.FAILED))
                continue
            begin, end = order.offset + room(order.identifier), order.offset + order.length
            if order in step.loads:
                loaded[order.identifier] = memory[begin:end]
            elif self.number == 0:
                memory[begin:end] = payload(order.identifier, order.rows)
            outcomes.append((order.place, Outcome.COPIED))
        return outcomes, loaded

    def hand_over(self, step: Step, outcomes: Sequence[tuple[int, Outcome]]) -> dict[int, int]:
        """Hand over each copied save. Returns the store process's incarnation that got it; 0 if none did."""
        copied = {place for place, outcome in outcomes if outcome is Outcome.COPIED and self.number == 0}
        return {save.place: self.rank.hand_over(save) for save in step.saves if save.place in copied}

    def run(self, step: Step, report: bool = True) -> dict[str, bytes]:
        """Run a whole step. Returns the loaded payloads."""
        outcomes, loaded = self.copy(step)
        handed = self.hand_over(step, outcomes)
        if report:
            self.report(step, outcomes, handed)
        return loaded

    def report(self, step: Step, outcomes: Sequence[tuple[int, Outcome]], handed: dict[int, int]) -> None:
        named = []
        for place, outcome in outcomes:
            lost = handed.get(place, -1) == 0
            named.append((place, Outcome.ABSENT if lost else outcome, handed.get(place, 0)))
        self.rank.report(step.number, named)

    def idle(self) -> None:
        pass

    def close(self) -> None:
        self.rank.close()


class Scheduler:
    """The scheduler side: reserves, fetches, pins and sends, as vLLM's passes would."""

    def __init__(
        self,
        folder: Path | None,
        engine: str,
        ranks: int = 1,
        arena_bytes: int = 64 * MIB,
        saves: bool = True,
        **keys: Any,
    ) -> None:
        before = own_arenas()
        keys.setdefault("load_deadline_ms", 5000)  # answers may come late on a busy machine
        keys.setdefault("blocking_timeout_secs", DEADLINE_S)
        config = EncoderCacheConfig(local_disk=folder, max_local_cpu_size=arena_bytes / (1 << 30), **keys)
        self.engine = engine
        epoch = config.epoch if config.namespace is None else None
        self.cache = EncoderCache(config, Engine(engine, NAMESPACE, "bench", ranks, LARGEST, saves, epoch=epoch))
        [self.arena] = own_arenas() - before
        self.steps = 0

    # ---- steps

    def save(self, identifiers: Iterable[str], rows: int = ROWS, persist: bool = True) -> Step:
        """A step that encodes; those without a place are encoded but not saved."""
        reserved = [self.cache.book.reserve_save(identifier, spec(rows), persist) for identifier in identifiers]
        return self._step([place for place in reserved if place is not None], [])

    def load(self, identifiers: Iterable[str]) -> Step:
        """A step that loads `identifiers`, which all have to be live."""
        places = []
        for identifier in identifiers:
            place = self.cache.book.live(identifier)
            assert place is not None, f"{identifier} is not live"
            self.cache.book.pin(place)
            places.append(place)
        return self._step([], places)

    def _step(self, saves: list[Place], loads: list[Place]) -> Step:
        self.steps += 1
        for place in saves:
            self.cache.book.send_save(place, self.steps, 0)
        for place in loads:
            self.cache.book.send_load(place, self.steps)
        ordered = [[_order(place, self.cache.namespace) for place in places] for places in (saves, loads)]
        return Step(self.cache.arena_id, self.steps, *ordered)

    # ---- waiting

    def drain(self) -> None:
        self.cache.drain(time.monotonic())
        if self.cache.weights.moved:
            self.cache.follow_weights()
        self.cache.hand_changes()
        self.cache.hand_ledger(lambda: {"steps": self.steps})

    idle = drain

    def until(self, what: str, condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
        """Run scheduling passes without a request until `condition` holds."""
        wait_until(what, condition, deadline_s, doing=self.drain)

    def settle(self) -> None:
        """Wait until nothing is under way and nothing is held: no order, fill, save, write, pin or orphan."""
        try:
            self.until("it has settled", lambda: self.cache.book.settled and not any(held(self.snapshot()).values()))
        except AssertionError:
            raise AssertionError(f"not settled: {held(self.snapshot())}") from None

    def ready(self) -> None:
        self.until("the cache is ready", lambda: self.cache.ready)

    def live(self, identifier: str) -> bool:
        return self.cache.book.live(identifier) is not None

    def fetch(self, identifier: str, rows: int = ROWS, size: int | None = None) -> bool:
        """Look up an entry and bring it into the arena. Returns whether it is live in the end."""
        if self.live(identifier):
            return True
        wanted = length(identifier, rows) if size is None else size
        if not self.cache.fetch(identifier, wanted, time.monotonic()):
            return False
        self.until(f"{identifier} is fetched or missed", lambda: not self.snapshot()["fetches_under_way"])
        return self.live(identifier)

    def status(self) -> dict[str, Any]:
        """The status that the store process serves to any process on the host."""
        [status] = [status for status in engines() if status["engine"] == self.engine]
        return status

    def scanned(self) -> None:
        self.until("the folder is scanned", lambda: self.status()["scan_complete"])

    def scanned_disk(self) -> None:
        """Wait until the disk is scanned, next to a remote that is queried and never listed."""
        below = self.cache.below
        self.until("the folder is scanned", lambda: below.presence is not None and below.presence.complete("disk"))

    def arena_inode(self) -> int:
        return self.arena

    def snapshot(self) -> dict[str, int]:
        return self.cache.snapshot()

    def unsaved(self) -> list[str]:
        return list(self.cache.book.unsaved)

    def serving(self) -> int:
        """The process id of the store process, once one serves."""
        pids: list[int] = []

        def serves() -> bool:
            pids[:] = store_processes(self.arena)
            return len(pids) == 1 and os.getpgid(pids[0]) == pids[0] and self.cache.ready and self._answers()

        self.until("one store process serves", serves)
        return pids[0]

    def _answers(self) -> bool:
        """A newly started store process has answered once it has sent its pidfd."""
        descriptors = Path("/proc/self/fdinfo")
        [pid] = store_processes(self.arena) or [0]
        return any(f"\nPid:\t{pid}\n" in text for text in _texts(descriptors.iterdir()))

    def close(self) -> None:
        self.cache.close()


def _order(place: Place, namespace: str) -> Saved:
    shape = place.spec or spec(0)
    fields = (place.id, place.offset, place.length, namespace, place.identifier, shape.rows, shape.width, shape.dtype)
    return Saved(*fields, place.dirty)  # beyond the budget of unwritten entries it is not written yet


def held(snapshot: dict[str, int]) -> dict[str, int]:
    """The counts that must be zero when nothing is under way."""
    states = ("reserved", "writing", "sealing", "filling", "orphaned")
    keys = [*(f"places_{state}" for state in states), "pins", "leases", "orders", "dirty_bytes", "filling_bytes"]
    return {key: snapshot[key] for key in (*keys, "leased_bytes", "fetches_under_way")}


class Bench(Scheduler):
    """A scheduler side and its ranks in this process; `workers` may be replaced by remote ones."""

    def __init__(self, folder: Path | None, ranks: int = 1, engine: str = "", **keys: Any) -> None:
        engine = engine or str(uuid.uuid4())
        self.workers = [Worker(engine, number) for number in range(ranks)]
        try:
            super().__init__(folder, engine, ranks, **keys)
            self.ready()
        except BaseException:
            for worker in self.workers:
                worker.close()
            raise

    def encode(self, identifiers: Iterable[str], rows: int = ROWS, persist: bool = True) -> Step:
        """One step that encodes and saves, up to the ranks' reports."""
        step = self.save(identifiers, rows, persist)
        for worker in self.workers:
            worker.run(step)
        return step

    def serving(self) -> int:
        """Also wait until the saving rank knows it: saves handed over before that are lost."""
        pid, ranks = super().serving(), [worker.rank for worker in self.workers if isinstance(worker, Worker)]
        self.until("it is handed what is saved", lambda: ranks[0].incarnation == self.cache._store.number)
        return pid

    def read(self, identifiers: Iterable[str]) -> dict[str, bytes]:
        """One step that loads. Returns the payloads, which have to be the same on every rank."""
        step = self.load(identifiers)
        first, *others = [worker.run(step) for worker in self.workers]
        assert all(other == first for other in others)
        return first

    def serves(self, identifier: str, rows: int = ROWS) -> bool:
        """Look up and load; the payload has to equal the encoder's output. False for a miss."""
        if not self.fetch(identifier, rows):
            return False
        assert self.read([identifier]) == {identifier: payload(identifier, rows)}
        return True

    def close(self) -> None:
        super().close()
        for worker in self.workers:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- a side in its own process


class Remote:
    """A `Worker` or `Scheduler` in a child process. A call is answered before the next one."""

    def __init__(self, side: type[Worker] | type[Scheduler], *arguments: Any, **keys: Any) -> None:
        self._link, theirs = _children.Pipe()
        self.process = _children.Process(target=_serve, args=(theirs, side, arguments, keys), daemon=True)
        self.process.start()
        theirs.close()
        self._answer()

    def call(self, name: str, *arguments: Any, **keys: Any) -> Any:
        self._link.send((name, arguments, keys))
        return self._answer()

    def _answer(self) -> Any:
        assert self._link.poll(DEADLINE_S), "no answer from the child process"
        answer = self._link.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE_S)
        self._link.close()


def _serve(link: Any, side: type[Worker] | type[Scheduler], arguments: tuple[Any, ...], keys: dict[str, Any]) -> None:
    served = side(*arguments, **keys)
    link.send(None)
    while True:
        if link.poll(0.001):
            name, arguments, keys = link.recv()
            try:
                link.send(getattr(served, name)(*arguments, **keys))
            except Exception as error:
                link.send(error)
        served.idle()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process held by SIGSTOP within the block; afterwards it resumes if it still exists."""
    try:
        freeze(pid)
        yield
    finally:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass


@contextmanager
def stuck(path: Path) -> Iterator[Callable[[], None]]:
    """The folder hangs while `path`, its `<namespace>/.tmp/stuck`, exists: see engine_plugin/sitecustomize.py."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    try:
        yield lambda: path.unlink(missing_ok=True)
    finally:
        path.unlink(missing_ok=True)


# ---- what the kernel reports


def process_state(pid: int) -> str:
    """One letter, as ps shows it; also Z (ended) if there is no such process."""
    return state(Path(f"/proc/{pid}"))


def own_arenas() -> set[int]:
    """The inodes of the arenas that this process holds a descriptor of."""
    return _arenas("self")


def _arenas(pid: int | str) -> set[int]:
    found = set()
    for link, target in _descriptors(pid):
        if target.startswith("/memfd:lmcache-ec-arena"):
            try:
                found.add(os.stat(link).st_ino)
            except OSError:
                pass
    return found


def arena_resident_bytes(arena: int) -> int:
    for link, target in _descriptors("self"):
        if target.startswith("/memfd:lmcache-ec-arena") and os.stat(link).st_ino == arena:
            return os.stat(link).st_blocks * 512
    raise AssertionError("no such arena here")


def _descriptors(pid: int | str) -> list[tuple[Path, str]]:
    found = []
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                found.append((link, os.readlink(link)))
            except OSError:
                pass
    except OSError:
        pass
    return found


def _texts(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        try:
            yield path.read_text()
        except OSError:
            pass


def store_processes(arena: int) -> list[int]:
    """The store processes that hold this arena, of every incarnation that has not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            begins = b"lmcache_ec.store" in (folder / "cmdline").read_bytes()  # not renamed yet
            serves = (folder / "comm").read_text() == f"{PROCESS_NAME}\n"
        except OSError:
            continue
        if (begins or serves) and arena in _arenas(folder.name):
            found.append(int(folder.name))
    return found


def abstract_sockets(*parts: str) -> list[str]:
    """Names of our abstract sockets that contain one of `parts`."""
    return [
        name
        for name in re.findall(r"@(lmcache-ec-\S+)", Path("/proc/net/unix").read_text())
        if any(part in name for part in parts)
    ]


# ---- what is on disk


def path_of(folder: Path, identifier: str) -> Path:
    return folder / EncoderCacheKey(NAMESPACE, identifier).object_name


def stored(folder: Path) -> set[str]:
    """Identifiers of the entries on disk. Each file has to be valid safetensors with its identifier's payload."""
    return {_read_file(path) for path in folder.rglob("*.safetensors")}


def _read_file(path: Path) -> str:
    data = path.read_bytes()
    [(name, tensor)] = safetensors.deserialize(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    identifier: str = header["__metadata__"]["identifier"]
    rows, width = tensor["shape"]
    assert (name, width, tensor["dtype"]) == ("ec", WIDTH, "BF16")
    assert path.name == Path(EncoderCacheKey(NAMESPACE, identifier).object_name).name
    assert bytes(tensor["data"]) == payload(identifier, rows), f"{identifier}: another's bytes, or torn ones"
    verify(memoryview(data), EncoderCacheKey(NAMESPACE, identifier))
    return identifier


def of_another_version(entry: bytes, how: str) -> bytes:
    """The same entry as another version of this package might have written it, of the same length or longer.

    `how`: "lmcache-ec/2", or "more fields"; with "sealed" its digest is right by the rules of this version.
    """
    fields = json.loads(entry[8 : 8 + int.from_bytes(entry[:8], "little")])
    if "more fields" in how:
        fields["__metadata__"]["compression"] = "none"
    else:
        fields["__metadata__"]["format"] = "lmcache-ec/2"
    fields["__metadata__"]["digest"] = "0" * 32
    room_bytes = len(entry) - len(payload_of(entry)) + 4096 * ("longer" in how)
    header = json.dumps(fields, separators=(",", ":")).encode().ljust(room_bytes - 8)
    made = bytearray(len(header).to_bytes(8, "little") + header + payload_of(entry))
    if "sealed" in how:
        at = made.index(b'"digest":"') + 10
        made[at : at + 32] = xxhash.xxh3_128(made).hexdigest().encode()
    return bytes(made)


VERSIONS = ["lmcache-ec/2", "lmcache-ec/2 sealed", "lmcache-ec/2 longer", "more fields", "more fields sealed"]


def payload_of(entry: bytes) -> bytes:
    return entry[8 + int.from_bytes(entry[:8], "little") :]


def temporaries(folder: Path) -> list[Path]:
    """Files that are neither entries nor the folder's account, epoch or news: left by unfinished writes."""
    found = [path for path in folder.rglob("*") if not path.is_dir() and path.suffix != ".safetensors"]
    known = {folder / ".usage", folder / ".epoch"}
    return [path for path in found if path not in known and path.parent != folder / ".news"]
