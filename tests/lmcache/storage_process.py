# SPDX-License-Identifier: Apache-2.0
"""LMCache's own storage manager, in separate processes that carry out a test's calls.

`StorageProcess` is the test's side: each call is a line of JSON on a socket, and so is the answer. `_Session` is the
other side. All of them are forked from one process that has imported LMCache, which takes seconds, and serve a whole
module of tests. An object's bytes are derived from its name, so that both sides know them.
"""

import asyncio
import contextlib
import hashlib
import importlib
import json
import os
import re
import select
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import SimpleNamespace
from typing import Any

from benchmarks.testbed.waiting import wait_until

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
"""Longest wait in the child, for things that must happen."""

_ANSWER_S = 2 * PATIENCE_S
"""Longest wait for the answer in the test: the failure is more informative if the child gives up first."""

MODEL = "org/some-model"


@dataclass(frozen=True)
class Thing:
    """A memory object: its format, and dtype and shape of each tensor."""

    memory_format: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]


def thing(memory_format: str, *tensors: tuple[str, tuple[int, ...]]) -> Thing:
    return Thing(memory_format, tensors)


THINGS = {
    "compressed": thing("BINARY_BUFFER", ("uint8", (1001,))),
    "kv chunk": thing("KV_2LTD", ("bfloat16", (2, 3, 16, 64))),
    "encoder output": thing("EC_TD", ("bfloat16", (137, 48))),
    "3 MB": thing("EC_TD", ("bfloat16", (3001, 512))),
    "fp8": thing("EC_TD", ("float8_e4m3fn", (33, 17))),
    "fp8 of another kind": thing("KV_T2D", ("float8_e5m2fnuz", (5, 2, 3))),
    "six dimensions": thing("KV_2TD", ("float16", (2, 1, 3, 4, 5, 7))),
    "mla": thing("KV_MLA_FMT", ("float32", (1, 2, 16, 41))),
    "bools": thing("HS_TD", ("bool", (3, 5))),
    "complex": thing("EC_TD", ("complex64", (7,))),
    "a number": thing("EC_TD", ("float64", (1,))),
    "layer groups": thing("KV_2LTD", ("bfloat16", (2, 2, 16, 8)), ("float8_e5m2", (2, 1, 16, 3)), ("uint8", (7,))),
}
SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "complex64": 8}


def kind_of(name: str) -> Thing:
    """`name#2` is another object like `name`, and `name/1` is one for layer 1 only."""
    return THINGS[re.split("[#/]", name)[0]]


def content(name: str) -> bytes:
    """The bytes of the object with this name."""
    length = 0
    for dtype, shape in kind_of(name).tensors:
        count = SIZES.get(dtype, 1)
        for size in shape:
            count *= size
        length += count
    random = hashlib.shake_128(name.encode()).digest(length)
    return bytes(byte & 1 for byte in random) if name.startswith("bools") else random


def described(name: str) -> dict[str, Any]:
    """The expected answer of `get`."""
    kind = kind_of(name)
    tensors = kind.tensors if kind.memory_format != "BINARY_BUFFER" else (("None", (1001, 0, 0, 0)),)
    return {
        "digest": hashlib.sha256(content(name)).hexdigest(),
        "memory_format": kind.memory_format,
        "tensors": [[dtype, list(shape)] for dtype, shape in tensors],
    }


