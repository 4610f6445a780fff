# SPDX-License-Identifier: Apache-2.0
"""Two data-parallel engines with one front end, in a separate process: `python -m tests.engine.data_parallel DISK`.

Both get the same two images at once, or the rounds of asks (see `Ask`) that a further argument lists as JSON. Prints a
JSON object as its last line: each output, and each engine's status and arenas.
"""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.testbed.engine_env import greedy, hide_llvmlite_from_kernel_binding, output_of
from benchmarks.testbed.media import WORDINGS, Prompt
from benchmarks.testbed.models import model_path
from lmcache_ec.cli.status import engines

MODEL = "gemma3"
NAME = "data-parallel"
PROMPTS = (Prompt(images=(1,)), Prompt(images=(2,)))
MAX_TOKENS = 8


class Ask(NamedTuple):
    """A prompt for one of the engines; its image may be named."""

    prompt: Prompt
    rank: int
    uuid: str | None = None


async def serve(disk: str, rounds: Sequence[Sequence[Ask]]) -> dict[str, Any]:
    """Send all asks of a round at once."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    hide_llvmlite_from_kernel_binding()
    wording = WORDINGS[MODEL]
    arguments = AsyncEngineArgs(
        model=str(model_path(MODEL)),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        enforce_eager=True,
        skip_mm_profiling=True,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=False,
        mm_processor_cache_gb=0.05,
        limit_mm_per_prompt=wording.limits,
        data_parallel_size=2,
        ec_transfer_config={
            "ec_connector": "ECLMCacheConnector",
            "ec_role": "ec_both",
            "engine_id": f"{NAME}-{os.getpid()}",
            "ec_connector_extra_config": {"local_disk": disk, "events_endpoint": f"ipc:///tmp/ec-{os.getpid()}"},
        },
    )
    llm = AsyncLLM.from_engine_args(arguments)

    async def answer_to(ask: Ask) -> tuple[list[int], list[float]]:
        name = f"{ask.rank}-{ask.prompt.images}-{ask.uuid}"
        rendered: Any = wording.render(ask.prompt)
        if ask.uuid is not None:
            rendered["multi_modal_uuids"] = {"image": [ask.uuid]}
        async for output in llm.generate(rendered, greedy(MAX_TOKENS), name, data_parallel_rank=ask.rank):
            last = output_of(output)
        return last.tokens, last.logprobs

    outputs = [output for asks in rounds for output in await asyncio.gather(*map(answer_to, asks))]
    own = [status for status in engines() if status["engine"].startswith(f"{NAME}-{os.getpid()}")]
    found = {"outputs": outputs, "engines": own, "arenas": [arenas(status["pid"]) for status in own]}
    llm.shutdown()
    return found


def arenas(pid: int) -> list[int]:
    """Inodes of the process's arenas. A mapping holds its own descriptor."""
    links = Path(f"/proc/{pid}/fd").iterdir()
    return list({link.stat().st_ino for link in links if "lmcache-ec-arena" in os.readlink(link)})


if __name__ == "__main__":
    both = [[Ask(prompt, rank) for rank in range(2) for prompt in PROMPTS]]
    given = msgspec.json.decode(sys.argv[2], type=list[list[Ask]]) if len(sys.argv) > 2 else both
    print(json.dumps(asyncio.run(serve(sys.argv[1], given))))
