# SPDX-License-Identifier: Apache-2.0
"""The multimodal inputs of a request, and what the scheduler side remembers of them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from lmcache_ec.fetches import Probe
from lmcache_ec.place import Place

from .identifiers import Durability, Name


class Standing(enum.Enum):
    """The state of a request's item before the request is scheduled."""

    SETTLED = enum.auto()
    """Leased to the request, or in vLLM's own cache, or to be promised when vLLM asks for it."""
    PENDING = enum.auto()
    """The item can still arrive."""
    MISSED = enum.auto()
    """The item will not arrive: vLLM encodes it, if it carries anything to encode."""


@dataclass(slots=True)
class Item:
    """One multimodal input of a request: its prompt tokens [start, end), its expected shape, and what is known of it.

    `names` are those the cache may hold it under, the one it is saved under first; empty: it is never cached.
    `held_at` is the request's progress when vLLM allocated room for the item (tokens computed, preemptions): if it asks
    again with more tokens and no preemption since, the request holds the item.
    """

    identifier: str
    start: int
    end: int
    modality: str
    rows: int
    names: tuple[Name, ...]
    encodable: bool
    announced: bool = False
    """A producer has announced the item: it is waited for even if no listing has it."""
    missed: bool = False
    awaited: bool = False
    """The request has waited for it."""
    refused: bool = False
    """The load policy preferred an encode to waiting for it."""
    late: bool = False
    """It had not arrived by its request's deadline."""
    held_at: tuple[int, int] | None = None
    dropped: bool = False
    """vLLM's workers have dropped its payload (0.33's V2 runner, once the item is computed)."""
    recorded: bool = False
    """It has been reported to the recorder of what requests need."""
    probe: Probe | None = None
    """A producer's query, made for this request, for the tiers that have the item."""
    rewritten: bool = False
    """The producer has asked, for this request, for the item to be written to the tiers again."""

    @property
    def name(self) -> str:
        """The name it is saved under."""
        return self.names[0].text if self.names else self.identifier

    @property
    def persists(self) -> bool:
        return bool(self.names) and self.names[0].durability is Durability.PERSISTENT

    def shape_of(self, name: Name) -> Shape:
        return name.text, self.modality, self.rows


Shape = tuple[str, str, int]
"""Name, modality and rows that an entry must match."""


@dataclass(slots=True)
class Memo:
    """What is remembered of one request. `end` is where its last item ends: past it there is nothing to do.

    `named` is the last item of each identifier: all items of an identifier have the same shape, or none is ever cached.
    `signed` are the identifiers that a front end of this engine spelled.
    """

    request_id: str
    items: list[Item]
    named: dict[str, Item]
    end: int
    signed: frozenset[str]
    computed: int = 0
    preemptions: int = 0
    deadline_s: float = 0.0
    leases: dict[str, Place] = field(default_factory=dict)
    waiting_since: float | None = None
    waited_s: float = 0.0
    count: int = field(init=False)
    """Number of items; stored because it is read in every pass."""

    def __post_init__(self) -> None:
        self.count = len(self.items)


def items_of(memos: Mapping[str, Memo], request_id: str) -> list[Item]:
    """The items of a request; none if it is not remembered."""
    memo = memos.get(request_id)
    return [] if memo is None else memo.items
