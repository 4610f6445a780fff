# SPDX-License-Identifier: Apache-2.0
"""An encoder cache as vLLM may have it in future: one buffer instead of a dictionary of tensors."""

from collections.abc import Iterator, MutableMapping

import torch


class PreallocatedCache(MutableMapping[str, torch.Tensor]):
    """An encoder cache that copies its tensors into rows of one buffer."""

    def __init__(self, rows: int, width: int) -> None:
        self.buffer = torch.zeros(rows, width)
        self._rows: dict[str, slice] = {}

    def __setitem__(self, identifier: str, tensor: torch.Tensor) -> None:
        start = max((rows.stop for rows in self._rows.values()), default=0)
        if start + len(tensor) > len(self.buffer):
            raise MemoryError("the encoder cache is full")
        self._rows[identifier] = slice(start, start + len(tensor))
        self.buffer[start : start + len(tensor)] = tensor

    def __getitem__(self, identifier: str) -> torch.Tensor:
        return self.buffer[self._rows[identifier]]

    def __delitem__(self, identifier: str) -> None:
        del self._rows[identifier]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
