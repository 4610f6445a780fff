# SPDX-License-Identifier: Apache-2.0
"""Checks that the cache returns what was put in, whatever happens during the copies. Every byte is compared."""

from __future__ import annotations

import mmap
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu_check.card import Card
from benchmarks.gpu_check.child import ChildRank
from benchmarks.gpu_check.payload import DTYPES, bytes_of, difference, output, spec_of
from benchmarks.gpu_check.report import Check
from benchmarks.gpu_check.rig import MIB, LocalRank, Rank, Rig
from lmcache_ec.adapters.vllm.copier import DeviceCopier
from lmcache_ec.arena import GRANULE_BYTES
from lmcache_ec.entry import EntryError, TensorSpec, verify
from lmcache_ec.key import EncoderCacheKey

_LINGER_S = 0.5


@dataclass(frozen=True)
class Plan:
    """Sizes in 10^6 bytes; `large` is large enough that its copy is still under way when something else happens."""

    card: Card
    folder: Path
    megabytes: tuple[float, ...] = (0.5, 2.75, 16.0, 33.5, 134.0)
    large: float = 134.0
    repeats: int = 5

    @property
    def room(self) -> int:
        """Bytes of an arena with room for a few of the largest entries."""
        return int(4 * max(*self.megabytes, self.large) * 1e6) + 4 * GRANULE_BYTES


class Wrong(AssertionError):
    """A check found wrong bytes or a wrong state."""


def run(plan: Plan, say: Callable[[str], None]) -> list[Check]:
    found = []
    for check in CHECKS:
        name = check.__name__.replace("_", " ")
        say(name)
        began = time.monotonic()
        try:
            check(plan)
            wrong = ""
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        found.append(Check(name, wrong, round(time.monotonic() - began, 2)))
    return found


def every_size_in_bf16_and_fp32(plan: Plan) -> None:
    with Rig.local(plan.card, plan.room) as rig:
        for dtype in DTYPES:
            for megabytes in plan.megabytes:
                name, spec = f"{megabytes} {dtype}", spec_of(megabytes, dtype)
                rig.save({name: output(plan.card, name, spec)})
                rig.settle()
                _same(rig, {name: spec})
                rig.cache.book.forget(rig.live(name))


def views_of_a_batch_that_is_freed_at_once(plan: Plan) -> None:
    """vLLM's encoder returns rows of one tensor; once nothing references it, the next operation reuses its memory."""
    spec = spec_of(min(plan.large, 33.5))
    with Rig.local(plan.card, plan.room) as rig:
        for repeat in range(plan.repeats):
            names = [f"{repeat} {number}" for number in range(4)]
            batch = plan.card.empty(4 * spec.rows, spec.width, torch.bfloat16)
            for number, name in enumerate(names):
                batch[number * spec.rows : (number + 1) * spec.rows].copy_(output(plan.card, name, spec))
            shares = {name: batch[n * spec.rows : (n + 1) * spec.rows] for n, name in enumerate(names)}
            rig.save(shares)
            rig.rank.cache.clear()
            shares.clear()
            del batch
            plan.card.empty(4 * spec.rows, spec.width, torch.bfloat16).fill_(0)
            rig.settle()
            _same(rig, dict.fromkeys(names, spec))
            for name in names:
                rig.cache.book.forget(rig.live(name))


def a_source_overwritten_by_the_step_after(plan: Plan) -> None:
    with Rig.local(plan.card, plan.room) as rig:
        for repeat in range(plan.repeats):
            name, spec = f"overwritten {repeat}", spec_of(plan.large)
            source = output(plan.card, name, spec)
            rig.save({name: source})
            rig.idle_step()
            source.fill_(0)
            rig.settle()
            _same(rig, {name: spec})
            rig.cache.book.forget(rig.live(name))


def a_place_is_not_reused_while_a_copy_of_it_runs(plan: Plan) -> None:
    """An entry is forgotten in mid-load, in an arena without other room, while the store process wants to fill it."""
    spec = spec_of(plan.large)
    with Rig.local(plan.card, spec.nbytes + MIB, plan.folder / "reused") as rig:
        for name in ("old", "new"):
            rig.save({name: output(plan.card, name, spec)})
            rig.settle()
            rig.cache.book.forget(rig.live(name))
        for _ in range(plan.repeats):
            rig.fetch("old", spec)
            rig.rank.cache.clear()
            rig.load(["old"])
            rig.cache.book.forget(rig.live("old"))
            rig.fetch("new", spec)
            if wrong := difference(rig.rank.loaded("old"), "old", spec):
                raise Wrong(wrong)
            _same(rig, {"new": spec})
            rig.cache.book.forget(rig.live("new"))


def two_ranks_on_one_card(plan: Plan) -> None:
    with _with_child(plan, 1) as rig:
        specs = {f"shared {megabytes}": spec_of(megabytes) for megabytes in plan.megabytes}
        for name, spec in specs.items():
            rig.save({name: output(plan.card, name, spec)})
        rig.settle()
        rig.rank.cache.clear()
        rig.load(specs)
        rig.settle()
        for name, spec in specs.items():
            for number, rank in enumerate(rig.ranks):
                if wrong := difference(rank.loaded(name), name, spec):
                    raise Wrong(f"rank {number}, {wrong}")


