# SPDX-License-Identifier: Apache-2.0
"""vLLM's ECExampleConnector, asked to save and load as a worker asks it."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import safetensors.torch  # its module takes for granted that somebody has imported it
import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.example_connector import (
    ECExampleConnector,
    ECExampleConnectorMetadata,
    MMMeta,
)

__all__ = ["Example", "safetensors"]


class Example:
    """Its files are in a folder of their own. It has no tier in memory and no process beside the engine: what it saves
    and loads, the forward pass waits for."""

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
        """Loading maps the file and reads nothing; whoever uses the tensor first pays. So it is copied once here."""
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
