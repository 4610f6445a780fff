# SPDX-License-Identifier: Apache-2.0
"""Tensors that look into the arena."""

from __future__ import annotations

import mmap

import torch

from lmcache_ec.entry import TensorSpec

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The entry format's name of a dtype. Raises ValueError for one that encoders do not put out."""
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
