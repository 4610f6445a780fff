# SPDX-License-Identifier: Apache-2.0
"""Who can say what the tiers below vLLM's own encoder cache have: the connector of the same engine.

vLLM creates connector and encoder-cache manager one after another, on one thread of one process, and hands neither to
the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

from .topology import engine_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class LowerTiers(Protocol):
    """Asked on the scheduler's thread, in a scheduling pass."""

    def restore_s(self, identifier: str, modality: str, rows: int) -> float:
        """Seconds that having the item back would cost."""


_lower_tiers: WeakValueDictionary[str, LowerTiers] = WeakValueDictionary()


def offer(vllm_config: VllmConfig, lower_tiers: LowerTiers) -> None:
    """For as long as somebody holds them."""
    _lower_tiers[engine_name(vllm_config)] = lower_tiers


def below(vllm_config: VllmConfig) -> LowerTiers | None:
    """Those of this engine; None where it has no connector of ours, or that one does nothing."""
    if vllm_config.ec_transfer_config is None:
        return None
    return _lower_tiers.get(engine_name(vllm_config))
