# SPDX-License-Identifier: Apache-2.0
"""The keys of `ec:`, each with its type, limits, unit, default and one sentence. A new key is a new field here."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from lmcache_ec.config.mask import shown
from lmcache_ec.key import MAX_NAMESPACE_CHARS, check_namespace

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Accepts:
    """What a key accepts, in the words of an error; `unit` is empty where the number or text has none.

    A validator that knows better raises a ValueError with words of its own.
    """

    text: str
    unit: str = ""


def _no_flag(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError  # pydantic takes `yes` for the number 1
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
        raise ValueError("a folder on this host is accepted, /path or file:///path, no other address")
    if "," in path:
        raise ValueError("one folder is accepted, /path or file:///path, not a list as LMCache takes for KV")
    return path or None


def _absolute(path: Path | None) -> Path | None:
    if path is not None and not path.is_absolute():
        raise ValueError(f"an absolute path is accepted, such as {os.path.abspath(os.path.expanduser(path))}")
    return path


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


Flag = Annotated[bool, Accepts("true or false is accepted")]
Text = Annotated[str, Accepts('a text is accepted; put a number in quotes: "7"')]
Number = Annotated[
    int,
    BeforeValidator(_no_flag),
    Field(ge=0, le=1_000_000_000),
    Accepts("a whole number is accepted, 0 to 1000000000"),
]
Folder = Annotated[
    Path | None, BeforeValidator(_folder), AfterValidator(_absolute), Accepts("a folder is accepted, /path, or null")
]
Namespace = Annotated[
    str | None,
    AfterValidator(_namespace),
    Accepts(f"1 to {MAX_NAMESPACE_CHARS} characters of a-z 0-9 . _ - are accepted, no dot first, or null"),
]
Gibibytes = Annotated[
    float,
    BeforeValidator(_no_flag),
    Field(ge=0, le=1 << 20, allow_inf_nan=False),
    Accepts("a number of GiB is accepted, such as 4 or 0.5, without a unit", "GiB"),
]
Milliseconds = Annotated[
    int,
    BeforeValidator(_no_flag),
    Field(gt=0, le=600_000),
    Accepts("a whole number of milliseconds is accepted, 1 to 600000, without a unit", "ms"),
]
Seconds = Annotated[
    float,
    BeforeValidator(_no_flag),
    Field(gt=0, le=3600, allow_inf_nan=False),
    Accepts("a number of seconds is accepted, above 0, at most 3600, without a unit", "s"),
]


class EncoderCacheConfig(BaseModel):
    """The keys of `ec:`, with LMCache's names and units where LMCache has them. Immutable; any thread may read it."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    enabled: Flag = Field(True, description="Whether the cache works at all; if not, the connector is inert.")
    namespace: Namespace = Field(
        None, description="Replaces the computed namespace: the user vouches that all who share it encode alike."
    )
    salt: Text = Field("", description="Any text; entries are shared among engines of the same salt only.")
    epoch: Number = Field(0, description="Raise it to leave all entries so far behind.")
    key_by_engine_version: Flag = Field(
        True, description="Whether the engine's minor version is part of the namespace, as encoders change with it."
    )
    max_local_cpu_size: Annotated[
        Gibibytes,
        Field(gt=0),
        Accepts("a number of GiB above 0 is accepted, such as 4 or 0.5, without a unit", "GiB"),
    ] = Field(2.0, description="Limit of LocalCPU, memory shared by the processes of one engine.")
    local_disk: Folder = Field(
        None, description="Folder of LocalDisk, shared by any number of engines. Unset: under that of the KV part."
    )
    max_local_disk_size: Gibibytes = Field(16.0, description="Limit of LocalDisk, for each engine.")
    cache_policy: Annotated[Literal["LRU"], BeforeValidator(_upper), Accepts("LRU is accepted, no other yet")] = Field(
        "LRU", description="What is evicted first: the least recently used."
    )
    load_deadline_ms: Milliseconds = Field(
        1000, description="Longest wait of a request for all its entries to arrive; then vLLM encodes."
    )
    start_timeout_s: Seconds = Field(10.0, description="Longest wait at start for store process and ranks.")
    store_timeout_s: Seconds = Field(10.0, description="A store process that is silent for so long is replaced.")
    drain_s: Annotated[
        float,
        BeforeValidator(_no_flag),
        Field(ge=0, le=3600, allow_inf_nan=False),
        Accepts("a number of seconds is accepted, 0 to 3600, without a unit", "s"),
    ] = Field(30.0, description="Longest that writes go on after the engine has ended.")
    persist_client_ids: Flag = Field(
        False, description="Whether entries named by a client's uuid may leave LocalCPU: one uuid, one media, for ever."
    )

    @field_validator("max_local_disk_size")
    @classmethod
    def _none_only_without_a_folder(cls, size: float, others: ValidationInfo) -> float:
        if size == 0 and others.data.get("local_disk"):
            raise ValueError("a number of GiB above 0 is accepted; for no LocalDisk say local_disk: null instead")
        return size

    def __repr_args__(self) -> Sequence[tuple[str | None, object]]:
        """Whatever shows a configuration shows no credential. (Pydantic puts this into `repr` and `str`.)"""
        return [(name, _Verbatim(shown(getattr(self, name)))) for name in type(self).model_fields]

    @property
    def max_local_cpu_bytes(self) -> int:
        return int(self.max_local_cpu_size * _GIB)

    @property
    def max_local_disk_bytes(self) -> int:
        return int(self.max_local_disk_size * _GIB)


class _Verbatim(str):
    def __repr__(self) -> str:
        return str(self)


def accepts(key: str) -> Accepts:
    """What `key` accepts. KeyError for an unknown one."""
    found = [each for each in EncoderCacheConfig.model_fields[key].metadata if isinstance(each, Accepts)]
    return found[-1]


def default(key: str) -> object:
    """The value of `key` where nobody says another. KeyError for an unknown one."""
    value: object = EncoderCacheConfig.model_fields[key].default
    return value
