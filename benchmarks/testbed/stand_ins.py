# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the surroundings of the connector's delegates, vLLM's scheduler and runner; an engine of both sides."""

import pickle
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.testbed.waiting import wait_until
from lmcache_ec.adapters.vllm.copier import HostCopier
from lmcache_ec.adapters.vllm.encode_clock import EncodeClock
from lmcache_ec.adapters.vllm.identifiers import Naming, ensure_key, signed
from lmcache_ec.adapters.vllm.policy import Policy
from lmcache_ec.adapters.vllm.scheduler import SchedulerSide
from lmcache_ec.adapters.vllm.worker import WorkerSide
from lmcache_ec.cache import EncoderCache
from lmcache_ec.config import EncoderCacheConfig
from lmcache_ec.engine import Engine

if TYPE_CHECKING:
    import pytest

ensure_key()

WIDTH = 8
PATIENCE_S = 20.0
"""Deadline for things that should happen at once; on a busy machine they may take longer."""

SILENT: Any = SimpleNamespace(warning=lambda *_: None)
"""A logger that logs nothing."""


# ---- what vLLM passes to a connector


@dataclass(frozen=True)
class Position:
    offset: int
    length: int


@dataclass(frozen=True)
class Feature:
    """A multimodal input of a request; without `data` it is metadata only."""

    identifier: str
    mm_position: Position
    modality: str = "image"
    data: Any = "pixels"


@dataclass
class Request:
    request_id: str
    mm_features: list[Feature]
    num_preemptions: int = 0
    ec_transfer_params: Any = None
    trace_headers: dict[str, str] | None = None

    def get_num_encoder_embeds(self, index: int) -> int:
        return self.mm_features[index].mm_position.length


def digest(name: str) -> str:
    """An identifier in the form that vLLM derives from content."""
    return name.encode().hex().ljust(64, "0")


def request(name: str, *identifiers: str, rows: int = 4, modality: str = "image", data: Any = "pixels") -> Request:
    """A request whose items have `rows` tokens each and begin ten tokens apart. The front end signed all of them."""
    positions = [Position(10 * number, rows) for number in range(len(identifiers))]
    features = [Feature(i, p, modality, data) for i, p in zip(identifiers, positions, strict=True)]
    return Request(name, features, trace_headers=signed(None, identifiers, [True] * len(identifiers)))


def scheduler_output(meta: Any = None, encodes: dict[str, list[int]] | None = None, tokens: int = 1) -> Any:
    """The fields of vLLM's SchedulerOutput that a connector or the runners' EC code read."""
    return SimpleNamespace(
        scheduled_encoder_inputs=encodes if encodes is not None else {},
        num_scheduled_tokens={},
        total_num_scheduled_tokens=tokens,
        free_encoder_mm_hashes=[],
        finished_req_ids=set(),
        ec_connector_metadata=meta,
    )


def sent(output: Any) -> Any:
    """The output as a worker process receives it."""
    return pickle.loads(pickle.dumps(output))


class VllmScheduler:
    """Calls the scheduler side as vLLM's scheduler does, in the same order. `cached` is vLLM's own encoder cache."""

    def __init__(self, side: Any) -> None:
        self.side = side
        self.cached: set[str] = set()
        self._output = scheduler_output(tokens=0)

    def offer(self, request: Request, computed: int = 0, blocks: bool = True) -> str | None:
        """Try to schedule a request: None if it was deferred, else `load` or `encode` or neither, item by item.

        Without `blocks` the hooks are called, but then the request finds no room in the KV cache.
        """
        if not self.side.ensure_cache_available(request, computed):
            return None
        answers: dict[int, str] = {}
        asked = set(self.cached)
        for index, feature in enumerate(request.mm_features):
            if feature.identifier not in asked:
                asked.add(feature.identifier)
                answers[index] = "load" if self.side.has_cache_item(feature.identifier) else "encode"
        if blocks:
            for how in ("encode", "load"):
                for index in [index for index, answer in answers.items() if answer == how]:
                    self.cached.add(request.mm_features[index].identifier)
                    self.side.update_state_after_alloc(request, index)
            if encodes := [index for index, answer in answers.items() if answer == "encode"]:
                self._output.scheduled_encoder_inputs[request.request_id] = encodes
            self._output.num_scheduled_tokens[request.request_id] = 1
            self._output.total_num_scheduled_tokens += 1
        return " ".join(answers.values())

    def preempt(self, request: Request) -> None:
        """Take a request out of the step that has just scheduled it."""
        self._output.scheduled_encoder_inputs.pop(request.request_id, None)
        self._output.num_scheduled_tokens.pop(request.request_id)
        self._output.total_num_scheduled_tokens -= 1

    def evict(self, *identifiers: str) -> None:
        """vLLM evicts them from its own cache. The connector is notified at the end of the pass."""
        self.cached.difference_update(identifiers)
        self._output.free_encoder_mm_hashes.extend(identifiers)

    def end_pass(self, text: int = 0) -> Any:
        """Close the pass. `text` tokens are scheduled for requests without media. Returns the step for the runner."""
        output, self._output = self._output, scheduler_output(tokens=0)
        output.total_num_scheduled_tokens += text
        output.ec_connector_metadata = self.side.build_connector_meta(output)
        return output


