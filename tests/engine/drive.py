# SPDX-License-Identifier: Apache-2.0
"""Requests that arrive, end and are aborted while the engine runs. This code runs in the engine's own process.

Time is counted in ticks: steps after which the engine had output. It is the same in every process layout; to catch a
request in mid-prefill, another request that decodes at the same time serves as the clock.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import msgspec

from benchmarks.testbed.engine_env import Engine, Output, greedy, output_of
from benchmarks.testbed.media import Prompt


class Request(msgspec.Struct, frozen=True):
    """A prompt and its times. With a `grid` it carries no pixels, only the size of its images in the prompt.

    `foreign`: it comes from a front end without this package's plugin. `processor` are arguments for the processor.
    `tokens`: the prompt is sent as token ids. `hashes`: it is sent as rendered by vLLM, with these replacing its own.
    """

    prompt: Prompt
    max_tokens: int = 8
    priority: int = 0
    arrives: int = 0
    aborted: int | None = None
    uuids: tuple[str, ...] = ()
    grid: tuple[int, int, int] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    cache_salt: str | None = None
    processor: dict[str, Any] | None = None
    foreign: bool = False
    tokens: bool = False
    hashes: tuple[str, ...] | None = None


class Ending(msgspec.Struct, frozen=True):
    """How a request ended: "length", "error" or "abort". `first` and `last` are ticks of its tokens, -1 for none."""

    reason: str
    output: Output
    first: int
    last: int
    ec_transfer_params: dict[str, Any] | None = None


class Played(msgspec.Struct):
    endings: list[Ending]
    preemptions: int
    encodes: list[str] = []


def play(engine: Engine, requests: list[Any], idle_pass_amid: bool = False) -> Any:
    """Run all `requests` to their ends. `idle_pass_amid` needs ONE_PROCESS: see `schedule_amid_execution`."""
    if idle_pass_amid:
        schedule_amid_execution(engine)
    before = preemptions(engine)
    endings = Play(engine, msgspec.convert(requests, list[Request])).run()
    return msgspec.to_builtins(Played(endings, preemptions(engine) - before))


class Play:
    def __init__(self, engine: Engine, requests: list[Request]) -> None:
        self.engine = engine
        self.llm = engine.llm.llm_engine
        self.coming = {f"played-{index}": request for index, request in enumerate(requests)}
        self.names = list(self.coming)
        self.doomed = {name: request.aborted for name, request in self.coming.items() if request.aborted is not None}
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}
        self.ends: dict[str, Any] = {}
        self.tick = 0

    def run(self) -> list[Ending]:
        while self.coming or self.llm.has_unfinished_requests():
            self.arrive()
            self.abort()
            if self.llm.has_unfinished_requests() and not self.take(self.llm.step()):
                continue
            self.tick += 1
        return [self.ending(name) for name in self.names]

    def arrive(self) -> None:
        for name, request in list(self.coming.items()):
            if request.arrives <= self.tick:
                del self.coming[name]
                prompt = rendered(self.engine, request)
                sampling = greedy(request.max_tokens)
                sampling.extra_args = {"ec_transfer_params": request.ec_transfer_params}
                with foreign_front_end() if request.foreign else nullcontext():
                    self.llm.add_request(name, prompt, sampling, priority=request.priority)

    def abort(self) -> None:
        for name, tick in list(self.doomed.items()):
            if tick <= self.tick and name not in self.coming:
                del self.doomed[name]
                self.llm.abort_request([name])

    def take(self, outputs: list[Any]) -> bool:
        for output in outputs:
            name = output.request_id
            self.last[name] = self.tick
            self.first.setdefault(name, self.tick)
            if output.finished:
                self.ends[name] = output
        return bool(outputs)

    def ending(self, name: str) -> Ending:
        output = self.ends.get(name)
        reason = "abort" if output is None else output.outputs[0].finish_reason
        whole = reason == "length"
        return Ending(
            reason,
            output_of(output) if whole else Output([], []),
            self.first.get(name, -1),
            self.last.get(name, -1),
            getattr(output, "ec_transfer_params", None),
        )


def rendered(engine: Engine, request: Request) -> dict[str, Any]:
    import torch

    assert engine.wording is not None
    prompt = engine.wording.render(request.prompt)
    if request.uuids:
        prompt["multi_modal_uuids"] = {"image": list(request.uuids)}
    if request.grid:
        grids = torch.tensor([request.grid] * len(request.prompt.images))
        prompt["multi_modal_data"] = {"image": {"image_grid_thw": grids}}
    if request.cache_salt:
        prompt["cache_salt"] = request.cache_salt
    if request.processor:
        prompt["mm_processor_kwargs"] = request.processor
    if request.tokens:
        prompt["prompt_token_ids"] = engine.llm.get_tokenizer().encode(prompt.pop("prompt"))
    if request.hashes is not None:
        [prompt] = engine.llm.renderer.render_cmpl([prompt], skip_mm_cache=bool(request.hashes))
        if request.hashes:
            prompt["mm_hashes"] = {"image": list(request.hashes)}
    return prompt


@contextmanager
def foreign_front_end() -> Iterator[None]:
    """Requests as from a front end without this package: with the client's own names, unsigned."""
    with patch("lmcache_ec.adapters.vllm.front_end.is_ours", lambda config: False):
        yield


def chat_with_embeddings(engine: Engine, seed: int) -> Any:
    """The model's output for a chat with a picture and with embeddings that the client computed itself."""
    import base64
    import io

    import torch

    from benchmarks.testbed.media import picture

    width = engine.llm.llm_engine.model_config.get_hidden_size()
    tensor = torch.randn(6, width, generator=torch.Generator().manual_seed(seed))
    file = io.BytesIO()
    torch.save(tensor, file)
    content = [
        {"type": "image_pil", "image_pil": picture(seed, (112, 112))},
        {"type": "prompt_embeds", "data": base64.b64encode(file.getvalue()).decode()},
        {"type": "text", "text": "hello"},
    ]
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    [output] = engine.llm.chat(
        [{"role": "user", "content": content}], greedy(8), chat_template=template, use_tqdm=False
    )
    return msgspec.to_builtins(output_of(output))


def preemptions(engine: Engine) -> int:
    return sum(int(metric.value) for metric in engine.llm.get_metrics() if metric.name == "vllm:num_preemptions")


def schedule_amid_execution(engine: Engine) -> None:
    """Make the scheduler run an extra pass, with no token to schedule, before the next step is executed."""
    executor = engine.llm.llm_engine.model_executor
    execute = executor.execute_model

    def schedule_and_execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        executor.execute_model = execute
        idle = engine.scheduler.schedule()
        assert not idle.total_num_scheduled_tokens, "the pass in between has scheduled tokens"
        return execute(scheduler_output, *args, **kwargs)

    executor.execute_model = schedule_and_execute
