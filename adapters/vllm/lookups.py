# SPDX-License-Identifier: Apache-2.0
"""Which entries match an item, which of them the arena holds, and which can still arrive."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_ec.accesses import Accesses
from lmcache_ec.cache import EncoderCache
from lmcache_ec.entry import TensorSpec, entry_length
from lmcache_ec.fetches import MISFIT_REMEMBERED_S
from lmcache_ec.place import Place
from lmcache_ec.recent import Recent

from .identifiers import Durability, Name, names_of, storable
from .item import Item, Shape
from .policy import Policy


class LookUps:
    """The scheduler side's look-ups of single items. The caller has its turn (see `arrivals`); no call waits."""

    def __init__(self, cache: EncoderCache, policy: Policy) -> None:
        self.misfits = 0
        """Live entries that do not fit an item of the same name, each counted once a minute."""
        self._cache = cache
        self._policy = policy
        self._widths = dict(policy.widths)
        self._misfits: Recent[Shape] = Recent(MISFIT_REMEMBERED_S)
        self._now = 0.0
        self._in_use = False

    def begin(self, now: float) -> None:
        """Set the time (monotonic seconds) for all calls up to the next `begin`."""
        self._now = now
        self._in_use = self.in_use

    @property
    def in_use(self) -> bool:
        """Whether entries may be used, and outputs of a step sent now may be kept."""
        return self._cache.ready and not self._cache.inert and not self._cache.in_doubt

    def usable(self, item: Item) -> bool:
        """Whether the item can have an entry at all."""
        return self._in_use and bool(item.names)

    def serves(self, item: Item) -> bool:
        """Whether an entry may be loaded for the item."""
        return self._policy.consumer and self.usable(item) and not item.dropped

    def find(self, item: Item) -> Place | None:
        """The live entry of an item. An entry that fits only another item of that name is left alone and remembered:
        this item does not wait for a fetch of it."""
        for name in item.names if self.usable(item) else ():
            place = self._cache.book.live(name.text)
            if place is not None and self.fits(place, item):
                return place
            if place is not None:
                shape = item.shape_of(name)
                self.misfits += not self._misfits.holds(shape, self._now)
                self._misfits.add(shape, self._now)
        return None

    def held(self, item: Item) -> Place | None:
        """Like `find`, without counting or remembering anything."""
        places = (self._cache.book.live(name.text) for name in item.names)
        return next((place for place in places if place is not None and self.fits(place, item)), None)

    def fits(self, place: Place, item: Item) -> bool:
        """Whether an entry is what the request needs. An unknown width is learned from the first entry that fits."""
        spec = place.spec
        if spec is None or spec.rows != item.rows or spec.dtype != self._policy.dtype:
            return False
        return self._widths.setdefault(item.modality, spec.width) == spec.width

    def can_come(self, item: Item, among: Sequence[Item], early: bool = False) -> bool:
        """Whether the item is on its way into the arena. Starts a fetch if a tier may have it and is expected to take
        no longer than encoding what is missing of `among`, the request's items. An `early` no is not final."""
        coming = [self._name_can_come(name, item, among, early) for name in item.names] if self.serves(item) else []
        return any(coming)

    def _name_can_come(self, name: Name, item: Item, among: Sequence[Item], early: bool) -> bool:
        if self._misfits.holds(item.shape_of(name), self._now):
            return False
        if name.durability is not Durability.PERSISTENT or self._cache.under_way(name.text, self._now):
            return self._cache.under_way(name.text, self._now)

        def encode_s() -> float:
            return self._encode_s([one for one in among if self.held(one) is None])

        length, weighed, refusals = self._length(name.text, item), self._weighs(item), self._cache.policy.refused
        coming = self._cache.fetch(name.text, length, self._now, item.announced, encode_s if weighed else None, early)
        item.refused |= self._cache.policy.refused > refusals
        return coming

    def _weighs(self, item: Item) -> bool:
        """Whether the item may be encoded instead, and no producer has stored it for this very request."""
        return not self._cache.policy.always and item.encodable and not item.announced

    def _encode_s(self, items: Sequence[Item]) -> float:
        return self._cache.policy.encode_s((item.modality, item.rows) for item in items)

    def patience_s(self, longest_s: float, pending: Sequence[Item]) -> float:
        """How long a request waits for items that can still arrive: no longer than an encode would take."""
        return min(longest_s, self._encode_s(pending)) if all(map(self._weighs, pending)) else longest_s

    def late(self, item: Item) -> None:
        """The request has waited in vain."""
        for name in item.names:
            self._cache.late(name.text, self._now)

    def _length(self, name: str, item: Item) -> int:
        spec = self.spec(item)
        return entry_length(name, spec) if spec is not None else 0

    def spec(self, item: Item) -> TensorSpec | None:
        """The spec of an entry for the item; None as long as its width is unknown."""
        return self._spec(item.modality, item.rows)

    def _spec(self, modality: str, rows: int) -> TensorSpec | None:
        width = self._widths.get(modality)
        return None if width is None else TensorSpec(rows, width, self._policy.dtype)

    def sought(self, item: Item) -> TensorSpec | None:
        """Like `spec`, for saving the item or probing for it by length; also None if another item's entry is known to
        have the name."""
        return None if self.misfit(item) else self.spec(item)

    def record(self, items: Sequence[Item], accesses: Accesses) -> None:
        """A request needs these items: record each once. Items that are never cached are left out."""
        for item in items:
            if item.names and not item.recorded:
                item.recorded = True
                accesses.add(self._now, item.name, self._length(item.name, item), self._encode_s([item]), item.rows)

    def restore_s(self, identifier: str, modality: str, rows: int) -> float:
        """Seconds it would cost to get back an item that vLLM's own cache evicts, as far as is known without asking."""
        names: tuple[str, ...] = ()
        if self.in_use and self._policy.consumer and storable(identifier):
            names = names_of(identifier)
        spec = self._spec(modality, rows) if names else None
        length = 0 if spec is None else entry_length(identifier, spec)
        return self._cache.restore_s(names, length, modality, rows)

    def misfit(self, item: Item) -> bool:
        """Whether the entry with the item's name was recently found to be another item's."""
        return bool(item.names) and self._misfits.holds(item.shape_of(item.names[0]), self._now)

    def why_encoded(self, item: Item) -> str:
        """Why vLLM encodes the item: one of `decisions.MISS_REASONS`."""
        if not item.names:
            return "not_cacheable"
        if not self.in_use:
            return "off"
        if item.late:
            return "deadline"
        if item.refused:
            return "policy"
        if self.misfit(item):
            return "misfit"
        return "not_found" if item.awaited else "new"
