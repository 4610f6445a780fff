# SPDX-License-Identifier: Apache-2.0
"""Weights that change while entries are promised, encoded, saved, written and looked up. Whatever happens in between, a
step gathers outputs of the weights that it runs with, and a tier has outputs of the weights that the namespace names.

Scheduler side, cache, store process and worker side are real; vLLM's scheduler and runner and the encoder are fakes.
Calls and steps reach the worker in the order in which they were sent, as in vLLM, but the scheduler need not wait for
either: steps are in flight when weights change, and a call may be so slow that vLLM continues without it.
"""

import shutil
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from benchmarks.testbed.stand_ins import PATIENCE_S, SILENT, Request, Runner, Served, digest, embedding, request
from benchmarks.testbed.waiting import wait_until
from lmcache_ec.adapters.vllm.copier import HostCopier
from lmcache_ec.adapters.vllm.worker import WorkerSide
from tests.examples import examples

ITEMS = [digest(f"picture {number}") for number in range(6)]


class LateCopier(HostCopier):
    """Copies at once, but reports completion late."""

    def __init__(self) -> None:
        self.steps: deque[Callable[[], None]] = deque()

    def finish(self, done: Callable[[], None]) -> None:
        self.steps.append(done)

    def close(self) -> None:
        self.land()

    def land(self) -> None:
        while self.steps:
            self.steps.popleft()()


class Encoder(torch.nn.Module):
    """Its only weight, an integer, is a factor of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1), requires_grad=False)

    def output(self, identifier: str, rows: int) -> torch.Tensor:
        return embedding(identifier, rows) * self.weight


class TrainedRunner(Runner):
    """A runner whose encoder is trained."""

    def __init__(self, engine: str, copier: HostCopier | None = None) -> None:
        self.worker = WorkerSide(0, copier or HostCopier(), list, SILENT)
        self.worker.start(engine)
        self.cache, self.encoded = {}, []
        self.model = Encoder()
        self.encode = self.model.output
        self.worker.watch_weights(self.model)

    @property
    def factor(self) -> int:
        return int(self.model.weight)

    def call(self, factor: int, name: str = "update_weights", argument: object = None) -> None:
        """A call to the worker that leaves the weights at `factor`."""
        weights = self.worker.weights
        assert weights is not None
        with weights.call(name, argument, lambda: self.model):
            self.model.weight.fill_(factor)


class Engine:
    """An engine under training. `ahead` has the work sent to the worker that is not done yet."""

    def __init__(
        self, persist: Any = False, folder: Path | None = None, copier: HostCopier | None = None, **policy: Any
    ) -> None:
        self.folder = folder or Path(tempfile.mkdtemp(prefix="lmcache-ec-weights-"))
        name = f"training {id(self)}"
        self.runner = TrainedRunner(name, copier)
        self.served = Served(
            self.folder, 1 << 18, self.runner, name, watched=True, persist_updated_weights=persist, **policy
        )
        self.served.ready()
        self.ahead: deque[Callable[[], None]] = deque()
        self.factors = {1}
        self.asked = 0

    def idle_pass(self) -> None:
        """A pass with only text. Its step runs after everything sent before."""
        output = self.served.vllm.end_pass(text=1)
        self.ahead.append(lambda: self.runner.run(output))

    def catch_up(self) -> None:
        while self.ahead:
            self.ahead.popleft()()

    def send(self, *identifiers: str) -> None:
        """Schedule a request; its step runs in order with the others."""
        asked = request(f"request {self.asked}", *identifiers)
        self.asked += 1
        cached = set(self.served.vllm.cached)

        def offered() -> bool:
            answer = self.served.vllm.offer(asked)
            if answer is None:  # it waits for a fetch
                self.idle_pass()
                self.catch_up()
            return answer is not None

        wait_until(f"{asked.request_id} is scheduled", offered, PATIENCE_S)
        output = self.served.vllm.end_pass()
        self.ahead.append(lambda: self._run(output, asked, cached))

    def _run(self, output: Any, asked: Request, cached: set[str]) -> None:
        self.runner.run(output, asked)
        for feature in asked.mm_features:
            if feature.identifier not in cached:  # otherwise vLLM's own cache may hold an output of older weights
                expected = self.runner.model.output(feature.identifier, feature.mm_position.length)
                assert torch.equal(self.runner.cache[feature.identifier], expected), "an output of other weights"
        self.served.side.request_finished(asked)

    def change(self, factor: int, wait: bool = True) -> None:
        """A call that vLLM waits for or, as after a timeout, does not."""
        self.factors.add(factor)
        self.ahead.append(lambda: self.runner.call(factor))
        if wait:
            self.catch_up()

    def ask(self, *identifiers: str) -> list[str]:
        """A whole request. Returns the items encoded for it."""
        before = len(self.runner.encoded)
        self.send(*identifiers)
        self.catch_up()
        self.served.settle()
        return self.runner.encoded[before:]

    def forget(self) -> None:
        """vLLM's caches are reset on both sides, without a notification."""
        self.served.vllm.cached.clear()
        self.runner.cache.clear()

    def evict(self, identifier: str) -> None:
        if identifier in self.served.vllm.cached:
            self.served.vllm.evict(identifier)

    def entries(self) -> dict[str, dict[str, int]]:
        """Contents of the disk: namespace -> item -> factor of the weights that produced it."""
        found: dict[str, dict[str, int]] = {}
        for file in self.folder.rglob("*.safetensors"):
            with safetensors.safe_open(file, "pt") as entry:
                identifier, tensor = entry.metadata()["identifier"], entry.get_tensor("ec")
            [made_by] = [f for f in self.factors if torch.equal(tensor, embedding(identifier, len(tensor)) * f)]
            found.setdefault(file.parents[1].name, {})[identifier] = made_by
        return found

    def finish(self) -> dict[str, int]:
        """Run until nothing is under way. Returns what is still held."""
        self.catch_up()
        self.idle_pass()
        self.catch_up()
        return self.served.held()

    def close(self) -> None:
        self.served.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def train(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Engine]:
    def engine(persist: Any = False, copier: HostCopier | None = None, **policy: Any) -> Engine:
        built = Engine(persist, tmp_path, copier, **policy)
        request.addfinalizer(built.close)
        return built

    return engine


