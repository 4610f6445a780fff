# SPDX-License-Identifier: Apache-2.0
"""Copies between the arena and a device, and when a step's copies are done. The only place that knows about streams.

Who owns what, and when it may go (`DeviceCopier`):

1. The rank maps the arena and unmaps it; this registers it with the device, granule by granule, and unregisters it.
2. A copy is queued only between `register` and `release`. `release` first stops queueing, then waits for the copies
   that are queued, then unregisters; the rank unmaps after that. So nothing is ever unmapped that is registered, or
   copied.
3. A tensor or place under a copy is held, or recorded on the copies' stream, until the step's event has passed.
4. The model may overwrite an encoder output in a later step than the one that saved it: that step's work follows the
   copies of the steps before (`begin_step`). In its own step vLLM itself still reads it.
5. A device that does not finish its copies in time is given up: nothing of it is unregistered or unmapped.
"""

from __future__ import annotations

import logging
import mmap
import queue
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol

import torch

from lmcache_ec.rank import Device, HostMemory

from .staged import StagedTensors

Done = Callable[[], None]

_logger = logging.getLogger(__name__)

_END_S = 3.0
"""How long a device may take to finish its copies once the engine ends: vLLM gives its workers five seconds."""

_POLL_S = 0.001
_NEEDED = ("Stream", "Event", "current_stream", "stream", "device")
"""What is needed of a device's module (`torch.cuda`, `torch.xpu`)."""

_given_up: list[object] = []
"""Memory that a hung device may still use: it stays mapped for as long as this process lives."""


