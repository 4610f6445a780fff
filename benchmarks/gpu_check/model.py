# SPDX-License-Identifier: Apache-2.0
"""A real engine on the card, as `make demo` runs one on a CPU: off, cold, repeat, restart, on both model runners.

Here the cache serves the engine through vLLM's own hooks, which the other checks cannot show: encodes are counted by a
vLLM plugin (benchmarks/testbed/engine_plugin), and the tokens must equal those of an engine without the cache.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_check.report import columns

if TYPE_CHECKING:
    from benchmarks.demo import Phase

SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
RUNNERS = {"V2": "1", "V1": "0"}
"""Value of `SWITCH` for each model runner, the default on GPUs first."""

_BESIDE_THE_CHECKS = 0.85
"""Share of the card's memory. vLLM's default is 0.92, but this process keeps its own context on the card."""


@dataclass(frozen=True)
class Engines:
    """How engines are started on a card, changing what `make demo` sets: it starts tiny ones, eagerly, on a CPU.

    `environment` is given per model runner to be run; `arguments` are those of `EngineProcess`
    (benchmarks/testbed/engine_runner.py).
    """

    environment: Mapping[str, Mapping[str, str]] = field(
        default_factory=lambda: {runner: {"TORCH_COMPILE_DISABLE": "0"} for runner in RUNNERS}
    )
    arguments: Mapping[str, Any] = field(
        default_factory=lambda: {"enforce_eager": False, "gpu_memory_utilization": _BESIDE_THE_CHECKS}
    )


def what_is_wrong(model: str) -> str:
    """Why no engine can be run with `model` here, in one line; empty if one can."""
    for name, what in (("vllm", "vLLM"), ("skimage", "scikit-image, whose photographs are shown")):
        if importlib.util.find_spec(name) is None:
            return f"MODEL={model} needs {what}: it is not installed here"
    if not entry_points(group="vllm.general_plugins", name="lmcache_ec"):
        return f"MODEL={model} needs this package where vLLM finds it: pip install . (it is not installed here)"
    from benchmarks import demo

    return demo.what_is_wrong(model) or ""


def run(model: str, engines: Engines, say: Callable[[str], None]) -> dict[str, dict[str, object]]:
    """By runner: the phases, and what is `wrong` (empty if nothing is); or why it was `not_run`."""
    found = {}
    for runner in engines.environment:
        say(f"{model} on the {runner} model runner")
        found[runner] = _run(model, engines, runner)
    return found


def _run(model: str, engines: Engines, runner: str) -> dict[str, object]:
    from benchmarks import demo
    from benchmarks.testbed.engine_runner import EngineFailed

    start = {"environment": {**engines.environment[runner], SWITCH: RUNNERS[runner]}, **engines.arguments}
    shutil.rmtree(demo.FOLDER, ignore_errors=True)
    try:
        phases = demo.run(model, **start)
    except EngineFailed as error:
        return _failed(model, start, str(error))
    except Exception as error:  # the results so far are still valid
        return {"wrong": f"{type(error).__name__}: {error}"}
    return {"wrong": _wrong(phases), **{name: asdict(phase) for name, phase in phases.items()}}


def _failed(model: str, start: Mapping[str, Any], problem: str) -> dict[str, object]:
    """Find out whose fault it is: vLLM may be unable to run the model this way even without the cache."""
    from benchmarks import demo
    from benchmarks.testbed.engine_runner import EngineFailed

    try:
        engine = demo.start(model, cached=False, **start)
    except EngineFailed as error:
        return {"not_run": f"vLLM does not start without the cache, either: {error}"}
    with suppress(EngineFailed), engine:
        pass
    return {"wrong": f"an engine failed, and without the cache one starts: {problem}"}


def _wrong(phases: Mapping[str, Phase]) -> str:
    """Only tokens of outputs are compared: on a GPU the last bits of a logit depend on the rest of the batch."""
    if not phases["cold"].encodes:
        return "no encode was counted with an empty cache: nothing is proved"
    if phases["restart"].encodes:
        return f"{phases['restart'].encodes} pictures were encoded again after the restart"
    if phases["repeat"].encodes:
        return f"{phases['repeat'].encodes} pictures were encoded again though they were in memory"
    differing = [name for name, phase in phases.items() if not phase.tokens_equal]
    return f"other tokens than without the cache: {', '.join(differing)}" if differing else ""


def is_right(found: Mapping[str, Mapping[str, object]]) -> bool:
    """Whether an engine ran and nothing is wrong on any runner."""
    return any("wrong" in each for each in found.values()) and not any(each.get("wrong") for each in found.values())


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    rows: list[tuple[str, ...]] = [("runner", "phase", "encodes", "loads", "TTFT median", "tokens")]
    ends = []
    for runner, phases in found.items():
        if verdict := phases.get("wrong") or phases.get("not_run"):
            ends.append(f"{runner}: {'WRONG' if phases.get('wrong') else 'not run'}: {verdict}")
        for name, phase in phases.items():
            if isinstance(phase, dict):
                loads = ", ".join(f"{count} {tier}" for tier, count in phase["loads"].items()) or "0"
                tokens = "reference" if name == "off" else "equal" if phase["tokens_equal"] else "DIFFER"
                rows.append((runner, name, str(phase["encodes"]), loads, f"{phase['ttft_ms_median']} ms", tokens))
    return "\n".join([*columns(rows), *ends])
