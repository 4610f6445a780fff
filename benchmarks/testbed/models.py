# SPDX-License-Identifier: Apache-2.0
"""Tiny multimodal checkpoints with random weights: real safetensors, real processors, outputs that depend on the image.

`model_path("gemma3")` builds the checkpoint once, into `.models/` of the repository, and returns its folder.
`python -m benchmarks.testbed.models [--folder FOLDER] NAME...` does the same by hand. Building needs torch and
transformers; it happens in a child process, so importing this module costs nothing and needs neither.

vLLM requires three things of a tiny checkpoint: a head dimension of 32 or more in the language model, a width it can
split by 2 (tensor parallel tests), and weight names as in the published checkpoints.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

Json = dict[str, Any]
Builder = Callable[[Path], None]

MODELS: dict[str, Builder] = {}


def model_path(name: str) -> Path:
    """The checkpoint's folder, built if it does not exist. Two processes may do so at once: the first rename wins."""
    if name not in MODELS:
        raise KeyError(f"no test model is called {name!r}; there are {', '.join(sorted(MODELS))}")
    folder = ROOT / ".models" / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(exist_ok=True)
    built = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=folder.parent))
    try:
        child = [sys.executable, "-m", "benchmarks.testbed.models", "--folder", str(built), name]
        done = subprocess.run(child, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"building the test model {name!r} failed:\n{done.stderr}")
        try:
            built.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(built, ignore_errors=True)
    return folder


def checkpoint(builder: Builder) -> Builder:
    """Register the builder in `MODELS` under its own name."""
    MODELS[builder.__name__] = builder
    return builder


# --- shared by the builders ------------------------------------------------------------------------------------------


def byte_tokenizer(specials: list[str], *, chat: str | None = None, named: Json | None = None, **roles: str) -> Any:
    """A tokenizer of the 256 bytes and `specials`; `roles` are its eos_token, pad_token and bos_token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    extra = {"extra_special_tokens": named} if named else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, **roles, **extra)
    tokenizer.add_special_tokens({"additional_special_tokens": specials})
    if chat:
        tokenizer.chat_template = chat
    return tokenizer


def chat_template(turn: str, end: str, **media: str) -> str:
    """A chat template with turns of `turn` + content + `end`; `media` maps image, video and audio to their markers."""
    cases = "".join(f"{{% elif part['type'] in ('{kind}', '{kind}_url') %}}{marker}" for kind, marker in media.items())
    return (
        f"{{% for message in messages %}}{turn}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
        f"{cases}{{% endif %}}{{% endfor %}}{{% endif %}}{end}{{% endfor %}}"
    )


def text_config(**changes: Any) -> Json:
    common: Json = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
    }
    return common | changes


def tower_config(**changes: Any) -> Json:
    """A CLIP-like vision tower of two layers over 112 x 112 pixels: 8 x 8 patches."""
    common: Json = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 112,
        "patch_size": 14,
    }
    return common | changes


def save_model(model: Any, folder: Path) -> None:
    """Fill in random weights, with four times the usual deviation so that pictures affect logprobs, and save."""
    import torch

    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.copy_(torch.randn(weight.shape, generator=source) * 0.08)
            elif "bias" in name:
                weight.copy_(torch.randn(weight.shape, generator=source) * 0.02)
    model.save_pretrained(folder, safe_serialization=True)
    for file in folder.glob("*.safetensors"):
        spell_as_published(file)


def spell_as_published(file: Path) -> None:
    """transformers 5 saves some weights under names that vLLM's mappers do not know."""
    from safetensors.torch import load_file, save_file

    def published(name: str) -> str:
        if name.startswith("vision_tower.") and not name.startswith("vision_tower.vision_model."):
            name = name.replace("vision_tower.", "vision_tower.vision_model.", 1)
        return name.replace("language_model.model.model.", "language_model.model.")

    weights = load_file(file)
    save_file({published(name): weight for name, weight in weights.items()}, file, metadata={"format": "pt"})


def save_json(folder: Path, name: str, content: Json) -> None:
    (folder / name).write_text(json.dumps(content, indent=1))


# --- Qwen-VL ---------------------------------------------------------------------------------------------------------

