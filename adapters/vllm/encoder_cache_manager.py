# SPDX-License-Identifier: Apache-2.0
"""The order in which vLLM's own encoder cache, on the device, evicts entries.

vLLM's manager evicts in the order of last release (`freeable`, 0.11 to 0.33). This one differs only in that order,
which it sets right before vLLM evicts: accounting, references, the limit and messages to workers stay vLLM's code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager, EncoderDecoderCacheManager

from lmcache_ec.eviction import Below, Uses, restore_s, worth
from lmcache_ec.eviction_order import USES_HALF_LIFE, CostOrder, LruOrder, Order

from .lower_tiers import LowerTiers, below

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

_MOST_ASKED = 32
"""Maximum entries whose cost is looked up to make room for one item, ten microseconds each: usually three."""

_ROW_BYTES = 4096
"""A guess: the cost assumed for an entry before it is looked up may be too low, but not too high."""

_POLICIES = ("cost", "lru")


@dataclass(slots=True)
class _Cached:
    modality: str
    rows: int
    last_user: str
    restore_s: float


class TierAwareEncoderCacheManager(EncoderCacheManager):
    """vLLM's encoder-cache manager, but evicting what is cheapest to get back. Runs on the scheduler's thread.

    Named in `--ec-manager-config`; its `manager_config` has one key, `policy`: `cost` (the default), or `lru`, the
    least recently accessed first. Without a connector of ours `cost` is `lru`.

    An accessed entry is assumed to be in LocalCPU: its save is over by the time that it may be evicted. The real cost
    of getting it back is looked up when it is about to be evicted. If that is higher, it moves up, and others go first.
    """

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: VllmConfig) -> EncoderCacheManager:
        """ValueError for an invalid `manager_config`. Encoder-decoder models get vLLM's own manager for them: it keeps
        nothing that could be evicted."""
        policy = policy_of(getattr(vllm_config.ec_manager_config, "manager_config", {}))
        if vllm_config.model_config.is_encoder_decoder:
            return EncoderDecoderCacheManager(cache_size=cache_size)
        return cls(cache_size, below(vllm_config) if policy == "cost" else None)

    def __init__(self, cache_size: int, lower_tiers: LowerTiers | None = None) -> None:
        """`cache_size` is in rows of encoder output. Without `lower_tiers`: least recently accessed first."""
        super().__init__(cache_size)
        self._lower_tiers = lower_tiers
        self._begin()

    def _begin(self) -> None:
        self._uses = Uses(USES_HALF_LIFE)
        self._known: dict[str, _Cached] = {}
        """All entries cached."""
        self._order: Order[str] = LruOrder() if self._lower_tiers is None else CostOrder(self._worth)

    def reset(self) -> None:
        super().reset()
        self._begin()

    def check_and_update_cache(self, request: Request, input_id: int) -> bool:
        held = super().check_and_update_cache(request, input_id)
        if held:
            self._access(request, input_id)
        return bool(held)

    def allocate(self, request: Request, input_id: int) -> None:
        super().allocate(request, input_id)
        self._access(request, input_id)

    def can_allocate(
        self, request: Request, input_id: int, encoder_compute_budget: int, num_embeds_to_schedule: int
    ) -> bool:
        rows = request.get_num_encoder_embeds(input_id)
        needed = rows + num_embeds_to_schedule
        if rows <= encoder_compute_budget and self.num_free_slots < needed <= self.num_freeable_slots:
            for identifier in reversed(self._take_out(needed - self.num_free_slots)):
                self.freeable.move_to_end(identifier, last=False)  # vLLM evicts from the front
        return bool(super().can_allocate(request, input_id, encoder_compute_budget, num_embeds_to_schedule))

    def _access(self, request: Request, input_id: int) -> None:
        """A request that asks in several passes, or has an item twice, counts as one use."""
        feature, rows = request.mm_features[input_id], request.get_num_encoder_embeds(input_id)
        identifier = feature.identifier
        known = self._known.get(identifier)
        if known is None or known.last_user != request.request_id:
            self._uses.add(identifier)
        cheapest_s = restore_s(Below.MEMORY, _ROW_BYTES * rows, rows)
        self._known[identifier] = _Cached(feature.modality, rows, request.request_id, cheapest_s)
        self._order.discard(identifier)
        self._order.add(identifier)

    def _worth(self, identifier: str) -> float:
        known = self._known[identifier]
        return worth(known.rows, known.restore_s, self._uses.count(identifier))

    def _take_out(self, rows: int) -> list[str]:
        """The entries to evict to free `rows` rows, in order of eviction. That many rows must be unused."""
        victims: list[str] = []
        asked: set[str] = set()
        while rows > 0:
            victim = next(identifier for identifier in self._order if identifier in self.freeable)
            if self._lower_tiers is not None and victim not in asked and len(asked) < _MOST_ASKED:
                asked.add(victim)
                if self._costs_more(victim, self._lower_tiers):
                    self._order.remove(victim)
                    self._order.add(victim)
                    continue
            self._order.age(victim)
            self._order.remove(victim)
            rows -= self._known.pop(victim).rows
            victims.append(victim)
        return victims

    def _costs_more(self, identifier: str, lower_tiers: LowerTiers) -> bool:
        """Look up the cost of getting it back. Whether that is more than was assumed."""
        known = self._known[identifier]
        thought_s, known.restore_s = known.restore_s, lower_tiers.restore_s(identifier, known.modality, known.rows)
        return known.restore_s > thought_s


def policy_of(manager_config: dict[str, Any]) -> str:
    """The policy in a `manager_config`. ValueError if it is invalid, stating what is allowed."""
    unknown = sorted(manager_config.keys() - {"policy"})
    if unknown:
        raise ValueError(f"manager_config: unknown key {unknown[0]!r}; TierAwareEncoderCacheManager knows 'policy'")
    policy = manager_config.get("policy", "cost")
    if policy not in _POLICIES:
        raise ValueError(f"manager_config: policy is {policy!r}; it must be one of {', '.join(_POLICIES)}")
    return str(policy)
