# SPDX-License-Identifier: Apache-2.0
"""Copies concurrent with the model's stream: their order, how long memory is held, and what a step waits for.

Over a stand-in for `torch.cuda`, whose streams work only when a test runs them, so that every order that the rules
allow can be tested.
"""

import mmap
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.testbed.stand_ins import PATIENCE_S
from benchmarks.testbed.waiting import wait_until
from lmcache_ec.adapters.vllm import copier as copier_module
from lmcache_ec.adapters.vllm.copier import DeviceCopier, HostCopier, copier_for, why_unsupported
from lmcache_ec.channel import Stage
from tests.cuda import ALREADY_REGISTERED, Cuda, CudaStream, OnDevice, Xpu, collected

DEVICE = torch.device("cuda", 0)
PAGE = mmap.PAGESIZE


@pytest.fixture
def cuda() -> Iterator[Cuda]:
    cuda = Cuda()
    with OnDevice(cuda):
        yield cuda
    cuda.check()
    assert cuda.faults == []


@pytest.fixture
def copier(cuda: Cuda) -> Iterator[DeviceCopier]:
    copier = DeviceCopier(DEVICE, cuda)
    yield copier
    cuda.run()
    copier.close()
    assert copier.release()


class Arena:
    """Registered host memory, as a rank maps it: `granules` gives the pages of each granule."""

    def __init__(self, copier: DeviceCopier, *granules: int) -> None:
        self.memory = mmap.mmap(-1, sum(granules) * PAGE)
        offset = 0
        for pages in granules:
            assert copier.register(self.memory, offset, pages * PAGE) == ""
            offset += pages * PAGE

    def floats(self, rows: int, columns: int, offset: int = 0) -> torch.Tensor:
        count = rows * columns
        return torch.frombuffer(self.memory, dtype=torch.float32, count=count, offset=offset).view(rows, columns)


def on_device(rows: int, columns: int) -> torch.Tensor:
    return torch.arange(float(rows * columns), device=DEVICE).view(rows, columns)


