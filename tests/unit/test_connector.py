# SPDX-License-Identifier: Apache-2.0
"""The connector's shell, built from vLLM's own configuration: what may reach vLLM, and what must not."""

import logging
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

from benchmarks.testbed.models import model_path
from benchmarks.testbed.stand_ins import PATIENCE_S, WIDTH, VllmScheduler, request, scheduler_output, sent
from benchmarks.testbed.waiting import wait_until
from lmcache_ec.adapters.vllm import connector as connector_module
from lmcache_ec.adapters.vllm import namespace
from lmcache_ec.adapters.vllm.connector import ECLMCacheConnector
from lmcache_ec.adapters.vllm.loads import Promised
from lmcache_ec.adapters.vllm.metadata import StepMetadata
from lmcache_ec.adapters.vllm.topology import engine_name
from lmcache_ec.config import ConfigError
from lmcache_ec.entry import MAX_PRODUCER_BYTES, TensorSpec
from lmcache_ec.host import memory
from tests.unit.test_namespace import vllm_config

Build = Callable[..., ECLMCacheConnector]
MODEL = partial(torch.nn.Linear, 1, 1)


@pytest.fixture(scope="module")
def configs() -> dict[str, Any]:
    transfer = {
        "ec_connector": "ECLMCacheConnector",
        "ec_connector_module_path": "lmcache_ec.adapters.vllm.connector",
        "ec_role": "ec_both",
    }
    return {
        model: vllm_config(model_path(model), ec_transfer_config=transfer, max_model_len=length)
        for model, length in (("qwen3vl", 2048), ("whisper", 128))
    }


