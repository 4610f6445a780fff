# SPDX-License-Identifier: Apache-2.0
"""The test's side of a real engine: it asks, compares with an engine without a cache, and checks for leftovers."""

import os
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest

from benchmarks.testbed import waiting
from benchmarks.testbed.engine_env import Layout, Output, vllm_version
from benchmarks.testbed.engine_runner import Call, EngineProcess, Forget, Generate
from benchmarks.testbed.media import Prompt
from lmcache_ec.adapters.vllm.versions import minor
from lmcache_ec.cli.status import engines
from tests import warm_start
from tests.engine.drive import Played, Request

wait_until = partial(waiting.wait_until, deadline_s=60.0, pause_s=0.01)
"""For work next to an engine on a busy machine. Each check takes CPU time from that work."""

PATIENCE = {"load_deadline_ms": 30_000, "start_timeout_s": 60.0}
"""On a machine with only two cores, two spinning workers leave the store process no core for a second or more, and a
request waits for its answer. With less patience it would, correctly, be encoded and saved in a later step."""

needs_v2_runner = pytest.mark.skipif(
    minor(vllm_version()) < (0, 32),
    reason="before 0.32 vLLM uses Triton only where its distribution is called vllm, and its V2 runner wants Triton",
)

ARENA = "/memfd:lmcache-ec-arena"
NOTHING = Prompt(text="nothing to see")
SEEN = Prompt(images=(1,), text="seen")


class Reference:
    """Engines without a connector, one process for each model and data type, which give the right outputs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._engines: dict[tuple[str, str], EngineProcess] = {}
        self._outputs: dict[tuple[str, str, Prompt, int], Output] = {}

    def outputs(
        self, model: str, prompts: Sequence[Prompt], max_tokens: int, dtype: str = "float32", **arguments: Any
    ) -> list[Output]:
        """`arguments` are the engine's, and have to be the same in all calls for a model and data type."""

        def asked(prompt: Prompt) -> tuple[str, str, Prompt, int]:
            return model, dtype, prompt, max_tokens

        missing = [prompt for prompt in dict.fromkeys(prompts) if asked(prompt) not in self._outputs]
        if missing:
            engine = self._engines.get((model, dtype))
            if engine is None:
                folder = self._folder / f"{model}-{dtype}"
                begin = warm_start.begin
                engine = EngineProcess(model, Layout.ONE_PROCESS, folder=folder, begin=begin, dtype=dtype, **arguments)
                self._engines[model, dtype] = engine
            report = engine.do(Generate(tuple(missing), max_tokens, one_by_one=True))
            self._outputs |= {asked(prompt): output for prompt, output in zip(missing, report.outputs, strict=True)}
        return [self._outputs[asked(prompt)] for prompt in prompts]

    def forget(self, model: str, dtype: str = "float32") -> None:
        """End an engine that will not be needed for a while."""
        engine = self._engines.pop((model, dtype), None)
        if engine is not None:
            engine.kill()

    def close(self) -> None:
        for engine in self._engines.values():
            engine.kill()


