# SPDX-License-Identifier: Apache-2.0
"""The configuration of the encoder cache: LMCache's YAML file, environment and vLLM's extra configuration.

Later sources override earlier ones:

1. the file at `LMCACHE_CONFIG_FILE`: the map `ec:`, or keys `ec_<key>` beside it (in the order of the file)
2. the environment: `LMCACHE_EC_<KEY>`
3. vLLM's `ec_connector_extra_config`

Places may be inherited, budgets never: a `local_disk` of the KV part (file, or `LMCACHE_LOCAL_DISK`) serves here too,
in a folder of its own under it, unless one of the three names another or says `null`. All other keys of the file are
LMCache's business.

Read once, at start, by the engine's process.
"""

import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from lmcache_ec.key import check_namespace
from lmcache_ec.tiers.remote import place_of, tier_name

_GIB = 1 << 30
_FILE_VARIABLE = "LMCACHE_CONFIG_FILE"
_ENV_PREFIX = "LMCACHE_EC_"
_EXTRA = "ec_connector_extra_config"
_INHERITED_FOLDER = "encoder-cache"
_HIDDEN = "<hidden>"
_SECRET_WORDS = ("password", "passwd", "secret", "token", "credential", "access_key")

Setting = tuple[str, object, str]  # key, value, where it comes from


class ConfigError(ValueError):
    """The configuration cannot be used; the text names every problem, and shows no secret."""


def _folder(value: object) -> object:
    """An absolute path from LMCache's spellings of one; an empty text means none."""
    if not isinstance(value, str):
        return value
    path = value.strip().removeprefix("file://")
    if "," in path:
        raise ValueError("one folder is accepted, not a list")
    return path or None


def _absolute(path: Path | None) -> Path | None:
    if path is not None and not path.is_absolute():
        raise ValueError("an absolute path is accepted, /path or file:///path")
    return path


