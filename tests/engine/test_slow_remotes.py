# SPDX-License-Identifier: Apache-2.0
"""Remote stores that answer late: which requests wait for them, in scheduling steps of a real engine.

Another request decodes next to the watched one, and each of its decode steps is a tick. A request's wait is the tick of
its first token, compared with a request whose image is in vLLM's own cache and which therefore never waits.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.testbed.engine_env import Layout
from benchmarks.testbed.media import Prompt
from benchmarks.testbed.servers.redis import redis_server
from benchmarks.testbed.servers.relay import Relay, relay
from benchmarks.testbed.servers.seaweed import seaweed
from tests.engine.drive import Request
from tests.engine.rig import Reference, Rig, wait_until

pytestmark = pytest.mark.slow

MODEL = "qwen3vl"
CLOCK = Request(Prompt(text="tick"), max_tokens=400)
WAITS = 20
"""Ticks; a request that waits for a store that answers in 200 ms takes many more, and no other takes this many."""

_numbers = itertools.count(100)

STORED = tuple(Prompt(images=(number,)) for number in (1, 2, 3))


@dataclass
class Store:
    url: str
    between: Relay
    name: str
    environment: dict[str, str] = field(default_factory=dict)


@pytest.fixture(scope="module", params=["redis", "s3"])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, reference: Reference
) -> Iterator[Store]:
    """A store that holds STORED, and answers at once unless a test changes that."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "redis":
        with redis_server(folder) as redis, relay(redis.port) as between:
            found = Store(f"redis://127.0.0.1:{between.port}", between, "redis")
            _fill(found, folder, reference)
            yield found
    else:
        with seaweed(folder / "data") as s3, relay(int(s3.endpoint.rpartition(":")[2])) as between:
            endpoint = f"http://127.0.0.1:{between.port}"
            found = Store(f"s3://{s3.bucket}/slow?endpoint={endpoint}", between, "s3", s3.environment)
            _fill(found, folder, reference)
            yield found


@pytest.fixture(autouse=True)
def quick_again(store: Store) -> Iterator[None]:
    yield
    store.between.delay_s = 0.0


def _fill(store: Store, folder: Path, reference: Reference) -> None:
    with replica(store, folder / "first", reference) as first:
        assert first.ask(*STORED) == len(STORED)
        wait_until("all is written", lambda: first.status()["jobs"] == 0)


def replica(store: Store, folder: Path, reference: Reference, load_deadline_ms: int = 30_000) -> Rig:
    """An engine with an empty disk and an empty arena."""
    keys = {"remotes": [store.url], "load_deadline_ms": load_deadline_ms, "blocking_timeout_secs": 20.0}
    return Rig(MODEL, Layout.ONE_PROCESS, folder, reference, keys=keys, environment=store.environment)


def new(images: int = 1) -> Prompt:
    """Images that no test has used before, since encoded images are stored."""
    return Prompt(images=tuple(itertools.islice(_numbers, images)))


def waited(rig: Rig, prompt: Prompt) -> tuple[int, int]:
    """Ticks from the arrival of a request to its first token while another decodes, and the number of encodes."""
    played = rig.play(CLOCK, Request(prompt, arrives=3))
    clock, watched = played.endings
    assert [clock.reason, watched.reason] == ["length", "length"]
    return watched.first - 3, rig.encodes(played.encodes)


@pytest.mark.parametrize("answer_s", [0.2, 2.0])
def test_a_new_image_waits_for_no_step_and_a_stored_one_waits_only_for_its_load(
    store: Store, tmp_path: Path, reference: Reference, answer_s: float
) -> None:
    with replica(store, tmp_path, reference) as rig:
        store.between.delay_s = answer_s
        rig.ask(new(2))  # two answers: Redis, quick so far, is now known as slow, and is listed
        wait_until("it is listed", lambda: rig.status()["store"][f"{store.name}_listed"] >= len(STORED))
        rig.scanned()
        hot = new()
        rig.ask(hot)
        at_once, _ = waited(rig, hot)
        before = rig.counts()
        assert waited(rig, new()) == (at_once, 1)
        assert waited(rig, new(2)) == (at_once, 2)
        after = rig.counts()
        unmoved = ("deferred_passes", "fetches", "timeouts")
        assert [after[name] - before[name] for name in unmoved] == [0, 0, 0]
        ticks, encodes = waited(rig, STORED[0])
        assert encodes == 0
        assert ticks > at_once + WAITS
        assert rig.left_over() == {}


@pytest.mark.fault(
    "answers too late",
    "Valkey, S3",
    "requests stop waiting at load_deadline_ms",
    recovery="the late answer was taken in",
    engine="alive",
)
def test_a_waiting_request_is_released_at_the_deadline(store: Store, tmp_path: Path, reference: Reference) -> None:
    """Both if the store's contents are not known yet (nothing listed) and if it does not deliver its image in time."""
    with replica(store, tmp_path, reference, load_deadline_ms=300) as rig:
        wait_until("it is listed", lambda: store.name == "redis" or rig.status()["scan_complete"])
        store.between.delay_s = 10.0
        ticks, encodes = waited(rig, STORED[0])
        assert encodes == 1
        assert ticks < CLOCK.max_tokens
        counts = rig.counts()
        assert counts["timeouts"] == 1
        store.between.delay_s = 0.0
        wait_until("the late answer was taken in", lambda: rig.settle() or rig.left_over() == {})


@pytest.mark.fault(
    "slow, and the replica is new",
    "Valkey, S3",
    "requests stop waiting at load_deadline_ms",
    recovery="the late answers were taken in",
    engine="alive",
)
def test_a_request_to_a_new_replica_of_a_slow_store_is_released_at_the_deadline(
    store: Store, tmp_path: Path, reference: Reference
) -> None:
    """From the first request on, whatever the store process knows by then."""
    store.between.delay_s = 2.0
    with replica(store, tmp_path, reference, load_deadline_ms=300) as rig:
        for number, prompt in enumerate((*STORED, new(), new())):
            ticks, encodes = waited(rig, prompt)
            assert encodes <= 1, number
            assert ticks < CLOCK.max_tokens
        store.between.delay_s = 0.0
        wait_until("the late answers were taken in", lambda: rig.settle() or rig.left_over() == {})
