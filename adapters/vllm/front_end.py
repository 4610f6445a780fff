# SPDX-License-Identifier: Apache-2.0
"""Wrappers around vLLM's front end that encode in each identifier who made it, and sign it.

`install` wraps seven functions of vLLM, in every process that loads the plugin. They act only for an engine whose
connector is ours; others see no difference. In the order in which a request passes through them:

    renderers/base.py     _process_tokens(_async)   a uuid becomes a client's name; `cache_salt` is visible here
                          _process_multimodal       what is hashed within it, and carries no mark, is content
                          _process_mm_uuids         vLLM's counters are marked, and any uuid that came another way
    multimodal/hasher.py  hash_kwargs               a hash over a marked name carries the mark
                          serialize_item            an ImageID in place of pixels is also a name
    v1/engine/input_processor.py  process_inputs    identifiers of known origin are signed; others are clients' names

Content is recognised by origin, not by spelling: `_Content` and `_Named` are types that only these wrappers make, and
that no client can send. An identifier that reaches `process_inputs` as plain text (features that a client rendered,
sent to `/inference/v1/generate`) is spelled as a client's name in all output of this process. The processor cache is
also keyed by it: no client can store other pixels under the digest of another client's picture.

A rendering thread owns what it collects (`_Rendering`, thread-local); there is no other state.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .identifiers import CLIENT, COUNTER, client_name, counter_name, ensure_key, hashed_name, mark_of, signed
from .ours import is_ours

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest

_Function = Callable[..., Any]

_NEVER_CACHED = "prompt_embeds"
"""A vLLM modality that is not an encoder output; its hash never reaches the cache."""


class _Content(str):
    """A digest that this process computed from content."""

    __slots__ = ()


class _Named(str):
    """A name that this process spelled."""

    __slots__ = ()


class PlaceMoved(RuntimeError):
    """vLLM's front end differs from what this module expects: nothing is signed, so no entry leaves memory."""


_problems: list[str] = []

_EXPECTED: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {
    ("vllm.renderers.base", "BaseRenderer"): {
        "_process_tokens": ("self", "prompt", "skip_mm_cache"),
        "_process_tokens_async": ("self", "prompt", "skip_mm_cache"),
        "_process_mm_uuids": ("self", "mm_data", "mm_data_items", "mm_uuid_items", "mm_req_id"),
        "_process_multimodal": (
            *("self", "prompt", "mm_data", "mm_uuids", "mm_processor_kwargs", "media_io_kwargs", "skip_mm_cache"),
        ),
    },
    ("vllm.multimodal.hasher", "MultiModalHasher"): {
        "hash_kwargs": ("cls", "algorithm", "kwargs"),
        "serialize_item": ("cls", "obj"),
    },
    ("vllm.v1.engine.input_processor", "InputProcessor"): {
        "_get_mm_identifier": ("self", "mm_hash", "lora_request"),
    },
}
"""Parameters of the functions wrapped or called, in vLLM 0.30 to 0.33. Any of `process_inputs` are passed on."""


