# SPDX-License-Identifier: Apache-2.0
"""The weights of one rank's encoder, checked whenever they may have changed.

When they are checked, on the worker's main thread, between steps or at the start of a step:

- once the model is loaded: these are the weights that the engine's namespace stands for;
- after every call to the worker that may have changed them (see `worker_calls`), successful or not;
- at a step that asks for it (`StepMetadata.look`): once in a while for writers that make no call, and while the weights
  are in doubt. The model's own `load_weights`, which trainers in this process call, puts them in doubt.

When they are not checked: from `sleep` to the `wake_up` that maps their memory again, and while some are on the meta
device, as between `start_weight_update` and `finish_weight_update` of vLLM's layerwise reload. Then they are in doubt.
Sleep of level 2 returns them with random content: also in doubt, until something is written or a step runs.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import xxhash

from lmcache_ec.complaints import Complaints
from lmcache_ec.weights import Held

from .encoder_tensors import Tensors, encoder_tensors
from .tensor_digest import tensor_digest

Report = Callable[[int, str], None]
"""Reports to the scheduler side the number of calls and the digest; "" for weights in doubt."""

_OWNERS = (
    ("vllm.device_allocator.cumem", "CuMemAllocator"),
    ("vllm.device_allocator.xpumem", "XpuMemAllocator"),
)
"""Allocators of the memory of weights that can sleep: vLLM 0.30 to 0.33, one object per process."""


class EncoderWeights:
    """The weights of one rank's encoder. Lives in the worker process, on its main thread. It never raises."""

    def __init__(self, model: torch.nn.Module, report: Report, logger: logging.Logger) -> None:
        """`model` was just loaded."""
        self._report = report
        self._complaints = Complaints(logger)
        self._model = model
        self._calls = 0
        self._digest = ""
        self._known = ""  # the last one that was reported
        self._asleep = False
        self._rubbish = False  # back from sleep of level 2, and nothing has been written since
        self._never_loaded: frozenset[str] = frozenset()  # on the meta device from the start
        self._buffers = ""  # stands for what calls have made of the buffers
        self._stand_for: dict[str, str] = {}  # digest of buffers -> what it stands for
        self._guarded(self._begin)
        self.look()

    # ---- when weights may change

    @contextmanager
    def call(self, name: str, argument: object, model: Callable[[], torch.nn.Module]) -> Iterator[None]:
        """Wraps a call to the worker that may change weights. `name` is a method's name, or empty; `argument` is its
        first argument, if any; `model` returns the worker's model afterwards."""
        self._calls += 1
        self._send("")
        self._guarded(self._note_buffers)
        done = False
        try:
            yield
            done = True
        finally:
            if done:
                self._follow_sleep(name, argument)
            self._guarded(lambda: self._after(model()))
            self.look(rubbish=name != "wake_up")

    def look(self, rubbish: bool = True) -> None:
        """Compute the digest and report it, or doubt if there is none. `rubbish`: take any content for weights."""
        digest = self._guarded(self._read) or ""
        if self._rubbish and not rubbish and digest != self._known:
            digest = ""
        if digest:
            self._rubbish = False
        self._send(digest)

    def are(self, held: Held | None, rank: int) -> bool:
        """Whether these are the weights a step was prepared for; this rank's part of those is `held.digests[rank]`."""
        return (
            held is not None and bool(self._digest) and (held.calls, held.digests[rank]) == (self._calls, self._digest)
        )

    def _send(self, digest: str) -> None:
        """Report changes only: in doubt, the number of calls makes no difference."""
        if digest or self._digest:
            self._report(self._calls, digest)
        self._digest = digest
        self._known = digest or self._known

    # ---- what they are

    def _begin(self) -> None:
        found = self._tensors()
        self._never_loaded = frozenset(name for name, tensor in found.parameters if tensor.is_meta)
        self._stand_for[self._digest_of_buffers(found)] = self._buffers
        self._doubt_after_loading()

    def _after(self, model: torch.nn.Module) -> None:
        """A call is over: its changes to the buffers count; those that the model itself makes between calls do not."""
        if model is not self._model:
            self._model = model
            self._doubt_after_loading()
        if not self._unmapped():
            digest = self._digest_of_buffers(self._tensors())
            self._buffers = self._stand_for.setdefault(digest, digest)

    def _note_buffers(self) -> None:
        if not self._unmapped():
            self._stand_for.setdefault(self._digest_of_buffers(self._tensors()), self._buffers)

    def _read(self) -> str:
        """The current digest; "" while the weights cannot be read."""
        if self._unmapped():
            return ""
        found = self._tensors()
        loaded = [(name, tensor) for name, tensor in found.parameters if name not in self._never_loaded]
        if any(tensor.is_meta for _, tensor in loaded):
            return ""
        packed = (f"{name} {digest or f'unseen {self._calls}'}" for name, digest in found.packed)
        return xxhash.xxh3_128_hexdigest("\n".join((tensor_digest(loaded), self._buffers, *packed)).encode())

    def _tensors(self) -> Tensors:
        return encoder_tensors(self._model)

    @staticmethod
    def _digest_of_buffers(found: Tensors) -> str:
        return tensor_digest((name, buffer) for name, buffer in found.buffers if not buffer.is_meta)

    def _doubt_after_loading(self) -> None:
        """Trainers in the same process (TRL) load into the model without such a call, one tensor at a time: too often
        for a check of each."""
        model = self._model
        load = getattr(model, "load_weights", None)
        if load is None:
            return

        @functools.wraps(load)
        def load_in_doubt(*args: object, **kwargs: object) -> object:
            self._send("")
            try:
                return load(*args, **kwargs)
            finally:
                self._send("")  # another thread may have made a check in between

        model.load_weights = load_in_doubt

    # ---- sleep

    def _follow_sleep(self, name: str, argument: object) -> None:
        """`Worker.sleep(level=1)`, `wake_up(tags=None)` and `discard(tags)` in vllm/v1/worker/gpu_worker.py."""
        tags = argument if isinstance(argument, list | tuple) else ()
        match name:
            case "sleep":
                self._asleep, self._rubbish = True, argument == 2
            case "wake_up" if not tags or "weights" in tags:
                self._asleep = False
            case "discard" if "weights" in tags:
                self._asleep = self._rubbish = True

    def _unmapped(self) -> bool:
        """Whether the weights' memory is unmapped. Its allocator knows, however it was put to sleep; without one, the
        names of the calls decide."""
        allocators = [
            getattr(getattr(sys.modules.get(module), name, None), "instance", None) for module, name in _OWNERS
        ]
        allocations = [data for each in allocators if each is not None for data in each.pointer_to_data.values()]
        weights = [data.is_asleep for data in allocations if data.tag == "weights"]
        return any(weights) if weights else self._asleep

    def _guarded(self, look: Callable[[], str | None]) -> str | None:
        try:
            return look()
        except Exception as error:
            self._complaints.warn("weights", f"the encoder's weights cannot be read, and are in doubt: {error}")
            return None