def _urls(value: object) -> object:
    """One URL, or several as a list or with commas."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value or []


def _known(urls: tuple[str, ...]) -> tuple[str, ...]:
    for url in urls:
        tier_name(url)
    if len(set(urls)) != len(urls):
        raise ValueError("each remote once is accepted")
    return urls


Remotes = Annotated[tuple[str, ...], BeforeValidator(_urls), AfterValidator(_known)]
Folder = Annotated[Path | None, BeforeValidator(_folder), AfterValidator(_absolute)]
Namespace = Annotated[str, AfterValidator(check_namespace)]
Gibibytes = Annotated[float, Field(gt=0, le=1 << 20, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)]


class EncoderCacheConfig(BaseModel):
    """The keys of `ec:`, with LMCache's names and units where LMCache has them. Immutable; any thread may read it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = Field(True, description="Whether the cache works at all; if not, the connector is inert.")
    namespace: Namespace | None = Field(
        None, description="Replaces the computed namespace: the user vouches that all who share it encode alike."
    )
    salt: str = Field("", description="Any text; entries are shared among engines of the same salt only.")
    epoch: int = Field(0, ge=0, description="Raise it to leave all entries so far behind.")
    key_by_engine_version: bool = Field(
        True, description="Whether the engine's minor version is part of the namespace, as encoders change with it."
    )
    max_local_cpu_size: Gibibytes = Field(2.0, description="Limit of LocalCPU (shared memory), GiB for each engine.")
    local_disk: Folder = Field(
        None, description="Folder of LocalDisk, an absolute path or file:///path/. Unset: under that of the KV part."
    )
    max_local_disk_size: Gibibytes = Field(
        16.0, description="Limit of the LocalDisk folder, GiB; engines that share it count together."
    )
    min_free_disk_size: float = Field(
        1.0,
        ge=0,
        le=1 << 20,
        allow_inf_nan=False,
        description="With less than this free on the file system of LocalDisk nothing is written, GiB.",
    )
    cache_policy: Literal["LRU"] = Field("LRU", description="What is evicted first: the least recently used.")
    remotes: Remotes = Field(
        (), description="URLs of remote tiers, the one that is asked first in front; `remote_url` is the form for one."
    )
    ttl_s: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="How long an entry lives in a remote tier, seconds; unset: no limit.",
    )
    blocking_timeout_secs: float = Field(
        2.0, gt=0, le=600, allow_inf_nan=False, description="How long a remote tier may be silent, seconds."
    )
    max_remote_entry_size: float = Field(
        0.5, gt=0, le=64, allow_inf_nan=False, description="Largest entry that is sent to Redis, GiB."
    )
    extra_config: dict[str, object] = Field(
        default_factory=dict, repr=False, description="LMCache's; of it, what belongs to an S3 remote is used."
    )
    remote_lookup: Literal["auto", "probe", "catalog"] = Field(
        "auto",
        description="How a remote is asked for what nobody has told of: always (probe), only what its listing has "
        "(catalog), or, auto, S3 by its catalog and Redis always as long as it answers quickly.",
    )
    catalog_refresh_s: Seconds = Field(300.0, description="Between two listings of a remote, seconds.")
    load_deadline_ms: int = Field(
        1000, gt=0, le=600_000, description="Longest wait of a request for its entries to arrive, ms; then it encodes."
    )
    start_timeout_s: Seconds = Field(10.0, description="Longest wait at start for store process and ranks, seconds.")
    store_timeout_s: Seconds = Field(10.0, description="A store process silent for so many seconds is replaced.")
    drain_s: float = Field(
        30.0, ge=0, le=3600, allow_inf_nan=False, description="Longest that writes go on after the engine, seconds."
    )
    producer_flush_s: float = Field(
        10.0,
        ge=0,
        le=600,
        allow_inf_nan=False,
        description="Longest that a producer's step waits until its entries are in every tier, seconds; 0: not at all.",
    )
    wait_for_producer_ms: int = Field(
        2000, ge=0, le=600_000, description="Longest wait for an entry that a producer has announced to a request, ms."
    )
    persist_client_ids: bool = Field(
        False, description="Whether entries named by a client's uuid may leave LocalCPU: one uuid, one media, for ever."
    )

    @property
    def max_local_cpu_bytes(self) -> int:
        return int(self.max_local_cpu_size * _GIB)

    @property
    def max_remote_entry_bytes(self) -> int:
        return int(self.max_remote_entry_size * _GIB)

    @property
    def max_local_disk_bytes(self) -> int:
        return int(self.max_local_disk_size * _GIB)

    @property
    def min_free_disk_bytes(self) -> int:
        return int(self.min_free_disk_size * _GIB)


def load_config(
    extra: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None
) -> EncoderCacheConfig:
    """The configuration from the file, `environ` (this process's, if None) and `extra`, in rising precedence.

    ConfigError for a file that cannot be read, an unknown key, a bad value, or a credential in `extra`.
    """
    environ = os.environ if environ is None else environ
    file = environ.get(_FILE_VARIABLE)
    base = _read(file) if file else {}
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    problems: list[str] = []
    for key, value, origin in (*_from_file(base, file), *_from_environ(environ), *_from_extra(extra or {})):
        if key == "remote_url":  # LMCache's own name, for one
            key = "remotes"
        if key not in EncoderCacheConfig.model_fields:
            problems.append(_unknown(key, value, origin))
        elif origin == _EXTRA and (_is_secret(key, value) or key == "extra_config"):
            problems.append(f"{key} in {origin} holds a credential: vLLM logs that map, use the file or environment")
        else:
            values[key], origins[key] = value, origin
    inherited = environ.get("LMCACHE_LOCAL_DISK") or base.get("local_disk")
    if "local_disk" not in values and inherited:
        values["local_disk"], origins["local_disk"] = _below(str(inherited)), "local_disk of the KV part"
    remote = environ.get("LMCACHE_REMOTE_URL") or base.get("remote_url")
    if "remotes" not in values and isinstance(remote, str) and _served(remote):
        values["remotes"], origins["remotes"] = [remote], "remote_url of the KV part"
    if "extra_config" not in values and isinstance(base.get("extra_config"), dict):
        values["extra_config"], origins["extra_config"] = base["extra_config"], "extra_config of the KV part"
    try:
        config = EncoderCacheConfig.model_validate(values)
    except ValidationError as error:
        for detail in error.errors(include_url=False, include_context=False):
            key = str(detail["loc"][0])
            value = values[key]
            shown = _shown(key, value)
            reason = "not accepted" if shown == _HIDDEN else detail["msg"].removeprefix("Value error, ")
            problems.append(f"{key}={shown} in {origins[key]}: {reason}")
    if problems:
        raise ConfigError("encoder cache configuration: " + "; ".join(problems))
    return config