def differs_in(sources: Path) -> str:
    """How the sources of vLLM's front end in this folder differ from what `install` expects; empty if they do not.
    Reads three files and imports nothing."""
    for (module, owner), functions in _EXPECTED.items():
        file = sources.joinpath(*module.split(".")[1:]).with_suffix(".py")
        try:
            body = ast.parse(file.read_bytes()).body
        except (OSError, SyntaxError) as error:
            return f"{file}: {error}"
        classes = (node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner)
        found = {
            node.name: _parameters(node.args)
            for node in next(classes, [])
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        for name, parameters in functions.items():
            if found.get(name) != parameters:
                return f"{owner}.{name}{found.get(name, ())} was expected to take {parameters}"
    return ""


def _parameters(given: ast.arguments) -> tuple[str, ...]:
    extra = (given.vararg, given.kwarg)
    every = (*given.posonlyargs, *given.args, *given.kwonlyargs, *(one for one in extra if one is not None))
    return tuple(one.arg for one in every)


def install() -> None:
    """Wrap vLLM's front end in this process. Idempotent. Nothing is wrapped if it differs, see `problem`."""
    ensure_key()
    try:
        _install()
    except PlaceMoved as error:
        _problems.append(str(error))


def problem() -> str:
    """Why this process signs nothing; empty if it does sign. EngineCore runs the same vLLM as its front end."""
    return _problems[0] if _problems else ""


def _install() -> None:
    owners = []
    for (module, owner), functions in _EXPECTED.items():
        try:
            owners.append(getattr(importlib.import_module(module), owner))
        except (ImportError, AttributeError) as error:
            raise PlaceMoved(str(error)) from error
        for name, parameters in functions.items():
            function = inspect.getattr_static(owners[-1], name, None)
            found = () if function is None else tuple(inspect.signature(inspect.unwrap(_plain(function))).parameters)
            if found != parameters:
                raise PlaceMoved(f"{owner}.{name}{found} was expected to take {parameters}")
    renderer, hasher, processor = owners
    if "trace_headers" not in inspect.signature(processor.process_inputs).parameters:
        raise PlaceMoved("InputProcessor.process_inputs takes no trace_headers")
    if hasattr(processor.process_inputs, "_lmcache_ec"):
        return  # wrapped before
    _wrap(renderer, "_process_tokens", _name_uuids)
    _wrap(renderer, "_process_tokens_async", _name_uuids)
    _wrap(renderer, "_process_mm_uuids", _mark_counters)
    _wrap(renderer, "_process_multimodal", _recognise_content)
    _wrap_class_method(hasher, "hash_kwargs", _carry_mark)
    _wrap_class_method(hasher, "serialize_item", _notice_exif_name)
    _wrap(processor, "process_inputs", _sign)


def _plain(function: Any) -> _Function:
    plain: _Function = getattr(function, "__func__", function)
    return plain


def _wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method with `wrapper(original, self, ...)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    wrapped._lmcache_ec = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def _wrap_class_method(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    original: _Function = inspect.getattr_static(owner, name).__func__

    @functools.wraps(original)
    def wrapped(cls: type, *args: Any, **kwargs: Any) -> Any:
        return wrapper(functools.partial(original, cls), *args, **kwargs)

    setattr(owner, name, classmethod(wrapped))


# ---- names


def _name_uuids(original: _Function, self: Any, prompt: Any, **kwargs: Any) -> Any:
    """Wraps `_process_tokens` and its asynchronous twin: spell the client's names, with its salt."""
    uuids = prompt.get("multi_modal_uuids")
    if uuids and is_ours(self.config):
        salt = prompt.get("cache_salt")
        prompt = {**prompt, "multi_modal_uuids": {kind: _named(given, salt) for kind, given in uuids.items()}}
    return original(self, prompt, **kwargs)


def _named(given: Any, salt: str | None) -> Any:
    """Spell one uuid or several; anything else is left for vLLM to refuse."""
    if isinstance(given, str):
        return _Named(client_name(given, salt))
    if isinstance(given, list | tuple):
        return [_named(one, salt) for one in given]
    return given


def _mark_counters(
    original: _Function, self: Any, mm_data: Any, mm_data_items: Any, mm_uuid_items: Any, mm_req_id: str
) -> Any:
    """Wraps `_process_mm_uuids`: mark the counters that vLLM makes up if it finds no uuid."""
    if not is_ours(self.config):
        return original(self, mm_data, mm_data_items, mm_uuid_items, mm_req_id)
    given = {
        kind: [one if not isinstance(one, str) or isinstance(one, _Named) else _named(one, None) for one in items]
        for kind, items in mm_uuid_items.items()
    }
    spelled = original(self, mm_data, mm_data_items, given, mm_req_id)
    return {
        kind: [
            _Named(counter_name(one)) if isinstance(one, str) and not isinstance(one, _Named) else one for one in items
        ]
        for kind, items in spelled.items()
    }


# ---- content


class _Rendering(threading.local):
    """Digests of content that this thread computes while it renders one prompt. None while it renders nothing."""

    digests: set[str] | None = None
    named_by_exif = False


_rendering = _Rendering()


@contextmanager
def _collecting() -> Iterator[set[str]]:
    before, _rendering.digests = _rendering.digests, set()
    try:
        yield _rendering.digests
    finally:
        _rendering.digests = before


def _recognise_content(original: _Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps `_process_multimodal`: give each hash a type that shows its origin."""
    if not is_ours(self.config):
        return original(self, *args, **kwargs)
    with _collecting() as digests:
        rendered = original(self, *args, **kwargs)
    hashes = rendered.get("mm_hashes", {})
    rendered["mm_hashes"] = {kind: [_typed(one, digests) for one in of_kind] for kind, of_kind in hashes.items()}
    return rendered


def _typed(one: Any, digests: set[str]) -> Any:
    if not isinstance(one, str):
        return one  # left for vLLM to refuse
    if mark_of(one):
        return _Named(one)
    return _Content(one) if one in digests else one


def _carry_mark(original: _Function, algorithm: Any, /, **kwargs: Any) -> str:
    """Wraps `hash_kwargs`: a hash over a name is no content digest. Some models hash twice (`qwen3_vl.py`)."""
    if _rendering.digests is None:
        return str(original(algorithm, **kwargs))
    _rendering.named_by_exif = False
    digest = str(original(algorithm, **kwargs))
    mark = _mark_within(kwargs) or (CLIENT if _rendering.named_by_exif else "")
    if mark:
        return hashed_name(mark, digest)
    _rendering.digests.add(digest)
    return digest


def _mark_within(value: object) -> str:
    """The mark of any name within the hashed value: a model may wrap or prefix it."""
    if isinstance(value, str):
        return next((mark for mark in (COUNTER, CLIENT) if mark in value), "")
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return ""
    return next(filter(None, map(_mark_within, value)), "")


def _notice_exif_name(original: _Function, obj: Any) -> Any:
    """Wraps `serialize_item`: vLLM hashes an ImageID instead of the pixels, and only a program can have put a UUID
    there, as a name."""
    image = getattr(obj, "media", obj)
    if _rendering.digests is not None and hasattr(image, "getexif"):
        try:
            from PIL import ExifTags

            if isinstance(image.getexif().get(ExifTags.Base.ImageID), uuid.UUID):
                _rendering.named_by_exif = True
        except Exception:  # malformed: vLLM then hashes the content
            pass
    return original(obj)


# ---- signatures


def _sign(original: _Function, self: Any, *args: Any, **kwargs: Any) -> EngineCoreRequest:
    """Wraps `process_inputs`: turn names back into plain text for other processes, and sign those that are ours."""
    request: EngineCoreRequest = original(self, *args, **kwargs)
    if not is_ours(self.vllm_config):
        return request
    features = request.mm_features or []
    ours = []
    for feature in features:
        if feature.modality == _NEVER_CACHED:
            ours.append(False)
            continue
        spelled = feature.mm_hash or feature.identifier
        if not isinstance(spelled, _Content | _Named):
            spelled = client_name(spelled, request.cache_salt)
        feature.mm_hash = str(spelled)
        feature.identifier = self._get_mm_identifier(feature.mm_hash, request.lora_request)
        ours.append(feature.identifier == feature.mm_hash)
    request.trace_headers = signed(request.trace_headers, [feature.identifier for feature in features], ours)
    return request
