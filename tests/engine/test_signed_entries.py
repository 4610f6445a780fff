# SPDX-License-Identifier: Apache-2.0
"""An engine that signs its entries, over a folder in which an attacker replaces them."""

from pathlib import Path

import pytest

from benchmarks.testbed.engine_env import Layout
from benchmarks.testbed.media import Prompt
from lmcache_ec import entry
from lmcache_ec.signing import read_key
from tests.engine.rig import Reference, Rig

pytestmark = pytest.mark.slow

PROMPTS = (Prompt(images=(1,)), Prompt(images=(2, 3)))
ITEMS = 3


def test_no_forged_output_reaches_an_answer_and_the_next_engine_is_warm_again(
    tmp_path: Path, reference: Reference
) -> None:
    key_file = tmp_path / "signing.key"
    key_file.write_bytes(bytes(range(32)))
    key_file.chmod(0o600)
    signing = read_key(key_file)
    keys = {"signing_key_file": str(key_file)}
    with Rig("gemma3", Layout.ONE_PROCESS, tmp_path / "engine", reference, keys=keys) as rig:
        assert rig.ask(*PROMPTS) == ITEMS
        rig.settle()
        assert rig.status()["namespace"].endswith(f"-{signing.id}")
        for file in rig.files():
            file.write_bytes(_forged(file.read_bytes()))
        rig.restart()
        assert rig.ask(*PROMPTS) == ITEMS, "outputs are right, or this raises"
        rig.settle()
        [tier] = rig.status()["tiers"]
        assert (tier["forged"], tier["hits"], rig.status()["store"]["disk_replaced"]) == (ITEMS, 0, ITEMS)
        rig.restart()
        assert rig.ask(*PROMPTS) == 0
        assert rig.counts()["loads_disk"] == ITEMS


def _forged(data: bytes) -> bytes:
    """The same header, including its signature, with another payload and the right digest for it."""
    blob = bytearray(data)
    start = 8 + int.from_bytes(data[:8], "little")
    blob[start:] = bytes(len(blob) - start)
    blob[entry._DIGEST_AT : entry._DIGEST_END] = entry._digest(memoryview(blob))
    return bytes(blob)
