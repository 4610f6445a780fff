# SPDX-License-Identifier: Apache-2.0
"""The kinds of remote tiers, by the scheme of their URLs.

A new kind is a module that defines a `RemoteKind`, and a line in `KINDS`; nothing else depends on a remote's kind.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from lmcache_ec.tiers.base import Tier
from lmcache_ec.tiers.lmcache_kind import LMCACHE
from lmcache_ec.tiers.redis_kind import REDIS
from lmcache_ec.tiers.remote import MAX_ENTRY_BYTES, REFRESH_S, TIMEOUT_S, Lookup, Remote, RemoteKind
from lmcache_ec.tiers.s3_kind import S3

KINDS: tuple[RemoteKind, ...] = (
    REDIS,
    S3,
    LMCACHE,
)

SCHEMES: Mapping[str, RemoteKind] = {scheme: kind for kind in KINDS for scheme in kind.schemes}
REFUSED: Mapping[str, str] = {scheme: why for kind in KINDS for scheme, why in kind.refused.items()}
"""Scheme -> why no encoder output can be kept there."""


def kind_of(url: str) -> RemoteKind:
    """The kind of the remote at `url`. ValueError, which quotes only the scheme, if there is none."""
    scheme = url.partition("://")[0].lower() if "://" in url else ""
    if why := REFUSED.get(scheme):
        raise ValueError(f"{scheme}:// cannot keep encoder outputs: {why}")
    if scheme not in SCHEMES:
        raise ValueError(_unserved(scheme))
    return SCHEMES[scheme]


def _unserved(scheme: str) -> str:
    """Names only the nearest scheme: a list of two dozen would not help."""
    given = f"{scheme}://" if scheme else "an address without a scheme"
    near = difflib.get_close_matches(scheme, SCHEMES, 1)
    if near:
        return f"no tier supports {given}: did you mean {near[0]}://?"
    known = ", ".join(f"{kind.schemes[0]}://" for kind in KINDS)
    store = " (an S3 store: s3://bucket/prefix?endpoint=…)" if scheme in ("http", "https") else ""
    return f"no tier supports {given}: must be {known} or another of docs/configuration.md#addresses-of-stores{store}"


def configured(
    url: str,
    extra_config: Mapping[str, object],
    *,
    ttl_s: float | None = None,
    timeout_s: float = TIMEOUT_S,
    max_entry_bytes: int = MAX_ENTRY_BYTES,
    lookup: Lookup = Lookup.AUTO,
    refresh_s: float = REFRESH_S,
) -> Remote:
    """The remote at `url`, with the keys of `extra_config` that its kind reads, and with AUTO resolved for its kind.

    ValueError as `kind_of`.
    """
    kind = kind_of(url)
    own = {key: value for key, value in extra_config.items() if kind.reads(key)}
    lookup = kind.lookup if lookup is Lookup.AUTO else lookup
    return Remote(url, own, ttl_s, timeout_s, max_entry_bytes, lookup, refresh_s)


def check_remote(remote: Remote) -> None:
    """ValueError, which holds no secret, for an invalid remote. Imports no client, makes no request."""
    try:
        urlsplit(remote.url)
    except ValueError:
        raise ValueError("must be a URL, for example redis://host:6379 or s3://bucket/prefix") from None
    kind_of(remote.url).check(remote)


def open_remote(remote: Remote) -> Tier:
    """The tier, see `RemoteKind.open`."""
    return kind_of(remote.url).open(remote)


def is_read_only(remote: Remote) -> bool:
    """Whether it is configured never to be written to."""
    return kind_of(remote.url).read_only(remote)


def can_list(url: str) -> bool:
    """Whether the tier at `url` can be listed. ValueError as `kind_of`."""
    return kind_of(url).lists(url)


def is_remote_key(key: object) -> bool:
    """Whether a key of LMCache's `extra_config` belongs to a remote of any kind."""
    return isinstance(key, str) and any(kind.reads(key) for kind in KINDS)


def environment_of(urls: Iterable[str]) -> tuple[str, ...]:
    """Prefixes of the names of environment variables that the clients of these remotes read. ValueError as
    `kind_of`."""
    found = (name for url in urls for name in (*kind_of(url).environment, *kind_of(url).environment_for(url)))
    return tuple(dict.fromkeys(found))
