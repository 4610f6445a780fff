# SPDX-License-Identifier: Apache-2.0
"""Numbers, ages and tables in readable form."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, one: str, more: str = "") -> str:
    """`1 entry`, `2,000 entries`. `more` is the plural; by default that of `one`, in -s or -ies."""
    plural = more or (f"{one[:-1]}ies" if one.endswith("y") else f"{one}s")
    return f"{number:,} {one if number == 1 else plural}"


def span(seconds: float) -> str:
    """How long something takes, or how long ago it was, in the largest unit of which there are at least two."""
    for unit_s, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"


def table(rows: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    """Rows in left-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (indent + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]
