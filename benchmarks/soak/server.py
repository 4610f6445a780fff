# SPDX-License-Identifier: Apache-2.0
"""One life of a real OpenAI server with the cache: started, used through its own interface, observed, killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.soak.leftovers import Traces, arenas, processes_with
from benchmarks.soak.parts import (
    ROOT,
    Layout,
    descendants,
    engine_environment,
    free_port,
    server_flags,
    vllm_version,
)
from lmcache_ec.cli.status import engines

_START_S = 240.0
_ENCODE_LOG = "EC_TEST_ENCODE_LOG"
"""The variable that makes the tests' vLLM plugin log each encoder output."""


@dataclass(frozen=True, slots=True)
class Flavour:
    """How a server is started. `prefix_caching`, also among the arguments: names must not change their meaning then."""

    name: str
    arguments: Sequence[str]
    prefix_caching: bool = False
    vouched: bool = False
    """`persist_client_ids`."""
    updates: bool = False
    """`persist_updated_weights`."""
    front_ends: int = 1


_PROCESSOR_CACHE = ("--mm-processor-cache-gb", "0.05")
_NO_PREFIXES = ("--no-enable-prefix-caching",)
_PREFIXES = ("--enable-prefix-caching", "--block-size", "32")
FLAVOURS = (
    Flavour("lru", [*_NO_PREFIXES, *_PROCESSOR_CACHE], updates=True),
    Flavour("prefix", [*_PREFIXES, *_PROCESSOR_CACHE], True),
    Flavour("no caches", [*_NO_PREFIXES, "--mm-processor-cache-gb", "0"]),
    Flavour("vouched", [*_NO_PREFIXES, *_PROCESSOR_CACHE], vouched=True),
    Flavour("shm", [*_NO_PREFIXES, *_PROCESSOR_CACHE, "--mm-processor-cache-type", "shm"], updates=True),
    Flavour("prefix only", [*_PREFIXES, "--mm-processor-cache-gb", "0"], True, updates=True),
    Flavour("two front ends", [*_NO_PREFIXES, *_PROCESSOR_CACHE], front_ends=2),
)


class ServerFailed(Exception):
    """A server did not start, or a call to its interface failed."""


@dataclass
class Server:
    """`model` is the folder of the checkpoint; `keys` are those of `ec:`. Used on the event loop's thread unless stated
    otherwise."""

    number: int
    flavour: Flavour
    model: Path
    keys: Mapping[str, object]
    environment: Mapping[str, str]
    folder: Path
    process: subprocess.Popen[bytes] = field(init=False)
    port: int = field(init=False)
    status: dict[str, Any] = field(default_factory=dict)
    """Last known status of its cache; empty if there is none."""

    asked_again: int = 0
    """Requests that it answered with 500 and that were sent again."""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.id = f"soak-{self.number}-{uuid.uuid4()}"
        self.log = self.folder / "log"
        self.encodes = self.folder / "encodes"
        self.port = free_port()
        self._arenas: set[int] = set()
        self._core = 0
        environment = engine_environment(
            Layout.MULTI_PROCESS,
            encode_log=self.encodes,
            VLLM_SERVER_DEV_MODE="1",
            VLLM_CPU_KVCACHE_SPACE="1",
        )
        temporaries = self.folder / "tmp"  # vLLM leaves its sockets there when it is killed
        temporaries.mkdir()
        environment |= {"TMPDIR": str(temporaries), "VLLM_RPC_BASE_PATH": str(temporaries), **self.environment}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.testbed.servers.vllm_serve", *self._arguments()],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,  # Ctrl-C goes to the soak, which ends its servers
            )

    def _arguments(self) -> list[str]:
        ours = {"persist_client_ids": self.flavour.vouched, "persist_updated_weights": self.flavour.updates}
        connector = {
            "ec_connector": "ECLMCacheConnector",
            "ec_role": "ec_both",
            "engine_id": self.id,
            "ec_connector_extra_config": {**self.keys, **ours},
        }
        options: dict[str, object] = {
            "model": self.model,
            "host": "127.0.0.1",
            "port": self.port,
            "api-server-count": self.flavour.front_ends,
            "dtype": "float32",
            "max-model-len": 1024,
            "max-num-seqs": 8,
            "max-num-batched-tokens": 256,  # also the size of vLLM's own encoder cache
            "seed": 0,
            "kv-cache-memory-bytes": 64 << 20,
            "ec-transfer-config": json.dumps(connector),
            "worker-extension-cls": "benchmarks.soak.extension.InPlace",
        }
        flags = [*server_flags(vllm_version()), "--disable-uvicorn-access-log"]
        return [*(f"--{name}={value}" for name, value in options.items()), *flags, *self.flavour.arguments]

    # ---- its own interface

    async def ready(self, session: aiohttp.ClientSession) -> None:
        """Wait until it serves, including its cache, if it has one. Raises ServerFailed."""
        deadline = time.monotonic() + _START_S
        while not await self._answers(session):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise ServerFailed(f"server {self.number} ({self.flavour.name}) did not start:\n{self.log_end()}")
            await asyncio.sleep(0.1)
        await asyncio.to_thread(self.look)

    async def _answers(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(2)) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def post(self, session: aiohttp.ClientSession, path: str, body: object = None) -> Any:
        """The JSON of the answer. Raises ServerFailed for a status other than 200."""
        try:
            async with session.post(f"{self.url}{path}", json=body, timeout=aiohttp.ClientTimeout(60)) as answer:
                text = await answer.text()
                if answer.status != 200:
                    raise ServerFailed(f"{path}: {answer.status} {text[:300]}")
                return json.loads(text) if text else None
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerFailed(f"{path}: {error!r}") from error

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # ---- observed from outside; on any thread

    def look(self) -> None:
        """Record its status and its memory while it runs."""
        for engine in engines():
            if engine["engine"].startswith(self.id):
                self.status = engine if engine["book"] or not self.status else {**engine, "book": self.status["book"]}
        self._arenas |= arenas(self.core())

    def core(self) -> int:
        """The process that the scheduler runs in; 0 while there is none."""
        return self._titled("VLLM::EngineCore") or 0

    def worker(self) -> int:
        return self._titled("VLLM::Worker") or 0

    def store_processes(self) -> list[int]:
        """The store processes that hold its arena, of every incarnation that has not ended."""
        return processes_with(self._arenas, b"lmcache_ec.store") if self._arenas else []

    def traces(self) -> Traces:
        return Traces.of([self.process.pid, *descendants(self.process.pid), *self.store_processes()])

    def encoded(self) -> int:
        return len(self.encodes.read_bytes().splitlines()) if self.encodes.exists() else 0

    def lost_pictures(self) -> int:
        """How often vLLM's processor cache assumed an item that its engine did not have."""
        return self.log.read_bytes().count(b"P0/P1 cache drift")

    def log_end(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def _titled(self, title: str) -> int | None:
        for pid in descendants(self.process.pid):
            try:
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title.encode()):
                    return pid
            except OSError:
                pass
        return None

    # ---- its death; on any thread

    def kill(self, *, store_process: bool) -> None:
        """SIGKILL front end, EngineCore and worker at once; the store process too, or it finishes its writes."""
        stores = self.store_processes() if store_process else []
        for pid in [*stores, self.process.pid, *descendants(self.process.pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()

    def signal(self, pid: int, what: signal.Signals, patience_s: float) -> None:
        """Send a signal to one of its processes, which has to end the server."""
        try:
            if pid:
                os.kill(pid, what)
            self.process.wait(patience_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass
        self.kill(store_process=False)  # processes that vLLM itself leaves behind
