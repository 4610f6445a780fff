# SPDX-License-Identifier: Apache-2.0
"""The scheduler side of the connector: what may be promised, what is waited for, what goes out with a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Container
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from lmcache_ec.accesses import Accesses
from lmcache_ec.cache import EncoderCache
from lmcache_ec.complaints import Complaints
from lmcache_ec.entry import TensorSpec, room
from lmcache_ec.key import MAX_NAMESPACE_CHARS
from lmcache_ec.place import Place
from lmcache_ec.recent import Recent
from lmcache_ec.staging import Readiness

from .announcement import Announcer, announced
from .decisions import Decisions
from .identifiers import (
    Durability,
    client_uuid,
    identifier_of,
    names_of,
    signed_identifiers,
    without_signature,
)
from .item import Item, Memo, Standing
from .lookups import LookUps
from .metadata import Load, Save, StepMetadata
from .policy import Policy
from .producer import Producer
from .topology import SAVING_RANK
from .versions import payload_updates

if TYPE_CHECKING:
    import logging

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from .media import EncodableMedia

_LOOK_AGAIN_S = 1.0
"""Between two looks at weights that stay in doubt."""

_KV_REMEMBERED_S = 600.0
"""How long the KV cache is believed to have what a request has left there."""

_NOTHING = TensorSpec(0, 0, "U8")
_UNSIGNED = (
    "a request names media without the signature of this engine's front end, so nothing says whether a name stands for "
    'content: such items stay in memory. See docs/security.md, "Front ends"'
)
_NAMES_STAY = (
    "a client or a proxy has named its media, and such names stay in the memory of this producer, so consumers encode "
    "the media themselves. configs/producer.yaml says what `persist_client_ids` would mean, and what else can be done"
)
_NEVER_CACHED = "prompt_embeds"
"""A modality of vLLM's that is no encoder output: the client's own tensor passes through."""


class Promised(NamedTuple):
    """A load that vLLM counts on: of the pinned place, for (request, index).

    One of `outdated` weights is loaded only for a request that carries nothing to encode: vLLM dies of an item that
    never comes. `staged` is the number under which every rank's device has it already; 0: none has.
    """

    place: Place
    item: tuple[str, int]
    outdated: bool = False
    staged: int = 0


class SchedulerSide:
    """Answers vLLM's scheduler. Runs in the EngineCore, on the scheduler's thread; `expect` alone is called on the one
    that takes requests in. Whoever has the turn owns all below (see `arrivals`), and nobody does I/O with it.

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
        self._producer = None if policy.consumer else Producer(cache)
        names = (
            *("promises", "deferred_passes", "timeouts", "unavailable", "mirror_resets", "foreign_announcements"),
            *("unsigned_items", "early_look_ups"),
        )
        self.counts = dict.fromkeys(names, 0)
        self.decisions = Decisions()
        self._policy = policy
        self._media = media
        self._complaints = Complaints(logger)
        self._look_ups = LookUps(cache, policy)
        self._turn = threading.RLock()  # see `arrivals`
        self._fault: Exception | None = None  # of an early look-up
        self._computed: Recent[str] = Recent(_KV_REMEMBERED_S)
        self._memos: dict[str, Memo] = {}
        self._asked: Memo | None = None
        self._drained = False
        self._now = 0.0
        self._start_deadline: float | None = None
        self._looked = time.monotonic()  # when a step was last asked to look at the weights
        self._step = 0
        self._mirror: set[str] = set()  # what vLLM's own encoder cache holds, of the weights that the ranks have
        self._allocated: set[str] = set()  # ... of it, since this pass
        self._missing: set[str] = set()  # asked about as the first in this pass, though the mirror has it
        self._questioned = False  # in this pass: an item may be gone, and come back untold, for what was asked about
        self._promises: dict[str, Place] = {}
        self._loads: dict[str, Promised] = {}
        self._saves: dict[str, tuple[Place, str, int]] = {}
        self._unavailable: set[str] = set()
        if cache.weights.moved:  # the ranks have reported during the start
            self._follow_weights()

    # ---- before a request is scheduled for the first time

    def expect(self, request: Request) -> None:
        """A request has arrived: begin its look-ups, if nobody has the turn. On vLLM's thread that takes requests in,
        see `arrivals`. Never raises."""
        if not request.mm_features or self._producer is not None or not self._turn.acquire(blocking=False):
            return
        try:
            if self._fault is None:
                self._look_up_early(request)
        except Exception as error:
            self._fault = error
        finally:
            self._turn.release()

    def _look_up_early(self, request: Request) -> None:
        now = time.monotonic()
        self.cache.listen(now)
        self._look_ups.begin(now)
        if self.cache.weights.moved:  # a pass follows them
            return
        signed = signed_identifiers(request.trace_headers, [feature.identifier for feature in request.mm_features])
        items = self._items_of(request, signed, self._own(announced(request)))
        for item in items:
            covered = item.identifier in self._mirror or self._computed.holds(item.identifier, now)
            if item.start < self._policy.window and not covered and self._look_ups.find(item) is None:
                self.counts["early_look_ups"] += self._look_ups.can_come(item, items, early=True)

    # ---- before an item is scheduled

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether the request can be scheduled now. False while an item of its can still arrive before its deadline."""
        if not self._drained:
            self._begin_pass()
        memo = self._memos.get(request.request_id)
        if memo is None or memo.count != len(request.mm_features):  # a streaming session adds media as it goes
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
        self._turn.acquire()
        self._drained = True
        if self._fault is not None:
            raise self._fault
        self._now = time.monotonic()
        self.cache.drain(self._now)
        if self.cache.weights.moved:
            self._follow_weights()
        self._look_ups.begin(self._now)  # until the next drain nothing changes whether entries are in use

    def _follow_weights(self) -> None:
        if self.cache.follow_weights():
            self._start_over()
        if self.cache.in_doubt:
            self._looked = 0.0  # the next step looks

    def _start_over(self) -> None:
        """The ranks have other weights, or an epoch has begun: nothing from before is promised any more. What vLLM
        takes for loaded already, though no step has loaded it, is encoded. What its own cache holds is of before:
        nothing of it is saved later, and whether it resets that cache or not, it may find these items in the tiers."""
        self._mirror.clear()
        for memo in self._memos.values():
            self._release(memo)
            for item in memo.items:
                item.announced = item.rewritten = False
                item.probe = None
        if self._producer is not None:
            self._producer.follow(self._mirror)
        self._loads = {identifier: promised._replace(outdated=True) for identifier, promised in self._loads.items()}

    def _remember(self, request: Request) -> Memo:
        earlier = self._memos.get(request.request_id)
        self._forget(request.request_id)
        coming = self._announced(request)
        signed = self._signed(request) | (earlier.signed if earlier is not None else frozenset())
        items = self._items_of(request, signed, coming)
        named = {item.identifier: item for item in sorted(items, key=lambda item: item.end)}
        memo = Memo(request.request_id, items, named, max((item.end for item in items), default=0), signed)
        memo.deadline_s = max(self._policy.deadline_s, self._policy.wait_for_producer_s if coming else 0.0)
        if self._announcer is not None and any(_stays(item, signed) for item in items):
            self._complaints.warn("names", _NAMES_STAY)
        self._memos[request.request_id] = memo
        return memo

    def _items_of(self, request: Request, signed: Container[str], coming: Container[str]) -> list[Item]:
        """`signed` and `coming` are identifiers: spelled by a front end of ours, announced by a producer."""
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

    def _signed(self, request: Request) -> frozenset[str]:
        """The identifiers of a request that a front end of this engine spelled. Read once, see `without_signature`."""
        identifiers = [feature.identifier for feature in request.mm_features]
        signed = signed_identifiers(request.trace_headers, identifiers)
        request.trace_headers = without_signature(request.trace_headers)
        if unsigned := len(identifiers) - sum(identifier in signed for identifier in identifiers):
            self.counts["unsigned_items"] += unsigned
            self._complaints.warn("unsigned", _UNSIGNED)
        return signed

    def _announced(self, request: Request) -> frozenset[str]:
        """The items that a producer has stored where this engine can find them."""
        claims = announced(request)
        others = {namespace for namespace in claims.values() if namespace != self.cache.namespace}
        if others and self.cache.persists:
            self.counts["foreign_announcements"] += 1
            self._complaints.warn(
                "namespace",
                f"a producer announces entries of namespace {min(others)[:MAX_NAMESPACE_CHARS]!r}, this engine's is "
                f"{self.cache.namespace}: checkpoint, configuration or versions differ, and nothing can be shared",
            )
        return self._own(claims)

    def _own(self, claims: dict[str, str]) -> frozenset[str]:
        return frozenset(i for i, namespace in claims.items() if namespace == self.cache.namespace)

    def _prepare(self, memo: Memo) -> bool:
        """Lease what is there, start what can come; wait, fail the request, or let vLLM encode."""
        if self._starting():
            return False
        end = memo.computed + self._policy.window
        wanted = [item for item in memo.items if item.start < end and item.end > memo.computed]
        if self.cache.accesses is not None:
            self._record(wanted, self.cache.accesses)
        standings = [self._standing(memo, item, wanted) for item in wanted]
        if Standing.PENDING in standings and self.cache.listen(self._now):  # a pass that is given up costs milliseconds
            standings = [self._standing(memo, item, wanted) for item in wanted]
        hopeless = any(s is Standing.MISSED and not item.encodable for item, s in zip(wanted, standings, strict=True))
        if Standing.PENDING in standings and not hopeless:
            pending = [item for item, standing in zip(wanted, standings, strict=True) if standing is Standing.PENDING]
            if not self._waited(memo, pending):
                self.counts["deferred_passes"] += 1
                return False
            self.counts["timeouts"] += 1
            for item, standing in zip(wanted, standings, strict=True):
                item.late = standing is Standing.PENDING
                item.missed |= item.late
            for item in pending:
                self._look_ups.late(item)
        standing_of = zip(wanted, standings, strict=True)
        if any((item.missed or standing is Standing.MISSED) and not item.encodable for item, standing in standing_of):
            self.counts["unavailable"] += 1
            self._unavailable.add(memo.request_id)
            return False
        self._end_wait(memo)
        return True

    def _record(self, wanted: list[Item], accesses: Accesses) -> None:
        """Once for each request. What is never cached is no encoder output that could be."""
        for item in wanted:
            if item.names and not item.recorded:
                item.recorded = True
                self._look_ups.access(item, accesses)

    def _end_wait(self, memo: Memo) -> None:
        if memo.waiting_since is not None:
            waited_s = self._now - memo.waiting_since
            memo.waited_s += waited_s
            memo.waiting_since = None
            self.decisions.waited(waited_s)

    def _starting(self) -> bool:
        """Whether the first requests still have to wait until the ranks have mapped the arena."""
        if self.cache.ready or self.cache.inert:
            return False
        if self._start_deadline is None:
            self._start_deadline = self._now + self._policy.start_timeout_s
        return self._now < self._start_deadline

    def _waited(self, memo: Memo, pending: list[Item]) -> bool:
        """Whether the request has waited for as long as it may, all its waits together."""
        if memo.waiting_since is None:
            memo.waiting_since = self._now
        longest_s = (
            memo.deadline_s if self._producer is not None else self._look_ups.patience_s(memo.deadline_s, pending)
        )
        return memo.waited_s + self._now - memo.waiting_since >= longest_s

    def _standing(self, memo: Memo, item: Item, among: list[Item]) -> Standing:
        """An item that carries nothing to encode is in nobody's hands but ours until the request holds it: vLLM may
        evict its own copy before that, so only a lease will do."""
        identifier = item.identifier
        if item.held_at is not None and memo.computed > item.held_at[0] and memo.preemptions == item.held_at[1]:
            if self._producer is not None:
                self._producer.refresh(item, self._look_ups.sought(item), self._now)
            return Standing.SETTLED
        if self._producer is not None and self._look_ups.usable(item):
            place, cached = self._look_ups.find(item), identifier in self._mirror
            return self._producer.standing(memo.request_id, item, self._look_ups.sought(item), place, cached, self._now)
        leased = identifier in memo.leases and self._look_ups.serves(item)
        if leased or (item.encodable and identifier in self._mirror):
            return self._staged(memo, item)
        place = self._look_ups.find(item)
        if place is not None and self.cache.book.lease(place):
            memo.leases[identifier] = place
            item.missed = False
            return self._staged(memo, item)
        if place is not None:  # over the budget of leases: promised if it is still there when it is asked for
            return Standing.SETTLED if item.encodable else Standing.PENDING
        item.missed = item.missed or not self._look_ups.can_come(item, among)
        item.awaited |= not item.missed
        return Standing.MISSED if item.missed else Standing.PENDING

    def _staged(self, memo: Memo, item: Item) -> Standing:
        """Whether an item that is leased can be scheduled. One that carries nothing to encode has first to be where its
        load cannot fail any more: if it does not get there its request fails, and not the engine."""
        if item.encodable:
            return Standing.SETTLED
        match self.cache.staging.ask(memo.leases[item.identifier], memo.request_id):
            case Readiness.FAILED:
                item.missed = True
                return Standing.MISSED
            case Readiness.PENDING:
                return Standing.PENDING
            case Readiness.NO_ROOM:  # a healthy device is no reason to fail: at last the step loads it
                return Standing.SETTLED if self._waited(memo, [item]) else Standing.PENDING
        return Standing.SETTLED

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
        if memo is None or item is None or item.end <= memo.computed or not self._look_ups.usable(item):
            return False
        if self._producer is not None:
            return self._producer.has(item, self._look_ups.find(item))
        if item.dropped or not self._policy.consumer:
            return False
        place = memo.leases.get(identifier) or self._look_ups.held(item)
        if place is None or not self._look_ups.fits(place, item):
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
            self._drop_load(identifier)  # put off, and vLLM has emptied its cache since
            staged = self.cache.staging.take(place, request.request_id)
            self._loads[identifier] = Promised(place, (request.request_id, index), staged=staged)
            if memo is not None and identifier in memo.leases:
                self._end_lease(memo, identifier)
        elif self._producer is not None and self._producer.skips(identifier):
            pass
        elif memo is not None and self._policy.producer and self._look_ups.in_use:
            self._reserve(memo.items[index], request.request_id, index)

    def _reserve(self, item: Item, request_id: str, index: int) -> None:
        spec = self._look_ups.sought(item)
        if spec is None or not item.names:
            return
        name = item.names[0]
        place = self.cache.book.reserve_save(name.text, spec, self._persists(name.durability))
        if place is not None:
            place.modality = item.modality
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
        self._count_encodes(scheduler_output.scheduled_encoder_inputs)
        if scheduler_output.total_num_scheduled_tokens and (self._loads or not self.cache.inert):
            meta = self._orders(scheduler_output)
        else:
            meta = StepMetadata()
            for place, _, _ in self._saves.values():
                self._drop_save(place)
            self._saves.clear()
        if self._producer is not None:
            self._producer.end_pass()
        self._allocated.clear()
        self._asked = None
        self._drained = self._questioned = False
        self.cache.hand_changes()
        self.cache.hand_ledger({**self._counts(), "requests": len(self._memos)})
        if self.cache.accesses is not None:
            self.cache.accesses.hand_over()
        self._take_out(meta)  # `give_up` needs them if anything before this raises
        self._turn.release()
        return meta

    def _count_encodes(self, encodes: dict[str, list[int]]) -> None:
        for request_id, indices in encodes.items():
            items = self._items(request_id)
            for index in indices:
                if index < len(items):
                    self.decisions.encoded(items[index].modality, self._why_encoded(items[index]))

    def _why_encoded(self, item: Item) -> str:
        if not item.names:
            return "not_cacheable"
        if not self._look_ups.in_use:
            return "off"
        if item.late:
            return "deadline"
        if item.refused:
            return "policy"
        if self._look_ups.misfit(item):
            return "misfit"
        return "not_found" if item.awaited else "new"

    def _count_load(self, place: Place, bearer: tuple[str, int]) -> None:
        request_id, index = bearer
        items = self._items(request_id)
        if index < len(items):
            item = items[index]
            place.modality = item.modality
            self.decisions.loaded(place, item.modality, self.cache.policy.encode_s([(item.modality, item.rows)]))

    def _follow_frees(self, freed: list[str]) -> None:
        if self._missing.difference(freed):
            # vLLM asks only about what its own cache lacks: it has emptied it (`reset_encoder_cache`).
            self.counts["mirror_resets"] += 1
            self._mirror &= self._allocated
            if self._producer is not None:
                self._producer.follow(self._mirror)
            for identifier in self._loads.keys() - self._allocated:
                self._drop_load(identifier)
        self._missing.clear()
        for identifier in freed:
            if identifier in self._allocated:
                continue  # evicted early in this pass, and given room again later
            self._mirror.discard(identifier)
            for name in names_of(identifier):
                self.cache.book.unsaved.pop(name, None)
            self._drop_load(identifier)  # put off by a step without tokens, now unwanted
        if self._producer is not None and freed:
            self._producer.follow(self._mirror)

    def _drop_load(self, identifier: str) -> None:
        """No step will carry it out."""
        promised = self._loads.pop(identifier, None)
        if promised is not None:
            self.cache.book.unpin(promised.place)
            self.cache.staging.unspent(promised.staged)

    def _follow_payloads(self, scheduler_output: SchedulerOutput) -> None:
        """0.33's V2 runner lets go of what an item is encoded from once it is computed, and gets it again with the
        request, or with an encode that vLLM schedules (`encoder_input_updates`). After a rollback a load of such an
        item could not be made up for: it is not promised."""
        updates = payload_updates(scheduler_output)
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
            (identifier, self._bearer(identifier, load.item, scheduled)) for identifier, load in self._loads.items()
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

    def _load(self, identifier: str, void: bool, bearer: tuple[str, int]) -> Load:
        """The order to load what was promised. One that is void has it encoded, if the bearer can."""
        promised, encodes = self._loads[identifier], self._encodes(bearer)
        place = promised.place
        if place.spec is None or (void and encodes):
            self.cache.staging.unspent(promised.staged)
            return Load(0, 0, identifier, _NOTHING, bearer)
        offset = place.offset + room(place.identifier)
        return Load(place.id, offset, identifier, place.spec, bearer, encodes, promised.staged)

    def _take_out(self, meta: StepMetadata) -> None:
        for load in meta.loads:
            self._loads.pop(load.identifier, None)

    def _orders(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        book = self.cache.book
        retries = self._retries() if book.unsaved and self._look_ups.in_use else []
        again = self._reserve_again(scheduler_output)
        bearers = self._bearers(scheduler_output.num_scheduled_tokens) if self._loads else {}
        copies = bool(bearers or self._saves or retries)
        look, encodes = self._looks(copies), scheduler_output.scheduled_encoder_inputs
        timed = bool(encodes) and self._policy.consumer
        if not (copies or look or timed or book.outstanding()):
            return StepMetadata()
        self._step += 1
        if timed:
            encoded = [self._items(request_id)[index] for request_id, indices in encodes.items() for index in indices]
            self.cache.policy.begin_encodes(self._step, [(item.modality, item.rows) for item in encoded])
        meta = StepMetadata(self.cache.arena_id, self._step, encoder_inputs=encodes, look=look)
        meta.namespace, meta.weights = self.cache.namespace, self.cache.held
        for identifier, (saved, request_id, index) in self._saves.items():
            if identifier in again and self._producer is not None:
                self._producer.encoded_again(identifier)
                meta.encodes.append((request_id, index))
            elif index not in encodes.get(request_id, ()):
                self._drop_save(saved)  # preempted in the step that had scheduled it: no encode follows
                continue
            meta.saves[identifier] = self._send_save(saved)
        meta.retries = [self._send_save(place) for place in retries]
        for identifier, bearer in bearers.items():
            promised = self._loads[identifier]
            meta.loads.append(load := self._load(identifier, promised.outdated, bearer))
            if load.place:
                self._count_load(promised.place, bearer)
                book.send_load(promised.place, self._step)
            else:
                book.unpin(promised.place)
        self._saves.clear()
        return meta

    def _reserve_again(self, scheduler_output: SchedulerOutput) -> set[str]:
        """Places for what the ranks encode though vLLM counts it as cached, as far as the encoder's budget goes."""
        if self._producer is None or not self._producer.again or not self._look_ups.in_use:
            return set()
        encodes = scheduler_output.scheduled_encoder_inputs
        memos = ((self._memos.get(name), indices) for name, indices in encodes.items())
        rows = sum(memo.items[index].rows for memo, indices in memos if memo is not None for index in indices)
        reserved = set()
        for identifier, (request_id, item) in self._producer.again.items():
            memo = self._memos.get(request_id)
            if memo is None or request_id not in scheduler_output.num_scheduled_tokens:
                continue
            if rows and rows + item.rows > self._policy.encoder_budget:
                break  # not announced this time
            index = next(index for index, one in enumerate(memo.items) if one is item)
            self._reserve(item, request_id, index)
            if identifier in self._saves:
                reserved.add(identifier)
                rows += item.rows
        return reserved

    def _drop_save(self, place: Place) -> None:
        """No encode follows, and vLLM counts the item as cached all the same."""
        self.cache.book.drop(place)
        if self._producer is not None:
            self._producer.not_encoded(identifier_of(place.identifier))

    def _looks(self, copies: bool) -> bool:
        """Whether a step's ranks look at their weights before all else: while those are in doubt, and now and then in a
        step that copies, for those who write past all calls."""
        due_s = _LOOK_AGAIN_S if self.cache.in_doubt else self._policy.weights_check_s if copies else 0.0
        if not due_s or not self.cache.weights.started or self.cache.inert or self._now - self._looked < due_s:
            return False
        self._looked = self._now
        return True

    def note(self, request: Request) -> None:
        """In place of `ensure_cache_available`, once the cache is closed: the request may bear a load that waits."""
        if self._loads and request.request_id not in self._memos:
            self._remember(request)

    def give_up_item(self, request: Request, index: int) -> None:
        """In place of `update_state_after_alloc`, once the cache is closed: a promise of this pass stays one."""
        identifier = request.mm_features[index].identifier
        place = self._promises.pop(identifier, None)
        if place is not None:
            staged = self.cache.staging.take(place, request.request_id)
            self._loads[identifier] = Promised(place, (request.request_id, index), staged=staged)

    def give_up(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """In place of `build_connector_meta`, once the cache is closed: loads that fail on every rank, so that vLLM
        encodes what it was promised. What carries nothing to encode is loaded after all: its bytes are still mapped,
        and nobody changes them any more."""
        self._promises.clear()
        bearers = self._bearers(scheduler_output.num_scheduled_tokens)
        if not bearers or not scheduler_output.total_num_scheduled_tokens:
            return StepMetadata()
        self._step += 1
        meta = StepMetadata(self.cache.arena_id, self._step, encoder_inputs=scheduler_output.scheduled_encoder_inputs)
        meta.namespace, meta.weights = self.cache.namespace, self.cache.held
        meta.loads = [self._load(identifier, True, bearer) for identifier, bearer in bearers.items()]
        self._take_out(meta)
        return meta

    def _send_save(self, place: Place) -> Save:
        """Only a dirty place is written as soon as it is sealed: nothing keeps the bytes of others, whose write is
        owed, in place until the store process gets to it."""
        self.cache.book.send_save(place, self._step, SAVING_RANK)
        spec = place.spec or TensorSpec(0, 0, self._policy.dtype)
        identifier = identifier_of(place.identifier)
        return Save(place.id, place.offset, place.length, identifier, place.identifier, spec, place.dirty)

    def _retries(self) -> list[Place]:
        """Places for saves that were dropped once, of tensors that vLLM still holds."""

        def holds(name: str) -> bool | None:
            identifier = identifier_of(name)
            if identifier in self._allocated:
                return None  # not in the runner's cache before this step
            return identifier in self._mirror

        durability_of = self._policy.naming.durability_of
        return self.cache.book.retries(holds, lambda name: self._persists(durability_of(name)))

    # ---- the end of a request

    def request_finished(self, request: Request) -> dict[str, object] | None:
        """Forget the request. Returns what its answer tells a consumer, if this is a producer."""
        with self._turn:
            memo = self._memos.get(request.request_id)
            if memo is not None and self._policy.reuses_kv:
                for item in memo.items:
                    self._computed.add(item.identifier, self._now)
            self._forget(request.request_id)
            if self._announcer is None or not request.mm_features:
                return None
            self.cache.drain(time.monotonic())  # no pass may follow in which its entries' writes would be taken in
            self._look_ups.begin(self._now)
            return self._announcer.announce(request, partial(self._is_stored, memo), self.cache.namespace)

    def _is_stored(self, memo: Memo | None, identifier: str) -> bool:
        item = None if memo is None else memo.named.get(identifier)
        if self._producer is None or item is None:
            return False
        return self._producer.stored(item, self._look_ups.find(item))

    def _forget(self, request_id: str) -> None:
        memo = self._memos.pop(request_id, None)
        if memo is not None:
            self.cache.book.revision += 1  # the next pass hands on what was counted for it
            self._release(memo)
            self._end_wait(memo)
            self.decisions.ended |= not self._memos
            if memo is self._asked:
                self._asked = None

    def _release(self, memo: Memo) -> None:
        for identifier in list(memo.leases):
            self._end_lease(memo, identifier)

    def _end_lease(self, memo: Memo, identifier: str) -> None:
        place = memo.leases.pop(identifier)
        self.cache.staging.release(place, memo.request_id)
        self.cache.book.release(place)

    # ---- weights

    @property
    def follows_weight_versions(self) -> bool:
        return self._policy.follows_weight_versions

    def set_weight_version(self, version: str) -> None:
        """vLLM was given the version of the weights that its workers have. Between passes, after a look at these."""
        with self._turn:
            self.cache.drain(time.monotonic())
            problem = self.cache.weights.set_version(version)
        if problem:
            self._complaints.warn("version", f"{problem}: entries are kept in memory only")

    # ---- what vLLM's own cache may drop, see `encoder_cache_manager`

    def restore_s(self, identifier: str, modality: str, rows: int) -> float:
        """See `LowerTiers`."""
        with self._turn:
            return self._look_ups.restore_s(identifier, modality, rows)

    def snapshot(self) -> dict[str, int]:
        """All counts; `requests` is how many are remembered."""
        with self._turn:
            return {**self.cache.snapshot(), **self._counts(), "requests": len(self._memos)}

    def measures(self) -> dict[str, int]:
        """All that `metric_table` is made of: counts, gauges and the counts of histograms."""
        with self._turn:
            cache, counts = self.cache, self.snapshot()
            evicted = {"cpu_evictions": counts["evictions"], "cpu_evicted_bytes": counts["evicted_bytes"]}
            sizes = dict(cache.book.saved_sizes.counts())
            return {
                **counts,
                **evicted,
                **sizes,
                **self.decisions.counts(),
                **cache.copies.counts(),
                **cache.tallies.totals(),
            }

    def _counts(self) -> dict[str, int]:
        own = {**self.counts, "misfits": self._look_ups.misfits}
        return own if self._producer is None else {**own, **self._producer.counts}

    def shutdown(self) -> None:
        self._turn.acquire()  # for good
        self.cache.close()


def _stays(item: Item, signed: frozenset[str]) -> bool:
    """Whether an item's own name, and nothing about its front end, keeps it in memory."""
    return item.identifier in signed and any(name.durability is Durability.LOCAL for name in item.names)


def _refuse_ambiguous(items: list[Item]) -> None:
    """One name for items that differ in what they need: vLLM asks by name alone, so neither is ever promised."""
    looks: dict[str, set[tuple[int, str]]] = {}
    for item in items:
        looks.setdefault(item.identifier, set()).add((item.rows, item.modality))
    for item in items:
        if len(looks[item.identifier]) > 1:
            item.names = ()
