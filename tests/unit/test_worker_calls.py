# SPDX-License-Identifier: Apache-2.0
"""Which calls to vLLM's workers count as harmless, and a check that all calls pass through the watched method."""

import ast
import importlib
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import vllm
from vllm.v1.executor.abstract import Executor
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

from lmcache_ec.adapters.vllm import worker_calls
from lmcache_ec.adapters.vllm.ours import NAME
from lmcache_ec.adapters.vllm.plugin import register
from lmcache_ec.adapters.vllm.topology import engine_name
from lmcache_ec.adapters.vllm.worker_calls import UNCHANGING, Method, carry_out, may_change_weights

CHANGING = {
    *("apply_model", "reload_weights", "reset_weights", "load_model", "update_config", "elastic_ep_execute"),
    *("start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update"),
    *("sleep", "wake_up", "discard", "checkpoint_prepare", "checkpoint_restore", "init_weight_transfer_engine"),
}
OTHERS = {
    *("init_device", "init_worker", "update_environment_variables", "handle_ft_command"),  # watched, without effect
    *("get_model", "vocab_size", "sleep_mode_backend", "randomize_dummy_inputs"),  # their results may be written to
}


def test_every_method_of_this_vllms_workers_is_known() -> None:
    """A new method counts as one that may change weights until it has been reviewed."""
    kinds = (CPUWorker, WorkerBase, WorkerWrapperBase)
    methods = {name for kind in kinds for name in vars(kind) if not name.startswith("_")}
    methods |= {name for name, _ in inspect.getmembers(CPUWorker) if not name.startswith("_")}
    assert methods - UNCHANGING <= CHANGING | OTHERS
    assert not CHANGING & UNCHANGING


def test_an_unknown_function_or_method_is_assumed_to_change_weights() -> None:
    methods: list[Method] = [*CHANGING, "a_trainers_own", b"pickled", len, print]
    for method in methods:
        assert may_change_weights(method)
    for method in ("execute_model", "sample_tokens", "reset_encoder_cache"):
        assert not may_change_weights(method)


def test_whatever_vllm_has_workers_do_goes_through_collective_rpc() -> None:
    """Only executors reach workers in another way, to create them; any further way would go unnoticed."""
    folder = Path(vllm.__file__).parent / "v1"
    reaches = re.compile(r"driver_worker\.(\w+)\(|rpc_broadcast_mq\.enqueue\(")
    found = {
        (file.name, match.group(1) or "enqueue")
        for part in ("engine", "executor")
        for file in (folder / part).glob("*.py")
        for match in reaches.finditer(file.read_text())
    }
    made = {"init_worker", "init_device", "load_model", "elastic_ep_execute"}
    assert found <= {("multiproc_executor.py", "enqueue"), *(("uniproc_executor.py", name) for name in made)}
    source = inspect.getsource(importlib.import_module("vllm.v1.executor.multiproc_executor").MultiprocExecutor)
    assert source.count("rpc_broadcast_mq.enqueue") == 1
    assert "rpc_broadcast_mq.enqueue" in source[source.index("def collective_rpc") :]


class Worker:
    """Stands in for an executor's worker."""

    def __init__(self) -> None:
        self.called: list[Any] = []

    def reload_weights(self, *args: Any, **kwargs: Any) -> str:
        self.called.append((args, kwargs))
        return "reloaded"

    def execute_model(self, *args: Any) -> str:
        return "executed"

    def get_model(self) -> Any:
        return None


def executor_of(kind: type, connector: str) -> Any:
    """An executor from its own constructor, with what vLLM passes to it."""
    config = SimpleNamespace(
        ec_transfer_config=SimpleNamespace(ec_connector=connector, engine_id=connector, mm_encoder_output_widths={}),
        parallel_config=SimpleNamespace(data_parallel_index=0),
        instance_id="tests",
    )
    for part in ("model", "cache", "lora", "load", "scheduler", "device", "speculative", "observability"):
        setattr(config, f"{part}_config", None)
    return kind(config)


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> type:
    """An executor as a user may write it, with a worker in this process, and a plugin that was loaded twice."""
    monkeypatch.setattr(worker_calls, "why_inert", lambda config: "")
    monkeypatch.setattr(worker_calls, "watched", set())
    register()
    register()

    class Custom(Executor):
        uses_ray = False

        def _init_executor(self) -> None:
            self.worker = Worker()
            self.sent: list[Any] = []

        def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
            self.sent.append(method)
            function = method if isinstance(method, str) else cloudpickle.loads(cloudpickle.dumps(method))
            if isinstance(function, str):
                return [getattr(self.worker, function)(*args, **(kwargs or {}))]
            return [function(self.worker, *args, **(kwargs or {}))]

        def check_health(self) -> None:
            pass

    return Custom


def test_an_engine_of_ours_is_watched_from_the_moment_its_executor_is_made(kind: type) -> None:
    executor = executor_of(kind, NAME)
    assert executor.sent == [worker_calls.begin]
    assert engine_name(executor.vllm_config) in vars(worker_calls)["watched"]
    assert executor.collective_rpc("reload_weights", None, (1,), {"path": "p"}) == ["reloaded"]
    assert executor.worker.called == [((1,), {"path": "p"})]
    assert executor.sent[-1].func is carry_out
    assert executor.collective_rpc(lambda worker, number: number + 1, args=(1,)) == [2]
    assert executor.sent[-1].func is carry_out
    assert executor.collective_rpc("execute_model") == ["executed"]
    assert executor.sent[-1] == "execute_model"
    with pytest.raises(NotImplementedError, match="no_such_method"):
        executor.collective_rpc("no_such_method")


def test_an_engine_with_another_connector_is_left_alone_even_beside_one_of_ours(kind: type) -> None:
    executor_of(kind, NAME)
    other = executor_of(kind, "ECExampleConnector")
    assert other.sent == []
    assert engine_name(other.vllm_config) not in vars(worker_calls)["watched"]
    assert other.collective_rpc("reload_weights") == ["reloaded"]
    assert other.sent == ["reload_weights"]


def test_every_executor_of_vllm_takes_a_function_of_the_worker_in_a_methods_place() -> None:
    """From their sources, since those for Ray cannot be imported without Ray."""
    found = 0
    for file in (Path(vllm.__file__).parent / "v1" / "executor").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == "collective_rpc":
                parameters = [each.arg for each in node.args.args]
                assert parameters[:5] == ["self", "method", "timeout", "args", "kwargs"], file
                found += 1
    assert found >= 3
