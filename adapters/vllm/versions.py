# SPDX-License-Identifier: Apache-2.0
"""What differs between the supported versions of vLLM, and how each difference is handled.

Each feature that some version lacks has one function here, which states since when it exists. Importing this module
does not import vLLM.
`tests/unit/test_vllm_interface.py` compares everything else that the adapter uses with vLLM's sources.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .topology import engine_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.encoder_budget import MultiModalBudget
    from vllm.multimodal.inputs import MultiModalKwargsItem
    from vllm.v1.core.sched.output import SchedulerOutput

OLDEST, NEWEST = "0.30", "0.33"
"""The range of supported versions; `docs/support.md` lists which of them have been run."""


def supported(version: str) -> bool:
    """Whether a version of vLLM, such as "0.33.2+cu129", is one of those."""
    return minor(OLDEST) <= minor(version) <= minor(NEWEST)


def minor(version: str) -> tuple[int, int]:
    """ "0.33.2+cu129" is (0, 33); text that is no version sorts before all."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def shows_metrics(version: str) -> bool:
    """Whether vLLM asks a connector for its counts and shows them in /metrics and its log: since 0.31. In earlier
    versions nothing imports `metrics`, which needs vLLM classes that do not exist there."""
    return minor(version) >= (0, 31)


# ---- widths of encoder outputs


_logger = logging.getLogger("vllm.lmcache_ec")

_measured: dict[str, dict[str, int]] = {}
"""Widths by engine (see `topology.engine_name`), in the process of its EngineCore."""


def output_widths(vllm_config: VllmConfig) -> dict[str, int]:
    """Modality to the width of an encoder output, for producers. A consumer learns widths from the entries it finds."""
    own: dict[str, int] | None = getattr(vllm_config.ec_transfer_config, "mm_encoder_output_widths", None)
    return dict(_measured.get(engine_name(vllm_config), {}) if own is None else own)


def measure_output_widths(vllm_config: VllmConfig, collective_rpc: Callable[[Any], list[dict[str, int]]]) -> None:
    """Have a producer's workers, whose model has just been loaded, encode one item of each modality: before 0.32 vLLM
    does not do so itself (vllm/distributed/ec_transfer/ec_connector/encoder_output_width.py)."""
    transfer = vllm_config.ec_transfer_config
    if not hasattr(transfer, "mm_encoder_output_widths") and transfer.is_ec_producer:
        _measured[engine_name(vllm_config)] = next((widths for widths in collective_rpc(encoded_widths) if widths), {})


def encoded_widths(worker: Any) -> dict[str, int]:
    """Runs in a worker. Empty if it has no encoder; leaves out a modality for which vLLM cannot make a test item."""
    import torch
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget
    from vllm.multimodal.utils import group_and_batch_mm_kwargs

    runner = worker.model_runner
    if not runner.supports_mm_inputs or not get_pp_group().is_first_rank:
        return {}
    budget = MultiModalBudget(worker.vllm_config, MULTIMODAL_REGISTRY, enable_cache=False)
    widths = {}
    with torch.inference_mode():
        for modality in budget.mm_max_toks_per_item:
            try:
                item = _dummy_item(budget, modality)
            except Exception:  # it is made by the model's own processor
                _logger.warning("encoder cache: the width of %s outputs cannot be measured", modality, exc_info=True)
                continue
            _, _, arguments = next(group_and_batch_mm_kwargs([(modality, item)], device=runner.device))
            widths[modality] = int(runner.get_model().embed_multimodal(**arguments)[0].shape[-1])
    return widths


def _dummy_item(budget: MultiModalBudget, modality: str) -> MultiModalKwargsItem:
    """The item that vLLM profiles an encoder with. 0.31 moved it from the model registry to the budget."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    if hasattr(budget, "get_dummy_encoder_profile_inputs"):
        [(_, item)] = budget.get_dummy_encoder_profile_inputs(modality, 1)
        return item
    made = MULTIMODAL_REGISTRY.get_dummy_mm_inputs(
        budget.model_config, mm_counts={modality: 1}, processor=budget.processor
    )
    return made["mm_kwargs"][modality][0]


# ---- the V2 runner


def payload_updates(scheduler_output: SchedulerOutput) -> Mapping[str, Mapping[int, object]] | None:
    """Request to item to its payload, None where vLLM's V2 runner drops that: since 0.33. Before 0.33, None for all: a
    worker keeps payloads until the request ends."""
    updates: Mapping[str, Mapping[int, object]] | None = getattr(scheduler_output, "encoder_input_updates", None)
    return updates
