# SPDX-License-Identifier: Apache-2.0
"""How long the encoder takes in a step, from the last load to its first output."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_Reading = Callable[[], float]


def _unknown() -> float:
    return 0.0


class EncodeClock:
    """Runs in the forward pass and never waits. On a device it uses two events on the model's stream; on a host, where
    the encoder is done when it returns, the host's clock.

    vLLM's V1 runner hands over the first output when all are computed (`_execute_mm_encoder`), the V2 runner after it
    has also merged them into the text's embeddings, which takes little time.
    """

    def __init__(self, event: Callable[[], Any] | None = None) -> None:
        """`event` creates a device event that records the time; without it, the host's clock is used."""
        self._event = event
        self._began: Any = None
        self._ended: Any = None

    def begin(self) -> None:
        self._began, self._ended = self._now(), None

    def end(self) -> None:
        """Only the first call after `begin` counts."""
        if self._began is not None and self._ended is None:
            self._ended = self._now()

    def take(self) -> _Reading:
        """Returns a function for the seconds it took, to be called when the step's copies are done; 0 if nothing was
        encoded. That call may wait for the device."""
        self.end()
        began, ended = self._began, self._ended
        self._began = self._ended = None
        if began is None:
            return _unknown
        if self._event is None:
            return lambda: float(ended - began)
        return lambda: _between(began, ended)

    def _now(self) -> Any:
        if self._event is None:
            return time.perf_counter()
        event = self._event()
        event.record()
        return event


def _between(began: Any, ended: Any) -> float:
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3  # in milliseconds


def clock_for(kind: str) -> EncodeClock:
    """The clock for the type of device that this process uses (`torch.device.type`)."""
    if kind == "cpu":
        return EncodeClock()
    import torch

    accelerator = torch.get_device_module(kind)
    waits_asleep = {"blocking": True} if kind == "cuda" else {}
    return EncodeClock(lambda: accelerator.Event(enable_timing=True, **waits_asleep))
