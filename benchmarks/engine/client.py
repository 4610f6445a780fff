# SPDX-License-Identifier: Apache-2.0
"""A streaming client that records when each token arrives."""

import asyncio
import base64
import functools
import io
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from benchmarks.testbed.media import picture
from benchmarks.testbed.servers.openai import chat, image_part

TOKENS = 16
FEW_TOKENS = 2
"""Length of an answer when only its time to first token is needed."""

_PATIENCE = aiohttp.ClientTimeout(total=600)
_SCALE = 8


@dataclass(frozen=True)
class Timing:
    """Seconds from sending the request: to the first token, between tokens (mean), and to the end; and the answer."""

    first_token_s: float
    between_tokens_s: float
    total_s: float
    tokens: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def photograph(seed: int, side: int) -> str:
    """Data URL of a picture of `side` x `side` pixels, as large and as costly to decode as a photograph."""
    from PIL import Image

    file = io.BytesIO()
    coarse = picture(seed, (side // _SCALE, side // _SCALE))
    coarse.resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


async def ask(session: aiohttp.ClientSession, url: str, seed: int, side: int, count: int = TOKENS) -> Timing:
    """One chat about one picture, answered with `count` tokens. Raises aiohttp.ClientError, or RuntimeError if the
    answer is incomplete."""
    body = chat(image_part(photograph(seed, side)), max_tokens=count, stream=True, logprobs=False)
    data = json.dumps(body).encode()
    arrivals: list[float] = []
    tokens: list[int] = []
    began = time.perf_counter()
    async with session.post(
        f"{url}/v1/chat/completions", data=data, headers={"Content-Type": "application/json"}, timeout=_PATIENCE
    ) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if new := _tokens_of(line):
                arrivals += [time.perf_counter()] * len(new)
                tokens += new
    total = time.perf_counter() - began
    if len(tokens) != count:
        raise RuntimeError(f"{url} answered with {len(tokens)} tokens, expected were {count}")
    return Timing(arrivals[0] - began, (arrivals[-1] - arrivals[0]) / (count - 1), total, tuple(tokens))


def _tokens_of(line: bytes) -> Sequence[int]:
    """Tokens in one line of the stream."""
    if not line.startswith(b"data: {"):
        return ()
    chunk = json.loads(line[6:])
    if error := chunk.get("error"):
        raise RuntimeError(f"the server answered with an error: {error}")
    return [token for choice in chunk["choices"] for token in choice.get("token_ids") or ()]


def ask_once(url: str, seed: int, side: int, count: int = TOKENS) -> Timing:
    """`ask`, for a synchronous caller."""

    async def once() -> Timing:
        async with aiohttp.ClientSession() as session:
            return await ask(session, url, seed, side, count)

    return asyncio.run(once())
