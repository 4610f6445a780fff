# SPDX-License-Identifier: Apache-2.0
"""What a producer need not encode: items that the tiers its consumers reach already have.

This relies on these facts about vLLM 0.32:

- A pure producer runs no language model (`v1/worker/gpu_model_runner.py`: `execute_model` returns after the encoder;
  `v1/worker/mm_encoder_model_runner.py`). No tensor is gathered and nothing is loaded: if `has_cache_item` returns True
  for an item, the only effect is that it is not encoded.
- vLLM's own encoder cache counts such an item as cached from then on (`v1/core/sched/scheduler.py`,
  `_allocate_encoder_inputs`), though no rank has it: it is *hollow*. vLLM does not ask about it again, so if the tiers
  have lost it since, the ranks must add it to the items about to be encoded.
- The response to a request announces what consumers can fetch, and a consumer whose request omits the media fails
  without it. So each request asks the tiers anew; only what they had or took during *this* request is announced.
"""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

from .item import Item, Standing

if TYPE_CHECKING:
    from lmcache_ec.cache import EncoderCache
    from lmcache_ec.entry import TensorSpec
    from lmcache_ec.fetches import Probe
    from lmcache_ec.place import Place


_FRESH_S = 1.0
"""Maximum age of the tiers' answer while its request waits or keeps running."""


class Producer:
    """One per engine, on its scheduler side. Runs on the scheduler's thread only; no lock, no I/O."""

    def __init__(self, cache: EncoderCache) -> None:
        self.counts = {"encodes_skipped": 0, "encodes_again": 0}
        self._cache = cache
        self._hollow: set[str] = set()  # counted as cached by vLLM, but on no rank
        self._skipped: set[str] = set()  # answered True in this pass
        self._again: dict[str, tuple[str, Item]] = {}  # hollow and in no tier: to be encoded in this pass

    # ---- before an item is scheduled

    def standing(
        self, request_id: str, item: Item, spec: TensorSpec | None, place: Place | None, cached: bool, now: float
    ) -> Standing:
        """The standing of an item. `place` has its live entry; `spec` is what the entry must be (None: unknown, or
        another item's entry has the name); `cached` is whether vLLM counts it as cached."""
        if not item.persists or not self._cache.persists:
            return Standing.SETTLED if place is not None or (cached and item.encodable) else Standing.MISSED
        under_way = self._cache.under_way(item.name, now)  # another request's encode; it may reach the tiers
        if not under_way and (item.probe is None or self._outdated(item.probe, now)):
            item.probe = self._cache.probe(item.name, spec, now)
        if not item.missed and (under_way or item.probe is None or item.probe.held is None):
            return Standing.PENDING
        if self._in_tiers(item.probe):
            return Standing.SETTLED
        if place is not None:
            return self._written_again(item, place, now)
        if not cached or not item.encodable:
            return Standing.MISSED
        if item.identifier in self._hollow:
            self._again[item.identifier] = (request_id, item)
        elif spec is not None:
            self._cache.book.remember(item.name, spec)  # the ranks still have the tensor
        return Standing.SETTLED

    def _written_again(self, item: Item, place: Place, now: float) -> Standing:
        """The arena has an entry that the tiers lack: it is written to them again, once per request."""
        if not item.rewritten:
            item.rewritten = True
            self._cache.rewrite(place)
        if self._cache.is_writing(place, now) and not item.missed:
            return Standing.PENDING
        if item.probe is not None and self._cache.below.covers(place.tiers):
            item.probe.held = place.tiers
        return Standing.SETTLED if item.encodable or self._in_tiers(item.probe) else Standing.MISSED

    def refresh(self, item: Item, spec: TensorSpec | None, now: float) -> None:
        """Ask again about an item of a request that keeps running: its response must announce what is there then."""
        if item.probe is not None and item.probe.held is not None and now - item.probe.asked_at > _FRESH_S:
            item.probe = self._cache.probe(item.name, spec, now)

    def _outdated(self, probe: Probe, now: float) -> bool:
        return self._in_tiers(probe) and now - probe.asked_at > _FRESH_S

    def _in_tiers(self, probe: Probe | None) -> bool:
        return probe is not None and probe.held is not None and self._cache.below.covers(probe.held)

    # ---- within a pass

    def has(self, item: Item, place: Place | None) -> bool:
        """Whether vLLM need not encode the item: the tiers or the arena have it."""
        if place is None and not self._in_tiers(item.probe):
            return False
        self._skipped.add(item.identifier)
        return True

    def skips(self, identifier: str) -> bool:
        """Whether vLLM has just allocated room for an item whose encode was skipped."""
        if identifier not in self._skipped:
            self._hollow.discard(identifier)
            return False
        self.counts["encodes_skipped"] += identifier not in self._hollow
        self._hollow.add(identifier)
        return True

    @property
    def again(self) -> dict[str, tuple[str, Item]]:
        """Items, by identifier and with a request, that the ranks must encode though vLLM did not schedule them."""
        return self._again

    def encoded_again(self, identifier: str) -> None:
        self.counts["encodes_again"] += 1
        self._hollow.discard(identifier)

    def not_encoded(self, identifier: str) -> None:
        """vLLM has cancelled an encode and still counts the item as cached."""
        self._hollow.add(identifier)

    def end_pass(self) -> None:
        self._skipped.clear()
        self._again.clear()

    def follow(self, cached: Set[str]) -> None:
        """vLLM's set of cached items has changed."""
        self._hollow &= cached

    # ---- the end of a request

    def stored(self, item: Item, place: Place | None) -> bool:
        """Whether consumers can find the item, as far as this request has learned."""
        if item.probe is None or item.probe.held is None:
            return False
        return self._in_tiers(item.probe) or (place is not None and self._cache.below.covers(place.tiers))
