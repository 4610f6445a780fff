# SPDX-License-Identifier: Apache-2.0
"""All remotes served by LMCache's own connectors, as one kind."""

from __future__ import annotations

import re

from lmcache_ec.tiers.base import Tier
from lmcache_ec.tiers.lmcache_url import REFUSED, SCHEMES, check_lmcache_url, traits_of
from lmcache_ec.tiers.remote import Remote, RemoteKind


def _check(remote: Remote) -> None:
    check_lmcache_url(remote.url, remote.extra_config)


def _open(remote: Remote) -> Tier:
    from lmcache_ec.tiers.lmcache_remote import open_lmcache_remote

    return open_lmcache_remote(
        remote.url,
        remote.extra_config,
        ttl_s=remote.ttl_s,
        timeout_s=remote.timeout_s,
        max_entry_bytes=remote.max_entry_bytes,
    )


LMCACHE = RemoteKind(
    name="lmcache",
    schemes=SCHEMES,
    check=_check,
    open=_open,
    lists=lambda url: traits_of(url).lists,
    extra_keys=re.compile(
        r"(?:remote_storage_plugin\.|mooncake_|fs_|hf3fs_|infinistore_|sagemaker_hyperpod_).*"
        r"|local_hostname|metadata_server|global_segment_size|local_buffer_size|protocol|device_name"
        r"|master_server_address|transfer_timeout|storage_root_dir"
    ),
    refused=REFUSED,
    # Nor can `fs://`: its connector knows no times, and makes folders wherever it is opened.
    no_namespaces="cannot be listed through LMCache's connector, and nothing can be removed by namespace",
    no_probe="LMCache's connector may change what is stored",
)
