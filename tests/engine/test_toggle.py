# SPDX-License-Identifier: Apache-2.0
"""One LMCache file for KV and encoder outputs: switching the cache on and off, and using it with a KV connector."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed.engine_env import Layout
from benchmarks.testbed.media import Prompt
from tests.engine.rig import Reference, Rig

MODEL = "gemma3"
PROMPTS = (Prompt(images=(1,)), Prompt(images=(2, 1), text="both"))
ITEMS = 2
GIB = 1 << 30

KV_ONLY = """
chunk_size: 256
local_cpu: true
max_local_cpu_size: 20
local_disk: file://{disk}/kv/
max_local_disk_size: 100
"""

EXAMPLE_KV = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
LMCACHE_KV = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}


def lmcache_file(folder: Path, text: str) -> dict[str, str]:
    """Write a file with this text. Returns the environment that names it."""
    file = folder / "lmcache.yaml"
    file.write_text(text.format(disk=folder))
    return {"LMCACHE_CONFIG_FILE": str(file)}


def test_a_file_for_kv_alone_gives_safe_defaults_and_no_second_pool(tmp_path: Path, reference: Reference) -> None:
    """Locations are inherited, budgets are not: LMCache's 20 GiB for KV are not allocated a second time."""
    environment = lmcache_file(tmp_path, KV_ONLY)
    no_keys: dict[str, Any] = {"ec_connector_extra_config": {}}
    disk = tmp_path / "kv" / "encoder-cache"
    with Rig(
        MODEL, Layout.ONE_PROCESS, tmp_path, reference, disk=disk, environment=environment, connector=no_keys
    ) as rig:
        assert rig.ask(*PROMPTS) == ITEMS
        assert rig.counts()["capacity_bytes"] == 2 * GIB
        assert len(rig.files()) == ITEMS
        assert sum(rig.arenas().values()) < GIB // 4
        rig.restart()
        assert rig.ask(*PROMPTS) == 0


@pytest.mark.slow
@pytest.mark.parametrize("where", ["file", "environment", "extra"])
def test_every_source_of_the_configuration_can_switch_it_off(where: str, tmp_path: Path, reference: Reference) -> None:
    text = "ec:\n  enabled: false\n" if where == "file" else "ec: {{}}\n"
    environment = lmcache_file(tmp_path, text)
    if where == "environment":
        environment["LMCACHE_EC_ENABLED"] = "false"
    keys = {"enabled": False} if where == "extra" else {}
    with Rig(MODEL, Layout.ONE_PROCESS, tmp_path, reference, keys=keys, environment=environment) as rig:
        for _ in range(2):
            assert rig.ask(PROMPTS[0]) == 1
            rig.forget()
        assert rig.statuses() == []
        assert not rig.disk.exists()


@pytest.mark.slow
@pytest.mark.parametrize("kv", [EXAMPLE_KV, LMCACHE_KV], ids=lambda kv: kv["kv_connector"])
def test_the_cache_works_beside_a_kv_connector(kv: dict[str, Any], tmp_path: Path, reference: Reference) -> None:
    """Both read the same file and serve one engine; neither prevents a warm restart of the other."""
    stored = {"shared_storage_path": str(tmp_path / "kv")} if kv is EXAMPLE_KV else {}
    environment = lmcache_file(tmp_path, "chunk_size: 16\nlocal_cpu: true\nmax_local_cpu_size: 0.1\nec: {{}}\n")
    transfer = {**kv, "kv_connector_extra_config": stored}
    with Rig(
        MODEL, Layout.MULTI_PROCESS, tmp_path, reference, environment=environment, kv_transfer_config=transfer
    ) as rig:
        assert rig.ask(*PROMPTS) == ITEMS
        assert rig.left_over() == {}
        rig.restart()
        assert rig.ask(*PROMPTS) == 0
        assert rig.left_over() == {}
        assert len(rig.files()) == ITEMS


@pytest.mark.slow
def test_an_image_whose_kv_is_cached_is_not_loaded(tmp_path: Path, reference: Reference) -> None:
    """A restarted engine finds the KV of the prompt except its last tokens: no request needs the image. With another
    text before it the KV is useless, and the image is loaded."""
    covered = Prompt(images=(3,), text="and a text that is longer than a block " * 2)
    uncovered = Prompt(images=(3,), text="another text, to the same image")
    stored = {"shared_storage_path": str(tmp_path / "kv")}
    transfer = {**EXAMPLE_KV, "kv_connector_extra_config": stored}
    with Rig(MODEL, Layout.MULTI_PROCESS, tmp_path, reference, kv_transfer_config=transfer, block_size=32) as rig:
        assert rig.ask(covered) == 1
        rig.settle()
        rig.restart()
        assert rig.ask(covered) == 0
        counts = rig.counts()
        asked = ("promises", "fetches", "deferred_passes")
        assert [counts[name] for name in asked] == [0, 0, 0]
        assert rig.ask(uncovered) == 0
        assert rig.counts()["loads_disk"] == 1
        assert rig.left_over() == {}
