# SPDX-License-Identifier: Apache-2.0
"""An engine under a fault: the model's outputs without a cache, an engine with its store process, and its leftovers."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import safetensors

from benchmarks.testbed.core import process_state, stopped, temporaries
from benchmarks.testbed.engine_env import Layout, Output
from benchmarks.testbed.engine_runner import Begin, EngineProcess, Forget, Generate, descendants
from benchmarks.testbed.media import Prompt
from lmcache_ec.cli.status import engines
from lmcache_ec.entry import TensorSpec, entry_length, room, seal, verify
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.link import rank_address, status_address
from tests import warm_start
from tests.engine.rig import wait_until

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Served", "Traces", "Truth", "process_state", "stopped", "temporaries", "wait_until"]

MODEL = "gemma3"
NAMESPACE = "faults-0123456789abcdef"
MAX_TOKENS = 4
PATIENCE = {"load_deadline_ms": 60_000, "start_timeout_s": 60}
"""On a busy machine a load must not turn into an encode."""

NEAR = 1e-4
"""Tolerance between two runs of the encoder: batching changes the order of sums."""

_QUIET = Prompt(text="nothing to see")


@dataclass(frozen=True)
class Truth:
    """The model's results for each picture without the cache: output, identifier, and encoder output in `folder`."""

    folder: Path
    identifiers: dict[int, str]
    outputs: dict[int, Output]

    def tensor(self, identifier: str) -> np.ndarray[Any, Any]:
        """float32 [rows, width]."""
        import numpy as np

        array: np.ndarray[Any, Any] = np.load(self.folder / f"{identifier}.npy")
        return array

    @property
    def entry_bytes(self) -> int:
        identifier = next(iter(self.identifiers.values()))
        rows, width = self.tensor(identifier).shape
        return entry_length(identifier, TensorSpec(rows, width, "F32"))

    def names(self, seeds: Collection[int]) -> set[str]:
        return {self.identifiers[seed] for seed in seeds}

    def path(self, disk: Path, seed: int) -> Path:
        return disk / EncoderCacheKey(NAMESPACE, self.identifiers[seed]).object_name

    def store(self, disk: Path, seeds: Collection[int]) -> None:
        """Store entries of these pictures, as an earlier engine would have."""
        for seed in seeds:
            identifier = self.identifiers[seed]
            tensor = self.tensor(identifier)
            entry = bytearray(room(identifier)) + tensor.tobytes()
            rows, width = tensor.shape
            spec = TensorSpec(rows, width, "F32")
            seal(memoryview(entry), EncoderCacheKey(NAMESPACE, identifier), spec, "earlier")
            self.path(disk, seed).parent.mkdir(parents=True, exist_ok=True)
            self.path(disk, seed).write_bytes(entry)

    def stored(self, disk: Path) -> set[str]:
        """Identifiers of all files. Each has to verify, have the name of its contents, and hold the right bytes."""
        return {self._held_by(path) for path in disk.rglob("*.safetensors")}

    def _held_by(self, path: Path) -> str:
        import numpy as np

        data = path.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        identifier: str = header["__metadata__"]["identifier"]
        key = EncoderCacheKey(NAMESPACE, identifier)
        verify(memoryview(data), key)
        assert path.match(key.object_name), f"{path} holds {identifier}"
        [(_, tensor)] = safetensors.deserialize(data)
        found = np.frombuffer(tensor["data"], np.float32).reshape(tensor["shape"])
        assert np.allclose(found, self.tensor(identifier), atol=NEAR, rtol=NEAR), f"{path} holds another's bytes"
        return identifier


