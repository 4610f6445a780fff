# SPDX-License-Identifier: Apache-2.0
"""The keys of `ec:`, each with its type, limits, unit, default and one sentence. A new key is a new field here."""

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from lmcache_ec.config.sources import ConfigError
from lmcache_ec.events.endpoints import ACCEPTED, Publishing, check_endpoint, of_rank, snapshots_of
from lmcache_ec.key import MAX_NAMESPACE_CHARS, check_namespace
from lmcache_ec.mask import HIDDEN, masked, masked_address
from lmcache_ec.signing import SigningKey, read_key
from lmcache_ec.sizes import GIB
from lmcache_ec.tiers.kinds import can_list, check_remote, configured, is_read_only, kind_of
from lmcache_ec.tiers.remote import MAX_ENTRY_BYTES, REFRESH_S, TIMEOUT_S, Lookup, Remote

_FLAGS = TypeAdapter(bool)


@dataclass(frozen=True, slots=True)
class Accepts:
    """What a key accepts, as worded in errors; `unit` is empty if the number or text has none.

    A validator that knows more raises a ValueError with its own text, which holds no credential.
    """

    text: str
    unit: str = ""


def _no_flag(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError  # pydantic takes `yes` for the number 1
    return value


_MOST_GIB = 1 << 20
_LIKE_BYTES = 16 << 20


def _no_bytes(value: object) -> object:
    """ValueError for a number of GiB so large that bytes were meant."""
    try:
        size = float(value) if isinstance(value, int | float | str) else 0.0
    except (ValueError, OverflowError):
        return value
    if _LIKE_BYTES <= size < math.inf:
        text = f"{size / GIB:.1f}" if size > GIB / 20 else f"{size / GIB:.2g}"
        raise ValueError(f"looks like bytes: {size:.0f} bytes are {text} GiB; must be a number of GiB, without a unit")
    return value


def _namespace(text: str | None) -> str | None:
    try:
        return None if text is None else check_namespace(text)
    except ValueError:
        raise ValueError from None


def _folder(value: object) -> object:
    """An absolute path from LMCache's spellings of one; an empty text means none."""
    if not isinstance(value, str):
        return value
    path = value.strip().removeprefix("file://")
    if "://" in path:
        raise ValueError("must be a folder on this host, /path or file:///path")
    if "," in path:
        raise ValueError("must be one folder, /path or file:///path, not a list as for LMCache's KV cache")
    return path or None


def _file(value: object) -> object:
    """The path of a file, as `_folder`."""
    if not isinstance(value, str):
        return value
    if "://" in (path := value.strip().removeprefix("file://")):
        raise ValueError
    return path or None


def _endpoint(value: object) -> object:
    """An address where an engine can listen; an empty text means none."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    return check_endpoint(text) if text else None


def _absolute(path: Path | None) -> Path | None:
    if path is not None and "\0" in str(path):
        raise ValueError("must not contain a null byte")
    if path is not None and re.search(r"\$[\w{]", str(path)):
        raise ValueError("must be written out: variables are replaced in addresses of remotes only")
    if path is not None and not path.is_absolute():
        example = os.path.abspath(os.path.expanduser(path))
        if masked(example) == HIDDEN:
            raise ValueError
        raise ValueError(f"must be an absolute path, for example {example}")
    return path


def _urls(value: object) -> object:
    """One URL, or several as a list or separated by commas (a comma within one separates its hosts)."""
    if isinstance(value, str):
        if value.lstrip().startswith("["):
            raise ValueError("must be URLs with commas between them, without brackets")
        return [part.strip() for part in re.split(r",(?=\s*[\w+-]+://)", value) if part.strip()]
    return value or []


def _map(value: object) -> object:
    """An environment variable holds it as JSON, as for LMCache."""
    try:
        return json.loads(value) if isinstance(value, str) and value.strip() else value or {}
    except (ValueError, RecursionError):
        raise ValueError from None


def _flag_or_version(value: object) -> object:
    try:
        return value if value == "by_version" else _FLAGS.validate_python(value)
    except ValidationError:
        raise ValueError from None


def _policy(value: object) -> object:
    """In any capitalization, as for LMCache."""
    return {"lru": "LRU", "cost": "cost"}.get(value.lower(), value) if isinstance(value, str) else value


Flag = Annotated[bool, Accepts("must be true or false")]
Text = Annotated[str, Accepts('must be text; put a number in quotes: "7"')]
Number = Annotated[
    int,
    BeforeValidator(_no_flag),
    Field(ge=0, le=1_000_000_000),
    Accepts("must be a whole number from 0 to 1000000000"),
]
Folder = Annotated[
    Path | None, BeforeValidator(_folder), AfterValidator(_absolute), Accepts("must be a folder, /path, or null")
]
KeyFile = Annotated[
    Path | None, BeforeValidator(_file), AfterValidator(_absolute), Accepts("must be a file, /path, or null")
]
Endpoint = Annotated[str | None, BeforeValidator(_endpoint), Accepts(ACCEPTED)]
Namespace = Annotated[
    str | None,
    AfterValidator(_namespace),
    Accepts(f"must be null, or 1 to {MAX_NAMESPACE_CHARS} characters from a-z 0-9 . _ -, not beginning with a dot"),
]
Gibibytes = Annotated[
    float,
    BeforeValidator(_no_bytes),
    BeforeValidator(_no_flag),
    Field(ge=0, le=_MOST_GIB, allow_inf_nan=False),
    Accepts("must be a number of GiB, for example 4 or 0.5, without a unit", "GiB"),
]
Milliseconds = Annotated[
    int,
    BeforeValidator(_no_flag),
    Field(gt=0, le=600_000),
    Accepts("must be a whole number of milliseconds from 1 to 600000, without a unit", "ms"),
]
Seconds = Annotated[
    float,
    BeforeValidator(_no_flag),
    Field(gt=0, le=3600, allow_inf_nan=False),
    Accepts("must be a number of seconds above 0, at most 3600, without a unit", "s"),
]
SecondsFromZero = Annotated[
    float,
    BeforeValidator(_no_flag),
    Field(ge=0, le=3600, allow_inf_nan=False),
    Accepts("must be a number of seconds from 0 to 3600, without a unit", "s"),
]
Lifetime = Annotated[
    Annotated[float, BeforeValidator(_no_flag), Field(gt=0, allow_inf_nan=False)] | None,
    Accepts("must be a number of seconds above 0, without a unit, or null", "s"),
]
Remotes = Annotated[
    tuple[str, ...],
    BeforeValidator(_urls),
    Accepts("must be a URL or a list of URLs, for example [redis://host:6379, s3://bucket/prefix]"),
]
ExtraConfig = Annotated[dict[str, object], BeforeValidator(_map), Accepts("must be a map, or its JSON")]


class EncoderCacheConfig(BaseModel):
    """The keys of `ec:`, with LMCache's names and units where LMCache has them. Immutable; any thread may read it."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    enabled: Flag = Field(True, description="Whether the cache is on; if not, the connector does nothing.")
    namespace: Namespace = Field(
        None,
        description="Replaces the computed namespace. Use it only if all engines that share it encode identically.",
    )
    salt: Text = Field("", description="Any text; only engines with the same salt share entries.")
    epoch: Number = Field(
        0, description="Increase it to abandon all existing entries. `lmcache-ec epoch` does it in running engines."
    )
    key_by_engine_version: Flag = Field(
        True,
        description="Whether the engine's minor version is part of the namespace, since encoders may change with it.",
    )
    max_local_cpu_size: Annotated[
        Gibibytes,
        Field(gt=0),
        Accepts("must be a number of GiB above 0, for example 4 or 0.5, without a unit", "GiB"),
    ] = Field(2.0, description="Limit of LocalCPU, the memory shared by the processes of one engine.")
    local_disk: Folder = Field(
        None,
        description="Folder of LocalDisk, shared by any number of engines. Unset: a subfolder of the KV part's folder.",
    )
    max_local_disk_size: Annotated[
        Gibibytes,
        Accepts("must be a number of GiB, above 0 with local_disk, for example 4 or 0.5, without a unit", "GiB"),
    ] = Field(16.0, description="Limit of the LocalDisk folder; engines that share it count together.")
    min_free_disk_size: Gibibytes = Field(
        1.0, description="Nothing is written while the file system of LocalDisk has less free space than this."
    )
    cache_policy: Annotated[Literal["LRU", "cost"], BeforeValidator(_policy), Accepts("must be LRU or cost")] = Field(
        "LRU",
        description="What LocalCPU evicts first: the least recently used entry, or the one that costs least to get "
        "back, relative to its size and use (cost). LocalDisk always evicts the least recently used.",
    )
    extra_config: ExtraConfig = Field(
        default_factory=dict, description="As in LMCache. Only settings for S3 and for remotes of LMCache are used."
    )
    remotes: Remotes = Field(
        (),
        description="URLs of the remote tiers, in the order in which they are asked. For a single one you can use "
        "`remote_url`. `${NAME}` stands for an environment variable.",
    )
    ttl_s: Lifetime = Field(None, description="How long an entry lives in a remote tier. Unset: no limit.")
    blocking_timeout_secs: Annotated[
        float,
        BeforeValidator(_no_flag),
        Field(gt=0, le=600, allow_inf_nan=False),
        Accepts("must be a number of seconds above 0, at most 600, without a unit", "s"),
    ] = Field(TIMEOUT_S, description="A call to a remote tier fails if there is no answer for this long.")
    max_remote_entry_size: Annotated[
        Gibibytes,
        Field(gt=0, le=64),
        Accepts("must be a number of GiB above 0, at most 64, without a unit", "GiB"),
    ] = Field(MAX_ENTRY_BYTES / GIB, description="Largest entry that is sent to Redis.")
    remote_lookup: Annotated[Literal["auto", "probe", "catalog"], Accepts("must be auto, probe or catalog")] = Field(
        "auto",
        description="Which entries a remote is asked for: all (probe), or only those in its listing (catalog). auto: "
        "S3 for those in its listing; Redis for all, as long as it answers quickly.",
    )
    catalog_refresh_s: Seconds = Field(
        REFRESH_S,
        description="Longest time between two listings of a remote. Each is up to a tenth earlier, at random, so "
        "that replicas do not list at the same time.",
    )
    load_deadline_ms: Milliseconds = Field(
        1000,
        description="How long a request may wait for its entries to arrive; with load_policy auto, no longer than "
        "their encodes are expected to take. After that vLLM encodes.",
    )
    load_policy: Annotated[Literal["auto", "always"], Accepts("must be auto or always")] = Field(
        "auto",
        description="What a request waits for: entries that are expected to arrive before vLLM could have encoded "
        "them (auto), or all that a tier has (always).",
    )
    start_timeout_s: Seconds = Field(
        10.0, description="How long an engine may wait at startup for the store process and the ranks."
    )
    store_timeout_s: Seconds = Field(
        10.0, description="A store process that does not answer for this long is replaced."
    )
    drain_s: SecondsFromZero = Field(30.0, description="How long writes may continue after the engine has ended.")
    producer_flush_s: Annotated[
        SecondsFromZero,
        Field(le=600),
        Accepts("must be a number of seconds from 0 to 600, without a unit", "s"),
    ] = Field(10.0, description="How long a producer's step may wait until its entries are in every tier; 0: no wait.")
    wait_for_producer_ms: Annotated[
        int,
        BeforeValidator(_no_flag),
        Field(ge=0, le=600_000),
        Accepts("must be a whole number of milliseconds from 0 to 600000, without a unit", "ms"),
    ] = Field(2000, description="Longest wait for an entry that a producer has announced to a request.")
    signing_key_file: KeyFile = Field(
        None,
        description="File of at least 32 random bytes, the same for all engines that share entries. Entries are "
        "signed with it; unsigned entries are misses.",
    )
    persist_client_ids: Flag = Field(
        False,
        description="Whether entries named by a client's uuid may leave LocalCPU. Set it only if a name always means "
        "the same content.",
    )

    persist_updated_weights: Annotated[
        Literal[False, True, "by_version"],
        BeforeValidator(_flag_or_version),
        Accepts("must be true, false or by_version"),
    ] = Field(
        False,
        description="Whether outputs of weights that were changed in a running engine may leave LocalCPU: under a "
        "namespace with the weights' digest (true), or with the version that vLLM was given (by_version).",
    )
    weights_check_s: SecondsFromZero = Field(
        60.0,
        description="Interval of the check whether the weights have changed without a call to the workers; 0: no "
        "check.",
    )
    events_endpoint: Endpoint = Field(
        None,
        description="Address at which an engine publishes, for routers, what enters and leaves LocalCPU "
        "(docs/events.md). Unset: nothing is published. Data-parallel engines publish at the next ports.",
    )
    events_snapshot_endpoint: Endpoint = Field(
        None,
        description="Address from which subscribers get all that LocalCPU holds. Unset: 1000 ports above "
        "events_endpoint, or its path with `.snapshots`.",
    )
    events_topic: Text = Field("", description="First frame of each event, for subscribers to filter by.")

    @field_validator("max_local_disk_size")
    @classmethod
    def _none_only_without_a_folder(cls, size: float, others: ValidationInfo) -> float:
        if size == 0 and others.data.get("local_disk"):
            raise ValueError("must be a number of GiB above 0; to have no LocalDisk, set local_disk: null")
        return size

    @field_validator("remote_lookup")
    @classmethod
    def _catalog_of_what_can_be_listed(cls, lookup: str, others: ValidationInfo) -> str:
        unlisted = [url.partition("://")[0] for url in others.data.get("remotes", ()) if not can_list(url)]
        if lookup == "catalog" and unlisted:
            raise ValueError(f"must be auto or probe with {unlisted[0]}://, which cannot be listed")
        return lookup

    @field_validator("events_snapshot_endpoint")
    @classmethod
    def _apart(cls, snapshots: str | None, others: ValidationInfo) -> str | None:
        events = others.data.get("events_endpoint")
        if snapshots is not None and snapshots == events:
            raise ValueError("must be another address than events_endpoint")
        return snapshots

    @field_validator("remotes")
    @classmethod
    def _served(cls, urls: tuple[str, ...], others: ValidationInfo) -> tuple[str, ...]:
        for url in urls:
            check_remote(configured(url, others.data.get("extra_config", {})))
        if len(set(urls)) != len(urls):
            raise ValueError("must name each remote once")
        return urls

    def __repr_args__(self) -> Sequence[tuple[str | None, object]]:
        """No way of printing a configuration shows a credential. (Pydantic uses this for `repr` and `str`.)"""
        return [(name, _Verbatim(describe(self, name))) for name in type(self).model_fields]

    @property
    def remote_tiers(self) -> list[Remote]:
        """The remotes in the form in which they are opened, in order. They hold credentials."""
        return [
            configured(
                url,
                self.extra_config,
                ttl_s=self.ttl_s,
                timeout_s=self.blocking_timeout_secs,
                max_entry_bytes=self.max_remote_entry_bytes,
                lookup=Lookup(self.remote_lookup),
                refresh_s=self.catalog_refresh_s,
            )
            for url in self.remotes
        ]

    def publishing(self, rank: int) -> Publishing | None:
        """Where the data-parallel engine with this number publishes; None if none does."""
        if self.events_endpoint is None:
            return None
        snapshots = self.events_snapshot_endpoint or snapshots_of(self.events_endpoint)
        return Publishing(of_rank(self.events_endpoint, rank), of_rank(snapshots, rank), self.events_topic, rank)

    def signing_key(self) -> SigningKey | None:
        """The key that signs entries, read from its file now. ConfigError if it cannot be used."""
        if self.signing_key_file is None:
            return None
        try:
            key = read_key(self.signing_key_file)
            key.namespace(self.namespace or "")
        except ValueError as error:
            raise ConfigError(f"signing_key_file: {error}") from None
        return key

    @property
    def read_only_tiers(self) -> int:
        """The tiers configured as read only, a bit each: a disk first, then the remotes in order."""
        numbered = enumerate(self.remote_tiers, start=1 if self.local_disk else 0)
        return sum(1 << number for number, remote in numbered if is_read_only(remote))

    @property
    def max_local_cpu_bytes(self) -> int:
        return int(self.max_local_cpu_size * GIB)

    @property
    def max_local_disk_bytes(self) -> int:
        return int(self.max_local_disk_size * GIB)

    @property
    def min_free_disk_bytes(self) -> int:
        return int(self.min_free_disk_size * GIB)

    @property
    def max_remote_entry_bytes(self) -> int:
        return int(self.max_remote_entry_size * GIB)


class _Verbatim(str):
    def __repr__(self) -> str:
        return str(self)


def accepts(key: str) -> Accepts:
    """What `key` accepts. KeyError for an unknown one."""
    found = [each for each in EncoderCacheConfig.model_fields[key].metadata if isinstance(each, Accepts)]
    return found[-1]


def default(key: str) -> object:
    """The default value of `key`. KeyError for an unknown one."""
    value: object = EncoderCacheConfig.model_fields[key].get_default(call_default_factory=True)
    return value


def describe(config: EncoderCacheConfig, key: str) -> str:
    """A value in force without its credentials: for a remote its tier and address, for LMCache's map nothing."""
    if key == "remotes":
        return f"[{', '.join(f'{kind_of(url).name} {masked_address(url)}' for url in config.remotes)}]"
    return masked(getattr(config, key))
