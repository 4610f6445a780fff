# SPDX-License-Identifier: Apache-2.0
"""A stand-in for `torch.cuda` over host memory, which keeps the rules of the real one.

- A stream does its work in order. An event has passed or has not; waiting for one that is not `blocking` spins a core.
- Host memory is registered or not. Registering makes it resident. Registering twice, unregistering unregistered memory
  and copying across the boundary of a registration are refused. A copy of unregistered memory blocks its caller.
  Unmapping registered memory is a fault.
- Freed device memory goes at once to the next allocation on its stream, unless another recorded stream has not reached
  that point yet.

Device tensors are views of one block of host memory. Within `OnDevice` torch creates device tensors there, and
asynchronous copies are work for the current stream. Streams either run by themselves, each on its own thread, or when
a test runs them (`run`), so that a test can produce any order that the rules allow.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

PATIENCE_S = 20.0
INVALID_VALUE, OUT_OF_MEMORY, ALREADY_REGISTERED, NOT_REGISTERED = 1, 2, 712, 713
"""Values of cudaError_t."""

_ALIGNMENT = 512
_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(eq=False)
class Mark:
    """One recording of an event."""

    passed: threading.Event = field(default_factory=threading.Event)
    awaited: threading.Event = field(default_factory=threading.Event)
    at_s: float = 0.0
    error: Exception | None = None

    def __call__(self) -> None:
        self.at_s = time.perf_counter()
        self.passed.set()


class CudaEvent:
    def __init__(self, cuda: Cuda, enable_timing: bool, blocking: bool) -> None:
        self._cuda = cuda
        self._timing = enable_timing
        self._blocking = blocking
        self.mark: Mark | None = None

    def record(self, stream: CudaStream | None = None) -> None:
        self.mark = Mark()
        (stream or self._cuda.current_stream()).submit(self.mark)

    def wait(self, stream: CudaStream | None = None) -> None:
        (stream or self._cuda.current_stream()).wait_event(self)

    def query(self) -> bool:
        if self.mark is not None and self.mark.error is not None:
            raise self.mark.error
        if self.mark is not None:
            self.mark.awaited.set()
        return self.mark is None or self.mark.passed.is_set()

    def synchronize(self) -> None:
        if self.mark is None:
            return
        self.mark.awaited.set()
        if not self._blocking and not self.mark.passed.is_set():
            self._cuda.spins += 1
            deadline = time.monotonic() + PATIENCE_S
            while not self.mark.passed.is_set() and time.monotonic() < deadline:
                pass
        if not self.mark.passed.wait(PATIENCE_S):
            raise RuntimeError("the stream was never run")
        if self.mark.error is not None:
            raise self.mark.error

    def elapsed_time(self, end: CudaEvent) -> float:
        """In milliseconds."""
        if not (self._timing and end._timing and self.mark and end.mark):
            raise ValueError("both events have to be recorded, with enable_timing")
        if not (self.query() and end.query()):
            raise RuntimeError("both events have to have passed")
        return (end.mark.at_s - self.mark.at_s) * 1e3


class CudaStream:
    """Work in order. `running`: on its own thread; otherwise when `run` is called."""

    def __init__(self, cuda: Cuda, running: bool) -> None:
        self._cuda = cuda
        self._work: deque[Callable[[], object] | CudaEvent] = deque()
        self._changed = threading.Condition()
        self._running = running
        self._busy = False
        self.hung = False
        self.marks: list[Mark] = []
        if running:
            threading.Thread(target=self._run_for_ever, daemon=True).start()

    def submit(self, work: Callable[[], object]) -> None:
        if isinstance(work, Mark):
            self.marks.append(work)
            if self.query():
                work()  # an idle stream has reached it already
                return
        with self._changed:
            self._work.append(work)
            self._changed.notify_all()

    def record_event(self, event: CudaEvent | None = None) -> CudaEvent:
        event = event or self._cuda.Event()
        event.record(self)
        return event

    def wait_event(self, event: CudaEvent) -> None:
        if event.mark is not None and not event.mark.passed.is_set():
            self.submit(_Wait(event.mark))

    def wait_stream(self, stream: CudaStream) -> None:
        self.wait_event(stream.record_event())

    def query(self) -> bool:
        return not self._work and not self._busy

    def synchronize(self) -> None:
        if self.query():
            return
        mark = Mark()
        self.submit(mark)
        if not self._running:
            self._cuda.run()
        if not mark.passed.wait(PATIENCE_S):
            raise RuntimeError("the stream never got there")

    def run(self) -> bool:
        """Do all work up to a wait for another stream. Returns whether nothing is left."""
        while self._work:
            work = self._work[0]
            if isinstance(work, _Wait) and not work.mark.passed.is_set():
                return False
            self._do(work)
            self._work.popleft()
        return True

    def _do(self, work: Any) -> None:
        try:
            work()
        except Exception as error:
            self._cuda.faults.append(str(error))

    def _run_for_ever(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work and not self.hung)
                work = self._work.popleft()
                self._busy = True
            self._do(work)
            self._busy = False


@dataclass(frozen=True)
class _Wait:
    mark: Mark

    def __call__(self) -> None:
        if not self.mark.passed.wait(PATIENCE_S):
            raise RuntimeError("a stream waits for what never comes")


# ---- memory


@dataclass(frozen=True, eq=False)
class Registration:
    start: int
    length: int
    device: torch.device | None
    mapped: tuple[str, ...] = ()
    """The kernel's names of the mappings there; empty for torch's pinned memory, which is never unmapped here."""
    was_resident: bool = False
    """Whether it was resident before it was registered."""

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(eq=False)
class _Block:
    start: int
    length: int
    stream: CudaStream
    used_by: set[CudaStream] = field(default_factory=set)
    pending: list[Mark] = field(default_factory=list)

    @property
    def free(self) -> bool:
        return all(mark.passed.is_set() for mark in self.pending)


class DeviceMemory:
    """One block of memory, allocated from as by a caching allocator."""

    def __init__(self, length: int) -> None:
        self._memory = mmap.mmap(-1, length)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.length = length
        self._used = 0
        self._live: dict[int, _Block] = {}
        self._freed: list[_Block] = []
        self._lock = threading.RLock()
        self.full: set[CudaStream] = set()
        """Streams for which no memory is left."""

    def holds(self, address: int) -> bool:
        return self.start <= address < self.start + self.length

    def take(self, length: int, stream: CudaStream) -> Any:
        """A buffer for `torch.frombuffer`; its memory is freed with the last tensor over it."""
        size = -(-max(length, 1) // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            if stream in self.full:
                raise torch.OutOfMemoryError("CUDA out of memory")
            block = self._reuse(size, stream) or self._carve(size, stream)
            self._live[block.start] = block
        kind: Any = type("Block", (ctypes.c_char * size,), {})  # a plain array does not support a finalizer
        buffer = kind.from_buffer(self._memory, block.start - self.start)
        weakref.finalize(buffer, self._free, block)
        return buffer

    def used_by(self, address: int, stream: CudaStream) -> None:
        with self._lock:
            block = next((b for b in self._live.values() if b.start <= address < b.start + b.length), None)
            if block is None:
                raise RuntimeError("record_stream of a tensor that is not on the device")
            if stream is not block.stream:
                block.used_by.add(stream)

    def _reuse(self, size: int, stream: CudaStream) -> _Block | None:
        """The block that was freed last on this stream; if memory is short, any block."""
        short = self._used + size > self.length
        for block in reversed(self._freed):
            if block.length >= size and block.free and (block.stream is stream or short):
                self._freed.remove(block)
                if block.length > size:
                    self._freed.append(_Block(block.start + size, block.length - size, block.stream))
                return _Block(block.start, size, stream)
        return None

    def _carve(self, size: int, stream: CudaStream) -> _Block:
        if self._used + size > self.length:
            raise torch.OutOfMemoryError("CUDA out of memory")
        block = _Block(self.start + self._used, size, stream)
        self._used += size
        return block

    def _free(self, block: _Block) -> None:
        with self._lock:
            del self._live[block.start]
            for stream in block.used_by:
                mark = Mark()
                stream.submit(mark)
                block.pending.append(mark)
            block.used_by = set()
            self._freed.append(block)


@dataclass(frozen=True)
class _Raw:
    """A tensor's memory, without keeping the tensor alive."""

    address: int
    span: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Raw:
        steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        span = (steps + 1) * tensor.element_size() if tensor.numel() else 0
        return cls(tensor.data_ptr(), span, tensor.dtype, tuple(tensor.shape), tensor.stride())

    def tensor(self) -> torch.Tensor:
        bytes_ = (ctypes.c_char * self.span).from_address(self.address)
        return torch.frombuffer(bytes_, dtype=self.dtype).as_strided(self.shape, self.stride)


