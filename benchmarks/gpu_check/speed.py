# SPDX-License-Identifier: Apache-2.0
"""The cost of copies, as ratios in one run: to a bare pinned copy, and to the same work without any copy.

Times on the card are taken by events, behind a hold that lets everything be queued first, since a launch costs the
host the same for both. Host times are those of the thread that runs the forward pass.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.card import Card
from benchmarks.gpu_check.correctness import Plan
from benchmarks.gpu_check.payload import output, spec_of
from benchmarks.gpu_check.report import Figure
from benchmarks.gpu_check.rig import MIB, Rig
from lmcache_ec.adapters.vllm.copier import DeviceCopier
from lmcache_ec.arena import GRANULE_BYTES
from lmcache_ec.entry import TensorSpec

_LARGE_MB = 16.0
"""From this size on a copy is compared with its floor by ratio, below it by microseconds."""

_HOLD_S = 0.002
_SAVED_MB = 2.75


@dataclass(frozen=True)
class Effort:
    """How much is measured. `step_s` is the duration of a step of the matrix loop on the card."""

    samples: int = 30
    steps: int = 300
    step_s: float = 0.008
    growth_bytes: int = 1 << 30
    wait_s: float = 1.0
    tower_bytes: int = 1 << 30


def run(plan: Plan, effort: Effort, say: Callable[[str], None]) -> list[Figure]:
    figures: list[Figure] = []
    for measure in (copies, hooks, beside_the_model, the_thread_that_waits, memory, weights):
        say(measure.__name__.replace("_", " "))
        figures += measure(plan, effort)
    return figures


# ---- a copy against its floor


def copies(plan: Plan, effort: Effort) -> Iterable[Figure]:
    """Save and load of one entry, on the card; the floor is a copy of as many bytes of torch's own pinned memory."""
    with Rig.local(plan.card, plan.room) as rig:
        for megabytes in plan.megabytes:
            name = f"timed {megabytes}"
            source = output(plan.card, name, spec_of(megabytes))
            rig.save({name: source})
            rig.settle()
            for way, (ours, floor) in _copy_times(plan.card, rig, name, source, effort.samples).items():
                yield _against(f"{way} {megabytes:g} MB", ours, floor, megabytes)
            rig.cache.book.forget(rig.live(name))


