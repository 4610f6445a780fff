# SPDX-License-Identifier: Apache-2.0
"""Copies beside the model's stream: what is ordered before what, what is held for how long, and what a step waits for.

Streams do their work only when a test runs them, so every order that the rules allow can be played through.
"""

import mmap
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lmcache_ec.adapters.vllm.copier import DeviceCopier, HostCopier, copier_for
from tests.unit.fakes import PATIENCE_S, Cuda, FakeStream, OnDevice, collected

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    cuda = Cuda()
    recorded = cuda.recorded
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: recorded.append((self.data_ptr(), stream)))
    with OnDevice(cuda):
        yield cuda


@pytest.fixture
def copier(cuda: Cuda) -> Iterator[DeviceCopier]:
    copier = DeviceCopier(DEVICE, cuda)
    yield copier
    for stream in (cuda.model, *cuda.side, cuda.model):
        stream.run()
    copier.close()


class Steps:
    """Notes the steps that were called done, and waits for them."""

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


def side(cuda: Cuda) -> FakeStream:
    (stream,) = cuda.side
    return stream


def test_a_loaded_tensor_is_there_before_the_forward_pass_uses_it(cuda: Cuda, copier: DeviceCopier) -> None:
    source = torch.arange(12.0).view(3, 4)
    tensor = copier.load(source)
    used: list[torch.Tensor] = []
    cuda.model.submit(lambda: used.append(tensor.clone()))
    assert not cuda.model.run()
    assert not used
    assert side(cuda).run()
    assert cuda.model.run()
    assert torch.equal(used[0], source)
    assert (tensor.data_ptr(), cuda.model) in cuda.recorded  # else freed memory could be taken while the model reads it


def test_a_save_copies_what_the_model_has_produced_by_then(cuda: Cuda, copier: DeviceCopier) -> None:
    source, destination = torch.zeros(3, 4), torch.zeros(3, 4)
    cuda.model.submit(lambda: source.fill_(7))
    copier.save(source, destination)
    assert not side(cuda).run()
    cuda.model.run()
    side(cuda).run()
    assert torch.equal(destination, torch.full((3, 4), 7.0))
    assert (source.data_ptr(), side(cuda)) in cuda.recorded  # else the source's memory could be taken while it is read


def test_a_step_is_done_only_when_its_copies_are_over_and_the_caller_never_waits(
    cuda: Cuda, copier: DeviceCopier
) -> None:
    steps, destination = Steps(), torch.zeros(2, 2)
    copier.save(torch.ones(2, 2), destination)
    copier.finish(steps("save"))
    copier.finish(steps("nothing to copy"))
    copier.load(destination)
    copier.finish(steps("load"))
    assert side(cuda).events[0].awaited.wait(PATIENCE_S)
    assert steps.done == []
    assert not torch.any(destination)
    cuda.model.run()
    side(cuda).run()
    assert steps.wait(3) == ["save", "nothing to copy", "load"]
    assert torch.all(destination == 1)


def test_source_and_destination_are_held_until_the_copy_is_over_and_no_longer(cuda: Cuda, copier: DeviceCopier) -> None:
    steps = Steps()
    source, destination, loaded = torch.ones(2, 2), torch.zeros(2, 2), torch.ones(2, 2)
    references = [weakref.ref(tensor) for tensor in (source, destination, loaded)]
    copier.save(source, destination)
    copier.load(loaded)
    copier.finish(steps("step"))
    del source, destination, loaded
    # The copies of these fakes hold their tensors, too: without them only the copier does.
    side(cuda)._work = type(side(cuda)._work)(
        work for work in side(cuda)._work if getattr(work, "__closure__", None) is None
    )
    assert not any(collected(reference) for reference in references)
    cuda.model.run()
    side(cuda).run()
    steps.wait(1)
    copier.finish(steps("next"))
    side(cuda).run()
    steps.wait(2)
    assert all(collected(reference) for reference in references)


def test_after_an_error_of_the_device_no_step_is_called_done_and_the_next_one_says_so(
    cuda: Cuda, copier: DeviceCopier
) -> None:
    """Silence would leave the scheduler side waiting for reports for ever, and tensors would pile up behind it."""
    steps = Steps()
    copier.save(torch.ones(2, 2), torch.zeros(2, 2))
    copier.finish(steps("lost"))
    side(cuda).events[-1].error = RuntimeError("an illegal memory access was encountered")
    copier.finish(steps("behind it"))
    cuda.model.run()
    side(cuda).run()
    copier.close()
    pending = weakref.ref(tensor := torch.ones(2, 2))
    copier.save(tensor, torch.zeros(2, 2))
    side(cuda)._work.clear()
    del tensor
    with pytest.raises(RuntimeError, match="illegal memory access"):
        copier.finish(steps("later"))
    assert steps.done == []
    assert collected(pending)


def test_closing_finishes_what_is_under_way(cuda: Cuda) -> None:
    copier, steps, destination = DeviceCopier(DEVICE, cuda), Steps(), torch.zeros(2, 2)
    copier.save(torch.ones(2, 2), destination)
    copier.finish(steps("save"))
    cuda.model.run()
    side(cuda).run()
    copier.close()
    assert steps.done == ["save"]
    assert torch.all(destination == 1)


def test_a_segment_is_pinned_at_its_own_bytes_and_a_refusal_is_an_error(cuda: Cuda, copier: DeviceCopier) -> None:
    memory = mmap.mmap(-1, 3 * mmap.PAGESIZE)
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    copier.register(memory, mmap.PAGESIZE, 2 * mmap.PAGESIZE)
    assert cuda.registered == [(start + mmap.PAGESIZE, 2 * mmap.PAGESIZE)]
    assert cuda.registered_on == [DEVICE], "not on whatever device a new thread starts with"
    cuda.register_status = 2
    with pytest.raises(RuntimeError, match="status 2"):
        copier.register(memory, 0, mmap.PAGESIZE)


def test_on_host_memory_a_step_is_done_at_once() -> None:
    copier, steps = copier_for(torch.device("cpu")), Steps()
    assert isinstance(copier, HostCopier)
    source, destination = torch.ones(2, 2), torch.zeros(2, 2)
    copier.save(source, destination)
    loaded = copier.load(destination)
    destination.zero_()
    copier.finish(steps("step"))
    assert steps.done == ["step"]
    assert torch.equal(loaded, source)  # a copy of its own: the arena's bytes may be another entry's tomorrow
