# SPDX-License-Identifier: Apache-2.0
"""A vision tower's LoRA adapters for the test model qwen2vl, and requests that use them."""

import json
from pathlib import Path
from typing import Any

import msgspec

from tests.engine_env import Engine, greedy, said
from tests.media import Prompt

MODEL = "qwen2vl"
ENGINE = {"enable_lora": True, "enable_tower_connector_lora": True, "max_lora_rank": 8, "max_loras": 2}
_RANK = 8
_WIDTH = 64
"""Of the tower, in `tests.models`."""


def adapter(folder: Path, seed: int) -> Path:
    """An adapter of the tower's attention outputs, strong enough to show in the logprobs."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    source = torch.Generator().manual_seed(seed)
    weights = {}
    for block in range(2):
        name = f"base_model.model.visual.blocks.{block}.attn.proj"
        weights[f"{name}.lora_A.weight"] = torch.randn((_RANK, _WIDTH), generator=source)
        weights[f"{name}.lora_B.weight"] = torch.randn((_WIDTH, _RANK), generator=source)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": ["proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def generate(engine: Engine, prompt: Any, adapters: list[tuple[str, int, str]]) -> Any:
    """The prompt once with each adapter (name, number, folder), one after another. In the engine's own process."""
    from vllm.lora.request import LoRARequest

    assert engine.wording is not None
    rendered = engine.wording.render(msgspec.convert(prompt, Prompt))
    outputs = []
    for name, number, folder in adapters:
        request = LoRARequest(name, number, folder)
        outputs += engine.llm.generate([rendered], greedy(4), use_tqdm=False, lora_request=request)
    return msgspec.to_builtins([said(output) for output in outputs])
