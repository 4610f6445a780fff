# SPDX-License-Identifier: Apache-2.0
"""One engine per process layout, with little of everything: prefill chunks of 16 tokens, KV blocks for 352, an arena of
2 MB and priorities. Whatever happens to requests, outputs equal those of an engine without a cache, nothing is encoded
unnecessarily, and after one more text-only request nothing is left over.

Media are numbered by test, so that each test has new ones.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.testbed.core import stopped
from benchmarks.testbed.engine_env import Layout
from benchmarks.testbed.engine_runner import Generate
from benchmarks.testbed.media import Prompt
from tests.engine.drive import Request
from tests.engine.rig import Reference, Rig, wait_until

MODEL = "qwen3vl"
TIGHT: dict[str, Any] = {
    "max_num_batched_tokens": 48,
    "long_prefill_token_threshold": 16,
    "block_size": 32,
    "num_gpu_blocks_override": 12,
    "max_model_len": 320,
    "scheduling_policy": "priority",
}
KEYS = {"max_local_cpu_size": 0.002, "load_deadline_ms": 30_000, "start_timeout_s": 60.0, "store_timeout_s": 60.0}
LARGE = (256, 256)
"""64 tokens, more than a chunk."""

CLOCK = Request(Prompt(text="tick"), max_tokens=60, priority=-1)
"""Decodes next to the others with the highest priority: while it does, each step is a tick."""


@pytest.fixture(scope="module", params=list(Layout), ids=lambda layout: layout.name.lower())
def rig(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, reference: Reference
) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("engine")
    with Rig(MODEL, request.param, folder, reference, keys=KEYS, **TIGHT) as rig:
        rig.scanned()
        yield rig


@pytest.fixture(autouse=True)
def nothing_is_left_over(rig: Rig) -> Iterator[None]:
    yield
    assert rig.left_over() == {}
    assert rig.engine.refused == []


def images(*seeds: int, size: tuple[int, int] = (112, 112), text: str = "hello") -> Prompt:
    return Prompt(images=seeds, size=size, text=text)


def test_memory_follows_what_is_stored(rig: Rig) -> None:
    """One arena per engine, however many processes it has; its pages are allocated as entries are stored."""
    [(arena, before)] = rig.arenas().items()
    assert before == 0
    rig.ask(*(images(100 + number) for number in range(8)))
    counts = rig.counts()
    assert counts["places_live"] == 8
    assert rig.arenas().keys() == {arena}
    assert counts["live_bytes"] <= rig.arenas()[arena] <= counts["live_bytes"] + 8 * 8192


def test_an_item_is_encoded_once_and_then_loaded_from_memory(rig: Rig) -> None:
    prompts = (images(200), Prompt(videos=(201,)), Prompt(images=(202,), videos=(203,)))
    assert rig.ask(*prompts) == 4
    before = rig.counts()
    rig.forget()
    assert rig.ask(*prompts) == 0
    assert rig.counts()["loads_cpu"] == before.get("loads_cpu", 0) + 4


def test_one_new_image_in_two_concurrent_requests_is_encoded_once(rig: Rig) -> None:
    assert rig.ask(images(300), images(300, text="another question")) == 1
    rig.forget()
    before = rig.counts()
    assert rig.ask(images(300), images(300, text="another question")) == 0
    assert rig.counts()["loads_cpu"] == before["loads_cpu"] + 1


def test_two_images_in_one_prompt(rig: Rig) -> None:
    assert rig.ask(images(400, 401)) == 2
    rig.forget()
    assert rig.ask(images(401, 400)) == 0


def test_beside_a_stored_image_only_the_new_one_is_encoded(rig: Rig) -> None:
    assert rig.ask(images(500)) == 1
    rig.settle()
    rig.forget()
    assert rig.ask(images(500, 501)) == 1
    rig.settle()
    rig.forget()
    assert rig.ask(images(502, 501), images(500)) == 1


def test_an_image_longer_than_a_prefill_chunk(rig: Rig) -> None:
    prompt = images(600, size=(384, 384))  # 144 tokens, 48 per step
    assert rig.ask(prompt) == 1
    rig.settle()
    rig.forget()
    assert rig.ask(prompt) == 0


def test_preemption(rig: Rig) -> None:
    """There are KV blocks for one and a half of the two requests: one is preempted and resumed."""
    pair = [Request(images(700 + number, text="x" * 130), max_tokens=60) for number in range(2)]
    new = rig.play(*pair)
    assert new.preemptions > 0
    assert rig.encodes(new.encodes) == 2
    rig.settle()
    rig.forget()
    stored = rig.play(*pair)
    assert stored.preemptions > 0
    assert not stored.encodes


def test_waiting_for_blocks(rig: Rig) -> None:
    """vLLM asks about the image in every pass while its request waits, and allocates it once."""
    first = Request(Prompt(text="y" * 200), max_tokens=40)
    second = Request(images(800, text="z" * 130), arrives=1)
    for encodes in (1, 0):
        played = rig.play(first, second)
        assert played.endings[1].first > played.endings[0].last
        assert rig.encodes(played.encodes) == encodes
        rig.settle()
        rig.forget()


def test_abort_before_prefill(rig: Rig) -> None:
    doomed = Request(images(900), arrives=3, aborted=3)
    assert rig.play(CLOCK, doomed).endings[1].reason == "abort"
    assert rig.ask(images(900)) <= 1
    rig.settle()
    rig.forget()
    assert rig.play(CLOCK, doomed).endings[1].reason == "abort"
    assert rig.ask(images(900)) == 0


def test_abort_in_mid_prefill(rig: Rig) -> None:
    """The first of two large images is in vLLM's cache, or on its way there; the second is not scheduled yet."""
    doomed = Request(images(1000, 1001, size=LARGE), arrives=1, aborted=5)
    played = rig.play(CLOCK, doomed)
    assert played.endings[1].reason == "abort"
    assert played.endings[1].first == -1
    assert rig.encodes(played.encodes) == 1
    assert rig.ask(images(1000, 1001, size=LARGE)) == 1
    rig.settle()
    rig.forget()
    again = rig.play(CLOCK, doomed)
    assert again.endings[1].reason == "abort"
    assert not again.encodes
    rig.forget()
    assert rig.ask(images(1000, 1001, size=LARGE)) == 0


