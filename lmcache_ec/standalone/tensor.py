# SPDX-License-Identifier: Apache-2.0
"""A tensor as bytes with shape and dtype, from and to NumPy arrays, torch tensors and other buffers.

torch is imported here only by `Tensor.torch`, which only a program that has it calls.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from lmcache_ec.dtypes import DTYPES
from lmcache_ec.entry import TensorSpec
from lmcache_ec.standalone.layout import described, shape_of

if TYPE_CHECKING:
    import torch

_BY_NAME = {dtype.torch: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Tensor:
    """`shape` in elements, `dtype` by its name in NumPy and torch ("float32", "bfloat16"), and `data`:
    the elements in row-major order, little endian, as bytes."""

    shape: tuple[int, ...]
    dtype: str
    data: memoryview

    @classmethod
    def of(cls, value: object) -> Tensor:
        """The bytes of a torch tensor (on any device), a NumPy array, or an object with the buffer protocol.

        A view if the memory layout of `value` is the stored one, else a copy. TypeError for what is none of these, or
        has elements that cannot be stored.
        """
        if isinstance(value, Tensor):
            return value
        if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "data_ptr"):
            shape, dtype, array = _of_torch(value)
        else:
            array = numpy.asarray(value if hasattr(value, "__array__") else _buffer(value))
            shape, dtype = array.shape, array.dtype.name
        if dtype not in _BY_NAME:
            raise TypeError(f"{type(value).__name__} of {dtype}: the element type must be one of {', '.join(_BY_NAME)}")
        if array.dtype.byteorder == ">" or not array.flags.c_contiguous:
            array = numpy.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        return cls(tuple(shape), dtype, array.reshape(-1).view(numpy.uint8).data)

    @classmethod
    def read(cls, spec: TensorSpec, data: memoryview) -> Tensor | None:
        """The tensor in an entry's payload; None if its layout is foreign."""
        shape = shape_of(spec)
        return None if shape is None else cls(shape, DTYPES[spec.dtype].torch, data)

    @property
    def spec(self) -> TensorSpec:
        """Its description in an entry."""
        return described(self.shape, _BY_NAME[self.dtype])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy()
        return array if dtype is None and not copy else numpy.array(array, dtype=dtype, copy=True)

    def numpy(self) -> numpy.ndarray[Any, Any]:
        """A view of `data`. TypeError for a type that NumPy lacks and for which `ml_dtypes` is not imported."""
        return numpy.frombuffer(self.data, _numpy_dtype(self.dtype)).reshape(self.shape)

    def torch(self) -> torch.Tensor:
        """A view of `data`, in CPU memory."""
        import torch

        dtype = getattr(torch, self.dtype)
        if not self.data.nbytes:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(self.data, dtype=dtype).reshape(self.shape)


def _buffer(value: object) -> memoryview:
    try:
        return memoryview(value)  # type: ignore[arg-type]
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"{kind}: must be a NumPy array, a torch tensor or an object with a buffer") from None


def _of_torch(tensor: Any) -> tuple[tuple[int, ...], str, numpy.ndarray[Any, Any]]:
    """Shape, name of the type, and the bytes; torch is already imported, since this tensor exists."""
    dtype, torch = str(tensor.dtype).removeprefix("torch."), sys.modules["torch"]
    if tensor.layout is not torch.strided or tensor.is_meta:
        kind = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
        raise TypeError(f"a {kind} tensor: must be dense, with its elements in memory")
    plain = tensor.detach().to("cpu").contiguous()
    return tuple(tensor.shape), dtype, plain.reshape(-1).view(torch.uint8).numpy()


def _numpy_dtype(name: str) -> Any:
    """NumPy's own type of this name, or that of `ml_dtypes`, which registers its own with NumPy."""
    try:
        return numpy.dtype(name)
    except TypeError:
        types = sys.modules.get("ml_dtypes")
        if types is not None and hasattr(types, name):
            return numpy.dtype(getattr(types, name))
        raise TypeError(
            f"NumPy has no {name}: import ml_dtypes first, which adds it, or take `torch()`, or the bytes in `data`"
        ) from None
