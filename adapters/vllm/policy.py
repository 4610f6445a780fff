# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side needs to know of the engine's configuration."""

from __future__ import annotations

from dataclasses import dataclass

from .identifiers import Naming


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings of the engine that decisions depend on. `window` is the longest prefill of a pass, in tokens."""

    producer: bool
    consumer: bool
    window: int
    dtype: str
    widths: dict[str, int]
    deadline_s: float
    start_timeout_s: float
    naming: Naming
    wait_for_producer_s: float = 0.0
    encoder_budget: int = 0
    """Maximum rows that vLLM lets the encoder compute in a pass."""
    weights_check_s: float = 0.0
    follows_weight_versions: bool = False
    reuses_kv: bool = False
    """Whether vLLM caches prefixes: an item whose tokens are there is not needed."""