class Steps:
    """Records the steps that were reported done, and waits for them."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self._changed = threading.Condition()

    def __call__(self, name: str) -> Any:
        def done() -> None:
            with self._changed:
                self.done.append(name)
                self._changed.notify_all()

        return done

    def wait(self, number: int) -> list[str]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.done) >= number, PATIENCE_S), self.done
            return list(self.done)


def side(cuda: Cuda) -> CudaStream:
    (stream,) = cuda.side
    return stream


# ---- loads and saves


def test_a_loaded_tensor_is_there_before_the_forward_pass_uses_it(cuda: Cuda, copier: DeviceCopier) -> None:
    source = Arena(copier, 1).floats(3, 4).copy_(torch.arange(12.0).view(3, 4))
    tensor = copier.load(source)
    used: list[torch.Tensor] = []
    cuda.model.submit(lambda: used.append(tensor.clone()))
    assert not cuda.model.run()
    assert not used
    assert side(cuda).run()
    assert cuda.model.run()
    assert torch.equal(used[0], source)


def test_memory_of_a_load_that_vllm_frees_is_not_given_out_while_the_model_still_reads_it(
    cuda: Cuda, copier: DeviceCopier
) -> None:
    source = Arena(copier, 1).floats(3, 4).fill_(1)
    tensor = copier.load(source)
    address, used = tensor.data_ptr(), list[torch.Tensor]()
    alias = torch.frombuffer(cuda.memory._memory, dtype=torch.float32, count=12, offset=address - cuda.memory.start)
    cuda.model.submit(lambda: used.append(alias.clone()))
    del tensor
    assert copier.load(source).data_ptr() != address
    cuda.run()
    assert torch.equal(used[0].view(3, 4), source)


def test_a_save_copies_what_the_model_has_produced_by_then(cuda: Cuda, copier: DeviceCopier) -> None:
    source, destination = torch.zeros(3, 4, device=DEVICE), Arena(copier, 1).floats(3, 4)
    cuda.model.submit(lambda: source.fill_(7))
    copier.save(source, destination)
    assert not side(cuda).run()
    cuda.model.run()
    side(cuda).run()
    assert torch.equal(destination, torch.full((3, 4), 7.0))


def test_a_saved_view_of_a_batch_that_is_freed_at_once_is_not_overwritten(cuda: Cuda, copier: DeviceCopier) -> None:
    steps, destination = Steps(), Arena(copier, 1).floats(3, 4)
    batch = torch.ones(9, 4, device=DEVICE)
    copier.save(batch[3:6], destination)
    copier.finish(steps("step"))
    address = batch.data_ptr()
    del batch
    assert torch.zeros(9, 4, device=DEVICE).data_ptr() != address
    cuda.run()
    steps.wait(1)
    assert torch.all(destination == 1)


def test_a_later_step_overwrites_no_output_that_is_still_being_saved(cuda: Cuda, copier: DeviceCopier) -> None:
    """A future vLLM may keep encoder outputs in one buffer, whose rows may belong to another item in the next step."""
    source, destination = torch.ones(3, 4, device=DEVICE), Arena(copier, 1).floats(3, 4)
    copier.begin_step()
    copier.save(source, destination)
    copier.finish(lambda: None)
    copier.begin_step()
    cuda.model.submit(lambda: source.fill_(7))
    assert not cuda.model.run(), "the model's stream waits"
    cuda.run()
    assert torch.all(destination == 1)
    copier.finish(lambda: None)
    copier.begin_step()
    cuda.model.submit(lambda: source.fill_(8))
    assert cuda.model.run(), "a step that saved nothing is nothing to wait for"


@pytest.mark.parametrize("columns", [slice(None), slice(0, 40)], ids=["contiguous", "columns of a wider tensor"])
def test_a_copy_is_cut_where_two_registrations_meet(cuda: Cuda, copier: DeviceCopier, columns: slice) -> None:
    """A single copy across both is an error."""
    arena = Arena(copier, 2, 1, 2)
    source = on_device(50, 64)[:, columns]
    destination = arena.floats(50, source.shape[1], offset=PAGE)
    copier.save(source, destination)
    cuda.run()
    assert torch.equal(destination, source)
    loaded = copier.load(destination)
    cuda.run()
    assert torch.equal(loaded, source)
    assert cuda.stalls == 0


def test_a_load_finds_room_in_the_encoder_caches_memory_if_there_is_none_beside_it(
    cuda: Cuda, copier: DeviceCopier
) -> None:
    """vLLM has measured its own memory without that of the copies' stream."""
    source = Arena(copier, 1).floats(3, 4).fill_(1)
    cuda.memory.full.add(side(cuda))
    freed = torch.zeros(3, 4, device=DEVICE)
    address, read = freed.data_ptr(), list[torch.Tensor]()
    alias = torch.frombuffer(cuda.memory._memory, dtype=torch.float32, count=12, offset=address - cuda.memory.start)
    cuda.model.submit(lambda: read.append(alias.clone()))
    del freed
    loaded = copier.load(source)
    assert loaded.data_ptr() == address
    cuda.run()
    assert torch.equal(loaded, source)
    assert not torch.any(read[0]), "what had the room before was done with it"


# ---- steps


def test_a_step_is_done_only_when_its_copies_are_over_and_the_caller_never_waits(
    cuda: Cuda, copier: DeviceCopier
) -> None:
    steps, destination = Steps(), Arena(copier, 1).floats(2, 2)
    copier.save(torch.ones(2, 2, device=DEVICE), destination)
    copier.finish(steps("save"))
    over = side(cuda).marks[-1]
    copier.finish(steps("nothing to copy"))
    copier.load(destination)
    copier.finish(steps("load"))
    assert over.awaited.wait(PATIENCE_S)
    assert steps.done == []
    assert not torch.any(destination)
    cuda.run()
    assert steps.wait(3) == ["save", "nothing to copy", "load"]
    assert torch.all(destination == 1)


