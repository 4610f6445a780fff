# SPDX-License-Identifier: Apache-2.0
"""A rank's side over its real links: what is copied, reported and handed over, and what is encoded instead."""

import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.testbed.stand_ins import PATIENCE_S, SILENT, WIDTH, embedding, sent
from benchmarks.testbed.waiting import wait_until
from lmcache_ec.adapters.vllm.copier import HostCopier
from lmcache_ec.adapters.vllm.metadata import Load, Save, StepMetadata
from lmcache_ec.adapters.vllm.tensors import dtype_name, view
from lmcache_ec.adapters.vllm.worker import Agree, WorkerSide
from lmcache_ec.channel import Outcome, Report, Saved, Stage
from lmcache_ec.entry import TensorSpec, entry_length, room
from lmcache_ec.link import LinkClosed
from lmcache_ec.rank import Rank
from tests.unit.preallocated import PreallocatedCache
from tests.unit.scheduler_end import SchedulerEnd

SPEC = TensorSpec(4, WIDTH, "F32")
COPIED, ABSENT, FAILED = Outcome

STORE = 7  # the incarnation that SchedulerEnd introduces
PLACE = 11


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    rows, width = tensor.shape
    return TensorSpec(rows, width, dtype_name(tensor.dtype))


class Rig:
    """The ranks of one engine, attached to an arena, and the scheduler's end of their links."""

    def __init__(self, ranks: int = 1, agree: Agree = list) -> None:
        name = uuid.uuid4().hex
        self.workers = [WorkerSide(rank, HostCopier(), agree, SILENT) for rank in range(ranks)]
        for worker in self.workers:
            worker.start(name)
        self.end = SchedulerEnd(name, ranks)

    def fill(self, offset: int, identifier: str, tensor: torch.Tensor) -> None:
        view(self.end.memory, offset + room(identifier), spec_of(tensor)).copy_(tensor)

    def payload(self, save: Save) -> torch.Tensor:
        return view(self.end.memory, save.offset + room(save.identifier), save.spec).clone()

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.end.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def load_of(identifier: str, offset: int = 0, item: tuple[str, int] | None = ("request", 0), **changes: Any) -> Load:
    return replace(Load(PLACE, offset + room(identifier), identifier, SPEC, item), **changes)


def save_of(identifier: str, offset: int = 0, spec: TensorSpec = SPEC, **changes: Any) -> Save:
    save = Save(PLACE, offset, entry_length(identifier, spec), identifier, identifier, spec, persist=True)
    return replace(save, **changes)


def step(worker: WorkerSide, meta: StepMetadata, cache: Any, new: dict[str, torch.Tensor] | None = None) -> None:
    """One step of a runner whose encoder returns `new`."""
    worker.bind(meta)
    worker.retry_saves(cache)
    worker.load(cache)
    for identifier, tensor in (new or {}).items():
        cache[identifier] = tensor
        worker.save(cache, identifier)
    worker.finish_step()


def saves(*orders: Save) -> StepMetadata:
    return StepMetadata("arena", 1, saves={order.identifier: order for order in orders}, namespace="tests")


def loads(*orders: Load, encodes: dict[str, list[int]] | None = None) -> StepMetadata:
    return StepMetadata("arena", 1, loads=list(orders), encoder_inputs={} if encodes is None else encodes)


# ---- loads


@pytest.mark.parametrize("cache", [{}, PreallocatedCache(8, WIDTH)], ids=["dictionary", "buffer"])
def test_a_load_puts_the_stored_bytes_into_the_encoder_cache(rig: Rig, cache: Any) -> None:
    rig.fill(4096, "x", embedding("x"))
    meta = loads(load_of("x", 4096))
    step(rig.workers[0], meta, cache)
    assert torch.equal(cache["x"], embedding("x"))
    assert rig.end.report() == Report(1, [(PLACE, COPIED, 0)])
    assert meta.encoder_inputs == {}
    rig.fill(4096, "x", embedding("another entry, in the same place"))
    assert torch.equal(cache["x"], embedding("x"))


