# SPDX-License-Identifier: Apache-2.0
"""A tier that was away at first is, once it is there, all that the tier itself is."""

from pathlib import Path

import pytest

from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.tiers.awaited import AwaitedTier
from lmcache_ec.tiers.base import Tier
from lmcache_ec.tiers.disk import DiskTier
from tests.tiers.conformance import MIB, TierConformance, new_namespace, value


class TestAwaited(TierConformance):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return AwaitedTier("disk", lambda: DiskTier(tmp_path, 64 * MIB))


def test_its_folder_is_kept_to_its_limit(tmp_path: Path) -> None:
    """A neighbour with a higher limit has filled the folder; housekeeping is the awaited tier's, too."""
    namespace = new_namespace()
    neighbour = DiskTier(tmp_path, 64 * MIB)
    for number in range(8):
        neighbour.put(EncoderCacheKey(namespace, f"picture {number}"), value("a", MIB))
    tier = AwaitedTier("disk", lambda: DiskTier(tmp_path, 4 * MIB))
    assert len(list(tier.list(namespace))) == 8
    tier.maintain()
    assert len(list(tier.list(namespace))) == 4
    assert tier.stored_bytes == neighbour.stored_bytes == 4 * MIB, "it says how much it holds"


def test_what_a_user_has_to_know_of_it_follows_what_the_tier_says(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, MIB)
    tier = AwaitedTier("disk", lambda: disk)
    for notice in ("its clock is wrong", ""):
        disk.notice = notice
        tier.contains(EncoderCacheKey("ns", "picture"))
        assert tier.notice == notice
