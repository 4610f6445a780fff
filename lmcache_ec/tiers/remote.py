# SPDX-License-Identifier: Apache-2.0
"""Remote tiers by their URL: which there are, and one that is away when it is opened.

What a tier needs is imported when a remote of its kind is opened, and not before.
"""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.tiers.base import Answers, Listed, NamespaceUse, Tier, TierError

_REDIS = ("redis", "rediss", "valkey", "valkeys", "resp", "resps", "unix")
_ARRANGED = ("redis", "rediss", "valkey", "valkeys")
_LMCACHE = ("lm", "fs", "mooncakestore", "plugin", "hf3fs", "eic", "infinistore", "sagemaker-hyperpod")

SCHEMES: dict[str, str] = {
    **dict.fromkeys(_REDIS, "redis"),
    **{f"{name}-{how}": "redis" for name in _ARRANGED for how in ("sentinel", "cluster")},
    "s3": "s3",
    **dict.fromkeys(_LMCACHE, "lmcache"),
}
"""URL scheme to the tier's name."""

_KV_SHAPES = "LMCache's connector takes each value for a KV chunk of the one size that it computes"
REFUSED: Mapping[str, str] = {
    "azure": _KV_SHAPES,
    "bigtable": _KV_SHAPES,
    "hfbucket": _KV_SHAPES,
    "mock": "LMCache's connector keeps lengths, and no bytes",
    "blackhole": "LMCache's connector keeps nothing",
    "audit": "it wraps another remote: name that one",
    "external": "LMCache has replaced it by remote_storage_plugins: use plugin://<name>",
}
"""Scheme, or type of a built-in plugin -> why no encoder output can be kept there."""

EXTRA_KEYS = ("s3_region", "disable_tls", "aws_access_key_id", "aws_secret_access_key")
"""What of LMCache's `extra_config` belongs to S3."""

_LMCACHE_KEYS = re.compile(
    r"(?:remote_storage_plugin\.|mooncake_|fs_|hf3fs_|infinistore_|sagemaker_hyperpod_).*"
    r"|local_hostname|metadata_server|global_segment_size|local_buffer_size|protocol|device_name|master_server_address"
    r"|transfer_timeout|storage_root_dir"
)

