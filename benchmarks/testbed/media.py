# SPDX-License-Identifier: Apache-2.0
"""Prompts for the test models: pictures, clips and sounds generated from seeds, in each model's prompt format."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

SAMPLE_RATE_HZ = 16_000


class Prompt(msgspec.Struct, frozen=True):
    """Each number is a seed: the same seed gives the same picture, clip or sound in every process."""

    images: tuple[int, ...] = ()
    videos: tuple[int, ...] = ()
    audios: tuple[int, ...] = ()
    text: str = "hello"
    size: tuple[int, int] = (112, 112)
    """Width and height of images and videos in pixels."""


def picture(seed: int, size: tuple[int, int] = (112, 112)) -> "Image":
    import numpy as np
    from PIL import Image

    width, height = size
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def clip(seed: int, size: tuple[int, int] = (112, 112), frames: int = 4) -> "np.ndarray[Any, Any]":
    """uint8, frames x height x width x 3."""
    import numpy as np

    width, height = size
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def sound(seed: int, seconds: float = 1.0) -> "tuple[np.ndarray[Any, Any], int]":
    """float32 samples and their rate, which is the one the models expect, so that nothing resamples them."""
    import numpy as np

    samples = np.random.default_rng(seed).standard_normal(int(seconds * SAMPLE_RATE_HZ), dtype=np.float32)
    return samples * 0.1, SAMPLE_RATE_HZ


@dataclass(frozen=True)
class Wording:
    """A model's prompt format: a frame around media and text, and the marker of each medium that it accepts."""

    frame: str = "{media}{text}"
    image: str | None = None
    video: str | None = None
    audio: str | None = None
    max_model_len: int = 2048

    @property
    def limits(self) -> dict[str, int]:
        """`limit_mm_per_prompt` of an engine."""
        most = {"image": 4, "video": 2, "audio": 2}
        return {kind: count for kind, count in most.items() if getattr(self, kind) is not None}

    def render(self, prompt: Prompt) -> dict[str, Any]:
        """A prompt for vLLM's `LLM.generate`."""
        data: dict[str, Any] = {}
        if prompt.images:
            data["image"] = [picture(seed, prompt.size) for seed in prompt.images]
        if prompt.videos:
            data["video"] = [(clip(seed, prompt.size), CLIP_METADATA) for seed in prompt.videos]
        if prompt.audios:
            data["audio"] = [sound(seed) for seed in prompt.audios]
        media = "".join((getattr(self, kind) or "") * len(items) for kind, items in data.items())
        text = self.frame.format(media=media, text=prompt.text)
        return {"prompt": text, "multi_modal_data": data} if data else {"prompt": text}


CLIP_METADATA = {"fps": 2.0, "total_num_frames": 4, "duration": 2.0, "frames_indices": [0, 1, 2, 3]}
QWEN_VL = Wording(
    "<|im_start|>user\n{media}{text}<|im_end|>\n",
    image="<|vision_start|><|image_pad|><|vision_end|>",
    video="<|vision_start|><|video_pad|><|vision_end|>",
)
GEMMA = Wording("<bos><start_of_turn>user\n{media}{text}<end_of_turn>\n", image="<start_of_image>")
WORDINGS = {
    "gemma3": GEMMA,
    "gemma3_vit_b": GEMMA,
    "gemma3_so400m": GEMMA,
    "gemma3_so400m_lm": GEMMA,
    "qwen2vl": QWEN_VL,
    "qwen25vl": QWEN_VL,
    "qwen3vl": QWEN_VL,
    "llava": Wording(image="<image>"),
    "paligemma": Wording(image=""),  # the processor puts the image before the text by itself
    "idefics3": Wording(image="<image>"),
    "qwen2audio": Wording("<|im_start|>user\n{media}{text}<|im_end|>\n", audio="<|audio_bos|><|AUDIO|><|audio_eos|>"),
    "whisper": Wording("<|startoftranscript|><|en|><|transcribe|><|notimestamps|>", audio="", max_model_len=448),
}
