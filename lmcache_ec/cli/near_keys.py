# SPDX-License-Identifier: Apache-2.0
"""The keys that may have been meant in a wrong configuration."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from lmcache_ec.config.reference import KeyEntry, key_entries

_NAME = re.compile(r"[a-z][a-z0-9_]{2,}")
_PREFIXES = ("lmcache_ec_", "ec_")
_LIKENESS = 0.55
_NEAREST = 3
_ADDRESSES = ("remotes", "remote_url")


def near_keys(problems: Iterable[str]) -> Sequence[KeyEntry]:
    """For the keys that these configuration errors name first: the keys themselves, or else the three most similar. Not
    for addresses: their own message states what is wrong."""
    entries = {entry.key: entry for entry in key_entries()}
    found: dict[str, KeyEntry] = {}
    for problem in problems:
        head = re.split(r"[=:,(]| in ", problem, maxsplit=1)[0].removeprefix("unknown key ").lower()
        for name in _NAME.findall(head):
            for prefix in _PREFIXES:
                name = name.removeprefix(prefix)
            nearest = difflib.get_close_matches(name, (*entries, "remote_url"), 1, _LIKENESS)
            if nearest and nearest[0] in _ADDRESSES:
                continue
            meant = [name] if name in entries else difflib.get_close_matches(name, entries, _NEAREST, _LIKENESS)
            found.update((key, entries[key]) for key in meant)
    return [entry for key, entry in entries.items() if key in found]