class StorageProcess:
    """A process with LMCache. AssertionError with the end of its log if it does not answer in time."""

    def __init__(self, log: Path, link: socket.socket) -> None:
        self.log = log
        self._link = link
        self._answers = link.makefile("rb")

    def __call__(self, what: str, **arguments: Any) -> Any:
        self._link.sendall(json.dumps([what, arguments]).encode() + b"\n")
        answered, _, _ = select.select([self._link], [], [], _ANSWER_S)
        assert answered, f"{what}: no answer within {_ANSWER_S} s\n{self.tail}"
        line = self._answers.readline()
        assert line, f"{what}: the process ended\n{self.tail}"
        answer = json.loads(line)
        assert "error" not in answer, f"{what}: {answer['error']}\n{self.tail}"
        return answer["result"]

    @property
    def tail(self) -> str:
        return self.log.read_bytes()[-6000:].decode(errors="replace")

    def hang_up(self) -> None:
        """Let it end by itself."""
        self._link.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def storage_processes(folder: Path, number: int, environment: Mapping[str, str]) -> Iterator[list[StorageProcess]]:
    """`number` processes, with their logs in a folder; all of them have to end without an error."""
    pairs = [socket.socketpair() for _ in range(number)]
    logs = [folder / str(index) for index in range(number)]
    for log in logs:
        log.touch()  # a waiting test may read it before the process has opened it
    links = [theirs.fileno() for _, theirs in pairs]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.lmcache.storage_process", *map(str, logs), *map(str, links)],
        stdin=subprocess.DEVNULL,
        pass_fds=links,
        cwd=ROOT,
        env={**os.environ, "LMCACHE_TRACK_USAGE": "false", "OMP_NUM_THREADS": "1", **environment},
    )
    for _, theirs in pairs:
        theirs.close()
    found = [StorageProcess(log, ours) for log, (ours, _) in zip(logs, pairs, strict=True)]
    try:
        yield found
    finally:
        for each in found:
            each.hang_up()
        try:
            status = process.wait(PATIENCE_S)
        finally:
            process.kill()
    assert status == 0, "\n".join(each.tail for each in found)


