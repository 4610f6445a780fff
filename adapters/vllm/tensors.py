# SPDX-License-Identifier: Apache-2.0
"""Tensors that are views of the arena."""

from __future__ import annotations

import mmap

import torch

from lmcache_ec.dtypes import DTYPES
from lmcache_ec.entry import TensorSpec

_DTYPES: dict[str, torch.dtype] = {
    name: floating
    for name, dtype in DTYPES.items()
    if (floating := getattr(torch, dtype.torch)).is_floating_point  # encoders produce no others
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The entry format's name of a dtype. Raises ValueError for one that encoders do not produce."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise ValueError(f"encoder outputs of {dtype} cannot be cached; these can: {sorted(_DTYPES)}") from None


def view(memory: mmap.mmap, offset: int, spec: TensorSpec) -> torch.Tensor:
    """The payload at `offset` bytes as a tensor of shape [rows, width]: no copy, writable."""
    dtype = _DTYPES[spec.dtype]
    count = spec.rows * spec.width
    if not count:
        return torch.empty(spec.rows, spec.width, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(spec.rows, spec.width)
