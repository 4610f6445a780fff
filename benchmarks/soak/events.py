# SPDX-License-Identifier: Apache-2.0
"""Operations on a serving engine through its own interface: cache resets, weight changes in place, sleep.

vLLM leaves it to the caller to keep its own caches free of entries from other weights, and may become inconsistent if
they are reset while requests run. So every change waits for running requests or pauses them. Each order in common use
is here: resets before the change (vLLM's own `pause`) and after it, a reload from another checkpoint, with requests
that run to their end first, and with requests that are aborted. The connector is not notified of any of this.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol

from benchmarks.soak.judge import Judge, Life
from benchmarks.soak.parts import vllm_version
from lmcache_ec.adapters.vllm.versions import minor


class Stage(Protocol):
    """The soak as events see it."""

    judge: Judge
    checkpoints: Sequence[Path]

    @property
    def life(self) -> Life: ...

    async def post(self, path: str, body: object = None) -> Any: ...

    def closed(self, *, drained: bool) -> AbstractAsyncContextManager[None]:
        """No new request is sent within the block; with `drained`, none is under way either."""


Event = Callable[[Stage, Random], Awaitable[None]]


async def _reset_encoder_cache(stage: Stage, chance: Random) -> None:
    async with stage.closed(drained=True):
        await stage.post("/reset_encoder_cache")


async def _reset_all(stage: Stage, chance: Random) -> None:
    async with stage.closed(drained=True):
        await _resets(stage)


async def _sleep(stage: Stage, chance: Random) -> None:
    """On a CPU no memory is released, but every cache is emptied and the engine is woken up."""
    async with stage.closed(drained=True):
        await stage.post("/sleep?level=1&mode=wait")
        await stage.post("/wake_up")


async def _weights_after_reset(stage: Stage, chance: Random) -> None:
    """vLLM's own order: the pause empties all caches, then the weights change, and nothing is reset afterwards."""
    async with stage.closed(drained=True), _paused(stage, "mode=wait&clear_cache=true"):
        await _change(stage, chance, _in_place)


async def _weights_before_reset(stage: Stage, chance: Random) -> None:
    async with stage.closed(drained=True):
        await _change(stage, chance, _in_place)
        await _resets(stage)


async def _weights_reloaded(stage: Stage, chance: Random) -> None:
    async with stage.closed(drained=True):
        await _change(stage, chance, _reloaded)
        await _resets(stage)


async def _weights_under_load(stage: Stage, chance: Random) -> None:
    """Requests under way run to their end with the old weights, while the engine waits for the change."""
    async with stage.closed(drained=False), _paused(stage, "mode=wait&clear_cache=false"):
        await _change(stage, chance, _in_place)
        await stage.post("/reset_encoder_cache")
        await stage.post("/reset_prefix_cache")


async def _weights_with_aborts(stage: Stage, chance: Random) -> None:
    """Requests under way are aborted, including promised loads and encodes whose output was to be saved."""
    async with stage.closed(drained=False):
        stage.judge.cutting(stage.life)
        async with _paused(stage, "mode=abort&clear_cache=false"):
            await _change(stage, chance, _in_place)
            await stage.post("/reset_encoder_cache")
            await stage.post("/reset_prefix_cache")


@contextlib.asynccontextmanager
async def _paused(stage: Stage, how: str) -> AsyncIterator[None]:
    await stage.post(f"/pause?{how}")
    try:
        yield
    finally:
        await stage.post("/resume")


async def _change(stage: Stage, chance: Random, how: Callable[[Stage, Path], Awaitable[None]]) -> None:
    """Change to the weights of any checkpoint: sometimes the same one, sometimes an earlier one."""
    weights = chance.randrange(len(stage.checkpoints))
    stage.judge.changing(stage.life, weights)
    await how(stage, stage.checkpoints[weights])
    stage.judge.changed(stage.life, weights)


async def _in_place(stage: Stage, checkpoint: Path) -> None:
    if minor(vllm_version()) < (0, 32):  # cannot do it in place yet
        return await _reloaded(stage, checkpoint)
    await stage.post("/collective_rpc", {"method": "soak_load", "args": [str(checkpoint)]})


async def _reloaded(stage: Stage, checkpoint: Path) -> None:
    await stage.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}})


async def _resets(stage: Stage) -> None:
    await stage.post("/reset_prefix_cache")
    await stage.post("/reset_mm_cache")
    await stage.post("/reset_encoder_cache")


@dataclass(frozen=True, slots=True)
class Kind:
    """`weight`: how often, relative to the others."""

    name: str
    do: Event
    weight: float
    changes_weights: bool = False


EVENTS = (
    Kind("reset-encoder", _reset_encoder_cache, 4),
    Kind("reset-all", _reset_all, 2),
    Kind("sleep", _sleep, 1),
    Kind("weights-after-reset", _weights_after_reset, 2, True),
    Kind("weights-before-reset", _weights_before_reset, 2, True),
    Kind("weights-reloaded", _weights_reloaded, 2, True),
    Kind("weights-under-load", _weights_under_load, 2, True),
    Kind("weights-with-aborts", _weights_with_aborts, 1, True),
)
