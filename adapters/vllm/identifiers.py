# SPDX-License-Identifier: Apache-2.0
"""Who named an item: how the front end spells it, how it vouches for the spelling, and what may be kept for how long.

vLLM's `identifier` of an item is a digest of its content and processing arguments, unless a client named the item (a
`uuid`) or vLLM counted it (prefix caching and processor cache both off). All three can be 64 hex digits: a uuid may be
any digest, and vLLM hashes uuids and counters together with processing arguments. So the front end, which knows, spells
them apart (`front_end.py`):

    5f2c…                                   the digest of content, as vLLM spells it
    lmcache-ec/client:<salt>:<uuid>         a client's name; <salt> is a digest of the request's `cache_salt`, or `-`
    lmcache-ec/client#<digest>              the same, hashed by vLLM with processing arguments
    lmcache-ec/counter:…, lmcache-ec/counter#<digest>

It signs what it spelled with a key that only processes of this engine have (`signed`). EngineCore cannot see which
front end made a request, and one without this package passes on what a client wrote: without a signature an identifier
says nothing about who made it, whatever it looks like.

Who owns what: a front end makes names and signatures, EngineCore only reads them; nothing here keeps state but the key,
which is made once by the first process of an engine and inherited by the others through the environment.
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
"""Names the environment variable with the key of signatures: 64 hex digits. To be set by hand only where the front end
runs on another host than EngineCore."""

SIGNATURE = "lmcache-ec-signature"
"""Names the signature in a request's `trace_headers`, the one map of text that vLLM carries from a front end to the
scheduler for every kind of request. A client's own are `traceparent` and `tracestate` alone (vllm/tracing/utils.py)."""

_CONTENT_DIGEST = re.compile(r"[0-9a-f]{64}(?:[0-9a-f]{64})?")
_CODE_BYTES = 16


class Durability(enum.Enum):
    """How far an entry may travel, judged by who named it."""

    PERSISTENT = "any tier"
    LOCAL = "LocalCPU only: the name does not identify the content, or not beyond this engine's life"
    REFUSED = "never cached: the name says nothing about the media, or cannot be stored"


def client_name(uuid: str, cache_salt: str | None = None) -> str:
    """How a client's `uuid` is spelled. Requests of different `cache_salt` never share a name."""
    return f"{CLIENT}:{_salt_digest(cache_salt) if cache_salt else _NO_SALT}:{uuid}"


def counter_name(counter: str) -> str:
    """How vLLM's own counter of a request is spelled."""
    return f"{COUNTER}:{counter}"


def hashed_name(mark: str, digest: str) -> str:
    """How vLLM's `digest` over a name that carries `mark` is spelled. Never equal to a name that was not hashed."""
    return f"{mark}#{digest}"


def mark_of(text: str) -> str:
    """The mark that a name carries: CLIENT, COUNTER, or nothing for a digest of content."""
    return next((mark for mark in (COUNTER, CLIENT) if text.startswith(mark)), "")


def client_uuid(identifier: str) -> str:
    """The name as the client wrote it, where it can be had from the identifier; otherwise the identifier itself.

    This is how a producer's answer names an item, and how the request of a consumer finds it there.
    """
    mark, _, rest = identifier.partition(":")
    return rest.partition(":")[2] if mark == CLIENT else identifier


def _salt_digest(cache_salt: str) -> str:
    return hashlib.sha256(cache_salt.encode(errors="surrogatepass")).hexdigest()[:16]


# ---- signatures


def signed(
    trace_headers: Mapping[str, str] | None, identifiers: Sequence[str], ours: Sequence[bool]
) -> dict[str, str] | None:
    """`trace_headers` with a signature in place of any that was there; None if nothing is left.

    `ours` says of each identifier of the request, in the order of its items, whether this front end spelled it.
    """
    headers = {name: value for name, value in (trace_headers or {}).items() if name != SIGNATURE}
    if any(ours):
        which = "".join("01"[one] for one in ours)
        if code := _code(which, identifiers):
            headers[SIGNATURE] = f"{which}.{code}"
    return headers or None


