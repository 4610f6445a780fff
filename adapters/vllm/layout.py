# SPDX-License-Identifier: Apache-2.0
"""How an engine is laid out over processes, as far as the cache depends on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SAVING_RANK = 0


def engine_name(vllm_config: VllmConfig) -> str:
    """One engine's name on this host, the same in all of its processes.

    Data-parallel engines share `engine_id` (vllm/v1/engine/core.py gives only the KV transfer a suffix), and dense ones
    also `data_parallel_rank`; `data_parallel_index` tells them apart. `instance_id` alone has 20 random bits.
    """
    index = vllm_config.parallel_config.data_parallel_index
    return f"{vllm_config.ec_transfer_config.engine_id}/{vllm_config.instance_id}/{index}"


def loading_ranks(vllm_config: VllmConfig) -> int:
    """How many ranks hold encoder outputs: those of the first pipeline stage, 0 to this number less one.

    Pipeline stages are the outer dimension of vLLM's rank order (vllm/distributed/parallel_state.py).
    """
    parallel = vllm_config.parallel_config
    context: int = getattr(parallel, "prefill_context_parallel_size", 1)
    tensor: int = parallel.tensor_parallel_size
    return tensor * context


def counts_items(vllm_config: VllmConfig) -> bool:
    """Whether vLLM names items that no client has named by counters, which start anew in each process.

    vllm/renderers/base.py, `_process_mm_uuids`: with prefix caching and the processor cache both off it computes none.
    """
    media = vllm_config.model_config.multimodal_config
    return media is not None and not (media.mm_processor_cache_gb or vllm_config.cache_config.enable_prefix_caching)


def why_inert(vllm_config: VllmConfig) -> str:
    """Why this engine is served without the cache; empty if it can be served with it."""
    parallel = vllm_config.parallel_config
    if vllm_config.model_config.is_encoder_decoder:
        # The V1 runner never loads for these, while a True from `has_cache_item` drops the encode.
        return "encoder-decoder models keep no encoder output that could be loaded"
    media = vllm_config.model_config.multimodal_config
    if media is None:
        return "the model takes no media"
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        return "with external_launcher each rank has a scheduler of its own, and all must decide alike"
    if getattr(parallel, "nnodes", 1) > 1:
        return "ranks on other hosts cannot map this host's arena"
    return ""
