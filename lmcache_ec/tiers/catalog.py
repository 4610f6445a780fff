# SPDX-License-Identifier: Apache-2.0
"""What a tier says it holds, in the place of a listing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Shard(NamedTuple):
    """What begins with the byte `number`: how many entries, and their bits, None for what it was at the last call."""

    number: int
    entries: int
    bits: bytes | None


@dataclass(frozen=True, slots=True)
class Catalog:
    """What is in a namespace, as bits of the presence filter. Used once, by the thread that asked for it.

    `shards` makes requests, and may raise what a tier raises; None where all are as they were. `longest`: bytes of the
    longest. `digests`: besides these. `again_s`: how soon there will be more to read, where that is known.
    """

    shards: Iterator[Shard] | None = None
    longest: int = 0
    digests: Sequence[bytes] = ()
    again_s: float | None = None
