# SPDX-License-Identifier: Apache-2.0
"""Tensors copied to the device ahead of the step that loads them (`lmcache_ec/staging.py` explains why)."""

from __future__ import annotations

import mmap

import torch

from lmcache_ec.arena import within
from lmcache_ec.channel import Stage
from lmcache_ec.entry import TensorSpec

from .tensors import view


class StagedTensors:
    """A copier's staged tensors, by number. The rank's thread adds and drops them, the forward pass takes them: each is
    one dictionary operation, and a number is never used twice."""

    def __init__(self) -> None:
        self._staged: dict[int, torch.Tensor] = {}

    def stage(self, memory: mmap.mmap, order: Stage) -> str:
        """Returns why the device could not take the payload; empty on success."""
        spec = TensorSpec(order.rows, order.width, order.dtype)
        try:
            if not within(order.offset, max(spec.nbytes, 1), len(memory)):
                raise ValueError(f"{spec.nbytes} bytes at {order.offset} are not within the arena")
            with torch.inference_mode():  # as in the forward pass
                self._staged[order.number] = self.load_ahead(view(memory, order.offset, spec))
        except Exception as error:
            return str(error) or type(error).__name__
        return ""

    def unstage(self, number: int) -> None:
        self._staged.pop(number, None)

    def load_ahead(self, source: torch.Tensor) -> torch.Tensor:
        """A device tensor with the arena's bytes; the copy is complete when this returns."""
        raise NotImplementedError

    def take(self, number: int) -> torch.Tensor | None:
        """The tensor staged under the number, now owned by the forward pass; None if there is none."""
        return self._staged.pop(number, None)
