# SPDX-License-Identifier: Apache-2.0
"""Engines that share a bucket with a catalog: what one has encoded no other encodes, and none lists the bucket."""

from pathlib import Path

import pytest

from benchmarks.testbed.engine_env import Layout
from benchmarks.testbed.media import Prompt
from benchmarks.testbed.servers.s3_front import Request, s3_front
from benchmarks.testbed.servers.seaweed import seaweed
from lmcache_ec.tiers.s3 import open_s3
from lmcache_ec.tiers.s3_catalog import Pace
from tests.engine.rig import Reference, Rig, wait_until

pytestmark = pytest.mark.slow

MODEL = "qwen3vl"
PROMPTS = (Prompt(images=(1,)), Prompt(images=(2, 1), text="both"), Prompt(videos=(3,)))
ITEMS = 3
NEW = Prompt(images=(9,))


def lists_entries(request: Request) -> bool:
    return "list-type=2" in request.path and ".catalog" not in request.path


def test_replicas_with_a_catalog_share_entries_and_never_look_up_new_pictures(
    tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    with seaweed(tmp_path / "s3") as s3, s3_front(int(s3.endpoint.rpartition(":")[2])) as front:
        for name, text in s3.environment.items():
            monkeypatch.setenv(name, text)
        url = f"s3://{s3.bucket}/shared?catalog=true&endpoint=http://127.0.0.1:{front.port}"

        def replica(name: str) -> Rig:
            keys = {"remotes": [url], "catalog_refresh_s": 1.0}
            return Rig(MODEL, Layout.ONE_PROCESS, tmp_path / name, reference, keys=keys, environment=s3.environment)

        with replica("one") as one:
            assert one.ask(*PROMPTS) == ITEMS
            wait_until("all is written", lambda: one.status()["jobs"] == 0)
            make_catalog(url, str(one.status()["namespace"]))
            with replica("two") as two:
                assert two.ask(*PROMPTS) == 0  # whether or not the catalog has been read by then

                wait_until("two has read it", lambda: two.status()["scan_complete"])
                wait_until("one has read it", lambda: one.status()["store"]["s3_listed"] >= ITEMS)
                front.seen.clear()
                assert two.ask(NEW) == 1
                wait_until("two has announced it", lambda: any("/delta/" in one.path for one in front.seen))
                [name] = [each.path for each in front.seen if each.method == "PUT" and ".safetensors" in each.path]
                about_it = [each.method for each in front.seen if each.path == name]
                assert about_it == ["HEAD", "PUT"], "a write, and nothing before it"

                def one_knows() -> bool:
                    return any("/delta/" in each.path and each.method == "GET" for each in front.seen)

                wait_until("one has read the announcement", one_knows)
                wait_until("it is counted", lambda: one.status()["store"]["s3_listed"] > ITEMS)
                assert one.ask(NEW) == 0
                assert not any(map(lists_entries, front.seen))
                assert one.left_over() == two.left_over() == {}


def make_catalog(url: str, namespace: str) -> None:
    """Build a catalog, as the first replica of a large namespace does."""
    tier = open_s3(url)
    assert tier._cataloged is not None
    tier._cataloged.catalog.pace = Pace(large=0)
    try:
        while tier._cataloged.catalog.due or not tier._cataloged.catalog.look.shards:
            tier.catalog(namespace)
            tier.maintain()
            if compactor := tier._cataloged._compactor:
                wait_until("it has listed", lambda: not compactor.running)
            found = tier.catalog(namespace)
            for _ in (found and found.shards) or ():
                pass
    finally:
        tier.close()