def test_waiting_for_a_step_does_not_burn_a_core(cuda: Cuda, copier: DeviceCopier) -> None:
    """By default an event spins a core of the saving rank until everything queued before it has run."""
    steps, destination = Steps(), Arena(copier, 1).floats(2, 2)
    copier.save(torch.ones(2, 2, device=DEVICE), destination)
    copier.finish(steps("save"))
    assert side(cuda).marks[-1].awaited.wait(PATIENCE_S)
    cuda.run()
    steps.wait(1)
    assert cuda.spins == 0


def test_source_and_destination_are_held_until_the_copy_is_over_and_no_longer(cuda: Cuda, copier: DeviceCopier) -> None:
    steps, arena = Steps(), Arena(copier, 1)
    source, destination, loaded = torch.ones(2, 2, device=DEVICE), arena.floats(2, 2), arena.floats(2, 2, offset=64)
    references = [weakref.ref(tensor) for tensor in (source, destination, loaded)]
    copier.save(source, destination)
    copier.load(loaded)
    copier.finish(steps("step"))
    del source, destination, loaded
    assert collected(*references) == [False, False, False]
    cuda.run()
    steps.wait(1)
    copier.finish(steps("next"))
    cuda.run()
    steps.wait(2)
    assert collected(*references) == [True, True, True]


def test_after_an_error_of_the_device_no_step_counts_as_done_and_the_next_one_reports_it(
    cuda: Cuda, copier: DeviceCopier
) -> None:
    """Without a report the scheduler side would wait forever, and tensors would accumulate."""
    steps, arena = Steps(), Arena(copier, 1)
    copier.save(torch.ones(2, 2, device=DEVICE), arena.floats(2, 2))
    copier.finish(steps("lost"))
    side(cuda).marks[-1].error = RuntimeError("an illegal memory access was encountered")
    copier.finish(steps("behind it"))
    cuda.run()
    copier.close()
    pending = weakref.ref(tensor := torch.ones(2, 2, device=DEVICE))
    copier.save(tensor, arena.floats(2, 2))
    del tensor
    with pytest.raises(RuntimeError, match="illegal memory access"):
        copier.finish(steps("later"))
    assert steps.done == []
    assert collected(pending) == [True]


# ---- the end


def test_closing_finishes_what_is_under_way(cuda: Cuda) -> None:
    copier, steps = DeviceCopier(DEVICE, cuda), Steps()
    destination = Arena(copier, 1).floats(2, 2)
    copier.save(torch.ones(2, 2, device=DEVICE), destination)
    copier.finish(steps("save"))
    cuda.run()
    copier.close()
    assert steps.done == ["save"]
    assert torch.all(destination == 1)
    assert copier.release()


