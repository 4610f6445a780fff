# SPDX-License-Identifier: Apache-2.0
"""Which engines are ours: vLLM loads the plugin for all of them."""

from __future__ import annotations

from typing import Any

NAME = "ECLMCacheConnector"


def is_ours(vllm_config: Any) -> bool:
    """Whether an engine's encoder-cache connector is this package's."""
    transfer = getattr(vllm_config, "ec_transfer_config", None)
    return transfer is not None and transfer.ec_connector == NAME


watched: set[str] = set()
"""Engines (see `topology.engine_name`) in this process whose calls to workers are watched, see `worker_calls`.
Engines that did not load the plugin are missing."""
