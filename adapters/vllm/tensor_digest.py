# SPDX-License-Identifier: Apache-2.0
"""One digest over tensors, computed where they are stored: names, dtypes, shapes, and every byte at its position.

In host memory this is xxh3 over the bytes. On a device each 32-bit word is multiplied by an odd 64-bit number that
depends on its position, and the products are summed modulo 2^64. Only 8 bytes per 16 MiB are copied to the host, where
xxh3 combines them into one digest. All arithmetic is on integers: the same weights in the same layout give the same
digest in any process, on any GPU. Two sets of weights not made to collide do so in less than one in 2^32 cases.

Cost on a device: 36 bytes are moved for each 4 (gather 8, multiply 20, sum 8), so 9 divided by the bandwidth for each
byte of weights: 2.7 ms per GB at 3.35 TB/s, 4.5 ms at 2 TB/s. It needs 100 MiB at most while it runs.

vLLM's `compute_tensor_digests` (model_executor/model_loader/weight_checksum.py, since 0.32), behind the worker call
`compute_weight_checksums`, is for audits: it copies each whole parameter to the host and computes its SHA-256 there, at
about a second per GB, includes the language model, and leaves out buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import xxhash

PIECE_BYTES = 16 << 20
_WORD_BYTES = 4


def tensor_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """32 hex digits over named tensors, in order. Waits for the device once, at the end.

    Raises torch's own error for a tensor whose bytes cannot be read, such as one on the meta device.
    """
    seal = xxhash.xxh3_128()
    folds: dict[torch.device, Fold] = {}
    with torch.inference_mode():
        for name, tensor in tensors:
            for inner, plain in _plain(name, tensor):
                seal.update(f"{inner} {plain.dtype} {tuple(plain.shape)}\n".encode())
                if plain.device.type == "cpu":
                    for piece in _pieces(plain):
                        seal.update(piece.numpy())
                    continue
                if plain.device not in folds:
                    torch.accelerator.synchronize(plain.device)  # a writer may have used another stream
                    folds[plain.device] = Fold(plain.device)
                for piece in _pieces(plain):
                    folds[plain.device].add(piece)
        for fold in folds.values():
            seal.update(fold.sums())
    return seal.hexdigest()


def _plain(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that hold the bytes. torchao's quantized tensors keep them in inner tensors, and vLLM's
    SharedWeightParameter (model_executor/parameter.py) in partitions."""
    if hasattr(tensor, "__tensor_flatten__"):
        for attribute in tensor.__tensor_flatten__()[0]:
            yield from _plain(f"{name}.{attribute}", getattr(tensor, attribute))
    elif isinstance(partitions := getattr(tensor, "partitions", None), dict):
        for index, partition in partitions.items():
            yield from _plain(f"{name}.{index}", partition)
    else:
        yield name, torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor's bytes, flat and in order, in runs of whole words: PIECE_BYTES at most, or four rows if those are
    longer. A contiguous tensor is not copied."""
    if tensor.is_contiguous():
        yield from tensor.view(-1).view(torch.uint8).split(PIECE_BYTES)
        return
    row_bytes = max(1, tensor[0].numel() * tensor.itemsize)
    words_of_rows = max(1, PIECE_BYTES // (row_bytes * _WORD_BYTES))
    for rows in tensor.split(words_of_rows * _WORD_BYTES):
        yield rows.reshape(-1).view(torch.uint8)


class Fold:
    """Sums the data of one device, in pieces. Small tensors are gathered: a launch costs more than their bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: list[torch.Tensor] = []
        self._words = 0
        self._factors = torch.empty(0, dtype=torch.int64, device=device)
        self._sums: list[torch.Tensor] = []

    def add(self, piece: torch.Tensor) -> None:
        """Append bytes. They must not change until they have been summed."""
        words = _words(piece)
        while len(words):
            part = words[: PIECE_BYTES // _WORD_BYTES - self._words]
            self._waiting.append(part)
            self._words += len(part)
            words = words[len(part) :]
            if self._words * _WORD_BYTES == PIECE_BYTES:
                self._fold()

    def sums(self) -> bytes:
        """The sums, 8 bytes for each piece."""
        self._fold()
        return bytes(torch.stack(self._sums).cpu().numpy()) if self._sums else b""

    def _fold(self) -> None:
        if not self._words:
            return
        words = self._waiting[0] if len(self._waiting) == 1 else torch.cat(self._waiting)
        if len(self._factors) < len(words):
            self._factors = _factors(len(words), self._device)
        self._sums.append(torch.mul(words, self._factors[: len(words)]).sum())
        self._waiting.clear()
        self._words = 0


def _words(piece: torch.Tensor) -> torch.Tensor:
    """The bytes as 32-bit words; the last one is padded with zeros."""
    over = len(piece) % _WORD_BYTES
    if over or piece.data_ptr() % _WORD_BYTES:
        piece = torch.nn.functional.pad(piece, (0, -over % _WORD_BYTES)).clone()
    return piece.view(torch.int32)


def _factors(count: int, device: torch.device) -> torch.Tensor:
    """An odd number for each position: the sequence of splitmix64, whose state is a counter."""
    state = torch.arange(1, count + 1, dtype=torch.int64, device=device).mul_(_signed(0x9E3779B97F4A7C15))
    state.bitwise_xor_(_shifted(state, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    state.bitwise_xor_(_shifted(state, 27)).mul_(_signed(0x94D049BB133111EB))
    return state.bitwise_xor_(_shifted(state, 31)).bitwise_or_(1)


def _shifted(state: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right."""
    return (state >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64)