class _Session:
    """The child's side: each method is a call that a test can make."""

    manager: Any
    engine: Any

    def open(self, config: str, model: str = MODEL, role: str = "worker") -> list[str]:
        """Open a storage manager with this configuration file. Returns the names of its backends."""
        from lmcache.v1.event_manager import EventManager
        from lmcache.v1.storage_backend.storage_manager import StorageManager

        self.answers: SimpleQueue[int] = SimpleQueue()
        scheduler = SimpleNamespace(send_response_to_scheduler=lambda _, tokens: self.answers.put(tokens))
        settings = self._config(config)
        settings.enable_async_loading = role != "scheduler"
        self.manager = StorageManager(
            settings, self._metadata(model, role), EventManager(), async_lookup_server=scheduler
        )
        return list(self.manager.storage_backends)

    def close(self) -> None:
        self.manager.close()

    def put(self, names: list[str], wait: bool = True) -> None:
        self.manager.batched_put(list(map(self._key, names)), list(map(self._filled, names)))
        if wait:
            self.wait(names)

    def called_back(self, names: list[str], raising: bool = False) -> list[str]:
        """Put, and wait for the futures. Returns the names for which the callback was called, in no order."""
        called, keys = [], {self._key(name): name for name in names}

        def callback(key: Any) -> None:
            called.append(keys[key])
            if raising:
                raise RuntimeError("a callback of somebody else's")

        objects = [self._filled(name) for name in names]
        for future in self._plugin.batched_submit_put_task(list(keys), objects, None, callback):
            future.result(PATIENCE_S)
        for memory_object in objects:
            memory_object.ref_count_down()
        return sorted(called)

    def wait(self, names: list[str]) -> None:
        """Wait until none of these is still being written to a tier."""
        wait_until(f"{names} are written", lambda: not any(map(self.pending, names)), PATIENCE_S)

    def pending(self, name: str) -> bool:
        return bool(self._plugin.exists_in_put_tasks(self._key(name)))

    def fill(self, nbytes: int) -> bool:
        """Whether LMCache's CPU memory has room for `nbytes`, evicting whatever it has to."""
        import torch
        from lmcache.v1.memory_management import MemoryFormat

        size = torch.Size([1, nbytes])
        filler = self.manager.allocate(size, torch.uint8, MemoryFormat.EC_TD, eviction=True, busy_loop=False)
        if filler is not None:
            filler.ref_count_down()
        return filler is not None

    def in_memory(self, name: str) -> bool:
        return bool(self.manager.local_cpu_backend.contains(self._key(name)))

    def contains(self, name: str, pin: bool = False) -> str | None:
        where: str | None = self.manager.contains(self._key(name), pin=pin)
        return where

    def leading(self, names: list[str], pin: bool = False) -> int:
        return int(self.manager.batched_contains([self._key(name) for name in names], pin=pin)[0])

    def get(self, name: str) -> Any:
        return self._described(self.manager.get(self._key(name)))

    def get_later(self, name: str) -> Any:
        return self._described(self._plugin.get_non_blocking(self._key(name)).result(PATIENCE_S))

    def get_all(self, names: list[str]) -> list[Any]:
        keys = [self._key(name) for name in names]
        return [self._described(found) for found in self.manager.batched_get(keys, location="ours")]

    def prefetch(self, names: list[str]) -> list[Any]:
        """What LMCache's asynchronous look-up has fetched when it sends the scheduler the token count (ten per key)."""
        from lmcache.v1.event_manager import EventType

        lengths = list(range(0, 10 * len(names) + 1, 10))
        asked = self.manager.async_lookup_and_prefetch("request", list(map(self._key, names)), lengths, pin=True)
        asyncio.run_coroutine_threadsafe(asked, self.manager.loop)
        tokens = self.answers.get(timeout=PATIENCE_S)
        if not tokens:
            return []
        loaded = self.manager.event_manager.pop_event(EventType.LOADING, "request").result()
        found = [memory_object for backend in loaded for _, memory_object in backend]
        assert tokens == 10 * len(found)
        return list(map(self._described, found))

    def pin(self, name: str) -> bool:
        return bool(self._plugin.pin(self._key(name)))

    def unpin(self, name: str) -> bool:
        return bool(self._plugin.unpin(self._key(name)))

    def remove(self, name: str, force: bool = True) -> bool:
        return bool(self._plugin.remove(self._key(name), force))

    def forget(self, name: str) -> bool:
        """Remove on a separate thread, which may have to wait; True once the write under way is marked."""
        Thread(target=self.remove, args=(name,), daemon=True).start()
        pending = self._plugin._writes._pending[self._plugin._name(self._key(name))]
        return wait_until(f"{name} is marked", lambda: bool(pending.put.cancelled), PATIENCE_S)

    def until_counted(self, count: str, names: list[str]) -> bool:
        """Put one after another until this count is no longer 0."""
        rest = iter(names)

        def counted() -> bool:
            self.put([next(rest)])
            return bool(self._plugin.counts[count])

        return wait_until(f"{count} is counted", counted, PATIENCE_S, pause_s=0.1)

    def file_name(self, name: str) -> str:
        return str(self._plugin._name(self._key(name)).object_name.rpartition("/")[2])

    def counts(self) -> dict[str, int]:
        return dict(self._plugin.counts)

    def namespace(self) -> str:
        return str(self._plugin.namespace)

    def encoder(self, config: str, mended: bool) -> None:
        """LMCache's encoder cache; `mended` makes it read from all backends, where LMCache 0.5.6 stops at the first."""
        import torch
        from lmcache.v1.ec_engine import ECCacheEngine

        self.engine = ECCacheEngine(self._config(config), self._metadata(MODEL, "worker"), torch.bfloat16)
        self.manager = self.engine._storage_manager
        if mended:
            self.manager.batched_get = lambda keys: [self.manager.get(key) for key in keys]

    def encoder_put(self, picture: str, rows: int, width: int) -> bool:
        tensor = self._tensor(picture, rows, width)
        stored = bool(self.engine.put(picture, tensor))
        key = self.engine._make_cache_key(picture)
        wait_until(f"{picture} is written", lambda: not self._plugin.exists_in_put_tasks(key), PATIENCE_S)
        return stored

    def encoder_get(self, picture: str, rows: int, width: int) -> bool | None:
        """Whether it equals what was put; None for a miss."""
        found = self.engine.get(picture, "cpu")
        return None if found is None else bool(found.equal(self._tensor(picture, rows, width)))

    def encoder_contains(self, picture: str) -> bool:
        return bool(self.engine.contains(picture))

    @property
    def _plugin(self) -> Any:
        return self.manager.storage_backends["ours"]

    @staticmethod
    def _config(path: str) -> Any:
        from lmcache.v1.config import LMCacheEngineConfig

        config = LMCacheEngineConfig.from_file(path)
        config.log_config()  # as every LMCache engine does
        return config

    @staticmethod
    def _metadata(model: str, role: str) -> Any:
        import torch
        from lmcache.v1.metadata import LMCacheMetadata

        return LMCacheMetadata(
            model_name=model,
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(3, 2, 16, 4, 16),
            role=role,
        )

    def _filled(self, name: str) -> Any:
        import numpy
        import torch
        from lmcache.v1.memory_management import MemoryFormat

        kind = kind_of(name)
        shapes = [torch.Size(shape) for _, shape in kind.tensors]
        dtypes = [getattr(torch, dtype) for dtype, _ in kind.tensors]
        found = self.manager.allocate(shapes, dtypes, MemoryFormat[kind.memory_format], busy_loop=False)
        if found is None:
            raise MemoryError("LMCache's CPU memory is full")
        numpy.frombuffer(found.byte_array, "u1")[:] = numpy.frombuffer(content(name), "u1")
        return found

    @staticmethod
    def _key(name: str) -> Any:
        """Key of a chunk; of its second layer, if the name ends in `/1`; with a tag, if its digest is odd."""
        import torch
        from lmcache.utils import CacheEngineKey

        plain, _, layer = name.partition("/")
        number = int.from_bytes(hashlib.sha256(plain.encode()).digest()[:8], "big")
        tags = {"lmcache.tag.tenant": "a/b@c"} if number & 1 else {}
        key = CacheEngineKey(MODEL, 1, 0, number, torch.bfloat16, tags)
        return key.split_layers(2)[int(layer)] if layer else key

    @staticmethod
    def _described(found: Any) -> Any:
        if found is None:
            return None
        dtypes = [str(dtype).removeprefix("torch.") for dtype in found.get_dtypes()]
        result = {
            "digest": hashlib.sha256(bytes(found.byte_array)).hexdigest(),
            "memory_format": found.get_memory_format().name,
            "tensors": [list(both) for both in zip(dtypes, map(list, found.get_shapes()), strict=True)],
        }
        if len(dtypes) == 1 and found.tensor is not None:
            assert list(found.tensor.shape) == result["tensors"][0][1]
        found.ref_count_down()
        return result

    @staticmethod
    def _tensor(picture: str, rows: int, width: int) -> Any:
        import torch

        seed = int.from_bytes(hashlib.sha256(picture.encode()).digest()[:7], "big")
        return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