def _copy_times(
    card: Card, rig: Rig, name: str, source: torch.Tensor, samples: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Milliseconds for save and load: ours and the floor's, measured in turn."""
    stored, pinned = rig.stored(name), torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    copier, bare = rig.rank.copier, _Bare(card)
    times: dict[str, tuple[list[float], list[float]]] = {"save": ([], []), "load": ([], [])}
    for _ in range(samples):
        times["save"][0].append(_on_card(card, lambda start: _save(copier, source, stored)))
        times["save"][1].append(_on_card(card, lambda start: bare.copy(start, pinned, source)))
        times["load"][0].append(_on_card(card, lambda start: _load(copier, start, stored)))
        times["load"][1].append(_on_card(card, lambda start: bare.copy(start, source, pinned)))
    return times


def _against(name: str, ours: list[float], floor: list[float], megabytes: float) -> Figure:
    mine, bare = statistics.median(ours), statistics.median(floor)
    of = f"{mine * 1e3:.1f} us, a pinned copy {bare * 1e3:.1f} us"
    if megabytes >= _LARGE_MB:
        return Figure(name, mine / bare if bare else None, "x", 1.05, of)
    return Figure(name, (mine - bare) * 1e3, "us more", 30.0, of)


class _Bare:
    """A pinned copy on a separate stream."""

    def __init__(self, card: Card) -> None:
        self._cuda = card.cuda
        self._stream = card.cuda.Stream(card.device)

    def copy(self, start: Any, destination: torch.Tensor, source: torch.Tensor) -> Any:
        self._stream.wait_event(start)
        with self._cuda.stream(self._stream):
            destination.copy_(source, non_blocking=True)
        return self._stream


def _save(copier: DeviceCopier, source: torch.Tensor, stored: torch.Tensor) -> Any:
    copier.save(source, stored)
    copier.finish(_nothing)
    return copier.stream


def _load(copier: DeviceCopier, start: Any, stored: torch.Tensor) -> Any:
    copier.stream.wait_event(start)
    copier.load(stored)
    copier.finish(_nothing)
    return copier.stream


def _nothing() -> None:
    pass


def _on_card(card: Card, enqueue: Callable[[Any], Any]) -> float:
    """Milliseconds from an event on the model's stream to the end of what `enqueue(event)` queues on its stream."""
    start, end = card.event(), card.event()
    card.hold(_HOLD_S)
    start.record(card.stream())
    end.record(enqueue(start))
    card.cuda.synchronize()
    taken: float = start.elapsed_time(end)
    return taken


# ---- the forward thread


def hooks(plan: Plan, effort: Effort) -> Iterable[Figure]:
    """Time of the forward pass's thread in our hooks, one item per step: bind, load or save, finish."""
    with Rig.local(plan.card, plan.room) as rig:
        for megabytes in plan.megabytes:
            for way, seconds in _hook_times(plan.card, rig, spec_of(megabytes), effort.samples).items():
                of = f"p99 {_p99(seconds) * 1e6:.0f} us of the forward thread"
                yield Figure(f"hooks, {way} {megabytes:g} MB", statistics.median(seconds) * 1e6, "us", 60.0, of)


def _hook_times(card: Card, rig: Rig, spec: TensorSpec, samples: int) -> dict[str, list[float]]:
    name, taken = f"hooked {spec.rows}", dict[str, list[float]](save=[], load=[])
    source = output(card, name, spec)
    for _ in range(samples):
        saving = rig.save_orders({name: spec})
        taken["save"].append(_timed(partial(rig.step, saving, {name: source})))
        rig.settle()
        loading = rig.load_orders([name])
        rig.rank.cache.clear()
        taken["load"].append(_timed(partial(rig.step, loading, {})))
        rig.settle()
        rig.cache.book.forget(rig.live(name))
    return taken


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# ---- while a model runs


@dataclass
class _Loop:
    """A forward pass: as many matrix products as take `step_s` on the card. The host runs two steps ahead."""

    card: Card
    step_s: float
    size: int = 4096
    products: int = 1
    _factor: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._factor = self.card.empty(self.size, self.size, torch.bfloat16).fill_(0.01)
        self._product = torch.empty_like(self._factor, device=self.card.device)
        while statistics.median(self.run(5)) < self.step_s * 1e3 and self.products < 4096:
            self.products *= 2

    def run(self, steps: int, beside: Callable[[int], None] | None = None) -> list[float]:
        """Milliseconds of each step on the card; `beside` is called at the start of each."""
        ends = [self.card.event() for _ in range(steps + 1)]
        ends[0].record(self.card.stream())
        for step in range(steps):
            if beside is not None:
                beside(step)
            for _ in range(self.products):
                torch.mm(self._factor, self._factor, out=self._product)
            ends[step + 1].record(self.card.stream())
            ends[max(0, step - 1)].synchronize()
        self.card.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in itertools.pairwise(ends)]


def beside_the_model(plan: Plan, effort: Effort) -> Iterable[Figure]:
    """A loop of matrix products: alone, with a save and a load in every step, and during growth of the arena."""
    card, spec = plan.card, spec_of(_SAVED_MB)
    loop = _Loop(card, effort.step_s, 4096 if effort.step_s >= 0.005 else 256)
    alone = loop.run(effort.steps)
    with Rig.local(card, plan.room) as rig:
        outputs = {f"beside {number}": output(card, f"beside {number}", spec) for number in range(8)}
        for name, tensor in outputs.items():
            rig.save({name: tensor})
            rig.settle()

        def copy(step: int) -> None:
            name, again = f"beside {step % 8}", f"again {step % 8}"
            rig.drain()
            if rig.cache.book.live(again):
                rig.cache.book.forget(rig.live(again))
            rig.rank.cache.clear()
            orders = rig.save_orders({again: spec}, all_of_them=False)
            orders.loads = rig.load_orders([name]).loads
            rig.step(orders, {again: outputs[name]})

        copying = loop.run(effort.steps, copy)
    growing, grown = _growing(loop, plan, effort, spec)
    alone += loop.run(effort.steps)
    base = _p99(alone)
    of = f"p99 of a step of {statistics.median(alone):.2f} ms; alone {base:.3f} ms"
    yield Figure("a step beside copies", _p99(copying) / base, "x", 1.05, of)
    yield Figure("a step beside growth", _p99(growing) / base, "x", 1.05, of)
    stall = max(growing) - statistics.median(alone)
    yield Figure("the longest stall by growth", stall, "ms", None, f"{grown / MIB:.0f} MiB registered meanwhile")


