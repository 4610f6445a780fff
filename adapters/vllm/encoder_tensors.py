# SPDX-License-Identifier: Apache-2.0
"""The tensors of a model that its encoder's output depends on: those of tower, projector and related modules."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import NamedTuple

import torch

from .packed_weights import packed_digest

_READS = frozenset({"get_language_model", "embed_input_ids"})
"""Attributes through which an encoder's code accesses the language model: for its embeddings, in vLLM 0.32's molmo2 and
moondream3."""

_PRUNING = frozenset({"_create_final_video_embeddings"})
"""Methods that do so, but are called only if videos are pruned: `is_multimodal_pruning_enabled` of qwen3_vl."""


class Tensors(NamedTuple):
    """Parameters, which only a writer changes; buffers, some of which change as the model runs (rotary tables that grow
    or change dtype, scales that follow the data); digests of packed weights, which cannot be read, "" if they were not
    seen before packing (see `packed_weights`). Each by name, in the order of the modules."""

    parameters: list[tuple[str, torch.Tensor]]
    buffers: list[tuple[str, torch.Tensor]]
    packed: list[tuple[str, str]]


def encoder_tensors(model: torch.nn.Module) -> Tensors:
    """All tensors but the language model's, each once. All of the model's if it does not state which those are, if its
    encoder uses them, or if there are no others."""
    language = frozenset[str](getattr(model, "_language_model_names", ()))
    unused = frozenset[str]() if getattr(model, "is_multimodal_pruning_enabled", True) else _PRUNING
    kind: object = type(model)
    found = _without(model, frozenset() if reads_language_model(kind, language, unused) else language)
    return found if found.parameters else _without(model, frozenset())


def _without(model: torch.nn.Module, left_out: frozenset[str]) -> Tensors:
    found, seen = Tensors([], [], []), set[int]()
    for prefix, module in _modules(model, "", left_out):
        if (digest := packed_digest(module)) is not None:
            found.packed.append((prefix, digest))
        for tensors, into in ((module._parameters, found.parameters), (module._buffers, found.buffers)):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    into.append((prefix + name, tensor))
    return found


def _modules(module: torch.nn.Module, prefix: str, left_out: frozenset[str]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Each module with its name followed by a dot."""
    yield prefix, module
    for name, child in module.named_children():
        if prefix + name not in left_out:
            yield from _modules(child, f"{prefix}{name}.", left_out)


@functools.cache
def reads_language_model(kind: object, language: frozenset[str], unused: frozenset[str] = frozenset()) -> bool:
    """Whether a class's code behind `embed_multimodal` refers to the language model, whose modules are `language`.

    Follows methods of the model's own class, except `unused` ones. A name that means something else only costs needless
    caution.
    """
    forbidden = _READS | {name.rpartition(".")[2] for name in language}
    waiting, seen = ["embed_multimodal"], set(unused)
    while waiting:
        function = inspect.unwrap(getattr(kind, waiting.pop(), None) or (lambda: None))
        for name in _names(getattr(function, "__code__", None)):
            if name in forbidden:
                return True
            if name not in seen and callable(getattr(kind, name, None)):
                seen.add(name)
                waiting.append(name)
    return False


def _names(code: CodeType | None) -> Iterator[str]:
    """Every attribute and global named in a function's code, inner functions included."""
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _names(constant)
