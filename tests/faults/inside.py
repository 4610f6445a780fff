# SPDX-License-Identifier: Apache-2.0
"""Functions that a test runs in the engine's own process, by `Call("tests.faults.inside:<name>", {...})`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.testbed.media import Prompt

if TYPE_CHECKING:
    from benchmarks.testbed.engine_env import Engine


def reveal(engine: Engine, first: int, last: int, max_tokens: int, folder: str) -> list[list[Any]]:
    """For pictures `first` to `last`: seed, identifier and output; the encoder's output goes to <identifier>.npy.

    With one process and no connector, these are the model's own results.
    """
    import numpy as np

    revealed = []
    for seed in range(first, last + 1):
        before = set(engine.runner.encoder_cache)
        [output] = engine.generate([Prompt(images=(seed,))], max_tokens)
        [identifier] = set(engine.runner.encoder_cache) - before
        np.save(Path(folder) / identifier, engine.runner.encoder_cache[identifier].numpy())
        revealed.append([seed, identifier, msgspec.to_builtins(output)])
    return revealed


def abort_after_first_token(engine: Engine, seed: int) -> int:
    """Ask for a long answer about a picture and abort it at the first token. Returns the number of tokens so far."""
    from benchmarks.testbed.engine_env import greedy

    assert engine.wording is not None
    inner = engine.llm.llm_engine
    request = inner.add_request(f"abort-{seed}", engine.wording.render(Prompt(images=(seed,))), greedy(500))
    tokens = 0
    while not tokens:
        tokens = sum(len(output.outputs[0].token_ids) for output in inner.step())
    inner.abort_request([request], internal=True)
    return tokens


def metadata_only(engine: Engine, identifier: str) -> list[Any]:
    """A request with placeholder metadata and an identifier. Returns its finish reason and number of tokens."""
    import torch

    from benchmarks.testbed.engine_env import greedy

    assert engine.wording is not None
    prompt = engine.wording.render(Prompt(images=(1,)))
    prompt["multi_modal_data"] = {"image": {"image_grid_thw": torch.tensor([[1, 8, 8]])}}
    prompt["multi_modal_uuids"] = {"image": [identifier]}
    [output] = engine.llm.generate([prompt], greedy(4), use_tqdm=False)
    [completion] = output.outputs
    return [str(completion.finish_reason), len(completion.token_ids)]
