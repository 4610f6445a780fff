# SPDX-License-Identifier: Apache-2.0
"""vLLM's ECExampleConnector, with its save and load called as a worker calls them."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import safetensors.torch  # the connector's module relies on this import having happened
import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.example_connector import (
    ECExampleConnector,
    ECExampleConnectorMetadata,
    MMMeta,
)

__all__ = ["Example", "safetensors"]


class Example:
    """Keeps its files in a separate folder. It has no memory tier and no process besides the engine: the forward pass
    waits for its saves and loads."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder) / "example"
        transfer = SimpleNamespace(
            is_ec_producer=True, is_ec_consumer=True, get_from_extra_config=lambda key, otherwise: str(self._folder)
        )
        config = SimpleNamespace(ec_transfer_config=transfer, model_config=None)
        self._connector = ECExampleConnector(config, ECConnectorRole.WORKER)

    def save(self, identifier: str, tensor: torch.Tensor) -> None:
        self._connector.save_caches({identifier: tensor}, identifier)

    def load(self, identifier: str, like: torch.Tensor) -> None:
        """A load maps the file and reads nothing; the first use of the tensor pays for that. So it is copied here."""
        metadata = ECExampleConnectorMetadata()
        metadata.add_mm_data(MMMeta.make_meta(identifier, len(like)))
        self._connector.bind_connector_metadata(metadata)
        cache: dict[str, torch.Tensor] = {}
        self._connector.start_load_caches(cache)
        cache[identifier].clone()

    def has(self, identifier: str) -> bool:
        return bool(self._connector.has_cache_item(identifier))

    def delete(self, identifier: str) -> None:
        shutil.rmtree(self._folder / identifier)
