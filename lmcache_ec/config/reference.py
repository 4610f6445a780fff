# SPDX-License-Identifier: Apache-2.0
"""The keys of `ec:` as a table: for `lmcache-ec keys`, and for the documentation page generated from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_ec.config.keys import EncoderCacheConfig, accepts, default


@dataclass(frozen=True)
class KeyEntry:
    """One key: what it is for, what it accepts, and its default as YAML, with its unit."""

    key: str
    default: str
    accepted: str
    description: str

    @property
    def variable(self) -> str:
        """The environment variable that overrides it."""
        return f"LMCACHE_EC_{self.key.upper()}"


def key_entries() -> Sequence[KeyEntry]:
    """Every key, in the order of the manual."""
    return [
        KeyEntry(
            key,
            _in_yaml(default(key), accepts(key).unit),
            accepts(key).text.removeprefix("must be "),
            str(field.description),
        )
        for key, field in EncoderCacheConfig.model_fields.items()
    ]


def _in_yaml(value: object, unit: str) -> str:
    text = json.dumps(value)
    return text if value is None else f"{text} {unit}".strip()


def markdown() -> str:
    """The table of all keys in Markdown."""
    lines = ["| key | default | accepted | what it does |", "|---|---|---|---|"]
    for entry in key_entries():
        cells = (f"`{entry.key}`", f"`{entry.default}`", entry.accepted, entry.description)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)
