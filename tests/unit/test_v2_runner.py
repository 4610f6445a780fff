# SPDX-License-Identifier: Apache-2.0
"""The connector under vLLM's own runner code: the V2 runner's `ActiveECConnector` and `EncoderRunner`, and the V1
runner's mixin.

Around them there is a scheduler side with a real cache and store process; the model is fake, vLLM's calls are real.
"""

import dataclasses
import uuid
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.distributed.ec_transfer import ec_transfer_state
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.worker.ec_connector_model_runner_mixin import ECConnectorModelRunnerMixin
from vllm.v1.worker.gpu.ec_connector import ActiveECConnector
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
from vllm.v1.worker.gpu.model_states.interface import ModelState

from benchmarks.testbed.models import model_path
from benchmarks.testbed.stand_ins import (
    WIDTH,
    Feature,
    Request,
    Served,
    digest,
    embedding,
    request,
    scheduler_output,
    sent,
)
from benchmarks.testbed.waiting import wait_until
from lmcache_ec.adapters.vllm.connector import ECLMCacheConnector
from lmcache_ec.adapters.vllm.topology import engine_name
from tests.unit.preallocated import PreallocatedCache
from tests.unit.test_namespace import vllm_config

X, Y, Z = digest("x"), digest("y"), digest("z")


class VllmRunner:
    """A runner's handling of encoder outputs, on vLLM's own code."""

    def __init__(self, config: Any, cache: Any) -> None:
        self.worker = ECLMCacheConnector(config, ECConnectorRole.WORKER)
        self.worker.start_worker_services()
        ec_transfer_state._EC_CONNECTOR_AGENT = self.worker
        self.cache = cache
        self.encoded: list[str] = []
        self.saved: list[str] = []
        self.encode: Callable[[str, int], torch.Tensor] = embedding
        side = self.worker._worker
        assert side is not None
        save = side.save

        def recorded(cache: MutableMapping[str, Any], identifier: str) -> None:
            self.saved.append(identifier)
            save(cache, identifier)

        side.save = recorded  # type: ignore[method-assign]

    def connector_output(self, output: Any) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def no_forward(self, output: Any) -> None:
        raise NotImplementedError

    def put(self, identifier: str, tensor: torch.Tensor) -> None:
        self.cache[identifier] = tensor

    def run(self, output: Any, *requests: Request) -> None:
        output = sent(output)
        for identifier in output.free_encoder_mm_hashes:
            self.cache.pop(identifier, None)
        if not output.total_num_scheduled_tokens:
            self.no_forward(output)
            return
        by_name = {request.request_id: request for request in requests}
        with self.connector_output(output):
            self.encode_all(output, by_name)

    def encode_all(self, output: Any, by_name: dict[str, Request]) -> None:
        for name, indices in output.scheduled_encoder_inputs.items():
            for index in indices:
                feature = by_name[name].mm_features[index]
                self.encoded.append(feature.identifier)
                self.put(feature.identifier, self.encode(feature.identifier, feature.mm_position.length))


class V1Runner(VllmRunner):
    def connector_output(self, output: Any) -> AbstractContextManager[Any]:
        hooks: AbstractContextManager[Any] = ECConnectorModelRunnerMixin.maybe_get_ec_connector_output(
            output, encoder_cache=self.cache
        )
        return hooks

    def no_forward(self, output: Any) -> None:
        """A step without a forward pass: no hook is called."""

    def put(self, identifier: str, tensor: torch.Tensor) -> None:
        super().put(identifier, tensor)
        ECConnectorModelRunnerMixin.maybe_save_ec_to_connector(self.cache, identifier)


