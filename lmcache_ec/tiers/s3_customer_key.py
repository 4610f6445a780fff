# SPDX-License-Identifier: Apache-2.0
"""The key with which S3 encrypts (SSE-C), kept by the bucket's owner: from a file or the environment, never in a URL.

obstore sends it with each GET, HEAD and PUT, as S3 requires, and with nothing else.
"""

import base64
import binascii
import os
from pathlib import Path

from lmcache_ec.tiers.s3_url import CUSTOMER_KEY, S3Options

VARIABLE = "AWS_SSE_CUSTOMER_KEY_BASE64"
"""obstore's name for it."""
_LENGTH = 32


def customer_key(options: S3Options) -> bytes | None:
    """The key of 32 bytes; None if none is configured. ValueError, which does not hold it, states what is wrong."""
    if options.sse != CUSTOMER_KEY:
        return None
    if options.sse_c_key_file is not None:
        return _from_file(options.sse_c_key_file)
    text = os.environ.get(VARIABLE, "")
    if not text:
        raise ValueError(f"S3: sse={CUSTOMER_KEY} needs a key: sse_c_key_file=/path in the URL, or {VARIABLE}")
    return _decoded(text.encode(), VARIABLE)


def _from_file(path: Path) -> bytes:
    what = f"S3: sse_c_key_file {path}"
    try:
        with path.open("rb") as file:
            data = file.read(4096)
    except OSError as error:
        raise ValueError(f"{what} cannot be read: {error.strerror}") from None
    return data if len(data) == _LENGTH else _decoded(data, what)


def _decoded(text: bytes, what: str) -> bytes:
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except binascii.Error:
        key = b""
    if len(key) != _LENGTH:
        raise ValueError(f"{what} holds no key: must be {_LENGTH} bytes, in base64 or, in a file, raw")
    return key