def test_a_first_seen_image_waits_for_nothing(rig: Rig) -> None:
    """The folder has been scanned, so no tier can have the image: no look-up and no deferred pass."""
    before = rig.counts()
    assert rig.ask(images(1100), images(1101, 1102), Prompt(videos=(1103,))) == 4
    after = rig.counts()
    unmoved = ("deferred_passes", "fetches", "fetch_misses", "timeouts")
    assert {name: after[name] - before[name] for name in unmoved} == dict.fromkeys(unmoved, 0)
    assert after["filtered"] >= before["filtered"] + 4


def test_the_last_step_before_idle(rig: Rig) -> None:
    """The output of the very last step reaches the disk although no step follows."""
    before = len(rig.files())
    assert rig.ask(images(1200), max_tokens=1) == 1
    wait_until("the entry is on disk", lambda: len(rig.files()) == before + 1)


def test_fifty_images_exceed_the_arena_and_a_hot_one_stays(rig: Rig) -> None:
    """The hot image stays in vLLM's own cache and leaves the arena: it is neither deferred nor fetched."""
    hot, many = images(1300), [images(1301 + number) for number in range(50)]
    assert rig.ask(hot) == 1
    for prompt in many:
        assert rig.ask(prompt, hot, max_tokens=1, one_by_one=True) == 1
    before = rig.counts()
    assert before["evictions"] > 0
    assert rig.ask(hot) == 0
    after = rig.counts()
    assert [after[name] for name in ("deferred_passes", "fetches")] == [
        before[name] for name in ("deferred_passes", "fetches")
    ]
    rig.forget(noticed=True)
    before = rig.counts()
    rig.rest()
    assert rig.ask(hot) == 0
    assert rig.counts()["loads_disk"] == before.get("loads_disk", 0) + 1  # it had indeed left the arena
    rig.forget(noticed=True)
    rig.ask(*many)
    assert rig.counts()["evictions"] > before["evictions"]


def test_zero_token_steps_amid_a_save(rig: Rig) -> None:
    """One request waits for the disk; the other's only step is scheduled, and passes without tokens follow. The store
    process is stopped until that step has encoded, and the stored image is asked for first: otherwise it may arrive
    before any pass looks for it."""
    stored, new = images(1400), images(1450)
    assert rig.ask(stored) == 1
    rig.ask(*(images(1401 + number) for number in range(45)), max_tokens=1)
    rig.forget(noticed=True)
    before = rig.counts()
    rig.rest()
    encoded = rig.engine.encode_log.stat().st_size
    with stopped(rig.status()["pid"]):
        rig.engine.send(Generate((stored, new), max_tokens=1))
        wait_until("the other one is encoded", lambda: rig.engine.encode_log.stat().st_size > encoded)
    report = rig.engine.receive()
    rig.compare(report.outputs, (stored, new), 1)
    assert rig.encodes(report.encodes) == 1
    after = rig.counts()
    assert after["loads_disk"] == before.get("loads_disk", 0) + 1
    assert after["deferred_passes"] > before["deferred_passes"]
    rig.forget()
    assert rig.ask(new, stored) == 0


