# SPDX-License-Identifier: Apache-2.0
"""Ways to change the weights of a running engine. This code runs in the engine's own process, or in its workers."""

from functools import partial
from typing import Any

from benchmarks.testbed.engine_env import Engine

INSECURE = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""Lets a test send a function to the workers of an engine with several processes."""


def scale_encoder(model: Any, factor: float) -> None:
    """Change tower and projector in place, like a training run. Powers of two are exact."""
    for name, parameter in model.named_parameters():
        if not name.startswith("language_model."):
            parameter.data.mul_(factor)


def scale_language_model(model: Any, factor: float) -> None:
    for name, parameter in model.named_parameters():
        if name.startswith("language_model.") and "norm" in name:
            parameter.data.mul_(factor)


def count_parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def apply(engine: Engine, factor: float) -> None:
    """By the call that applies any function to the model."""
    engine.llm.apply_model(partial(scale_encoder, factor=factor))


def apply_to_language_model(engine: Engine, factor: float) -> None:
    """Like a training run that does not change the encoder."""
    engine.llm.apply_model(partial(scale_language_model, factor=factor))


def reload(engine: Engine, path: str) -> None:
    """From a checkpoint, the same or another one, by vLLM's own method."""
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})


def read(engine: Engine) -> None:
    """Calls that could have changed weights, but did not."""
    engine.llm.apply_model(count_parameters)
    engine.llm.sleep(level=1)
    engine.llm.wake_up()


def set_version(engine: Engine, version: str) -> None:
    engine.llm.llm_engine.set_weight_version(version)


def load_in_process(engine: Engine, factor: float) -> None:
    """Bypassing all calls, one tensor at a time, like trainers that share the process with a one-process engine."""
    model = engine.runner.get_model()
    for name, parameter in list(model.named_parameters()):
        if name == "vision_tower.vision_model.post_layernorm.weight":
            loaded = model.load_weights([(name, parameter.data * factor)])
            assert loaded, "the model takes a checkpoint's names"


def write_in_process(engine: Engine, factor: float) -> None:
    """Bypassing everything: directly into the memory of the weights."""
    scale_encoder(engine.runner.get_model(), factor)