QWEN_SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
QWEN_CHAT = chat_template(
    "<|im_start|>{{ message['role'] }}\n",
    "<|im_end|>\n",
    image="<|vision_start|><|image_pad|><|vision_end|>",
    video="<|vision_start|><|video_pad|><|vision_end|>",
)
QWEN_PIXELS: Json = {
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.48, 0.45, 0.40],
    "image_std": [0.26, 0.26, 0.27],
    "do_rescale": True,
    "do_normalize": True,
    "do_resize": True,
    "do_convert_rgb": True,
    "resample": 3,
    "rescale_factor": 1 / 255,
}


def qwen_tokens(folder: Path) -> tuple[Json, Json]:
    """Save the tokenizer. Returns the token ids for the model's config and for its text config."""
    tokenizer = byte_tokenizer(QWEN_SPECIALS, chat=QWEN_CHAT, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.save_pretrained(folder)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in QWEN_SPECIALS}
    model = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": False,
    }
    return model, {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"]}


def qwen_rope(**changes: Any) -> Json:
    return {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12], **changes}


@checkpoint
def qwen2vl(folder: Path) -> None:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    ids, text_ids = qwen_tokens(folder)
    vision = {
        "depth": 2,
        "embed_dim": 64,
        "mlp_ratio": 2,
        "num_heads": 2,
        "in_chans": 3,
        "hidden_size": 256,
        "patch_size": 14,
        "spatial_patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    text = text_config(rope_parameters=qwen_rope(), **text_ids)
    config = Qwen2VLConfig(text_config=text, vision_config=vision, **ids)
    save_model(Qwen2VLForConditionalGeneration(config), folder)
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor"}
    pixels = {"patch_size": 14, "min_pixels": 3136, "max_pixels": 200704}
    save_json(folder, "preprocessor_config.json", processor | pixels | QWEN_PIXELS)


@checkpoint
def qwen25vl(folder: Path) -> None:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    ids, text_ids = qwen_tokens(folder)
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "in_channels": 3,
        "out_hidden_size": 256,
        "patch_size": 14,
        "spatial_patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    }
    text = text_config(rope_parameters=qwen_rope(), **text_ids)
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
    save_model(Qwen2_5_VLForConditionalGeneration(config), folder)
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
    pixels = {"patch_size": 14, "min_pixels": 3136, "max_pixels": 200704}
    save_json(folder, "preprocessor_config.json", processor | pixels | QWEN_PIXELS)


@checkpoint
def qwen3vl(folder: Path) -> None:
    """DeepStack after two of three layers: an encoder output is three times as wide as the language model."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    ids, text_ids = qwen_tokens(folder)
    vision = {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "in_channels": 3,
        "out_hidden_size": 256,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0, 1],
    }
    rope = qwen_rope(mrope_interleaved=True)
    text = text_config(num_hidden_layers=3, head_dim=64, rope_parameters=rope, **text_ids)
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **ids)
    save_model(Qwen3VLForConditionalGeneration(config), folder)
    pixels = {"patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 262144}} | QWEN_PIXELS
    processor = {"processor_class": "Qwen3VLProcessor"}
    image, video = {"image_processor_type": "Qwen2VLImageProcessor"}, {"video_processor_type": "Qwen3VLVideoProcessor"}
    save_json(folder, "preprocessor_config.json", image | processor | pixels)
    save_json(folder, "video_preprocessor_config.json", video | processor | pixels)


# --- Gemma3 ----------------------------------------------------------------------------------------------------------

GEMMA_SPECIALS = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
    "<start_of_turn>",
    "<end_of_turn>",
    *("\n" * n for n in range(1, 5)),
]
SO400M: Json = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}


def save_gemma3(folder: Path, text: Json, vision: Json, *, image_size: int, tokens_per_image: int) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3ImageProcessor, Gemma3Processor

    tokenizer = byte_tokenizer(
        GEMMA_SPECIALS,
        eos_token="<eos>",
        pad_token="<pad>",
        bos_token="<bos>",
        named={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        chat=chat_template("<start_of_turn>{{ message['role'] }}\n", "<end_of_turn>\n", image="<start_of_image>"),
    )
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in GEMMA_SPECIALS}
    text = text_config(head_dim=64, sliding_window=512, query_pre_attn_scalar=64) | text
    text["layer_types"] = ["sliding_attention", "full_attention"] * (text["num_hidden_layers"] // 2)
    text |= {"pad_token_id": ids["<pad>"], "bos_token_id": ids["<bos>"], "eos_token_id": ids["<eos>"]}
    config = Gemma3Config(
        text_config=text,
        vision_config=tower_config(vision_use_head=False, image_size=image_size) | vision,
        mm_tokens_per_image=tokens_per_image,
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        image_token_index=ids["<image_soft_token>"],
    )
    save_model(Gemma3ForConditionalGeneration(config), folder)
    size = {"height": image_size, "width": image_size}
    pixels = Gemma3ImageProcessor(size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    template = tokenizer.chat_template
    processor = Gemma3Processor(pixels, tokenizer, chat_template=template, image_seq_length=tokens_per_image)
    processor.save_pretrained(folder)


@checkpoint
def gemma3(folder: Path) -> None:
    """16 tokens an image, 256 wide."""
    save_gemma3(folder, {}, {}, image_size=112, tokens_per_image=16)


@checkpoint
def gemma3_vit_b(folder: Path) -> None:
    """A tower of ViT-B's shape (86 M parameters, 384 px: 576 patches in, 144 tokens out) before a language model of
    about 40 M, 0.5 GB: the demo's model, with the encode cost of real small encoders.
    """
    text: Json = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
    text |= {"num_key_value_heads": 4}
    tower: Json = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    save_gemma3(folder, text, tower | {"patch_size": 16}, image_size=384, tokens_per_image=144)


@checkpoint
def gemma3_so400m(folder: Path) -> None:
    """A tower of SigLIP-so400m's shape (1024 patches in, 256 tokens out) before a tiny language model, 1.7 GB."""
    save_gemma3(folder, {}, SO400M, image_size=448, tokens_per_image=256)


@checkpoint
def gemma3_so400m_lm(folder: Path) -> None:
    """The same tower before a language model of about 0.4 B parameters, 3 GB: for measuring cost."""
    text: Json = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 8}
    text |= {"num_key_value_heads": 4, "head_dim": 128}
    save_gemma3(folder, text, SO400M, image_size=448, tokens_per_image=256)


