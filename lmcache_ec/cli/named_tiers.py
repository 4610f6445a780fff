# SPDX-License-Identifier: Apache-2.0
"""The tiers that a configuration names, as an administrator opens them: to look and to remove, never to serve."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import typer

from lmcache_ec.config import ConfigError, EncoderCacheConfig, resolve
from lmcache_ec.tiers.base import Tier
from lmcache_ec.tiers.disk import DiskTier
from lmcache_ec.tiers.remote import (
    RemoteOptions,
    is_listed,
    is_remote_key,
    lane_names,
    open_remote,
    place_of,
    tier_name,
)


@dataclass(frozen=True, slots=True)
class NamedTier:
    """A tier by the name that it has in metrics; `where` shows no credential.

    `silent` says why nothing can be found there, though nothing is wrong; then `opened` is not to be called.
    """

    name: str
    where: str
    open: Callable[[], Tier]
    silent: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.where})"

    def opened(self) -> closing[Tier]:
        """OSError or ValueError, which shows no credential, if it cannot be reached."""
        return closing(self.open())


def configured(extra: str) -> EncoderCacheConfig:
    """The configuration of an engine that is started in this environment with `extra`, a JSON map.

    Ends the command with what is wrong, if something is.
    """
    try:
        parsed = json.loads(extra)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise typer.BadParameter('a JSON map is accepted, such as \'{"local_disk": "/data"}\'', param_hint="--extra")
    try:
        return resolve(parsed).config
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def named_tiers(config: EncoderCacheConfig) -> list[NamedTier]:
    """Those of the configuration, in the order in which they are asked."""
    tiers = [_disk(config.local_disk, config)] if config.local_disk else []
    tiers += [_remote(url, config) for url in config.remotes]
    names = lane_names([tier.name for tier in tiers])
    return [replace(tier, name=name) for name, tier in zip(names, tiers, strict=True)]


def _disk(folder: Path, config: EncoderCacheConfig) -> NamedTier:
    silent = ""
    try:
        os.stat(folder)
    except FileNotFoundError:
        silent = "there is no such folder yet"
    except OSError:
        pass  # to open it says why
    return NamedTier("disk", str(folder), partial(DiskTier, folder, config.max_local_disk_bytes, make=False), silent)


def _remote(url: str, config: EncoderCacheConfig) -> NamedTier:
    options = RemoteOptions(
        ttl_s=config.ttl_s,
        timeout_s=config.blocking_timeout_secs,
        max_entry_bytes=config.max_remote_entry_bytes,
        extra_config={key: value for key, value in config.extra_config.items() if is_remote_key(key)},
    )
    name = tier_name(url)
    listed = is_listed(url) and name != "lmcache"  # a connector of LMCache makes folders, and knows no times
    silent = "" if listed else "cannot be listed through LMCache's connector, nor anything removed by its namespace"
    return NamedTier(name, f"{url.partition('://')[0]}://{place_of(url)}", partial(open_remote, url, options), silent)
