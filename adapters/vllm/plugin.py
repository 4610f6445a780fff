# SPDX-License-Identifier: Apache-2.0
"""The `vllm.general_plugins` entry point. vLLM calls `register` in each process, front ends and workers too."""

from __future__ import annotations

from . import front_end, start, worker_calls
from .ours import NAME


def register() -> None:
    """Register `ECLMCacheConnector`, wrap the front end's naming, check the configuration, and watch weights. May run
    twice."""
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    if NAME not in ECConnectorFactory._registry:  # a second registration is a ValueError
        ECConnectorFactory.register_connector(NAME, "lmcache_ec.adapters.vllm.connector", NAME)
    for module in (front_end, start, worker_calls):
        module.install()
