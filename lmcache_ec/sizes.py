# SPDX-License-Identifier: Apache-2.0
"""Sizes in bytes, formatted for people."""

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40


def rounded_size(size_bytes: int) -> str:
    """A limit, or a size compared with one: tenths of GiB, else whole MiB, or KiB if less than one MiB."""
    if size_bytes >= GIB:
        return f"{size_bytes / GIB:.1f} GiB"
    return f"{size_bytes / KIB:.0f} KiB" if 0 < size_bytes < MIB else f"{size_bytes / MIB:.0f} MiB"


def precise_size(size_bytes: int) -> str:
    """A size compared with others of any magnitude: tenths of the largest unit that fits, or bytes."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} B"
