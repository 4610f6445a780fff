# SPDX-License-Identifier: Apache-2.0
"""How an entry describes an LMCache memory object: any number of tensors, of any shape and dtype.

    KV_2LTD bfloat16[2,32,256,1024]
    KV_2LTD bfloat16[2,30,256,1024] float8_e4m3fn[2,2,256,1024]

The memory format, then dtype and shape of each tensor; their bytes follow each other in the payload. A single tensor of
a dtype that the entry format knows is stored as rows (the product of all dimensions but the last); everything else is
one row of bytes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
from lmcache.v1.memory_management import MemoryFormat, MemoryObj

from lmcache_ec.dtypes import DTYPES
from lmcache_ec.entry import TensorSpec

_TENSOR = re.compile(r"([a-z0-9_]+)\[((?:\d+(?:,\d+)*)?)\]")
_ENTRY_DTYPES: dict[torch.dtype, str] = {
    getattr(torch, dtype.torch): name
    for name, dtype in DTYPES.items()
    if name != "U8"  # bytes without a dtype are uint8 here, and one row
}


@dataclass(frozen=True, slots=True)
class Layout:
    """A memory object without its bytes. `of` and `read` raise ValueError for what cannot be stored or restored."""

    memory_format: MemoryFormat
    tensors: tuple[tuple[torch.dtype, tuple[int, ...]], ...]

    @classmethod
    def of(cls, memory_object: MemoryObj) -> Layout:
        meta = memory_object.meta
        if meta.cached_positions is not None:
            raise ValueError("it has positions for blending, which are not kept")
        shapes, dtypes = meta.shapes or [meta.shape], meta.dtypes or [meta.dtype]
        nbytes = memory_object.get_size()
        tensors = tuple((dtype, tuple(shape)) for dtype, shape in zip(dtypes, shapes, strict=True))
        # Bytes without a dtype, or a buffer narrowed to what was written into it.
        if None in dtypes or _nbytes(tensors) != nbytes:
            tensors = ((torch.uint8, (nbytes,)),)
        return cls(meta.fmt, tensors)

    @classmethod
    def read(cls, text: str) -> Layout:
        name, *tensors = text.split(" ")
        matches = [_TENSOR.fullmatch(tensor) for tensor in tensors]
        dtypes = [getattr(torch, match[1], None) for match in matches if match]
        if name not in MemoryFormat.__members__ or not matches or len(dtypes) != len(matches):
            raise ValueError(f"{text!r} is not a layout that this version knows")
        if not all(isinstance(dtype, torch.dtype) for dtype in dtypes):
            raise ValueError(f"{text!r} has a dtype that this torch does not know")
        shapes = (tuple(map(int, filter(None, match[2].split(",")))) for match in matches if match)
        return cls(MemoryFormat[name], tuple(zip(dtypes, shapes, strict=True)))

    def __str__(self) -> str:
        tensors = (f"{str(dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]" for dtype, shape in self.tensors)
        return " ".join((self.memory_format.name, *tensors))

    @property
    def nbytes(self) -> int:
        return _nbytes(self.tensors)

    @property
    def spec(self) -> TensorSpec:
        """The spec of an entry that holds it. ValueError for a layout that is too long for an entry's header."""
        first, shape = self.tensors[0]
        name = _ENTRY_DTYPES.get(first)
        if len(self.tensors) > 1 or name is None or not shape:
            return TensorSpec(1, self.nbytes, "U8", str(self))
        return TensorSpec(math.prod(shape[:-1]), shape[-1], name, str(self))

    @property
    def shapes(self) -> list[torch.Size]:
        return [torch.Size(shape) for _, shape in self.tensors]

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [dtype for dtype, _ in self.tensors]


def _nbytes(tensors: tuple[tuple[torch.dtype, tuple[int, ...]], ...]) -> int:
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in tensors)
