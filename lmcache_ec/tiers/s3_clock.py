# SPDX-License-Identifier: Apache-2.0
"""The clock of an S3 store: it dates the objects, so the age of an entry is measured by it, not by ours.

By our clock, if the store's lagged by more than `ttl_s`, new entries would look aged: nothing would ever hit, and
everything would be uploaded again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from lmcache_ec.tiers.s3_access import S3Access

_UNCERTAIN_S = 1.0
"""A Date header has whole seconds."""
_REPORTED_S = 5.0
_PAUSE_S = 10.0


class StoreClock:
    """How far a store's clock is ahead of this machine's. Any thread may call it; two that compare at once do no harm.

    obstore shows no headers, so boto3 makes the request, one HEAD of the bucket, whatever the answer is.
    """

    def __init__(self, access: S3Access) -> None:
        self.ahead_s = 0.0
        """Seconds; negative: it is behind. 0 if both agree, or nothing is known."""
        self.notice = ""
        """What a user has to know about it."""
        self._access = access
        self._due_at = 0.0
        self._reported_s = 0.0

    def now(self) -> float:
        """The time (Unix) by the store's clock."""
        return time.time() + self.ahead_s

    def compare(self) -> None:
        """Ask the store for its time, unless that was done just now. Without an answer nothing changes."""
        if time.monotonic() < self._due_at:
            return
        self._due_at = time.monotonic() + _PAUSE_S
        began = time.time()
        date_s = _seconds(self._date())
        ended = time.time()
        if date_s is None or not began <= ended:  # ours was set meanwhile
            return
        ahead_s = date_s + _UNCERTAIN_S / 2 - (began + ended) / 2
        self.ahead_s = 0.0 if abs(ahead_s) <= _UNCERTAIN_S + (ended - began) / 2 else ahead_s
        self._report()

    def _date(self) -> str:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            answer = self._access.admin.head_bucket(Bucket=self._access.bucket)
        except ClientError as error:
            answer = error.response  # a refusal also has a date
        except (BotoCoreError, ValueError):
            return ""
        return _header(answer)

    def _report(self) -> None:
        if abs(self.ahead_s) < _REPORTED_S:
            self.notice = ""
        elif not self.notice or abs(self.ahead_s - self._reported_s) > _REPORTED_S:
            self._reported_s = self.ahead_s
            way = "ahead of" if self.ahead_s > 0 else "behind"
            self.notice = (
                f"S3 at {self._access.where}: its clock is {abs(self.ahead_s):.0f} s {way} this machine's; "
                f"the age of its entries is counted by its clock"
            )


def _header(answer: Mapping[str, Any]) -> str:
    return str(answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", ""))


def _seconds(date: str) -> float | None:
    """Unix seconds of a Date header; None if it is not one."""
    try:
        return parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return None
