# SPDX-License-Identifier: Apache-2.0
"""The `vllm.general_plugins` entry point: makes `ECLMCacheConnector` known by its name alone, and watches weights."""

from __future__ import annotations

NAME = "ECLMCacheConnector"


def register() -> None:
    """Runs in every vLLM process at its start; may run twice. Imports nothing of the cache itself."""
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    from . import worker_calls

    if NAME not in ECConnectorFactory._registry:  # a second registration is a ValueError
        ECConnectorFactory.register_connector(NAME, "lmcache_ec.adapters.vllm.connector", NAME)
    worker_calls.install()
