# SPDX-License-Identifier: Apache-2.0
"""How a rank digests its encoder's weights: which tensors, which bytes, and when."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.testbed.stand_ins import SILENT
from lmcache_ec.adapters.vllm import tensor_digest as digests
from lmcache_ec.adapters.vllm import weights as module
from lmcache_ec.adapters.vllm.encoder_tensors import encoder_tensors, reads_language_model
from lmcache_ec.adapters.vllm.tensor_digest import Fold, tensor_digest
from lmcache_ec.adapters.vllm.weights import EncoderWeights

PIECE = 64


@pytest.fixture(params=["in host memory", "on a device"])
def digest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The digest of one tensor, in pieces of 64 bytes. The code for devices runs on any device, even the CPU."""
    monkeypatch.setattr(digests, "PIECE_BYTES", PIECE)
    if request.param == "in host memory":
        return lambda tensor: tensor_digest([("tensor", tensor)])

    def folded(tensor: torch.Tensor) -> str:
        fold = Fold(tensor.device)
        for _, plain in digests._plain("tensor", tensor):
            for piece in digests._pieces(plain):
                fold.add(piece)
        return fold.sums().hex()

    return folded


DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.float64, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 3, 15, 16, 17, 33, 500])
def test_every_byte_at_its_position_counts(digest: Any, dtype: torch.dtype, count: int) -> None:
    """For any dtype and count, a flipped byte or two swapped bytes give another digest."""
    dice = random.Random(count)
    raw = torch.tensor([dice.randrange(2) for _ in range(count * dtype.itemsize)], dtype=torch.uint8)
    tensor = raw.view(dtype)
    original = digest(tensor)
    assert original == digest(tensor.clone())
    for place in (0, len(raw) // 2, len(raw) - 1) if count else ():
        raw[place] ^= 1
        assert digest(tensor) != original
        raw[place] ^= 1
    for one, other in ((0, len(raw) - 1), (0, 1), (len(raw) // 3, len(raw) // 2)):
        if max(one, other) < len(raw) and raw[one] != raw[other]:
            raw[one], raw[other] = raw[other].clone(), raw[one].clone()
            assert digest(tensor) != original
            raw[one], raw[other] = raw[other].clone(), raw[one].clone()
    assert digest(tensor) == original


@given(st.binary(min_size=4, max_size=600).filter(lambda raw: len(raw) % 2 == 0), st.randoms(use_true_random=False))
def test_values_that_change_places_on_a_device_are_seen(raw: bytes, dice: random.Random) -> None:
    tensor = torch.frombuffer(bytearray(raw), dtype=torch.int16)
    order = list(range(len(tensor)))
    dice.shuffle(order)
    moved = tensor[order]
    one, other = Fold(tensor.device), Fold(tensor.device)
    one.add(tensor.view(torch.uint8))
    other.add(moved.view(torch.uint8))
    assert (one.sums() == other.sums()) == torch.equal(tensor, moved)


def test_the_digest_depends_on_values_and_not_on_how_they_lie_in_memory(digest: Any) -> None:
    tensor = torch.arange(60, dtype=torch.int16).view(6, 10)
    assert digest(tensor.t()) == digest(tensor.t().contiguous())
    assert digest(tensor[:, 1:7]) == digest(tensor[:, 1:7].contiguous())
    assert digest(torch.arange(5).expand(3, 5)) == digest(torch.arange(5).repeat(3, 1))
    assert digest(tensor.view(-1)[1:]) == digest(tensor.view(-1)[1:].clone()), "beginning within a word"


def test_names_dtypes_and_shapes_count() -> None:
    zeros = torch.zeros(4, 3)
    distinct = [
        tensor_digest(tensors)
        for tensors in (
            [("a", zeros)],
            [("b", zeros)],
            [("a", zeros.view(3, 4))],
            [("a", zeros.view(torch.int32))],
            [("a", zeros), ("b", zeros)],
            [("b", zeros), ("a", zeros)],
            [],
        )
    ]
    assert len(set(distinct)) == len(distinct)


def test_a_device_makes_one_digest_of_many_small_tensors_and_of_a_large_one() -> None:
    """The digest is the same wherever the data is split."""
    whole = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    parts, together = Fold(whole.device), Fold(whole.device)
    for part in whole.split(20):
        parts.add(part)
    together.add(whole)
    assert parts.sums() == together.sums()


# ---- which tensors


class Tower(torch.nn.Module):
    """A multimodal model like vLLM's: tower, projector, another module, and a named language model."""

    _language_model_names: tuple[str, ...] = ("language_model",)

    def __init__(self) -> None:
        super().__init__()
        self.vision = torch.nn.Linear(4, 4)
        self.projector = torch.nn.Linear(4, 4)
        self.newline = torch.nn.Parameter(torch.ones(4))
        self.language_model = torch.nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4), persistent=False)

    def embed_multimodal(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.project(pixels)

    def project(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.projector(self.vision(pixels))


class Reader(Tower):
    """Its encoder uses part of the language model, as in molmo2 and moondream3."""

    def project(self, pixels: torch.Tensor) -> torch.Tensor:
        return super().project(pixels) + self.language_model(pixels)


class Untold(Tower):
    _language_model_names: tuple[str, ...] = ()


class TextOnly(torch.nn.Module):
    """A model without a tower."""

    _language_model_names = ("language_model",)

    def __init__(self) -> None:
        super().__init__()
        self.language_model = torch.nn.Linear(4, 4)


def names(model: torch.nn.Module) -> set[str]:
    return {name.partition(".")[0] for name, _ in encoder_tensors(model).parameters}


def test_all_but_the_language_model_counts_unless_that_cannot_be_distinguished() -> None:
    encoder = {"vision", "projector", "newline"}
    assert names(Tower()) == encoder
    assert names(Reader()) == names(Untold()) == {*encoder, "language_model"}
    assert names(TextOnly()) == {"language_model"}
    assert [name for name, _ in encoder_tensors(Tower()).buffers] == ["table"]


def test_vllms_models_whose_encoders_read_the_language_model_are_recognized() -> None:
    from vllm.model_executor.models.gemma3_mm import Gemma3ForConditionalGeneration
    from vllm.model_executor.models.molmo2 import Molmo2ForConditionalGeneration
    from vllm.model_executor.models.moondream3 import Moondream3ForCausalLM
    from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration
    from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration

    language = frozenset({"language_model"})
    assert reads_language_model(Molmo2ForConditionalGeneration, language)
    assert reads_language_model(Moondream3ForCausalLM, frozenset({"text"}))
    assert not reads_language_model(Gemma3ForConditionalGeneration, language)
    assert not reads_language_model(Qwen2VLForConditionalGeneration, language)
    assert reads_language_model(Qwen3VLForConditionalGeneration, language), "where it prunes videos"
    unused = frozenset({"_create_final_video_embeddings"})
    assert not reads_language_model(Qwen3VLForConditionalGeneration, language, unused)


# ---- when


class Watched:
    """A model whose weights are watched, and the reports about them: number of calls, and digest."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self.model = model or Tower()
        self.reports: list[tuple[int, str]] = []
        self.weights = EncoderWeights(self.model, lambda *report: self.reports.append(report), SILENT)

    @property
    def digest(self) -> str:
        """The digest reported last; "" if in doubt."""
        return self.reports[-1][1]

    @contextmanager
    def call(self, name: str = "", argument: object = None) -> Iterator[None]:
        with self.weights.call(name, argument, lambda: self.model):
            yield


@pytest.fixture
def watched() -> Watched:
    return Watched()


def scale(parameter: torch.Tensor, factor: float = 2.0) -> None:
    parameter.data.mul_(factor)


def test_a_call_is_reported_before_it_begins_and_its_outcome_once_it_is_over(watched: Watched) -> None:
    [(calls, start)] = watched.reports
    assert calls == 0
    with watched.call("reload_weights"):
        assert watched.reports[-1] == (1, "")
        scale(watched.model.vision.weight)
    assert watched.reports[-1] == (1, watched.digest)
    changed = watched.digest
    assert changed not in ("", start)
    with watched.call("apply_model"):
        scale(watched.model.vision.weight, 0.5)
        scale(watched.model.language_model.weight)
    assert watched.reports[-1] == (2, start)


def test_a_call_that_fails_may_have_changed_weights_all_the_same(watched: Watched) -> None:
    start = watched.digest

    def update() -> None:
        with watched.call("update_weights"):
            scale(watched.model.vision.weight)
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        update()
    assert watched.digest not in ("", start)


@pytest.mark.parametrize("awake", [None, ["weights"], ["weights", "kv_cache"]], ids=str)
def test_no_weights_are_read_while_they_sleep(watched: Watched, awake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    start = watched.digest
    with watched.call("sleep", 1):
        pass
    monkeypatch.setattr(module, "encoder_tensors", lambda model: pytest.fail("the memory is unmapped"))
    for name, argument in (("apply_model", None), ("wake_up", ["kv_cache"])):
        with watched.call(name, argument):
            pass
        assert watched.digest == ""
    watched.weights.look()
    monkeypatch.undo()
    with watched.call("wake_up", awake):
        pass
    assert watched.digest == start


def test_memory_that_vllms_allocator_has_unmapped_is_not_read_whoever_put_it_to_sleep(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocation = SimpleNamespace(tag="weights", is_asleep=True)
    kind = SimpleNamespace(instance=SimpleNamespace(pointer_to_data={1: allocation}))
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", SimpleNamespace(CuMemAllocator=kind))
    start = watched.digest
    with watched.call():
        pass
    assert watched.digest == ""
    allocation.is_asleep = False
    with watched.call():
        pass
    assert watched.digest == start


def test_garbage_after_deep_sleep_is_in_doubt_until_something_is_written(watched: Watched) -> None:
    start, weight = watched.digest, watched.model.vision.weight.data.clone()
    with watched.call("sleep", 2):
        watched.model.vision.weight.data.zero_()
    with watched.call("wake_up", ["weights"]):
        pass
    assert watched.digest == ""
    with watched.call("reload_weights"):
        watched.model.vision.weight.data.copy_(weight)
    assert watched.digest == start
    with watched.call("wake_up", ["kv_cache"]):
        pass
    assert watched.digest == start


def test_weights_are_in_doubt_during_a_layerwise_reload(watched: Watched) -> None:
    start, weight = watched.digest, watched.model.vision.weight
    with watched.call("start_weight_update"):
        watched.model.vision.weight = torch.nn.Parameter(torch.empty(4, 4, device="meta"))
    assert watched.digest == ""
    with watched.call("finish_weight_update"):
        watched.model.vision.weight = weight
    assert watched.digest == start


def test_a_part_that_was_never_loaded_raises_no_doubt() -> None:
    model = Tower()
    model.projector = torch.nn.Linear(4, 4, device="meta")
    watched = Watched(model)
    assert watched.digest != ""


def test_buffers_count_if_a_call_changes_them_and_not_if_the_model_does(watched: Watched) -> None:
    """Rotary tables grow or change their dtype when the model first runs."""
    start = watched.digest
    watched.model.table = torch.arange(8).float()
    with watched.call("apply_model"):
        pass
    assert watched.digest == start
    watched.weights.look()
    assert watched.digest == start
    with watched.call("apply_model"):
        watched.model.table += 1
    assert watched.digest not in ("", start)
    with watched.call("reload_weights"):
        watched.model.table = torch.arange(4)
    assert watched.digest == start, "it holds again what it held at the start"


def test_loading_directly_into_the_model_puts_it_in_doubt_until_the_next_look() -> None:
    class Loading(Tower):
        def load_weights(self, weights: Any) -> int:
            for parameter in weights:
                scale(parameter)
            return len(weights)

    watched = Watched(Loading())
    start = watched.digest
    assert watched.model.load_weights([watched.model.vision.weight]) == 1
    assert watched.reports[1:] == [(0, "")], "reported once, however many loads there are"
    watched.model.load_weights([watched.model.newline])
    assert len(watched.reports) == 2
    watched.weights.look()
    assert watched.digest not in ("", start)


def test_a_model_that_was_loaded_again_is_the_one_that_is_watched(watched: Watched) -> None:
    start, watched.model = watched.digest, Tower()
    with watched.call("load_model"):
        pass
    assert watched.digest not in ("", start)


def test_weights_that_cannot_be_read_are_in_doubt_and_vllm_sees_no_error(watched: Watched) -> None:
    warnings: list[Any] = []
    watched.weights._complaints._logger = SimpleNamespace(warning=lambda *text: warnings.append(text))  # type: ignore[assignment]
    with watched.call("apply_model"):
        watched.model.vision.weight = torch.nn.Parameter(torch.ones(4).to_sparse(), requires_grad=False)
    assert watched.digest == ""
    assert warnings
    assert not watched.weights.are(None, 0)


def test_packed_weights_count_by_the_digest_that_was_taken_before(watched: Watched) -> None:
    """vLLM's CPU build leaves an empty parameter behind. Weights packed unseen count as changed by every call."""
    layer = watched.model.vision
    layer.weight, layer.cpu_linear = torch.nn.Parameter(torch.empty(0)), torch.nn.functional.linear
    layer.lmcache_ec_packed_digest = "one"
    watched = Watched(watched.model)
    start = watched.digest
    with watched.call("apply_model"):
        pass
    assert watched.digest == start
    with watched.call("reload_weights"):
        layer.lmcache_ec_packed_digest = "another"
    assert watched.digest != start
    del layer.lmcache_ec_packed_digest
    watched = Watched(watched.model)
    start = watched.digest
    with watched.call("apply_model"):
        pass
    assert watched.digest != start
