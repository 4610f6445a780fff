# SPDX-License-Identifier: Apache-2.0
"""Engines that share only a remote store: what one of them has encoded, no other encodes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed.engine_env import Layout
from benchmarks.testbed.engine_runner import Generate
from benchmarks.testbed.media import Prompt
from benchmarks.testbed.servers.redis import redis_server
from benchmarks.testbed.servers.seaweed import seaweed
from tests.engine.rig import Reference, Rig, wait_until

pytestmark = pytest.mark.slow

MODEL = "qwen3vl"
PROMPTS = (Prompt(images=(1,)), Prompt(images=(2, 1), text="both"), Prompt(videos=(3,)))
ITEMS = 3
NEW = Prompt(images=(9,))


@dataclass
class Stores:
    """Remotes in the order in which they are asked, and the environment that an engine needs for them."""

    urls: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)


@pytest.fixture(params=["redis", "s3", "redis s3"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stores]:
    found = Stores()
    with redis_server(tmp_path / "redis") as redis, seaweed(tmp_path / "s3") as s3:
        if "redis" in request.param:
            found.urls.append(redis.url)
        if "s3" in request.param:
            found.urls.append(f"s3://{s3.bucket}/shared?endpoint={s3.endpoint}")
            found.environment = s3.environment
        yield found


def test_a_replica_is_warm_from_its_first_request(stores: Stores, tmp_path: Path, reference: Reference) -> None:
    """It starts while the first one serves, with an empty disk and an empty arena, and keeps what it fetches."""

    def replica(name: str) -> Rig:
        keys, environment = {"remotes": stores.urls}, stores.environment
        return Rig(MODEL, Layout.ONE_PROCESS, tmp_path / name, reference, keys=keys, environment=environment)

    with replica("one") as one:
        assert one.ask(*PROMPTS) == ITEMS
        wait_until("all is written", lambda: one.status()["jobs"] == 0)
        with replica("two") as two:
            assert two.ask(*PROMPTS) == 0
            assert two.left_over() == {}
            wait_until("it is on the second one's disk", lambda: len(two.files()) == ITEMS)
            assert one.ask(NEW) == 1
            assert one.left_over() == {}


def test_a_producer_and_a_consumer_on_two_hosts(stores: Stores, tmp_path: Path, reference: Reference) -> None:
    """They share no folder, and the consumer has never seen a width. The producer announces that all is stored."""

    def engine(role: str) -> Rig:
        connector, keys = {"ec_role": f"ec_{role}"}, {"remotes": stores.urls}
        arguments: dict[str, Any] = {"mm_encoder_only": True} if role == "producer" else {}
        return Rig(
            MODEL,
            Layout.MULTI_PROCESS,
            tmp_path / role,
            reference,
            keys=keys,
            environment=stores.environment,
            connector=connector,
            **arguments,
        )

    with engine("producer") as producer:
        assert producer.encodes(producer.engine.do(Generate(PROMPTS, 1)).encodes) == ITEMS
        producer.engine.kill()
    with engine("consumer") as consumer:
        assert consumer.ask(*PROMPTS) == 0
        assert consumer.ask(NEW) == 1
        assert consumer.left_over() == {}
        assert consumer.counts()["saves"] == 0