def embedding(identifier: str, rows: int = 4) -> torch.Tensor:
    """Output of the stand-in encoder for an item: always the same, and different for each item."""
    generator = torch.Generator().manual_seed(sum(identifier.encode()) * 1000 + rows)
    return torch.randn(rows, WIDTH, generator=generator)


class Encoder:
    """Takes `seconds` per item by its own clock, and almost no real time: on a busy machine real times are
    unpredictable."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._passed_s = 0.0

    def __call__(self, identifier: str, rows: int) -> torch.Tensor:
        self._passed_s += self._seconds
        return embedding(identifier, rows)

    def clock(self) -> EncodeClock:
        """A clock that shows what it took."""
        return EncodeClock(lambda: Moment(lambda: self._passed_s))


class Moment:
    """Like a device's event: `now` is read when it is recorded."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._at = 0.0

    def record(self) -> None:
        self._at = self._now()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Moment") -> float:
        return (end._at - self._at) * 1e3


class Runner:
    """One rank's model runner around a real worker side: loads, encodes, saves, in vLLM's order."""

    def __init__(self, engine: str) -> None:
        self.worker = WorkerSide(0, HostCopier(), list, SILENT)
        self.worker.start(engine)
        self.cache: dict[str, torch.Tensor] = {}
        self.encoded: list[str] = []
        self.encode: Callable[[str, int], torch.Tensor] = embedding

    def encode_with(self, encoder: Encoder) -> None:
        self.encode, self.worker._clock = encoder, encoder.clock()

    def run(self, output: Any, *requests: Request) -> None:
        """A step. Steps without tokens reach no hook, as on the V1 runner."""
        output = sent(output)
        for identifier in output.free_encoder_mm_hashes:
            self.cache.pop(identifier, None)
        if not output.total_num_scheduled_tokens:
            return
        self.worker.bind(output.ec_connector_metadata)
        self.worker.encode_again()
        self.worker.retry_saves(self.cache)
        self.worker.load(self.cache)
        self.worker.begin_encodes()
        by_name = {request.request_id: request for request in requests}
        items = [(name, index) for name, indices in output.scheduled_encoder_inputs.items() for index in indices]
        features = [by_name[name].mm_features[index] for name, index in items]
        made = [self.encode(feature.identifier, feature.mm_position.length) for feature in features]
        for feature, tensor in zip(features, made, strict=True):
            self.encoded.append(feature.identifier)
            self.cache[feature.identifier] = tensor
            self.worker.save(self.cache, feature.identifier)
        self.worker.finish_step()


class Clock:
    """Replaces `time` in a module until the end of the test: it stands still until the test moves it."""

    def __init__(self, module: ModuleType, patch: "pytest.MonkeyPatch") -> None:
        self.now = time.monotonic()
        patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))


# ---- an engine's two sides


NOTHING_HELD = (
    "places_reserved",
    "places_writing",
    "places_sealing",
    "places_filling",
    "pins",
    "leases",
    "orders",
    "staged",
)


