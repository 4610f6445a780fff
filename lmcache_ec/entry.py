# SPDX-License-Identifier: Apache-2.0
"""The entry: the one byte layout of an encoder output, in memory, in files and on remote stores.

A valid safetensors blob: 8 bytes of header length (little endian), a JSON header padded with spaces, the payload.

    {"__metadata__":{"format":"lmcache-ec/1","digest":…,"identifier":…,"namespace":…,"created":…,"producer":…},
     "ec":{"dtype":…,"shape":[rows,width],"data_offsets":[0,bytes]}}

on one line without spaces, exactly like this: the digest has a fixed position, and an equivalent header in any other
form is refused. An entry of another `lmcache-ec/<n>`, or with more fields, is not damaged: see `OtherVersion`. A
payload that is more than rows of an encoder's output has a `"layout":…` after the producer: text that is opaque to this
format and is interpreted by its writer. The digest is xxh3_128 over the whole entry with its own 32 hex digits read as
zeros, so that it covers every byte: length field, header, padding and payload. The payload starts on a 4096-byte
boundary that depends only on the identifier, so that the length of an entry is known before it is fetched.

If entries are signed, `"signature":…` is the last metadata field: 32 hex digits of keyed BLAKE3 over the whole entry
with the digits of digest and signature read as zeros. The digest covers the signature, so damage and forgery can be
told apart. Without a signing key, a signature is not checked.

These functions run in the store process; `room`, `entry_length` and `payload` on any side. They keep no state.
"""

import enum
import hmac
import re
import struct
import time
from dataclasses import dataclass

import msgspec
import xxhash

from lmcache_ec.dtypes import DTYPES
from lmcache_ec.key import EncoderCacheKey, EntryName
from lmcache_ec.positional import positional
from lmcache_ec.signing import SigningKey

FORMAT = "lmcache-ec/1"
MAX_PRODUCER_BYTES = 64
MAX_LAYOUT_CHARS = 224

_BLOCK = 4096
_FIXED_ROOM = 1024  # length field, keys, namespace, numbers, layout, and a producer of 64 control characters
_LENGTH = struct.Struct("<Q")
_DIGEST_AT = _LENGTH.size + len('{"__metadata__":{"format":"lmcache-ec/1","digest":"')
_DIGEST_END = _DIGEST_AT + 32
_NO_DIGEST = "0" * 32
_NO_SIGNATURE = "0" * 32  # there is no room for more, and 128 bits cannot be guessed by trying them on a store
_MAX_COUNT = 2**63 - 1
_MAX_HEADER = 1 << 20  # bytes, for the header of another version
_VERSIONS = re.compile(r"lmcache-ec/[0-9]{1,9}")
_LAYOUT = re.compile(r"[A-Za-z0-9_.,:=+\[\] -]*")  # nothing that JSON escapes


class _Metadata(msgspec.Struct, omit_defaults=True):
    format: str
    digest: str
    identifier: str
    namespace: str
    created: str
    producer: str
    layout: str = ""
    signature: str = ""


class _Tensor(msgspec.Struct):
    dtype: str
    shape: tuple[int, int]
    data_offsets: tuple[int, int]


class _Header(msgspec.Struct):
    """The header; the fields are in the order in which they are written."""

    metadata: _Metadata = msgspec.field(name="__metadata__")
    ec: _Tensor


_decode = msgspec.json.Decoder(_Header).decode
_decode_any = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode
_KNOWN = {kind: {field.encode_name for field in msgspec.structs.fields(kind)} for kind in (_Metadata, _Tensor)}


class Reason(enum.StrEnum):
    """What failed to verify; also the label under which it is counted."""

    LENGTH = "length"
    HEADER = "header"
    FORMAT = "format"
    VERSION = "version"
    IDENTIFIER = "identifier"
    NAMESPACE = "namespace"
    SHAPE = "shape"
    DIGEST = "digest"
    SIGNATURE = "signature"


class EntryError(ValueError):
    """These bytes are not the entry that was asked for."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(f"{reason}: {text}")
        self.reason = reason


class OtherVersion(EntryError):
    """An entry of another version of this format, or with fields that this version does not know.

    Only that version can tell whether it is damaged. It counts as a miss here and is kept: during a rolling update, two
    versions of this package share one store.
    """

    def __init__(self, text: str) -> None:
        super().__init__(Reason.VERSION, text)


@positional
@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape [rows, width] and dtype (by its safetensors name) of one encoder output. ValueError if invalid.

    `layout` is for a payload that is really something else; only its writer interprets it. At most
    MAX_LAYOUT_CHARS letters, digits, spaces and _.,:=+[]-
    """

    rows: int
    width: int
    dtype: str
    layout: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r}: must be one of {', '.join(DTYPES)}")
        if not (0 <= self.rows <= _MAX_COUNT and 0 <= self.width <= _MAX_COUNT and self.nbytes <= _MAX_COUNT):
            raise ValueError(f"shape [{self.rows}, {self.width}] of {self.dtype}: negative, or past 2**63 bytes")
        if len(self.layout) > MAX_LAYOUT_CHARS or not _LAYOUT.fullmatch(self.layout):
            allowed = f"at most {MAX_LAYOUT_CHARS} letters, digits, spaces and _.,:=+[]-"
            raise ValueError(f"layout {self.layout!r}: must be {allowed}")

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return self.rows * self.width * DTYPES[self.dtype].nbytes


