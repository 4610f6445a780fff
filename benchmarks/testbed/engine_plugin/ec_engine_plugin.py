# SPDX-License-Identifier: Apache-2.0
"""vLLM plugins for the tests, loaded into every process of an engine because this folder is on its PYTHONPATH.

`count_encodes` logs what the vision tower really encoded, `guard_tiers` refuses I/O and digests in the engine's
processes. Neither relies on the package under test. Each is off unless its variable names a file:

EC_TEST_ENCODE_LOG  a line "rank pid identifier" for each encoder output that vLLM puts into its cache
EC_TEST_GUARD_LOG   a line "pid function" for each forbidden call, which raises as well

The cache's store process is not a vLLM process and loads no plugins, so the guarded functions work there.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import unwrap
from types import FunctionType, ModuleType
from typing import Any

ENCODE_LOG = "EC_TEST_ENCODE_LOG"
GUARD_LOG = "EC_TEST_GUARD_LOG"


def count_encodes() -> None:
    """vllm.general_plugins entry point. The V1 runner caches an output right after encoding it; the V2 runner announces
    what its encoder is about to encode."""
    after_import("vllm.v1.worker.gpu_model_runner", log_encodes)
    after_import("vllm.v1.worker.gpu.mm.encoder_runner", log_encodes_of_v2)


def guard_tiers() -> None:
    """vllm.general_plugins entry point."""
    if os.environ.get(GUARD_LOG):
        after_import("lmcache_ec.tiers.disk", lambda module: refuse_methods(module.DiskTier))
        after_import("lmcache_ec.entry", lambda module: [refuse(module.seal), refuse(module.verify)])


def append(path: str, line: str) -> None:
    """Append a line by one write with O_APPEND, so that lines of several processes do not mix."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)


def log_encodes(module: ModuleType) -> None:
    runner = module.GPUModelRunner
    cache_output = runner._cache_encoder_output

    def cache_and_log(self: Any, mm_hash: str, *args: Any, **kwargs: Any) -> None:
        if path := os.environ.get(
            ENCODE_LOG
        ):  # read at each call: in one process a test sets it after the engine is up
            append(path, f"{self.parallel_config.rank} {os.getpid()} {mm_hash}")
        cache_output(self, mm_hash, *args, **kwargs)

    runner._cache_encoder_output = cache_and_log


def log_encodes_of_v2(module: ModuleType) -> None:
    runner = module.EncoderRunner
    prepare = runner.prepare_mm_inputs

    def prepare_and_log(self: Any, *args: Any, **kwargs: Any) -> Any:
        hashes, inputs = prepare(self, *args, **kwargs)
        if path := os.environ.get(ENCODE_LOG):
            from vllm.distributed.parallel_state import get_world_group

            for mm_hash in hashes:
                append(path, f"{get_world_group().rank} {os.getpid()} {mm_hash}")
        return hashes, inputs

    runner.prepare_mm_inputs = prepare_and_log


def refuse_methods(tier: type) -> None:
    for member in vars(tier).values():
        function = getattr(member, "__func__", member)
        if isinstance(unwrap(function), FunctionType):
            refuse(function)


def refuse(function: Callable[..., Any]) -> None:
    """Replace the function's code object: modules that imported it earlier, under any name, get the refusal, too."""

    def refusal(*args: object, **kwargs: object) -> None:
        import os
        import sys

        import ec_engine_plugin

        name = sys._getframe().f_code.co_qualname
        ec_engine_plugin.append(os.environ[ec_engine_plugin.GUARD_LOG], f"{os.getpid()} {name}")
        raise RuntimeError(f"{name} was called in an engine process")

    innermost = unwrap(function)
    assert isinstance(innermost, FunctionType)
    names = {"co_name": innermost.__name__, "co_qualname": innermost.__qualname__}
    innermost.__code__ = refusal.__code__.replace(**names)


class AfterImport(MetaPathFinder):
    """Calls `then` with the module once it has executed; the real finders locate it. Serves one import."""

    def __init__(self, name: str, then: Callable[[ModuleType], object]) -> None:
        self.name = name
        self.then = then

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_then(module: ModuleType) -> None:
            run(module)
            self.then(module)

        spec.loader.exec_module = run_then  # type: ignore[method-assign]
        return spec


def after_import(name: str, then: Callable[[ModuleType], object]) -> None:
    """Call `then` now if the module is loaded, else on its import, which a plugin must not cause in the front end."""
    if module := sys.modules.get(name):
        then(module)
    else:
        sys.meta_path.insert(0, AfterImport(name, then))
