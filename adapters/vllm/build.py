# SPDX-License-Identifier: Apache-2.0
"""Builds the connector's delegates from vLLM's configuration. Runs at the engine's start, where waiting is allowed."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from lmcache_ec.config import EncoderCacheConfig, load_config, resolve, summary
from lmcache_ec.host import memory_warning
from lmcache_ec.host_memory import fitting
from lmcache_ec.version import __version__

from .front_end import problem
from .identifiers import Naming
from .ours import watched
from .topology import counts_items, engine_name, engines_on_host, loading_ranks, why_inert
from .versions import output_widths

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from .copier import Copier
    from .media import EncodableMedia
    from .scheduler import SchedulerSide
    from .worker import WorkerSide

_PLAUSIBLE_ROWS = 32768
_PLAUSIBLE_WIDTH_FACTOR = 16
"""A consumer does not know widths: DeepStack packs several layers into a row, four in the models known so far."""


def build_scheduler_side(
    vllm_config: VllmConfig, logger: logging.Logger
) -> tuple[SchedulerSide | None, Callable[[Request, int], bool]]:
    """The scheduler side, or None if this engine is served without; and a function that returns whether every item of a
    request that its computed tokens do not cover can be encoded.

    Raises ConfigError for an invalid configuration.
    """
    from .media import EncodableMedia

    resolved = resolve(vllm_config.ec_transfer_config.ec_connector_extra_config)
    config = resolved.config
    media = EncodableMedia(vllm_config.model_config)

    def encodable(request: Request, computed: int) -> bool:
        spans = ((feature, feature.mm_position) for feature in request.mm_features)
        return all(span.offset + span.length <= computed or media.encodable(feature) for feature, span in spans)

    if not config.enabled:
        logger.info(summary(config, resolved.origins))
        return None, encodable
    if reason := why_inert(vllm_config):
        logger.warning("encoder cache: off: %s", reason)
        return None, encodable
    if engine_name(vllm_config) not in watched:
        logger.error(
            "encoder cache: off: changes of the weights would go unnoticed, because vLLM has not loaded the plugin "
            "lmcache_ec (does VLLM_PLUGINS name it?), or creates its executors differently from 0.30 to 0.33"
        )
        return None, encodable
    logger.info(summary(config, resolved.origins))
    room = memory_warning(fitting(config.max_local_cpu_bytes).bytes, engines=engines_on_host(vllm_config))
    for warning in filter(None, (*resolved.notes, room)):
        logger.warning("encoder cache: %s", warning)
    if counts_items(vllm_config):
        logger.warning(
            "encoder cache: only items that clients name are cached: with prefix caching and processor cache both "
            "off, vLLM numbers all other items afresh in each process (set --mm-processor-cache-gb, or enable prefix "
            "caching)"
        )
    if moved := problem():
        logger.error(
            "encoder cache: kept in memory only: the front end of this vLLM is not supported (%s), so the names "
            "that clients give cannot be distinguished from content",
            moved,
        )
    return _scheduler_side(vllm_config, config, media, logger), encodable


def _scheduler_side(
    vllm_config: VllmConfig, config: EncoderCacheConfig, media: EncodableMedia, logger: logging.Logger
) -> SchedulerSide:
    import vllm

    from lmcache_ec.cache import EncoderCache
    from lmcache_ec.engine import Engine
    from lmcache_ec.entry import MAX_PRODUCER_BYTES

    from .announcement import Announcer
    from .namespace import NamespaceUnknown, engine_namespace
    from .policy import Policy
    from .scheduler import SchedulerSide
    from .tensors import dtype_name

    try:
        namespace = engine_namespace(vllm_config, config)
    except NamespaceUnknown as error:
        logger.error("encoder cache: kept in memory only, because no namespace can be computed: %s", error)
        namespace = "unknown-" + hashlib.sha256(engine_name(vllm_config).encode()).hexdigest()[:16]
        config = config.model_copy(update={"local_disk": None, "remotes": ()})
    transfer, scheduler = vllm_config.ec_transfer_config, vllm_config.scheduler_config
    widths = output_widths(vllm_config)
    if transfer.is_ec_producer and not widths:
        logger.warning("encoder cache: nothing will be saved: the width of encoder outputs was not measured")
    model = vllm_config.model_config
    rows = max(_PLAUSIBLE_ROWS, scheduler.max_num_batched_tokens)
    width = max(widths.values(), default=_PLAUSIBLE_WIDTH_FACTOR * model.get_hidden_size())
    cache = EncoderCache(
        config,
        Engine(
            name=engine_name(vllm_config),
            namespace=namespace,
            producer=f"lmcache-ec {__version__}, vllm {vllm.__version__}"[:MAX_PRODUCER_BYTES],
            ranks=loading_ranks(vllm_config),
            largest_entry_bytes=min(rows, model.max_model_len) * width * model.dtype.itemsize + (1 << 20),
            saves=transfer.is_ec_producer,
            watched=True,
            data_parallel_rank=vllm_config.parallel_config.data_parallel_index,
            epoch=config.epoch if config.namespace is None else None,
        ),
    )
    if cache.inert:
        cache.close()
    logger.info("encoder cache: namespace %s", cache.namespace)
    policy = Policy(
        producer=transfer.is_ec_producer,
        consumer=transfer.is_ec_consumer,
        window=scheduler.max_num_batched_tokens + vllm_config.num_lookahead_tokens,
        dtype=dtype_name(model.dtype),
        widths=widths,
        deadline_s=config.load_deadline_ms / 1000,
        start_timeout_s=config.start_timeout_s,
        naming=Naming(config.persist_client_ids, counts_items(vllm_config)),
        wait_for_producer_s=config.wait_for_producer_ms / 1000,
        encoder_budget=scheduler.max_num_encoder_input_tokens,
        weights_check_s=config.weights_check_s,
        follows_weight_versions=config.persist_updated_weights == "by_version",
        reuses_kv=bool(vllm_config.cache_config.enable_prefix_caching),
    )
    announcer = None if transfer.is_ec_consumer else Announcer(model)
    return SchedulerSide(cache, policy, media, logger, announcer)


def build_worker_side(vllm_config: VllmConfig, logger: logging.Logger) -> WorkerSide | None:
    """This rank's side, or None if the engine is served without, or the rank is in a later pipeline stage."""
    rank = vllm_config.parallel_config.rank
    config = load_config(vllm_config.ec_transfer_config.ec_connector_extra_config)
    if not config.enabled or why_inert(vllm_config) or rank >= loading_ranks(vllm_config):
        return None
    from .agreement import agree
    from .encode_clock import clock_for
    from .packed_weights import note_packed_weights
    from .worker import WorkerSide

    kind = vllm_config.device_config.device_type
    try:
        copier = _copier(kind)
    except Exception as error:
        logger.warning("encoder cache: off: rank %d cannot copy beside the model: %s", rank, error)
        return None
    if kind == "cpu":
        note_packed_weights()
    elif not copier.registers:
        logger.warning(
            "encoder cache: torch cannot register memory with %s: copies use pageable memory and are slower", kind
        )
    alone, transfer = loading_ranks(vllm_config) == 1, vllm_config.ec_transfer_config
    flush_s = 0.0 if transfer.is_ec_consumer else config.producer_flush_s
    return WorkerSide(rank, copier, list if alone else agree, logger, flush_s, clock_for(kind))


def _copier(kind: str) -> Copier:
    """The copier for this process's current device, set by vLLM. Raises torch's own error if there is none."""
    import torch

    from .copier import copier_for

    return copier_for(
        torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    )
