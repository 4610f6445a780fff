# SPDX-License-Identifier: Apache-2.0
"""Copies between the arena and a device, and when a step's copies are over. The one place that knows of streams."""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

Done = Callable[[], None]


class Copier(Protocol):
    """How one rank copies. Called from its forward pass, but for `register`, which its link thread calls."""

    def register(self, memory: mmap.mmap, offset: int, length: int) -> None:
        """Make a segment fit for copies, before any place in it is used."""

    def load(self, source: torch.Tensor) -> torch.Tensor:
        """A device tensor with the arena's bytes, good for whatever the forward pass does with it from now on."""

    def save(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy an encoder output into the arena, at the latest by the time the step's `done` is called."""

    def finish(self, done: Done) -> None:
        """Call `done` once every copy of the step is over. Steps finish in order."""

    def close(self) -> None:
        """Finish what is under way."""


class HostCopier:
    """Encoder outputs live in host memory: every copy is over when it returns."""

    def register(self, memory: mmap.mmap, offset: int, length: int) -> None:
        pass

    def load(self, source: torch.Tensor) -> torch.Tensor:
        return source.clone()

    def save(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        destination.copy_(source)

    def finish(self, done: Done) -> None:
        done()

    def close(self) -> None:
        pass


class DeviceCopier:
    """Copies on a stream of their own, beside the model's.

    `cuda` is `torch.cuda`, or what stands in for it. A save waits for the work that produced its source; the source and
    the arena's bytes are held until the copy's event has passed. A thread waits for the events, in step order, so that
    the forward pass never does.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._device = device
        self._stream = cuda.Stream(device)
        self._held: list[torch.Tensor] = []
        self._error: Exception | None = None
        self._steps: queue.SimpleQueue[tuple[Any, list[torch.Tensor], Done] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._finish_steps, name="lmcache-ec-copies", daemon=True)
        self._thread.start()

    def register(self, memory: mmap.mmap, offset: int, length: int) -> None:
        """Pin the segment: a copy from pageable memory would not be asynchronous. Raises RuntimeError if refused.

        On the device of this rank: a thread starts with the first one, and would make a context of its own there.
        """
        segment = torch.frombuffer(memory, dtype=torch.uint8, count=length, offset=offset)
        with self._cuda.device(self._device):
            status = self._cuda.cudart().cudaHostRegister(segment.data_ptr(), length, 0)
        if int(status):
            raise RuntimeError(f"cudaHostRegister of {length} bytes failed with status {int(status)}")

    def load(self, source: torch.Tensor) -> torch.Tensor:
        with self._cuda.stream(self._stream):
            tensor = torch.empty_like(source, device=self._device)
            tensor.copy_(source, non_blocking=True)
        current = self._cuda.current_stream(self._device)
        current.wait_event(self._stream.record_event())
        tensor.record_stream(current)
        self._held.append(source)
        return tensor

    def save(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        self._stream.wait_event(self._cuda.current_stream(self._device).record_event())
        with self._cuda.stream(self._stream):
            destination.copy_(source, non_blocking=True)
        source.record_stream(self._stream)
        self._held += (source, destination)

    def finish(self, done: Done) -> None:
        """Raises RuntimeError if an earlier step failed."""
        held, self._held = self._held, []
        if self._error is not None:
            held.clear()
            raise RuntimeError(f"copies of an earlier step failed: {self._error}") from self._error
        self._steps.put((self._stream.record_event(), held, done))

    def close(self) -> None:
        self._steps.put(None)
        self._thread.join()

    def _finish_steps(self) -> None:
        while (step := self._steps.get()) is not None:
            event, held, done = step
            try:
                if self._error is None:
                    event.synchronize()
                    held.clear()
                    done()
            except Exception as error:
                self._error = error


def copier_for(device: torch.device) -> Copier:
    return HostCopier() if device.type == "cpu" else DeviceCopier(device)
