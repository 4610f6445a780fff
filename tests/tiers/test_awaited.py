# SPDX-License-Identifier: Apache-2.0
"""A tier that was unreachable at first behaves, once it is reachable, exactly like the tier itself."""

import socket
from pathlib import Path

import pytest

from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.tiers import opening
from lmcache_ec.tiers.awaited import AwaitedTier
from lmcache_ec.tiers.base import Tier
from lmcache_ec.tiers.disk import DiskTier
from lmcache_ec.tiers.opening import Opening, opened
from lmcache_ec.tiers.remote import Remote
from tests.tiers.conformance import MIB, TierConformance, new_namespace, value


class TestAwaited(TierConformance):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return AwaitedTier("disk", lambda: DiskTier(tmp_path, 64 * MIB))


def test_the_folder_of_an_awaited_tier_is_kept_to_its_limit(tmp_path: Path) -> None:
    """A neighbour with a higher limit has filled the folder; the awaited tier has to do housekeeping, too."""
    namespace = new_namespace()
    neighbour = DiskTier(tmp_path, 64 * MIB)
    for number in range(8):
        neighbour.put(EncoderCacheKey(namespace, f"picture {number}"), value("a", MIB))
    tier = AwaitedTier("disk", lambda: DiskTier(tmp_path, 4 * MIB))
    assert len(list(tier.list(namespace))) == 8
    tier.maintain()
    assert len(list(tier.list(namespace))) == 4
    assert tier.stored_bytes == neighbour.stored_bytes == 4 * MIB, "it reports how much it holds"


def test_its_notice_is_that_of_the_tier_inside(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, MIB)
    tier = AwaitedTier("disk", lambda: disk)
    for notice in ("its clock is wrong", ""):
        disk.notice = notice
        tier.contains(EncoderCacheKey("ns", "picture"))
        assert tier.notice == notice


def test_stores_that_do_not_answer_at_the_start_are_named_each_with_the_time_and_without_credentials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opening, "_TIMEOUT_S", 0.5)
    reasons: dict[str, str] = {}
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = [silent.getsockname()[1] for silent in (one, two)]
        remotes = [Remote(f"redis://user:hunter2@127.0.0.1:{port}/0?db=0", timeout_s=600.0) for port in ports]
        tiers = opened([Opening.of_remote(remote) for remote in remotes], reasons.__setitem__, pytest.fail)
    assert [type(tier) for tier, _ in tiers] == [AwaitedTier, AwaitedTier]
    assert reasons == {
        f"{name}-open": f"redis://127.0.0.1:{port}/0 did not answer within 0.5 s; retried in the background"
        for name, port in zip(("redis", "redis_1"), ports, strict=True)
    }
