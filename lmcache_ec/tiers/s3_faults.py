# SPDX-License-Identifier: Apache-2.0
"""What went wrong with S3, in a text that holds no secret.

Only S3's error code, the HTTP status and the kind of failure are taken from obstore's and boto3's error texts: the rest
may quote the request, including access key and signature.
"""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from lmcache_ec.tiers.base import TierError, TierNotReady, TierUnreachable, WritesRefused


class OfAnotherKey(TierError):
    """An object exists, but was perhaps written with another SSE-C key than ours."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The parts of an obstore error that may be passed on."""

    number: int  # errno
    status: str  # HTTP, or ""
    code: str  # S3's, or ""
    region: str  # that S3 names as the right one, or ""
    kind: str  # of failure, where there was no answer

    @classmethod
    def of(cls, error: Exception) -> Self:
        text = str(error)
        if status := _first(r"status code: (\d{3})", text):
            number = errno.EACCES if status in ("401", "403") else errno.EIO
            code = _first(r"<Code>([A-Za-z]{1,64})</Code>", text)
            return cls(number, status, code, _first(r"<Region>([a-z0-9-]{1,64})</Region>", text), "")
        if "redirect without LOCATION" in text:
            return cls(errno.EIO, "301", "", "", "")
        for sign, number, kind in _KINDS:
            if sign in text:
                return cls(number, "", "", "", kind)
        return cls(errno.EIO, "", "", "", type(error).__name__)

    @property
    def not_ready(self) -> bool:
        """It answers that it cannot serve this yet, or that there are too many requests."""
        return (self.status >= "500" and self.status != "501") or self.status == "429"

    @property
    def unconditional(self) -> bool:
        """Perhaps it does not support conditional writes: it refuses a header, or a request that has one."""
        return self.status in ("400", "501")

    @property
    def of_another_key(self) -> bool:
        """Perhaps the object was written with another SSE-C key: the answer names no other problem."""
        return self.status in ("400", "403") and self.code in ("", "AccessDenied", *_WANT_A_KEY)

    def error(self, text: str, *, writes: bool = False, keyed: bool = False) -> TierError:
        """As a tier raises it. A refusal of a request that `writes` implies nothing about reading; with `keyed`, an
        error that the key may cause concerns only that object."""
        if keyed and self.of_another_key:
            return OfAnotherKey(self.number, f"{text} (was it written with another key than that of sse-c?)")
        if not writes and self.code in _WANT_A_KEY:
            text = f"{text} (was it written with a key, sse=sse-c?)"
        if self.kind or self.code in _BAD_REGION or self.code in _NOBODY_COMES_IN or self.status[:1] == "3":
            return TierUnreachable(self.number, text)
        if self.not_ready:
            return TierNotReady(errno.EAGAIN, text)
        if self.status in ("401", "403", "405", "507") or self.code == "QuotaExceeded":
            return (WritesRefused if writes else TierUnreachable)(self.number, text)
        return TierError(self.number, text)

    def __str__(self) -> str:
        return self.kind or f"HTTP {self.status} {self.code}".strip()

    def advice(self, *, bucket: str, region: str, tls: bool) -> str:
        """What is wrong with a remote that was just opened, and the remedy."""
        if self.kind:
            return f"{self.kind}{_WHAT_TO_DO.get(self.kind, '')}"
        if self.code in _BAD_REGION or self.status in ("301", "307", "308"):
            answer = f"its server says {self.region}" if self.region else "its server does not say which one is right"
            return f"wrong region: the bucket is not in {region}, {answer}; give region=… in the URL, or set AWS_REGION"
        if self.code in _ADVICE or self.status == "403":
            return f"{_ADVICE.get(self.code, _ADVICE['AccessDenied'])} ({self})".replace("{bucket}", bucket)
        if self.status == "400" and not tls:
            return "HTTP 400: perhaps it expects TLS: then begin the endpoint with https://, or set tls=true"
        if self.not_ready:
            return f"{self}: server error; retry later"
        return f"{self}: it does not answer like S3"


_WANT_A_KEY = ("InvalidArgument", "InvalidRequest")
"""Stores' answers to a read without the key, or with one for an object that has none."""
_UNTRUSTED = "TLS: its certificate is not trusted"
_NO_TLS = "TLS: it does not answer with TLS"
_SILENT = "no answer in time"
_REFUSED = "it refuses connections"
_UNKNOWN_HOST = "its name cannot be resolved"
_KINDS = (
    ("InvalidCertificate", errno.EPROTO, _UNTRUSTED),
    ("InvalidContentType", errno.EPROTO, _NO_TLS),
    ("kind: Timeout", errno.ETIMEDOUT, _SILENT),
    ("TimedOut", errno.ETIMEDOUT, _SILENT),
    ("ConnectionRefused", errno.ECONNREFUSED, _REFUSED),
    ("dns error", errno.EHOSTUNREACH, _UNKNOWN_HOST),
    ("External AWS credential provider", errno.EACCES, "credentials could not be renewed"),
    ("kind: Connect", errno.EHOSTUNREACH, "it cannot be reached"),
    ("HttpError", errno.ECONNRESET, "the connection broke"),
    ("reqwest::Error", errno.ECONNRESET, "the connection broke"),
)
_WHAT_TO_DO = {
    _UNTRUSTED: "; name the authority's certificate with ca_bundle=/path",
    _NO_TLS: "; if it does not use TLS, begin the endpoint with http://, or set tls=false",
    _SILENT: "; check endpoint, network and proxy",
    _REFUSED: "; check the endpoint, and whether the server runs",
    _UNKNOWN_HOST: "; check endpoint and region",
}
_BAD_REGION = {"AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"}
_BAD_CREDENTIALS = "credentials refused: check which ones boto3 finds here, and that they are for this store"
_NOBODY_COMES_IN = {
    *("NoSuchBucket", "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken"),
    "RequestTimeTooSkewed",
}
_ADVICE = {
    "NoSuchBucket": "bucket {bucket} does not exist: create it, or correct the URL",
    "InvalidAccessKeyId": _BAD_CREDENTIALS,
    "SignatureDoesNotMatch": _BAD_CREDENTIALS,
    "InvalidToken": _BAD_CREDENTIALS,
    "ExpiredToken": _BAD_CREDENTIALS,
    "AccessDenied": "access denied: needed are s3:ListBucket on the bucket and, on its objects, s3:GetObject, "
    "s3:DeleteObject and (except for consumers) s3:PutObject",
    "RequestTimeTooSkewed": "clock skew: this machine's clock and the server's are too far apart",
}


def summary(error: Exception) -> str:
    """The parts of a boto3 error that may be passed on: its class name and S3's code, no text."""
    response = getattr(error, "response", {})
    return f"{type(error).__name__} {response.get('Error', {}).get('Code', '')}".strip()


@contextmanager
def reported(action: str, *, writes: bool = False, keyed: bool = False) -> Iterator[None]:
    """Turns an error within into a TierError that describes it. `writes`: it was a write; `keyed`: of an object that
    has its own key, see `Fault.error`."""
    from botocore.exceptions import BotoCoreError, ClientError
    from obstore.exceptions import BaseError

    try:
        yield
    except TierError:
        raise
    except (BotoCoreError, ClientError) as error:
        raise TierError(errno.EIO, f"s3 tier could not {action}: {summary(error)}") from None
    except (BaseError, OSError) as error:
        fault = Fault.of(error)
        raise fault.error(f"s3 tier could not {action}: {fault}", writes=writes, keyed=keyed) from None


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""