def test_a_device_that_hangs_does_not_keep_its_worker_from_ending(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its memory stays registered and mapped, since the device may still write there."""
    monkeypatch.setattr(copier_module, "_END_S", 0.2)
    copier = DeviceCopier(DEVICE, cuda)
    arena, steps = Arena(copier, 1), Steps()
    copier.save(torch.ones(2, 2, device=DEVICE), arena.floats(2, 2))
    copier.finish(steps("never"))
    began = time.monotonic()
    copier.close()
    assert not copier.release()
    assert not copier.release()
    assert time.monotonic() - began < PATIENCE_S
    assert "giving up on it" in caplog.text
    mapped = weakref.ref(arena.memory)
    del arena
    assert collected(mapped) == [False]
    cuda.check()
    assert (steps.done, len(cuda.registered)) == ([], 1)
    cuda.run()  # only so that this test's threads end


def test_memory_is_released_only_when_every_copy_is_over_and_then_none_is_queued(cuda: Cuda) -> None:
    copier = DeviceCopier(DEVICE, cuda)
    arena = Arena(copier, 1, 1)
    destination = arena.floats(2, 2)
    copier.save(torch.ones(2, 2, device=DEVICE), destination)
    released = list[bool]()
    releasing = threading.Thread(target=lambda: released.append(copier.release()))
    releasing.start()
    releasing.join(0.1)
    assert (released, len(cuda.registered)) == ([], 2)
    with pytest.raises(RuntimeError, match="was released"):
        copier.load(destination)
    cuda.run()
    releasing.join(PATIENCE_S)
    assert (released, cuda.registered) == ([True], [])
    with pytest.raises(RuntimeError, match="was released"):
        copier.save(torch.ones(2, 2, device=DEVICE), destination)
    assert copier.release()
    copier.close()
    assert torch.all(destination == 1)


# ---- devices


def test_a_granule_is_pinned_at_its_own_bytes_on_the_ranks_device(cuda: Cuda, copier: DeviceCopier) -> None:
    """Not on the device that a new thread starts with."""
    memory = mmap.mmap(-1, 3 * PAGE)
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert copier.register(memory, PAGE, 2 * PAGE) == ""
    [granule] = cuda.registered
    assert (granule.start, granule.length, granule.device) == (start + PAGE, 2 * PAGE, DEVICE)
    assert str(ALREADY_REGISTERED) in copier.register(memory, 0, 3 * PAGE)
    cuda.refuse = lambda address, length: 2
    assert "status 2" in copier.register(memory, 0, PAGE)


def test_copies_over_pageable_memory_are_right_though_their_caller_waits(cuda: Cuda, copier: DeviceCopier) -> None:
    memory = mmap.mmap(-1, PAGE)
    cuda.refuse = lambda address, length: 2
    assert copier.register(memory, 0, PAGE)
    destination = torch.frombuffer(memory, dtype=torch.float32, count=12).view(3, 4)
    copier.save(on_device(3, 4), destination)
    assert torch.equal(destination, torch.arange(12.0).view(3, 4))
    assert torch.equal(copier.load(destination), destination)
    assert cuda.stalls == 2


def test_a_plain_load_crosses_the_borders_of_registrations_and_is_there_when_it_returns(
    cuda: Cuda, copier: DeviceCopier
) -> None:
    memory = mmap.mmap(-1, 2 * PAGE)
    assert copier.register(memory, 0, PAGE) == copier.register(memory, PAGE, PAGE) == ""
    source = torch.frombuffer(memory, dtype=torch.float32).view(2, -1)
    source.copy_(torch.arange(source.numel()).view(2, -1))
    assert torch.equal(copier.load_plainly(source), source)
    copier.close()
    cuda.run()
    assert copier.release()
    with pytest.raises(RuntimeError, match="was released"):
        copier.load_plainly(source)


def test_a_device_without_a_runtime_to_register_with_copies_all_the_same_and_is_waited_for_asleep() -> None:
    """Like XPU, for which torch has streams and events, but neither `cudart` nor blocking events."""
    xpu, steps, memory = Xpu(running=True, pace_s=0.05), Steps(), mmap.mmap(-1, PAGE)
    with OnDevice(xpu):
        copier = DeviceCopier(torch.device("xpu", 0), xpu)
        assert not copier.registers
        source = torch.arange(12.0, device="xpu").view(3, 4)
        destination = torch.frombuffer(memory, dtype=torch.float32, count=12).view(3, 4)
        copier.begin_step()
        copier.save(source, destination)
        loaded = copier.load(destination)
        copier.finish(steps("step"))
        steps.wait(1)
        assert copier.stage(memory, STAGE) == ""
        staged = copier.take(STAGE.number)
        copier.begin_step()
        copier.close()
        assert copier.release()
    assert staged is not None
    assert torch.equal(loaded, torch.arange(12.0).view(3, 4))
    assert torch.equal(staged, loaded)
    assert (xpu.spins, xpu.registered, xpu.faults) == (0, [], [])


@pytest.mark.parametrize("module", [torch.cuda, torch.xpu], ids=["cuda", "xpu"])
def test_torch_has_every_call_that_is_made_on_a_device(module: Any) -> None:
    """Even in this build, which has neither device: the stand-ins provide only these calls."""
    assert why_unsupported(module.__name__.removeprefix("torch.")) == ""
    calls = {"Stream": ("record_event", "wait_event"), "Event": ("record", "query", "synchronize")}
    own = module.streams  # in a process with vLLM for CPU, `torch.cuda.Event` is a placeholder of vLLM's
    missing = [name for kind, names in calls.items() for name in names if not hasattr(getattr(own, kind), name)]
    assert missing == []


# ---- ahead of the step


STAGE = Stage(1, 0, 3, 4, "F32")


@pytest.fixture
def running() -> Iterator[Cuda]:
    cuda = Cuda(running=True, pace_s=0.05)
    with OnDevice(cuda):
        yield cuda
    cuda.check()
    assert cuda.faults == []


def test_a_staged_copy_is_there_when_the_rank_answers_and_outlives_its_source_in_the_arena(running: Cuda) -> None:
    copier = DeviceCopier(DEVICE, running)
    arena = Arena(copier, 1)
    source = arena.floats(3, 4).copy_(torch.arange(12.0).view(3, 4))
    assert copier.stage(arena.memory, STAGE) == ""
    source.fill_(-1)
    staged = copier.take(STAGE.number)
    assert staged is not None
    assert torch.equal(staged, torch.arange(12.0).view(3, 4))
    assert copier.take(STAGE.number) is None
    assert running.spins == 0
    copier.close()
    assert copier.release()


def test_memory_of_a_staged_load_is_not_given_out_while_the_model_still_reads_it(
    cuda: Cuda, copier: DeviceCopier
) -> None:
    arena = Arena(copier, 1)

    def stage() -> None:
        with OnDevice(cuda):  # it applies per thread
            copier.stage(arena.memory, STAGE)

    rank = threading.Thread(target=stage)
    rank.start()
    wait_until("the copy is queued", lambda: side(cuda)._work)
    while rank.is_alive():
        cuda.run()
        rank.join(0.01)
    staged = copier.take(STAGE.number)
    assert staged is not None
    address = staged.data_ptr()
    cuda.model.submit(lambda: None)
    del staged
    assert copier.load(arena.floats(3, 4)).data_ptr() != address
    cuda.run()


def test_a_device_that_cannot_stage_an_entry_reports_why(running: Cuda) -> None:
    copier = DeviceCopier(DEVICE, running)
    arena = Arena(copier, 1)
    assert "within the arena" in copier.stage(arena.memory, Stage(1, PAGE, 3, 4, "F32"))
    running.memory.full |= {*running.side, running.model}
    assert "out of memory" in copier.stage(arena.memory, STAGE)
    assert copier.take(STAGE.number) is None
    running.memory.full.clear()
    assert copier.stage(arena.memory, STAGE) == ""
    copier.close()
    assert copier.release()
    assert copier.take(STAGE.number) is None
    assert "was released" in copier.stage(arena.memory, STAGE)


def test_a_device_that_cannot_copy_beside_the_model_is_named() -> None:
    assert [why_unsupported(kind) for kind in ("cpu", "cuda", "xpu")] == ["", "", ""]
    assert "torch.mps.Stream" in why_unsupported("mps")
    assert "'tpu'" in why_unsupported("tpu")


def test_on_host_memory_a_step_is_done_at_once() -> None:
    copier, steps = copier_for(torch.device("cpu")), Steps()
    assert isinstance(copier, HostCopier)
    source, destination = torch.ones(2, 2), torch.zeros(2, 2)
    copier.begin_step()
    copier.save(source, destination)
    loaded = copier.load(destination)
    destination.zero_()
    copier.finish(steps("step"))
    assert steps.done == ["step"]
    assert torch.equal(loaded, source)  # a separate copy: the arena's bytes may be reused
    assert not copier.registers
    assert copier.release()
