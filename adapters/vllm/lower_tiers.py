# SPDX-License-Identifier: Apache-2.0
"""Access to the tiers below vLLM's own encoder cache, through the connector of the same engine.

vLLM creates connector and encoder-cache manager one after the other, on one thread of one process, and passes neither
to the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

from .topology import engine_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class LowerTiers(Protocol):
    """Called on the scheduler's thread, within a scheduling pass."""

    def restore_s(self, identifier: str, modality: str, rows: int) -> float:
        """Seconds it would cost to get the item back."""


_lower_tiers: WeakValueDictionary[str, LowerTiers] = WeakValueDictionary()


def offer(vllm_config: VllmConfig, lower_tiers: LowerTiers) -> None:
    """Register an engine's lower tiers, for as long as another object holds a reference."""
    _lower_tiers[engine_name(vllm_config)] = lower_tiers


def below(vllm_config: VllmConfig) -> LowerTiers | None:
    """The lower tiers of this engine; None if it has no connector of ours, or that one is inert."""
    if vllm_config.ec_transfer_config is None:
        return None
    return _lower_tiers.get(engine_name(vllm_config))
