# SPDX-License-Identifier: Apache-2.0
"""How an engine is distributed over processes, as far as the cache depends on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SAVING_RANK = 0


def engine_name(vllm_config: VllmConfig) -> str:
    """One engine's name on this host, the same in all of its processes.

    Data-parallel engines share `engine_id` (vllm/v1/engine/core.py gives only the KV transfer a suffix), and dense ones
    also `data_parallel_rank`; `data_parallel_index` distinguishes them. `instance_id` alone has only 20 random bits.
    """
    index = vllm_config.parallel_config.data_parallel_index
    return f"{vllm_config.ec_transfer_config.engine_id}/{vllm_config.instance_id}/{index}"


def loading_ranks(vllm_config: VllmConfig) -> int:
    """How many ranks hold encoder outputs: those of the first pipeline stage, 0 to this number minus one.

    Pipeline stages are the outer dimension of vLLM's rank order (vllm/distributed/parallel_state.py).
    """
    parallel = vllm_config.parallel_config
    context: int = parallel.prefill_context_parallel_size
    tensor: int = parallel.tensor_parallel_size
    return tensor * context


def counts_items(vllm_config: VllmConfig) -> bool:
    """Whether vLLM uses counters, which restart in each process, to name items that no client has named.

    vllm/renderers/base.py, `_process_mm_uuids`: with prefix caching and the processor cache both off it computes none.
    """
    media = vllm_config.model_config.multimodal_config
    return media is not None and not (media.mm_processor_cache_gb or vllm_config.cache_config.enable_prefix_caching)


def engines_on_host(vllm_config: VllmConfig) -> int:
    """How many data-parallel engines this host runs, as far as this one knows: each engine of a dense model is
    configured as the only one (`reconfigure_for_independent_dp_rank`) but keeps its number. The last one knows all."""
    parallel = vllm_config.parallel_config
    number: int = parallel.data_parallel_rank_local or 0
    configured: int = parallel.data_parallel_size_local
    return max(configured, number + 1)


def why_inert(vllm_config: VllmConfig) -> str:
    """Why this engine is served without the cache; empty if it can be served with it."""
    from .copier import why_unsupported

    parallel = vllm_config.parallel_config
    if vllm_config.model_config.is_encoder_decoder:
        # The V1 runner never loads for these, while a True from `has_cache_item` drops the encode.
        return "encoder-decoder models keep no encoder output that could be loaded"
    media = vllm_config.model_config.multimodal_config
    if media is None:
        return "the model does not take media"
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        return "with external_launcher each rank has its own scheduler, and all would have to decide alike"
    # Counts one data-parallel engine: several engines on separate hosts are no reason.
    if parallel.nnodes_within_dp > 1:
        return "ranks on other hosts cannot map this host's arena"
    if vllm_config.use_v2_model_runner and adapts_towers(vllm_config):
        # vllm/v1/worker/gpu/model_runner.py sets them before it has the connector load: it misses an item that
        # cannot be loaded and is encoded after all.
        return (
            "the V2 model runner sets the encoder's LoRA adapters only for items that it expects to encode; with "
            "VLLM_USE_V2_MODEL_RUNNER=0 the cache works"
        )
    return why_unsupported(vllm_config.device_config.device_type)


def adapts_towers(vllm_config: VllmConfig) -> bool:
    """Whether LoRA adapters change the encoder's output."""
    return bool(getattr(vllm_config.lora_config, "enable_tower_connector_lora", False))
