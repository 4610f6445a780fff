# SPDX-License-Identifier: Apache-2.0
"""What a step orders a rank to do: which places to load from, which to save to. Knows nothing of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmcache_ec.entry import TensorSpec


@dataclass(frozen=True, slots=True)
class Load:
    """Copy a live place into vLLM's encoder cache. `item` is (request, index) of one that this step schedules."""

    place: int
    offset: int
    identifier: str
    spec: TensorSpec
    item: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class Save:
    """Copy an encoder output into a reserved place."""

    place: int
    offset: int
    length: int
    identifier: str
    spec: TensorSpec
    persist: bool


@dataclass(slots=True)
class Orders:
    """One step's orders, from the scheduler side to every rank. `step` counts those that carry something.

    `encoder_inputs` is the very dictionary `scheduler_output.scheduled_encoder_inputs` (one pickled message keeps the
    identity): what a rank adds there is encoded right after it has loaded, in vLLM's `_execute_mm_encoder`.
    """

    arena: str = ""
    step: int = 0
    loads: list[Load] = field(default_factory=list)
    saves: dict[str, Save] = field(default_factory=dict)
    retries: list[Save] = field(default_factory=list)
    encoder_inputs: dict[str, list[int]] | None = None