Train = Callable[..., Engine]
A, B, C, *_ = ITEMS


def test_changed_weights_empty_memory_and_are_kept_in_memory_only(train: Train) -> None:
    engine = train()
    assert engine.ask(A) == [A]
    engine.forget()
    engine.change(2)
    assert engine.ask(A, B) == [A, B]
    engine.forget()
    assert engine.ask(A, B) == []
    assert engine.entries() == {"tests": {A: 1}}
    assert engine.finish() == {}
    assert engine.served.side.snapshot()["memory_only"] == 1


def test_calls_that_leave_the_weights_as_they_are_change_nothing(train: Train) -> None:
    engine = train()
    assert engine.ask(A) == [A]
    engine.forget()
    for name, argument in (
        ("apply_model", None),
        ("sleep", 1),
        ("wake_up", None),
        ("sleep", 2),
        ("wake_up", ["weights"]),
    ):
        engine.runner.call(1, name, argument)
    assert engine.ask(A) == []
    assert engine.served.side.snapshot()["weight_changes"] == 0


def test_the_entries_of_the_starting_weights_are_found_once_these_are_back(train: Train) -> None:
    engine = train()
    assert engine.ask(A) == [A]
    engine.change(2)
    engine.forget()
    assert engine.ask(A, B) == [A, B]
    engine.change(1)
    engine.forget()
    assert engine.ask(A) == []
    assert engine.ask(C) == [C]
    assert engine.entries() == {"tests": {A: 1, C: 1}}


def test_an_item_promised_when_the_weights_change_is_encoded(train: Train) -> None:
    """The loading step runs after the call, which vLLM did not wait for: only the worker knows of the change."""
    engine = train()
    engine.ask(A)
    engine.forget()
    engine.change(2, wait=False)
    engine.send(A)
    engine.catch_up()
    assert engine.runner.encoded == [A, A]
    assert engine.finish() == {}
    assert engine.served.side.snapshot()["loads_failed"] == 1


@pytest.mark.parametrize("data", ["pixels", None], ids=["media", "metadata alone"])
def test_a_load_that_was_put_off_over_a_change_is_encoded_if_it_can_be(data: Any, train: Train) -> None:
    """vLLM has allocated room for the item in a pass that scheduled nothing, and counts it as loaded: the next step of
    a request with the item has to provide it. A request with nothing to encode fails; another may encode it."""
    engine = train()
    engine.ask(A)
    engine.forget()
    vllm, side, asked = engine.served.vllm, engine.served.side, request("asked", A, data=data)
    engine.served.stage(asked)
    assert vllm.offer(asked) == "load"
    vllm.preempt(asked)
    engine.runner.run(vllm.end_pass())
    engine.change(2)
    assert (vllm.offer(asked) is None) == (data is None)
    assert side.take_unavailable_requests() == (set() if data else {"asked"})
    if data is None:
        side.request_finished(asked)
        asked = request("another", A)
        assert vllm.offer(asked) == ""
    engine.runner.run(vllm.end_pass(text=1), asked)
    assert torch.equal(engine.runner.cache[A], embedding(A) * 2)
    side.request_finished(asked)
    assert engine.finish() == {}