# ---- the processes


PRELOADED = ("lmcache.v1.storage_backend.storage_manager", "lmcache_ec.adapters.lmcache.storage_plugin", "boto3")


def main() -> None:
    """Fork a session for each log and link, and end as they did."""
    from lmcache_ec.tiers import opening

    opening._TIMEOUT_S = PATIENCE_S  # a remote whose client is still being imported is not unreachable
    half = len(sys.argv) // 2 + 1
    sessions = list(zip(sys.argv[1:half], map(int, sys.argv[half:]), strict=True))
    for module in PRELOADED:
        importlib.import_module(module)
    for log, link in sessions:
        if not os.fork():
            for _, other in sessions:
                if other != link:
                    os.close(other)
            serve(Path(log), socket.socket(fileno=link))
            return
    for _, link in sessions:
        os.close(link)
    sys.exit(max(os.waitstatus_to_exitcode(os.wait()[1]) != 0 for _ in sessions))


def serve(log: Path, link: socket.socket) -> None:
    """Carry out the test's calls, until it hangs up."""
    with log.open("wb") as output:
        for number in (1, 2):  # all output goes to the log
            os.dup2(output.fileno(), number)
    answers, session = link.makefile("w"), _Session()
    for line in link.makefile("r"):
        what, arguments = json.loads(line)
        try:
            answer: dict[str, Any] = {"result": getattr(session, what)(**arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
