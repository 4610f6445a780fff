# SPDX-License-Identifier: Apache-2.0
"""A rank's side of the connector: copies between the arena and vLLM's encoder cache, and nothing else."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, MutableMapping

import torch

from lmcache_ec.arena import within
from lmcache_ec.channel import Outcome, Saved
from lmcache_ec.complaints import Complaints
from lmcache_ec.entry import room
from lmcache_ec.rank import LINGER_S, Rank

from .copier import Copier
from .encode_clock import EncodeClock
from .orders import Load, Orders, Save
from .tensors import dtype_name, view
from .topology import SAVING_RANK
from .weights import EncoderWeights

EncoderTensors = MutableMapping[str, torch.Tensor]
"""vLLM's own encoder cache: a dictionary, or any object that takes a tensor by item assignment."""

Agree = Callable[[list[bool]], list[bool]]
"""For each value, whether it is true on any rank. Every rank calls it with the same number of values."""


_OUTDATED = "the encoder's weights have changed since this was decided"


class WorkerSide:
    """One rank of the first pipeline stage. Runs in the worker process, in its forward pass: no I/O, and no wait other
    than a producer's (`producer_flush_s`).

    The only thing ranks do together is agree: on failed loads, in steps that load, since the encoder's collectives
    would hang if only one rank encoded an item; and on having other weights, in steps that check them.
    """

    def __init__(
        self,
        rank: int,
        copier: Copier,
        agree: Agree,
        logger: logging.Logger,
        producer_flush_s: float = 0.0,
        clock: EncodeClock | None = None,
    ) -> None:
        """`producer_flush_s`, 0 except for a producer: how long a step that saves may wait until its entries are
        durable, because vLLM's response announces to consumers that they can fetch them."""
        self._flush_s = producer_flush_s
        self._number = rank
        self._copier = copier
        self._agree = agree
        self._logger = logger
        self._complaints = Complaints(logger)
        self._clock = clock or EncodeClock()
        self._planned = 0  # items to encode in this step
        self.weights: EncoderWeights | None = None
        """The weights of this rank's encoder, if they are watched."""
        self._outdated = False  # whether this step was prepared for other weights
        self._rank: Rank | None = None
        self._meta: Orders | None = None
        self._outcomes: list[tuple[int, Outcome]] = []
        self._copied: list[Save] = []
        self._load_ns = self._save_ns = 0

    def start(self, engine: str, linger_s: float = LINGER_S) -> None:
        """Start listening for the scheduler side. Raises OSError if another process holds this rank's address."""
        self._rank = Rank(engine, self._number, self._copier, linger_s)

    def watch_weights(self, model: torch.nn.Module) -> None:
        """From now on report the weights of the encoder of `model`, which was just loaded, to the scheduler side."""
        if self._rank is not None:
            self.weights = EncoderWeights(model, self._rank.report_weights, self._logger)

    def bind(self, meta: Orders) -> None:
        """Begin a step: the first hook of each step, before anything is loaded, encoded or saved."""
        self._meta = meta if meta.step else None
        self._copier.begin_step()
        if self._meta is None:
            return
        self._planned = _count(meta)
        if meta.look and self.weights is not None:
            self.weights.look()
        self._outdated = self.weights is not None and not self.weights.are(meta.weights, self._number)
        if meta.look:  # a writer that bypasses all calls may have changed only another rank's part
            [self._outdated] = self._agree([self._outdated])

    def load(self, cache: EncoderTensors) -> None:
        """Copy this step's loads into vLLM's cache. vLLM encodes items that could not be loaded."""
        meta = self._meta
        if meta is None or not meta.loads:
            return
        began = time.perf_counter_ns()
        failed = [not self._load(meta, load, cache) for load in meta.loads]
        self._load_ns += time.perf_counter_ns() - began
        for load, again in zip(meta.loads, self._agree(failed), strict=True):
            if again:
                self._encode_after_all(meta, load, cache)

    def _load(self, meta: Orders, load: Load, cache: EncoderTensors) -> bool:
        try:
            tensor = self._copier.take(load.staged) if load.staged else None
            if self._outdated and load.encodable:
                raise ValueError(_OUTDATED)
            if tensor is None:
                tensor = self._copied_from(self._payload(meta, load), load.encodable)
            self._put(cache, load.identifier, tensor)
        except Exception as error:
            self._complaints.warn("load", f"an entry could not be loaded and is encoded again: {error}")
            self._outcomes.append((load.place, Outcome.FAILED))
            return False
        self._outcomes.append((load.place, Outcome.COPIED))
        return True

    def _copied_from(self, payload: torch.Tensor, encodable: bool) -> torch.Tensor:
        """A failed copy is replaced by an encode or, if there is nothing to encode, by a plain synchronous copy."""
        try:
            return self._copier.load(payload)
        except Exception as error:
            if encodable:
                raise
            self._complaints.warn("plain", f"an entry that cannot be encoded is copied while the model waits: {error}")
            return self._copier.load_plainly(payload)

    @staticmethod
    def _put(cache: EncoderTensors, identifier: str, tensor: torch.Tensor) -> None:
        """The one place that puts a loaded tensor into vLLM's encoder cache, whatever that is."""
        cache[identifier] = tensor

    @staticmethod
    def _encode_after_all(meta: Orders, load: Load, cache: EncoderTensors) -> None:
        """Add the item to those that the encoder, which runs right after the loads, encodes in this step.

        A rank that could load it drops its copy: vLLM's V2 runner encodes only what its cache lacks, and a rank that
        skipped the encoder's collectives would hang the others.
        """
        if load.item is not None and meta.encoder_inputs is not None:
            cache.pop(load.identifier, None)
            _encode(meta.encoder_inputs, load.item)

    def begin_encodes(self) -> None:
        """The loads are done and vLLM's encoder runs next: time it if it encodes just what was planned."""
        if self._meta is not None and self._planned and _count(self._meta) == self._planned:
            self._clock.begin()

    def encode_again(self) -> None:
        """Add a producer's items that vLLM counts as cached but no rank has to those about to be encoded.

        Every rank does so, whether it saves or not.
        """
        meta = self._meta
        if meta is not None and meta.encoder_inputs is not None:
            for item in meta.encodes:
                _encode(meta.encoder_inputs, item)

    def save(self, cache: EncoderTensors, identifier: str) -> None:
        """Copy a new encoder output into the place that the scheduler side reserved for it, if any."""
        self._clock.end()
        if self._number == SAVING_RANK and self._meta is not None:
            order = self._meta.saves.get(identifier)
            if order is not None:
                self._save(self._meta, order, cache)

    def retry_saves(self, cache: EncoderTensors) -> None:
        """Copy tensors of earlier steps whose saves were dropped."""
        if self._number == SAVING_RANK and self._meta is not None:
            for order in self._meta.retries:
                if order.identifier in cache:
                    self._save(self._meta, order, cache)
                else:  # vLLM has emptied its cache meanwhile: there is nothing to retry
                    self._outcomes.append((order.place, Outcome.FAILED))

    def _save(self, meta: Orders, save: Save, cache: EncoderTensors) -> None:
        began = time.perf_counter_ns()
        try:
            if self._outdated:
                raise ValueError(_OUTDATED)
            tensor = cache[save.identifier]
            if tuple(tensor.shape) != (save.spec.rows, save.spec.width) or dtype_name(tensor.dtype) != save.spec.dtype:
                raise ValueError(f"it is {tuple(tensor.shape)} {tensor.dtype}, expected was {save.spec}")
            self._copier.save(tensor, self._payload(meta, save))
            self._save_ns += time.perf_counter_ns() - began
        except Exception as error:
            self._complaints.warn("save", f"an encoder output is not cached: {error}")
            self._outcomes.append((save.place, Outcome.FAILED))
            return
        self._copied.append(save)

    def _payload(self, meta: Orders, order: Load | Save) -> torch.Tensor:
        """The arena's bytes for an order. Raises ValueError unless they are this engine's and within bounds."""
        if not order.place:
            raise ValueError("what was promised is void")
        rank = self._rank
        memory = rank.memory if rank is not None else None
        if rank is None or memory is None or not meta.arena or rank.arena_id != meta.arena:
            raise ValueError("this rank is not attached to the engine's arena")
        head = room(order.name) if isinstance(order, Save) else 0
        length = head + order.spec.nbytes
        if not within(order.offset, max(length, 1), len(memory)):
            raise ValueError(f"{length} bytes at {order.offset} are not within the arena")
        return view(memory, order.offset + head, order.spec)

    def finish_step(self) -> None:
        """Report the step once its copies are done; hand finished saves to the store process first.

        Raises the device's error if copies failed: nothing more can be reported then, see `abandon`.
        """
        meta, rank, encode_s = self._meta, self._rank, self._clock.take()
        outcomes, copied = self._outcomes, self._copied
        self._outcomes, self._copied, self._meta = [], [], None
        took_ns = self._load_ns, self._save_ns
        self._load_ns = self._save_ns = 0
        if meta is None or rank is None:
            return
        step, namespace = meta.step, meta.namespace
        flushed = {save.place for save in copied if save.persist} if self._flush_s else set[int]()
        handed_over = threading.Event() if flushed else None

        def done() -> None:
            named = [(place, outcome, 0) for place, outcome in outcomes]
            for save in copied:
                incarnation = rank.hand_over(_saved(save, namespace, save.place in flushed))
                named.append((save.place, Outcome.COPIED if incarnation else Outcome.ABSENT, incarnation))
            rank.report(step, named, *took_ns, encode_s())
            if handed_over is not None:
                handed_over.set()

        self._copier.finish(done)
        if handed_over is not None:
            self._flush(rank, flushed, handed_over)

    def _flush(self, rank: Rank, places: set[int], handed_over: threading.Event) -> None:
        """The only wait in a forward pass. Only a producer waits; it runs no decode that this could delay."""
        deadline = time.monotonic() + self._flush_s
        if handed_over.wait(self._flush_s):
            late = len(places) - len(rank.await_durable(places, deadline))
            if late:
                self._complaints.warn(
                    "flush",
                    f"{late} of {len(places)} entries are not in every tier within producer_flush_s={self._flush_s:g}",
                )

    def abandon(self) -> None:
        """Leave the engine for good: the scheduler side sees the link close and promises nothing more.

        Promises to steps under way are still loaded: their bytes stay mapped and unchanged.
        """
        if self._rank is not None:
            self._rank.leave()

    def shutdown(self) -> None:
        """Finish the copies, then release the memory. Bounded, whatever the device does."""
        self._copier.close()
        rank, self._rank = self._rank, None
        self.weights = None
        if rank is not None:
            rank.close()


def _count(meta: Orders) -> int:
    return sum(map(len, (meta.encoder_inputs or {}).values()))


def _encode(encoder_inputs: dict[str, list[int]], item: tuple[str, int]) -> None:
    request_id, index = item
    scheduled = encoder_inputs.setdefault(request_id, [])
    if index not in scheduled:
        scheduled.append(index)


def _saved(save: Save, namespace: str, flush: bool) -> Saved:
    shape = (save.spec.rows, save.spec.width, save.spec.dtype)
    return Saved(save.place, save.offset, save.length, namespace, save.name, *shape, save.persist, flush)