def test_a_load_that_is_not_staged_after_all_is_copied_as_any_other(rig: Rig) -> None:
    rig.fill(4096, "x", embedding("x"))
    cache: dict[str, torch.Tensor] = {}
    step(rig.workers[0], loads(load_of("x", 4096, staged=99)), cache)
    assert torch.equal(cache["x"], embedding("x"))
    assert rig.end.report() == Report(1, [(PLACE, COPIED, 0)])


def test_a_copy_staged_for_outdated_weights_is_released_where_the_item_is_encoded(rig: Rig) -> None:
    worker, meta = rig.workers[0], loads(load_of("x", 4096, staged=1))
    assert worker._copier.stage(rig.end.memory, Stage(1, 0, 4, WIDTH, "F32")) == ""
    worker.bind(meta)
    worker._outdated = True
    worker.load({})
    worker.finish_step()
    assert meta.encoder_inputs == {"request": [0]}
    assert worker._copier.take(1) is None


BAD_LOADS = {
    "an offset past the end": load_of("x", 1 << 20),
    "a length past the end": load_of("x", (1 << 20) - 8192, spec=TensorSpec(4096, WIDTH, "F32")),
    "an offset before the start": load_of("x", -8192),
    "an offset within a page": load_of("x", 8),
    "a dtype that encoders do not put out": load_of("x", spec=TensorSpec(4, WIDTH, "I32")),
}


@pytest.mark.parametrize("load", BAD_LOADS.values(), ids=BAD_LOADS.keys())
def test_an_item_that_cannot_be_loaded_is_reported_and_encoded_after_all(rig: Rig, load: Load) -> None:
    """The item is added to the same dictionary that the encoder reads, in addition to its contents."""
    encodes = {"request": [1], "other": [0]}
    cache: dict[str, torch.Tensor] = {}
    step(rig.workers[0], loads(load, load_of("x", 0, ("other", 0)), encodes=encodes), cache)
    assert encodes == {"request": [1, 0], "other": [0]}
    assert {outcome: place for place, outcome, _ in rig.end.report().outcomes} == {FAILED: PLACE, COPIED: PLACE}


def test_a_rank_of_another_arena_copies_nothing(rig: Rig) -> None:
    meta, cache = loads(load_of("x")), {"y": embedding("y")}
    meta.arena, meta.saves = "another", {"y": save_of("y", 8192)}
    worker = rig.workers[0]
    worker.bind(meta)
    worker.load(cache)
    worker.save(cache, "y")
    worker.finish_step()
    assert sorted(cache) == ["y"]
    assert meta.encoder_inputs == {"request": [0]}
    assert rig.end.report() == Report(1, [(PLACE, FAILED, 0), (PLACE, FAILED, 0)])
    assert rig.end.silent()
    assert not any(bytes(rig.end.memory))


def test_before_it_is_attached_a_rank_loads_nothing_and_vllm_encodes() -> None:
    worker = WorkerSide(0, HostCopier(), list, SILENT)
    meta, cache = loads(load_of("x")), dict[str, torch.Tensor]()
    meta.arena = ""
    step(worker, meta, cache)
    assert (cache, meta.encoder_inputs) == ({}, {"request": [0]})
    worker.shutdown()


def test_a_full_encoder_cache_fails_only_the_load_that_finds_no_room(rig: Rig) -> None:
    rig.fill(0, "x", embedding("x"))
    rig.fill(8192, "y", embedding("y"))
    meta, cache = loads(load_of("x"), load_of("y", 8192, ("request", 1))), PreallocatedCache(4, WIDTH)
    step(rig.workers[0], meta, cache)
    assert list(cache) == ["x"]
    assert meta.encoder_inputs == {"request": [1]}


def test_an_item_that_the_step_does_not_schedule_is_not_encoded_by_it(rig: Rig) -> None:
    meta = loads(load_of("x", 1 << 20, item=None))
    step(rig.workers[0], meta, {})
    assert meta.encoder_inputs == {}
    assert rig.end.report() == Report(1, [(PLACE, FAILED, 0)])