# --- other families of vision models ---------------------------------------------------------------------------------


@checkpoint
def llava(folder: Path) -> None:
    from transformers import CLIPImageProcessor, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

    specials = ["<unk>", "<s>", "</s>", "<pad>", "<image>"]
    chat = chat_template("", "", image="<image>")
    roles = {"eos_token": "</s>", "pad_token": "<pad>", "bos_token": "<s>"}
    tokenizer = byte_tokenizer(specials, chat=chat, named={"image_token": "<image>"}, **roles)
    config = LlavaConfig(
        text_config={"model_type": "llama"} | text_config(),
        vision_config=tower_config(model_type="clip_vision_model", num_hidden_layers=3, projection_dim=64),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=64,
    )
    save_model(LlavaForConditionalGeneration(config), folder)
    processor = LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 112}, crop_size={"height": 112, "width": 112}),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat,
    )
    processor.save_pretrained(folder)


@checkpoint
def paligemma(folder: Path) -> None:
    from transformers import (
        PaliGemmaConfig,
        PaliGemmaForConditionalGeneration,
        PaliGemmaProcessor,
        SiglipImageProcessor,
    )

    specials = ["<pad>", "<eos>", "<bos>", "<image>", "\n"]
    roles = {"eos_token": "<eos>", "pad_token": "<pad>", "bos_token": "<bos>"}
    chat = chat_template("", "", image="")  # the processor puts the image before the text by itself
    tokenizer = byte_tokenizer(specials, chat=chat, named={"image_token": "<image>"}, **roles)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in specials}
    # The processor adds 1024 location tokens of its own, hence the larger vocabulary.
    text = text_config(model_type="gemma", head_dim=64, num_key_value_heads=1, vocab_size=1408)
    text |= {"pad_token_id": ids["<pad>"], "bos_token_id": ids["<bos>"], "eos_token_id": ids["<eos>"]}
    config = PaliGemmaConfig(
        text_config=text,
        vision_config=tower_config(model_type="siglip_vision_model", vision_use_head=False, projection_dim=256),
        image_token_index=ids["<image>"],
        projection_dim=256,
        hidden_size=256,
    )
    save_model(PaliGemmaForConditionalGeneration(config), folder)
    size = {"height": 112, "width": 112}
    pixels = SiglipImageProcessor(size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    pixels.image_seq_length = 64
    PaliGemmaProcessor(pixels, tokenizer, chat_template=chat).save_pretrained(folder)


@checkpoint
def idefics3(folder: Path) -> None:
    """Splits a large image into tiles: the number of tokens varies with the picture."""
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessor,
        Idefics3Processor,
    )

    specials = ["<unk>", "<s>", "</s>", "<pad>", "<image>", "<fake_token_around_image>", "<global-img>"]
    specials += ["<end_of_utterance>", *(f"<row_{row}_col_{col}>" for row in range(1, 4) for col in range(1, 4))]
    chat = chat_template("", "", image="<image>")
    tokenizer = byte_tokenizer(specials, chat=chat, eos_token="</s>", pad_token="<pad>", bos_token="<s>")
    config = Idefics3Config(
        text_config={"model_type": "llama"} | text_config(),
        vision_config=tower_config(),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<pad>"),
        scale_factor=2,
        tie_word_embeddings=False,
    )
    save_model(Idefics3ForConditionalGeneration(config), folder)
    pixels = Idefics3ImageProcessor(size={"longest_edge": 224}, max_image_size={"longest_edge": 112})
    Idefics3Processor(pixels, tokenizer, image_seq_len=16, chat_template=chat).save_pretrained(folder)


