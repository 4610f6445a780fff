# SPDX-License-Identifier: Apache-2.0
"""Redis as a kind of remote."""

from __future__ import annotations

from lmcache_ec.tiers.base import Tier
from lmcache_ec.tiers.redis_url import SCHEMES, RedisOptions, parse_redis_url
from lmcache_ec.tiers.remote import Remote, RemoteKind


def _check(remote: Remote) -> None:
    parse_redis_url(remote.url, RedisOptions())


def _read_only(remote: Remote) -> bool:
    return parse_redis_url(remote.url, RedisOptions())[1].read_only


def _open(remote: Remote) -> Tier:
    from lmcache_ec.tiers.redis import open_redis

    return open_redis(
        remote.url,
        RedisOptions(ttl_s=remote.ttl_s, timeout_s=remote.timeout_s, max_entry_bytes=remote.max_entry_bytes),
    )


def _environment(url: str) -> tuple[str, ...]:
    """What a command that prints credentials reads, if there is one."""
    _, options = parse_redis_url(url, RedisOptions())
    return ("AWS_", "AZURE_", "CLOUDSDK_", "GOOGLE_", "VAULT_") if options.password_command else ()


def _credentials(remote: Remote) -> str:
    return parse_redis_url(remote.url, RedisOptions())[1].credentials_from


REDIS = RemoteKind(
    name="redis",
    schemes=tuple(SCHEMES),
    check=_check,
    open=_open,
    quick=True,
    read_only=_read_only,
    environment=("SSL_CERT_",),  # where OpenSSL finds its trusted authorities
    environment_for=_environment,
    credentials=_credentials,
)
