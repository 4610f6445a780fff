# SPDX-License-Identifier: Apache-2.0
"""The key that entries are signed with (`ec.signing_key_file`), so that each proves who wrote it.

A signature is keyed BLAKE3 over the whole entry, see entry.py. Signing only the entry's digest is not enough: xxh3 is
not a cryptographic hash, and another payload with the same digest can be made.

The key has a public id, which ends every namespace: engines with different keys never share entries, nor do engines
that sign with those that do not. Key and id are derived from the file's bytes with separate contexts, so that neither
the id nor another program's use of the same file reveals anything about the key.

Nothing here keeps state. `read_key` blocks as long as the file system does; `signature` runs in the store process.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec

from lmcache_ec.key import MAX_NAMESPACE_CHARS

MIN_KEY_BYTES = 32
_MAX_KEY_BYTES = 64 << 10
_SIGNS = "lmcache-ec 2026-11-29 signature of an entry of lmcache-ec/1"
_NAMES = "lmcache-ec 2026-11-29 public id of a key for entries of lmcache-ec/1"
_ID_CHARS = 12


class SigningKey(msgspec.Struct, frozen=True, array_like=True):
    """A secret of 32 bytes and its public id. Immutable; sent to a store process in its first message, as is."""

    secret: bytes
    id: str

    def __repr__(self) -> str:
        return f"SigningKey({self.id})"

    def namespace(self, namespace: str) -> str:
        """The name of `namespace` under this key; a name that already ends with the id is unchanged. ValueError if it
        is too long for that."""
        if self.signs(namespace):
            return namespace
        if len(namespace) + 1 + _ID_CHARS > MAX_NAMESPACE_CHARS:
            longest = MAX_NAMESPACE_CHARS - 1 - _ID_CHARS
            raise ValueError(
                f"namespace {namespace!r}: at most {longest} characters are accepted with signing_key_file, "
                f"which appends the id of the key"
            )
        return f"{namespace}-{self.id}"

    def signs(self, namespace: str) -> bool:
        """Whether `namespace` ends with this key's id."""
        return namespace.endswith(f"-{self.id}")

    def signature(self, *parts: bytes | memoryview) -> str:
        """32 hex digits over the concatenated bytes of `parts`. They are not copied."""
        from blake3 import blake3

        state = blake3(key=self.secret)
        for part in parts:
            state.update(part)
        return state.hexdigest(length=16)


def read_key(path: Path) -> SigningKey:
    """The key in a file: all its bytes, at least 32, as they are.

    The ValueError names the file and the remedy, and shows none of its content.
    """
    try:
        from blake3 import blake3
    except ImportError:
        raise ValueError("the package blake3 is not installed: pip install 'lmcache-ec[signing]'") from None
    try:
        data = _read(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    secret = blake3(data, derive_key_context=_SIGNS).digest()
    return SigningKey(secret, blake3(data, derive_key_context=_NAMES).hexdigest()[:_ID_CHARS])


def _read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # O_NONBLOCK: does not wait for a pipe's writer
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a regular file")
        if status.st_uid not in (0, os.geteuid()):
            raise ValueError(
                f"{path} belongs to user {status.st_uid}, who can replace it: "
                f"make user {os.geteuid()} or root its owner"
            )
        if (mode := stat.S_IMODE(status.st_mode)) & 0o027:
            raise ValueError(
                f"{path} has mode {mode:04o}, so others can read or replace it: chmod 0600, or 0440 for a group "
                f"(defaultMode: 0440 of a Kubernetes Secret)"
            )
        data = file.read(_MAX_KEY_BYTES + 1)
    if not MIN_KEY_BYTES <= len(data) <= _MAX_KEY_BYTES:
        size = f"more than {_MAX_KEY_BYTES}" if len(data) > _MAX_KEY_BYTES else len(data)
        raise ValueError(
            f"{path} holds {size} bytes: must hold {MIN_KEY_BYTES} to {_MAX_KEY_BYTES} random ones: "
            f"openssl rand -hex -out {path} 32"
        )
    return data
