# SPDX-License-Identifier: Apache-2.0
"""A step's orders to a rank: which places to load from and save to. Independent of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmcache_ec.entry import TensorSpec
from lmcache_ec.positional import positional
from lmcache_ec.weights import Held


@positional
@dataclass(frozen=True, slots=True)
class Load:
    """Copy a live place into vLLM's encoder cache. `item` is (request, index) of an item that this step schedules.

    Place 0: the promise is void and the item must be encoded. An item that is not `encodable` is loaded even if the
    weights have changed since it was promised: vLLM would die of a missing item. `staged` is the number under which the
    payload is already on the device; 0: it is not.
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
    """One step's orders, from the scheduler side to every rank. `step` counts only steps that have orders.

    `encoder_inputs` is the very dictionary `scheduler_output.scheduled_encoder_inputs` (pickling both in one message
    preserves identity): what a rank adds there is encoded right after its loads, in vLLM's `_execute_mm_encoder`.
    `encodes` are a producer's items, (request, index), that every rank adds.

    `weights` are those that the orders are for, in `namespace`; a rank with other weights copies nothing. With `look`
    it checks them first.
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
