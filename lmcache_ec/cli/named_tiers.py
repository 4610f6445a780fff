# SPDX-License-Identifier: Apache-2.0
"""The tiers in a configuration, opened for administration: to inspect and to remove, never to serve."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import typer

from lmcache_ec.cli.arguments import extra_map
from lmcache_ec.config import ConfigError, EncoderCacheConfig, resolve
from lmcache_ec.mask import masked_name, masked_url
from lmcache_ec.tiers.base import Tier
from lmcache_ec.tiers.disk import DiskTier
from lmcache_ec.tiers.kinds import kind_of, open_remote
from lmcache_ec.tiers.lane import lane_names
from lmcache_ec.tiers.remote import Lookup, Remote, RemoteKind


@dataclass(frozen=True, slots=True)
class NamedTier:
    """A tier by its name in metrics; `where` holds no credential. `kind` is set for a remote.

    `unlisted` is why no namespaces can be listed there, though nothing is wrong; empty if they can.
    """

    name: str
    where: str
    open: Callable[[], Tier]
    kind: RemoteKind | None = None
    unlisted: str = ""
    credentials: str = ""
    """Where they come from, as far as its kind tells."""
    lookup: Lookup | None = None
    """How entries are looked up in a remote, as configured for its kind."""

    def __str__(self) -> str:
        return f"{self.name} ({self.where})"

    def opened(self) -> closing[Tier]:
        """OSError or ValueError, which holds no credential, if it cannot be reached."""
        return closing(self.open())


def configured(extra: str) -> EncoderCacheConfig:
    """The configuration of an engine that is started in this environment with `extra`, a JSON map.

    If something is wrong with it, prints that and ends the command.
    """
    try:
        return resolve(extra_map(extra)).config
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def named_tiers(config: EncoderCacheConfig) -> list[NamedTier]:
    """The tiers of the configuration, in the order in which they are asked."""
    tiers = [_disk(config.local_disk, config)] if config.local_disk else []
    tiers += map(_remote, config.remote_tiers)
    names = lane_names([tier.name for tier in tiers])
    return [replace(tier, name=name) for name, tier in zip(names, tiers, strict=True)]


def wanted_tiers(extra: str, only: str = "", hint: str = "--tier") -> list[NamedTier]:
    """The tiers of the configuration, or the one named `only`, given by the argument `hint`. Ends the command if there
    is none."""
    tiers = named_tiers(configured(extra))
    if only and only not in [tier.name for tier in tiers]:
        names = ", ".join(tier.name for tier in tiers) or "none, as the configuration names no tier"
        raise typer.BadParameter(
            f"{masked_name(only)} is not one of the tiers of this configuration: {names}", param_hint=hint
        )
    if not tiers:
        typer.echo("no disk and no remote is configured here: is LMCACHE_CONFIG_FILE set?", err=True)
        raise typer.Exit(1)
    return [tier for tier in tiers if only in ("", tier.name)]


def _disk(folder: Path, config: EncoderCacheConfig) -> NamedTier:
    unlisted = ""
    try:
        os.stat(folder)
    except FileNotFoundError:
        unlisted = "there is no such folder yet"
    except OSError:
        pass  # opening it reports why
    opener = partial(DiskTier, folder, config.max_local_disk_bytes, make=False)
    return NamedTier("disk", str(folder), opener, unlisted=unlisted)


def _remote(remote: Remote) -> NamedTier:
    kind = kind_of(remote.url)
    opener, where = partial(open_remote, remote), masked_url(remote.url)
    return NamedTier(kind.name, where, opener, kind, kind.no_namespaces, kind.credentials(remote), remote.lookup)
