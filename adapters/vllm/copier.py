# SPDX-License-Identifier: Apache-2.0
"""Copies between the arena and a device, and when a step's copies are done. The only module that knows about streams.

Ownership, and when things are released (`DeviceCopier`):

1. The rank maps the arena and unmaps it; this registers it with the device, granule by granule, and unregisters it.
2. A copy is queued only between `register` and `release`. `release` first stops queueing, then waits for queued copies,
   then unregisters; the rank unmaps after that. So memory is never unmapped while it is registered or being copied.
3. A tensor or place being copied is referenced, or recorded on the copies' stream, until the step's event has passed.
4. The model may overwrite an encoder output in a later step than the one that saved it: that step's work is ordered
   after the copies of earlier steps (`begin_step`). In its own step vLLM itself still reads it.
5. A device that does not finish its copies in time is given up: none of its memory is unregistered or unmapped.
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
"""How long a device may take to finish its copies when the engine ends: vLLM gives its workers five seconds."""

_POLL_S = 0.001
_NEEDED = ("Stream", "Event", "current_stream", "stream", "device")
"""What the device's module (`torch.cuda`, `torch.xpu`) must provide."""

_given_up: list[object] = []
"""Memory that a hung device may still use: it stays mapped for as long as this process lives."""


class Copier(Device, Protocol):
    """Makes one rank's copies. Called in its forward pass; `register`, `stage`, `unstage`, `release` on its thread."""

    def begin_step(self) -> None:
        """Make the step's work wait, on the device, for saves of earlier steps."""

    def load(self, source: torch.Tensor) -> torch.Tensor:
        """A device tensor with the arena's bytes, safe for any use in the forward pass from now on."""

    def load_plainly(self, source: torch.Tensor) -> torch.Tensor:
        """Like `load`, but on the model's stream, and the caller waits: for an item that must be loaded after all."""

    def take(self, number: int) -> torch.Tensor | None:
        """The tensor staged under the number, safe for any use in the forward pass; None if there is none."""

    def save(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy an encoder output into the arena before the step's `done` is called."""

    def finish(self, done: Done) -> None:
        """Call `done` once every copy of the step is done. Steps finish in order."""

    def close(self) -> None:
        """Finish the copies under way. Bounded."""


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
    """Copies on its own stream, concurrently with the model's.

    `accelerator` is the device's module, or a stand-in for it. A save waits for the work that produced its source.
    A thread waits for the copies' events, in step order and sleeping, so that the forward pass never does.
    """

    def __init__(self, device: torch.device, accelerator: Any = None) -> None:
        """Raises torch's own error for a device without streams, see `why_unsupported`."""
        super().__init__()
        self._accelerator = accelerator or torch.get_device_module(device)
        self.registers = hasattr(self._accelerator, "cudart")
        self._device = device
        self.stream = self._accelerator.Stream(device)
        """The stream of the copies. `thread` waits for them."""
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

        Done on this rank's device: a thread starts out on the first device and would create a context there.
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
        """On the rank's thread, which waits; the forward pass goes on. RuntimeError once the memory is released."""
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
        """Device memory for a load. First from the copies' own stream, so that the copy need not wait for the model:
        vLLM did not plan for this memory. If there is none, from what vLLM has for its encoder cache."""
        try:
            with self._accelerator.stream(self.stream):
                return torch.empty_like(source, device=self._device)
        except torch.OutOfMemoryError:
            tensor = torch.empty_like(source, device=self._device)
            self.stream.wait_event(current.record_event())  # its previous user may still be using it
            tensor.record_stream(self.stream)
            return tensor

    def _pieces(self, stored: torch.Tensor) -> list[tuple[int, int]]:
        """The elements of a place, split where two registrations meet: a copy across such a border is an error.

        Borders and payload starts are both on page boundaries of the arena: no border lies within an element.
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
        """An event that a thread can sleep on: on CUDA the default spins on a core until it has passed.

        From the device's own module: `torch.Event` also takes `blocking` but ignores it (torch 2.13, its documentation
        and torch/csrc/Event.cpp).
        """
        return self._accelerator.Event(blocking=True) if self._sleeps else self._accelerator.Event()

    def _wait(self, event: Any) -> None:
        """Wait for the event, sleeping on any device: XPU's events have no such option and are polled."""
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
    """Why outputs on devices of this type (`torch.device.type`) cannot be copied while the model runs; or empty."""
    if kind == "cpu":
        return ""
    try:
        module = torch.get_device_module(kind)
    except RuntimeError as error:
        return f"torch does not know devices of type {kind!r}: {error}"
    missing = [f"torch.{kind}.{name}" for name in _NEEDED if not hasattr(module, name)]
    return f"copies beside the model need streams and events; there is no {', '.join(missing)}" if missing else ""


def copier_for(device: torch.device) -> Copier:
    """Raises torch's own error if the device has no streams."""
    return HostCopier() if device.type == "cpu" else DeviceCopier(device)
