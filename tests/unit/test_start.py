# SPDX-License-Identifier: Apache-2.0
"""Errors that end a start as soon as vLLM has its configuration: before weights are loaded, in the log's last line."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from benchmarks.testbed.models import model_path
from benchmarks.testbed.servers.redis import free_port, redis_server
from lmcache_ec import opening_check
from lmcache_ec.adapters.vllm.plugin import register
from lmcache_ec.config import ConfigError
from tests.unit.test_namespace import vllm_config

MANAGER = "lmcache_ec.adapters.vllm.encoder_cache_manager.TierAwareEncoderCacheManager"


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)
    monkeypatch.setattr(EngineArgs, "create_engine_config", EngineArgs.create_engine_config)
    monkeypatch.setattr(opening_check, "_PATIENCE_S", 60.0)  # a busy machine may take long to start a process
    register()


def begun(**changes: Any) -> Any:
    return vllm_config(model_path("qwen2vl"), **changes)


def connector(name: str, **more: Any) -> dict[str, Any]:
    return {"ec_transfer_config": {"ec_connector": name, "ec_role": "ec_both", **more}}


def manager(**config: Any) -> dict[str, Any]:
    return {"ec_manager_config": {"encoder_cache_manager_cls": MANAGER, "manager_config": config}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            connector("ECLMCacheConnecter"),
            "'ECLMCacheConnecter' in --ec-transfer-config: did you mean ECLMCacheConnector",
        ),
        (connector("eclmcacheconnector"), "did you mean ECLMCacheConnector"),
        (
            connector("ECLMCacheConnector", ec_connector_extra_config={"local_dsk": "/data"}),
            "unknown key local_dsk='/data' in ec_connector_extra_config: did you mean local_disk",
        ),
        (manager(policy="lfu"), "manager_config: policy is 'lfu'; it must be one of cost, lru"),
        (manager(polcy="lru"), "manager_config: unknown key 'polcy'"),
    ],
    ids=["a connector's letter", "its case", "a key", "a manager's policy", "its key"],
)
def test_a_mistake_ends_the_start_in_the_first_process(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        begun(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        connector("ECLMCacheConnector"),
        connector("ECExampleConnector"),
        connector("ECLMCacheConnectorOfTheirs", ec_connector_module_path="theirs"),
        connector("AnotherConnector"),  # not ours to check
        manager(policy="lru"),
        manager(),
    ],
    ids=["none", "ours", "vllm's", "another's", "unknown", "a policy", "none of it"],
)
def test_a_setting_that_may_be_meant_does_not_end_the_start(changes: dict[str, Any]) -> None:
    begun(**changes)


def cached(**keys: Any) -> dict[str, Any]:
    return connector("ECLMCacheConnector", ec_connector_extra_config=keys)


def test_a_tier_that_refuses_ends_the_start_in_the_first_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the weights are loaded, with the error as the last line of the log."""
    with redis_server(tmp_path / "redis", "--requirepass", "right-4711") as redis:
        monkeypatch.setenv("LMCACHE_EC_REMOTES", f"redis://:wrong-4711@127.0.0.1:{redis.port}/0")
        with pytest.raises(ConfigError, match=r"redis.*\bpassword\b") as refusal:
            begun(**cached())
        assert "4711" not in str(refusal.value)


def test_a_tier_that_refuses_ends_the_start_while_another_one_still_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience = "from lmcache_ec.tiers import opening\nopening._TIMEOUT_S = 600.0\n"
    (tmp_path / "sitecustomize.py").write_text(patience)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("LMCACHE_EC_BLOCKING_TIMEOUT_SECS", "300")
    with (
        redis_server(tmp_path / "redis", "--requirepass", "right-4711") as redis,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        urls = f"redis://127.0.0.1:{silent.getsockname()[1]}/0, redis://:wrong-4711@127.0.0.1:{redis.port}/0"
        monkeypatch.setenv("LMCACHE_EC_REMOTES", urls)
        with pytest.raises(ConfigError, match=r"redis.*\bpassword\b"):
            begun(**cached())


def test_a_folder_that_cannot_be_used_ends_the_start_in_the_first_process(tmp_path: Path) -> None:
    (tmp_path / ".epoch").write_text("last Tuesday\n")
    with pytest.raises(ConfigError, match=r"local_disk: .*\.epoch"):
        begun(**cached(local_disk=str(tmp_path)))


def test_output_of_starting_interpreters_neither_ends_the_start_nor_hides_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talkative, disk = tmp_path / "talkative", tmp_path / "disk"
    talkative.mkdir()
    (talkative / "sitecustomize.py").write_text("print('a site that greets')\n")
    monkeypatch.setenv("PYTHONPATH", f"{talkative}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert begun(**cached(local_disk=str(disk))) is not None
    (disk / ".epoch").write_text("last Tuesday\n")
    with pytest.raises(ConfigError, match=r"local_disk: .*\.epoch") as refusal:
        begun(**cached(local_disk=str(disk)))
    assert "greets" not in str(refusal.value)


@pytest.mark.parametrize(
    "parallel", [{"data_parallel_size": 2, "data_parallel_size_local": 0, "data_parallel_address": "127.0.0.1"}, {}]
)
def test_neither_an_unreachable_store_nor_one_of_another_host_ends_the_start(
    parallel: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A front end without an engine may have neither credentials nor access to the disk."""
    monkeypatch.setenv("LMCACHE_EC_REMOTES", f"redis://127.0.0.1:{free_port()}/0")
    if parallel:
        (tmp_path / ".epoch").write_text("last Tuesday\n")
    assert begun(**cached(local_disk=str(tmp_path)), **parallel) is not None
