# SPDX-License-Identifier: Apache-2.0
"""The monthly cost of a scenario. Prices are assumptions: replace them with your own."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from lmcache_ec.plan.simulate import Outcome
from lmcache_ec.plan.traces import TraceError
from lmcache_ec.sizes import GIB

_HOURS_A_MONTH = 730


@dataclass(frozen=True, slots=True)
class Prices:
    """In one currency; the defaults are US dollars."""

    gpu_hour: float = 2.5
    cpu_gib_month: float = 3.0
    disk_gib_month: float = 0.1
    redis_gib_month: float = 10.0
    s3_gib_month: float = 0.023
    s3_1000_reads: float = 0.0004
    s3_1000_writes: float = 0.005
    network_gib: float = 0.01


def parse_prices(texts: list[str]) -> Prices:
    """Parse `name=value` texts. TraceError for an unknown name or a bad value."""
    known = [each.name for each in fields(Prices)]
    values: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name in values:
            raise TraceError(f"--price {text}: {name} is given twice: must be given once")
        try:
            values[name] = float(value)
        except ValueError:
            raise TraceError(f"--price {text}: must be NAME=NUMBER, such as gpu_hour=3") from None
        if name not in known or not 0 <= values[name] < math.inf:
            raise TraceError(f"--price {text}: must be a number, 0 or more, for one of {', '.join(known)}")
    return Prices(**values)


def monthly(outcome: Outcome, prices: Prices, share: float) -> dict[str, float]:
    """Costs of the whole fleet, by item. The trace's hours stand for the whole month. S3 without a limit is charged for
    what the trace writes."""
    scenario, written = outcome.scenario, outcome.written.get("s3")
    scale = _HOURS_A_MONTH * 3600 / max(1.0, outcome.end_s - outcome.begin_s) / share
    stored = {
        name: size * (scenario.replicas if name in ("cpu", "disk") else 1)
        for name, size in scenario.tiers.items()
        if name != "gpu"
    }
    if written is not None:
        stored["s3"] = min(stored["s3"], written.bytes / share)
    costs = {"encoder": outcome.encoder.encode_s / 3600 * prices.gpu_hour * scale}
    for name, size in stored.items():
        costs[name] = size / GIB * float(getattr(prices, f"{name}_gib_month"))
    if written is not None:
        reads = outcome.by_tier["s3"].requests / 1000 * prices.s3_1000_reads
        costs["s3"] += (reads + written.requests / 1000 * prices.s3_1000_writes) * scale
    costs["network"] = outcome.network_bytes / GIB * prices.network_gib * scale
    return costs
