# SPDX-License-Identifier: Apache-2.0
"""Weights that vLLM's CPU build packs into a form that cannot be read.

On CPU `dispatch_cpu_unquantized_gemm` (vllm/model_executor/layers/utils.py) hands a linear layer's weight to oneDNN and
leaves an empty parameter behind; packed weights cannot be read back. So the digest is computed before packing and
stored on the layer. The dispatch runs again whenever weights are loaded anew.
"""

from __future__ import annotations

import functools

import torch

from .tensor_digest import tensor_digest

_DIGEST = "lmcache_ec_packed_digest"


def note_packed_weights() -> None:
    """From now on record the digest of each weight packed in this process. Idempotent."""
    from vllm.model_executor.layers import utils

    dispatch = getattr(utils, "dispatch_cpu_unquantized_gemm", None)
    if dispatch is None or hasattr(dispatch, "_lmcache_ec"):
        return

    @functools.wraps(dispatch)
    def note_and_dispatch(layer: torch.nn.Module, *args: object, **kwargs: object) -> None:
        weight = layer.weight
        digest = "" if weight.is_meta else tensor_digest([("weight", weight)])
        dispatch(layer, *args, **kwargs)
        setattr(layer, _DIGEST, digest)

    note_and_dispatch._lmcache_ec = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = note_and_dispatch


def packed_digest(module: torch.nn.Module) -> str | None:
    """The digest of a layer's packed weight; "" if it is packed and was not seen before, None if nothing is packed."""
    weight = module._parameters.get("weight")
    if weight is None or weight.numel() or not hasattr(module, "cpu_linear"):
        return None
    digest: str = getattr(module, _DIGEST, "")
    return digest
