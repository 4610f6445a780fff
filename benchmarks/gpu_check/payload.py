# SPDX-License-Identifier: Apache-2.0
"""Encoder outputs that can be told apart byte by byte: always the same for one name, different for another."""

from __future__ import annotations

import zlib

import torch

from benchmarks.gpu_check.card import Card
from lmcache_ec.adapters.vllm.tensors import dtype_name
from lmcache_ec.entry import TensorSpec

WIDTH = 4096
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
_PERIOD = 1 << 20


def spec_of(megabytes: float, dtype: str = "BF16") -> TensorSpec:
    """[rows, 4096] of about `megabytes` * 10^6 bytes."""
    row = WIDTH * DTYPES[dtype].itemsize
    return TensorSpec(max(1, round(megabytes * 1e6 / row)), WIDTH, dtype)


def spec_of_tensor(tensor: torch.Tensor) -> TensorSpec:
    rows, width = tensor.shape
    return TensorSpec(rows, width, dtype_name(tensor.dtype))


def expected(identifier: str, spec: TensorSpec) -> torch.Tensor:
    """The item's bytes, on the host: noise that repeats every mebibyte, offset by the number of the repeat."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{identifier} {spec}".encode()))
    noise = torch.randint(0, 256, (min(_PERIOD, spec.nbytes),), dtype=torch.uint8, generator=generator)
    repeats = -(-spec.nbytes // len(noise))
    numbers = torch.arange(repeats, dtype=torch.int64).to(torch.uint8)
    return (noise.repeat(repeats, 1) + numbers[:, None]).view(-1)[: spec.nbytes]


def output(card: Card, identifier: str, spec: TensorSpec) -> torch.Tensor:
    """The output of an encoder on the card for this item."""
    tensor = card.empty(spec.rows, spec.width, DTYPES[spec.dtype])
    tensor.copy_(expected(identifier, spec).view(DTYPES[spec.dtype]).view(spec.rows, spec.width))
    return tensor


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, on the host, once the current stream has produced them."""
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


def difference(found: torch.Tensor, identifier: str, spec: TensorSpec) -> str:
    """Where bytes differ from the expected ones; empty if none do."""
    right = expected(identifier, spec)
    if len(found) != len(right):
        return f"{identifier}: {len(found)} bytes, {len(right)} were expected"
    wrong = int((found != right).sum())
    first = int((found != right).nonzero()[0]) if wrong else 0
    return f"{identifier}: {wrong} of {len(right)} bytes differ, the first at {first}" if wrong else ""
