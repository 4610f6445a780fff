# SPDX-License-Identifier: Apache-2.0
"""The connector under vLLM's own runner code: the V2 runner's `ActiveECConnector` and the V1 runner's mixin.

Around them a scheduler side with a real cache and store process; the encoder is a fake, vLLM's calls are not.
"""

import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.ec_transfer import ec_transfer_state
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.v1.worker.ec_connector_model_runner_mixin import ECConnectorModelRunnerMixin
from vllm.v1.worker.gpu.ec_connector import ActiveECConnector

from lmcache_ec.adapters.vllm.connector import ECLMCacheConnector
from lmcache_ec.adapters.vllm.layout import engine_name
from tests.models import model_path
from tests.unit.fakes import WIDTH, PreallocatedCache, Request, Served, digest, embedding, request, sent
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
        side.save = lambda cache, name: (self.saved.append(name), save(cache, name))[1]  # type: ignore[method-assign, assignment]

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
            for name, indices in output.scheduled_encoder_inputs.items():
                for index in indices:
                    feature = by_name[name].mm_features[index]
                    self.encoded.append(feature.identifier)
                    self.put(feature.identifier, self.encode(feature.identifier, feature.mm_position.length))


class V1Runner(VllmRunner):
    def connector_output(self, output: Any) -> AbstractContextManager[Any]:
        return ECConnectorModelRunnerMixin.maybe_get_ec_connector_output(output, encoder_cache=self.cache)

    def no_forward(self, output: Any) -> None:
        """No hook is called."""

    def put(self, identifier: str, tensor: torch.Tensor) -> None:
        super().put(identifier, tensor)
        ECConnectorModelRunnerMixin.maybe_save_ec_to_connector(self.cache, identifier)


class V2Runner(VllmRunner):
    """It saves the keys that are new since the loads."""

    def __init__(self, config: Any, cache: Any) -> None:
        super().__init__(config, cache)
        self._active = ActiveECConnector(config, cache)

    def connector_output(self, output: Any) -> AbstractContextManager[Any]:
        return self._active.maybe_get_output(output)

    def no_forward(self, output: Any) -> None:
        self._active.no_forward(output)


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
    """Whatever a test does, nothing is held at its end."""
    runner, cache = request.param
    config.ec_transfer_config.engine_id = uuid.uuid4().hex
    served = Served(tmp_path / "entries", runner=runner(config, cache()), name=engine_name(config))
    yield served.ready()
    try:
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


def test_a_load_that_fails_is_encoded_in_the_same_step_beside_the_others(served: Served) -> None:
    """The request loads two and encodes one; the rank is told of a place outside its arena for one of the loads."""
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


def test_a_save_dropped_once_is_made_up_for_from_the_runners_cache(
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
