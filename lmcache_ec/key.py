# SPDX-License-Identifier: Apache-2.0
"""The key of an encoder output: a namespace (which model, encoded how) and an identifier (which media item).

Nothing here blocks, and every function is safe to call from any thread.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

MAX_IDENTIFIER_BYTES = 4096
MAX_NAMESPACE_CHARS = 80
MAX_EPOCH = 1_000_000_000

_SLUG_CHARS = 48
_DIGEST_CHARS = 16
_COMPUTED_CHARS = _SLUG_CHARS + 1 + _DIGEST_CHARS
_NAMESPACE = re.compile(r"[a-z0-9_-][a-z0-9._-]{0,79}")
_OBJECT_NAME = re.compile(rf"({_NAMESPACE.pattern})/([0-9a-f]{{2}})/(\2[0-9a-f]{{62}})\.safetensors")


@dataclass(frozen=True, slots=True)
class EncoderCacheKey:
    """Names one entry in every tier. ValueError for a namespace that `check_namespace` refuses."""

    namespace: str
    identifier: str

    def __post_init__(self) -> None:
        check_namespace(self.namespace)

    @property
    def digest(self) -> bytes:
        """sha256 of the identifier in UTF-8, 32 bytes. UnicodeEncodeError if it cannot be encoded as UTF-8."""
        return identifier_digest(self.identifier)

    @property
    def object_name(self) -> str:
        """`<namespace>/<aa>/<sha256>.safetensors`: no identifier, whatever its text, can escape the root folder."""
        return object_name(self.namespace, self.digest)


@lru_cache(1024)  # computed several times per entry
def identifier_digest(identifier: str) -> bytes:
    """`EncoderCacheKey.digest`; it does not depend on the namespace."""
    return hashlib.sha256(identifier.encode()).digest()


def object_name(namespace: str, digest: bytes) -> str:
    """The name of the object whose key has this `digest`."""
    name = digest.hex()
    return f"{namespace}/{name[:2]}/{name}.safetensors"


class EntryName(Protocol):
    """What a tier finds an entry by: its key, or its object name if the identifier is not known."""

    @property
    def namespace(self) -> str: ...

    @property
    def digest(self) -> bytes: ...

    @property
    def object_name(self) -> str: ...


class ObjectName(NamedTuple):
    """The contents of an object name: the namespace and the digest of its key."""

    namespace: str
    digest: bytes

    @property
    def object_name(self) -> str:
        return object_name(self.namespace, self.digest)


def parse_object_name(name: str) -> ObjectName | None:
    """The inverse of `object_name`; None for anything that it does not produce."""
    match = _OBJECT_NAME.fullmatch(name)
    return ObjectName(match[1], bytes.fromhex(match[3])) if match else None


def namespace_of(model: str, facts: Mapping[str, object]) -> str:
    """A readable slug of `model` (its end, the most telling part of a path), `-`, and 16 hex digits over `facts`.

    `facts` is all that changes an encoder's output and is not in the identifier. TypeError for values that JSON cannot
    represent: text like `<object at 0x7f…>` would give each process its own namespace.
    """
    try:
        canonical = json.dumps(dict(facts), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"namespace facts must be plain JSON: {error}") from error
    slug = re.sub(r"[^a-z0-9._-]+", "-", model.lower()).strip("-.")[-_SLUG_CHARS:].lstrip("-.") or "model"
    return f"{slug}-{hashlib.sha256(canonical.encode()).hexdigest()[:_DIGEST_CHARS]}"


def at_epoch(namespace: str, epoch: int) -> str:
    """The name in this epoch of a namespace made by `namespace_of`: the number is appended, unless it is 0. The result
    never exceeds the longest name of `namespace_of`: the readable beginning is cut to fit."""
    if not epoch:
        return namespace
    named = f"{namespace}-e{epoch}"
    return named[max(0, len(named) - _COMPUTED_CHARS) :].lstrip(".")


def check_namespace(text: str) -> str:
    """Return `text` if it is a valid namespace, a single folder name on any store; else ValueError."""
    if not is_namespace(text):
        raise ValueError(
            f"namespace {text!r}: must be 1 to {MAX_NAMESPACE_CHARS} characters from a-z 0-9 . _ -, "
            "not beginning with a dot"
        )
    return text


def is_namespace(text: str) -> bool:
    """Whether `text` is a valid namespace."""
    return _NAMESPACE.fullmatch(text) is not None
