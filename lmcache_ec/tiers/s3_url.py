# SPDX-License-Identifier: Apache-2.0
"""Where an S3 remote is: parses its URL. Nothing here imports boto3 or obstore, or makes requests."""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from lmcache_ec.mask import masked_name

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*(?:/[A-Za-z0-9_=-][A-Za-z0-9._=-]*)*")
_HOST = re.compile(r"[A-Za-z0-9._-]+(?::[0-9]{1,5})?|\[[0-9a-fA-F:.]+\](?::[0-9]{1,5})?")
_AWS_HOST = re.compile(r"(?P<bucket>.+)\.s3(?:[.-](?P<region>[a-z0-9-]+))?\.amazonaws\.com(?:\.cn)?")
CUSTOMER_KEY = "sse-c"
_ENCRYPTIONS = ("AES256", "aws:kms", "aws:kms:dsse", CUSTOMER_KEY)
_CREDENTIALS = "S3 URL with credentials: use the environment, a profile or a role instead"


@dataclass(frozen=True, slots=True)
class S3Options:
    """A bucket, the prefix in it, and how to reach it. Made by `s3_options`; its repr holds no secret."""

    bucket: str
    prefix: str = ""
    region: str | None = None  # None: as boto3 finds it, else us-east-1
    endpoint: str | None = None  # http(s)://host[:port] of another store; None: as boto3 finds it, else AWS
    tls: bool = True  # for an address that boto3 finds; an endpoint states it by its scheme
    path_style: bool | None = None  # None: as boto3 decides, which is path style for another store's endpoint
    ca_bundle: Path | None = None  # PEM, trusted besides the system's; None: as boto3 finds it
    profile: str | None = None
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    read_only: bool = False  # nothing is ever written
    sse: str | None = None  # server-side encryption requested with each write
    sse_kms_key_id: str | None = None
    sse_c_key_file: Path | None = None  # the key of sse-c; None: in the environment, see s3_customer_key.py
    storage_class: str | None = None
    requester_pays: bool = False
    catalog: bool = False  # what is there is read from a catalog in the bucket, see s3_catalog.py


def s3_options(url: str, extra_config: Mapping[str, object] | None = None) -> S3Options:
    """Parse an S3 URL, and the `extra_config` of LMCache that belongs to it. ValueError states what is not accepted.

    - `s3://bucket/prefix?endpoint=…&region=…&path_style=true&tls=false&ca_bundle=/path&profile=…`, all but the bucket
      optional; `endpoint` with or without `http://` or `https://`
    - with `read_only=true` nothing is ever written; `sse=AES256`, `sse=aws:kms` and `sse_kms_key_id=…`,
      `storage_class=…` go with each write, `requester_pays=true` with each request
    - with `catalog=true` one replica lists for all, see docs/catalog.md
    - `sse_c_key_file=/path`, or `sse=sse-c` and a key in the environment: encrypted with a key of the user's own
    - as LMCache writes it, bucket and host in one: `s3://bucket.s3.eu-west-1.amazonaws.com`, `s3://bucket.host:9000`,
      or without a port if `extra_config` has `s3_region`

    From `extra_config`: `s3_region`, `disable_tls`, `aws_access_key_id`, `aws_secret_access_key`; the URL has priority.
    """
    extra = extra_config or {}
    if "@" in url:
        raise ValueError(_CREDENTIALS)
    parts = urlsplit(url)
    asked = _query(parts.query)
    tls = asked.get("tls", not extra.get("disable_tls", False))
    bucket, region, host = _bucket_and_host(parts.netloc, "s3_region" in extra and "endpoint" not in asked)
    endpoint = asked.get("endpoint", host)
    prefix = parts.path.strip("/")
    if parts.scheme != "s3" or parts.fragment or not _BUCKET.fullmatch(bucket):
        raise ValueError("S3 URL: must be s3://bucket/prefix, with a bucket of 3 to 63 characters a-z 0-9 . -")
    if bucket.endswith("--x-s3") or extra.get("s3_enable_s3express"):
        raise ValueError("S3 Express directory buckets are not supported: name a general-purpose bucket")
    if prefix and not _PREFIX.fullmatch(prefix):
        raise ValueError("S3 URL: the prefix may contain A-Z a-z 0-9 . _ = - and single slashes")
    access_key_id, secret_access_key = extra.get("aws_access_key_id"), extra.get("aws_secret_access_key")
    if bool(access_key_id) != bool(secret_access_key):
        raise ValueError("aws_access_key_id and aws_secret_access_key must be given together or not at all")
    if asked.get("sse", "AES256") not in _ENCRYPTIONS:
        raise ValueError(f"S3 URL: sse must be one of {', '.join(_ENCRYPTIONS)}")
    if "sse_kms_key_id" in asked and not asked.get("sse", "").startswith("aws:kms"):
        raise ValueError("S3 URL: sse_kms_key_id belongs to sse=aws:kms")
    if "sse_c_key_file" in asked and asked.setdefault("sse", CUSTOMER_KEY) != CUSTOMER_KEY:
        raise ValueError(f"S3 URL: sse_c_key_file belongs to sse={CUSTOMER_KEY}")
    ca_bundle = Path(asked["ca_bundle"]) if "ca_bundle" in asked else None
    if ca_bundle is not None and not ca_bundle.is_file():
        raise ValueError(f"S3 URL: ca_bundle {ca_bundle} is not a file")
    return S3Options(
        bucket=bucket,
        prefix=prefix,
        region=asked.get("region", region or _text(extra.get("s3_region"))),
        endpoint=None if endpoint is None else _endpoint(endpoint, tls, contradicts="tls" in asked),
        tls=tls,
        path_style=asked.get("path_style", False if host else None),
        ca_bundle=ca_bundle,
        profile=asked.get("profile"),
        access_key_id=_text(access_key_id),
        secret_access_key=_text(secret_access_key),
        read_only=asked.get("read_only", False),
        sse=asked.get("sse"),
        sse_kms_key_id=asked.get("sse_kms_key_id"),
        sse_c_key_file=asked.get("sse_c_key_file"),
        storage_class=asked.get("storage_class"),
        requester_pays=asked.get("requester_pays", False),
        catalog=asked.get("catalog", False),
    )


