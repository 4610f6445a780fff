# SPDX-License-Identifier: Apache-2.0
"""A step's orders as vLLM carries them from the scheduler to the workers."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata

from lmcache_ec.positional import positional

from .orders import Load, Orders, Save

__all__ = ["Load", "Save", "StepMetadata"]


@positional
@dataclass(slots=True)
class StepMetadata(Orders, ECConnectorMetadata):
    """See `Orders`."""
