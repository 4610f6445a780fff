# SPDX-License-Identifier: Apache-2.0
"""The saves of a pass: places for outputs that the step encodes, and for earlier saves that are owed."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lmcache_ec.entry import TensorSpec

from .identifiers import Durability, identifier_of
from .item import Item, Memo
from .orders import Orders, Save
from .topology import SAVING_RANK

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from lmcache_ec.cache import EncoderCache
    from lmcache_ec.place import Place

    from .lookups import LookUps
    from .policy import Policy
    from .producer import Producer


class Reserved(NamedTuple):
    """A place for the output of an item, (request, index)."""

    place: Place
    item: tuple[str, int]


class Saves:
    """One per engine, on its scheduler side. Runs on the scheduler's thread only; no lock, no I/O.

    Reserved places are sent with the step of the same pass, or dropped. `producer` is None in other roles.
    """

    def __init__(self, cache: EncoderCache, policy: Policy, look_ups: LookUps, producer: Producer | None) -> None:
        self.reserved: dict[str, Reserved] = {}
        """Places reserved in this pass, by identifier."""
        self._cache = cache
        self._policy = policy
        self._look_ups = look_ups
        self._producer = producer

    def reserve(self, item: Item, request_id: str, index: int) -> None:
        """vLLM has allocated room for an item that it will encode."""
        spec = self._look_ups.sought(item)
        if spec is None or not item.names:
            return
        name = item.names[0]
        place = self._cache.book.reserve_save(name.text, spec, self._persists(name.durability))
        if place is not None:
            place.modality = item.modality
            self.reserved[item.identifier] = Reserved(place, (request_id, index))
        else:
            self._cache.check_fits(name.text, spec)

    def reserve_again(self, scheduler_output: SchedulerOutput, memos: Mapping[str, Memo]) -> set[str]:
        """Places for items that the ranks encode though vLLM counts them as cached, within the encoder's budget."""
        if self._producer is None or not self._producer.again or not self._look_ups.in_use:
            return set()
        encodes = scheduler_output.scheduled_encoder_inputs
        encoding = ((memos.get(name), indices) for name, indices in encodes.items())
        rows = sum(memo.items[index].rows for memo, indices in encoding if memo is not None for index in indices)
        reserved = set()
        for identifier, (request_id, item) in self._producer.again.items():
            memo = memos.get(request_id)
            if memo is None or request_id not in scheduler_output.num_scheduled_tokens:
                continue
            if rows and rows + item.rows > self._policy.encoder_budget:
                break  # not announced this time
            index = next(index for index, one in enumerate(memo.items) if one is item)
            self.reserve(item, request_id, index)
            if identifier in self.reserved:
                reserved.add(identifier)
                rows += item.rows
        return reserved

    def retries(self, cached: Container[str], allocated: Container[str]) -> list[Place]:
        """Places for saves that were dropped earlier, of tensors that vLLM still has `cached`. What it `allocated` in
        this pass is not in the runner's cache until this step has run."""

        def holds(name: str) -> bool | None:
            identifier = identifier_of(name)
            return None if identifier in allocated else identifier in cached

        durability_of = self._policy.naming.durability_of
        return self._cache.book.retries(holds, lambda name: self._persists(durability_of(name)))

    def send(self, orders: Orders, again: Container[str], retries: Sequence[Place]) -> None:
        """Add all saves of the pass to a step's orders. `again` are those of `reserve_again`."""
        encodes = orders.encoder_inputs or {}
        for identifier, (place, (request_id, index)) in self.reserved.items():
            if identifier in again and self._producer is not None:
                self._producer.encoded_again(identifier)
                orders.encodes.append((request_id, index))
            elif index not in encodes.get(request_id, ()):
                self._drop(place)  # preempted within the step that scheduled it: no encode follows
                continue
            orders.saves[identifier] = self._send(place, orders.step)
        orders.retries = [self._send(place, orders.step) for place in retries]
        self.reserved.clear()

    def _send(self, place: Place, step: int) -> Save:
        """Only a dirty place is written as soon as it is sealed. The write of others is owed, and nothing pins their
        bytes until the store process gets to it."""
        self._cache.book.send_save(place, step, SAVING_RANK)
        spec = place.spec or TensorSpec(0, 0, self._policy.dtype)
        identifier = identifier_of(place.identifier)
        return Save(place.id, place.offset, place.length, identifier, place.identifier, spec, place.dirty)

    def drop_all(self) -> None:
        """No step is sent: drop all reserved places."""
        for reserved in self.reserved.values():
            self._drop(reserved.place)
        self.reserved.clear()

    def _drop(self, place: Place) -> None:
        """No encode follows, although vLLM counts the item as cached."""
        self._cache.book.drop(place)
        if self._producer is not None:
            self._producer.not_encoded(identifier_of(place.identifier))

    def _persists(self, how: Durability) -> bool:
        return how is Durability.PERSISTENT and self._cache.persists
