# SPDX-License-Identifier: Apache-2.0
"""What ends a start as soon as vLLM has its configuration: before weights are loaded, as the last line of the log."""

from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from benchmarks.testbed.models import model_path
from lmcache_ec.adapters.vllm.plugin import register
from tests.unit.test_namespace import vllm_config

MANAGER = "lmcache_ec.adapters.vllm.encoder_cache_manager.TierAwareEncoderCacheManager"


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)
    monkeypatch.setattr(EngineArgs, "create_engine_config", EngineArgs.create_engine_config)
    register()


def begun(**changes: Any) -> Any:
    return vllm_config(model_path("qwen2vl"), **changes)


def connector(name: str, **more: Any) -> dict[str, Any]:
    return {"ec_transfer_config": {"ec_connector": name, "ec_role": "ec_both", **more}}


def manager(**config: Any) -> dict[str, Any]:
    return {"ec_manager_config": {"encoder_cache_manager_cls": MANAGER, "manager_config": config}}


@pytest.mark.parametrize(
    ("changes", "says"),
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
def test_what_cannot_be_meant_ends_the_start_in_the_first_process(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        begun(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        connector("ECLMCacheConnector"),
        connector("ECExampleConnector"),
        connector("ECLMCacheConnectorOfTheirs", ec_connector_module_path="theirs"),
        connector("AnotherConnector"),  # vLLM's business
        manager(policy="lru"),
        manager(),
    ],
    ids=["none", "ours", "vllm's", "another's", "unknown", "a policy", "none of it"],
)
def test_what_may_be_meant_does_not(changes: dict[str, Any]) -> None:
    begun(**changes)
