# SPDX-License-Identifier: Apache-2.0
"""Whether a request carries media that the encoder could run on.

If embeddings may come from outside, vLLM lets a client send only a uuid and the fields that size an item's
placeholders (for Qwen3-VL `image_grid_thw`). If nothing is stored under that identifier, there is nothing to encode,
and vLLM 0.30 to 0.33 dies in the attempt: such a request must be recognized before it is scheduled.
"""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec

logger = logging.getLogger(__name__)


class EncodableMedia:
    """Built once with the scheduler, because it may build the model's processor (seconds); used on its thread."""

    def __init__(self, model_config: "ModelConfig") -> None:
        self._metadata: Mapping[str, frozenset[str]] = _metadata_fields(model_config)

    def encodable(self, feature: "MultiModalFeatureSpec") -> bool:
        """Whether the item holds more than metadata: pixels, samples, embeddings, or where they are in shared memory.

        Three microseconds. Never raises: an item that it cannot read counts as nothing to encode.
        """
        try:
            metadata = self._metadata.get(feature.modality, frozenset())
            return any(part.data is not None for name, part in (feature.data or {}).items() if name not in metadata)
        except (AttributeError, TypeError):
            return False


def _metadata_fields(model_config: "ModelConfig") -> dict[str, frozenset[str]]:
    """For each modality the fields that only size its placeholders. Empty, with a warning, if vLLM lists none."""
    if not model_config.is_multimodal_model:
        return {}
    try:
        from vllm.multimodal import MULTIMODAL_REGISTRY

        info = MULTIMODAL_REGISTRY.create_processor(model_config).info
        fields_of = info.data_parser.placeholder_metadata_fields
        return {modality: frozenset(fields_of(modality)) for modality in info.supported_mm_limits}
    except Exception as error:  # a processor runs the model's own code
        logger.warning(
            "encoder cache: a request without media cannot be distinguished from one with media: the model's processor "
            "does not say which fields are metadata (%s: %s)",
            type(error).__name__,
            error,
        )
        return {}
