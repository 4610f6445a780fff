# SPDX-License-Identifier: Apache-2.0
"""The counts of a soak, and the line that reports them."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from statistics import median
from typing import Any

_SHOWN = 4
"""How many wrong answers and failures of each kind are listed individually."""


@dataclass
class Tally:
    """For one thread. Exit status 0 requires that nothing is wrong, failed, or left."""

    seed: int
    requests: Counter[str] = field(default_factory=Counter)
    """By kind."""
    verdicts: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    """By kind."""
    failed: Counter[str] = field(default_factory=Counter)
    restarts: Counter[str] = field(default_factory=Counter)
    """By how the server ended."""
    events: Counter[str] = field(default_factory=Counter)
    loads: Counter[str] = field(default_factory=Counter)
    """By tier."""
    left: list[str] = field(default_factory=list)
    recoveries_s: dict[str, list[float]] = field(default_factory=dict)
    """By kind of fault: time from its end until its target was in use again."""
    encodes: int = 0

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._shown: Counter[str] = Counter()

    @property
    def good(self) -> bool:
        return not (self.wrong or self.failed or self.left)

    def is_wrong(self, kind: str, text: str) -> None:
        self.wrong[kind] += 1
        self._show(f"wrong: {kind}", text)

    def has_failed(self, kind: str, text: str) -> None:
        self.failed[kind] += 1
        self._show(f"failed: {kind}", text)

    def is_left(self, what: list[str], where: str) -> None:
        self.left += [f"{where}: {each}" for each in what]
        for each in what:
            self.report(f"left: {where}: {each}")

    def report(self, line: str) -> None:
        print(f"[{time.monotonic() - self._began:6.1f} s] {line}", file=sys.stderr, flush=True)

    def line(self, mode: str, faults: Counter[str]) -> str:
        """The JSON line at the end."""
        what: dict[str, Any] = {
            "mode": mode,
            "seed": self.seed,
            "seconds": round(time.monotonic() - self._began, 1),
            "requests": self.requests.total(),
            "faults": faults.total(),
            "wrong": self.wrong.total(),
            "failed": self.failed.total(),
            "left": self.left,
            "restarts": self.restarts.total(),
            "encodes": self.encodes,
            "loads_by_tier": _sorted(self.loads),
            "faults_by_kind": _sorted(faults),
            "recovery_s_by_kind": {kind: round(median(each), 3) for kind, each in sorted(self.recoveries_s.items())},
            "events_by_kind": _sorted(self.events),
            "requests_by_kind": _sorted(self.requests),
            "verdicts": _sorted(self.verdicts),
            "wrong_by_kind": _sorted(self.wrong),
            "failed_by_kind": _sorted(self.failed),
            "restarts_by_kind": _sorted(self.restarts),
        }
        return json.dumps(what, ensure_ascii=False)

    def _show(self, kind: str, text: str) -> None:
        self._shown[kind] += 1
        if self._shown[kind] <= _SHOWN:
            self.report(f"{kind}: {text}")


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted((name, number) for name, number in counts.items() if number))
