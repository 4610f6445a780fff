# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine on CPU within seconds: environment, process layouts, and the engine itself.

`Engine` runs in the calling process; `engine_runner` runs one in a separate process, which any layout but ONE_PROCESS
should use (spawned workers import `__main__` again). Importing this module does not import vLLM.
"""

import enum
import gc
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.testbed import triton_interpreter
from benchmarks.testbed.media import WORDINGS, Prompt
from benchmarks.testbed.models import MODELS, ROOT, model_path

PLUGIN = Path(__file__).with_name("engine_plugin")
ENCODE_LOG = "EC_TEST_ENCODE_LOG"
GUARD_LOG = "EC_TEST_GUARD_LOG"
EXACT = 1e-4
"""Tolerance for a logprob: batching alone changes it by 3e-6, another picture by far more."""

ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_COMPILE_DISABLE": "1",  # otherwise the first request with logprobs compiles for 16 s
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # threads that spin for each other on shared cores turn 20 ms of a tiny model into 600
    "VLLM_LOGGING_LEVEL": "WARNING",
    "LMCACHE_EC_LOAD_POLICY": "always",  # tests count encodes, and a tiny model's may be quicker than a load
}


class Layout(enum.StrEnum):
    """How an engine is spread over processes."""

    ONE_PROCESS = "one process"
    MULTI_PROCESS = "multi process"
    """vLLM's default: front end, EngineCore, one worker."""
    TP2 = "tp2"
    """Front end, EngineCore, two workers that split the language model."""

    @property
    def ranks(self) -> int:
        return 2 if self is Layout.TP2 else 1


def engine_environment(
    layout: Layout = Layout.ONE_PROCESS,
    *,
    encode_log: Path | None = None,
    guard_log: Path | None = None,
    **extra: str,
) -> dict[str, str]:
    """This process's environment, changed for an engine in a child process. The logs are the test plugin's."""
    own = os.environ
    path = [str(ROOT), str(PLUGIN), *filter(None, own.get("PYTHONPATH", "").split(os.pathsep))]
    changes = {
        **ENGINE_ENVIRONMENT,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if layout is Layout.ONE_PROCESS else "1",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), own.get("PATH", os.defpath)]),
    }
    logs = {ENCODE_LOG: encode_log, GUARD_LOG: guard_log}
    return {**own, **changes, **{name: str(log) for name, log in logs.items() if log}, **extra}


def vllm_version() -> str:
    """Version of the installed distribution, vllm-cpu or vllm. Does not import vLLM."""
    try:
        return version("vllm-cpu")
    except PackageNotFoundError:
        return version("vllm")


def apply_environment(layout: Layout = Layout.ONE_PROCESS) -> None:
    """Prepare this process for an `Engine`. Call it before vLLM is imported."""
    os.environ.update(engine_environment(layout))
    if str(PLUGIN) not in sys.path:
        sys.path.append(str(PLUGIN))


def read_encodes(log: Path, rank: int | None = None) -> list[str]:
    """Identifiers in the order in which workers encoded them: for one rank, or once per rank that encoded them."""
    lines = [line.split(" ", 2) for line in log.read_text().splitlines()] if log.exists() else []
    return [identifier for of_rank, _pid, identifier in lines if rank is None or int(of_rank) == rank]


class Output(msgspec.Struct, frozen=True):
    """Greedy decoding's output: tokens, the logprob of each, and the time to first token, from arrival, in seconds."""

    tokens: list[int]
    logprobs: list[float]
    first_token_s: float = 0.0

    def equals(self, other: "Output") -> bool:
        near = (abs(one - two) <= EXACT for one, two in zip(self.logprobs, other.logprobs, strict=True))
        return self.tokens == other.tokens and all(near)


