# SPDX-License-Identifier: Apache-2.0
"""The `vllm.general_plugins` entry point. vLLM calls `register` in each of its processes, front end and workers too."""

from __future__ import annotations

NAME = "ECLMCacheConnector"


def register() -> None:
    """Make `ECLMCacheConnector` known, have the front end say who named what, and watch weights. May run twice."""
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    from . import worker_calls
    from .front_end import install as install_front_end
    from .start import install as install_start

    if NAME not in ECConnectorFactory._registry:  # a second registration is a ValueError
        ECConnectorFactory.register_connector(NAME, "lmcache_ec.adapters.vllm.connector", NAME)
    install_front_end()
    install_start()
    worker_calls.install()
