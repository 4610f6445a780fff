# SPDX-License-Identifier: Apache-2.0
"""The settings of the storage plugin: the keys `lmcache_ec.<name>` of LMCache's `extra_config`.

Names and units are those of the map `ec:`, which configures the encoder cache under vLLM but not this plugin. LMCache
logs its whole configuration, so a password is given as `${NAME}`, which names an environment variable.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lmcache_ec.config.keys import Folder, Gibibytes, KeyFile, Namespace, Remotes, Seconds
from lmcache_ec.config.variables import filled, without_variables
from lmcache_ec.sizes import GIB
from lmcache_ec.tiers.kinds import can_list, check_remote, configured
from lmcache_ec.tiers.remote import MAX_ENTRY_BYTES, REFRESH_S, TIMEOUT_S, Lookup, Remote

PREFIX = "lmcache_ec."


class PluginSettings(BaseModel):
    """Where the tiers are and how much they may take. Immutable; any thread may read it."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    local_disk: Folder = Field(None, description="Folder of the disk tier, an absolute path; unset: no disk tier.")
    max_local_disk_size: Gibibytes = Field(
        16.0, description="Limit of that folder, GiB; all processes that share it count together."
    )
    min_free_disk_size: float = Field(
        1.0,
        ge=0,
        le=1 << 20,
        description="Nothing is written while its file system has less free space than this, GiB.",
    )
    remotes: Remotes = Field((), repr=False, description="URLs of remote tiers, in the order in which they are asked.")
    ttl_s: float | None = Field(
        None, gt=0, description="How long an entry lives in a remote, seconds; unset: no limit."
    )
    blocking_timeout_secs: float = Field(
        TIMEOUT_S, gt=0, le=600, description="A call to a remote fails if there is no answer for this long, seconds."
    )
    max_remote_entry_size: float = Field(
        MAX_ENTRY_BYTES / GIB, gt=0, le=64, description="Largest entry that is sent to Redis, GiB."
    )
    remote_lookup: Literal["auto", "probe", "catalog"] = Field(
        "auto", description="As `ec.remote_lookup`: whether a remote is also asked for what its listing lacks."
    )
    catalog_refresh_s: Seconds = Field(REFRESH_S, description="Longest time between two listings of a remote, seconds.")
    max_pending_size: Gibibytes = Field(
        0.5, description="Limit of the copies that wait to be written, GiB; what does not fit is not stored."
    )
    drain_s: float = Field(10.0, ge=0, le=3600, description="Longest that `close` waits for writes, seconds.")
    signing_key_file: KeyFile = Field(None, description="As `ec.signing_key_file`: what entries are signed with.")
    namespace: Namespace | None = Field(None, description="Replaces the computed namespace.")
    salt: str = Field("", description="Any text; only processes with the same salt share entries.")
    epoch: int = Field(0, ge=0, description="Increase it to abandon all existing entries.")


def read_settings(extra_config: Mapping[str, object]) -> PluginSettings:
    """Our part of LMCache's `extra_config`. The ValueError names every problem and quotes no value."""
    values = {key.removeprefix(PREFIX): value for key, value in extra_config.items() if key.startswith(PREFIX)}
    if "remote_url" in values:  # LMCache's own name for a single remote
        values["remotes"] = values.pop("remote_url")
    problems = []
    for name in values.keys() - PluginSettings.model_fields.keys():
        near = difflib.get_close_matches(name, PluginSettings.model_fields, n=1) or PluginSettings.model_fields
        problems.append(f"unknown key {PREFIX}{name}: did you mean {', '.join(PREFIX + known for known in near)}?")
        del values[name]
    try:
        settings = PluginSettings.model_validate(values)
        if settings.local_disk is None and not settings.remotes:
            problems.append(f"set {PREFIX}local_disk or {PREFIX}remotes: nothing could be stored")
        urls = tuple(map(_with_password, settings.remotes))
        for url in urls:
            check_remote(configured(url, extra_config))
            if settings.remote_lookup == "catalog" and not can_list(url):
                raise ValueError(f"{url.partition('://')[0]}:// cannot be listed, so it cannot be used as a catalog")
    except ValidationError as error:
        problems += [
            f"{PREFIX}{detail['loc'][0]}: {detail['msg'].removeprefix('Value error, ')}"
            for detail in error.errors(include_input=False, include_url=False, include_context=False)
        ]
    except ValueError as error:
        problems.append(f"{PREFIX}remotes: {error}")
    if problems:
        raise ValueError("storage plugin: " + "; ".join(problems))
    return settings.model_copy(update={"remotes": urls})


def remote_tiers(settings: PluginSettings, extra_config: Mapping[str, object]) -> list[Remote]:
    """The remotes to open, in order. They hold credentials."""
    return [
        configured(
            url,
            extra_config,
            ttl_s=settings.ttl_s,
            timeout_s=settings.blocking_timeout_secs,
            max_entry_bytes=int(settings.max_remote_entry_size * GIB),
            lookup=Lookup(settings.remote_lookup),
            refresh_s=settings.catalog_refresh_s,
        )
        for url in settings.remotes
    ]


def _with_password(url: str) -> str:
    """The URL with its variables filled in. ValueError for a literal password, which LMCache would log."""
    parts = urlsplit(url)
    plain = without_variables(parts.netloc.rpartition("@")[0].partition(":")[2])
    if plain or re.search(r"passw(?:or)?d=(?!\$\{)", parts.query):
        raise ValueError("LMCache logs its configuration: give a password as ${NAME}, an environment variable")
    return filled(url, os.environ)