def _growing(loop: _Loop, plan: Plan, effort: Effort, spec: TensorSpec) -> tuple[list[float], int]:
    card, sources = plan.card, [output(plan.card, f"source {number}", spec) for number in range(4)]
    with Rig.local(card, effort.growth_bytes) as rig:
        before = rig.cache.snapshot()["opened_bytes"]

        def grow(step: int) -> None:
            rig.drain()
            rig.rank.cache.clear()
            name = f"growing {step}"
            rig.step(rig.save_orders({name: spec}, all_of_them=False), {name: sources[step % 4]})

        times = loop.run(effort.steps, grow)
        rig.settle()
        return times, rig.cache.snapshot()["opened_bytes"] - before


def the_thread_that_waits(plan: Plan, effort: Effort) -> Iterable[Figure]:
    """Processor time of the copy thread while it waits for a busy card. A spinning thread would use a full core."""
    name, spec = "waited for", spec_of(_SAVED_MB)
    with Rig.local(plan.card, plan.room) as rig:
        source, thread = output(plan.card, name, spec), rig.rank.copier.thread
        before = _processor_s(thread.native_id)
        plan.card.hold(effort.wait_s)
        began = time.perf_counter()
        rig.save({name: source})
        rig.settle()
        waited = time.perf_counter() - began
        used = _processor_s(thread.native_id) - before
    yield Figure("processor time of the copy thread", used / waited, "of a core", 0.05, f"{waited:.2f} s of waiting")


def _processor_s(thread: int | None) -> float:
    fields = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- memory


def memory(plan: Plan, effort: Effort) -> Iterable[Figure]:
    """Resident bytes of the arena, compared with the bytes stored in it."""
    spec = spec_of(_SAVED_MB)
    with Rig.local(plan.card, effort.growth_bytes) as rig:
        at_first, granule = rig.resident / MIB, GRANULE_BYTES / MIB
        yield Figure("resident at the start", at_first, "MiB", granule, "registered before anything is stored")
        source = output(plan.card, "stored", spec)
        for number in range(int(effort.growth_bytes / 3 / spec.nbytes)):
            rig.save({f"stored {number}": source})
            rig.rank.cache.clear()
            rig.drain()
        rig.settle()
        now = rig.cache.snapshot()
        bar = (2.5 * now["used_bytes"] + GRANULE_BYTES) / now["live_bytes"]
        of = f"{now['live_bytes'] / MIB:.0f} MiB stored, {now['opened_bytes'] / MIB:.0f} MiB registered"
        yield Figure("resident by stored", rig.resident / now["live_bytes"], "x", bar, of)


# ---- the weights


def weights(plan: Plan, effort: Effort) -> Iterable[Figure]:
    """The digest of a tower's parameters on the card, which reveals whether weights have changed.

    `tensor_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str`
    """
    name = "digest of a tower's weights"
    try:
        from lmcache_ec.adapters.vllm.tensor_digest import tensor_digest
    except ImportError:
        yield Figure(name, None, "GB/s", None, "there is no such function in this version")
        return
    width = 4096
    rows = max(1, effort.tower_bytes // 16 // width // 2)
    parameters = [(f"layer {n}", plan.card.empty(rows, width, torch.bfloat16).fill_(n)) for n in range(16)]
    tensor_digest(parameters)
    seconds = statistics.median(_timed(lambda: tensor_digest(parameters)) for _ in range(5))
    size = sum(tensor.nbytes for _, tensor in parameters)
    yield Figure(name, size / seconds / 1e9, "GB/s", None, f"{size / 1e9:.2f} GB in {seconds * 1e3:.1f} ms")


def _p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]
