# SPDX-License-Identifier: Apache-2.0
"""S3 as a kind of remote."""

from __future__ import annotations

import re

from lmcache_ec.tiers.base import Tier
from lmcache_ec.tiers.remote import Lookup, Remote, RemoteKind
from lmcache_ec.tiers.s3_customer_key import customer_key
from lmcache_ec.tiers.s3_url import s3_options


def _check(remote: Remote) -> None:
    customer_key(s3_options(remote.url, remote.extra_config))


def _read_only(remote: Remote) -> bool:
    return s3_options(remote.url, remote.extra_config).read_only


def _open(remote: Remote) -> Tier:
    from lmcache_ec.tiers.s3 import open_s3

    return open_s3(remote.url, remote.extra_config, ttl_s=remote.ttl_s, timeout_s=remote.timeout_s)


S3 = RemoteKind(
    name="s3",
    schemes=("s3",),
    check=_check,
    open=_open,
    lookup=Lookup.CATALOG,  # a request for each new image would cost more than a listing now and then
    read_only=_read_only,
    environment=(  # of boto3 and obstore: credentials, addresses, authorities, proxies
        *("AWS_", "SSL_CERT_", "REQUESTS_CA_BUNDLE"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    ),
    extra_keys=re.compile("s3_region|s3_enable_s3express|disable_tls|aws_access_key_id|aws_secret_access_key"),
)
