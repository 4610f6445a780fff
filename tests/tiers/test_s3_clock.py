# SPDX-License-Identifier: Apache-2.0
"""A store with a different clock: a new entry counts as young, whichever clock dates it."""

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.testbed.core import Bench
from benchmarks.testbed.servers.s3_front import S3Front, s3_front
from benchmarks.testbed.servers.seaweed import Seaweed
from benchmarks.testbed.waiting import wait_until
from lmcache_ec.cli.doctor import examine
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.tiers.s3 import open_s3
from tests.tiers.conformance import fetch, value

KEY = EncoderCacheKey("ns", "picture")
TTL_S = 60.0


@pytest.fixture
def front(s3: Seaweed, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Front]:
    for name, text in s3.environment.items():
        monkeypatch.setenv(name, text)
    with s3_front(int(s3.endpoint.rpartition(":")[2])) as between:
        yield between


@pytest.fixture
def url(s3: Seaweed, front: S3Front) -> str:
    return f"s3://{s3.bucket}/{uuid.uuid4().hex}?endpoint=http://127.0.0.1:{front.port}"


@pytest.mark.parametrize("ahead_s", [-600.0, 600.0])
def test_new_entries_are_there_and_aged_ones_are_not_whatever_the_stores_clock_shows(
    front: S3Front, url: str, ahead_s: float
) -> None:
    front.ahead_s = ahead_s
    tier = open_s3(url, ttl_s=TTL_S, timeout_s=20.0)
    assert tier.put(KEY, value("new", 1000))
    assert fetch(tier, KEY) == value("new", 1000)
    assert tier.contains(KEY) == 1000
    assert [listed.digest for listed in tier.list("ns")] == [KEY.digest]
    assert tier.put(KEY, value("again", 1000)) is False, "it is not uploaded again"
    way = "ahead of" if ahead_s > 0 else "behind"
    assert f"its clock is 600 s {way} this machine's" in tier.notice

    front.ahead_s -= 2 * TTL_S  # entries are older by that, and its clock is not compared again yet
    assert tier.contains(KEY) is None


def test_a_clock_that_goes_wrong_later_is_seen_at_the_next_listing(
    front: S3Front, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_ec.tiers.s3_clock._PAUSE_S", 0.0)
    tier = open_s3(url, ttl_s=TTL_S, timeout_s=20.0)
    assert tier.notice == ""
    tier.put(KEY, value("new", 1000))
    front.ahead_s = -600.0
    assert [listed.digest for listed in tier.list("ns")] == [KEY.digest]
    assert "behind" in tier.notice
    front.ahead_s = 0.0
    assert [listed.digest for listed in tier.list("ns")] == [KEY.digest]
    assert tier.notice == ""


@pytest.mark.fault(
    "its clock is ten minutes behind, with a ttl_s of one minute",
    "S3",
    "hits; nothing is uploaded again; the clock is reported",
)
def test_an_engine_of_a_lagging_store_hits_and_log_status_and_doctor_report_the_lag(
    front: S3Front, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    front.ahead_s = -600.0
    keys: dict[str, Any] = {"remote_lookup": "probe", "load_deadline_ms": 5000, "ttl_s": TTL_S}
    notice = "its clock is 600 s behind this machine's"
    with Bench(None, remotes=[url], **keys) as bench:
        bench.encode(["a", "b"])
        bench.settle()
        bench.until("both are stored", lambda: bench.status()["store"].get("s3_writes") == 2)
    with Bench(None, remotes=[url], **keys) as other:
        assert other.serves("a")
        assert other.serves("b")
        other.encode(["a"])
        other.settle()
        assert other.status()["store"].get("s3_writes", 0) == 0, "nothing is uploaded again"
        assert notice in other.status()["tiers"][0]["notice"]
    assert any(notice in record.getMessage() for record in caplog.records)
    environment = {"LMCACHE_EC_REMOTE_URL": url, "LMCACHE_EC_TTL_S": str(TTL_S)}
    # It asks only once, and a store on a busy machine may not answer in time.
    wait_until("doctor reports it", lambda: [note for note in examine("{}", environment).notes if notice in note], 60.0)