class V2Runner(VllmRunner):
    """It saves the keys that are new since the loads. vLLM's `EncoderRunner` encodes and gathers, too; only the model
    is a fake, whose output for an item's payload is that of the tests' encoder for the item."""

    def __init__(self, config: Any, cache: Any) -> None:
        super().__init__(config, cache)
        self._active = ActiveECConnector(config, cache)
        self.features = EncoderCache()
        self.features.encoder_outputs = cache
        self._encoder = EncoderRunner(
            SimpleNamespace(embed_multimodal=self._embed), 64, WIDTH, self.features, torch.float32, torch.device("cpu")
        )

    def connector_output(self, output: Any) -> AbstractContextManager[Any]:
        hooks: AbstractContextManager[Any] = self._active.maybe_get_output(output)
        return hooks

    def no_forward(self, output: Any) -> None:
        self._active.no_forward(output)

    def encode_all(self, output: Any, by_name: dict[str, Request]) -> None:
        for name, each in by_name.items():
            if name not in self.features.mm_features:
                self.features.add_request(name, [_feature(feature) for feature in each.mm_features])
        for name, changes in getattr(output, "encoder_input_updates", {}).items():  # in 0.33
            for index, data in changes.items():
                features = self.features.mm_features[name]
                features[index] = dataclasses.replace(features[index], data=data and _payload(features[index]))
        state = SimpleNamespace(encoder_runner=self._encoder, encoder_cache=self.features)
        ModelState.execute_mm_encoder(state, output.scheduled_encoder_inputs)
        for name in output.num_scheduled_tokens:
            if name in by_name:
                self._gather(name)

    def _embed(self, name: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
        items = [(bytes(each.tolist()).decode(), int(number)) for each, number in zip(name, rows, strict=True)]
        self.encoded += [identifier for identifier, _ in items]
        return [self.encode(identifier, number) for identifier, number in items]

    def _gather(self, name: str) -> None:
        """vLLM's own gather: a RuntimeError for a missing item, which would end the engine."""
        end = max(each.mm_position.offset + each.mm_position.length for each in self.features.mm_features[name])
        tokens = [np.array([number]) for number in (end, 0, end + 1, 0)]
        self._encoder.gather_mm_embeddings([name], end, *tokens)


def _feature(feature: Feature) -> MultiModalFeatureSpec:
    position = PlaceholderRange(feature.mm_position.offset, feature.mm_position.length)
    made = MultiModalFeatureSpec(None, feature.modality, feature.identifier, position)
    return dataclasses.replace(made, data=_payload(made)) if feature.data is not None else made


def _payload(feature: MultiModalFeatureSpec) -> MultiModalKwargsItem:
    name, rows = torch.tensor(list(feature.identifier.encode())), torch.tensor(feature.mm_position.length)
    fields = {"name": name, "rows": rows}
    return MultiModalKwargsItem(
        {key: MultiModalFieldElem(data=value, field=MultiModalBatchedField()) for key, value in fields.items()}
    )


@pytest.fixture(scope="module")
def config() -> Any:
    transfer = {
        "ec_connector": "ECLMCacheConnector",
        "ec_connector_module_path": "lmcache_ec.adapters.vllm.connector",
        "ec_role": "ec_both",
    }
    return vllm_config(model_path("qwen3vl"), ec_transfer_config=transfer)


@pytest.fixture(
    params=[(V1Runner, dict), (V2Runner, dict), (V2Runner, lambda: PreallocatedCache(64, WIDTH))],
    ids=["v1", "v2", "v2 with a preallocated buffer"],
)
def served(request: pytest.FixtureRequest, config: Any, tmp_path: Path) -> Iterator[Served]:
    """An engine that holds nothing at the end of a test, whatever the test does."""
    runner, cache = request.param
    config.ec_transfer_config.engine_id = uuid.uuid4().hex
    served = Served(tmp_path / "entries", runner=runner(config, cache()), name=engine_name(config))
    yield served.ready()
    try:
        if not served.cache.inert:
            assert served.held() == {}
    finally:
        served.close()
        ec_transfer_state._EC_CONNECTOR_AGENT = None


def finish(served: Served, *requests: Request) -> None:
    for each in requests:
        served.side.request_finished(each)


def test_a_new_output_is_saved_and_a_loaded_one_is_not_saved_again(served: Served) -> None:
    served.store(X)
    assert (served.runner.encoded, served.runner.saved) == ([X], [X])
    mixed = request("mixed", X, Y)
    assert served.schedule(mixed) == "load encode"
    finish(served, mixed)
    served.settle()
    assert (served.runner.encoded, served.runner.saved) == ([X, Y], [X, Y])
    for identifier in (X, Y):
        assert torch.equal(served.runner.cache[identifier], embedding(identifier))
    counts = served.side.snapshot()
    assert (counts["saves"], counts["loads_cpu"], counts["loads_failed"]) == (2, 1, 0)


def test_an_item_whose_load_fails_is_encoded_in_the_same_step_beside_the_others(served: Served) -> None:
    """The request loads two items and encodes one; for one of the loads the rank is sent a place outside its arena."""
    served.store(X, Y)
    asking = request("asking", X, Y, Z)
    assert served.vllm.offer(asking) == "load load encode"
    output = served.vllm.end_pass()
    loads = output.ec_connector_metadata.loads
    loads[0] = type(loads[0])(loads[0].place, 1 << 30, X, loads[0].spec, loads[0].item)
    assert output.ec_connector_metadata.encoder_inputs is output.scheduled_encoder_inputs
    served.runner.run(output, asking)
    finish(served, asking)
    assert served.runner.encoded == [X, Y, Z, X]
    for identifier in (X, Y, Z):
        assert torch.equal(served.runner.cache[identifier], embedding(identifier))
    assert served.settle()["loads_failed"] == 1


def test_a_step_with_nothing_to_copy_costs_no_report(served: Served) -> None:
    served.store(X)
    reports: list[Any] = []
    rank = served.runner.worker._worker._rank
    report, rank.report = rank.report, lambda *args: reports.append(args)
    served.step(text=0)
    served.step(text=1)
    rank.report = report
    assert reports == []


def test_an_encoder_that_raises_leaves_no_place_behind(served: Served) -> None:
    def broken(identifier: str, rows: int) -> torch.Tensor:
        if identifier == Y:
            raise RuntimeError("out of memory")
        return embedding(identifier, rows)

    served.runner.encode = broken
    failing = request("failing", X, Y, Z)
    served.vllm.offer(failing)
    output = served.vllm.end_pass()
    with pytest.raises(RuntimeError, match="out of memory"):
        served.runner.run(output, failing)
    finish(served, failing)
    served.vllm.evict(X, Y, Z)
    counts = served.settle()
    assert counts["places_writing"] == counts["places_sealing"] == counts["orders"] == 0
    assert counts["saves"] == (1 if isinstance(served.runner, V1Runner) else 0)  # V1 saves as it goes


def test_a_save_dropped_once_is_done_later_from_the_runners_cache(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, book = request("held", X), served.cache.book
    with monkeypatch.context() as full:
        full.setattr(book, "reserve_save", lambda identifier, spec, *rest, **keys: book.remember(identifier, spec))
        served.schedule(held)
    finish(served, held)
    counts = served.settle()
    assert (counts["saves"], counts["unsaved"]) == (1, 0)
    assert served.runner.encoded == [X]
    assert book.live(X) is not None


def test_an_item_without_media_is_loaded_by_a_rank_that_has_left_its_engine(served: Served) -> None:
    """Its scheduler side promised it in a step that was under way: there is nothing to encode instead, and an item that
    is missing when gathered ends the engine."""
    served.store(X)
    asking = request("asking", X, data=None)
    served.stage(asking)
    assert served.vllm.offer(asking) == "load"
    output = served.vllm.end_pass()
    served.runner.worker._worker.abandon()
    served.runner.run(output, asking)
    finish(served, asking)
    assert torch.equal(served.runner.cache[X], embedding(X))

    def inert() -> bool:
        served.side.build_connector_meta(scheduler_output())
        return bool(served.cache.inert)

    wait_until("the scheduler side sees the link end", inert)


def test_an_item_without_media_is_loaded_even_if_its_scheduler_side_has_given_up(served: Served) -> None:
    served.store(X)
    asking, side = request("asking", X, data=None), served.side
    served.stage(asking)
    assert side.has_cache_item(X)
    served.cache.close()
    side.give_up_item(asking, 0)
    output = scheduler_output()
    output.num_scheduled_tokens["asking"] = 1
    output.ec_connector_metadata = side.give_up(output)
    served.runner.run(output, asking)
    assert torch.equal(served.runner.cache[X], embedding(X))


def test_after_a_rollback_an_item_whose_payload_vllm_took_back_is_encoded(served: Served) -> None:
    """With 0.33's V2 runner: if it were promised and could not be loaded, no rank could encode it."""
    if not isinstance(served.runner, V2Runner):
        pytest.skip("the V1 runner keeps payloads")
    served.store(X)
    asking = request("asking", X)
    assert served.schedule(asking) == "load"
    served.vllm._output.scheduled_new_reqs = []
    served.vllm._output.encoder_input_updates = {"asking": {0: None}}
    served.vllm.evict(X)
    served.step(asking)
    assert served.vllm.offer(asking) == "encode"
    served.vllm._output.scheduled_new_reqs = []
    served.vllm._output.encoder_input_updates = {"asking": {0: "installed again"}}
    served.step(asking)
    assert torch.equal(served.runner.cache[X], embedding(X))
    finish(served, asking)
