# SPDX-License-Identifier: Apache-2.0
"""A real engine on the card, as `make demo` runs one on a CPU: off, cold, repeat, restart, on both model runners."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

RUNNERS = {"V2": "1", "V1": "0"}
"""What VLLM_USE_V2_MODEL_RUNNER is for each."""

_ENVIRONMENT = {"TORCH_COMPILE_DISABLE": "0"}
"""The tests' own engines, tiny ones on a CPU, do without."""

_ARGUMENTS: dict[str, Any] = {"enforce_eager": False}


def run(
    model: str,
    say: Callable[[str], None],
    runners: Sequence[str] = tuple(RUNNERS),
    environment: Mapping[str, str] = _ENVIRONMENT,
    arguments: Mapping[str, Any] = _ARGUMENTS,
) -> dict[str, object]:
    """By runner: the phases, or `problem`. `wrong` says what is, in one line; empty if all is right.

    Of outputs only the tokens are compared: on a GPU the last bits of a logit depend on what else is in the batch.
    """
    if problem := _what_is_missing():
        return {"problem": problem}
    from benchmarks import demo
    from benchmarks.testbed.engine_runner import EngineFailed

    if unfit := demo.what_is_wrong(model):
        return {"problem": unfit}
    found: dict[str, object] = {}
    for runner in runners:
        say(f"{model} on the {runner} model runner")
        shutil.rmtree(demo.FOLDER, ignore_errors=True)
        switch = {"VLLM_USE_V2_MODEL_RUNNER": RUNNERS[runner]}
        try:
            phases = demo.run(model, environment={**environment, **switch}, **arguments)
        except EngineFailed as error:
            found[runner] = {"problem": str(error)}
            continue
        found[runner] = {"wrong": _wrong(phases), **{name: asdict(phase) for name, phase in phases.items()}}
    return found


def is_right(found: Mapping[str, object]) -> bool:
    """Whether no runner found anything wrong. One that could not be started is told, and proves nothing."""
    return not any(isinstance(each, dict) and each.get("wrong") for each in found.values())


def lines(found: Mapping[str, object]) -> list[str]:
    """One line a phase, for a person."""
    told = []
    for runner, phases in found.items():
        if not isinstance(phases, dict):
            told.append(f"{runner}: {phases}")
            continue
        for name, phase in phases.items():
            told.append(f"{runner} {name}: {phase or 'nothing'}")
    return told


def _what_is_missing() -> str:
    for name, what in (("vllm", "vLLM"), ("skimage", "scikit-image, whose photographs it shows")):
        if importlib.util.find_spec(name) is None:
            return f"{what} is not installed here"
    return ""


def _wrong(phases: Mapping[str, Any]) -> str:
    if phases["restart"].encodes:
        return f"{phases['restart'].encodes} pictures were encoded again after the restart"
    if phases["repeat"].encodes:
        return f"{phases['repeat'].encodes} pictures were encoded again though they were in memory"
    differing = [name for name, phase in phases.items() if not phase.tokens_equal]
    return f"other tokens than without the cache: {', '.join(differing)}" if differing else ""
