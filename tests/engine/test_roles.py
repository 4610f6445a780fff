# SPDX-License-Identifier: Apache-2.0
"""An engine that only encodes and one that only loads, connected only by a disk folder."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed.engine_env import Layout
from benchmarks.testbed.engine_runner import Generate
from benchmarks.testbed.media import Prompt
from tests.engine.drive import Request
from tests.engine.rig import NOTHING, Reference, Rig

pytestmark = pytest.mark.slow

MODEL = "qwen3vl"
PROMPTS = (Prompt(images=(1,)), Prompt(images=(2, 3)), Prompt(videos=(4,)))
ITEMS = 4
NEW = Prompt(images=(5,))


def an_engine(role: str, tmp_path: Path, reference: Reference, disk: Path, **changes: Any) -> Rig:
    connector = {"ec_role": f"ec_{role}"}
    return Rig(MODEL, Layout.MULTI_PROCESS, tmp_path / role, reference, disk=disk, connector=connector, **changes)


def test_a_consumer_loads_what_a_producer_encodes(tmp_path: Path, reference: Reference) -> None:
    """The consumer is given no widths, encodes itself what no engine has stored, and never writes."""
    disk = tmp_path / "disk"
    with an_engine("producer", tmp_path, reference, disk, mm_encoder_only=True) as producer:
        report = producer.engine.do(Generate(PROMPTS, 1))
        assert producer.encodes(report.encodes) == ITEMS
        assert len(producer.files()) == ITEMS, "once a producer has answered, its entries can be fetched"
        namespace = producer.status()["namespace"]
        assert producer.engine.do(Generate(PROMPTS, 1)).encodes == []
        assert len(producer.files()) == ITEMS
    with an_engine("consumer", tmp_path, reference, disk) as consumer:
        assert consumer.status()["namespace"] == namespace
        assert consumer.ask(*PROMPTS) == 0
        assert consumer.ask(NEW) == 1
        assert consumer.left_over() == {}
        counts = consumer.counts()
        assert (counts["saves"], counts["loads_disk"]) == (0, ITEMS)
        assert len(consumer.files()) == ITEMS


def test_a_producer_encodes_all_that_is_not_stored_and_nothing_else(tmp_path: Path, reference: Reference) -> None:
    """Restarted with the same pictures it encodes nothing. vLLM counts skipped items as cached; if they are then lost
    from the folder, they are encoded nevertheless, and no answer promises an item that is not stored."""
    disk, requests = tmp_path / "disk", [Request(prompt, max_tokens=1) for prompt in PROMPTS]

    def asked(producer: Rig) -> int:
        """How many items were encoded. Every answer promises all its items, and each can be fetched."""
        played = producer.play(*requests, compare=False)
        items = [item for ending in played.endings for item in (ending.ec_transfer_params or {}).values()]
        assert (len(items), all(item["metadata"] for item in items)) == (ITEMS, True)
        assert len(producer.files()) == ITEMS
        return producer.encodes(played.encodes)

    def counted(producer: Rig) -> dict[str, int]:
        producer.engine.do(Generate((NOTHING,), 1))
        return dict(producer.status()["book"])

    with an_engine("producer", tmp_path, reference, disk, mm_encoder_only=True) as producer:
        assert asked(producer) == ITEMS
        producer.restart()
        assert asked(producer) == 0
        counts = counted(producer)
        assert (counts["encodes_skipped"], counts["fills"], counts["saves"]) == (ITEMS, 0, 0)
        shutil.rmtree(disk)
        assert asked(producer) == ITEMS
        assert counted(producer)["encodes_again"] == ITEMS
        assert asked(producer) == 0
        shutil.rmtree(disk)
        assert asked(producer) == 0, "what was lost is still in memory, and is stored again from there"
        assert (counted(producer)["pins"], counted(producer)["dirty_bytes"]) == (0, 0)
    with an_engine("consumer", tmp_path, reference, disk) as consumer:
        assert consumer.ask(*PROMPTS) == 0


def test_a_consumer_needs_no_media_for_what_a_producer_announces(tmp_path: Path, reference: Reference) -> None:
    """An encode-prefill-decode proxy forwards what the producer's answer announces, without the picture."""
    disk, picture = tmp_path / "disk", Prompt(images=(1,))
    with an_engine("producer", tmp_path, reference, disk, mm_encoder_only=True) as producer:
        [ending] = producer.play(Request(picture, max_tokens=1), compare=False).endings
    announced = ending.ec_transfer_params
    assert announced is not None
    [(identifier, item)] = announced.items()
    grid = item["metadata"]["image_grid_thw"]
    waits = {"load_deadline_ms": 4000}  # how long the consumer waits for an item that is not stored
    with an_engine("consumer", tmp_path, reference, disk, keys=waits) as consumer:
        bare = Request(picture, uuids=(identifier,), grid=tuple(grid), ec_transfer_params=announced)
        played = consumer.play(bare)
        assert ([ending.reason for ending in played.endings], played.encodes) == (["length"], [])
        unheard = {"f" * 64: item}
        other = Request(picture, uuids=("f" * 64,), grid=tuple(grid), ec_transfer_params=unheard)
        assert [ending.reason for ending in consumer.play(other, bare).endings] == ["error", "length"]
        [file] = consumer.files()
        wrong = Request(picture, uuids=(identifier,), grid=(1, 4, 8))  # not the size of the item with this name
        assert [ending.reason for ending in consumer.play(wrong).endings] == ["error"]
        consumer.forget()
        assert [ending.reason for ending in consumer.play(wrong, bare).endings] == ["error", "length"]
        assert consumer.files() == [file], "a request deletes nothing"
        foreign = {identifier: {**item, "namespace": "another-0123456789abcdef"}}
        consumer.play(Request(picture, ec_transfer_params=foreign))
        assert consumer.counts()["foreign_announcements"] == 1
        assert consumer.left_over() == {}
