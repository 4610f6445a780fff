# SPDX-License-Identifier: Apache-2.0
"""Runs in the engine without the cache: pictures, the right answers to all questions, and vLLM's identifiers.

It asks with the content parts that an OpenAI client sends, so that rendering, identifiers and outputs match a server's.
"""

from __future__ import annotations

import base64
import io
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.soak.judge import Answer, Question
from benchmarks.soak.parts import Engine, greedy, picture

TEXT = "hello"
MAX_TOKENS = 4
MERGED_PIXELS = 28
"""Side of the square of pixels that becomes one row of the tiny model's encoder output."""

ARGUMENTS: dict[str, dict[str, int]] = {"": {}, "fewer": {"max_pixels": 6272}, "more": {"min_pixels": 50176}}
"""The processor's arguments by their name in questions."""

_MARGIN = 1e-3
"""Minimum lead of each token over the runner-up, so that the effect of batching cannot change the token."""


class Plan(msgspec.Struct):
    """What to answer: `sizes` of all pictures, pairs of them, and client names with their arguments."""

    sizes: list[tuple[int, int]]
    pairs: list[tuple[int, int]]
    with_arguments: list[int]
    """Pictures that are asked about with arguments, too."""
    names: list[tuple[str, str]]
    """(name, arguments): vLLM derives an identifier from both."""
    checkpoints: list[str]
    """Folders; the engine was started with the first one's weights."""


class Found(msgspec.Struct):
    """`unclear` are questions whose answer a batch could change, or that share their answer with another: no request
    can be judged by them."""

    urls: list[str]
    placeholders: list[str]
    rights: list[tuple[Question, Answer]]
    unclear: list[Question]
    identifiers: list[tuple[int, str, str]]
    """(picture, arguments, identifier)."""
    of_names: list[tuple[str, str, str]]
    """(name, arguments, identifier)."""


def answer(engine: Engine, plan: str, into: str) -> None:
    """Called through `benchmarks.testbed.engine_runner`: answers the `Plan` in the file `plan` into the file `into`."""
    given = msgspec.json.decode(Path(plan).read_bytes(), type=Plan)
    first, *others = map(Path, given.checkpoints)
    write_checkpoints(first, others)
    Path(into).write_bytes(msgspec.json.encode(_Answering(engine, given).all()))


def write_checkpoints(first: Path, others: Sequence[Path]) -> None:
    """Copies of a checkpoint with other random weights in the vision tower: one with all of them changed, one only in
    the linear layers, which on a CPU are in no parameter of the running model.
    """
    import torch
    from safetensors.torch import load_file, save_file

    for seed, folder in enumerate(others, 1):
        shutil.copytree(first, folder)
        for file in folder.glob("*.safetensors"):
            source, weights = torch.Generator().manual_seed(seed), load_file(file)
            for name, weight in weights.items():
                linear = weight.dim() == 2
                if name.startswith("visual.") and weight.dim() >= 2 and (linear or seed == 1):
                    weights[name] = torch.randn(weight.shape, generator=source).to(weight.dtype) * 0.08
            save_file(weights, file, metadata={"format": "pt"})


class _Answering:
    def __init__(self, engine: Engine, plan: Plan) -> None:
        self._engine = engine
        self._plan = plan
        self._urls = [_url(seed, size) for seed, size in enumerate(plan.sizes)]
        self._unclear: list[Question] = []
        self._encode_log = Path(os.environ["EC_TEST_ENCODE_LOG"])

    def all(self) -> Found:
        plan, rights = self._plan, {}
        singles = [((number,), "") for number in range(len(plan.sizes))]
        singles += [((number,), name) for name in ARGUMENTS if name for number in plan.with_arguments]
        asked = [*singles, *((pair, "") for pair in plan.pairs), ((), "")]
        identifiers: list[str] = []
        for weights, checkpoint in enumerate(plan.checkpoints):
            if weights:
                self._engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": checkpoint})
            self._engine.forget()
            for pictures, arguments in asked:
                question = Question(pictures, arguments, weights)
                rights[question] = self._ask(question)
                if not weights and len(identifiers) < len(singles):
                    identifiers.append(self._last_encode())
        of_names = [(name, arguments, self._identifier(name, arguments)) for name, arguments in plan.names]
        return Found(
            self._urls,
            [_placeholder(size) for size in plan.sizes],
            list(rights.items()),
            self._unclear + _shared(rights),
            [(pictures[0], arguments, name) for (pictures, arguments), name in zip(singles, identifiers, strict=True)],
            of_names,
        )

    def _ask(self, question: Question) -> Answer:
        parts = [{"type": "image_url", "image_url": {"url": self._urls[number]}} for number in question.pictures]
        completion = self._chat(parts, question.arguments)
        tokens = list(completion.token_ids)
        logprobs = [step[token].logprob for token, step in zip(tokens, completion.logprobs, strict=True)]
        for token, step in zip(tokens, completion.logprobs, strict=True):
            others = [each.logprob for other, each in step.items() if other != token]
            if step[token].logprob - max(others) < _MARGIN and question not in self._unclear:
                self._unclear.append(question)
        return Answer(tuple(tokens), tuple(logprobs))

    def _identifier(self, name: str, arguments: str) -> str:
        """vLLM's identifier for a client's name with arguments; it does not depend on the picture."""
        part = {"type": "image_url", "image_url": {"url": self._urls[self._plan.with_arguments[0]]}, "uuid": name}
        self._chat([part], arguments)
        return self._last_encode()

    def _chat(self, parts: list[dict[str, Any]], arguments: str) -> Any:
        sampling = greedy(MAX_TOKENS)
        sampling.logprobs = 2
        [output] = self._engine.llm.chat(
            [{"role": "user", "content": [*parts, {"type": "text", "text": TEXT}]}],
            sampling,
            use_tqdm=False,
            mm_processor_kwargs=ARGUMENTS[arguments] or None,
        )
        [completion] = output.outputs
        return completion

    def _last_encode(self) -> str:
        return self._encode_log.read_text().splitlines()[-1].split(" ", 2)[2]


def _shared(rights: dict[Question, Answer]) -> list[Question]:
    """Questions whose answer another question has, too. (Without a picture the weights do not matter.)"""
    seen: dict[tuple[int, ...], list[Question]] = {}
    for question in rights:
        if question.pictures:
            seen.setdefault(rights[question].tokens, []).append(question)
    alike = [
        (one, other)
        for questions in seen.values()
        for one in questions
        for other in questions
        if one != other and rights[one].equals(rights[other])
    ]
    return sorted({question for pair in alike for question in pair}, key=repr)


def _url(seed: int, size: tuple[int, int]) -> str:
    file = io.BytesIO()
    picture(seed, size).save(file, "PNG", compress_level=0)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _placeholder(size: tuple[int, int]) -> str:
    """A picture's grid of patches, in the format in which vLLM accepts tensors from clients."""
    import torch

    width, height = size
    file = io.BytesIO()
    torch.save(torch.tensor([1, height // (MERGED_PIXELS // 2), width // (MERGED_PIXELS // 2)]), file)
    return base64.b64encode(file.getvalue()).decode()
