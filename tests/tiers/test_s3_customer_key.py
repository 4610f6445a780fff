# SPDX-License-Identifier: Apache-2.0
"""Objects that S3 encrypts with the user's own key (SSE-C), from a file or the environment, which is shown nowhere."""

import base64
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.testbed.servers.s3_front import S3Front, s3_front
from benchmarks.testbed.servers.seaweed import Seaweed
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.tiers.base import TierError, TierUnreachable, WritesRefused
from lmcache_ec.tiers.kinds import check_remote
from lmcache_ec.tiers.remote import Remote
from lmcache_ec.tiers.s3 import S3Tier, open_s3
from tests.tiers.conformance import fetch, value

KEY = EncoderCacheKey("ns", "picture")
HEADER = "x-amz-server-side-encryption-customer-key"
VARIABLE = "AWS_SSE_CUSTOMER_KEY_BASE64"


@pytest.fixture
def front(s3: Seaweed, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Front]:
    monkeypatch.delenv(VARIABLE, raising=False)
    for name, text in s3.environment.items():
        monkeypatch.setenv(name, text)
    with s3_front(int(s3.endpoint.rpartition(":")[2])) as between:
        yield between


@pytest.fixture
def url(s3: Seaweed, front: S3Front) -> str:
    return f"s3://{s3.bucket}/{uuid.uuid4().hex}?endpoint=http://127.0.0.1:{front.port}"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(os.urandom(32))
    return path


def opened(url: str, query: str = "") -> S3Tier:
    return open_s3(url + query, timeout_s=20.0)


def test_the_key_goes_with_each_read_look_and_write_and_without_it_nothing_is_read(
    s3: Seaweed, front: S3Front, url: str, key_file: Path
) -> None:
    tier = opened(url, f"&sse_c_key_file={key_file}")
    assert tier.put(KEY, value("secret", 5000))
    assert fetch(tier, KEY) == value("secret", 5000)
    assert tier.contains(KEY) == 5000
    assert tier.put(KEY, value("secret", 5000)) is False
    assert tier.born() is not None
    assert [listed.length for listed in tier.list("ns")] == [5000]

    asked = [request for request in front.seen if KEY.object_name in request.path]
    assert {request.method for request in asked} == {"GET", "HEAD", "PUT"}
    for request in asked:
        assert base64.b64decode(request.headers[HEADER]) == key_file.read_bytes()
        assert request.headers["x-amz-server-side-encryption-customer-algorithm"] == "AES256"
        assert f"{HEADER}-md5" in request.headers
    with pytest.raises(TierError, match="was it written with a key"):
        fetch(opened(url), KEY)


def test_the_key_is_taken_from_the_environment_or_in_base64_from_the_file(
    url: str, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(url, f"&sse_c_key_file={key_file}").put(KEY, value("secret", 5000))
    text = base64.b64encode(key_file.read_bytes()).decode()
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, text)
        assert fetch(opened(url, "&sse=sse-c"), KEY) == value("secret", 5000)
    key_file.write_text(f"{text}\n")
    assert fetch(opened(url, f"&sse=sse-c&sse_c_key_file={key_file}"), KEY) == value("secret", 5000)


@pytest.mark.fault("objects were written with another SSE-C key", "S3", "a miss, or an error at startup")
def test_another_key_is_an_error_of_the_entry_and_of_the_start_if_all_is_written_with_it(
    url: str, key_file: Path
) -> None:
    """An unreadable entry neither pauses the store nor makes it read only."""
    tier = opened(url, f"&sse_c_key_file={key_file}")
    tier.put(KEY, value("secret", 5000))
    key_file.write_bytes(os.urandom(32))
    other = opened(url, f"&sse_c_key_file={key_file}")
    calls: list[Callable[[], object]] = [
        lambda: other.get_into(KEY, memoryview(bytearray(5000))),
        lambda: other.contains(KEY),
    ]
    assert other.put(KEY, value("secret", 5000)) is False, "what is there stays"
    for call in calls:
        with pytest.raises(TierError, match="another key than that of sse-c") as caught:
            call()
        assert not isinstance(caught.value, TierUnreachable | WritesRefused)
    tier.born()
    with pytest.raises(ValueError, match="correct sse_c_key_file") as refused:
        opened(url, f"&sse_c_key_file={key_file}")
    assert not isinstance(refused.value, TierUnreachable)


@pytest.mark.parametrize(
    ("query", "content", "expected"),
    [
        ("sse_c_key_file={file}", None, "cannot be read: No such file"),
        ("sse_c_key_file={file}", b"too short, and never shown", "holds no key: must be 32 bytes"),
        ("sse_c_key_file={file}", base64.b64encode(bytes(31)), "holds no key"),
        ("sse_c_key_file={file}&sse=AES256", bytes(32), "sse_c_key_file belongs to sse=sse-c"),
        ("sse=sse-c", None, f"sse_c_key_file=/path in the URL, or {VARIABLE}"),
        ("sse_c_key=abc", None, "with credentials"),
    ],
)
def test_an_invalid_key_is_refused_before_any_request_and_not_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, query: str, content: bytes | None, expected: str
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    with pytest.raises(ValueError, match=expected) as refused:
        check_remote(Remote(f"s3://bucket/prefix?{query.format(file=tmp_path / 'key')}"))
    assert "too short" not in str(refused.value)


def test_a_write_that_is_refused_is_not_the_keys_fault_and_the_file_is_read_once(
    front: S3Front, url: str, key_file: Path
) -> None:
    tier = opened(url, f"&sse_c_key_file={key_file}")
    key_file.unlink()
    assert tier.put(KEY, value("secret", 5000))
    front.rule = lambda request: (403, "AccessDenied") if request.method == "PUT" else None
    with pytest.raises(WritesRefused):
        tier.put(EncoderCacheKey("ns", "other"), value("other", 100))


def test_an_object_that_cannot_be_read_without_another_key_can_be_replaced_where_entries_are_signed(
    url: str, key_file: Path, tmp_path: Path
) -> None:
    """Otherwise any user who may write to the bucket could prevent an entry from being stored."""
    (other := tmp_path / "other").write_bytes(os.urandom(32))
    tier = opened(url, f"&sse_c_key_file={key_file}")
    assert opened(url, f"&sse_c_key_file={other}").put(KEY, value("another's", 5000))
    with pytest.raises(TierError):
        fetch(tier, KEY)
    assert tier.put(KEY, value("ours", 6000)) is False
    held = tier.held(KEY, 1 << 20)
    assert held is not None
    assert held.data is None
    assert tier.replace(KEY, value("ours", 6000), held)
    assert fetch(tier, KEY) == value("ours", 6000)