S3_ENVIRONMENT = (
    *("AWS_", "SSL_CERT_", "REQUESTS_CA_BUNDLE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
)
"""Beginnings of the names of environment variables that boto3 and obstore read: credentials, addresses, proxies."""


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """What holds for a remote besides its URL. `extra_config` is LMCache's; it may hold credentials."""

    ttl_s: float | None = None
    timeout_s: float = 5.0
    max_entry_bytes: int = 512 << 20
    extra_config: Mapping[str, object] = field(default_factory=dict, repr=False)


def tier_name(url: str) -> str:
    """The name of the tier that serves a URL. ValueError, which shows the scheme alone, if there is none."""
    scheme = url.partition("://")[0].lower() if "://" in url else ""
    if why := REFUSED.get(scheme):
        raise ValueError(f"{scheme}:// cannot keep encoder outputs: {why}")
    if scheme not in SCHEMES:
        raise ValueError(f"no tier serves {scheme or 'a URL without scheme'}://; accepted are {', '.join(SCHEMES)}")
    return SCHEMES[scheme]


def lane_names(tiers: Sequence[str]) -> list[str]:
    """Names of tiers as they are counted and listed: a second one of a kind gets its place in the order, `s3_2`."""
    return [name if tiers.index(name) == index else f"{name}_{index}" for index, name in enumerate(tiers)]


def is_listed(url: str) -> bool:
    """Whether the tier at `url` can say what it holds. ValueError if no tier serves it."""
    if tier_name(url) != "lmcache":
        return True
    from lmcache_ec.tiers.lmcache_remote import can_list

    return can_list(url)


def is_remote_key(key: object) -> bool:
    """Whether a key of LMCache's `extra_config` belongs to a remote that some URL may name."""
    return isinstance(key, str) and (key in EXTRA_KEYS or bool(_LMCACHE_KEYS.fullmatch(key)))


def place_of(url: str) -> str:
    """What a log may show of a URL: neither user nor password nor parameters."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "at a URL that cannot be read"
    return f"{parts.netloc.rpartition('@')[2]}{parts.path}"


def check_url(url: str, options: RemoteOptions) -> None:
    """ValueError, which shows no secret, for a URL that cannot be meant. Imports no client and asks nobody."""
    if tier_name(url) == "s3":
        from lmcache_ec.tiers.s3_url import s3_options

        s3_options(url, options.extra_config)
    elif tier_name(url) == "lmcache":
        from lmcache_ec.tiers.lmcache_remote import check_lmcache_url

        check_lmcache_url(url, options.extra_config)
    else:
        from lmcache_ec.tiers.redis_url import RedisOptions, parse_redis_url

        parse_redis_url(url, RedisOptions())


def open_remote(url: str, options: RemoteOptions) -> Tier:
    """The tier at `url`, after one request that shows that it can be used. TierAway if nobody answers, ValueError if
    something else is wrong; neither shows a secret."""
    if tier_name(url) == "s3":
        from lmcache_ec.tiers.s3 import open_s3

        return open_s3(url, options.extra_config, ttl_s=options.ttl_s, timeout_s=options.timeout_s)
    if tier_name(url) == "lmcache":
        from lmcache_ec.tiers.lmcache_remote import open_lmcache_remote

        return open_lmcache_remote(
            url,
            options.extra_config,
            ttl_s=options.ttl_s,
            timeout_s=options.timeout_s,
            max_entry_bytes=options.max_entry_bytes,
        )
    from lmcache_ec.tiers.redis import open_redis
    from lmcache_ec.tiers.redis_url import RedisOptions

    return open_redis(
        url,
        RedisOptions(ttl_s=options.ttl_s, timeout_s=options.timeout_s, max_entry_bytes=options.max_entry_bytes),
    )


class AwaitedTier(Tier):
    """A tier that was away when it was opened: the first call that finds it there opens it, until then all fail.

    `opening` is an attempt that is still under way, and waited for before another one is made.
    Runs in the store process, on the tier's own threads; `_lock` lets one of them try at a time.
    """

    def __init__(self, name: str, opener: Callable[[], Tier], opening: Future[Tier] | None = None) -> None:
        self.name = name
        self._opener = opener
        self._opening = opening
        self._tier: Tier | None = None
        self._lock = threading.Lock()

    @property
    def stored_bytes(self) -> int | None:
        return self._opened().stored_bytes

    def get_into(self, key: EncoderCacheKey, buffer: memoryview) -> int | None:
        return self._opened().get_into(key, buffer)

    def get_each_into(self, wanted: Sequence[tuple[EncoderCacheKey, memoryview]]) -> Answers:
        return self._opened().get_each_into(wanted)

    def contains_each(self, keys: Sequence[EncoderCacheKey]) -> Answers:
        return self._opened().contains_each(keys)

    def put(self, key: EncoderCacheKey, data: memoryview) -> bool:
        return self._opened().put(key, data)

    def contains(self, key: EncoderCacheKey) -> int | None:
        return self._opened().contains(key)

    def delete(self, key: EncoderCacheKey) -> None:
        self._opened().delete(key)

    def list(self, namespace: str) -> Iterator[Listed]:
        return self._opened().list(namespace)

    def news(self, namespace: str) -> Sequence[bytes]:
        return self._opened().news(namespace)

    def namespaces(self) -> Iterator[NamespaceUse]:
        return self._opened().namespaces()

    def remove(self, namespace: str) -> int:
        return self._opened().remove(namespace)

    def born(self) -> str | None:
        return self._opened().born()

    def maintain(self) -> None:
        self._opened().maintain()

    def close(self) -> None:
        if self._tier is not None:
            self._tier.close()

    def _opened(self) -> Tier:
        with self._lock:
            if self._tier is None:
                try:
                    self._tier = self._attempt()
                    self.batches = self._tier.batches
                except TierError:
                    raise
                except ValueError as error:
                    raise TierError(errno.EIO, str(error)) from None
            return self._tier

    def _attempt(self) -> Tier:
        if self._opening is None:
            return self._opener()
        if not self._opening.done():
            raise TierError(errno.ETIMEDOUT, "still being opened")
        opening, self._opening = self._opening, None
        return opening.result()
