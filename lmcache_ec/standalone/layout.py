# SPDX-License-Identifier: Apache-2.0
"""How an entry describes a program's tensor: its rows, and its shape unless it has two dimensions. Imports no NumPy."""

from __future__ import annotations

import re
from math import prod

from lmcache_ec.entry import TensorSpec

_SHAPE = re.compile(r"shape=\[([0-9,]*)\]")


def described(shape: tuple[int, ...], dtype: str) -> TensorSpec:
    """A two-dimensional tensor is an encoder output, as engines store it. `dtype` is the entry format's name."""
    if len(shape) == 2:
        return TensorSpec(*shape, dtype)
    rows = shape[0] if shape else 1
    return TensorSpec(rows, prod(shape[1:]), dtype, f"shape=[{','.join(map(str, shape))}]")


def shape_of(spec: TensorSpec) -> tuple[int, ...] | None:
    """The shape given to `described`; None for a foreign layout."""
    if not spec.layout:
        return spec.rows, spec.width
    written = _SHAPE.fullmatch(spec.layout)
    if written is None:
        return None
    shape = tuple(map(int, filter(None, written[1].split(","))))
    return shape if prod(shape) == spec.rows * spec.width else None