def test_an_entry_leased_by_a_waiting_request_when_the_weights_change_is_not_used(train: Train) -> None:
    """The entry was live, but the KV cache had no room for the request."""
    engine = train()
    engine.ask(A)
    engine.evict(A)
    engine.served.step()
    vllm, asked = engine.served.vllm, request("asked", A)
    assert vllm.offer(asked, blocks=False) == "load"
    engine.served.step()
    assert engine.served.side.snapshot()["leases"] == 1
    engine.change(2)
    assert vllm.offer(asked) == "encode"
    assert engine.served.side.snapshot()["leases"] == 0
    engine.served.step(asked)
    engine.served.side.request_finished(asked)
    assert engine.finish() == {}


def test_a_promised_item_that_carries_nothing_to_encode_is_loaded_all_the_same(train: Train) -> None:
    """vLLM would die if the item never came. The next such request fails before it is scheduled."""
    engine = train()
    engine.ask(A)
    engine.forget()
    vllm, side = engine.served.vllm, engine.served.side
    asked = request("asked", A, data=None)
    engine.served.stage(asked)
    assert vllm.offer(asked) == "load"
    output = vllm.end_pass()
    engine.change(2)
    engine.runner.run(output, asked)
    assert torch.equal(engine.runner.cache[A], embedding(A))
    side.request_finished(asked)
    engine.forget()
    another = request("another", A, data=None)
    assert vllm.offer(another) is None
    assert side.take_unavailable_requests() == {"another"}
    side.request_finished(another)
    assert engine.finish() == {}


def test_a_save_under_way_is_finished_under_the_old_name(train: Train) -> None:
    copier = LateCopier()
    engine = train(persist=True, copier=copier)
    engine.send(A)
    engine.catch_up()
    engine.change(2)
    engine.idle_pass()
    copier.land()
    wait_until("what was encoded before the change is on disk", engine.entries, PATIENCE_S)
    assert engine.entries() == {"tests": {A: 1}}
    assert engine.served.cache.book.live(A) is None


def test_a_late_answer_about_an_old_entry_does_not_count_for_the_new_weights(train: Train) -> None:
    """A fill from the disk is under way when the weights change: its data is discarded."""
    engine = train(persist=True)
    engine.ask(A)
    engine.evict(A)
    engine.served.step()
    cache = engine.served.cache
    place = cache.book.live(A)
    assert place is not None
    cache.book.forget(place)
    assert cache.fetch(A, place.length, engine.served.side._now)
    engine.change(2)
    link = cache._store.link
    received = link.receive
    link.receive = lambda: None  # type: ignore[method-assign]
    engine.served.step()  # the scheduler side learns of the change first
    link.receive = received  # type: ignore[method-assign]
    assert engine.served.settle()["fetches_under_way"] == 0
    assert cache.book.live(A) is None
    assert engine.ask(A) == [A]
    assert engine.entries()["tests"] == {A: 1}


def test_a_save_pending_for_the_old_weights_is_not_done_for_the_new(train: Train) -> None:
    """A save found no room; after the change there is room, and vLLM still holds the tensor."""
    engine = train()
    engine.ask(A)
    book = engine.served.cache.book
    book.remember(B, book.live(A).spec)  # type: ignore[union-attr, arg-type]
    engine.runner.cache[B] = embedding(B)
    engine.served.vllm.cached.add(B)
    engine.served.side._mirror.add(B)
    engine.change(2)
    engine.served.settle()
    assert book.live(B) is None
    assert engine.served.side.snapshot()["saves"] == 1


def test_while_weights_are_in_doubt_nothing_is_promised_and_nothing_is_lost(train: Train) -> None:
    engine = train()
    engine.ask(A)
    engine.forget()
    engine.runner.call(1, "sleep", 1)
    assert engine.ask(A, B) == [A, B]
    assert engine.served.cache.in_doubt
    assert engine.served.side.snapshot()["saves_void"] == 0, "no place is taken for what may not be kept"
    engine.runner.call(1, "wake_up")
    engine.forget()
    assert engine.ask(A, B) == [B]
    assert engine.entries() == {"tests": {A: 1, B: 1}}