class Served:
    """A real scheduler side over a real cache and store process, with a real worker side of one rank."""

    def __init__(
        self,
        folder: Path | None,
        arena_bytes: int = 1 << 20,
        runner: Any = None,
        name: str = "",
        announcer: Any = None,
        watched: bool = False,
        persist_updated_weights: Any = False,
        remotes: Sequence[str] = (),
        keys: dict[str, Any] | None = None,
        **policy: Any,
    ) -> None:
        """`runner` replaces the `Runner`; it serves the engine `name`, and if `watched` it reports its weights.

        `keys` are further configuration keys of the cache.
        """
        name = name or uuid.uuid4().hex
        self.name = name
        self.runner: Any = runner or Runner(name)
        own = {"max_local_cpu_size": arena_bytes / (1 << 30), "persist_updated_weights": persist_updated_weights}
        patience = {"load_deadline_ms": round(PATIENCE_S * 1000), "blocking_timeout_secs": PATIENCE_S}
        own |= {"load_policy": "always", "remotes": list(remotes), **patience, **(keys or {})}
        config = EncoderCacheConfig(local_disk=folder, drain_s=5, **own)
        try:
            saves = policy.get("producer", True)
            self.cache = EncoderCache(config, Engine(name, "tests", "tests", 1, 1 << 20, saves, watched))
        except BaseException:
            self.runner.worker.shutdown()
            raise
        defaults: dict[str, Any] = {
            "producer": True,
            "consumer": True,
            "window": 1000,
            "dtype": "F32",
            "widths": {"image": WIDTH},
            "deadline_s": PATIENCE_S,
            "start_timeout_s": PATIENCE_S,
            "naming": Naming(),
        }
        media: Any = SimpleNamespace(encodable=lambda feature: feature.data is not None)
        self.side = SchedulerSide(self.cache, Policy(**{**defaults, **policy}), media, SILENT, announcer)
        self.vllm = VllmScheduler(self.side)

    def ready(self) -> "Served":
        self.until("the cache is ready", lambda: self.cache.ready and self._scanned())
        return self

    def _scanned(self) -> bool:
        """Remotes that answer quickly are queried, and never listed."""
        presence, disk = self.cache.below.presence, "disk" in self.cache.below.names
        return presence is not None and (presence.complete("disk") if disk else presence.all_complete)

    def until(self, what: str, condition: Callable[[], object]) -> None:
        """Run passes with only text until `condition` holds."""
        wait_until(what, condition, PATIENCE_S, doing=self.step)

    def stage(self, request: Request) -> None:
        """Run passes until the request, which has nothing to encode, can be scheduled in the current one."""
        self.until(f"{request.request_id} can go", lambda: self.side.ensure_cache_available(request, 0))

    def step(self, *requests: Request, text: int = 1) -> None:
        """Close the pass and run it."""
        self.runner.run(self.vllm.end_pass(text), *requests)

    def schedule(self, request: Request, computed: int = 0) -> str:
        """Run passes and their steps until the request has been scheduled."""
        answers: list[str | None] = []

        def offered() -> bool:
            answers.append(self.vllm.offer(request, computed))
            self.step(request)
            return answers[-1] is not None

        wait_until(f"{request.request_id} is scheduled", offered, PATIENCE_S)
        return str(answers[-1])

    def store(self, *identifiers: str, rows: int = 4) -> None:
        """Put entries into the arena (and on disk, where allowed) that vLLM's own cache does not hold."""
        first = request(f"first-{uuid.uuid4().hex}", *identifiers, rows=rows)
        self.schedule(first)
        self.side.request_finished(first)
        self.settle()
        self.vllm.evict(*identifiers)
        self.step()

    def settle(self) -> dict[str, int]:
        """Run passes with only text until nothing is under way. Returns the counts."""
        self.until("nothing is on its way", lambda: self.cache.book.settled)
        counts: dict[str, int] = self.side.snapshot()
        return counts

    def held(self) -> dict[str, int]:
        """What is still held once nothing is under way: empty unless something leaks."""
        counts = self.settle()
        names = (*NOTHING_HELD, "fetches_under_way", "requests")
        return {name: counts[name] for name in names if counts[name]}

    def close(self) -> None:
        self.side.shutdown()
        self.runner.worker.shutdown()
