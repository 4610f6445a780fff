# SPDX-License-Identifier: Apache-2.0
"""The device under test, as the checks see it: `torch.cuda` or a stand-in for it."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gpu_check.model import Engines

FIRST = "benchmarks.gpu_check.card:first_card"
"""Name of the card's opener, so that a child process can open the card, too."""


class NoCard(Exception):
    """There is no device to check; the message gives the reason."""


@dataclass(frozen=True)
class Card:
    """`cuda` is `torch.cuda` or its stand-in; `opener` is the "module:function" that opened this card; `engines`
    describes how vLLM is started on it."""

    device: torch.device
    cuda: Any
    opener: str
    facts: dict[str, str]
    engines: Engines = field(default_factory=Engines)

    def event(self) -> Any:
        """A timing event; a thread that waits for it sleeps."""
        return self.cuda.Event(enable_timing=True, blocking=True)

    def stream(self) -> Any:
        return self.cuda.current_stream(self.device)

    def empty(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(rows, width, dtype=dtype, device=self.device)

    def give_back(self) -> None:
        """Release cached memory on the card for the next process: torch keeps freed memory until then."""
        gc.collect()
        self.cuda.empty_cache()

    def hold(self, seconds: float) -> None:
        """Keep the current stream busy for about this long: work queued meanwhile waits behind it."""
        self.cuda._sleep(int(seconds * 1e9))  # cycles; today's cards run at 1 to 2.5 GHz


def open_card(opener: str) -> AbstractContextManager[Card]:
    """Open the card; raises NoCard on entering if there is none."""
    module, _, name = opener.partition(":")
    context: AbstractContextManager[Card] = getattr(importlib.import_module(module), name)()
    return context


@contextmanager
def first_card() -> Iterator[Card]:
    """The first GPU that CUDA_VISIBLE_DEVICES allows."""
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        raise NoCard(f"torch {torch.__version__} finds no GPU" + ("" if built else ": it was built without CUDA"))
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    yield Card(
        device,
        torch.cuda,
        FIRST,
        {
            "card": properties.name,
            "memory": f"{properties.total_memory / (1 << 30):.0f} GiB",
            "capability": f"{properties.major}.{properties.minor}",
            "torch": torch.__version__,
            "runtime": str(torch.version.cuda or torch.version.hip),
        },
    )
