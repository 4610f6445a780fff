# SPDX-License-Identifier: Apache-2.0
"""What a step orders a rank to do: which places to load from, which to save to. Knows nothing of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmcache_ec.entry import TensorSpec
from lmcache_ec.positional import positional
from lmcache_ec.weights import Held


@positional
@dataclass(frozen=True, slots=True)
class Load:
    """Copy a live place into vLLM's encoder cache. `item` is (request, index) of one that this step schedules.

    Of place 0 nothing can be copied: what was promised is void, and is to be encoded. One that is not `encodable` is
    loaded though the weights have changed since it was promised: vLLM dies of an item that never comes. What is
    `staged`, under that number, is on the device already.
    """

    place: int
    offset: int
    identifier: str
    spec: TensorSpec
    item: tuple[str, int] | None
    encodable: bool = True
    staged: int = 0


@positional
@dataclass(frozen=True, slots=True)
class Save:
    """Copy the encoder output that vLLM calls `identifier` into a reserved place, as the entry called `name`."""

    place: int
    offset: int
    length: int
    identifier: str
    name: str
    spec: TensorSpec
    persist: bool


@dataclass(slots=True)
class Orders:
    """One step's orders, from the scheduler side to every rank. `step` counts those that carry something.

    `encoder_inputs` is the very dictionary `scheduler_output.scheduled_encoder_inputs` (one pickled message keeps the
    identity): what a rank adds there is encoded right after it has loaded, in vLLM's `_execute_mm_encoder`. `encodes`
    are a producer's items, (request, index), that every rank adds.

    `weights` are those that the orders are about, in `namespace`; a rank that has others copies nothing. With `look` it
    looks at them first.
    """

    arena: str = ""
    step: int = 0
    loads: list[Load] = field(default_factory=list)
    saves: dict[str, Save] = field(default_factory=dict)
    retries: list[Save] = field(default_factory=list)
    encodes: list[tuple[str, int]] = field(default_factory=list)
    encoder_inputs: dict[str, list[int]] | None = None
    namespace: str = ""
    weights: Held | None = None
    look: bool = False
