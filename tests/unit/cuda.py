# SPDX-License-Identifier: Apache-2.0
"""What the copier uses of CUDA, over host memory: streams whose work is done when a test runs it."""

import gc
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from benchmarks.testbed.stand_ins import PATIENCE_S


class Event:
    """Passes when its stream gets to it. `awaited` is set while a thread waits in `synchronize`."""

    def __init__(self) -> None:
        self.passed = threading.Event()
        self.awaited = threading.Event()
        self.error: Exception | None = None

    def synchronize(self) -> None:
        self.awaited.set()
        assert self.passed.wait(PATIENCE_S), "the stream was never run"
        if self.error is not None:
            raise self.error


class Stream:
    """Work in order, done only when the test runs it."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._work: deque[Callable[[], object] | Event] = deque()
        self.events: list[Event] = []

    def submit(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def record_event(self) -> Event:
        event = Event()
        self.events.append(event)
        self._work.append(event.passed.set)
        return event

    def wait_event(self, event: Event) -> None:
        self._work.append(event)

    def run(self) -> bool:
        """Do all that waits for no other stream. Whether nothing is left."""
        while self._work:
            work = self._work[0]
            if isinstance(work, Event):
                if not work.passed.is_set():
                    return False
            else:
                work()
            self._work.popleft()
        return True


@dataclass
class Cuda:
    """What the copier uses of torch.cuda, over host memory. `model` is the forward pass's stream."""

    model: Stream = field(default_factory=Stream)
    side: list[Stream] = field(default_factory=list)
    recorded: list[tuple[int, Stream]] = field(default_factory=list)
    registered: list[tuple[int, int]] = field(default_factory=list)
    registered_on: list[torch.device | None] = field(default_factory=list)
    register_status: int = 0
    _current: Stream | None = None
    _device: torch.device | None = None

    def Stream(self, device: torch.device) -> Stream:
        self.side.append(Stream(device))
        return self.side[-1]

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return self._current or self.model

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self._current, before = stream, self._current
        try:
            yield
        finally:
            self._current = before

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self._device, before = device, self._device
        try:
            yield
        finally:
            self._device = before

    def cudart(self) -> Any:
        return SimpleNamespace(cudaHostRegister=self._register)

    def _register(self, address: int, length: int, flags: int) -> int:
        self.registered.append((address, length))
        self.registered_on.append(self._device)
        return self.register_status


class OnDevice(TorchFunctionMode):
    """Device tensors are host tensors here; an asynchronous copy is work for the current stream of `cuda`."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(kwargs.get("device"), "type", "cpu") == "cuda":
            kwargs["device"] = "cpu"
        if function is torch.Tensor.copy_ and kwargs.get("non_blocking"):
            destination, source = args
            self._cuda.current_stream().submit(lambda: destination.copy_(source))
            return destination
        return function(*args, **kwargs)


def collected(*references: Callable[[], Any]) -> list[bool]:
    """For each object whether nobody holds it any more."""
    gc.collect()
    return [reference() is None for reference in references]