# ---- torch.cuda


class Cuda:
    """The module. `model` is the forward pass's stream, `side` are the streams created later."""

    kind = "cuda"
    """Type of its devices."""

    def __init__(self, *, running: bool = False, device_bytes: int = 64 << 20, pace_s: float = 0.0) -> None:
        """`pace_s` is the minimum duration of a copy, if streams run by themselves."""
        self.memory = DeviceMemory(device_bytes)
        self.faults: list[str] = []
        """Broken rules for which no exception could be raised."""
        self.spins = 0
        """Waits that spun a core."""
        self.stalls = 0
        """Asynchronous copies that blocked their caller."""
        self.refuse: Callable[[int, int], int] = lambda address, length: 0
        """Returns the status of registering (address, length)."""
        self.registered: list[Registration] = []
        self.refusals: list[int] = []
        """The error statuses of failed registrations and unregistrations."""
        self._pace_s = pace_s
        self._running = running
        self._pinned: list[torch.Tensor] = []
        self._local = threading.local()
        self._lock = threading.RLock()
        self.side: list[CudaStream] = []
        self.model = CudaStream(self, running)

    # ---- streams and events

    def Stream(self, device: torch.device | None = None, priority: int = 0) -> CudaStream:
        self.side.append(CudaStream(self, self._running))
        return self.side[-1]

    def Event(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> CudaEvent:
        return CudaEvent(self, enable_timing, blocking)

    def current_stream(self, device: torch.device | None = None) -> CudaStream:
        stream: CudaStream = getattr(self._local, "stream", self.model)
        return stream

    @contextmanager
    def stream(self, stream: CudaStream) -> Iterator[None]:
        before, self._local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._local.stream = before

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self._local.device = getattr(self._local, "device", None), device
        try:
            yield
        finally:
            self._local.device = before

    def run(self) -> None:
        """Do all work that can be done, on all streams."""
        streams = [self.model, *self.side]
        while [stream for stream in streams if not stream.run()]:
            if not any(_can_run(stream) for stream in streams):
                raise RuntimeError("streams wait for each other, or for one that hangs")

    def synchronize(self, device: torch.device | None = None) -> None:
        for stream in (self.model, *self.side):
            stream.synchronize()

    def _sleep(self, cycles: int) -> None:
        """Keep the current stream busy for `cycles` at 1 GHz."""
        self.current_stream().submit(lambda: time.sleep(cycles / 1e9))

    # ---- properties

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def get_device_name(self, device: Any = None) -> str:
        return "stand-in"

    def set_device(self, device: Any) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    # ---- host memory

    def cudart(self) -> Cuda:
        return self

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:
        status = self._register(address, length)
        self.refusals += [status] if status else []
        return status

    def _register(self, address: int, length: int) -> int:
        if status := self.refuse(address, length):
            return status
        with self._lock:
            if any(each.start < address + length and address < each.end for each in self.registered):
                return ALREADY_REGISTERED
            page = mmap.PAGESIZE
            start, end = address // page * page, -(-(address + length) // page) * page
            resident = _is_resident(start, end - start)
            if _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _POPULATE_WRITE):
                return INVALID_VALUE
            device = getattr(self._local, "device", None)
            self.registered.append(Registration(address, length, device, _mapped(address, length), resident))
            return 0

    def cudaHostUnregister(self, address: int) -> int:
        with self._lock:
            found = next((each for each in self.registered if each.start == address), None)
            if found is None:
                self.refusals.append(NOT_REGISTERED)
                return NOT_REGISTERED
            self.check()
            self.registered.remove(found)
            return 0

    def check(self) -> None:
        """Check that all registered memory is still mapped, with the same mappings."""
        for each in self.registered:
            if each.mapped and _mapped(each.start, each.length) != each.mapped:
                self.faults.append(f"{each.length} bytes at {each.start:#x} were unmapped while registered")

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pin a tensor, as torch's own pinned allocator would; never freed here."""
        self._pinned.append(tensor)
        self.registered.append(Registration(tensor.data_ptr(), tensor.nbytes, None))
        return tensor

    def _registration(self, raw: _Raw) -> Registration | None:
        """The registration that holds this memory. Raises RuntimeError if one holds only part of it."""
        begin, end = raw.address, raw.address + raw.span
        with self._lock:
            touched = [each for each in self.registered if each.start < end and begin < each.end]
        if touched and not (len(touched) == 1 and touched[0].start <= begin and end <= touched[0].end):
            raise RuntimeError("CUDA error: invalid argument (a copy across the border of a registration)")
        return touched[0] if touched else None

    # ---- copies

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """An asynchronous copy on the current stream."""
        stream, raws = self.current_stream(), (_Raw.of(destination), _Raw.of(source))
        if not source.numel():
            return
        on_host = [raw for raw in raws if not self.memory.holds(raw.address)]
        if len(on_host) == 2:
            raise RuntimeError("a copy from host to host: make tensors on the device, inside OnDevice")
        registrations = [self._registration(raw) for raw in on_host]
        stream.submit(lambda: self._move(*raws, registrations))
        if None in registrations:
            self.stalls += 1
            stream.synchronize()

    def _move(self, destination: _Raw, source: _Raw, registrations: list[Registration | None]) -> None:
        if self._pace_s:
            time.sleep(self._pace_s)
        for each in registrations:
            if each is not None and each not in self.registered:
                raise RuntimeError("memory was unregistered under a copy")
            if each is not None and not _is_mapped(each.start, each.length):
                raise RuntimeError("memory was unmapped under a copy")
        destination.tensor().copy_(source.tensor())

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        buffer = self.memory.take(like.nbytes, self.current_stream())
        if not like.numel():
            return like
        return torch.frombuffer(buffer, dtype=like.dtype, count=like.numel()).view(like.shape)

    def settle(self) -> None:
        """Wait for the model's stream, if streams run by themselves: the model's next operation is done at once."""
        if self._running and self.current_stream() is self.model:
            self.model.synchronize()


