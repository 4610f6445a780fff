# SPDX-License-Identifier: Apache-2.0
"""The cost of a load in the forward pass of a vLLM engine."""

import gc
import math
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench.copies import copy_bytes
from benchmarks.bench.sample import WIDTH, Samples, in_any_order, timed, times_of
from benchmarks.testbed.engine_env import Engine, greedy
from benchmarks.testbed.media import WORDINGS, Prompt
from lmcache_ec.adapters.vllm.tensors import view
from lmcache_ec.entry import TensorSpec, room

_MODEL = "qwen2vl"
_WIDTH = WIDTH // 2  # of float32: as many bytes a row
_PATCH = 28
_DEADLINE_S = 60.0


class InEngine:
    """Runs in its own process: an engine with scheduler and worker in this process, so that both are accessible.

    The model has one layer of random weights whose width is the row length. Its encoder is replaced by one that returns
    rows of noise at once, since only loads are measured. A request ends after the step that loads for it.

    load_in_engine  `start_load_caches`, while vLLM runs a step. Floor: memcpy of the same bytes between two steps
    """

    def __init__(self, folder: str, whose: str, largest_rows: int) -> None:
        """`whose` is "ours" or "example"; LMCache's encoder cache never hits in an engine."""
        torch.set_num_threads(1)
        self._whose = whose
        self._source = torch.randn(largest_rows, _WIDTH)
        self._engine = Engine(
            _MODEL,
            connector=_connector(whose, Path(folder) / f"in-engine-{whose}"),
            load_format="dummy",
            hf_overrides={
                "text_config": {
                    "hidden_size": _WIDTH,
                    "num_attention_heads": _WIDTH // 64,
                    "num_hidden_layers": 1,
                    "max_position_embeddings": largest_rows + 256,
                },
                "vision_config": {"hidden_size": _WIDTH},
            },
            mm_processor_kwargs={"max_pixels": largest_rows * _PATCH**2},
            max_model_len=largest_rows + 256,
            max_num_batched_tokens=64,
            mm_processor_cache_gb=2,
        )
        self._engine.runner.model.embed_multimodal = self._encode
        connector = self._engine.worker_connector
        self._load = connector.start_load_caches
        connector.start_load_caches = self._timed_load
        self._loads: list[tuple[str, float]] = []  # identifier, seconds
        self._encodes = self._requests = 0
        gc.collect()
        gc.freeze()

    def measure(self, rows: int, suffix: str) -> Samples:
        samples: Samples = {}
        row = f"load_in_engine{suffix}"
        prompt = WORDINGS[_MODEL].render(Prompt(images=(rows,), size=_size(rows)))
        identifier = self._stored(prompt)

        def load() -> None:
            samples.setdefault((row, self._whose), []).append(self._ask(prompt)[1])

        for _ in range(times_of(rows)):
            if self._whose == "ours":
                in_any_order(load, lambda: self._floor(samples, row, identifier, rows))
            else:
                load()
        return samples

    def _stored(self, prompt: Any) -> str:
        """Ask until the image has been encoded, stored and loaded; returns its identifier."""
        deadline = time.monotonic() + _DEADLINE_S
        while not (found := self._ask(prompt))[0]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"what was encoded is not loaded in {_DEADLINE_S:.0f} s")
        return found[0]

    def _ask(self, prompt: Any) -> tuple[str, float]:
        """Run a request until its image has been loaded or encoded: identifier and seconds of the load, if any."""
        engine, loads, encodes = self._engine.llm.llm_engine, len(self._loads), self._encodes
        self._requests += 1
        name = f"request {self._requests}"
        engine.add_request(name, prompt, greedy(1))
        while (len(self._loads), self._encodes) == (loads, encodes):
            engine.step()
        engine.abort_request([name])
        engine.step()
        self._engine.forget()
        return self._loads[-1] if len(self._loads) > loads else ("", 0.0)

    def _timed_load(self, cache: dict[str, torch.Tensor], **keys: Any) -> None:
        held = set(cache)
        began = time.perf_counter()
        self._load(cache, **keys)
        if new := cache.keys() - held:
            [identifier] = new
            if self._whose == "example":
                cache[identifier].clone()  # it only maps the file, without reading it
            self._loads.append((identifier, time.perf_counter() - began))

    def _encode(self, image_grid_thw: Any, **_: Any) -> list[torch.Tensor]:
        self._encodes += 1
        return [self._source[: int(patches.prod()) // 4].clone() for patches in image_grid_thw]

    def _floor(self, samples: Samples, row: str, identifier: str, rows: int) -> None:
        place = self._engine.scheduler_connector._scheduler.cache.book.live(identifier)
        memory = self._engine.worker_connector._worker._rank.memory
        stored = view(memory, place.offset + room(identifier), TensorSpec(rows, _WIDTH, "F32"))
        timed(samples, row, "floor", lambda: copy_bytes(torch.empty_like(stored), stored))

    def close(self) -> None:
        self._engine.close()


def _connector(whose: str, folder: Path) -> dict[str, Any]:
    if whose == "example":
        return {
            "ec_connector": "ECExampleConnector",
            "ec_role": "ec_both",
            "ec_connector_extra_config": {"shared_storage_path": str(folder)},
        }
    keys = {"local_disk": str(folder), "max_local_cpu_size": 1.0, "load_deadline_ms": 10_000}
    return {"ec_connector": "ECLMCacheConnector", "ec_role": "ec_both", "ec_connector_extra_config": keys}


def _size(rows: int) -> tuple[int, int]:
    """Width and height in pixels of an image that gives this many rows: as close to a square as possible."""
    high = next(number for number in range(math.isqrt(rows), 0, -1) if rows % number == 0)
    return rows // high * _PATCH, high * _PATCH
