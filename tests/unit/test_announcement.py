# SPDX-License-Identifier: Apache-2.0
"""What a producer's answer announces about its items, and how a proxy uses that."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from lmcache_ec.adapters.vllm.announcement import NAMESPACE, Announcer, announced
from lmcache_ec.adapters.vllm.identifiers import client_name, hashed_name

UUID = "1" * 64
OURS = "model-0123456789abcdef"


def announcement(*items: tuple[str, str], stored: bool = True) -> dict[str, Any]:
    """The announcement for these items, each a modality and an identifier. The model sizes sounds by their tokens."""
    features = [
        MultiModalFeatureSpec(None, kind, identifier, PlaceholderRange(index, 1), mm_hash=identifier)
        for index, (kind, identifier) in enumerate(items)
    ]
    wanted = {"audio": {"audio_num_tokens"}}
    with patch.object(PlaceholderMetadataResolver, "fields_for", lambda self, kind: wanted.get(kind, set())):
        announcer = Announcer(SimpleNamespace())
        params: dict[str, Any] | None = announcer.announce(
            SimpleNamespace(mm_features=features), lambda _: stored, OURS
        )
    assert params is not None
    return params


def test_an_item_is_announced_under_the_name_that_the_proxy_gave_it() -> None:
    one, salted, hashed = client_name(UUID), client_name("cat", "tenant"), hashed_name("lmcache-ec/client", "2" * 64)
    params = announcement(("image", one), ("image", salted), ("image", hashed))
    assert list(params) == [UUID, "cat", hashed]
    assert announced(SimpleNamespace(ec_transfer_params=params)) == dict.fromkeys(params, OURS)


def test_a_video_with_its_sound_is_announced_in_a_form_that_vllms_proxy_accepts() -> None:
    """The proxy finds neither under the name that it gave the video, since processor arguments are hashed in with the
    name. It then takes two items as a video and its sound if they hold only what vLLM announces."""
    for stored in (True, False):
        params = announcement(("video", "3" * 64), ("audio", "4" * 64), stored=stored)
        assert len(params) == 2
        assert all(item.keys() <= {"metadata", "item_indices"} for item in params.values())


def test_other_requests_are_announced_with_the_namespace() -> None:
    for kinds in (["image"], ["audio"], ["video"], ["image", "audio"], ["video", "video"]):
        items = [(kind, f"{index}" * 64) for index, kind in enumerate(kinds)]
        assert all(item[NAMESPACE] == OURS for item in announcement(*items).values())


def test_an_item_that_no_tier_has_is_announced_without_a_stand_in_for_its_media() -> None:
    [item] = announcement(("audio", UUID), stored=False).values()
    assert (item["metadata"], NAMESPACE in item) == ({}, False)