# --- audio -----------------------------------------------------------------------------------------------------------


@checkpoint
def qwen2audio(folder: Path) -> None:
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        WhisperFeatureExtractor,
    )

    named = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *named.values()]
    turn, end = "<|im_start|>{{ message['role'] }}\n", "<|im_end|>\n"
    chat = chat_template(turn, end, audio="<|audio_bos|><|AUDIO|><|audio_eos|>")
    roles = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = byte_tokenizer(specials, chat=chat, named=named, **roles)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in specials}
    text = text_config(model_type="qwen2", bos_token_id=ids["<|endoftext|>"], eos_token_id=ids["<|im_end|>"])
    audio = {
        "model_type": "qwen2_audio_encoder",
        "d_model": 64,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 128,
        "num_mel_bins": 128,
        "max_source_positions": 1500,
    }
    config = Qwen2AudioConfig(text_config=text, audio_config=audio, audio_token_index=ids["<|AUDIO|>"])
    save_model(Qwen2AudioForConditionalGeneration(config), folder)
    features = WhisperFeatureExtractor(feature_size=128)
    Qwen2AudioProcessor(features, tokenizer, chat_template=chat).save_pretrained(folder)


@checkpoint
def whisper(folder: Path) -> None:
    """An encoder-decoder: its encoder output does not stand in the prompt, and the cache must not touch it."""
    from tokenizers import pre_tokenizers
    from transformers import (
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizer,
    )

    end, start, *rest = specials = [
        "<|endoftext|>",
        "<|startoftranscript|>",
        "<|en|>",
        "<|translate|>",
        "<|transcribe|>",
        "<|startoflm|>",
        "<|startofprev|>",
        "<|nospeech|>",
        "<|notimestamps|>",
    ]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = WhisperTokenizer(vocab={token: i for i, token in enumerate(alphabet + specials)}, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": [start, *rest]})
    end_id = tokenizer.convert_tokens_to_ids(end)
    config = WhisperConfig(
        vocab_size=320,
        num_mel_bins=80,
        d_model=128,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        max_source_positions=1500,
        max_target_positions=448,
        pad_token_id=end_id,
        bos_token_id=end_id,
        eos_token_id=end_id,
        decoder_start_token_id=tokenizer.convert_tokens_to_ids(start),
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    save_model(WhisperForConditionalGeneration(config), folder)
    WhisperProcessor(WhisperFeatureExtractor(feature_size=80), tokenizer).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.testbed.models", description="Build tiny test checkpoints."
    )
    parser.add_argument("names", nargs="+", choices=sorted(MODELS), metavar="NAME", help=", ".join(sorted(MODELS)))
    parser.add_argument("--folder", type=Path, help="build one model into this folder, in this process")
    arguments = parser.parse_args()
    if arguments.folder is None:
        for name in arguments.names:
            print(model_path(name))
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    [name] = arguments.names
    MODELS[name](arguments.folder)


if __name__ == "__main__":
    main()