def _bucket_and_host(netloc: str, lmcache: bool) -> tuple[str, str | None, str | None]:
    """Bucket, region and host in the first part of an S3 URL; without a host it means AWS or our endpoint."""
    aws = _AWS_HOST.fullmatch(netloc)
    if aws:
        return aws["bucket"], aws["region"], None
    if netloc.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        raise ValueError("S3 URL: a host of AWS must be bucket.s3.region.amazonaws.com; put others into endpoint=…")
    if ":" in netloc or (lmcache and "." in netloc):
        bucket, _, host = netloc.partition(".")
        return bucket, None, host or None
    return netloc, None, None


def _endpoint(text: str, tls: bool, *, contradicts: bool) -> str:
    scheme, _, host = text.rpartition("://")
    host = host.rstrip("/")
    if scheme not in ("", "http", "https") or not _HOST.fullmatch(host):
        raise ValueError("S3 endpoint: must be host[:port], or http(s)://host[:port]")
    if scheme and contradicts and (scheme == "https") != tls:
        raise ValueError(f"S3 endpoint with {scheme}:// but tls={str(tls).lower()}: they contradict each other")
    return f"{scheme or ('https' if tls else 'http')}://{host}"


def _unknown(key: str, options: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(key, options, n=1)
    advice = f"did you mean {nearest[0]}?" if nearest else f"must be one of {', '.join(options)}"
    return f"S3 URL: unknown option {masked_name(key)}: {advice}"


def _query(text: str) -> dict[str, Any]:
    """The options in a URL; an error names the key, but no value."""
    readers: dict[str, Callable[[str], object]] = {
        "endpoint": str, "region": str, "ca_bundle": str, "profile": str, "path_style": _bool, "tls": _bool,
        "read_only": _bool, "sse": str, "sse_kms_key_id": str, "sse_c_key_file": Path, "storage_class": str,
        "requester_pays": _bool, "catalog": _bool,
    }  # fmt: skip
    found: dict[str, Any] = {}
    for key, value in parse_qsl(text, keep_blank_values=True):
        if key not in readers:
            secret = re.search(r"key|secret|token|password", key, re.IGNORECASE)
            raise ValueError(_CREDENTIALS if secret else _unknown(key, readers))
        try:
            found[key] = readers[key](value)
        except ValueError:
            raise ValueError(f"S3 URL: {key} must be true or false") from None
        if value == "":
            raise ValueError(f"S3 URL: {key} is empty")
    return found


def _bool(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise ValueError
    return text.lower() in ("true", "1")


def _text(value: object) -> str | None:
    return None if value is None or value == "" else str(value)
