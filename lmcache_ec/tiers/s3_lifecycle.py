# SPDX-License-Identifier: Apache-2.0
"""The bucket's rule by which the store deletes entries of a certain age; its other rules stay as they are.

Errors are botocore's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lmcache_ec.tiers.s3_access import S3Access

_DAY_S = 86_400


def set_lifecycle_ttl(access: S3Access, ttl_s: float) -> None:
    """Make the store delete what was written more than `ttl_s` ago (in whole days, rounded up); replaces our rule."""
    rule = {
        "ID": _rule_id(access),
        "Status": "Enabled",
        "Filter": {"Prefix": f"{access.prefix}/"},
        "Expiration": {"Days": math.ceil(ttl_s / _DAY_S)},
    }
    others = [one for one in _rules(access) if one.get("ID") != _rule_id(access)]
    access.admin.put_bucket_lifecycle_configuration(
        Bucket=access.bucket, LifecycleConfiguration={"Rules": [*others, rule]}
    )


def lifecycle_ttl_s(access: S3Access) -> float | None:
    """The age in seconds at which our rule makes the store delete entries; None if it is not in force."""
    for rule in _rules(access):
        ours = rule.get("ID") == _rule_id(access) and rule.get("Filter") == {"Prefix": f"{access.prefix}/"}
        if ours and rule.get("Status") == "Enabled" and "Days" in rule.get("Expiration", {}):
            return float(rule["Expiration"]["Days"] * _DAY_S)
    return None


def _rule_id(access: S3Access) -> str:
    return f"lmcache-ec {access.prefix}"


def _rules(access: S3Access) -> Sequence[dict[str, Any]]:
    from botocore.exceptions import ClientError

    try:
        answer = access.admin.get_bucket_lifecycle_configuration(Bucket=access.bucket)
    except ClientError as error:
        if error.response["Error"]["Code"] == "NoSuchLifecycleConfiguration":
            return ()
        raise
    return tuple(answer["Rules"])
