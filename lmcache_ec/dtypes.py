# SPDX-License-Identifier: Apache-2.0
"""The element types that an entry may have, by their names in safetensors."""

from collections.abc import Mapping
from typing import NamedTuple


class Dtype(NamedTuple):
    """Bytes of an element, and the type's name in torch (`torch.bfloat16`)."""

    nbytes: int
    torch: str


DTYPES: Mapping[str, Dtype] = {
    "BF16": Dtype(2, "bfloat16"),
    "F16": Dtype(2, "float16"),
    "F32": Dtype(4, "float32"),
    "F64": Dtype(8, "float64"),
    "F8_E4M3": Dtype(1, "float8_e4m3fn"),
    "F8_E5M2": Dtype(1, "float8_e5m2"),
    "U8": Dtype(1, "uint8"),
    "I8": Dtype(1, "int8"),
    "I16": Dtype(2, "int16"),
    "I32": Dtype(4, "int32"),
    "I64": Dtype(8, "int64"),
}