class Served:
    """An engine with the cache over the folder `disk`, driven by `engine`. Further `keys` are those of `ec:`."""

    def __init__(
        self,
        truth: Truth,
        folder: Path,
        layout: Layout = Layout.ONE_PROCESS,
        *,
        model: str = MODEL,
        disk: Path | None = None,
        arena_entries: int | None = None,
        arguments: Mapping[str, Any] | None = None,
        begin: Begin = warm_start.begin,
        **keys: Any,
    ) -> None:
        self.truth = truth
        self.folder = folder
        self.disk = disk or folder / "disk"
        self.id = str(uuid.uuid4())
        self.faults = folder / "faults"
        self.faults.mkdir(parents=True, exist_ok=True)
        if arena_entries is not None:
            keys["max_local_cpu_size"] = arena_entries * truth.entry_bytes / (1 << 30)
        extra = {"local_disk": str(self.disk), "namespace": NAMESPACE, **PATIENCE, **keys}
        self.engine = EngineProcess(
            model,
            layout,
            folder=folder,
            connector={
                "ec_connector": "ECLMCacheConnector",
                "ec_role": "ec_both",
                "engine_id": self.id,
                "ec_connector_extra_config": extra,
            },
            environment={"EC_TEST_FAULTS": str(self.faults)},
            begin=begin,
            **(arguments or {}),
        )
        self.layout = layout

    # ---- requests

    def ask(self, *seeds: int, together: bool = False, forget: bool = True) -> set[int]:
        """A request for each picture; outputs have to equal those without the cache. Returns which were encoded.

        vLLM's own encoder cache is emptied first, so that each picture is either loaded or encoded, once on each rank.
        """
        if forget:
            self.engine.do(Forget())
        prompts = tuple(Prompt(images=(seed,)) for seed in seeds)
        report = self.engine.do(Generate(prompts, MAX_TOKENS, one_by_one=not together))
        for seed, output in zip(seeds, report.outputs, strict=True):
            assert output.equals(self.truth.outputs[seed]), f"picture {seed}: {output}"
        by_name = {name: seed for seed, name in self.truth.identifiers.items()}
        encoded = [by_name[identifier] for identifier in report.encodes]
        assert len(encoded) == len(set(encoded)) * self.layout.ranks, f"not once on each rank: {encoded}"
        return set(encoded)

    def idle(self) -> None:
        """A scheduling pass without a picture."""
        self.engine.do(Generate((_QUIET,), 1))

    # ---- what the store process reports

    def status(self) -> dict[str, Any] | None:
        """The store process's status; None while no store process of this engine answers."""
        found = [status for status in engines() if status["engine"].startswith(self.id)]
        return max(found, key=lambda status: int(status["incarnation"]), default=None)

    def until(self, what: str, condition: Callable[[dict[str, int], dict[str, int]], object]) -> None:
        """Run passes without a picture until `condition(book, store)` holds for the counts."""

        def met() -> object:
            self.idle()
            status = self.status()
            return status is not None and status["book"] and condition(status["book"], status["store"])

        try:
            wait_until(what, met)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.status()}") from None

    def settle(self) -> dict[str, int]:
        """Wait until nothing is held or under way in the arena. Returns the book's counts."""
        self.until("nothing is held", lambda book, _: not any(held(book).values()))
        status = self.status()
        assert status is not None
        return dict(status["book"])

    def ready(self) -> Self:
        """Wait until it serves and the folder is scanned."""
        wait_until("the folder is scanned", lambda: (self.status() or {}).get("scan_complete"))
        return self

    def store_pid(self) -> int:
        wait_until("a store process answers", self.status)
        status = self.status()
        assert status is not None
        return int(status["pid"])

    def stored(self) -> set[str]:
        return self.truth.stored(self.disk)

    def log_lines(self, text: str) -> list[str]:
        return [line for line in self.engine.log.read_text(errors="replace").splitlines() if text in line]

    # ---- faults of the copies

    @contextmanager
    def copies_held(self) -> Iterator[None]:
        (self.faults / "hold").touch()
        try:
            yield
        finally:
            (self.faults / "hold").unlink()

    def fail_next_load(self, rank: int = 0) -> Path:
        fault = self.faults / f"fail-{rank}"
        fault.touch()
        return fault

    # ---- the end

    def close(self) -> None:
        """Shut down in order; nothing may be left afterwards."""
        traces = Traces(self)
        self.engine.close()
        traces.assert_gone()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, at: object) -> None:
        if self.engine.process.poll() is not None:
            return
        if error is None:
            self.close()
        else:
            self.engine.kill()


def held(book: Mapping[str, int]) -> dict[str, int]:
    """The counts that must be zero when nothing is under way."""
    states = [f"places_{state}" for state in ("reserved", "writing", "sealing", "filling", "orphaned")]
    sizes = ["dirty_bytes", "filling_bytes", "leased_bytes"]
    return {name: book[name] for name in (*states, *sizes, "pins", "leases", "orders", "fetches_under_way", "staged")}


class Traces:
    """Everything that could be left of an engine: collected while it runs, checked after its end."""

    def __init__(self, served: Served) -> None:
        self.disk = served.disk
        wait_until("a store process answers", served.status)
        status = served.status()
        assert status is not None
        self.store = int(status["pid"])
        self.family = [served.engine.process.pid, *descendants(served.engine.process.pid)]
        ranks = [rank_address(status["engine"], rank)[1:] for rank in range(served.layout.ranks)]
        self._started = {pid: started(pid) for pid in (*self.family, self.store)}
        self._sockets = [*ranks, status_address(self.store)[1:].rpartition("-")[0] + "-"]
        self._memory = {inode for pid in (*self.family, self.store) for inode in memory_files(pid)}
        assert self._memory
        assert len(self.sockets()) == len(self._sockets)

    def sockets(self) -> list[str]:
        names = re.findall(r"@(lmcache-ec-\S+)", Path("/proc/net/unix").read_text())
        return sorted({name for name in names if name.startswith(tuple(self._sockets))})

    def running(self) -> list[int]:
        return [pid for pid, when in self._started.items() if process_state(pid) != "Z" and started(pid) == when]

    def holders(self) -> list[int]:
        """Any processes that still have this engine's arena or presence filter open or mapped."""
        pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
        return [pid for pid in pids if memory_files(pid) & self._memory]

    def assert_gone(self) -> None:
        """Check that every process has ended by itself and that no socket, memory or temporary file is left."""
        wait_until(f"{self.running()} have ended", lambda: not self.running())
        # A process counts as ended once its first thread has; its resources are freed with its last thread.
        wait_until("no socket and no memory is left", lambda: not self.sockets() and not self.holders())
        assert not list(Path("/dev/shm").glob("lmcache*"))
        assert not temporaries(self.disk)


def started(pid: int) -> str:
    """When the process began, in ticks, since pids are reused."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def memory_files(pid: int) -> set[int]:
    """Inodes of our memory files that a process has open or mapped."""
    found = set()
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if os.readlink(link).startswith("/memfd:lmcache-ec"):
                    found.add(os.stat(link).st_ino)
            except OSError:
                pass
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/memfd:lmcache-ec" in line:
                found.add(int(line.split()[4]))
    except OSError:
        pass  # it has ended
    return found
