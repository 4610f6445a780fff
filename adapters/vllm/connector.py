# SPDX-License-Identifier: Apache-2.0
"""`ECLMCacheConnector`: vLLM's encoder-cache connector over lmcache_ec. A thin shell around its two delegates.

Importing this module does not import the cache: vLLM's front end imports it only for the class methods.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole
from vllm.logger import init_logger

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from .collector import Collector
    from .scheduler import SchedulerSide
    from .worker import WorkerSide

T = TypeVar("T")

logger = init_logger("vllm.lmcache_ec")


class ECLMCacheConnector(ECConnectorBase):
    """One instance per process and role; each runs on its process's main thread.

    A wrong configuration aborts the engine's start. After that, no failure here reaches vLLM: a hook that fails is
    logged once, and the connector is inert from then on.
    """

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        from .build import build_scheduler_side, build_worker_side

        super().__init__(vllm_config=vllm_config, role=role)
        _log_through_vllm()
        self._scheduler: SchedulerSide | None = None
        self._failed: SchedulerSide | None = None
        self._collector: Collector | None = None
        self._worker: WorkerSide | None = None
        self._gave_up = False
        self._unavailable: set[str] = set()
        self._encodable: Callable[[Request, int], bool] | None = None
        if role == ECConnectorRole.SCHEDULER:
            self._scheduler, self._encodable = build_scheduler_side(vllm_config, logger)
            if self._scheduler is not None:
                from .collector import Collector
                from .lower_tiers import offer

                self._collector = Collector(self._scheduler, logger)
                offer(vllm_config, self)
        else:
            self._worker = build_worker_side(vllm_config, logger)

    # ---- scheduler side

    def expect(self, request: Request) -> None:
        """A request has arrived. Called on vLLM's input thread, see `arrivals`; the hooks are called later."""
        side = self._scheduler
        if side is not None:
            side.expect(request)

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        if self._scheduler is not None:
            try:
                return self._scheduler.ensure_cache_available(request, num_computed_tokens)
            except Exception:
                self._give_up("ensure_cache_available")
        return self._without_cache(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        if self._scheduler is None:
            return False
        try:
            return self._scheduler.has_cache_item(identifier)
        except Exception:
            self._give_up("has_cache_item")
            return False

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        side = self._scheduler
        if side is not None:
            self._guarded(lambda: side.update_state_after_alloc(request, index), None)
        failed = self._failed
        if failed is not None:
            self._guarded(lambda: failed.give_up_item(request, index), None)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECConnectorMetadata:
        from .metadata import StepMetadata

        side = self._scheduler
        meta = StepMetadata()
        if side is not None:
            meta = self._guarded(lambda: side.build_connector_meta(scheduler_output), meta)
        failed = self._failed
        return meta if failed is None else self._guarded(lambda: failed.give_up(scheduler_output), meta)

    def restore_s(self, identifier: str, modality: str, rows: int) -> float:
        """Called by our encoder-cache manager, if vLLM uses it, see `LowerTiers`. A cache that has given up has no
        tiers below."""
        from lmcache_ec.eviction import Below, restore_s

        side, encode_s = self._scheduler, restore_s(Below.NOTHING, 0, rows)
        return encode_s if side is None else self._guarded(lambda: side.restore_s(identifier, modality, rows), encode_s)

    def take_unavailable_requests(self) -> set[str]:
        taken, self._unavailable = self._unavailable, set()
        side = self._scheduler
        if side is not None:
            taken |= self._guarded(side.take_unavailable_requests, taken)
        return taken

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """What the response tells a consumer. Returning True instead of False would keep the KV blocks for good."""
        side = self._scheduler
        return False, None if side is None else self._guarded(lambda: side.request_finished(request), None)

    def get_ec_connector_stats(self) -> ECConnectorStats | None:
        payload = None if self._scheduler is None or self._collector is None else self._collector.collect()
        return None if payload is None else self.build_ec_connector_stats(payload)

    # ---- worker side

    def start_worker_services(self) -> None:
        side = self._worker
        if side is not None:
            from .topology import engine_name

            name = engine_name(self._vllm_config)
            self._guarded(lambda: side.start(name), None)

    def bind_connector_metadata(self, connector_metadata: ECConnectorMetadata) -> None:
        from .metadata import StepMetadata

        super().bind_connector_metadata(connector_metadata)
        side = self._worker
        if side is not None and isinstance(connector_metadata, StepMetadata):
            self._guarded(lambda: side.bind(connector_metadata), None)

    def start_save_caches(self, **kwargs: Any) -> None:
        side = self._worker
        if side is not None:
            self._guarded(side.encode_again, None)
            self._guarded(lambda: side.retry_saves(kwargs["encoder_cache"]), None)

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        side = self._worker
        if side is not None:
            self._guarded(lambda: side.load(encoder_cache), None)
            self._guarded(side.begin_encodes, None)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        side = self._worker
        if side is not None:
            self._guarded(lambda: side.save(encoder_cache, mm_hash), None)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Both runners call this once the step's encoder work is submitted, even after an exception."""
        side = self._worker
        if side is not None:
            self._guarded(side.finish_step, None)
        return None, None

    def watch_weights(self, model: Callable[[], torch.nn.Module]) -> None:
        """The worker's model was loaded: from now on this rank reports its encoder's weights to the scheduler side."""
        side = self._worker
        if side is not None:
            self._guarded(lambda: side.watch_weights(model()), None)

    def weights_may_change(
        self, name: str, argument: object, model: Callable[[], torch.nn.Module]
    ) -> AbstractContextManager[None]:
        """Wraps a call to the worker, see `EncoderWeights.call`."""
        weights = None if self._worker is None else self._worker.weights
        return nullcontext() if weights is None else weights.call(name, argument, model)

    # ---- weights, on the scheduler side

    @property
    def follows_weight_versions(self) -> bool:
        return self._scheduler is not None and self._scheduler.follows_weight_versions

    def set_weight_version(self, version: str) -> None:
        """`EngineCore.set_weight_version` was called."""
        side = self._scheduler
        if side is not None:
            self._guarded(lambda: side.set_weight_version(version), None)

    def forget_vllm_cache(self) -> None:
        """`EngineCore.reset_encoder_cache` was called."""
        side = self._scheduler
        if side is not None:
            self._guarded(side.forget_vllm_cache, None)

    # ---- metrics, in vLLM's front ends

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> ECConnectorStats | None:
        from .metrics import Stats

        return Stats.of(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ECConnectorPromMetrics | None:
        from .metrics import PromMetrics

        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- both

    def snapshot(self) -> dict[str, int]:
        """The scheduler side's counts; empty in a process without one."""
        return {} if self._scheduler is None else self._scheduler.snapshot()

    def shutdown(self) -> None:
        for side in (self._worker, self._scheduler):
            if side is not None:
                self._guarded(side.shutdown, None)
        self._worker = self._scheduler = None

    def _without_cache(self, request: Request, num_computed_tokens: int) -> bool:
        """Fail a request that carries nothing to encode: otherwise vLLM would end the engine over it."""
        failed = self._failed
        if failed is not None:
            self._guarded(lambda: failed.note(request), None)
        if self._encodable is None or self._encodable(request, num_computed_tokens):
            return True
        self._unavailable.add(request.request_id)
        return False

    def _guarded(self, hook: Callable[[], T], otherwise: T) -> T:
        try:
            return hook()
        except Exception:
            self._give_up("a hook")
            return otherwise

    def _give_up(self, where: str) -> None:
        """Become inert. A worker side is kept, so that vLLM encodes what had been promised."""
        if self._gave_up:
            return
        self._gave_up = True
        logger.exception("encoder cache: %s failed; requests are served without the cache from now on", where)
        side = self._failed = self._scheduler
        self._scheduler = None
        try:
            if side is not None:
                side.shutdown()
            if self._worker is not None:
                self._worker.abandon()
        except Exception:
            logger.exception("encoder cache: closing it failed too")


def _log_through_vllm() -> None:
    """Give this package's loggers vLLM's handlers and level."""
    ours, theirs = logging.getLogger("lmcache_ec"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers, ours.propagate = theirs.handlers, theirs.propagate
        ours.setLevel(theirs.level)
