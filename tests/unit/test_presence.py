# SPDX-License-Identifier: Apache-2.0
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_ec.presence import PresenceFilter


@pytest.fixture
def presence() -> Iterator[PresenceFilter]:
    presence = PresenceFilter.create(["disk", "redis"])
    yield presence
    presence.close()


def digests(prefix: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{prefix}{index}".encode()).digest() for index in range(count)]


@given(st.lists(st.binary(min_size=32, max_size=32)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_was_added_is_never_denied(presence: PresenceFilter, keys: list[bytes]) -> None:
    for key in keys:
        presence.add(key)
    assert all(map(presence.may_contain, keys))


def test_at_100_000_keys_fewer_than_one_in_a_thousand_others_is_mistaken(presence: PresenceFilter) -> None:
    for digest in digests("in", 100_000):
        presence.add(digest)
    assert all(map(presence.may_contain, digests("in", 100_000)))
    assert sum(map(presence.may_contain, digests("out", 100_000))) < 100


def test_another_process_writes_and_this_one_reads(presence: PresenceFilter) -> None:
    code = (
        "import sys; from lmcache_ec.presence import PresenceFilter;"
        "p = PresenceFilter.attach(int(sys.argv[1]), ['disk', 'redis']);"
        "p.add(bytes(range(32))); p.set_complete('redis'); p.close()"
    )
    assert not presence.may_contain(bytes(range(32)))
    subprocess.run([sys.executable, "-c", code, str(presence.fd)], pass_fds=[presence.fd], check=True)
    assert presence.may_contain(bytes(range(32)))
    assert not presence.may_contain(bytes(32))
    assert (presence.complete("disk"), presence.complete("redis"), presence.all_complete) == (False, True, False)
    presence.set_complete("disk")
    assert presence.all_complete


def test_flags_and_bits_do_not_touch_each_other(presence: PresenceFilter) -> None:
    presence.set_complete("disk")
    presence.set_complete("redis")
    assert not any(presence.may_contain(bit.to_bytes(4, "little") * 8) for bit in range(1 << 16))
    with pytest.raises(KeyError):
        presence.complete("s3")


def test_without_tiers_a_no_can_be_relied_on() -> None:
    presence = PresenceFilter.create([])
    assert presence.all_complete
    presence.close()


@pytest.mark.parametrize("tiers", [["disk"], ["redis", "disk"], []])
def test_a_filter_over_other_tiers_is_refused(presence: PresenceFilter, tiers: list[str]) -> None:
    with pytest.raises(ValueError, match="no presence filter"):
        PresenceFilter.attach(presence.fd, tiers)
    os.fstat(presence.fd)  # still ours


def test_a_descriptor_of_something_else_is_refused() -> None:
    fd = os.memfd_create("other")
    for size in (0, 4096 + (1 << 21)):
        os.ftruncate(fd, size)
        with pytest.raises(ValueError, match="no presence filter"):
            PresenceFilter.attach(fd, ["disk"])
    os.close(fd)


def test_nobody_can_shrink_the_filter_under_its_readers(presence: PresenceFilter) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(presence.fd, 0)


def test_close_gives_the_descriptor_back_and_may_be_repeated() -> None:
    presence = PresenceFilter.create(["disk"])
    presence.close()
    presence.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(presence.fd)
