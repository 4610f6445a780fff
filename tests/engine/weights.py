# SPDX-License-Identifier: Apache-2.0
"""Ways to change the weights of a running engine. What is here runs in the engine's own process, or in its workers."""

from functools import partial
from typing import Any

from tests.engine_env import Engine

INSECURE = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""Lets a function through to the workers of an engine with more than one process."""


def scale_encoder(model: Any, factor: float) -> None:
    """In place, what a training run does to tower and projector. Powers of two lose nothing."""
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
    """By the call that takes any function of the model."""
    engine.llm.apply_model(partial(scale_encoder, factor=factor))


def apply_to_language_model(engine: Engine, factor: float) -> None:
    """What a training run does that leaves the encoder alone."""
    engine.llm.apply_model(partial(scale_language_model, factor=factor))


def reload(engine: Engine, path: str = "") -> None:
    """From a checkpoint, another one or the same, as vLLM's own method does."""
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": path} if path else {})


def read(engine: Engine) -> None:
    """Calls that might have changed weights, and did not."""
    engine.llm.apply_model(count_parameters)
    engine.llm.sleep(level=1)
    engine.llm.wake_up()


def set_version(engine: Engine, version: str) -> None:
    engine.llm.llm_engine.set_weight_version(version)


def load_in_process(engine: Engine, factor: float) -> None:
    """Past all calls, a tensor at a time, as trainers do that share the process with an engine of one process."""
    model = engine.runner.get_model()
    for name, parameter in list(model.named_parameters()):
        if name == "vision_tower.vision_model.post_layernorm.weight":
            loaded = model.load_weights([(name, parameter.data * factor)])
            assert loaded, "the model takes a checkpoint's names"


def write_in_process(engine: Engine, factor: float) -> None:
    """Past everything: into the memory of the weights."""
    scale_encoder(engine.runner.get_model(), factor)
