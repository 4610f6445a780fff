# SPDX-License-Identifier: Apache-2.0
"""The key of an encoder output: a namespace (what model, encoded how) and an identifier (what media).

Nothing here blocks, and every function is safe to call from any thread.
"""

import enum
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

MAX_IDENTIFIER_BYTES = 4096
MAX_NAMESPACE_CHARS = 80

_SLUG_CHARS = 48
_CONTENT_DIGEST = re.compile(r"[0-9a-f]{64}(?:[0-9a-f]{64})?")
_LORA_DIGEST = re.compile(r".+:[0-9a-f]{64}(?:[0-9a-f]{64})?", re.DOTALL)
_REQUEST_SCOPED = re.compile(r"(?:\A|:)renderer[0-9]+-mm-[0-9]+-|-(?:image|video|audio|vision_chunk)-[0-9]+\Z")
_NAMESPACE = re.compile(r"[a-z0-9_-][a-z0-9._-]{0,79}")
_OBJECT_NAME = re.compile(rf"({_NAMESPACE.pattern})/([0-9a-f]{{2}})/(\2[0-9a-f]{{62}})\.safetensors")


class Durability(enum.Enum):
    """How far an entry may travel, judged by its identifier alone."""

    PERSISTENT = "any tier"
    LOCAL = "LocalCPU only: the identifier does not outlive the process"
    REFUSED = "never cached: the identifier says nothing about the media, or cannot be stored"


def durability(identifier: str, *, persist_client_ids: bool) -> Durability:
    """Judge one identifier (a microsecond; runs on the scheduler thread once for each item of a request).

    The forms an identifier takes in vLLM 0.32:

    - a hex digest of media and processing arguments, 64 digits (blake3, sha256) or 128 (sha512):
      `multimodal/hasher.py`, `MultiModalHasher.hash_kwargs`. Persistent.
    - a client's uuid, verbatim: `multimodal/processing/inputs.py`, `ProcessorInputs.get_mm_hashes`. Local, unless
      `persist_client_ids` vouches for them. A uuid of 64 or 128 hex digits cannot be told from a digest.
    - `renderer<rank>-mm-<n>-<modality>-<i>`, where processor cache and prefix caching are both off:
      `renderers/base.py`, `BaseRenderer._process_mm_uuids`. It counts from 1 in each process, so the next process
      gives the same name to another picture: refused. So is anything else that ends in `-<modality>-<i>`.
      With processor arguments in the request vLLM hashes the counter, and nobody can tell: where both are off, the
      caller must not persist anything.
    - `<lora name>:<one of the above>` with tower LoRA: `v1/engine/input_processor.py`,
      `InputProcessor._get_mm_identifier`. The adapter behind a name changes and its content digest is not known:
      local. `<lora name>:<client uuid>` looks like a client's uuid, so with tower LoRA the caller leaves
      `persist_client_ids` off.
    """
    if _CONTENT_DIGEST.fullmatch(identifier):
        return Durability.PERSISTENT
    try:
        size = len(identifier) if identifier.isascii() else len(identifier.encode())
    except UnicodeEncodeError:
        return Durability.REFUSED
    if not 0 < size <= MAX_IDENTIFIER_BYTES or _REQUEST_SCOPED.search(identifier):
        return Durability.REFUSED
    if persist_client_ids and not _LORA_DIGEST.fullmatch(identifier):
        return Durability.PERSISTENT
    return Durability.LOCAL


@dataclass(frozen=True, slots=True)
class EncoderCacheKey:
    """Names one entry in every tier. ValueError for a namespace that `check_namespace` refuses."""

    namespace: str
    identifier: str

    def __post_init__(self) -> None:
        check_namespace(self.namespace)

    @property
    def digest(self) -> bytes:
        """sha256 of the identifier in UTF-8, 32 bytes. UnicodeEncodeError where `durability` says REFUSED."""
        return hashlib.sha256(self.identifier.encode()).digest()

    @property
    def object_name(self) -> str:
        """`<namespace>/<aa>/<sha256>.safetensors`: no identifier, whatever its text, leaves the root."""
        return object_name(self.namespace, self.digest)


def object_name(namespace: str, digest: bytes) -> str:
    """The name of the object whose key has this `digest`."""
    name = digest.hex()
    return f"{namespace}/{name[:2]}/{name}.safetensors"


class ObjectName(NamedTuple):
    """What the name of an object says: the namespace and the digest of its key."""

    namespace: str
    digest: bytes


def parse_object_name(name: str) -> ObjectName | None:
    """The reverse of `object_name`; None for anything that it does not make."""
    match = _OBJECT_NAME.fullmatch(name)
    return ObjectName(match[1], bytes.fromhex(match[3])) if match else None


def namespace_of(model: str, facts: Mapping[str, object]) -> str:
    """A readable slug of `model` (its end, where a path is most telling), `-`, and 16 hex digits over `facts`.

    `facts` is all that changes an encoder's output and is not in the identifier. TypeError for what JSON cannot
    say: text like `<object at 0x7f…>` would make a namespace of each process.
    """
    try:
        canonical = json.dumps(dict(facts), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"namespace facts must be plain JSON: {error}") from error
    slug = re.sub(r"[^a-z0-9._-]+", "-", model.lower()).strip("-.")[-_SLUG_CHARS:].lstrip("-.") or "model"
    return f"{slug}-{hashlib.sha256(canonical.encode()).hexdigest()[:16]}"


def check_namespace(text: str) -> str:
    """Return `text` if it may be a namespace, a single folder name on any store; else ValueError."""
    if not _NAMESPACE.fullmatch(text):
        raise ValueError(
            f"namespace {text!r}: 1 to {MAX_NAMESPACE_CHARS} characters of a-z 0-9 . _ - are accepted, no dot first"
        )
    return text