class Engine:
    """A vLLM engine, owned by the thread that created it. After an exception it is unusable.

    `model` is a name in `models.py` or the folder of a checkpoint. Prefix caching is off, because its hits would hide
    those of the encoder cache; the processor cache is on, because with both off identifiers are counters.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        connector: Mapping[str, Any] | None = None,
        layout: Layout = Layout.ONE_PROCESS,
        **changes: Any,
    ) -> None:
        from vllm import LLM

        hide_llvmlite_from_kernel_binding()
        self.layout = layout
        self.wording = WORDINGS.get(Path(model).name)
        arguments: dict[str, Any] = {
            "model": str(model_path(str(model)) if str(model) in MODELS else model),
            "dtype": "float32",
            "max_model_len": self.wording.max_model_len if self.wording else 4096,
            "max_num_seqs": 8,
            "seed": 0,
            "enforce_eager": True,
            "skip_mm_profiling": True,
            "kv_cache_memory_bytes": 64 << 20,
            "enable_prefix_caching": False,
            "mm_processor_cache_gb": 0.05,
            "tensor_parallel_size": layout.ranks,
            "disable_log_stats": False,  # they include the time to first token
        }
        if self.wording:
            arguments["limit_mm_per_prompt"] = self.wording.limits
        if connector is not None:
            arguments["ec_transfer_config"] = dict(connector)
        self.llm = LLM(**{**arguments, **changes})

    def generate(self, prompts: Sequence[Prompt], max_tokens: int = 8) -> list[Output]:
        """Decode all prompts at once, greedily. The model, or its folder, has to be named like one in `models.py`."""
        if self.wording is None:
            raise ValueError("only the models of benchmarks/testbed/models.py have a wording; use .llm for others")
        outputs = self.llm.generate(
            [self.wording.render(prompt) for prompt in prompts], greedy(max_tokens), use_tqdm=False
        )
        return [output_of(output) for output in outputs]

    def forget(self) -> None:
        """Empty vLLM's own encoder cache, so that the next request has to ask the connector."""
        self.llm.llm_engine.reset_encoder_cache()

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler. Only with one process, like the three below."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def runner(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    @property
    def scheduler_connector(self) -> Any:
        return self.scheduler.ec_connector

    @property
    def worker_connector(self) -> Any:
        from vllm.distributed.ec_transfer import get_ec_transfer

        return get_ec_transfer()

    def shut_down(self) -> None:
        """Shut down in order, in a process that ends afterwards."""
        self.llm.llm_engine.engine_core.shutdown()

    def close(self) -> None:
        """Shut down in order, so that this process can start another engine; takes a second longer."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.shut_down()
        del self.llm
        gc.collect()
        if self.layout is Layout.ONE_PROCESS:
            cleanup_dist_env_and_memory()


def greedy(max_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=1, ignore_eos=True)


def output_of(output: Any) -> Output:
    """`Output` of a vLLM `RequestOutput`."""
    [completion] = output.outputs
    tokens = list(completion.token_ids)
    logprobs = [step[token].logprob for token, step in zip(tokens, completion.logprobs, strict=True)]
    return Output(tokens, logprobs, output.metrics.first_token_latency if output.metrics else 0.0)


def hide_llvmlite_from_kernel_binding() -> None:
    """Since 0.31 vllm-cpu looks for its kernels in every loaded module, and fails on llvmlite's, which LMCache loads
    through numba ("'_lib_fn_wrapper' object has no attribute 'get'"). This affects the second engine of one process.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or find_spec("vllm.triton_utils.dispatcher") is None:
        return
    from vllm.triton_utils import dispatcher

    bind = dispatcher._rebind_kernels
    if bind.__module__ != dispatcher.__name__:
        return

    def bind_without_llvmlite(overrides: Any) -> Any:
        hidden = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "llvmlite"}
        for name in hidden:
            del sys.modules[name]
        try:
            return bind(overrides)
        finally:
            sys.modules.update(hidden)

    dispatcher._rebind_kernels = bind_without_llvmlite


if triton_interpreter.WANTED in os.environ:  # here, since a process that vLLM spawns imports this again before vLLM
    triton_interpreter.interpret()
