# SPDX-License-Identifier: Apache-2.0
"""The scheduler side of the connector: which items to promise, which to wait for, what to send with a step."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from lmcache_ec.cache import EncoderCache
from lmcache_ec.complaints import Complaints
from lmcache_ec.place import Place
from lmcache_ec.recent import Recent

from .announcement import Announcer
from .decisions import Decisions
from .identifiers import names_of
from .intake import Intake, stays_in_memory
from .item import Memo, Standing, items_of
from .loads import Loads
from .lookups import LookUps
from .metadata import StepMetadata
from .policy import Policy
from .producer import Producer
from .saves import Saves
from .versions import payload_updates
from .waits import Waits

if TYPE_CHECKING:
    import logging

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from .media import EncodableMedia

_LOOK_AGAIN_S = 1.0
"""Interval between two checks of weights that stay in doubt."""

_KV_REMEMBERED_S = 600.0
"""How long the KV cache is assumed to hold what a request has left there."""

_NAMES_STAY = (
    "a client or a proxy has named its media; entries with such names stay in the memory of this producer, so "
    "consumers encode the media themselves. configs/producer.yaml explains `persist_client_ids` and the alternatives"
)


class SchedulerSide:
    """Answers vLLM's scheduler. Runs in the EngineCore, on the scheduler's thread; only `expect` is called on vLLM's
    input thread. The thread that has the turn owns all state below (see `arrivals`) and does no I/O meanwhile.

    vLLM calls `ensure_cache_available`, `has_cache_item`, `update_state_after_alloc` and `build_connector_meta` within
    one scheduling pass (vllm/v1/core/sched/scheduler.py). A promise lives for that pass: `has_cache_item` pins,
    `update_state_after_alloc` turns it into a load, `build_connector_meta` sends or drops it.
    """

    def __init__(
        self,
        cache: EncoderCache,
        policy: Policy,
        media: EncodableMedia,
        logger: logging.Logger,
        announcer: Announcer | None = None,
    ) -> None:
        """`announcer` is given for a producer only."""
        self.cache = cache
        self._announcer = announcer
        self._producer = None if policy.consumer else Producer(cache)
        names = ("promises", "deferred_passes", "timeouts", "unavailable", "mirror_resets", "early_look_ups")
        self.counts = dict.fromkeys(names, 0)
        self.decisions = Decisions()
        self._policy = policy
        self._complaints = Complaints(logger)
        self._intake = Intake(cache, policy, media, self._complaints)
        self._look_ups = LookUps(cache, policy)
        self._turn = threading.RLock()  # see `arrivals`
        self._fault: Exception | None = None  # of an early look-up
        self._computed: Recent[str] = Recent(_KV_REMEMBERED_S)
        self._memos: dict[str, Memo] = {}
        self._asked: Memo | None = None
        self._drained = False
        self._now = 0.0
        self._start_deadline: float | None = None
        self._looked = time.monotonic()  # when a step was last asked to check the weights
        self._step = 0
        self._mirror: set[str] = set()  # what vLLM's own cache holds, for the ranks' weights; `Waits` shares it
        self._allocated: set[str] = set()  # the part of it allocated in this pass
        self._missing: set[str] = set()  # in the mirror, yet the first item asked about in this pass
        self._questioned = False  # asked about an item in this pass: vLLM may have evicted others for it unseen
        self._promises: dict[str, Place] = {}
        self._loads = Loads(cache, self._memos, self.decisions)
        self._saves = Saves(cache, policy, self._look_ups, self._producer)
        self._waits = Waits(cache, self._look_ups, self._producer, self._mirror, self.decisions)
        self._unavailable: set[str] = set()
        if cache.weights.moved:  # the ranks reported during startup
            self._follow_weights()

    # ---- before a request is scheduled for the first time

    def expect(self, request: Request) -> None:
        """A request has arrived: begin its look-ups, if the turn is free. Called on vLLM's input thread, see
        `arrivals`. Never raises."""
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
        if not self._intake.may_come(request, now):
            return
        self.cache.listen(now)
        self._look_ups.begin(now)
        if self.cache.weights.moved:  # left to the next pass
            return
        items = self._intake.peek(request)
        for item in items:
            covered = item.identifier in self._mirror or self._computed.holds(item.identifier, now)
            if item.start < self._policy.window and not covered and self._look_ups.find(item) is None:
                self.counts["early_look_ups"] += self._look_ups.can_come(item, items, early=True)

    # ---- before an item is scheduled

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether the request can be scheduled now. False while any of its items can still arrive by its deadline."""
        if not self._drained:
            self._begin_pass()
        memo = self._memos.get(request.request_id)
        if memo is None or memo.count != len(request.mm_features):  # a streaming session adds media over time
            memo = self._remember(request)
        self._asked = memo
        if num_computed_tokens >= memo.end:
            if memo.leases:
                self._waits.release(memo)
            return True
        memo.computed, memo.preemptions = num_computed_tokens, request.num_preemptions
        return self._prepare(memo)

    def take_unavailable_requests(self) -> set[str]:
        """Requests with an item that carries nothing to encode and is not in the cache. Each is returned once."""
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
        self._look_ups.begin(self._now)  # whether entries may be used cannot change before the next drain

    def _follow_weights(self) -> None:
        if self.cache.follow_weights():
            self._start_over()
        if self.cache.in_doubt:
            self._looked = 0.0  # the next step looks

    def _start_over(self) -> None:
        """The ranks have other weights, or an epoch has begun: no earlier entry is promised any more. Items that vLLM
        counts as loaded, though no step has loaded them, are encoded. vLLM's own cache now holds old outputs: none of
        them is saved later, and whether vLLM resets that cache or not, it may find these items in the tiers."""
        self._mirror.clear()
        for memo in self._memos.values():
            self._waits.release(memo)
            for item in memo.items:
                item.announced = item.rewritten = False
                item.probe = None
        if self._producer is not None:
            self._producer.follow(self._mirror)
        self._loads.outdate()

    def _remember(self, request: Request) -> Memo:
        earlier = self._memos.get(request.request_id)
        self._forget(request.request_id)
        coming = self._intake.announced(request)
        signed = self._intake.signed(request) | (earlier.signed if earlier is not None else frozenset())
        items = self._intake.items(request, signed, coming)
        named = {item.identifier: item for item in sorted(items, key=lambda item: item.end)}
        memo = Memo(request.request_id, items, named, max((item.end for item in items), default=0), signed)
        memo.deadline_s = max(self._policy.deadline_s, self._policy.wait_for_producer_s if coming else 0.0)
        if self._announcer is not None and any(stays_in_memory(item, signed) for item in items):
            self._complaints.warn("names", _NAMES_STAY)
        self._memos[request.request_id] = memo
        return memo

    def _prepare(self, memo: Memo) -> bool:
        """Lease items in the arena, start fetching those that can come; wait, fail the request, or let vLLM encode."""
        if self._starting():
            return False
        end = memo.computed + self._policy.window
        wanted = [item for item in memo.items if item.start < end and item.end > memo.computed]
        if self.cache.accesses is not None:
            self._look_ups.record(wanted, self.cache.accesses)
        standings = [self._waits.standing(memo, item, wanted, self._now) for item in wanted]
        if Standing.PENDING in standings and self.cache.listen(self._now):  # deferring the request costs milliseconds
            standings = [self._waits.standing(memo, item, wanted, self._now) for item in wanted]
        hopeless = any(s is Standing.MISSED and not item.encodable for item, s in zip(wanted, standings, strict=True))
        if Standing.PENDING in standings and not hopeless:
            pending = [item for item, standing in zip(wanted, standings, strict=True) if standing is Standing.PENDING]
            if not self._waits.waited(memo, pending, self._now):
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
        self._waits.end(memo, self._now)
        return True

    def _starting(self) -> bool:
        """Whether the first requests still have to wait until the ranks have mapped the arena."""
        if self.cache.ready or self.cache.inert:
            return False
        if self._start_deadline is None:
            self._start_deadline = self._now + self._policy.start_timeout_s
        return self._now < self._start_deadline

    # ---- within a pass

    def has_cache_item(self, identifier: str) -> bool:
        """Promise the item for this pass, if its entry is in the arena, verified, and fits the current request."""
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
        """vLLM has allocated room for the item: it is loaded if it was promised in this pass, otherwise encoded."""
        identifier = request.mm_features[index].identifier
        self._mirror.add(identifier)
        self._allocated.add(identifier)
        memo = self._memos.get(request.request_id)
        if memo is not None:
            memo.items[index].held_at = (memo.computed, memo.preemptions)
        place = self._promises.pop(identifier, None)
        if place is not None:
            self._loads.drop(identifier)  # deferred, and vLLM has emptied its cache since
            self._loads.add(identifier, place, (request.request_id, index))
            if memo is not None and identifier in memo.leases:
                self._waits.end_lease(memo, identifier)
        elif self._producer is not None and self._producer.skips(identifier):
            pass
        elif memo is not None and self._policy.producer and self._look_ups.in_use:
            self._saves.reserve(memo.items[index], request.request_id, index)

    def _withdraw(self, identifier: str) -> None:
        place = self._promises.pop(identifier, None)
        if place is not None:
            self.cache.book.unpin(place)

    # ---- the end of a pass

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """The orders of this step for the ranks. Places are sent only with steps that schedule tokens: the V1 runner
        loses the metadata of others."""
        if not self._drained:
            self._begin_pass()
        for identifier in list(self._promises):
            self._withdraw(identifier)
        self._follow_frees(scheduler_output.free_encoder_mm_hashes)
        self._follow_payloads(scheduler_output)
        self._count_encodes(scheduler_output.scheduled_encoder_inputs)
        if scheduler_output.total_num_scheduled_tokens and (self._loads.waiting or not self.cache.inert):
            meta = self._orders(scheduler_output)
        else:
            meta = StepMetadata()
            self._saves.drop_all()
        if self._producer is not None:
            self._producer.end_pass()
        self._allocated.clear()
        self._asked = None
        self._drained = self._questioned = False
        self.cache.hand_changes()
        self.cache.hand_ledger(self._ledger, later=bool(meta.step))
        if self.cache.accesses is not None:
            self.cache.accesses.hand_over()
        self._loads.sent(meta)  # `give_up` needs them if anything before this raises
        self._turn.release()
        return meta

    def _count_encodes(self, encodes: dict[str, list[int]]) -> None:
        for request_id, indices in encodes.items():
            items = items_of(self._memos, request_id)
            for index in indices:
                if index < len(items):
                    self.decisions.encoded(items[index].modality, self._look_ups.why_encoded(items[index]))

    def _follow_frees(self, freed: list[str]) -> None:
        if self._missing.difference(freed):
            self._follow_reset()  # vLLM asks only about what its own cache lacks
        self._missing.clear()
        for identifier in freed:
            if identifier in self._allocated:
                continue  # evicted early in this pass, and allocated again later
            self._mirror.discard(identifier)
            for name in names_of(identifier):
                self.cache.book.unsaved.pop(name, None)
            self._loads.drop(identifier)  # deferred by a step without tokens, now unwanted
        if self._producer is not None and freed:
            self._producer.follow(self._mirror)

    def _follow_reset(self) -> None:
        """vLLM has emptied its own cache; its allocations of this pass came later."""
        self.counts["mirror_resets"] += 1
        self._mirror &= self._allocated
        if self._producer is not None:
            self._producer.follow(self._mirror)
        for identifier in self._loads.waiting.keys() - self._allocated:
            self._loads.drop(identifier)

    def _follow_payloads(self, scheduler_output: SchedulerOutput) -> None:
        """0.33's V2 runner drops the payload of an item once the item is computed, and gets it again with the
        request, or with an encode that vLLM schedules (`encoder_input_updates`). If a load of such an item failed
        after a rollback, it could not be encoded instead: so the item is not promised."""
        updates = payload_updates(scheduler_output)
        if updates is None:
            return
        for new in scheduler_output.scheduled_new_reqs:
            for item in items_of(self._memos, new.req_id):
                item.dropped = False
        for request_id, changes in updates.items():
            items = items_of(self._memos, request_id)
            for index, payload in changes.items():
                if index < len(items):
                    items[index].dropped = payload is None

    def _orders(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        book = self.cache.book
        owed = book.unsaved and self._look_ups.in_use
        retries = self._saves.retries(self._mirror, self._allocated) if owed else []
        again = self._saves.reserve_again(scheduler_output, self._memos)
        bearers = self._loads.bearers(scheduler_output.num_scheduled_tokens) if self._loads.waiting else {}
        copies = bool(bearers or self._saves.reserved or retries)
        look, encodes = self._looks(copies), scheduler_output.scheduled_encoder_inputs
        timed = bool(encodes) and self._policy.consumer
        if not (copies or look or timed or book.outstanding()):
            return StepMetadata()
        meta = self._next_step(encodes)
        meta.look = look
        if timed:
            encoded = [items_of(self._memos, name)[index] for name, indices in encodes.items() for index in indices]
            self.cache.policy.begin_encodes(self._step, [(item.modality, item.rows) for item in encoded])
        self._saves.send(meta, again, retries)
        meta.loads = self._loads.send(self._step, bearers)
        return meta

    def _next_step(self, encodes: dict[str, list[int]]) -> StepMetadata:
        self._step += 1
        meta = StepMetadata(self.cache.arena_id, self._step, encoder_inputs=encodes)
        meta.namespace, meta.weights = self.cache.namespace, self.cache.held
        return meta

    def _looks(self, copies: bool) -> bool:
        """Whether the ranks check their weights at the start of this step: while those are in doubt, and now and then
        in a step that copies, for writers that bypass all calls."""
        due_s = _LOOK_AGAIN_S if self.cache.in_doubt else self._policy.weights_check_s if copies else 0.0
        if not due_s or not self.cache.weights.started or self.cache.inert or self._now - self._looked < due_s:
            return False
        self._looked = self._now
        return True

    def note(self, request: Request) -> None:
        """Replaces `ensure_cache_available` once the cache is closed: the request may bear a waiting load."""
        if self._loads.waiting and request.request_id not in self._memos:
            self._remember(request)

    def give_up_item(self, request: Request, index: int) -> None:
        """Replaces `update_state_after_alloc` once the cache is closed: a promise made in this pass is kept."""
        identifier = request.mm_features[index].identifier
        place = self._promises.pop(identifier, None)
        if place is not None:
            self._loads.add(identifier, place, (request.request_id, index))

    def give_up(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """Replaces `build_connector_meta` once the cache is closed: sends loads that fail on every rank, so that vLLM
        encodes what it was promised. Items that carry nothing to encode are loaded after all: their bytes are still
        mapped, and no process changes them any more."""
        self._promises.clear()
        bearers = self._loads.bearers(scheduler_output.num_scheduled_tokens)
        if not bearers or not scheduler_output.total_num_scheduled_tokens:
            return StepMetadata()
        meta = self._next_step(scheduler_output.scheduled_encoder_inputs)
        meta.loads = [self._loads.order(identifier, bearer, void=True) for identifier, bearer in bearers.items()]
        self._loads.sent(meta)
        return meta

    # ---- the end of a request

    def request_finished(self, request: Request) -> dict[str, object] | None:
        """Forget the request. For a producer, returns what its response tells a consumer."""
        with self._turn:
            memo = self._memos.get(request.request_id)
            if memo is not None and self._policy.reuses_kv:
                for item in memo.items:
                    self._computed.add(item.identifier, self._now)
            self._forget(request.request_id)
            if self._announcer is None or not request.mm_features:
                return None
            self.cache.drain(time.monotonic())  # there may be no later pass to process its entries' writes
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
            self.cache.book.revision += 1  # so that the next pass hands over what was counted for it
            self._waits.release(memo)
            self._waits.end(memo, self._now)
            self.decisions.ended |= not self._memos
            if memo is self._asked:
                self._asked = None

    # ---- weights

    @property
    def follows_weight_versions(self) -> bool:
        return self._policy.follows_weight_versions

    def set_weight_version(self, version: str) -> None:
        """vLLM was given the version of its workers' weights. Called between passes, after a check of the weights."""
        with self._turn:
            self.cache.drain(time.monotonic())
            problem = self.cache.weights.set_version(version)
        if problem:
            self._complaints.warn("version", f"{problem}: entries are kept in memory only")

    # ---- vLLM's own cache

    def forget_vllm_cache(self) -> None:
        """`EngineCore.reset_encoder_cache` was called, between passes. The next pass fetches what vLLM now lacks."""
        with self._turn:
            self._follow_reset()

    def restore_s(self, identifier: str, modality: str, rows: int) -> float:
        """See `LowerTiers`."""
        with self._turn:
            return self._look_ups.restore_s(identifier, modality, rows)

    def snapshot(self) -> dict[str, int]:
        """All counts; `requests` is the number of requests remembered."""
        with self._turn:
            return {**self.cache.snapshot(), **self._ledger()}

    def measures(self) -> dict[str, int]:
        """All values for `metric_table`: counts, gauges and the counts of histograms."""
        with self._turn:
            cache, counts = self.cache, self.snapshot()
            evicted = {"cpu_evictions": counts["evictions"], "cpu_evicted_bytes": counts["evicted_bytes"]}
            sizes, copies = dict(cache.book.saved_sizes.counts()), cache.copies.counts()
            return {**counts, **evicted, **sizes, **self.decisions.counts(), **copies, **cache.tallies.totals()}

    def _ledger(self) -> dict[str, int]:
        return {**self._counts(), "requests": len(self._memos)}

    def _counts(self) -> dict[str, int]:
        own = {**self.counts, **self._intake.counts, "misfits": self._look_ups.misfits}
        return own if self._producer is None else {**own, **self._producer.counts}

    def shutdown(self) -> None:
        self._turn.acquire()  # for good
        self.cache.close()
