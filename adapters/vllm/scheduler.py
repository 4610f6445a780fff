# SPDX-License-Identifier: Apache-2.0
"""The scheduler side of the connector: what may be promised, what is waited for, what goes out with a step."""

from __future__ import annotations

import enum
import time
from collections.abc import Container
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from lmcache_ec.book import Place
from lmcache_ec.cache import EncoderCache
from lmcache_ec.complaints import Complaints
from lmcache_ec.entry import TensorSpec, entry_length, room
from lmcache_ec.key import MAX_NAMESPACE_CHARS, Durability, durability

from .announcement import Announcer, announced
from .layout import SAVING_RANK
from .metadata import Load, Save, StepMetadata

if TYPE_CHECKING:
    import logging

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from .media import EncodableMedia

_RETRIES_A_PASS = 8
_NEVER_CACHED = "prompt_embeds"
"""A modality of vLLM's that is no encoder output: the client's own tensor passes through."""


class Standing(enum.Enum):
    """Where an item of a request stands before the request is scheduled."""

    SETTLED = enum.auto()
    """Leased to the request, or in vLLM's own cache, or to be promised when it is asked for."""
    PENDING = enum.auto()
    """It can still arrive."""
    MISSED = enum.auto()
    """Nothing will come: vLLM encodes it, if it carries anything to encode."""


@dataclass(slots=True)
class Item:
    """One multimodal input of a request: its prompt tokens [start, end), what it must look like, and what is known.

    `held_at` is how far the request was when vLLM gave the item room (tokens computed, preemptions): asked again with
    more tokens and no preemption since, the request holds it.
    """

    identifier: str
    start: int
    end: int
    modality: str
    rows: int
    durability: Durability
    encodable: bool
    announced: bool = False
    """A producer has said that it stored the item: it is waited for even if no listing has it."""
    missed: bool = False
    held_at: tuple[int, int] | None = None
    dropped: bool = False
    """vLLM has taken back from its workers what they would encode (0.33's V2 runner, once the item is computed)."""


@dataclass(slots=True)
class Memo:
    """What is remembered of one request. `end` is where its last item ends: past it there is nothing to do.

    `named` is the last item of each name: all of one name look alike, or none is ever cached.
    """

    request_id: str
    items: list[Item]
    named: dict[str, Item]
    end: int
    computed: int = 0
    preemptions: int = 0
    deadline_s: float = 0.0
    leases: dict[str, Place] = field(default_factory=dict)
    waiting_since: float | None = None
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Policy:
    """What of the engine's configuration the decisions depend on. `window` is the longest prefill of a pass, tokens."""

    producer: bool
    consumer: bool
    window: int
    dtype: str
    widths: dict[str, int]
    deadline_s: float
    start_timeout_s: float
    persist_client_ids: bool
    wait_for_producer_s: float = 0.0