def signed_identifiers(trace_headers: Mapping[str, str] | None, identifiers: Sequence[str]) -> frozenset[str]:
    """Which of a request's `identifiers` a front end with this engine's key spelled; none for any other signature.

    One hash over all of them: three microseconds for a few, 0.3 ms for a thousand.
    """
    which, _, code = str((trace_headers or {}).get(SIGNATURE, "")).partition(".")
    covered = identifiers[: len(which)]  # a streaming session may have added items since
    if not code or not hmac.compare_digest(code.encode(), _code(which, covered).encode()):
        return frozenset()
    return frozenset(one for one, own in zip(covered, which, strict=True) if own == "1")


def without_signature(trace_headers: Mapping[str, str] | None) -> dict[str, str] | None:
    """vLLM sends these headers back with every token: what has been read need not go with them."""
    return signed(trace_headers, (), ())


def ensure_key() -> None:
    """Give this process, and those that it starts, a key if it has inherited none. Runs when vLLM loads the plugin."""
    if not os.environ.get(KEY_VARIABLE):
        os.environ[KEY_VARIABLE] = secrets.token_hex(32)


def _code(which: str, identifiers: Sequence[str]) -> str:
    """Empty without a key: nothing is signed then, and nothing covered."""
    key = os.environ.get(KEY_VARIABLE, "").encode(errors="surrogateescape")[:64]
    if not key:
        return ""
    state = hashlib.blake2b(which.encode(), digest_size=_CODE_BYTES, key=key)
    for identifier in identifiers:
        text = identifier.encode(errors="surrogatepass")
        state.update(len(text).to_bytes(8, "little"))
        state.update(text)
    return state.hexdigest()


# ---- what follows from it


@dataclass(frozen=True, slots=True)
class Name:
    """A name under which the cache may hold an item, and how far an entry of that name may travel."""

    text: str
    durability: Durability


@dataclass(frozen=True, slots=True)
class Naming:
    """How this engine treats names. `persist_client_ids`: the operator vouches that a client's name means one content
    for ever. `counts`: vLLM may name items by counters, because prefix caching and processor cache are both off."""

    persist_client_ids: bool = False
    counts: bool = False

    def names(self, identifier: str, is_signed: bool, carries_media: bool) -> tuple[Name, ...]:
        """What the cache may hold an item under, the name that it is saved under first; nothing if it is never cached.

        What nobody vouches for has a name of its own, so that it never meets what a front end of ours named. An item
        without media asks for what is stored, and its client may name that by the digest of its content, as a
        producer's answer does. Nothing is ever saved for such an item. Three microseconds, once for each item.
        """
        own = Name(identifier if is_signed else f"{_UNSIGNED}{identifier}", self._durability(identifier, is_signed))
        literal = client_uuid(identifier)
        found = [own]
        if not carries_media and literal != own.text and _CONTENT_DIGEST.fullmatch(literal):
            found.append(Name(literal, Durability.PERSISTENT))
        return tuple(name for name in found if name.durability is not Durability.REFUSED)

    def durability_of(self, name: str) -> Durability:
        """Of a name that `names` gave once."""
        identifier = identifier_of(name)
        return self._durability(identifier, is_signed=identifier == name)

    def _durability(self, identifier: str, is_signed: bool) -> Durability:
        """With tower LoRA vLLM puts the adapter's name in front (`v1/engine/input_processor.py`, `_get_mm_identifier`).
        That does not identify its weights, so such an identifier is never signed."""
        mark = mark_of(identifier)
        if mark == COUNTER or not storable(identifier):
            return Durability.REFUSED
        if not is_signed:
            return Durability.REFUSED if self.counts or COUNTER in identifier else Durability.LOCAL
        if mark == CLIENT:
            return Durability.PERSISTENT if self.persist_client_ids else Durability.LOCAL
        return Durability.PERSISTENT


def identifier_of(name: str) -> str:
    """vLLM's identifier of what was saved under `name`."""
    return name.removeprefix(_UNSIGNED)


def names_of(identifier: str) -> tuple[str, str]:
    """All names that an item of this identifier may have been saved under."""
    return identifier, f"{_UNSIGNED}{identifier}"


def stored_names(identifier: str) -> set[str]:
    """All names that a tier may have an item of this identifier under: what is not signed stays in memory."""
    return set(filter(storable, (identifier, client_uuid(identifier))))


def storable(identifier: str) -> bool:
    """Whether an entry can be named by it at all: by its length, and as UTF-8."""
    try:
        size = len(identifier) if identifier.isascii() else len(identifier.encode())
    except UnicodeEncodeError:
        return False
    return 0 < size <= MAX_IDENTIFIER_BYTES - len(_UNSIGNED)