class Agreement:
    """Two ranks' collective for two threads: the values of both, or a failed test instead of a hang."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=PATIENCE_S)
        self._votes: list[list[bool]] = []
        self.called = 0

    def __call__(self, failed: list[bool]) -> list[bool]:
        self._votes.append(failed)
        self.called += 1
        self._barrier.wait()
        return [any(votes) for votes in zip(*self._votes, strict=True)]


def test_a_load_that_fails_on_one_rank_is_encoded_by_both() -> None:
    """Otherwise the encoder's collectives would hang."""
    rig = Rig(ranks=2, agree=(agreement := Agreement()))
    rig.fill(0, "x", embedding("x"))
    metas = [sent(loads(load_of("x"), load_of("y", 8192, ("request", 1)))) for _ in rig.workers]
    metas[1].loads[0] = load_of("x", 1 << 20)
    threads = [
        threading.Thread(target=step, args=(worker, meta, {})) for worker, meta in zip(rig.workers, metas, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [meta.encoder_inputs for meta in metas] == [{"request": [0]}, {"request": [0]}]
    assert [rig.end.report(rank).outcomes[0][1] for rank in (0, 1)] == [COPIED, FAILED]
    # Only steps with loads need a collective.
    for worker in rig.workers:
        step(worker, saves(save_of("z", 16384)), {}, {"z": embedding("z")})
    assert agreement.called == 2
    rig.close()


@pytest.mark.parametrize("new_cache", [dict, lambda: PreallocatedCache(8, WIDTH)], ids=["dictionary", "buffer"])
def test_a_load_that_fails_on_one_rank_leaves_the_item_in_no_ranks_cache(new_cache: Any) -> None:
    """vLLM's V2 runner encodes only what its cache lacks (`EncoderRunner.prepare_mm_inputs`): a rank that kept its own
    copy would not join the encoder's collectives, and the others would wait for it forever."""
    rig = Rig(ranks=2, agree=Agreement())
    rig.fill(0, "x", embedding("x"))
    rig.fill(8192, "y", embedding("y"))
    not_scheduled = load_of("y", 8192, item=None)  # no rank encodes it, so a rank that has it keeps it
    metas = [sent(loads(load_of("x"), not_scheduled)) for _ in rig.workers]
    metas[1].loads[0] = load_of("x", 1 << 20)
    metas[1].loads[1] = load_of("y", 1 << 20, item=None)
    held = [new_cache() for _ in rig.workers]
    threads = [
        threading.Thread(target=step, args=(worker, meta, cache))
        for worker, meta, cache in zip(rig.workers, metas, held, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [list(cache) for cache in held] == [["y"], []]
    rig.close()


# ---- saves

TENSORS = {
    "float32": embedding("x"),
    "bfloat16": embedding("x").bfloat16(),
    "float16": embedding("x").half(),
    "float8": embedding("x").to(torch.float8_e4m3fn),
    "columns of a wider tensor": torch.randn(4, 3 * WIDTH)[:, WIDTH : 2 * WIDTH],
    "a transposed tensor": torch.randn(WIDTH, 4).T,
    "no rows": torch.empty(0, WIDTH),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_a_new_encoder_output_is_copied_handed_over_and_reported(rig: Rig, tensor: torch.Tensor) -> None:
    save = save_of("x", 4096, spec_of(tensor))
    step(rig.workers[0], saves(save), {}, {"x": tensor})
    assert rig.end.saved() == Saved(
        PLACE, 4096, save.length, "tests", "x", save.spec.rows, save.spec.width, save.spec.dtype, True
    )
    assert rig.end.report() == Report(1, [(PLACE, COPIED, STORE)])
    assert torch.equal(rig.payload(save).float(), tensor.float())


def test_a_row_view_of_an_inference_batch_is_copied_and_never_written(rig: Rig) -> None:
    with torch.inference_mode():
        batch = torch.randn(12, WIDTH)
        rows = batch[4:8]
        before, save = rows.clone(), save_of("x")
        step(rig.workers[0], saves(save), {}, {"x": rows})
        batch.zero_()
    assert torch.equal(rig.payload(save), before)
    assert rig.end.report().outcomes == [(PLACE, COPIED, STORE)]


UNEXPECTED = {
    "rows": torch.ones(5, WIDTH),
    "width": torch.ones(4, WIDTH + 1),
    "dimensions": torch.ones(2, 2, WIDTH),
    "dtype": torch.ones(4, WIDTH, dtype=torch.bfloat16),
    "a dtype without a name": torch.ones(4, WIDTH, dtype=torch.int32),
}


@pytest.mark.parametrize("tensor", UNEXPECTED.values(), ids=UNEXPECTED.keys())
def test_an_output_of_an_unexpected_form_is_not_handed_over(rig: Rig, tensor: torch.Tensor) -> None:
    step(rig.workers[0], saves(save_of("x")), {}, {"x": tensor})
    assert rig.end.report() == Report(1, [(PLACE, FAILED, 0)])
    assert rig.end.silent()
    assert not any(bytes(rig.end.memory))


@pytest.mark.parametrize("offset", [1 << 20, (1 << 20) - 4096, -4096, 8])
def test_a_place_outside_the_arena_is_not_written(rig: Rig, offset: int) -> None:
    step(rig.workers[0], saves(save_of("x", offset)), {}, {"x": embedding("x")})
    assert rig.end.report() == Report(1, [(PLACE, FAILED, 0)])
    assert not any(bytes(rig.end.memory))


def test_an_output_without_an_order_and_one_that_never_came_are_not_named(rig: Rig) -> None:
    """A place that a report covers but does not name is void, so none is lost when the encoder fails."""
    step(rig.workers[0], saves(save_of("ordered")), {}, {"not ordered": embedding("x")})
    assert rig.end.report() == Report(1, [])
    assert rig.end.silent()


def test_only_the_first_rank_saves() -> None:
    rig = Rig(ranks=2)
    meta = saves(save_of("x"))
    meta.retries = [save_of("y", 8192)]
    for worker in rig.workers:
        step(worker, meta, {"y": embedding("y")}, {"x": embedding("x")})
    assert [rig.end.saved().identifier for _ in range(2)] == ["y", "x"]
    assert [len(rig.end.report(rank).outcomes) for rank in (0, 1)] == [2, 0]
    assert rig.end.silent()
    rig.close()


def test_an_earlier_output_is_saved_while_it_is_still_there(rig: Rig) -> None:
    kept, freed = save_of("kept"), save_of("freed", 8192, place=PLACE + 1)
    step(rig.workers[0], StepMetadata("arena", 1, retries=[kept, freed]), {"kept": embedding("kept")})
    assert rig.end.report() == Report(1, [(PLACE + 1, FAILED, 0), (PLACE, COPIED, STORE)])
    assert torch.equal(rig.payload(kept), embedding("kept"))


def test_a_save_that_could_not_be_handed_over_is_void_and_may_be_tried_again(rig: Rig) -> None:
    """Nothing else would ever free the place. ABSENT, unlike FAILED, does not blame the tensor."""
    rig.end.store.close()
    step(rig.workers[0], saves(save_of("x")), {}, {"x": embedding("x")})
    assert rig.end.report() == Report(1, [(PLACE, ABSENT, 0)])


def test_a_link_that_is_replaced_just_as_a_producer_turns_to_it_counts_as_ended(rig: Rig) -> None:
    """The rank's thread closes it when the next store process is introduced."""
    rank = rig.workers[0]._rank
    assert rank is not None
    assert rank._store is not None
    rank._store.close()
    assert rank.await_durable({PLACE}, time.monotonic() + PATIENCE_S) == set()


# ---- the life of a rank


def test_a_step_that_carries_nothing_costs_no_report(rig: Rig) -> None:
    worker, cache = rig.workers[0], {"x": embedding("x")}
    step(worker, StepMetadata(), cache, {"y": embedding("y")})
    worker.save(cache, "y")  # V1 saves with no metadata bound where the model is an encoder-decoder
    step(worker, saves(), cache)
    assert rig.end.report() == Report(1, [])
    assert rig.end.silent()


def closed(end: SchedulerEnd) -> bool:
    try:
        return end.links[0].receive() is not None
    except LinkClosed:
        return True


def test_a_failed_copy_of_an_item_with_nothing_to_encode_is_repeated(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine dies if an item never comes. An item that can be encoded is encoded instead."""

    def broken(source: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no room on the stream")

    rig.fill(0, "x", embedding("x"))
    worker = rig.workers[0]
    monkeypatch.setattr(worker._copier, "load", broken)
    meta, cache = loads(load_of("x", encodable=False)), dict[str, torch.Tensor]()
    step(worker, meta, cache, {})
    assert torch.equal(cache["x"], embedding("x"))
    assert meta.encoder_inputs == {}
    meta = loads(load_of("x"))
    step(worker, meta, {}, {"y": embedding("y")})
    assert meta.encoder_inputs == {"request": [0]}


def test_a_rank_that_gives_up_ends_its_link_and_still_loads_what_was_promised(rig: Rig) -> None:
    """Steps scheduled earlier may have items with nothing to encode."""
    rig.fill(0, "x", embedding("x"))
    worker, meta, cache = rig.workers[0], loads(load_of("x")), dict[str, torch.Tensor]()
    worker.abandon()
    wait_until("the link to the rank is closed", lambda: closed(rig.end), PATIENCE_S)
    step(worker, meta, cache, {"y": embedding("y")})
    assert meta.encoder_inputs == {}
    assert torch.equal(cache["x"], embedding("x"))


def test_a_rank_that_has_left_gives_its_memory_back_after_a_while() -> None:
    rank = Rank(name := uuid.uuid4().hex, 0, linger_s=0.05)
    end = SchedulerEnd(name)
    assert rank.memory is not None
    end.close()
    wait_until("its memory is given back", lambda: rank.memory is None, PATIENCE_S)
    rank.close()


def test_a_load_that_names_no_arena_becomes_an_encode_even_while_the_link_ends(rig: Rig) -> None:
    """For a moment the rank's own arena has no name either, though it is still mapped."""
    worker, cache = rig.workers[0], dict[str, torch.Tensor]()
    assert worker._rank is not None
    worker._rank.arena_id = ""
    meta = StepMetadata("", 1, loads=[Load(0, 0, "x", TensorSpec(0, 0, "F32"), ("request", 0))], encoder_inputs={})
    step(worker, meta, cache)
    assert cache == {}
    assert meta.encoder_inputs == {"request": [0]}


# ---- weights


class Weights:
    """Watched weights, which are those that a step was planned for, or not."""

    def __init__(self, right: bool) -> None:
        self.right = right
        self.looks = 0

    def look(self) -> None:
        self.looks += 1

    def are(self, held: object, rank: int) -> bool:
        return self.right


@pytest.mark.parametrize("other_rank", [False, True], ids=["on this rank", "on another rank"])
def test_a_step_planned_for_other_weights_copies_nothing_and_encodes_what_it_can(other_rank: bool) -> None:
    """Any rank may notice the change: if only that one knew, the saving rank would keep an output of both weights."""
    rig = Rig(agree=(lambda votes: [True for _ in votes]) if other_rank else list)
    try:
        worker, encodes = rig.workers[0], dict[str, list[int]]()
        weights: Any = Weights(right=other_rank)
        worker.weights = weights
        rig.fill(0, "x", embedding("x"))
        meta = loads(load_of("x"), encodes=encodes)
        meta.saves, meta.look = {"y": replace(save_of("y", 8192), place=PLACE + 1)}, True
        cache: dict[str, torch.Tensor] = {}
        step(worker, meta, cache, {"y": embedding("y")})
        assert weights.looks == 1
        assert (encodes, list(cache)) == ({"request": [0]}, ["y"])
        assert rig.end.report() == Report(1, [(PLACE, FAILED, 0), (PLACE + 1, FAILED, 0)])
        assert rig.end.silent()
    finally:
        rig.close()


def test_a_step_planned_for_these_weights_copies_without_a_look_at_them(rig: Rig) -> None:
    weights: Any = Weights(right=True)
    rig.workers[0].weights = weights
    rig.fill(0, "x", embedding("x"))
    cache: dict[str, torch.Tensor] = {}
    step(rig.workers[0], loads(load_of("x")), cache)
    assert list(cache) == ["x"]
    assert weights.looks == 0
