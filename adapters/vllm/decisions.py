# SPDX-License-Identifier: Apache-2.0
"""What happened to the items that vLLM needed: loaded or encoded, and why; how long requests waited for that."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from lmcache_ec.histogram import LATENCY_NS, NS, SIZE_BYTES, Histogram

if TYPE_CHECKING:
    from lmcache_ec.place import Place

MISS_REASONS = ("new", "not_found", "deadline", "policy", "misfit", "not_cacheable", "off")
"""Why an item was encoded, see `docs/metrics.md`."""


class Decisions:
    """Runs on the scheduler's thread only. Counts what is sent with a step, which does happen; decisions of a pass
    that vLLM takes back are not counted."""

    def __init__(self) -> None:
        self.modalities: list[str] = []
        """The modalities seen so far: at most those of the model."""
        self.ended = False
        """Whether the last known request has ended since this was set to False."""
        self._counts: Counter[str] = Counter()
        self._sizes = Histogram("load_bytes", SIZE_BYTES)
        self._waits = Histogram("deferred_ns", LATENCY_NS)

    def loaded(self, place: Place, modality: str, encode_s: float) -> None:
        """An item is sent to be loaded instead of an encode of `encode_s` (infinite: not known yet). Call before the
        book forgets which tier had it."""
        self._looked_up(modality, "hit")
        self._counts[f"loaded_bytes_{place.origin or 'cpu'}"] += place.length
        self._sizes.add(place.length)
        if math.isfinite(encode_s):
            self._counts["encode_saved_ns"] += int(encode_s * NS)

    def encoded(self, modality: str, reason: str) -> None:
        """An item is sent to be encoded."""
        self._looked_up(modality, "miss")
        self._counts[f"misses_{reason}"] += 1

    def waited(self, seconds: float) -> None:
        """A request was deferred for this long."""
        self._waits.add(int(seconds * NS))

    def counts(self) -> dict[str, int]:
        return {**self._counts, **dict(self._sizes.counts()), **dict(self._waits.counts())}

    def _looked_up(self, modality: str, result: str) -> None:
        if modality not in self.modalities:
            self.modalities.append(modality)
        self._counts[f"look_ups_{modality}_{result}"] += 1
