# SPDX-License-Identifier: Apache-2.0
"""What Redis servers count about their keys: it tells a store that was emptied from one that evicts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_FIELD = re.compile(rb"^(run_id|evicted_keys|expired_keys):([0-9a-f]+)\r?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Counts:
    """The totals of all servers of a store, at one moment: their run ids, the keys evicted and expired since each run
    began, and the keys that they hold."""

    runs: frozenset[bytes]
    evicted: int
    expired: int
    keys: int

    @classmethod
    def of(cls, servers: Iterable[tuple[bytes, int]]) -> Counts:
        """From each server's INFO and DBSIZE. KeyError if the store does not report these counts."""
        answers = [(dict(_FIELD.findall(info)), keys) for info, keys in servers]
        return cls(
            runs=frozenset(fields[b"run_id"] for fields, _ in answers),
            evicted=sum(int(fields[b"evicted_keys"]) for fields, _ in answers),
            expired=sum(int(fields[b"expired_keys"]) for fields, _ in answers),
            keys=sum(keys for _, keys in answers),
        )

    def explain_loss_since(self, before: Counts) -> bool:
        """Whether a key without a TTL that was there `before` may have been evicted since.

        Not if nothing was evicted, nor if more keys are missing than were evicted or expired. A run that began since
        counts from its start.
        """
        same = self.runs == before.runs
        evicted = self.evicted - before.evicted * same
        expired = self.expired - before.expired * same
        return evicted > 0 and before.keys - self.keys <= evicted + expired
