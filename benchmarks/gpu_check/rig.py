# SPDX-License-Identifier: Apache-2.0
"""An engine's cache without the engine: a real scheduler side and store process, and ranks on the card.

A step runs as in vLLM: orders from the scheduler side, loads, encodes, saves, and a report once the copies are over.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import torch

from benchmarks.gpu_check.card import Card
from benchmarks.gpu_check.payload import bytes_of, spec_of_tensor
from lmcache_ec.adapters.vllm.copier import DeviceCopier
from lmcache_ec.adapters.vllm.orders import Load, Orders, Save
from lmcache_ec.adapters.vllm.tensors import view
from lmcache_ec.adapters.vllm.topology import SAVING_RANK
from lmcache_ec.adapters.vllm.worker import WorkerSide
from lmcache_ec.cache import EncoderCache
from lmcache_ec.config import EncoderCacheConfig
from lmcache_ec.engine import Engine
from lmcache_ec.entry import TensorSpec, entry_length, room
from lmcache_ec.place import Place
from lmcache_ec.rank import LINGER_S

MIB = 1 << 20
PATIENCE_S = 60.0
_LARGEST_ENTRY_BYTES = 8 << 30
"""As for the largest models: the amount of memory registered must not depend on it."""

_logger = logging.getLogger("lmcache_ec.gpu_check")


class Rank(Protocol):
    """One worker of the rig."""

    def step(self, orders: Orders, outputs: Mapping[str, torch.Tensor]) -> None:
        """Carry out a step whose encoder returns `outputs`."""

    def loaded(self, identifier: str) -> torch.Tensor:
        """The bytes, on the host, of an item that a step has loaded."""

    def close(self) -> None: ...


class LocalRank:
    """A worker in this process. `cache` is vLLM's encoder cache."""

    def __init__(
        self,
        card: Card,
        engine: str,
        number: int = 0,
        copier: DeviceCopier | None = None,
        linger_s: float = LINGER_S,
    ) -> None:
        self.cache: dict[str, torch.Tensor] = {}
        self.copier = copier or DeviceCopier(card.device, card.cuda)
        self.worker = WorkerSide(number, self.copier, list, _logger)
        self.worker.start(engine, linger_s)

    def step(self, orders: Orders, outputs: Mapping[str, torch.Tensor]) -> None:
        self.worker.bind(orders)
        self.worker.load(self.cache)
        for identifier, tensor in outputs.items():
            self.cache[identifier] = tensor
            self.worker.save(self.cache, identifier)
        self.worker.finish_step()

    def loaded(self, identifier: str) -> torch.Tensor:
        return bytes_of(self.cache[identifier])

    @property
    def memory(self) -> Any:
        """This rank's mapping of the arena; None once it has been released."""
        rank = self.worker._rank
        return None if rank is None else rank.memory

    def close(self) -> None:
        self.worker.shutdown()


