# SPDX-License-Identifier: Apache-2.0
"""The minimum that the design requires of a read and a write, for comparison; in the order of the tier's own calls.

There is no error handling here, so only a benchmark can use it.
"""

import fcntl
import os
import time

import msgspec
import xxhash

from lmcache_ec.key import EncoderCacheKey

_DIGEST = slice(59, 91)


def get(root: str, key: EncoderCacheKey, place: memoryview) -> None:
    """Read; mark as used, for eviction; check the header byte by byte, and the digest of everything but itself."""
    fd = os.open(f"{root}/{key.object_name}", os.O_RDONLY | os.O_CLOEXEC)
    if os.fstat(fd).st_size != len(place) or os.readv(fd, [place]) != len(place):
        raise RuntimeError("not what was written")
    now = time.time_ns()
    os.utime(fd, ns=(now, now))
    os.close(fd)
    header = bytes(place[:4096])
    fields = msgspec.json.decode(header[8 : header.rfind(b"}") + 1])
    digest = xxhash.xxh3_128(place[: _DIGEST.start])
    digest.update(b"0" * 32)
    digest.update(place[_DIGEST.stop :])
    known = header[:8] + msgspec.json.encode(fields).ljust(4088)
    if header != known or digest.hexdigest().encode() != header[_DIGEST]:
        raise RuntimeError("not what was written")


def put(root: str, key: EncoderCacheKey, data: memoryview) -> None:
    """Check that it is missing; reserve room in the shared account; write a locked file; name it, replacing none."""
    path = f"{root}/{key.object_name}"
    if os.path.exists(path):
        raise RuntimeError("it is there")
    temporary = f"{root}/{key.namespace}/.tmp/{os.urandom(12).hex()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    account = os.open(f"{root}/.usage", os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(account, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.pwrite(account, os.pread(account, 64, 0), 0)
    os.close(account)
    while data:
        data = data[os.write(fd, data) :]
    now = time.time_ns()
    os.utime(fd, ns=(now, now))
    os.link(temporary, path)
    os.unlink(temporary)
    os.close(fd)
