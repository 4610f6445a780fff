# SPDX-License-Identifier: Apache-2.0
"""What a tier reports that it holds, in place of a listing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Shard(NamedTuple):
    """Keys that begin with the byte `number`: how many, and their bits; None if unchanged since the last call."""

    number: int
    entries: int
    bits: bytes | None


@dataclass(frozen=True, slots=True)
class Catalog:
    """What is in a namespace, as bits of the presence filter. Used once, by the thread that asked for it.

    `shards` makes requests, and may raise what a tier raises; None if all are unchanged. `longest`: bytes of the
    longest. `digests`: keys besides these. `again_s`: how soon there will be more to read, if that is known.
    """

    shards: Iterator[Shard] | None = None
    longest: int = 0
    digests: Sequence[bytes] = ()
    again_s: float | None = None