class Copier(Device, Protocol):
    """How one rank copies. Called from its forward pass; `register`, `stage`, `unstage`, `release` by its thread."""

    def begin_step(self) -> None:
        """Have the step's work wait, on the device, for saves of earlier steps."""

    def load(self, source: torch.Tensor) -> torch.Tensor:
        """A device tensor with the arena's bytes, good for whatever the forward pass does with it from now on."""

    def load_plainly(self, source: torch.Tensor) -> torch.Tensor:
        """The same in the model's own order, and the caller waits: for what `load` could not, and must come."""

    def take(self, number: int) -> torch.Tensor | None:
        """What was staged under the number, for whatever the forward pass does with it; None if nothing was."""

    def save(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy an encoder output into the arena, at the latest by the time the step's `done` is called."""

    def finish(self, done: Done) -> None:
        """Call `done` once every copy of the step is done. Steps finish in order."""

    def close(self) -> None:
        """Finish what is under way. Bounded."""


class HostCopier(StagedTensors, HostMemory):
    """Encoder outputs live in host memory: every copy is done when it returns."""

    def begin_step(self) -> None:
        pass

    def load(self, source: torch.Tensor) -> torch.Tensor:
        return source.clone()

    def load_plainly(self, source: torch.Tensor) -> torch.Tensor:
        return source.clone()

    def load_ahead(self, source: torch.Tensor) -> torch.Tensor:
        return source.clone()

    def save(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        destination.copy_(source)

    def finish(self, done: Done) -> None:
        done()

    def close(self) -> None:
        pass


class DeviceCopier(StagedTensors):
    """Copies on a stream of their own, beside the model's.

    `accelerator` is the device's module, or what stands in for it. A save waits for the work that produced its source.
    A thread waits for the copies' events, in step order and asleep, so that the forward pass never does.
    """

    def __init__(self, device: torch.device, accelerator: Any = None) -> None:
        """Raises whatever torch does for a device that has no streams, see `why_unsupported`."""
        super().__init__()
        self._accelerator = accelerator or torch.get_device_module(device)
        self.registers = hasattr(self._accelerator, "cudart")
        self._device = device
        self.stream = self._accelerator.Stream(device)
        """The copies'. `thread` waits for them."""
        self._queueing = threading.Lock()
        self._released = self._stuck = False
        self._granules: list[tuple[mmap.mmap, int]] = []  # what is registered: memory and address
        self._borders: list[int] = []  # the addresses at which one registration may meet another, sorted
        self._sleeps = device.type == "cuda"  # whether a wait for one of its events can sleep
        self._held: list[torch.Tensor] = []
        self._unwaited: Any = None  # the event of saves that the model's stream does not wait for yet
        self._saves = False
        self._error: Exception | None = None
        self._steps: queue.SimpleQueue[tuple[Any, list[torch.Tensor], Done] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._finish_steps, name="lmcache-ec-copies", daemon=True)
        self.thread.start()

    # ---- memory

    def register(self, memory: mmap.mmap, offset: int, length: int) -> str:
        """Pin the granule: a copy from pageable memory is not asynchronous.

        On the device of this rank: a thread starts with the first one, and would make a context of its own there.
        """
        address = torch.frombuffer(memory, dtype=torch.uint8, count=length, offset=offset).data_ptr()
        try:
            with self._accelerator.device(self._device):
                status = int(self._accelerator.cudart().cudaHostRegister(address, length, 0))
        except RuntimeError as error:
            return f"cudaHostRegister of {length} bytes failed: {error}"
        if status:
            return f"cudaHostRegister of {length} bytes failed with status {status}"
        with self._queueing:
            self._granules.append((memory, address))
            self._borders = sorted({*self._borders, address, address + length})
        return ""

    def release(self) -> bool:
        with self._queueing:
            self._released = True
            self._staged.clear()
            granules, self._granules = self._granules, []
        kept = [granule for granule in granules if not self._unregister(granule[1])] if self._is_quiet() else granules
        if kept or self._stuck:
            _given_up.append(kept)
            self._stuck = True
        return not self._stuck

    def _is_quiet(self) -> bool:
        """Wait until every queued copy is done. False if that takes too long, or the device has failed."""
        deadline = time.monotonic() + _END_S
        try:
            last = self.stream.record_event()
            while not self._stuck and not last.query():
                self._stuck = time.monotonic() > deadline
                time.sleep(_POLL_S)
        except RuntimeError:
            self._stuck = True
        return not self._stuck

    def _unregister(self, address: int) -> bool:
        try:
            with self._accelerator.device(self._device):
                status = int(self._accelerator.cudart().cudaHostUnregister(address))
        except RuntimeError as error:
            _logger.warning("encoder cache: cudaHostUnregister failed, the memory stays mapped: %s", error)
            return False
        if status:
            _logger.warning("encoder cache: cudaHostUnregister failed with status %d, the memory stays mapped", status)
        return not status

    # ---- the forward pass

    def begin_step(self) -> None:
        if self._unwaited is not None:
            self._accelerator.current_stream(self._device).wait_event(self._unwaited)
            self._unwaited = None

    def load(self, source: torch.Tensor) -> torch.Tensor:
        """Raises RuntimeError once the memory is released."""
        with self._queueing:
            self._check_usable()
            current = self._accelerator.current_stream(self._device)
            tensor = self._empty_like(source, current)
            self._copy(tensor, source, self._pieces(source))
            current.wait_event(self.stream.record_event())
            tensor.record_stream(current)
            self._held.append(source)
        return tensor

    def load_plainly(self, source: torch.Tensor) -> torch.Tensor:
        """Raises RuntimeError once the memory is released."""
        with self._queueing:
            self._check_usable()
            tensor = torch.empty_like(source, device=self._device)
            flat, elements = tensor.view(-1), source.view(-1)
            for begin, end in self._pieces(source):
                flat[begin:end].copy_(elements[begin:end])
        return tensor

    def load_ahead(self, source: torch.Tensor) -> torch.Tensor:
        """On the rank's thread, which waits; beside the forward pass. RuntimeError once the memory is released."""
        with self._accelerator.device(self._device):
            with self._queueing:
                self._check_usable()
                tensor = self._empty_like(source, self._accelerator.current_stream(self._device))
                self._copy(tensor, source, self._pieces(source))
                over = self._sleeping_event()
                over.record(self.stream)
            self._wait(over)
        return tensor

    def take(self, number: int) -> torch.Tensor | None:
        tensor = super().take(number)
        if tensor is not None:
            tensor.record_stream(self._accelerator.current_stream(self._device))
        return tensor

    def save(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Raises RuntimeError once the memory is released."""
        with self._queueing:
            self._check_usable()
            self.stream.wait_event(self._accelerator.current_stream(self._device).record_event())
            self._copy(destination, source, self._pieces(destination))
            source.record_stream(self.stream)
            self._held += (source, destination)
            self._saves = True

    def _check_usable(self) -> None:
        if self._released:
            raise RuntimeError("the arena's memory was released")

    def _empty_like(self, source: torch.Tensor, current: Any) -> torch.Tensor:
        """Room for a load, on the device. First of the copies' own stream, so that the copy need not wait for the
        model: vLLM did not count on that room. Where there is none, of what vLLM has for its encoder cache."""
        try:
            with self._accelerator.stream(self.stream):
                return torch.empty_like(source, device=self._device)
        except torch.OutOfMemoryError:
            tensor = torch.empty_like(source, device=self._device)
            self.stream.wait_event(current.record_event())  # whoever had this room before may still use it
            tensor.record_stream(self.stream)
            return tensor

    def _pieces(self, stored: torch.Tensor) -> list[tuple[int, int]]:
        """The elements of a place, split where two registrations meet: a copy across such a border is an error.

        Borders lie on whole pages of the arena, and so do the beginnings of payloads: none lies within an element.
        """
        start, size = stored.data_ptr(), stored.element_size()
        first = bisect_right(self._borders, start)
        last = bisect_left(self._borders, start + stored.numel() * size)
        cuts = [(border - start) // size for border in self._borders[first:last]]
        return list(pairwise((0, *cuts, stored.numel())))

    def _copy(self, destination: torch.Tensor, source: torch.Tensor, pieces: list[tuple[int, int]]) -> None:
        with self._accelerator.stream(self.stream):
            if len(pieces) == 1:
                destination.copy_(source, non_blocking=True)
                return
            flat, elements = destination.view(-1), source.reshape(-1)
            for begin, end in pieces:
                flat[begin:end].copy_(elements[begin:end], non_blocking=True)

    def finish(self, done: Done) -> None:
        """Raises RuntimeError if an earlier step failed."""
        held, self._held = self._held, []
        saves, self._saves = self._saves, False
        if self._error is not None:
            held.clear()
            raise RuntimeError(f"copies of an earlier step failed: {self._error}") from self._error
        over = self._sleeping_event()
        over.record(self.stream)
        if saves:
            self._unwaited = over
        self._steps.put((over, held, done))

    def _sleeping_event(self) -> Any:
        """An event that a thread can wait for asleep: on CUDA the default burns a core until it has passed.

        From the device's own module: `torch.Event` takes `blocking`, too, and ignores it (torch 2.13, its documentation
        and torch/csrc/Event.cpp).
        """
        return self._accelerator.Event(blocking=True) if self._sleeps else self._accelerator.Event()

    def _wait(self, event: Any) -> None:
        """Sleeps on any device: XPU's events have no such option, and are polled."""
        while not (self._sleeps or event.query()):
            time.sleep(_POLL_S)
        event.synchronize()

    def close(self) -> None:
        self._steps.put(None)
        self.thread.join(_END_S)
        if self.thread.is_alive():
            self._stuck = True
            _logger.error("encoder cache: the device did not finish its copies within %.0f s; giving up on it", _END_S)

    # ---- the thread that waits

    def _finish_steps(self) -> None:
        while (step := self._steps.get()) is not None:
            over, held, done = step
            try:
                if self._error is None:
                    self._wait(over)
                    held.clear()
                    done()
            except Exception as error:
                self._error = error


def why_unsupported(kind: str) -> str:
    """Why encoder outputs on devices of this type (`torch.device.type`) cannot be copied beside the model; or empty."""
    if kind == "cpu":
        return ""
    try:
        module = torch.get_device_module(kind)
    except RuntimeError as error:
        return f"torch does not know devices of type {kind!r}: {error}"
    missing = [f"torch.{kind}.{name}" for name in _NEEDED if not hasattr(module, name)]
    return f"copies beside the model need streams and events; there is no {', '.join(missing)}" if missing else ""


def copier_for(device: torch.device) -> Copier:
    """Raises whatever torch does where the device's streams cannot be had."""
    return HostCopier() if device.type == "cpu" else DeviceCopier(device)
