# SPDX-License-Identifier: Apache-2.0
"""Who named an item: how the front end spells and signs the name, and what may be kept for how long.

vLLM's `identifier` of an item is a digest of its content and processing arguments, unless a client named the item (a
`uuid`) or vLLM numbered it (prefix caching and processor cache both off). All three can be 64 hex digits: a uuid may be
any digest, and vLLM hashes uuids and counters together with processing arguments. So the front end, which knows the
origin, spells them differently (`front_end.py`):

    5f2c…                                   the digest of content, as vLLM spells it
    lmcache-ec/client:<salt>:<uuid>         a client's name; <salt> is a digest of the request's `cache_salt`, or `-`
    lmcache-ec/client#<digest>              the same, hashed by vLLM with processing arguments
    lmcache-ec/counter:…, lmcache-ec/counter#<digest>

It signs what it spelled with a key that only processes of this engine have (`signed`). EngineCore cannot see which
front end made a request, and one without this package passes on what a client wrote: without a signature, an
identifier's spelling does not show who made it.

Ownership: a front end makes names and signatures, EngineCore only reads them. The only state here is the key, which is
made once by the first process of an engine and inherited by the others through the environment.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lmcache_ec.key import MAX_IDENTIFIER_BYTES

CLIENT = "lmcache-ec/client"
COUNTER = "lmcache-ec/counter"
_UNSIGNED = "lmcache-ec/unsigned:"
_NO_SALT = "-"

KEY_VARIABLE = "LMCACHE_EC_FRONT_END_KEY"
"""Name of the environment variable with the signing key: 64 hex digits. Set it by hand only if the front end runs on a
different host from EngineCore."""

SIGNATURE = "lmcache-ec-signature"
"""Key of the signature in a request's `trace_headers`, the only text map that vLLM carries from a front end to the
scheduler for every kind of request. Clients can set only `traceparent` and `tracestate` (vllm/tracing/utils.py)."""

_CONTENT_DIGEST = re.compile(r"[0-9a-f]{64}(?:[0-9a-f]{64})?")
_CODE_BYTES = 16


class Durability(enum.Enum):
    """How far an entry may travel, depending on who named it."""

    PERSISTENT = "any tier"
    LOCAL = "LocalCPU only: the name does not identify the content, or not beyond this engine's life"
    REFUSED = "never cached: the name says nothing about the media, or cannot be stored"


def client_name(uuid: str, cache_salt: str | None = None) -> str:
    """The spelling of a client's `uuid`. Requests with different `cache_salt` never share a name."""
    return f"{CLIENT}:{_salt_digest(cache_salt) if cache_salt else _NO_SALT}:{uuid}"


def counter_name(counter: str) -> str:
    """The spelling of vLLM's own counter of a request."""
    return f"{COUNTER}:{counter}"


def hashed_name(mark: str, digest: str) -> str:
    """The spelling of vLLM's `digest` over a name that carries `mark`. Never equal to a name that was not hashed."""
    return f"{mark}#{digest}"


def mark_of(text: str) -> str:
    """The mark that a name carries: CLIENT, COUNTER, or empty for a digest of content."""
    return next((mark for mark in (COUNTER, CLIENT) if text.startswith(mark)), "")


def client_uuid(identifier: str) -> str:
    """The name as the client wrote it, if the identifier contains it; otherwise the identifier itself.

    A producer's response names items this way, and a consumer's request finds them there by it.
    """
    mark, _, rest = identifier.partition(":")
    return rest.partition(":")[2] if mark == CLIENT else identifier


def _salt_digest(cache_salt: str) -> str:
    return hashlib.sha256(cache_salt.encode(errors="surrogatepass")).hexdigest()[:16]


# ---- signatures


def signed(
    trace_headers: Mapping[str, str] | None, identifiers: Sequence[str], ours: Sequence[bool]
) -> dict[str, str] | None:
    """`trace_headers` with a new signature replacing any old one; None if nothing is left.

    `ours` states for each identifier of the request, in the order of its items, whether this front end spelled it.
    """
    headers = {name: value for name, value in (trace_headers or {}).items() if name != SIGNATURE}
    if any(ours):
        which = "".join("01"[one] for one in ours)
        if code := _code(which, identifiers):
            headers[SIGNATURE] = f"{which}.{code}"
    return headers or None


