# SPDX-License-Identifier: Apache-2.0
"""Which engines run without the cache, decided from vLLM's configuration."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmcache_ec.adapters.vllm import build
from lmcache_ec.adapters.vllm.copier import DeviceCopier
from lmcache_ec.adapters.vllm.topology import engines_on_host, why_inert
from tests.cuda import Xpu


def config(device: str = "cuda", v2: bool = True, lora: Any = None, **parallel: Any) -> Any:
    defaults = {"distributed_executor_backend": "mp", "world_size": 1, "nnodes": 1, "nnodes_within_dp": 1, "rank": 0}
    sizes: dict[str, int | None] = {"tensor_parallel_size": 1, "prefill_context_parallel_size": 1}
    sizes |= {"data_parallel_size_local": 1, "data_parallel_rank_local": None}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            is_encoder_decoder=False, multimodal_config=SimpleNamespace(mm_processor_cache_gb=4)
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        parallel_config=SimpleNamespace(**{**defaults, **sizes, **parallel}),
        device_config=SimpleNamespace(device_type=device),
        ec_transfer_config=SimpleNamespace(ec_connector_extra_config={}, is_ec_consumer=True),
        lora_config=lora,
        use_v2_model_runner=v2,
    )


ADAPTED_TOWER = SimpleNamespace(enable_tower_connector_lora=True)


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
def test_an_engine_on_a_device_that_copies_beside_the_model_is_served(device: str) -> None:
    assert why_inert(config(device)) == ""


@pytest.mark.parametrize("device", ["tpu", "mps"])
def test_an_engine_on_another_device_starts_and_is_served_without_the_cache_and_logs_it_once(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("test_layout")
    assert device in why_inert(config(device))
    assert build.build_worker_side(config(device), logger) is None
    assert not caplog.records, "it is the scheduler side that logs it"


def test_a_device_that_turns_out_not_to_work_does_not_stop_the_start(caplog: pytest.LogCaptureFixture) -> None:
    """This torch was built without CUDA."""
    assert build.build_worker_side(config("cuda"), logging.getLogger("test_layout")) is None
    [record] = caplog.records
    assert "rank 0 cannot copy beside the model" in record.getMessage()


def test_a_device_that_registers_no_memory_serves_and_one_line_states_what_that_costs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    xpu = DeviceCopier(torch.device("xpu", 0), Xpu())
    monkeypatch.setattr(build, "_copier", lambda kind: xpu)
    assert build.build_worker_side(config("xpu"), logging.getLogger("test_layout")) is not None
    [record] = caplog.records
    assert "cannot register memory with xpu" in record.getMessage()
    xpu.close()


def test_data_parallel_engines_on_hosts_of_their_own_are_served() -> None:
    assert why_inert(config(nnodes=2, nnodes_within_dp=1)) == ""
    assert "other hosts" in why_inert(config(nnodes=2, nnodes_within_dp=2))


def test_adapters_of_the_encoder_are_served_only_by_the_runner_that_sets_them_after_the_loads() -> None:
    """V2 sets them for the items that it plans to encode: an item whose load failed would get another's adapter."""
    assert "VLLM_USE_V2_MODEL_RUNNER=0" in why_inert(config(lora=ADAPTED_TOWER))
    assert why_inert(config(lora=ADAPTED_TOWER, v2=False)) == ""
    assert why_inert(config(lora=SimpleNamespace(enable_tower_connector_lora=False))) == ""


def test_all_engines_of_a_host_are_counted_against_its_memory() -> None:
    """Each data-parallel engine of a dense model believes that it is the only one, except the last."""
    assert engines_on_host(config()) == 1
    assert engines_on_host(config(data_parallel_size_local=8)) == 8
    assert engines_on_host(config(data_parallel_rank_local=7)) == 8
