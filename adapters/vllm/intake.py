# SPDX-License-Identifier: Apache-2.0
"""The contents of a request: its items, the names signed by a front end of this engine, a producer's announcements."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from lmcache_ec.key import MAX_NAMESPACE_CHARS

from .announcement import announced
from .identifiers import Durability, client_uuid, signed_identifiers, stored_names, without_signature
from .item import Item

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from lmcache_ec.cache import EncoderCache
    from lmcache_ec.complaints import Complaints

    from .media import EncodableMedia
    from .policy import Policy

_UNSIGNED = (
    "a request names media without the signature of this engine's front end, so it is unknown whether the "
    'names identify the content: such items stay in memory. See docs/security.md, "Front ends"'
)
_NEVER_CACHED = "prompt_embeds"
"""A vLLM modality that is not an encoder output: the client's own tensor passes through."""


class Intake:
    """Reads requests for the scheduler side. The caller has its turn (see `arrivals`); no call waits."""

    def __init__(self, cache: EncoderCache, policy: Policy, media: EncodableMedia, complaints: Complaints) -> None:
        self.counts = {"foreign_announcements": 0, "unsigned_items": 0}
        self._cache = cache
        self._policy = policy
        self._media = media
        self._complaints = complaints

    def items(self, request: Request, signed: Container[str], coming: Container[str]) -> list[Item]:
        """`signed` and `coming` are identifiers: spelled by a front end of ours, or announced by a producer."""
        items = []
        for index, feature in enumerate(request.mm_features):
            position, identifier = feature.mm_position, feature.identifier
            cached = feature.modality != _NEVER_CACHED
            encodable = self._media.encodable(feature)
            items.append(
                Item(
                    identifier=identifier,
                    start=position.offset,
                    end=position.offset + position.length,
                    modality=feature.modality,
                    rows=request.get_num_encoder_embeds(index),
                    names=self._policy.naming.names(identifier, identifier in signed, encodable) if cached else (),
                    encodable=encodable,
                    announced=identifier in coming or client_uuid(identifier) in coming,
                )
            )
        _refuse_ambiguous(items)
        return items

    def may_come(self, request: Request, now: float) -> bool:
        """Whether a tier may have what the request needs, before its items are read. No false negatives."""
        if getattr(request, "ec_transfer_params", None):
            return True
        names = (name for feature in request.mm_features for name in stored_names(feature.identifier))
        return any(self._cache.may_come(name, now) for name in names)

    def peek(self, request: Request) -> list[Item]:
        """The items of a request that no pass has seen yet: nothing is counted, and its signature is kept."""
        identifiers = [feature.identifier for feature in request.mm_features]
        return self.items(
            request, signed_identifiers(request.trace_headers, identifiers), self._own(announced(request))
        )

    def signed(self, request: Request) -> frozenset[str]:
        """The identifiers of a request that a front end of this engine spelled. Read once, see `without_signature`."""
        identifiers = [feature.identifier for feature in request.mm_features]
        signed = signed_identifiers(request.trace_headers, identifiers)
        request.trace_headers = without_signature(request.trace_headers)
        if unsigned := len(identifiers) - sum(identifier in signed for identifier in identifiers):
            self.counts["unsigned_items"] += unsigned
            self._complaints.warn("unsigned", _UNSIGNED)
        return signed

    def announced(self, request: Request) -> frozenset[str]:
        """The items that a producer has stored where this engine can find them."""
        claims = announced(request)
        others = {namespace for namespace in claims.values() if namespace != self._cache.namespace}
        if others and self._cache.persists:
            self.counts["foreign_announcements"] += 1
            self._complaints.warn(
                "namespace",
                f"a producer announces entries of namespace {min(others)[:MAX_NAMESPACE_CHARS]!r}, this engine's is "
                f"{self._cache.namespace}: checkpoint, configuration or versions differ, so nothing can be shared",
            )
        return self._own(claims)

    def _own(self, claims: dict[str, str]) -> frozenset[str]:
        return frozenset(i for i, namespace in claims.items() if namespace == self._cache.namespace)


def stays_in_memory(item: Item, signed: Container[str]) -> bool:
    """Whether an item is kept in memory because of its own name, and not because of its front end."""
    return item.identifier in signed and any(name.durability is Durability.LOCAL for name in item.names)


def _refuse_ambiguous(items: list[Item]) -> None:
    """Never promise items that share a name but need different entries: vLLM asks by name only."""
    looks: dict[str, set[tuple[int, str]]] = {}
    for item in items:
        looks.setdefault(item.identifier, set()).add((item.rows, item.modality))
    for item in items:
        if len(looks[item.identifier]) > 1:
            item.names = ()
