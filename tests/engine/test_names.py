# SPDX-License-Identifier: Apache-2.0
"""False names: whatever a client names its picture, no other request gets it, and no restart brings it back."""

import hashlib
import shutil
from pathlib import Path

import pytest

from benchmarks.testbed.engine_env import Layout
from benchmarks.testbed.media import Prompt
from tests.engine.drive import Request
from tests.engine.rig import Reference, Rig

MODEL = "gemma3"
PICTURE = Prompt(images=(1,))
OTHERS = [Prompt(images=(seed,)) for seed in (2, 3, 4)]
SAME_PIXELS = {"do_convert_rgb": True}
"""Processor arguments without an effect: vLLM hashes them together with the name."""


def test_a_name_given_by_a_client_affects_no_other_request_and_no_other_engine(
    tmp_path: Path, reference: Reference
) -> None:
    url = hashlib.sha256(b"https://host/today.png").hexdigest()
    with Rig(MODEL, Layout.ONE_PROCESS, tmp_path, reference) as rig:
        [identifier] = rig.play(Request(PICTURE)).encodes
        assert len(bytes.fromhex(identifier)) == 32  # content keeps vLLM's identifier
        rig.engine.kill()
        shutil.rmtree(rig.disk)
        rig.start()

        lies = [
            Request(OTHERS[0], uuids=(identifier,)),
            Request(OTHERS[1], uuids=(url,)),
            Request(OTHERS[2], uuids=("cat",), processor=SAME_PIXELS),
            Request(OTHERS[1], foreign=True),
        ]
        for lie in lies:
            assert rig.encodes(rig.play(lie).encodes) == 1
        rig.settle()
        assert rig.files() == []
        assert rig.counts()["unsigned_items"] == 1
        assert rig.ask(PICTURE) == 1
        rig.settle()
        assert len(rig.files()) == 1

        rig.restart()
        rig.scanned()
        assert rig.ask(PICTURE) == 0
        replaced = [
            Request(OTHERS[2], uuids=(url,)),
            Request(OTHERS[0], uuids=("cat",), processor=SAME_PIXELS),
            Request(OTHERS[1]),
        ]
        for request in replaced:
            assert rig.encodes(rig.play(request).encodes) == 1
        assert rig.left_over() == {}


def test_without_digests_pictures_named_by_clients_are_kept_and_those_numbered_by_vllm_are_not(
    tmp_path: Path, reference: Reference
) -> None:
    """With prefix caching and processor cache both off."""
    sku = Request(PICTURE, uuids=("sku-77-image-2",))
    tenants = [
        Request(OTHERS[0], uuids=("holiday",), cache_salt="one"),
        Request(OTHERS[1], uuids=("holiday",), cache_salt="another"),
        Request(OTHERS[2], uuids=("holiday",)),
    ]
    with Rig(MODEL, Layout.MULTI_PROCESS, tmp_path, reference, mm_processor_cache_gb=0) as rig:
        for request in (sku, *tenants):
            assert rig.encodes(rig.play(request).encodes) == 1
        rig.settle()
        rig.forget()
        for request in (*tenants, sku):
            assert rig.encodes(rig.play(request).encodes) == 0
        for _ in range(2):
            assert rig.ask(PICTURE) == 1
            counted = rig.play(Request(OTHERS[0], processor=SAME_PIXELS))
            assert rig.encodes(counted.encodes) == 1
        rig.settle()
        assert rig.files() == []
        assert rig.left_over() == {}


@pytest.mark.slow
@pytest.mark.parametrize("persist", [False, True], ids=["in memory", "persisted"])
def test_entries_under_a_clients_own_names_leave_memory_only_if_the_operator_vouches_for_them(
    persist: bool, tmp_path: Path, reference: Reference
) -> None:
    """Tenants' names stay separate either way."""
    named = Request(PICTURE, uuids=("../../the client's own name",))
    salted = Request(OTHERS[0], uuids=("../../the client's own name",), cache_salt="tenant")
    keys = {"persist_client_ids": persist}
    with Rig(MODEL, Layout.ONE_PROCESS, tmp_path, reference, keys=keys) as rig:
        for request in (named, salted):
            assert rig.encodes(rig.play(request).encodes) == 1
        rig.settle()
        rig.forget()
        for request in (named, salted):
            assert rig.encodes(rig.play(request).encodes) == 0
        assert rig.left_over() == {}
        assert len(rig.files()) == 2 * persist
        assert all(file.is_relative_to(rig.disk) for file in tmp_path.rglob("*.safetensors"))
        rig.restart()
        rig.scanned()
        for request in (named, salted):
            assert rig.encodes(rig.play(request).encodes) == (not persist)


@pytest.mark.slow
def test_a_name_used_for_pictures_of_two_sizes_keeps_the_entry_that_was_stored_first(
    tmp_path: Path, reference: Reference
) -> None:
    """The first entry keeps the name: the other picture is encoded each time, and nothing is deleted or written for it.

    Without vLLM's processor cache, which would confuse the two because of their name.
    """
    small = Request(Prompt(images=(1,), size=(112, 112)), uuids=("one name",))
    large = Request(Prompt(images=(2,), size=(224, 112)), uuids=("one name",))
    keys = {"persist_client_ids": True}
    with Rig("qwen2vl", Layout.ONE_PROCESS, tmp_path, reference, keys=keys, mm_processor_cache_gb=0) as rig:
        encodes = []
        for _ in range(3):
            for request in (small, large):
                encodes.append(rig.encodes(rig.play(request).encodes))
                rig.settle()
                rig.forget()
        assert encodes == [1, 1, 0, 1, 0, 1]
        assert rig.counts()["writes"] == 1
        [file] = rig.files()
        before = file.stat()
        rig.restart()
        assert rig.encodes(rig.play(large).encodes) == 1
        rig.forget()
        assert rig.encodes(rig.play(small).encodes) == 0
        assert (file.stat().st_ino, file.stat().st_size) == (before.st_ino, before.st_size)
        assert rig.left_over() == {}
