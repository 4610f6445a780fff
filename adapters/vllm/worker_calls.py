# SPDX-License-Identifier: Apache-2.0
"""The one place that every call to vLLM's workers passes through, and which of them may change weights.

In vLLM 0.30 to 0.33 that is `collective_rpc` of the engine's executor (vllm/v1/executor/*.py): the front end's methods,
EngineCore's own and those of a custom executor all end there, however they are transported to the workers (this
process, message queues, Ray). It takes the name of a worker's method or any function of the worker; so a call that may
change weights is passed on as a function, `carry_out`, which runs in each worker and checks the weights around it.

The wrapper is installed when an executor is created for an engine with our connector, in the process of its EngineCore,
and makes each worker check its weights for the first time: they have just been loaded.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .ours import is_ours, watched
from .topology import engine_name, why_inert
from .versions import measure_output_widths

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from .connector import ECLMCacheConnector

Method = str | bytes | Callable[..., Any]
"""The name of a worker's method, or a function of the worker, possibly pickled."""

UNCHANGING = frozenset(
    {
        # Steps.
        *("execute_model", "execute_dummy_batch", "sample_tokens", "take_draft_token_ids"),
        # Resets.
        *("reset_mm_cache", "reset_encoder_cache", "release_late_interaction_query_cache"),
        # Queries.
        *("check_health", "get_kv_cache_spec", "get_supported_kv_cache_layouts", "get_supported_tasks", "list_loras"),
        *("get_kv_connector_handshake_metadata", "get_compilation_match_table", "get_encoder_timing_stats"),
        *("get_cache_block_size_bytes", "get_model_inspection", "compute_weight_checksums", "get_draft_model"),
        *("get_simple_cpu_offload_num_cpu_blocks", "supports_draft_weight_updates", "determine_available_memory"),
        *("save_sharded_state", "save_tensorized_model", "synchronize_device", "profile", "annotate_profile"),
        # The start, and sizes.
        *("initialize_from_config", "compile_or_warm_up_model", "set_kv_cache_layout", "update_max_model_len"),
        # Adapters: their weights are separate from the model's, and identifiers of what they encode name them.
        *("add_lora", "remove_lora", "pin_lora"),
        # The end.
        *("shutdown", "shutdown_weight_transfer_engine"),
    }
)
"""Methods of vLLM's workers (0.30 to 0.33) that leave weights as they are. Any other may change them."""

_logger = logging.getLogger("vllm.lmcache_ec")


def install() -> None:
    """Watch the calls of every executor created from now on in this process. Idempotent."""
    from vllm.v1.executor.abstract import Executor

    construct = Executor.__init__
    if hasattr(construct, "_lmcache_ec"):
        return

    @functools.wraps(construct)
    def construct_and_watch(self: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        if is_ours(vllm_config) and not why_inert(vllm_config):
            _note_checkpoint(vllm_config)
        construct(self, vllm_config, *args, **kwargs)
        if is_ours(vllm_config) and not why_inert(vllm_config):
            for do, what in (
                (_watch, "calls to this engine's workers cannot be observed"),
                (_measure, "the widths of encoder outputs cannot be measured"),
            ):
                try:
                    do(self)
                except Exception:  # its scheduler side then has no cache, or saves nothing, and logs that
                    _logger.exception("encoder cache: %s", what)

    construct_and_watch._lmcache_ec = True  # type: ignore[attr-defined]
    Executor.__init__ = construct_and_watch


def _note_checkpoint(vllm_config: VllmConfig) -> None:
    from .namespace import note_checkpoint

    try:
        note_checkpoint(vllm_config)
    except Exception:  # the engine must start, with or without its cache
        _logger.exception("encoder cache: the files of this engine's checkpoint cannot be read")


def may_change_weights(method: Method) -> bool:
    return not (isinstance(method, str) and method in UNCHANGING)


def carry_out(method: Method, worker: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs in a worker: call `method` as vLLM would, with a check of the weights around it."""
    from vllm.v1.serial_utils import run_method

    connector = _of_this_worker()
    if connector is None:
        return run_method(worker, method, args, kwargs)
    name, first = method if isinstance(method, str) else "", next(iter((*args, *kwargs.values())), None)
    with connector.weights_may_change(name, first, worker.get_model):
        return run_method(worker, method, args, kwargs)


def begin(worker: Any) -> None:
    """Runs in a worker whose model has just been loaded: check the weights for the first time."""
    if (connector := _of_this_worker()) is not None:
        connector.watch_weights(worker.get_model)


def look(worker: Any) -> None:
    """Does nothing itself; run through `carry_out`, it is a check of the weights."""


def watch_class(kind: Any) -> None:
    """Watch the calls of all executors of a class, for engines of ours only. Idempotent.

    The class is wrapped, not the object, which would otherwise refer to itself.
    """
    call = kind.collective_rpc
    if hasattr(call, "_lmcache_ec"):
        return

    @functools.wraps(call)
    def call_watched(self: Any, method: Method, *args: Any, **kwargs: Any) -> Any:
        if may_change_weights(method) and is_ours(self.vllm_config):
            method = functools.partial(carry_out, method)
        return call(self, method, *args, **kwargs)

    call_watched._lmcache_ec = True  # type: ignore[attr-defined]
    kind.collective_rpc = call_watched


def _watch(executor: Any) -> None:
    from . import arrivals

    watch_class(type(executor))
    type(executor).collective_rpc.__wrapped__(executor, begin)
    _follow_versions()
    _follow_resets()
    arrivals.follow()
    watched.add(engine_name(executor.vllm_config))


def _measure(executor: Any) -> None:
    measure_output_widths(executor.vllm_config, functools.partial(type(executor).collective_rpc.__wrapped__, executor))


def _follow_versions() -> None:
    """Pass the version given to `EngineCore.set_weight_version` (vllm/v1/engine/core.py) on to the scheduler side,
    after a check of the weights that it stands for."""
    from vllm.v1.engine.core import EngineCore

    set_version = EngineCore.set_weight_version
    if hasattr(set_version, "_lmcache_ec"):
        return

    @functools.wraps(set_version)
    def set_and_follow(self: Any, weight_version: str) -> None:
        set_version(self, weight_version)
        connector = _connector(getattr(self.scheduler, "ec_connector", None))
        if connector is not None and connector.follows_weight_versions:
            self.model_executor.collective_rpc(look)
            connector.set_weight_version(weight_version)

    set_and_follow._lmcache_ec = True  # type: ignore[attr-defined]
    EngineCore.set_weight_version = set_and_follow


def _follow_resets() -> None:
    """Pass each `EngineCore.reset_encoder_cache` (vllm/v1/engine/core.py) on to the scheduler side: vLLM has no
    connector hook for it."""
    from vllm.v1.engine.core import EngineCore

    reset = EngineCore.reset_encoder_cache
    if hasattr(reset, "_lmcache_ec"):
        return

    @functools.wraps(reset)
    def reset_and_follow(self: Any) -> None:
        reset(self)
        connector = _connector(getattr(self.scheduler, "ec_connector", None))
        if connector is not None:
            connector.forget_vllm_cache()

    reset_and_follow._lmcache_ec = True  # type: ignore[attr-defined]
    EngineCore.reset_encoder_cache = reset_and_follow


def _of_this_worker() -> ECLMCacheConnector | None:
    from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer

    return _connector(get_ec_transfer()) if has_ec_transfer() else None


def _connector(connector: object) -> ECLMCacheConnector | None:
    from .connector import ECLMCacheConnector

    return connector if isinstance(connector, ECLMCacheConnector) else None