class SchedulerSide:
    """Answers vLLM's scheduler. Runs in the EngineCore, on the scheduler's thread alone; no lock, no I/O.

    vLLM asks `ensure_cache_available`, `has_cache_item`, `update_state_after_alloc` and `build_connector_meta` within
    one scheduling pass (vllm/v1/core/sched/scheduler.py). A promise lives for that pass: `has_cache_item` pins,
    `update_state_after_alloc` makes it a load, `build_connector_meta` sends it or drops it.
    """

    def __init__(
        self,
        cache: EncoderCache,
        policy: Policy,
        media: EncodableMedia,
        logger: logging.Logger,
        announcer: Announcer | None = None,
    ) -> None:
        """`announcer` is a producer's."""
        self.cache = cache
        self._announcer = announcer
        names = ("promises", "deferred_passes", "timeouts", "unavailable", "mirror_resets", "foreign_announcements")
        self.counts = dict.fromkeys(names, 0)
        self._policy = policy
        self._media = media
        self._complaints = Complaints(logger)
        self._widths = dict(policy.widths)
        self._memos: dict[str, Memo] = {}
        self._asked: Memo | None = None
        self._drained = False
        self._now = 0.0
        self._start_deadline: float | None = None
        self._step = 0
        self._mirror: set[str] = set()  # what vLLM's own encoder cache holds
        self._allocated: set[str] = set()  # ... of it, since this pass
        self._missing: set[str] = set()  # asked about as the first in this pass, though the mirror has it
        self._questioned = False  # in this pass: an item may be gone, and come back untold, for what was asked about
        self._promises: dict[str, Place] = {}
        self._loads: dict[str, tuple[Place, tuple[str, int]]] = {}
        self._saves: dict[str, tuple[Place, str, int]] = {}
        self._unavailable: set[str] = set()

    # ---- before an item is scheduled

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether the request can be scheduled now. False while an item of its can still arrive before its deadline."""
        if not self._drained:
            self._begin_pass()
        memo = self._memos.get(request.request_id)
        if memo is None or len(memo.items) != len(request.mm_features):  # a streaming session adds media as it goes
            memo = self._remember(request)
        self._asked = memo
        if num_computed_tokens >= memo.end:
            if memo.leases:
                self._release(memo)
            return True
        memo.computed, memo.preemptions = num_computed_tokens, request.num_preemptions
        return self._prepare(memo)

    def take_unavailable_requests(self) -> set[str]:
        """Requests with an item that carries nothing to encode and that the cache does not hold. Told once."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    def _begin_pass(self) -> None:
        self._drained = True
        self._now = time.monotonic()
        self.cache.drain(self._now)

    def _remember(self, request: Request) -> Memo:
        self._forget(request.request_id)
        items = []
        coming = self._announced(request)
        for index, feature in enumerate(request.mm_features):
            position, identifier = feature.mm_position, feature.identifier
            cached = feature.modality != _NEVER_CACHED
            items.append(
                Item(
                    identifier=identifier,
                    start=position.offset,
                    end=position.offset + position.length,
                    modality=feature.modality,
                    rows=request.get_num_encoder_embeds(index),
                    durability=durability(identifier, persist_client_ids=self._policy.persist_client_ids)
                    if cached
                    else Durability.REFUSED,
                    encodable=self._media.encodable(feature),
                    announced=identifier in coming,
                )
            )
        _refuse_ambiguous(items)
        named = {item.identifier: item for item in sorted(items, key=lambda item: item.end)}
        memo = Memo(request.request_id, items, named, max((item.end for item in items), default=0))
        memo.deadline_s = max(self._policy.deadline_s, self._policy.wait_for_producer_s if coming else 0.0)
        self._memos[request.request_id] = memo
        return memo

    def _announced(self, request: Request) -> frozenset[str]:
        """The items that a producer has stored where this engine can find them."""
        told = announced(request)
        others = {namespace for namespace in told.values() if namespace != self.cache.namespace}
        if others:
            self.counts["foreign_announcements"] += 1
            self._complaints.warn(
                "namespace",
                f"a producer announces entries of namespace {min(others)[:MAX_NAMESPACE_CHARS]!r}, this engine's is "
                f"{self.cache.namespace}: checkpoint, configuration or versions differ, and nothing can be shared",
            )
        return frozenset(i for i, namespace in told.items() if namespace == self.cache.namespace)

    def _prepare(self, memo: Memo) -> bool:
        """Lease what is there, start what can come; wait, fail the request, or let vLLM encode."""
        if self._starting():
            return False
        end = memo.computed + self._policy.window
        wanted = [item for item in memo.items if item.start < end and item.end > memo.computed]
        standings = [self._standing(memo, item) for item in wanted]
        if Standing.PENDING in standings:
            if not self._waited(memo):
                self.counts["deferred_passes"] += 1
                return False
            self.counts["timeouts"] += 1
            for item, standing in zip(wanted, standings, strict=True):
                item.missed |= standing is Standing.PENDING
        if any(item.missed and not item.encodable for item in wanted):
            self.counts["unavailable"] += 1
            self._unavailable.add(memo.request_id)
            return False
        if memo.waiting_since is not None:
            memo.waited_s += self._now - memo.waiting_since
            memo.waiting_since = None
        return True

    def _starting(self) -> bool:
        """Whether the first requests still have to wait until the ranks have mapped the arena."""
        if self.cache.ready or self.cache.inert:
            return False
        if self._start_deadline is None:
            self._start_deadline = self._now + self._policy.start_timeout_s
        return self._now < self._start_deadline

    def _waited(self, memo: Memo) -> bool:
        """Whether the request has waited for as long as it may, all its waits together."""
        if memo.waiting_since is None:
            memo.waiting_since = self._now
        return memo.waited_s + self._now - memo.waiting_since >= memo.deadline_s

    def _standing(self, memo: Memo, item: Item) -> Standing:
        """An item that carries nothing to encode is in nobody's hands but ours until the request holds it: vLLM may
        evict its own copy before that, so only a lease will do."""
        identifier = item.identifier
        if item.held_at is not None and memo.computed > item.held_at[0] and memo.preemptions == item.held_at[1]:
            return Standing.SETTLED
        leased = identifier in memo.leases and self._serves(item)
        if leased or (item.encodable and identifier in self._mirror):
            return Standing.SETTLED
        place = self._find(item)
        if place is not None and self.cache.book.lease(place):
            memo.leases[identifier] = place
            item.missed = False
            return Standing.SETTLED
        if place is not None:  # over the budget of leases: promised if it is still there when it is asked for
            return Standing.SETTLED if item.encodable else Standing.PENDING
        item.missed = item.missed or not self._can_come(item)
        return Standing.MISSED if item.missed else Standing.PENDING

    def _serves(self, item: Item) -> bool:
        """Whether an entry may be used for the item at all."""
        usable = self._policy.consumer and self.cache.ready and not self.cache.inert
        return usable and item.durability is not Durability.REFUSED and not item.dropped

    def _find(self, item: Item) -> Place | None:
        """The live entry of an item. One that is not what the item needs is deleted everywhere."""
        place = self.cache.book.live(item.identifier) if self._serves(item) else None
        if place is not None and not self._fits(place, item):
            self.cache.discard(place, self._now)
            return None
        return place

    def _can_come(self, item: Item) -> bool:
        """Whether the item is under way into the arena, after starting that if a tier may have it."""
        if not self._serves(item):
            return False
        if item.durability is Durability.PERSISTENT:
            return self.cache.fetch(item.identifier, self._length(item), self._now, item.announced)
        return self.cache.under_way(item.identifier, self._now)

    def _fits(self, place: Place, item: Item) -> bool:
        """Whether an entry is what the request needs. A width nobody has told is learned from the first that fits."""
        spec = place.spec
        if spec is None or spec.rows != item.rows or spec.dtype != self._policy.dtype:
            return False
        return self._widths.setdefault(item.modality, spec.width) == spec.width

    def _length(self, item: Item) -> int:
        spec = self._spec(item)
        return entry_length(item.identifier, spec) if spec is not None else 0

    def _spec(self, item: Item) -> TensorSpec | None:
        width = self._widths.get(item.modality)
        return None if width is None else TensorSpec(item.rows, width, self._policy.dtype)

    # ---- within a pass

    def has_cache_item(self, identifier: str) -> bool:
        """Promise the item for this pass, if its bytes are in the arena, verified, and fit the request asked about."""
        if not self._drained:
            self._begin_pass()
        if identifier in self._mirror and identifier not in self._allocated and not self._questioned:
            self._missing.add(identifier)
        self._questioned = True
        if identifier in self._promises:
            self._withdraw(identifier)
        memo = self._asked
        item = None if memo is None else memo.named.get(identifier)
        if memo is None or item is None or item.end <= memo.computed or not self._serves(item):
            return False
        place = memo.leases.get(identifier) or self.cache.book.live(identifier)
        if place is None or not self._fits(place, item):
            return False
        self.cache.book.pin(place)
        self._promises[identifier] = place
        self.counts["promises"] += 1
        return True

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """vLLM has given the item room: to load if it was promised in this pass, to encode otherwise."""
        identifier = request.mm_features[index].identifier
        self._mirror.add(identifier)
        self._allocated.add(identifier)
        memo = self._memos.get(request.request_id)
        if memo is not None:
            memo.items[index].held_at = (memo.computed, memo.preemptions)
        place = self._promises.pop(identifier, None)
        if place is not None:
            put_off = self._loads.get(identifier)
            self._loads[identifier] = (place, (request.request_id, index))
            if put_off is not None:
                self.cache.book.unpin(put_off[0])  # vLLM has emptied its cache since
            if memo is not None and identifier in memo.leases:
                self.cache.book.release(memo.leases.pop(identifier))
        elif memo is not None and self._policy.producer and self.cache.ready and not self.cache.inert:
            self._reserve(memo.items[index], request.request_id, index)

    def _reserve(self, item: Item, request_id: str, index: int) -> None:
        spec = self._spec(item)
        if spec is None or item.durability is Durability.REFUSED:
            return
        place = self.cache.book.reserve_save(item.identifier, spec, self._persists(item.durability))
        if place is not None:
            self._saves[item.identifier] = (place, request_id, index)

    def _persists(self, how: Durability) -> bool:
        return how is Durability.PERSISTENT and self.cache.persists

    def _withdraw(self, identifier: str) -> None:
        place = self._promises.pop(identifier, None)
        if place is not None:
            self.cache.book.unpin(place)

    # ---- the end of a pass

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """What this step's ranks have to do. Places go out only with steps that schedule tokens: on the V1 runner the
        metadata of others is lost."""
        if not self._drained:
            self._begin_pass()
        for identifier in list(self._promises):
            self._withdraw(identifier)
        self._follow_frees(scheduler_output.free_encoder_mm_hashes)
        self._follow_payloads(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens and (self._loads or not self.cache.inert):
            meta = self._orders(scheduler_output)
        else:
            meta = StepMetadata()
            for place, _, _ in self._saves.values():
                self.cache.book.drop(place)
            self._saves.clear()
        self._allocated.clear()
        self._asked = None
        self._drained = self._questioned = False
        self.cache.hand_ledger({**self.counts, "requests": len(self._memos)})
        self._take_out(meta)  # last: `give_up` needs them if anything before this raises
        return meta

    def _follow_frees(self, freed: list[str]) -> None:
        if self._missing.difference(freed):
            # vLLM asks only about what its own cache lacks: it has emptied it (`reset_encoder_cache`).
            self.counts["mirror_resets"] += 1
            self._mirror &= self._allocated
            for identifier in self._loads.keys() - self._allocated:
                self.cache.book.unpin(self._loads.pop(identifier)[0])
        self._missing.clear()
        for identifier in freed:
            if identifier in self._allocated:
                continue  # evicted early in this pass, and given room again later
            self._mirror.discard(identifier)
            self.cache.book.unsaved.pop(identifier, None)
            if identifier in self._loads:
                self.cache.book.unpin(self._loads.pop(identifier)[0])  # put off by a step without tokens, now unwanted

    def _follow_payloads(self, scheduler_output: SchedulerOutput) -> None:
        """0.33's V2 runner lets go of what an item is encoded from once it is computed, and gets it again with the
        request, or with an encode that vLLM schedules (`encoder_input_updates`). After a rollback a load of such an
        item could not be made up for: it is not promised."""
        updates = getattr(scheduler_output, "encoder_input_updates", None)
        if updates is None:
            return
        for new in scheduler_output.scheduled_new_reqs:
            for item in self._items(new.req_id):
                item.dropped = False
        for request_id, changes in updates.items():
            items = self._items(request_id)
            for index, payload in changes.items():
                if index < len(items):
                    items[index].dropped = payload is None

    def _items(self, request_id: str) -> list[Item]:
        memo = self._memos.get(request_id)
        return [] if memo is None else memo.items

    def _bearers(self, scheduled: Container[str]) -> dict[str, tuple[str, int]]:
        """The loads that can go out with this step, and who has each encoded if it fails: an item of a request that the
        step schedules. Of a load that nobody there bears nothing could be made any more, and vLLM takes the item for
        cached; so it waits for the step of one who does (its own request was preempted, or the step had no tokens)."""
        bearers = (
            (identifier, self._bearer(identifier, own, scheduled)) for identifier, (_, own) in self._loads.items()
        )
        return {identifier: bearer for identifier, bearer in bearers if bearer is not None}

    def _bearer(self, identifier: str, own: tuple[str, int], scheduled: Container[str]) -> tuple[str, int] | None:
        """Rather one that carries what can be encoded."""
        if own[0] in scheduled and self._encodes(own):
            return own
        others = [
            (memo.request_id, memo.items.index(memo.named[identifier]))
            for memo in self._memos.values()
            if identifier in memo.named and memo.request_id in scheduled
        ]
        encoding = next((other for other in others if self._encodes(other)), None)
        return encoding or (own if own[0] in scheduled else next(iter(others), None))

    def _encodes(self, bearer: tuple[str, int]) -> bool:
        request_id, index = bearer
        items = self._items(request_id)
        return index >= len(items) or (items[index].encodable and not items[index].dropped)

    def _take_out(self, meta: StepMetadata) -> None:
        for load in meta.loads:
            self._loads.pop(load.identifier, None)

    def _orders(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        book = self.cache.book
        retries = self._retries() if book.unsaved and not self.cache.inert else []
        bearers = self._bearers(scheduler_output.num_scheduled_tokens) if self._loads else {}
        if not (bearers or self._saves or retries or book.outstanding()):
            return StepMetadata()
        self._step += 1
        encodes = scheduler_output.scheduled_encoder_inputs
        meta = StepMetadata(self.cache.arena_id, self._step, encoder_inputs=encodes)
        for place, request_id, index in self._saves.values():
            if index in encodes.get(request_id, ()):
                meta.saves[place.identifier] = self._send_save(place)
            else:
                book.drop(place)  # preempted in the step that had scheduled it: no encode follows
        meta.retries = [self._send_save(place) for place in retries]
        for identifier, bearer in bearers.items():
            place = self._loads[identifier][0]
            if place.spec is not None:
                meta.loads.append(Load(place.id, place.offset + room(identifier), identifier, place.spec, bearer))
                book.send_load(place, self._step)
        self._saves.clear()
        return meta

    def note(self, request: Request) -> None:
        """In place of `ensure_cache_available`, once the cache is closed: the request may bear a load that waits."""
        if self._loads and request.request_id not in self._memos:
            self._remember(request)

    def give_up_item(self, request: Request, index: int) -> None:
        """In place of `update_state_after_alloc`, once the cache is closed: a promise of this pass stays one."""
        identifier = request.mm_features[index].identifier
        place = self._promises.pop(identifier, None)
        if place is not None:
            self._loads[identifier] = (place, (request.request_id, index))

    def give_up(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """In place of `build_connector_meta`, once the cache is closed: loads that fail on every rank, so that vLLM
        encodes what it was promised. What carries nothing to encode is loaded after all: its bytes are still mapped,
        and nobody changes them any more."""
        self._promises.clear()
        bearers = self._bearers(scheduler_output.num_scheduled_tokens)
        if not bearers or not scheduler_output.total_num_scheduled_tokens:
            return StepMetadata()
        self._step += 1
        encodes, nothing = scheduler_output.scheduled_encoder_inputs, TensorSpec(0, 0, self._policy.dtype)
        meta = StepMetadata(self.cache.arena_id, self._step, encoder_inputs=encodes)
        for identifier, bearer in bearers.items():
            place = self._loads[identifier][0]
            if place.spec is None or self._encodes(bearer):
                meta.loads.append(Load(0, -1, identifier, nothing, bearer))
            else:
                meta.loads.append(Load(place.id, place.offset + room(identifier), identifier, place.spec, bearer))
        self._take_out(meta)
        return meta

    def _send_save(self, place: Place) -> Save:
        """Only a dirty place is written as soon as it is sealed: nothing keeps the bytes of others, whose write is
        owed, in place until the store process gets to it."""
        self.cache.book.send_save(place, self._step, SAVING_RANK)
        spec = place.spec or TensorSpec(0, 0, self._policy.dtype)
        return Save(place.id, place.offset, place.length, place.identifier, spec, place.dirty)

    def _retries(self) -> list[Place]:
        """Places for saves that were dropped once, of tensors that vLLM still holds. Ends where room does."""
        book, places = self.cache.book, []
        for identifier, spec in list(islice(book.unsaved.items(), _RETRIES_A_PASS)):
            if identifier in self._allocated:
                continue  # not in the runner's cache before this step
            if identifier not in self._mirror:
                del book.unsaved[identifier]
                continue
            how = durability(identifier, persist_client_ids=self._policy.persist_client_ids)
            place = book.reserve_save(identifier, spec, self._persists(how), retry=True)
            if place is None:
                if book.live(identifier) is None:
                    book.unsaved.move_to_end(identifier)  # behind the others, one of which may fit
                else:
                    del book.unsaved[identifier]
                break
            places.append(place)
        return places

    # ---- the end of a request

    def request_finished(self, request: Request) -> dict[str, object] | None:
        """Forget the request. Returns what its answer tells a consumer, if this is a producer."""
        self._forget(request.request_id)
        if self._announcer is None or not request.mm_features:
            return None
        self.cache.drain(time.monotonic())  # no pass may follow in which its entries' writes would be taken in
        return self._announcer.announce(request, self._is_stored)

    def _is_stored(self, identifier: str) -> bool:
        place = self.cache.book.live(identifier)
        return place is not None and place.stored

    def _forget(self, request_id: str) -> None:
        memo = self._memos.pop(request_id, None)
        if memo is not None:
            self.cache.book.revision += 1  # the next pass hands on what was counted for it
            self._release(memo)
            if memo is self._asked:
                self._asked = None

    def _release(self, memo: Memo) -> None:
        for place in memo.leases.values():
            self.cache.book.release(place)
        memo.leases.clear()

    def snapshot(self) -> dict[str, int]:
        """All counts; `requests` is how many are remembered."""
        return {**self.cache.snapshot(), **self.counts, "requests": len(self._memos)}

    def shutdown(self) -> None:
        self.cache.close()


def _refuse_ambiguous(items: list[Item]) -> None:
    """One name for items that differ in what they need: vLLM asks by name alone, so neither is ever promised."""
    looks: dict[str, set[tuple[int, str]]] = {}
    for item in items:
        looks.setdefault(item.identifier, set()).add((item.rows, item.modality))
    for item in items:
        if len(looks[item.identifier]) > 1:
            item.durability = Durability.REFUSED
