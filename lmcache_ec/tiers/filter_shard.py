# SPDX-License-Identifier: Apache-2.0
"""The objects of a catalog as bytes: shards of a filter, and the keys written since.

    header (magic, number of keys) | shard: the bits (presence.shard_of) or delta: 16 bytes a key | 16 bytes of tag

The tag covers the namespace, the object's name, header and payload: xxh3, or keyed BLAKE3 where entries are signed. So
nothing passes that is torn, has another name or is of another namespace, and with a key nothing forged; an older object
of the same name does. Whatever an object holds, it decides only which keys are asked for.

Untrusted input: lengths are checked before anything is read into memory, and no count in it sizes an allocation.
"""

from __future__ import annotations

import struct

import xxhash

from lmcache_ec.presence import KEY_BYTES, MAX_SHARD_BYTES, is_shard
from lmcache_ec.signing import SigningKey

_HEADER = struct.Struct("<8sQ")
_MAGIC = b"LMCECAT1"
_TAG_BYTES = 16
MOST_KEYS = 1 << 16
"""In one delta."""
MAX_OBJECT_BYTES = _HEADER.size + max(MAX_SHARD_BYTES, MOST_KEYS * KEY_BYTES) + _TAG_BYTES


class NoCatalogObject(ValueError):
    """It is torn, forged, has another name, or is not an object of a catalog at all."""


def encode(name: str, keys: int, payload: bytes, signing: SigningKey | None) -> bytes:
    """The object with this name, which begins with its namespace."""
    data = _HEADER.pack(_MAGIC, keys) + payload
    return data + _tag(name, data, signing)


def decode_shard(name: str, data: bytes, signing: SigningKey | None) -> tuple[int, bytes]:
    """The number of keys in it, and its bits."""
    keys, payload = _decode(name, data, signing)
    if not is_shard(payload):
        raise NoCatalogObject(f"{name}: {len(payload)} bytes are not a shard")
    return min(keys, len(payload) * 8), payload


def decode_delta(name: str, data: bytes, signing: SigningKey | None) -> bytes:
    """Its keys, `KEY_BYTES` each."""
    keys, payload = _decode(name, data, signing)
    if len(payload) != keys * KEY_BYTES:
        raise NoCatalogObject(f"{name}: {len(payload)} bytes are not {keys} keys")
    return payload


def _decode(name: str, data: bytes, signing: SigningKey | None) -> tuple[int, bytes]:
    if not _HEADER.size + _TAG_BYTES <= len(data) <= MAX_OBJECT_BYTES:
        raise NoCatalogObject(f"{name}: {len(data)} bytes are not an object of a catalog")
    body, tag = data[:-_TAG_BYTES], data[-_TAG_BYTES:]
    magic, keys = _HEADER.unpack_from(body)
    if magic != _MAGIC or tag != _tag(name, body, signing):
        raise NoCatalogObject(f"{name}: it does not verify")
    return keys, body[_HEADER.size :]


def _tag(name: str, body: bytes, signing: SigningKey | None) -> bytes:
    context = f"lmcache-ec catalog {name}\n".encode()
    if signing is not None:
        return bytes.fromhex(signing.signature(context, body))
    return xxhash.xxh3_128(context + body).digest()