def test_a_step_looks_at_weights_that_stay_in_doubt(train: Train) -> None:
    """The model's own `load_weights` is not a watched call; trainers that share the process use it per tensor."""
    engine = train()
    engine.ask(A)
    engine.forget()
    weights = engine.runner.worker.weights
    assert weights is not None
    weights._send("")
    assert engine.ask(A) == [A], "the pass is made up before its step looks"
    engine.forget()
    assert engine.ask(A) == []
    engine.forget()
    weights._send("")
    engine.runner.model.weight.fill_(2)
    assert engine.ask(A) == [A]
    engine.forget()
    assert engine.ask(A) == [A], "the first was encoded in a step made up for other weights"
    engine.forget()
    assert engine.ask(A) == []


def test_a_weight_write_that_bypasses_all_calls_is_noticed_in_the_next_step_that_copies(train: Train) -> None:
    engine = train(persist=True, weights_check_s=0.0001)
    engine.ask(A)
    engine.forget()
    engine.runner.model.weight.fill_(2)
    engine.factors.add(2)
    assert set(engine.ask(A, B)) == {A, B}
    engine.forget()
    assert engine.ask(A, B) == [A, B]
    engine.forget()
    assert engine.ask(A, B) == []
    [updated] = set(engine.entries()) - {"tests"}
    assert engine.entries() == {"tests": {A: 1}, updated: {A: 2, B: 2}}


# ---- any order


class Training(RuleBasedStateMachine):
    """Requests, changes, resets and losses in any order. `_run` checks what each step gathers."""

    persist: Any = False

    def __init__(self) -> None:
        super().__init__()
        # A request may wait for a save whose copy is late, while no rule ends the wait: then its deadline does.
        self.engine = Engine(self.persist, copier=LateCopier(), deadline_s=1.0)
        self.killed = 0

    @rule(numbers=st.lists(st.integers(0, len(ITEMS) - 1), min_size=1, max_size=3, unique=True))
    def send(self, numbers: list[int]) -> None:
        if len(self.engine.ahead) < 3:
            self.engine.send(*(ITEMS[number] for number in numbers))

    @rule()
    def idle_pass(self) -> None:
        self.engine.idle_pass()

    @rule()
    def run_one(self) -> None:
        if self.engine.ahead:
            self.engine.ahead.popleft()()

    @rule(factor=st.sampled_from([1, 2, 3]), wait=st.booleans())
    def change(self, factor: int, wait: bool) -> None:
        self.engine.change(factor, wait)

    @rule()
    def reset(self) -> None:
        """Reset as vLLM does, while nothing is in flight."""
        self.engine.catch_up()
        self.engine.forget()

    @rule(number=st.integers(0, len(ITEMS) - 1))
    def evict(self, number: int) -> None:
        self.engine.evict(ITEMS[number])

    @rule()
    def copies_land(self) -> None:
        copier = self.engine.runner.worker._copier
        assert isinstance(copier, LateCopier)
        copier.land()

    @rule()
    def doubt(self) -> None:
        """Put the weights in doubt, as a load that bypasses all calls does."""
        self.engine.catch_up()
        weights = self.engine.runner.worker.weights
        assert weights is not None
        weights._send("")

    @precondition(lambda self: self.killed < 2)
    @rule()
    def kill_store(self) -> None:
        self.killed += 1
        self.engine.served.cache._store.process.kill()

    def settles(self) -> bool:
        self.engine.idle_pass()
        self.engine.catch_up()
        self.copies_land()
        return self.settled()

    def teardown(self) -> None:
        """Each namespace has outputs of one set of weights, the initial one of the initial weights; nothing is held."""
        try:
            self.engine.catch_up()
            self.copies_land()
            wait_until("all has settled", self.settles, PATIENCE_S)
            for namespace, entries in self.engine.entries().items():
                assert len(set(entries.values())) == 1, (namespace, entries)
                assert set(entries.values()) == {1} if namespace == "tests" else self.persist
            counts = self.engine.served.side.snapshot()
            assert not any(counts[name] for name in ("pins", "leases", "orders", "requests", "fetches_under_way")), (
                counts
            )
        finally:
            self.engine.close()

    def settled(self) -> bool:
        return self.engine.served.cache.book.settled and not self.engine.served.side.snapshot()["pins"]


class PersistentTraining(Training):
    """With a namespace for each set of weights."""

    persist = True


_SETTINGS = settings(
    max_examples=examples(12), stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestTraining = Training.TestCase
TestTraining.settings = _SETTINGS
TestPersistentTraining = PersistentTraining.TestCase
TestPersistentTraining.settings = _SETTINGS
