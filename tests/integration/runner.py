# SPDX-License-Identifier: Apache-2.0
"""The encoder cache part of vLLM's V1 model runner, around a real connector, without a model."""

import functools
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.sched.output import SchedulerOutput

from benchmarks.testbed.stand_ins import WIDTH, sent
from lmcache_ec.adapters.vllm import ours
from lmcache_ec.adapters.vllm.connector import ECLMCacheConnector
from lmcache_ec.adapters.vllm.topology import engine_name


class EngineDied(Exception):
    """A failure that would have ended a real engine, or made a request read another item's bytes."""


@functools.cache
def encoded(identifier: str, rows: int) -> torch.Tensor:
    """The encoder's output for an item: [rows, 8] in BF16, always the same, and different for each name and length."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{identifier} {rows}".encode()))
    return torch.randn(rows, WIDTH, generator=generator).bfloat16()


@dataclass
class Prompt:
    """What the runner keeps about a request until it learns that the request has ended."""

    features: list[MultiModalFeatureSpec]
    computed: int


@dataclass
class V1Runner:
    """One rank: frees, loads, encodes, saves and gathers, in the order of vllm/v1/worker/gpu_model_runner.py.

    It runs in the test's thread, and gets what a worker process gets from the scheduler: a pickled copy of its output.
    """

    connector: ECLMCacheConnector
    cache: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: torch.nn.Linear = field(default_factory=lambda: torch.nn.Linear(1, 1, bias=False))
    """The encoder's weights: one factor of its outputs, a power of two."""
    encodes: int = 0
    loads: int = 0
    _prompts: dict[str, Prompt] = field(default_factory=dict)
    _made_by: dict[str, float] = field(default_factory=dict)  # the factor for each item in the cache

    @classmethod
    def of(cls, config: Any) -> "V1Runner":
        ours.watched.add(engine_name(config))  # as if an executor had been created
        runner = cls(ECLMCacheConnector(config, ECConnectorRole.WORKER))
        runner.connector.start_worker_services()
        runner.weights.weight.data.fill_(1.0)
        runner.connector.watch_weights(lambda: runner.weights)
        return runner

    @property
    def factor(self) -> float:
        return float(self.weights.weight)

    def change_weights(self, factor: float) -> None:
        """By a call to the worker that vLLM waits for."""
        with self.connector.weights_may_change("update_weights", None, lambda: self.weights):
            self.weights.weight.data.fill_(factor)

    def run(self, output: SchedulerOutput) -> None:
        """A step. Raises EngineDied where a real runner would raise, or would gather wrong data for an item."""
        output = sent(output)
        self._update(output)
        if not output.total_num_scheduled_tokens:
            return
        self.connector.bind_connector_metadata(output.ec_connector_metadata)
        self.connector.start_save_caches(encoder_cache=self.cache)
        held = set(self.cache)
        self.connector.start_load_caches(self.cache)
        loaded = set(self.cache) - held
        self._made_by.update(dict.fromkeys(loaded, self.factor))
        self.loads += len(loaded)
        try:
            self._encode(output)
            self._gather(output)
        finally:
            self.connector.get_finished(output.finished_req_ids)
            self.connector.clear_connector_metadata()

    def _update(self, output: SchedulerOutput) -> None:
        for name in output.finished_req_ids:
            self._prompts.pop(name, None)
        for identifier in output.free_encoder_mm_hashes:
            self.cache.pop(identifier, None)
        for new in output.scheduled_new_reqs:
            self._prompts[new.req_id] = Prompt(new.mm_features, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._prompts[name].computed = computed

    def _encode(self, output: SchedulerOutput) -> None:
        for name, indices in output.scheduled_encoder_inputs.items():
            for index in indices:
                feature = self._prompts[name].features[index]
                if feature.data is None:
                    raise EngineDied(f"{name} has nothing to encode for its item {index}, {feature.identifier}")
                self.encodes += 1
                rows = feature.mm_position.length
                self.cache[feature.identifier] = encoded(feature.identifier, rows) * self.factor
                self._made_by[feature.identifier] = self.factor
                self.connector.save_caches(self.cache, feature.identifier)

    def _gather(self, output: SchedulerOutput) -> None:
        """Every item that this step's tokens overlap has to be there, and to equal its encoder's output."""
        for name, tokens in output.num_scheduled_tokens.items():
            prompt = self._prompts[name]
            for index, feature in enumerate(prompt.features):
                start, rows = feature.mm_position.offset, feature.mm_position.length
                if start >= prompt.computed + tokens or start + rows <= prompt.computed:
                    continue
                item = f"item {index} of {name}, {feature.identifier}"
                tensor = self.cache.get(feature.identifier)
                if tensor is None:
                    raise EngineDied(f"{item}: not in the encoder cache at token {prompt.computed}")
                if not torch.equal(tensor, encoded(feature.identifier, rows) * self._made_by[feature.identifier]):
                    raise EngineDied(f"{item}: other bytes than its encoder's output")