def summary(config: EncoderCacheConfig) -> str:
    """One line for the log at start."""
    if not config.enabled:
        return "encoder cache: off (ec.enabled is false)"
    disk = (
        f"LocalDisk {config.max_local_disk_size:g} GiB at {config.local_disk}" if config.local_disk else "no LocalDisk"
    )
    remotes = "".join(f", {tier_name(url)} {place_of(url)}" for url in config.remotes)
    return f"encoder cache: LocalCPU {config.max_local_cpu_size:g} GiB, {disk}{remotes}"


def _read(file: str) -> Mapping[object, object]:
    """The map in a YAML file. An error names the line and never quotes it: it may hold a password."""
    try:
        loaded = yaml.safe_load(Path(file).read_bytes())
    except OSError as error:
        raise ConfigError(f"{_FILE_VARIABLE}={file}: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        line = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        raise ConfigError(f"{_FILE_VARIABLE}={file}: not YAML{line}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"{_FILE_VARIABLE}={file}: not YAML") from None
    if not isinstance(loaded, dict | None):
        raise ConfigError(f"{_FILE_VARIABLE}={file}: holds a {type(loaded).__name__}, a map of keys is accepted")
    return loaded or {}


def _from_file(base: Mapping[object, object], file: str | None) -> Iterator[Setting]:
    for raw, value in base.items():
        key = str(raw).lower()
        if key.startswith("ec_"):
            yield key.removeprefix("ec_"), value, f"{file} ({raw})"
        elif key == "ec" and isinstance(value, dict):
            for inner, inner_value in value.items():
                yield str(inner).lower(), inner_value, f"{file} (ec)"
        elif key == "ec" and value is not None:
            raise ConfigError(f"{file}: ec is a {type(value).__name__}, a map of keys is accepted")


def _from_environ(environ: Mapping[str, str]) -> Iterator[Setting]:
    for name, value in environ.items():
        if name.startswith(_ENV_PREFIX):
            yield name.removeprefix(_ENV_PREFIX).lower(), value, name


def _from_extra(extra: Mapping[str, object]) -> Iterator[Setting]:
    for key, value in extra.items():
        yield key, value, _EXTRA


def _below(local_disk: str) -> str:
    """Our folder under the (first) folder of the KV part, which may be relative to where the engine was started."""
    first = local_disk.split(",")[0].strip().removeprefix("file://")
    return str(Path(first).absolute() / _INHERITED_FOLDER)


def _served(url: str) -> bool:
    """Whether we have a tier for a remote of the KV part; others are LMCache's business."""
    try:
        return bool(tier_name(url))
    except ValueError:
        return False


def _unknown(key: str, value: object, origin: str) -> str:
    known = EncoderCacheConfig.model_fields
    nearest = difflib.get_close_matches(key, known, n=1)
    advice = f"did you mean {nearest[0]}?" if nearest else f"accepted are {', '.join(known)}"
    return f"unknown key {key}={_shown(key, value)} in {origin}: {advice}"


def _is_secret(key: str, value: object) -> bool:
    """Whether this is a credential, by the name of the key or as part of an address."""
    url = value.lower() if isinstance(value, str) and "://" in value else ""
    return "@" in url or any(word in key.lower() or word in url for word in _SECRET_WORDS)


def _shown(key: str, value: object) -> str:
    """The value as an error may show it: nothing that sounds like a credential, and of a list or map only its kind."""
    if not isinstance(value, str | int | float | None):
        return f"<{type(value).__name__}>"
    text = repr(value)[:200]
    return _HIDDEN if _is_secret(key, value) or any(word in text.lower() for word in _SECRET_WORDS) else text
