# SPDX-License-Identifier: Apache-2.0
"""Which items have something to encode, and which are metadata only, on the output of vLLM's own processor.

How a client sends an item without media, if the connector's role is `ec_both` or `ec_consumer` (in Python; the server
accepts the same as `image_embeds` content):

    grid = torch.tensor([[1, 6, 6]])  # patches: time, height, width; 6 * 6 / merge size 2 squared = 9 rows
    LLM.generate({
        "prompt": "<|vision_start|><|image_pad|><|vision_end|>hello",
        "multi_modal_data": {"image": {"image_grid_thw": grid}},
        "multi_modal_uuids": {"image": ["the identifier to load"]},  # else a digest of the grid
    })

For a video: `{"video_grid_thw": grid, "timestamps": torch.tensor([[0.5]])}`. Models whose data parser names no
`embedding_fields`, such as Gemma3, do not accept such requests. A uuid with `None` for data is different: it asks the
processor cache for media sent before.
"""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.testbed.media import WORDINGS, Prompt
from benchmarks.testbed.models import model_path
from lmcache_ec.adapters.vllm.media import EncodableMedia
from tests.unit.test_namespace import connector, vllm_config

MODEL = "qwen3vl"


@pytest.fixture(scope="module")
def model_config() -> Any:
    return vllm_config(model_path(MODEL), ec_transfer_config=connector("ec_both")).model_config


@pytest.fixture(scope="module")
def media(model_config: Any) -> EncodableMedia:
    return EncodableMedia(model_config)


def feature(model_config: Any, modality: str, data: Any) -> Any:
    """The only item of a request, as the scheduler gets it."""
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.multimodal.processing.context import TimingContext
    from vllm.multimodal.processing.inputs import ProcessorInputs

    processor = MULTIMODAL_REGISTRY.create_processor(model_config)
    prompt = Prompt(images=(1,)) if modality == "image" else Prompt(videos=(1,))
    request = WORDINGS[MODEL].render(prompt)
    text = processor.info.get_tokenizer().encode(request["prompt"])
    items = processor.info.parse_mm_data({modality: request["multi_modal_data"][modality] if data is None else data})
    [item] = processor.apply(ProcessorInputs(text, items), TimingContext(enabled=False))["mm_kwargs"][modality]
    return MultiModalFeatureSpec(item, modality, "identifier", PlaceholderRange(offset=0, length=1))


def tensors(**values: list[Any]) -> Any:
    import torch

    return {name: torch.tensor(value) for name, value in values.items()}


@pytest.mark.parametrize("modality", ["image", "video"])
def test_media_can_be_encoded(media: EncodableMedia, model_config: Any, modality: str) -> None:
    assert media.encodable(feature(model_config, modality, None))


def test_metadata_alone_cannot_be_encoded(media: EncodableMedia, model_config: Any) -> None:
    grid = [[1, 6, 6]]
    assert not media.encodable(feature(model_config, "image", tensors(image_grid_thw=grid)))
    video = tensors(video_grid_thw=grid, timestamps=[[0.5]])
    assert not media.encodable(feature(model_config, "video", video))
    embeddings = tensors(image_grid_thw=grid, image_embeds=[[0.0] * 768] * 9)
    assert media.encodable(feature(model_config, "image", embeddings))


def part(data: object) -> Any:
    return SimpleNamespace(data=data)


def test_any_item_gets_an_answer_and_broken_or_empty_media_count_as_none(media: EncodableMedia) -> None:
    """An item in the shared memory of vLLM's processor cache is media; an empty or broken one is not."""

    def item(data: object, modality: object = "image") -> Any:
        return SimpleNamespace(modality=modality, data=data)

    assert media.encodable(item({"address": part(0), "monotonic_id": part(1), "signature": part([1])}))
    assert media.encodable(item({"pixels": part(b"")}, "a modality of tomorrow"))
    for nothing in (None, {}, {"pixel_values": part(None)}, {"image_grid_thw": part(1), "pixel_values": part(None)}, 7):
        assert not media.encodable(item(nothing))
    assert not media.encodable(item({"pixel_values": part(1)}, modality=[]))
    assert not media.encodable(SimpleNamespace())


def test_a_processor_that_fails_is_reported_once(model_config: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Then everything that holds data counts as media: the cache keeps working, without this protection."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    def broken(*_: object) -> None:
        raise RuntimeError("no processor")

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(MULTIMODAL_REGISTRY, "create_processor", broken)
        media = EncodableMedia(model_config)
        answers = [media.encodable(SimpleNamespace(modality="image", data={"x": part(1)})) for _ in range(3)]
    assert answers == [True] * 3
    assert sum("no processor" in record.getMessage() for record in caplog.records) == 1


def test_a_model_without_media_needs_no_processor(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        media = EncodableMedia(SimpleNamespace(is_multimodal_model=False))
    assert not caplog.records
    assert not media.encodable(SimpleNamespace(modality="image", data=None))
