# SPDX-License-Identifier: Apache-2.0
"""One request over HTTP, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.soak.judge import Answer, Ask, Way
from benchmarks.soak.reference import ARGUMENTS, MAX_TOKENS, TEXT
from benchmarks.soak.truth import Truth

_PATIENCE = aiohttp.ClientTimeout(total=60)


@dataclass(frozen=True, slots=True)
class Refused:
    """The server answered with an error."""

    status: int
    text: str


@dataclass(frozen=True, slots=True)
class Lost:
    """No answer: the connection broke, or it took too long."""

    text: str


class Aborted:
    """An answer that the server itself ended early."""


Reply = Answer | Refused | Lost | Aborted


async def send(session: aiohttp.ClientSession, url: str, model: str, ask: Ask, truth: Truth) -> Reply:
    body = _body(model, ask, truth)
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body, timeout=_PATIENCE) as reply:
            if reply.status != 200:
                return Refused(reply.status, f"{reply.status} {(await reply.text())[:300]}")
            return _answer(await reply.json())
    except TimeoutError:
        return Lost(f"no answer in {_PATIENCE.total:.0f} s")
    except (aiohttp.ClientError, OSError) as error:
        return Lost(repr(error))


def _answer(reply: dict[str, Any]) -> Reply:
    [choice] = reply["choices"]
    if choice["finish_reason"] == "abort":
        return Aborted()
    logprobs = choice["logprobs"]["content"] if choice["logprobs"] else []
    return Answer(tuple(choice["token_ids"] or ()), tuple(each["logprob"] for each in logprobs))


def _body(model: str, ask: Ask, truth: Truth) -> dict[str, Any]:
    parts = [_part(ask, number, truth) for number in ask.pictures]
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": TEXT}]}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "logprobs": True,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    if ask.arguments:
        body["mm_processor_kwargs"] = ARGUMENTS[ask.arguments]
    if ask.salt:
        body["cache_salt"] = ask.salt
    return body


def _part(ask: Ask, number: int, truth: Truth) -> dict[str, Any]:
    match ask.way:
        case Way.PIXELS:
            part: dict[str, Any] = {"type": "image_url", "image_url": {"url": truth.urls[number]}}
        case Way.NAME_ONLY:
            part = {"type": "image_url", "image_url": None}
        case Way.PLACEHOLDER:
            part = {"type": "image_embeds", "image_embeds": {"image_grid_thw": truth.placeholders[number]}}
    if ask.name is not None:
        part["uuid"] = ask.name
    return part