class Rig:
    """An engine under test with its own folder; its disk tier is `disk`. `restart` starts the next engine on it."""

    def __init__(
        self,
        model: str | Path,
        layout: Layout,
        folder: Path,
        reference: Reference,
        *,
        disk: Path | None = None,
        keys: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        connector: Mapping[str, str] | None = None,
        like: str = "",
        **arguments: Any,
    ) -> None:
        """`keys` belong to the extra configuration in `connector`; `like` is the model that the reference runs."""
        self.disk = disk or folder / "disk"
        self.layout = layout
        self._model = str(model)
        self._like = like or self._model
        self._folder = folder
        self._reference = reference
        self._keys = {"local_disk": str(self.disk), **PATIENCE, **(keys or {})}
        self._environment = environment
        self._connector = dict(connector or {})
        self._arguments = arguments
        self._dtype = str(arguments.get("dtype", "float32"))
        self.start()

    def start(self) -> None:
        self.name = f"engine-{uuid.uuid4()}"
        connector = {
            "ec_connector": "ECLMCacheConnector",
            "ec_role": "ec_both",
            "engine_id": self.name,
            "ec_connector_extra_config": self._keys,
            **self._connector,
        }
        self.engine = EngineProcess(
            self._model,
            self.layout,
            folder=self._folder,
            connector=connector,
            environment=self._environment,
            guard=True,
            begin=warm_start.begin,
            **self._arguments,
        )

    def restart(self) -> None:
        """Kill front end, EngineCore and workers, and start again: only what is on disk remains."""
        self.engine.kill()
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the engine: an orderly shutdown takes vLLM some seconds longer, and `rig.engine.close` tests it."""
        if self.engine.process.returncode is None:
            self.engine.kill()

    # ---- requests

    def ask(self, *prompts: Prompt, max_tokens: int = 8, one_by_one: bool = False) -> int:
        """Ask all prompts at once, or one by one. Outputs have to be right; returns how many items were encoded."""
        report = self.engine.do(Generate(prompts, max_tokens, one_by_one))
        self.compare(report.outputs, prompts, max_tokens)
        return self.encodes(report.encodes)

    def play(self, *requests: Request, compare: bool = True, **how: Any) -> Played:
        """Like `tests.engine.drive.play`. The outputs of requests that ran to their end have to be right."""
        arguments = {"requests": msgspec.to_builtins(requests), **how}
        report = self.engine.do(Call("tests.engine.drive:play", arguments))
        played = msgspec.convert(report.value, Played)
        played.encodes = report.encodes
        for request, ending in zip(requests, played.endings, strict=True):
            if compare and ending.reason == "length":
                self.compare([ending.output], [request.prompt], request.max_tokens)
        return played

    def encodes(self, identifiers: Sequence[str]) -> int:
        """How many items these are: every rank encodes, and all ranks the same items."""
        assert len(identifiers) % self.layout.ranks == 0, f"the ranks did not encode alike: {identifiers}"
        return len(identifiers) // self.layout.ranks

    def compare(self, outputs: Sequence[Output], prompts: Sequence[Prompt], max_tokens: int) -> None:
        expected = self._reference.outputs(self._like, prompts, max_tokens, self._dtype)
        for output, right, prompt in zip(outputs, expected, prompts, strict=True):
            assert output.equals(right), f"{prompt}: {output}, without the cache {right}"

    def forget(self, noticed: bool = False) -> None:
        """Empty vLLM's own encoder cache. vLLM does not notify the connector, which finds out when it is asked about an
        item that it believed cached; until then it looks for no such item in the tiers. `noticed`: make it find out.
        """
        if noticed:
            self.ask(SEEN)
        self.engine.do(Forget())
        if noticed:
            self.ask(SEEN)
            self.rest()

    # ---- the cache's contents and counts

    def statuses(self) -> list[dict[str, Any]]:
        """Statuses of all engines with this name: one per data-parallel rank, none if the cache is off."""
        return [status for status in engines() if status["engine"].startswith(self.name)]

    def status(self) -> dict[str, Any]:
        """The store process's status. Asked twice: the second answer covers all messages sent to it before the call."""
        self.statuses()
        [status] = self.statuses()
        return status

    def settle(self) -> bool:
        """Wait until the store process is idle; a request's passes then process its messages. Returns False."""
        wait_until("the store process is at rest", lambda: self.status()["jobs"] == 0)
        self.ask(NOTHING)
        return False

    def rest(self) -> None:
        """Wait until vLLM's workers sleep. They spin for a second after a step: with no more cores than workers, the
        store process gets no CPU time meanwhile, and requests wait half a second for one that does not answer.
        """
        workers = [pid for name, pid in self.engine.processes().items() if "Worker" in name]
        wait_until("the workers sleep", lambda: not any(_runs(pid) for pid in workers))

    def counts(self) -> dict[str, int]:
        self.settle()
        book: dict[str, int] = self.status()["book"]
        return book

    def left_over(self) -> dict[str, int]:
        """What is still held, but should not be, after a final text-only request."""
        held = ("reserved", "writing", "sealing", "filling", "orphaned")
        names = [f"places_{state}" for state in held] + [
            "pins",
            "leases",
            "orders",
            "fetches_under_way",
            "staged",
            "requests",
        ]
        names += ["dirty_bytes", "filling_bytes", "leased_bytes", "unwritten"]
        counts = self.counts()
        return {name: counts[name] for name in names if counts[name]}

    def files(self) -> list[Path]:
        return sorted(self.disk.rglob("*.safetensors"))

    def scanned(self) -> None:
        wait_until("the folder is scanned", lambda: self.status()["scan_complete"])

    # ---- what the kernel reports

    def processes(self) -> dict[str, int]:
        """vLLM's processes by title, and the "store" process."""
        return {**self.engine.processes(), "store": self.status()["pid"]}

    def descriptors(self) -> dict[str, list[str]]:
        """For each process the kinds and targets of its descriptors, sorted; see `described`."""
        sockets = socket_kinds()
        return {name: described(pid, sockets) for name, pid in self.processes().items()}

    def threads(self) -> dict[str, int]:
        return {name: len(os.listdir(f"/proc/{pid}/task")) for name, pid in self.processes().items()}

    def arenas(self) -> dict[int, int]:
        """Resident bytes of each arena, by inode, that any of the engine's processes has open or mapped."""
        found: dict[int, int] = {}
        for pid in self.processes().values():
            for link in Path(f"/proc/{pid}/fd").iterdir():
                if _target(link).startswith(ARENA):
                    found[link.stat().st_ino] = link.stat().st_blocks * 512
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if ARENA in line:
                    found.setdefault(int(line.split()[4]), 0)
        return found


def described(pid: int, sockets: Mapping[str, str]) -> list[str]:
    """Targets of a process's descriptors: paths as they are, a socket as its kind, others without their numbers."""
    targets = [_target(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    return sorted(sockets.get(target, target.split(":[")[0]) for target in targets if target)


def socket_kinds() -> dict[str, str]:
    """ "socket:[inode]" -> kind. "unix seqpacket" sockets are the cache's links; vLLM has none."""
    found = {}
    types = {"0001": "unix stream", "0002": "unix datagram", "0005": "unix seqpacket"}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        found[f"socket:[{fields[6]}]"] = types[fields[4]]
    for family in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            found[f"socket:[{line.split()[9]}]"] = family
    return found


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "R"


def _target(link: Path) -> str:
    """Target of the link; empty if the descriptor was closed meanwhile."""
    try:
        return os.readlink(link)
    except OSError:
        return ""