def signed_identifiers(trace_headers: Mapping[str, str] | None, identifiers: Sequence[str]) -> frozenset[str]:
    """Those of a request's `identifiers` that a front end with this engine's key spelled; none for another signature.

    One hash over all of them: three microseconds for a few, 0.3 ms for a thousand.
    """
    which, _, code = str((trace_headers or {}).get(SIGNATURE, "")).partition(".")
    covered = identifiers[: len(which)]  # a streaming session may have added items since
    if not code or not hmac.compare_digest(code.encode(), _code(which, covered).encode()):
        return frozenset()
    return frozenset(one for one, own in zip(covered, which, strict=True) if own == "1")


def without_signature(trace_headers: Mapping[str, str] | None) -> dict[str, str] | None:
    """Drop the signature once read: vLLM sends these headers back with every token."""
    return signed(trace_headers, (), ())


def ensure_key() -> None:
    """Give this process and its children a key, unless one was inherited. Runs when vLLM loads the plugin."""
    if not os.environ.get(KEY_VARIABLE):
        os.environ[KEY_VARIABLE] = secrets.token_hex(32)


def _code(which: str, identifiers: Sequence[str]) -> str:
    """The signature's code; empty without a key: then nothing is signed and no signature is valid."""
    key = os.environ.get(KEY_VARIABLE, "").encode(errors="surrogateescape")[:64]
    if not key:
        return ""
    state = hashlib.blake2b(which.encode(), digest_size=_CODE_BYTES, key=key)
    for identifier in identifiers:
        text = identifier.encode(errors="surrogatepass")
        state.update(len(text).to_bytes(8, "little"))
        state.update(text)
    return state.hexdigest()


# ---- what follows from a name


@dataclass(frozen=True, slots=True)
class Name:
    """A name under which the cache may hold an item, and how far an entry of that name may travel."""

    text: str
    durability: Durability


@dataclass(frozen=True, slots=True)
class Naming:
    """How this engine treats names. `persist_client_ids`: the operator guarantees that a client's name always means the
    same content. `counts`: vLLM may name items by counters, as prefix caching and processor cache are both off."""

    persist_client_ids: bool = False
    counts: bool = False

    def names(self, identifier: str, is_signed: bool, carries_media: bool) -> tuple[Name, ...]:
        """Names that the cache may hold an item under, the one it is saved under first; empty if it is never cached.

        An unsigned identifier gets a separate name, so that it never collides with what a front end of ours named. An
        item without media asks for a stored entry, which its client may name by the digest of its content, as a
        producer's response does. Nothing is ever saved for such an item. Three microseconds, once per item.
        """
        own = Name(identifier if is_signed else f"{_UNSIGNED}{identifier}", self._durability(identifier, is_signed))
        literal = client_uuid(identifier)
        found = [own]
        if not carries_media and literal != own.text and _CONTENT_DIGEST.fullmatch(literal):
            found.append(Name(literal, Durability.PERSISTENT))
        return tuple(name for name in found if name.durability is not Durability.REFUSED)

    def durability_of(self, name: str) -> Durability:
        """The durability of a name that `names` returned earlier."""
        identifier = identifier_of(name)
        return self._durability(identifier, is_signed=identifier == name)

    def _durability(self, identifier: str, is_signed: bool) -> Durability:
        """With tower LoRA vLLM prepends the adapter's name (`v1/engine/input_processor.py`, `_get_mm_identifier`).
        That name does not identify the adapter's weights, so such an identifier is never signed."""
        mark = mark_of(identifier)
        if mark == COUNTER or not storable(identifier):
            return Durability.REFUSED
        if not is_signed:
            return Durability.REFUSED if self.counts or COUNTER in identifier else Durability.LOCAL
        if mark == CLIENT:
            return Durability.PERSISTENT if self.persist_client_ids else Durability.LOCAL
        return Durability.PERSISTENT


def identifier_of(name: str) -> str:
    """vLLM's identifier of the item saved under `name`."""
    return name.removeprefix(_UNSIGNED)


def names_of(identifier: str) -> tuple[str, str]:
    """All names that an item with this identifier may have been saved under."""
    return identifier, f"{_UNSIGNED}{identifier}"


def stored_names(identifier: str) -> set[str]:
    """All names that a tier may have an item with this identifier under: unsigned items stay in memory."""
    return set(filter(storable, (identifier, client_uuid(identifier))))


def storable(identifier: str) -> bool:
    """Whether the identifier can name an entry at all: not empty, not too long, and valid as UTF-8."""
    try:
        size = len(identifier) if identifier.isascii() else len(identifier.encode())
    except UnicodeEncodeError:
        return False
    return 0 < size <= MAX_IDENTIFIER_BYTES - len(_UNSIGNED)