def test_media_by_identifier_alone(rig: Rig) -> None:
    """A request without pixels fails alone if its identifier is unknown, and is served if it is known."""
    prompt, grid = images(1500), (1, 8, 8)
    sent = Request(prompt, uuids=("holiday",))
    known = Request(prompt, uuids=("holiday",), grid=grid)
    unknown = Request(prompt, uuids=("never seen",), grid=grid)
    beside = Request(images(1501))
    assert rig.encodes(rig.play(sent).encodes) == 1
    rig.settle()
    rig.forget()
    played = rig.play(unknown, known, beside)
    assert [ending.reason for ending in played.endings] == ["error", "length", "length"]
    assert rig.encodes(played.encodes) == 1
    assert [ending.reason for ending in rig.play(unknown).endings] == ["error"]
    assert rig.ask(images(1501)) == 0


def test_engine_processes_touch_no_tier(rig: Rig) -> None:
    """While items are encoded, saved, fetched and loaded, only the store process has the folder open. The scheduler
    side has a link to each rank and one to the store process; a rank has its own link, the first rank also one to the
    store process, and none listens at its address any more."""
    ranks = rig.layout.ranks
    prompts = [images(1600 + number) for number in range(30)]
    seen: set[str] = set()
    for _ in range(2):
        rig.engine.send(Generate(tuple(prompts), 4, one_by_one=True))
        for _ in range(5):
            opened = rig.descriptors()
            del opened["store"]
            seen.update(*opened.values())
        rig.compare(rig.engine.receive().outputs, prompts, 4)
        rig.forget(noticed=True)
    assert not [target for target in seen if str(rig.disk) in target]
    links = {name: targets.count("unix seqpacket") for name, targets in opened.items()}
    assert sum(links.values()) == (1 + ranks) + ranks + 1
    engine_core = [number for name, number in links.items() if "EngineCore" in name]
    assert rig.layout is Layout.ONE_PROCESS or engine_core == [1 + ranks]


def test_nothing_accumulates(rig: Rig) -> None:
    """Descriptors and threads of every process are the same after another hundred requests."""

    def round(first: int) -> None:
        rig.ask(*(images(first + number) for number in range(45)), max_tokens=2)
        rig.forget()
        rig.play(CLOCK, *(Request(images(first + n), arrives=n, aborted=n + 2) for n in range(6)))
        rig.settle()

    round(1700)
    before, threads = rig.descriptors(), rig.threads()
    round(1700)
    round(1750)
    assert rig.descriptors() == before
    after = rig.threads()
    # Main thread, sealer, a tier's four readers, its writer, scanner and news follower (on demand), the epoch's thread.
    assert after.pop("store") <= 10
    del threads["store"]
    assert after == threads


def test_a_new_process_encodes_nothing(rig: Rig) -> None:
    """Killed and restarted, the engine loads everything from disk, first for the same prompts, then in other ones."""
    prompts = (images(1800), Prompt(videos=(1801,)), images(1802, 1803), images(1804, size=LARGE))
    files = len(rig.files())
    assert rig.ask(*prompts) == 5
    wait_until("all is on disk", lambda: rig.settle() or len(rig.files()) == files + 5)  # a write may be a pass late
    rig.restart()
    deferred = [rig.counts()["deferred_passes"]]
    for prompt in prompts:
        rig.rest()
        assert rig.ask(prompt) == 0, rig.counts()
        deferred.append(rig.counts()["deferred_passes"])
    counts = rig.counts()
    assert counts["loads_disk"] == 5
    if rig.layout is not Layout.ONE_PROCESS:  # there vLLM does not sleep, and an empty pass takes 60 us
        assert counts["early_look_ups"] == 5
        assert min(after - before for before, after in pairwise(deferred)) <= 2  # more at times on a busy machine
    rig.forget()
    assert rig.ask(images(1803, 1800), Prompt(images=(1802,), videos=(1801,))) == 0
