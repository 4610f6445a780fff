# SPDX-License-Identifier: Apache-2.0
"""A connector that does nothing: it shows what vLLM itself does for any connector, the floor of a miss with one."""

from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata


class NothingConnector(ECConnectorBase):  # type: ignore[misc]  # vLLM is not type-checked here
    """Never has an item and keeps none."""

    def start_load_caches(self, encoder_cache: Any, **kwargs: Any) -> None:
        pass

    def save_caches(self, encoder_cache: Any, mm_hash: str, **kwargs: Any) -> None:
        pass

    def has_cache_item(self, identifier: str) -> bool:
        return False

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        return ECConnectorMetadata()
