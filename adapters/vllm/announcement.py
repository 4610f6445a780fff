# SPDX-License-Identifier: Apache-2.0
"""What a producer's response announces about its entries, and how a consumer's request carries that.

`ec_transfer_params` maps an identifier to what is known of the item. vLLM's own connectors add `metadata`, with
which a proxy can leave the media out of the consumer's request (vllm/distributed/ec_transfer/ec_connector/utils.py);
ours adds `namespace`, so that engines that encode differently are distinguished at once and not by a miss each time.

Both name an item as client and proxy do: by its uuid if it has one, not in the front end's spelling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .identifiers import client_uuid

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.v1.request import Request

NAMESPACE = "namespace"


class Announcer:
    """A producer's side. Runs on the scheduler's thread."""

    def __init__(self, model_config: ModelConfig) -> None:
        from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver

        self._resolver = PlaceholderMetadataResolver(model_config)

    def announce(self, request: Request, stored: Callable[[str], bool], namespace: str) -> dict[str, Any] | None:
        """What the response to `request` announces about entries in `namespace`. An item that is not `stored` is
        announced without metadata: its media must stay with the request, or the consumer has nothing to encode."""
        from vllm.distributed.ec_transfer.ec_connector.utils import collect_ec_item_metadata

        items = {}
        mixed = {"audio", "video"} <= {feature.modality for feature in request.mm_features}
        for identifier, item in collect_ec_item_metadata(request.mm_features, self._resolver).items():
            if not stored(identifier):
                item["metadata"] = {}
            elif not mixed:  # vLLM's proxy recognises a video's audio track by maps that hold vLLM's own keys only
                item[NAMESPACE] = namespace
            items[client_uuid(identifier)] = item
        return items or None


def announced(request: Request) -> dict[str, str]:
    """Name of an item (`identifiers.client_uuid`) to namespace: what a producer of ours has announced for this request.

    The parameters come from a client, so nothing is assumed about their shape.
    """
    params = getattr(request, "ec_transfer_params", None)
    if not isinstance(params, dict):
        return {}
    found = ((identifier, item.get(NAMESPACE)) for identifier, item in params.items() if isinstance(item, dict))
    return {identifier: namespace for identifier, namespace in found if isinstance(namespace, str)}
