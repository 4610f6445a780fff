# SPDX-License-Identifier: Apache-2.0
"""How quickly a remote answers, and how an engine therefore looks up entries there."""

from __future__ import annotations

import os
import time

from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.tiers.base import Tier, TierError
from lmcache_ec.tiers.lane import Habits
from lmcache_ec.tiers.remote import Lookup

_LOOK_UPS = 5


def look_up_mode(tier: Tier, lookup: Lookup) -> str:
    """The fastest of a few look-ups of a missing entry, and how an engine looks up entries at that speed.
    Empty if none was answered."""
    try:
        answer_s = min(_timed(tier) for _ in range(_LOOK_UPS))
    except TierError:
        return ""
    return f"round trip {1000 * answer_s:.1f} ms, {_mode(lookup, answer_s)}"


def _timed(tier: Tier) -> float:
    key = EncoderCacheKey("lmcache-ec-doctor", f"nobody's {os.urandom(16).hex()}")
    began = time.monotonic()
    tier.contains(key)
    return time.monotonic() - began


def _mode(lookup: Lookup, answer_s: float) -> str:
    slow_s = Habits(lookup, 0.0).slow_s
    if lookup is Lookup.CATALOG:
        return "asked only for entries in its listing (catalog)"
    if lookup is Lookup.PROBE:
        return "asked for every item (probe)"
    quick = answer_s <= slow_s
    why = f"auto: {'at most' if quick else 'more than'} {1000 * slow_s:.0f} ms"
    return f"asked for {'every item' if quick else 'entries in its listing'} ({why})"
