# SPDX-License-Identifier: Apache-2.0
"""What a tier says it holds, in the place of a listing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Catalog:
    """What is in a namespace, as bits of the presence filter. Used once, by the thread that asked for it.

    `shards` has, for each of the filter's shards, its number and its bits, None for one that is as it was at the last
    call; it makes requests, and may raise what a tier raises. `shards` is None where all are as they were.
    `digests`: besides these. `again_s`: how soon there will be more to read, where that is known.
    """

    entries: int
    longest: int = 0
    """Bytes of the longest shard."""
    shards: Iterator[tuple[int, bytes | None]] | None = None
    digests: Sequence[bytes] = ()
    again_s: float | None = None