def engines_that_are_abandoned_in_the_process_of_the_next(plan: Plan) -> None:
    """Their workers are not shut down: they release their memory a while after the link has ended."""
    spec, abandoned = spec_of(2.75), list[LocalRank]()
    for number in range(3):
        rig = Rig.local(plan.card, 2 * GRANULE_BYTES, linger_s=_LINGER_S)
        rig.save({"picture": output(plan.card, "picture", spec)})
        rig.settle()
        _same(rig, {"picture": spec})
        if not rig.cache.book.opened:
            raise Wrong(f"engine {number} has nothing registered")
        rig.cache.close()
        abandoned.append(rig.rank)
    deadline = time.monotonic() + 10
    while any(rank.memory is not None for rank in abandoned):
        if time.monotonic() > deadline:
            raise Wrong("an abandoned engine's arena is still mapped")
        time.sleep(0.01)
    for rank in abandoned:
        rank.close()


def memory_that_the_device_does_not_register(plan: Plan) -> None:
    """Refused at first: copies use pageable memory. Refused later: the arena is limited to the registered part."""
    spec = spec_of(2.75)
    names = [f"refused {number}" for number in range(20)]
    for refused_from in (0, 1):
        copier = Refusing(plan.card, refused_from)
        with Rig.local(plan.card, 4 * GRANULE_BYTES, copier=copier) as rig:
            for name in names:
                rig.save({name: output(plan.card, name, spec)})
                rig.settle()
                _same(rig, {name: spec})
            if not copier.refused:
                raise Wrong("nothing was refused")
            held = rig.cache.snapshot()["opened_bytes"]
            if held != (GRANULE_BYTES if refused_from else 4 * GRANULE_BYTES):
                raise Wrong(f"{held} bytes of the arena are in use")


def a_worker_killed_in_a_copy(plan: Plan) -> None:
    """No torn entry is ever written, and the next engine finds those that are whole."""
    spec, whole = spec_of(plan.large), dict[str, TensorSpec]()
    folder = plan.folder / "killed"
    for repeat in range(2):
        name = uuid.uuid4().hex
        child = ChildRank(plan.card.opener, name, 0)
        rig = Rig(name, [child], plan.room, folder)
        specs = {f"killed {repeat} {number}": spec for number in range(2)}
        child.encode(rig.save_orders(specs), specs)
        child.kill()
        rig.cache.close()
        whole |= specs
    _wait_for_quiet(folder)
    with Rig.local(plan.card, plan.room, folder) as rig:
        for name, each in whole.items():
            file = folder / EncoderCacheKey("gpu-check", name).object_name
            if file.exists():
                data = file.read_bytes()
                try:
                    verify(memoryview(data), EncoderCacheKey("gpu-check", name))
                except EntryError as error:
                    raise Wrong(f"a torn entry is on disk: {error}") from None
                if wrong := difference(_payload(data, each), name, each):
                    raise Wrong(f"on disk, {wrong}")
        rig.save({"after": output(plan.card, "after", spec)})
        rig.settle()
        _same(rig, {"after": spec})


CHECKS: tuple[Callable[[Plan], None], ...] = (
    every_size_in_bf16_and_fp32,
    views_of_a_batch_that_is_freed_at_once,
    a_source_overwritten_by_the_step_after,
    a_place_is_not_reused_while_a_copy_of_it_runs,
    two_ranks_on_one_card,
    engines_that_are_abandoned_in_the_process_of_the_next,
    memory_that_the_device_does_not_register,
    a_worker_killed_in_a_copy,
)


class Refusing(DeviceCopier):
    """The device refuses all granules but the first few, because the others are already registered when it is asked."""

    def __init__(self, card: Card, refused_from: int) -> None:
        super().__init__(card.device, card.cuda)
        self._card = card
        self._left = refused_from
        self.refused = 0

    def register(self, memory: mmap.mmap, offset: int, length: int) -> str:
        self._left -= 1
        if self._left >= 0:
            return str(super().register(memory, offset, length))
        address = torch.frombuffer(memory, dtype=torch.uint8, count=length, offset=offset).data_ptr()
        runtime = self._card.cuda.cudart()
        with self._card.cuda.device(self._card.device):
            runtime.cudaHostRegister(address, length, 0)
            problem = str(super().register(memory, offset, length))
            runtime.cudaHostUnregister(address)
        self.refused += bool(problem)
        return problem


def _same(rig: Rig, specs: dict[str, TensorSpec]) -> None:
    """Compare the entries in the arena, and the tensors loaded from them."""
    for name, spec in specs.items():
        if wrong := difference(bytes_of(rig.stored(name)), name, spec):
            raise Wrong(f"in memory, {wrong}")
    rig.rank.cache.clear()
    rig.load(specs)
    for name, spec in specs.items():
        if wrong := difference(rig.rank.loaded(name), name, spec):
            raise Wrong(f"loaded, {wrong}")
    rig.settle()


def _payload(data: bytes, spec: TensorSpec) -> torch.Tensor:
    return torch.frombuffer(bytearray(data[len(data) - spec.nbytes :]), dtype=torch.uint8)


def _wait_for_quiet(folder: Path) -> None:
    """Wait until writers of engines that have ended no longer write to the folder."""
    deadline, seen = time.monotonic() + 30, -1
    while time.monotonic() < deadline:
        now = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        if now == seen:
            return
        seen = now
        time.sleep(0.5)


@contextmanager
def _with_child(plan: Plan, number: int) -> Iterator[Rig]:
    """Two ranks: the first in this process, the other in its own process."""
    name = uuid.uuid4().hex
    child = ChildRank(plan.card.opener, name, number)
    ranks: list[Rank] = [LocalRank(plan.card, name), child]
    try:
        with Rig(name, ranks, plan.room) as rig:
            yield rig
    finally:
        child.kill()