@pytest.fixture
def build(configs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    built: list[ECLMCacheConnector] = []
    engine = uuid.uuid4().hex
    for name in ("LMCACHE_CONFIG_FILE", "LMCACHE_LOCAL_DISK"):
        monkeypatch.delenv(name, raising=False)

    def connector(
        role: ECConnectorRole, model: str = "qwen3vl", watched: bool = True, **extra: Any
    ) -> ECLMCacheConnector:
        config = configs[model]
        monkeypatch.setattr(config.ec_transfer_config, "ec_connector_extra_config", extra)
        monkeypatch.setattr(config.ec_transfer_config, "engine_id", engine)
        engines = {engine_name(config)} if watched else set()
        monkeypatch.setattr("lmcache_ec.adapters.vllm.build.watched", engines)
        built.append(ECLMCacheConnector(config, role))
        return built[-1]

    yield connector
    for each in built:
        each.shutdown()


def both(build: Build, **extra: Any) -> tuple[ECLMCacheConnector, ECLMCacheConnector]:
    """Worker side first, as in vLLM; the scheduler side is ready."""
    worker = build(ECConnectorRole.WORKER, **extra)
    worker.start_worker_services()
    worker.watch_weights(MODEL)
    scheduler = build(ECConnectorRole.SCHEDULER, **extra)
    side = scheduler._scheduler
    assert side is not None
    wait_until(
        "the cache is ready",
        lambda: (scheduler.build_connector_meta(scheduler_output()), side.cache.ready)[1],
        PATIENCE_S,
    )
    return worker, scheduler


def test_an_engine_whose_vllm_hashes_no_media_logs_that_only_items_named_by_clients_are_cached(
    build: Build, configs: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = configs["qwen3vl"]
    monkeypatch.setattr(config.model_config.multimodal_config, "mm_processor_cache_gb", 0)
    monkeypatch.setattr(config.cache_config, "enable_prefix_caching", False)
    with caplog.at_level(logging.WARNING, connector_module.logger.name):
        both(build)
    assert "only items that clients name are cached" in caplog.text


def test_a_wrong_configuration_ends_the_start(build: Build) -> None:
    for role in ECConnectorRole:
        with pytest.raises(ConfigError, match="max_local_cpu_size"):
            build(role, max_local_cpu_sise=1)


def test_the_start_logs_each_setting_with_its_source_and_what_does_not_fit_the_host(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a KV part whose remote store none of our tiers supports: a note mentions it without its password."""
    room = memory()
    assert room is not None
    size = (room.available_bytes >> 30) + 64
    file = tmp_path / "lmcache.yaml"
    file.write_text(f"remote_url: lm://user:hunter2@host:6379\nec:\n  max_local_cpu_size: {size}\n  chunk_size: 16")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    monkeypatch.delenv("LMCACHE_EC_LOAD_POLICY", raising=False)  # set for engine tests
    monkeypatch.setattr(connector_module.logger, "propagate", True)
    with caplog.at_level(logging.INFO, connector_module.logger.name):
        build(ECConnectorRole.SCHEDULER)
    logged = {record.getMessage(): record.levelname for record in caplog.records}
    assert logged[f"encoder cache: LocalCPU {size} GiB ({file} line 3), no LocalDisk"] == "INFO"
    warnings = [text for text, level in logged.items() if level == "WARNING"]
    assert any(f"LocalCPU may grow to {size}.0 GiB" in text for text in warnings)
    assert any(f"chunk_size ({file} line 4)" in text for text in warnings)
    assert any(f"remote_url of the KV part, {file} line 1, is not used here" in text for text in warnings)
    assert not any("hunter2" in text for text in logged)


def test_switched_off_there_is_no_arena_no_process_and_no_folder(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "entries"
    monkeypatch.setattr("lmcache_ec.arena.create", broken)
    monkeypatch.setattr("lmcache_ec.store_process.StoreProcess.__init__", broken)
    monkeypatch.setattr("lmcache_ec.rank.Rank.__init__", broken)
    off: dict[str, Any] = {"enabled": False, "local_disk": str(folder)}
    worker = build(ECConnectorRole.WORKER, **off)
    worker.start_worker_services()
    serves_without(worker, build(ECConnectorRole.SCHEDULER, **off))
    assert not folder.exists()


def test_a_version_of_any_length_fits_the_producer_field_of_an_entry(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds from source have long versions, and an entry whose producer does not fit cannot be sealed."""
    monkeypatch.setattr("vllm.__version__", "0.32.1rc1.dev342+g1a2b3c4d5.d20261231.cu130.precompiled")
    _, scheduler = both(build)
    side = scheduler._scheduler
    assert side is not None
    assert len(side.cache._engine.producer.encode()) <= MAX_PRODUCER_BYTES


def test_where_nobody_watches_the_calls_to_workers_the_cache_is_off_and_logs_it(
    build: Build, errors: list[logging.LogRecord]
) -> None:
    """As when VLLM_PLUGINS does not name our plugin: weights could change unnoticed."""
    worker = build(ECConnectorRole.WORKER)
    serves_without(worker, build(ECConnectorRole.SCHEDULER, watched=False))
    assert ["VLLM_PLUGINS" in error.getMessage() for error in errors] == [True]


def test_an_engine_whose_namespace_is_unknown_has_neither_disk_nor_remote(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: list[logging.LogRecord]
) -> None:
    """Its entries could not be distinguished from those of others, wherever they are stored."""

    def unknown(*_: object) -> str:
        raise namespace.NamespaceUnknown("the weights cannot be seen")

    monkeypatch.setattr(namespace, "engine_namespace", unknown)
    remotes = ["redis://localhost:1", "s3://bucket/prefix?endpoint=http://localhost:1"]
    _, scheduler = both(build, local_disk=str(tmp_path / "entries"), remotes=remotes)
    side = scheduler._scheduler
    assert side is not None
    assert not side.cache.persists
    assert side.cache.below.presence is not None
    assert side.cache.below.presence.all_complete, "there is no tier"
    assert not (tmp_path / "entries").exists()
    assert ["memory only" in error.getMessage() for error in errors] == [True]


def test_an_encoder_decoder_model_is_served_without_the_cache(build: Build) -> None:
    """vLLM's V1 runner never loads for one, while a promise drops the encode."""
    serves_without(build(ECConnectorRole.WORKER, model="whisper"), build(ECConnectorRole.SCHEDULER, model="whisper"))


def serves_without(worker: ECLMCacheConnector, scheduler: ECLMCacheConnector) -> None:
    """Every hook answers as if there were no connector, and metadata only fails its request, not the engine."""
    media = request("media", "x", data={"pixel_values": SimpleNamespace(data="pixels")})
    assert VllmScheduler(scheduler).offer(media) == "encode"
    output = scheduler_output()
    output.ec_connector_metadata = meta = scheduler.build_connector_meta(output)
    assert meta == StepMetadata()
    nothing = request("nothing", "y", data=None)
    assert not scheduler.ensure_cache_available(nothing, 0)
    assert scheduler.take_unavailable_requests() == {"nothing"}
    assert scheduler.take_unavailable_requests() == set()
    assert scheduler.request_finished(media) == (False, None)
    cache: dict[str, Any] = {"x": None}
    worker.bind_connector_metadata(meta)
    worker.start_save_caches(encoder_cache=cache)
    worker.start_load_caches(cache)
    worker.save_caches(cache, "x")
    assert worker.get_finished(set()) == (None, None)
    assert cache == {"x": None}


SCHEDULER_HOOKS: dict[str, Callable[[ECLMCacheConnector], Any]] = {
    "ensure_cache_available": lambda c: c.ensure_cache_available(media_request(), 0),
    "has_cache_item": lambda c: c.has_cache_item("x"),
    "update_state_after_alloc": lambda c: c.update_state_after_alloc(media_request(), 0),
    "build_connector_meta": lambda c: c.build_connector_meta(scheduler_output()),
    "take_unavailable_requests": lambda c: c.take_unavailable_requests(),
    "request_finished": lambda c: c.request_finished(media_request()),
}
WORKER_HOOKS: dict[str, tuple[str, Callable[[ECLMCacheConnector], Any]]] = {
    "start_save_caches": ("retry_saves", lambda c: c.start_save_caches(encoder_cache={})),
    "start_load_caches": ("load", lambda c: c.start_load_caches({})),
    "save_caches": ("save", lambda c: c.save_caches({}, "x")),
    "get_finished": ("finish_step", lambda c: c.get_finished(set())),
}


def media_request() -> Any:
    return request("media", "x", data={"pixel_values": SimpleNamespace(data="pixels")})


def broken(*args: Any, **kwargs: Any) -> Any:
    raise LookupError("no such luck")


@pytest.fixture
def errors() -> Iterator[list[logging.LogRecord]]:
    """The connector's error records; vLLM's loggers do not propagate them."""
    logged: list[logging.LogRecord] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record)

    handler = Recorder(logging.ERROR)
    logger = logging.getLogger("vllm.lmcache_ec")
    logger.addHandler(handler)
    yield logged
    logger.removeHandler(handler)


def test_a_scheduler_hook_that_fails_is_logged_once_and_the_engine_goes_on(
    build: Build, errors: list[logging.LogRecord]
) -> None:
    for name, hook in SCHEDULER_HOOKS.items():
        worker, scheduler = both(build)
        setattr(scheduler._scheduler, name, broken)
        assert hook(scheduler) == hook(scheduler), name
        assert len(errors) == 1, name
        serves_without(build(ECConnectorRole.WORKER, enabled=False), scheduler)
        worker.shutdown()
        errors.clear()


def test_a_worker_hook_that_fails_is_logged_once_and_its_rank_leaves_the_cache(
    build: Build, errors: list[logging.LogRecord]
) -> None:
    """The scheduler side has to know, since orders that it sends to this rank from now on are not carried out."""
    for name, (method, hook) in WORKER_HOOKS.items():
        worker, scheduler = both(build)
        side = scheduler._scheduler
        assert side is not None
        setattr(worker._worker, method, broken)
        for _ in range(3):
            hook(worker)
        assert len(errors) == 1, name
        wait_until(f"{name} sees the end", partial(sees_the_end, scheduler, side), PATIENCE_S)
        for each in (worker, scheduler):
            each.shutdown()
        errors.clear()


def sees_the_end(scheduler: ECLMCacheConnector, side: Any) -> bool:
    scheduler.build_connector_meta(scheduler_output())
    return bool(side.cache.inert)


def test_an_item_promised_before_a_hook_failed_is_encoded_after_all(build: Build) -> None:
    """vLLM relies on it: the engine dies if the tensor never comes."""
    worker, scheduler = both(build)
    side = scheduler._scheduler
    assert side is not None
    place = SimpleNamespace(spec=None)
    side._loads.waiting["x"] = Promised(place, ("media", 0))  # type: ignore[arg-type]
    side.has_cache_item = broken  # type: ignore[method-assign]
    assert not scheduler.has_cache_item("y")
    assert encoded_after_all(worker, scheduler) == {"media": [0]}


@pytest.mark.parametrize("hook", ["has_cache_item", "update_state_after_alloc", "hand_ledger"])
def test_an_item_promised_in_the_pass_in_which_a_hook_fails_is_encoded_after_all(build: Build, hook: str) -> None:
    """vLLM was answered True, and does not ask again before it allocates room for the item."""
    worker, scheduler = both(build)
    side = scheduler._scheduler
    assert side is not None
    asking = request("media", "x", "y", data={"pixel_values": SimpleNamespace(data="pixels")})
    assert scheduler.ensure_cache_available(asking, 0)
    stored(side, asking)
    assert scheduler.has_cache_item("x")
    if hook == "has_cache_item":
        side.has_cache_item = broken  # type: ignore[method-assign]
        assert not scheduler.has_cache_item("y")
    elif hook == "update_state_after_alloc":
        side._memos["media"].items.clear()
    else:
        side.cache.hand_ledger = broken  # type: ignore[method-assign]
    scheduler.update_state_after_alloc(asking, 0)
    assert encoded_after_all(worker, scheduler) == {"media": [0]}


def encoded_after_all(worker: Any, scheduler: Any) -> Any:
    """The encodes that a step of the request `media` leaves for the encoder."""
    output = scheduler_output()
    output.num_scheduled_tokens["media"] = 1
    output.ec_connector_metadata = scheduler.build_connector_meta(output)
    output = sent(output)
    worker.bind_connector_metadata(output.ec_connector_metadata)
    worker.start_load_caches({})
    worker.get_finished(set())
    return output.scheduled_encoder_inputs


def stored(side: Any, asking: Any) -> None:
    """Put an entry into the arena that fits the request's first item."""
    item = side._memos[asking.request_id].items[0]
    spec = TensorSpec(item.rows, WIDTH, side._policy.dtype)
    place = side.cache.book.reserve_save(item.identifier, spec, persist=False)
    side.cache.book.send_save(place, 0, 0)
    side.cache.book.sealed(place.id, 1, True)


def test_running_requests_outlive_a_failure_of_the_cache(build: Build) -> None:
    """Their past items are in the KV cache: only items that are still to come can be missing."""
    _, scheduler = both(build)
    running = request("running", "x", data=None)
    side = scheduler._scheduler
    assert side is not None
    side.ensure_cache_available = broken  # type: ignore[method-assign]
    for computed in (4, 5, 50):
        assert scheduler.ensure_cache_available(running, computed)
    assert scheduler.take_unavailable_requests() == set()
    assert not scheduler.ensure_cache_available(running, 0)
    assert scheduler.take_unavailable_requests() == {"running"}