class Xpu(Cuda):
    """`torch.xpu`: the same streams and events, except blocking events, and no way to register memory."""

    kind = "xpu"

    def Event(self, enable_timing: bool = False) -> CudaEvent:  # type: ignore[override]
        return super().Event(enable_timing)

    @property
    def cudart(self) -> Any:
        raise AttributeError("torch.xpu has no cudart")


@contextmanager
def stand_in_xpu() -> Iterator[Any]:
    """Like `stand_in_card`, with a device type other than `cuda`."""
    with _card(Xpu, "stand_in_xpu") as card:
        yield card


@contextmanager
def stand_in_card() -> Iterator[Any]:
    """A card for `benchmarks.gpu_check`, whose streams run by themselves and whose copies take time. Its engines run on
    the CPU, with the V2 runner's kernels interpreted."""
    with _card(Cuda, "stand_in_card") as card:
        yield card


@contextmanager
def _card(module: type[Cuda], opener: str) -> Iterator[Any]:
    from benchmarks.gpu_check.card import Card
    from benchmarks.gpu_check.model import Engines
    from benchmarks.testbed import triton_interpreter
    from tests import warm_start

    cuda, threads = module(running=True, device_bytes=1 << 30, pace_s=0.002), torch.get_num_threads()
    engines = Engines({"V2": triton_interpreter.ENVIRONMENT, "V1": {}}, {"begin": warm_start.begin})
    torch.set_num_threads(1)  # torch's threads would spin on the cores that the streams need
    try:
        with OnDevice(cuda):
            yield Card(torch.device(cuda.kind, 0), cuda, f"{__name__}:{opener}", {"card": "stand-in"}, engines)
    finally:
        torch.set_num_threads(threads)
    cuda.check()
    if cuda.faults:
        raise AssertionError(cuda.faults)