@dataclass(frozen=True, slots=True)
class Header:
    """An entry's header fields, not verified. `length` is the length of the whole entry, in bytes."""

    identifier: str
    namespace: str
    spec: TensorSpec
    created: str
    producer: str
    digest: str
    length: int


def room(identifier: str) -> int:
    """Bytes before the payload, the length field included; a multiple of 4096."""
    size = len(identifier) if identifier.isascii() else len(identifier.encode())
    return -(-(_FIXED_ROOM + 6 * size) // _BLOCK) * _BLOCK


def entry_length(identifier: str, spec: TensorSpec) -> int:
    """Bytes of the whole entry."""
    return room(identifier) + spec.nbytes


def payload(buffer: memoryview, identifier: str) -> memoryview:
    """The tensor's bytes within the entry's `buffer`: a view, no copy."""
    return buffer[room(identifier) :]


def seal(
    buffer: memoryview, key: EncoderCacheKey, spec: TensorSpec, producer: str, signing: SigningKey | None = None
) -> None:
    """Write the header in front of the payload already in `buffer`; the entry is then complete.

    `buffer` is writable and exactly `entry_length` bytes long. `producer` names the writer, for human readers, in at
    most 64 bytes of UTF-8. ValueError otherwise, with nothing written.
    """
    if len(buffer) != entry_length(key.identifier, spec):
        raise ValueError(f"buffer of {len(buffer)} bytes for an entry of {entry_length(key.identifier, spec)}")
    if len(producer.encode()) > MAX_PRODUCER_BYTES:
        raise ValueError(f"producer {producer!r}: at most {MAX_PRODUCER_BYTES} bytes of UTF-8")
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    metadata = _Metadata(FORMAT, _NO_DIGEST, key.identifier, key.namespace, created, producer, spec.layout)
    fields = _Header(metadata, _Tensor(spec.dtype, (spec.rows, spec.width), (0, spec.nbytes)))
    if signing is not None:
        metadata.signature = _signature(fields, buffer, room(key.identifier), signing)
    header = _padded(fields, room(key.identifier))
    buffer[: len(header)] = header
    buffer[_DIGEST_AT:_DIGEST_END] = _digest(buffer)


def verify(buffer: memoryview, key: EncoderCacheKey, signing: SigningKey | None = None) -> TensorSpec:
    """The spec of the tensor in `buffer`, if that is exactly the sealed entry of `key`, and signed with `signing` if
    that is given.

    OtherVersion for an entry that this version cannot judge; EntryError for all else. Never OtherVersion with
    `signing`: anyone could claim a version, and one that signs entries differently derives another id from the key.
    """
    try:
        return _verified(buffer, key, signing)
    except EntryError:
        if signing is None and (version := _other_version(buffer)):
            raise OtherVersion(version) from None
        raise


def verify_named(buffer: memoryview, name: EntryName, signing: SigningKey | None = None) -> Header:
    """Like `verify`, if only the digest of the key is known: the header must have the identifier for that digest."""
    try:
        header = _header(buffer)
        try:
            key = EncoderCacheKey(name.namespace, header.identifier)
            same = key.digest == name.digest
        except UnicodeEncodeError:
            same = False
        if not same:
            raise EntryError(Reason.IDENTIFIER, "another identifier than its name was made from")
        _verified(buffer, key, signing)
        return header
    except EntryError:
        if signing is None and (version := _other_version(buffer)):
            raise OtherVersion(version) from None
        raise


def header_bytes(start: memoryview) -> int:
    """Bytes of an entry's header, its length field included, by its first eight bytes. EntryError if invalid."""
    if len(start) < _LENGTH.size:
        raise EntryError(Reason.LENGTH, f"{len(start)} bytes are not an entry")
    (given,) = _LENGTH.unpack_from(start)
    if given > _MAX_HEADER:
        raise EntryError(Reason.HEADER, f"header of {given} bytes, longer than {_MAX_HEADER}")
    return int(_LENGTH.size + given)


def read_header(start: memoryview) -> Header:
    """The header of the entry that begins with `start`. Its first `header_bytes` bytes are enough.

    OtherVersion for an entry of another version; EntryError for all else.
    """
    try:
        return _header(start)
    except EntryError:
        if version := _other_version(start):
            raise OtherVersion(version) from None
        raise


def _header(start: memoryview) -> Header:
    size = header_bytes(start)
    if len(start) < size:
        raise EntryError(Reason.LENGTH, f"{len(start)} bytes, the header alone takes {size}")
    fields = _decoded(bytes(start[:size]))
    metadata = fields.metadata
    if metadata.format != FORMAT:
        raise EntryError(Reason.FORMAT, f"not {FORMAT}")
    spec = _spec(fields)
    described = metadata.identifier, metadata.namespace, spec, metadata.created, metadata.producer, metadata.digest
    return Header(*described, size + spec.nbytes)


def _decoded(header: bytes) -> _Header:
    try:
        return _decode(header[_LENGTH.size : header.rfind(b"}") + 1])
    except (ValueError, RecursionError) as error:
        raise EntryError(Reason.HEADER, "not JSON as it is written") from error


def _spec(fields: _Header) -> TensorSpec:
    try:
        return TensorSpec(*fields.ec.shape, fields.ec.dtype, fields.metadata.layout)
    except ValueError as error:
        raise EntryError(Reason.SHAPE, "there can be no such tensor") from error


def _verified(buffer: memoryview, key: EncoderCacheKey, signing: SigningKey | None) -> TensorSpec:
    size = room(key.identifier)
    if len(buffer) < size:
        raise EntryError(Reason.LENGTH, f"{len(buffer)} bytes, the header alone takes {size}")
    (given,) = _LENGTH.unpack_from(buffer)
    if given != size - _LENGTH.size:
        raise EntryError(Reason.HEADER, f"header of {given} bytes, expected {size - _LENGTH.size}")
    header = bytes(buffer[:size])
    fields = _decoded(header)
    metadata, tensor = fields.metadata, fields.ec
    if metadata.format != FORMAT:
        raise EntryError(Reason.FORMAT, f"not {FORMAT}")
    if metadata.identifier != key.identifier:
        raise EntryError(Reason.IDENTIFIER, "another identifier than the one asked for")
    if metadata.namespace != key.namespace:
        raise EntryError(Reason.NAMESPACE, "another namespace than the one asked for")
    spec = _spec(fields)
    if tensor.data_offsets != (0, spec.nbytes) or header != _padded(fields, size):
        raise EntryError(Reason.HEADER, "not in the form in which it is written")
    if len(buffer) != size + spec.nbytes:
        raise EntryError(Reason.LENGTH, f"{len(buffer)} bytes, its header says {size + spec.nbytes}")
    if header[_DIGEST_AT:_DIGEST_END] != _digest(buffer):
        raise EntryError(Reason.DIGEST, f"the bytes are not those that were sealed with {metadata.digest}")
    if signing is not None:
        if not metadata.signature:
            raise EntryError(Reason.SIGNATURE, f"it is not signed, but key {signing.id} is required")
        given = metadata.signature.encode()
        if not hmac.compare_digest(given, _signature(fields, buffer, size, signing).encode()):
            raise EntryError(Reason.SIGNATURE, f"not a signature with key {signing.id}")
    return spec


def _other_version(buffer: memoryview) -> str:
    """Evidence that an entry, whole or truncated, is of another version; empty if there is none."""
    if len(buffer) < _LENGTH.size:
        return ""
    (given,) = _LENGTH.unpack_from(buffer)
    if given > min(len(buffer) - _LENGTH.size, _MAX_HEADER):
        return ""
    header = bytes(buffer[_LENGTH.size : _LENGTH.size + given])
    try:
        fields = _decode_any(header)
        metadata = _decode_any(fields["__metadata__"])
        written = msgspec.json.decode(metadata["format"], type=str)
        if written != FORMAT:
            return f"written as {written}" if _VERSIONS.fullmatch(written) else ""
        _decode(header)
        unknown = fields.keys() - {"__metadata__", "ec"} | metadata.keys() - _KNOWN[_Metadata]
        unknown |= _decode_any(fields["ec"]).keys() - _KNOWN[_Tensor]
    except (KeyError, ValueError, RecursionError):
        return ""
    return f"it has {len(unknown)} fields that {FORMAT} does not know here" if unknown else ""


def _padded(header: _Header, size: int) -> bytes:
    """Length field, header and padding, `size` bytes; more if the header does not fit."""
    return _LENGTH.pack(size - _LENGTH.size) + _encode(header).ljust(size - _LENGTH.size)


def _signature(fields: _Header, buffer: memoryview, size: int, signing: SigningKey) -> str:
    """Signature over the entry made of these fields and the payload in `buffer`, ignoring its digest and signature."""
    metadata = msgspec.structs.replace(fields.metadata, digest=_NO_DIGEST, signature=_NO_SIGNATURE)
    return signing.signature(_padded(_Header(metadata, fields.ec), size), buffer[size:])


def _digest(buffer: memoryview) -> bytes:
    """The 32 hex digits over a whole entry, ignoring those already in it. The payload is not copied."""
    state = xxhash.xxh3_128(buffer[:_DIGEST_AT])
    state.update(_NO_DIGEST.encode())
    state.update(buffer[_DIGEST_END:])
    return state.hexdigest().encode()