class Rig:
    """An engine's cache over an arena of `arena_bytes`, with `ranks` and, if given, a folder on disk."""

    def __init__(self, name: str, ranks: Sequence[Rank], arena_bytes: int, folder: Path | None = None) -> None:
        self.ranks = ranks
        keys = {"max_local_cpu_size": arena_bytes / (1 << 30), "start_timeout_s": PATIENCE_S, "drain_s": 5}
        config = EncoderCacheConfig.model_validate({**keys, "local_disk": folder})
        engine = Engine(name, "gpu-check", "gpu-check", len(ranks), _LARGEST_ENTRY_BYTES)
        self.cache = EncoderCache(config, engine)
        self._persist = folder is not None
        self._steps = 0

    @classmethod
    def local(cls, card: Card, arena_bytes: int, folder: Path | None = None, **rank: Any) -> Rig:
        """A rig with one rank, in this process."""
        name = uuid.uuid4().hex
        first = LocalRank(card, name, **rank)
        try:
            return cls(name, [first], arena_bytes, folder)
        except BaseException:
            first.close()
            raise

    @property
    def rank(self) -> LocalRank:
        """The first rank, which has to be a local one."""
        first = self.ranks[0]
        assert isinstance(first, LocalRank)
        return first

    # ---- steps

    def save(self, outputs: Mapping[str, torch.Tensor]) -> None:
        """A step that encodes. There has to be room for every output."""
        self.step(self.save_orders({name: spec_of_tensor(tensor) for name, tensor in outputs.items()}), outputs)

    def save_orders(self, specs: Mapping[str, TensorSpec], all_of_them: bool = True) -> Orders:
        orders = self._orders()
        for identifier, spec in specs.items():
            place = self._reserve(identifier, spec)
            if place is not None:
                self.cache.book.send_save(place, orders.step, SAVING_RANK)
                save = Save(place.id, place.offset, place.length, identifier, identifier, spec, place.dirty)
                orders.saves[identifier] = save
            elif all_of_them:
                raise RuntimeError(f"no room for {identifier}: {self.cache.snapshot()}")
        return orders

    def _reserve(self, identifier: str, spec: TensorSpec) -> Place | None:
        """A place, once the arena has grown enough for it. An engine would try again in a later step."""
        book = self.cache.book
        place = book.reserve_save(identifier, spec, self._persist)
        if place is None and book.growing:
            self.until("the arena has grown", lambda: not book.growing)
            place = book.reserve_save(identifier, spec, self._persist)
        return place

    def load(self, identifiers: Iterable[str]) -> None:
        """A step that loads live entries into every rank's cache."""
        self.step(self.load_orders(identifiers), {})

    def load_orders(self, identifiers: Iterable[str]) -> Orders:
        orders = self._orders()
        for identifier in identifiers:
            place = self.live(identifier)
            self.cache.book.pin(place)
            self.cache.book.send_load(place, orders.step)
            assert place.spec is not None
            orders.loads.append(Load(place.id, place.offset + room(identifier), identifier, place.spec, None))
        return orders

    def step(self, orders: Orders, outputs: Mapping[str, torch.Tensor]) -> None:
        for rank in self.ranks:
            rank.step(orders, outputs)

    def idle_step(self) -> None:
        """A step without orders, as most steps are."""
        self.step(Orders(), {})

    def _orders(self) -> Orders:
        self._steps += 1
        return Orders(self.cache.arena_id, self._steps, namespace=self.cache.namespace)

    # ---- what becomes of them

    def drain(self) -> None:
        """A scheduling pass."""
        self.cache.drain(time.monotonic())

    def settle(self) -> None:
        """Run passes until nothing is under way."""
        self.until("everything is settled", lambda: self.cache.book.settled)

    def until(self, what: str, condition: Any) -> None:
        deadline = time.monotonic() + PATIENCE_S
        self.drain()
        while not condition():
            if self.cache.inert:
                raise RuntimeError(f"the cache has gone inert: {self.cache.inert}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited {PATIENCE_S:.0f} s until {what}: {self.cache.snapshot()}")
            time.sleep(0.001)
            self.drain()

    def fetch(self, identifier: str, spec: TensorSpec) -> None:
        """Bring an entry from disk into the arena, as soon as there is room for it."""

        def arrived() -> bool:
            if self.cache.book.live(identifier) is None:
                self.cache.fetch(identifier, entry_length(identifier, spec), time.monotonic())
            return self.cache.book.live(identifier) is not None

        self.until(f"{identifier} has come from disk", arrived)

    def live(self, identifier: str) -> Place:
        place = self.cache.book.live(identifier)
        if place is None:
            raise RuntimeError(f"{identifier} is not in memory: {self.cache.snapshot()}")
        return place

    def stored(self, identifier: str) -> torch.Tensor:
        """The payload of a live entry, in the arena itself."""
        place = self.live(identifier)
        assert place.spec is not None
        return view(self.rank.memory, place.offset + room(identifier), place.spec)

    @property
    def resident(self) -> int:
        """Bytes of the arena that are resident in memory."""
        return os.fstat(self.cache._arena_fd).st_blocks * 512

    def close(self) -> None:
        self.cache.close()
        for rank in self.ranks:
            rank.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