def _can_run(stream: CudaStream) -> bool:
    work = stream._work[0] if stream._work else None
    return work is not None and not (isinstance(work, _Wait) and not work.mark.passed.is_set())


class OnDevice(TorchFunctionMode):
    """For this thread: device tensors are created in `cuda`'s memory, and asynchronous copies are work for its streams.
    Within the block no other thread can record a real tensor on a real stream.

    Other operations on device tensors are done at once, where they are called: a test that needs them queued submits
    them itself.
    """

    def __init__(self, cuda: Cuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __enter__(self) -> Any:
        self._record_stream = torch.Tensor.record_stream  # torch checks its argument before it calls a mode
        used_by = self._cuda.memory.used_by
        torch.Tensor.record_stream = lambda tensor, stream: used_by(tensor.data_ptr(), stream)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.Tensor.record_stream = self._record_stream
        super().__exit__(*error)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.copy_ and kwargs.get("non_blocking"):
            self._cuda.copy(*args)
            return args[0]
        if function in (torch.Tensor.reshape, torch.Tensor.contiguous) and self._scattered(args[0]):
            return self._gather(args[0]).view(*args[1:])
        if kwargs.pop("pin_memory", False):
            return self._cuda.pin(function(*args, **kwargs))
        if self._is_on_it(kwargs.get("device")):
            return self._make(function, args, {**kwargs, "device": "cpu"})
        if function not in _VIEWS:
            self._cuda.settle()
        return function(*args, **kwargs)

    def _is_on_it(self, device: Any) -> bool:
        return device is not None and torch.device(device).type == self._cuda.kind

    def _make(self, function: Any, args: Any, kwargs: Any) -> torch.Tensor:
        made = function(*args, **kwargs)
        tensor = self._cuda.allocate(made)
        if function not in (torch.empty, torch.empty_like):
            self._cuda.settle()
            tensor.copy_(made)
        return tensor

    def _scattered(self, tensor: torch.Tensor) -> bool:
        return not tensor.is_contiguous() and self._cuda.memory.holds(tensor.data_ptr())

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy on the device, gathered on the current stream."""
        gathered = self._cuda.allocate(torch.empty(tensor.shape, dtype=tensor.dtype))
        to, from_ = _Raw.of(gathered), _Raw.of(tensor)
        self._cuda.current_stream().submit(lambda: to.tensor().copy_(from_.tensor()))
        return gathered


_VIEWS = {torch.Tensor.view, torch.Tensor.__getitem__, torch.Tensor.data_ptr, torch.Tensor.reshape, torch.frombuffer}


def collected(*references: Callable[[], Any]) -> list[bool]:
    """For each object whether it has been garbage-collected."""
    gc.collect()
    return [reference() is None for reference in references]


# ---- what the kernel reports


def _mapped(address: int, length: int) -> tuple[str, ...]:
    """The mappings in an address range: device, inode and name of each, and the mapping's offset in the file."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, _, rest = line.partition(" ")
        begin, end = (int(bound, 16) for bound in bounds.split("-"))
        if begin < address + length and address < end:
            found.append(f"{max(begin, address):x} {rest}")
    return tuple(found)


def _is_mapped(address: int, length: int) -> bool:
    page = mmap.PAGESIZE
    start = address // page * page
    return _pages(start, -(-(address + length - start) // page) * page) is not None


def _is_resident(start: int, length: int) -> bool:
    pages = _pages(start, length)
    return pages is not None and all(page & 1 for page in pages)


def _pages(start: int, length: int) -> bytes | None:
    """One byte per page, with its lowest bit set if it is resident; None if part of the range is unmapped."""
    vector = (ctypes.c_ubyte * (length // mmap.PAGESIZE))()
    failed = _libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(length), vector)
    return None if failed else bytes(vector)
