# SPDX-License-Identifier: Apache-2.0
"""The servers to be measured, and the stores behind them."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.testbed.servers.openai import OpenAIServer
from benchmarks.testbed.servers.redis import redis_server
from benchmarks.testbed.servers.seaweed import Seaweed

OWN_CACHE_TOKENS = 2048
"""Size of vLLM's own cache of encoder outputs, which equals the largest batch."""


@dataclass(frozen=True)
class Subject:
    """A model of the testbed and what its pictures are. `threads` is 1 for a model that is slower with more."""

    model: str
    side: int
    """Pixels."""
    tokens: int
    """Tokens per picture."""
    threads: int

    @property
    def processor_cache_gb(self) -> float:
        """Room for one picture: a request for another one pays for its preprocessing, in all cases alike."""
        return 1.5 * self.side**2 * 3 * 4 / (1 << 30)


def subjects() -> Mapping[str, Subject]:
    cores = len(os.sched_getaffinity(0))
    return {
        "gemma3": Subject("gemma3", 112, 16, 1),
        "gemma3_vit_b": Subject("gemma3_vit_b", 384, 144, cores),
        "gemma3_so400m_lm": Subject("gemma3_so400m_lm", 448, 256, cores),
    }


@dataclass(frozen=True)
class Stores:
    """The stores behind the servers. A server that is given one of them finds what earlier servers left there."""

    folder: Path
    redis_url: str
    s3_url: str
    environment: Mapping[str, str]

    def tiers(self, *names: str) -> dict[str, Any]:
        """The `ec:` keys that put these tiers below memory; `names` are among "disk", "redis" and "s3"."""
        urls = {"redis": self.redis_url, "s3": self.s3_url}
        keys: dict[str, Any] = {"remotes": [urls[name] for name in names if name in urls]}
        return {**keys, "local_disk": str(self.folder / "entries") if "disk" in names else None}


@contextmanager
def stores(folder: Path) -> Iterator[Stores]:
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(folder / "redis"))
        s3 = Seaweed(folder / "s3")
        s3.start()
        stack.callback(s3.kill)
        yield Stores(folder, redis.url, f"s3://{s3.bucket}/bench?endpoint={s3.endpoint}", s3.environment)


def ours(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {"ec_connector": "ECLMCacheConnector", "ec_role": "ec_both", "ec_connector_extra_config": dict(keys)}


def example(folder: Path) -> dict[str, Any]:
    """vLLM's own connector, which keeps a file for each item in `folder`, and nothing in memory."""
    extra = {"shared_storage_path": str(folder)}
    return {"ec_connector": "ECExampleConnector", "ec_role": "ec_both", "ec_connector_extra_config": extra}


def nothing() -> dict[str, Any]:
    """A connector without a cache, see `nothing.py`."""
    module = "benchmarks.engine.nothing"
    return {"ec_connector": "NothingConnector", "ec_role": "ec_both", "ec_connector_module_path": module}


def server(
    subject: Subject, folder: Path, connector: Mapping[str, Any] | None, environment: Mapping[str, str]
) -> OpenAIServer:
    """A server without prefix caching, whose hits would hide those of the encoder cache."""
    return OpenAIServer(
        subject.model,
        folder,
        connector=connector,
        environment={**environment, "OMP_NUM_THREADS": str(subject.threads)},
        mm_processor_cache_gb=subject.processor_cache_gb,
        max_num_batched_tokens=OWN_CACHE_TOKENS,
        kv_cache_memory_bytes=256 << 20,  # eight requests of 1024 tokens of the largest of the models, and more
        disable_uvicorn_access_log=True,
    )
