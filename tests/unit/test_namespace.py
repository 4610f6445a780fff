# SPDX-License-Identifier: Apache-2.0
"""An engine's namespace, from vLLM's own configuration: engines that may not share entries differ, others agree."""

import enum
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.testbed.models import model_path
from lmcache_ec.adapters.vllm.namespace import NamespaceUnknown, canonical, engine_namespace, note_checkpoint
from lmcache_ec.config import EncoderCacheConfig

MODEL = "qwen3vl"
COMMIT, OTHER_COMMIT = "a" * 40, "b" * 40


def vllm_config(model: Path | str, **changes: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

    arguments: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 8, "enforce_eager": True}
    # vLLM inspects a model's class in a separate process, to keep CUDA uninitialized: ten seconds to import vLLM again.
    with mock.patch.object(registry, "_run_in_subprocess", lambda look: look()):
        return EngineArgs(**{"model": str(model), **arguments, **changes}).create_engine_config()


def namespace(model: Path | str, config: EncoderCacheConfig | None = None, **changes: Any) -> str:
    return engine_namespace(vllm_config(model, **changes), config or EncoderCacheConfig())


def connector(role: str) -> dict[str, Any]:
    return {"ec_connector": "ECExampleConnector", "ec_role": role, "engine_id": f"engine-{role}"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_path(MODEL), tmp_path / "current"))


@pytest.fixture(scope="module")
def own() -> str:
    return namespace(model_path(MODEL))


MATTERS: dict[str, dict[str, Any]] = {
    "dtype": {"dtype": "float32"},
    "revision": {"revision": "v2"},
    "code revision": {"code_revision": "v2"},
    "quantization": {"quantization": "fp8"},
    "an override deep in the model": {"hf_overrides": {"vision_config": {"layer_norm_eps": 1e-5}}},
    "model implementation": {"model_impl": "transformers"},
    "dummy weights": {"load_format": "dummy"},
    "video pruning rate": {"video_pruning_rate": 0.5},
    "video pruning method": {"video_pruning_method": "vidcom2"},
    "processor arguments": {"mm_processor_kwargs": {"max_pixels": 65536}},
    "media arguments": {"media_io_kwargs": {"video": {"num_frames": 8}}},
    "encoder attention": {"mm_encoder_attn_backend": "TORCH_SDPA"},
    "encoder tensor parallel mode": {"mm_encoder_tp_mode": "data"},
    "where pixels are normalised": {"mm_device_do_normalize": False},
}

CANNOT_MATTER: dict[str, dict[str, Any]] = {
    "items per prompt": {"limit_mm_per_prompt": {"image": 2}},
    "processor cache": {"mm_processor_cache_gb": 0.5, "mm_processor_cache_type": "shm"},
    "memory and lengths": {"gpu_memory_utilization": 0.5, "max_model_len": 512, "max_num_seqs": 2},
    "seed": {"seed": 7},
    "tensor parallel": {"tensor_parallel_size": 2},
    "how weights are read": {"load_format": "safetensors"},
    "the name it is served by": {"served_model_name": "another"},
    "a dedicated encoder": {"ec_transfer_config": connector("ec_producer")},
    "its consumer": {"ec_transfer_config": connector("ec_consumer")},
    "both": {"ec_transfer_config": connector("ec_both")},
    "the encoder's device": {"mm_processor_kwargs": {"device": "cpu"}, "media_io_kwargs": {"video": {}}},
}


@pytest.mark.parametrize("change", MATTERS.values(), ids=MATTERS.keys())
def test_what_changes_the_encoder_changes_the_namespace(own: str, change: dict[str, Any]) -> None:
    assert namespace(model_path(MODEL), **change) != own


@pytest.mark.parametrize("change", CANNOT_MATTER.values(), ids=CANNOT_MATTER.keys())
def test_what_cannot_change_the_encoder_keeps_the_namespace(own: str, change: dict[str, Any]) -> None:
    assert namespace(model_path(MODEL), **change) == own


def test_every_change_has_a_namespace_of_its_own() -> None:
    changes = [*MATTERS.values(), {"load_format": "dummy", "seed": 1}, {"video_pruning_rate": 0.25}]
    assert len({namespace(model_path(MODEL), **change) for change in changes}) == len(changes)


FILES = ("config.json", "video_preprocessor_config.json", "tokenizer.json", "model.safetensors")


@pytest.mark.parametrize("name", FILES)
def test_a_checkpoint_overwritten_under_the_same_path_is_another(checkpoint: Path, own: str, name: str) -> None:
    """A copy elsewhere has the same namespace at first; then one byte of one file changes."""
    assert namespace(checkpoint) == own
    content = bytearray((checkpoint / name).read_bytes())
    if name == "model.safetensors":
        content[-1] ^= 1
    else:
        content += b"\n"
    (checkpoint / name).write_bytes(content)
    assert namespace(checkpoint) != own


def test_a_tokenizer_from_elsewhere_counts_by_content(checkpoint: Path, own: str) -> None:
    for weights in checkpoint.glob("*.safetensors"):
        weights.unlink()
    one = namespace(model_path(MODEL), tokenizer=str(checkpoint))
    (checkpoint / "tokenizer_config.json").write_bytes((checkpoint / "tokenizer_config.json").read_bytes() + b"\n")
    assert len({own, one, namespace(model_path(MODEL), tokenizer=str(checkpoint))}) == 3


def test_attention_scales_count_by_content(checkpoint: Path) -> None:
    config = vllm_config(checkpoint)
    seen = []
    for name, text in (("one.json", "{}"), ("copy.json", "{}"), ("one.json", "{ }")):
        scales = checkpoint.parent / name
        scales.write_text(text)
        config.model_config.multimodal_config.mm_encoder_fp8_scale_path = str(scales)
        seen.append(engine_namespace(config, EncoderCacheConfig()))
    assert seen[0] == seen[1] != seen[2]


def test_a_field_that_a_later_vllm_adds_counts() -> None:
    import dataclasses

    config = vllm_config(model_path(MODEL))
    later = dataclasses.make_dataclass("MultiModalConfig", [("mm_new_method", str, "one")])
    seen = []
    for value in ("one", "two"):
        multimodal = later(value)
        for field in dataclasses.fields(config.model_config.multimodal_config):
            setattr(multimodal, field.name, getattr(config.model_config.multimodal_config, field.name))
        config.model_config.multimodal_config, kept = multimodal, config.model_config.multimodal_config
        seen.append(engine_namespace(config, EncoderCacheConfig()))
        config.model_config.multimodal_config = kept
    assert seen[0] != seen[1]


def test_the_salt_and_the_name_change_the_namespace_and_budgets_do_not(own: str) -> None:
    """A name replaces everything else. Epochs are added later, see `at_epoch`."""
    config = vllm_config(model_path(MODEL))
    assert own.startswith("qwen3_vl-")
    assert engine_namespace(config, EncoderCacheConfig(max_local_cpu_size=1)) == own
    assert engine_namespace(config, EncoderCacheConfig(epoch=1)) == own
    others = [EncoderCacheConfig(salt="a"), EncoderCacheConfig(salt="b")]
    assert len({own, *(engine_namespace(config, other) for other in others)}) == 3
    config.model_config.model = "s3://bucket/unseen"
    assert engine_namespace(config, EncoderCacheConfig(namespace="shared", salt="a", epoch=1)) == "shared"


def test_libraries_and_engine_count_by_version(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import PackageNotFoundError

    import vllm.version

    import lmcache_ec.adapters.vllm.namespace as module

    config, any_version = vllm_config(model_path(MODEL)), EncoderCacheConfig(key_by_engine_version=False)
    release, unkeyed = vllm.version.__version__, engine_namespace(config, any_version)
    for newer, same in ((f"{release}.post1+cu130", True), ("99.1.0", False)):
        monkeypatch.setattr(vllm.version, "__version__", newer)
        assert (engine_namespace(config, EncoderCacheConfig()) == own) is same
        assert engine_namespace(config, any_version) == unkeyed
    monkeypatch.undo()
    installed = {name: release for name, release in module._library_versions().items() if release is not None}

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(module, "version", version)
    assert engine_namespace(config, EncoderCacheConfig()) == own
    for library, other, same in (("transformers", "0", False), ("pillow", "0", False), ("torch", "+cu130", True)):
        with monkeypatch.context() as patch:
            patch.setitem(installed, library, installed[library] + other if same else other)
            assert (engine_namespace(config, EncoderCacheConfig()) == own) is same


def test_the_video_decoder_counts(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's identifier of a video is a digest of the file, not of the frames that a decoder selects."""
    monkeypatch.setenv("VLLM_VIDEO_LOADER_BACKEND", "opencv_dynamic")
    assert namespace(model_path(MODEL)) != own


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Puts files of the test model into the hub's cache, or another one, as a download does: links to blobs."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def fetch(cache: str, commit: str, pattern: str = "*") -> Path:
        repository = tmp_path / cache / "models--org--tiny"
        snapshot = repository / "snapshots" / commit
        for folder in (snapshot, repository / "blobs", repository / "refs"):
            folder.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
        for file in model_path(MODEL).glob(pattern):
            if not (snapshot / file.name).exists():
                shutil.copy(file, repository / "blobs" / file.name)
                (snapshot / file.name).symlink_to(repository / "blobs" / file.name)
        return tmp_path / cache

    return fetch


def test_a_model_of_the_hub_is_its_snapshot(hub: Callable[..., Path], tmp_path: Path) -> None:
    """Wherever vLLM stored it: with a download folder the weights are there, the small files in the hub's own cache."""
    config = vllm_config(model_path(MODEL))
    config.model_config.model = config.model_config.tokenizer = "org/tiny"

    def current() -> str:
        return engine_namespace(config, EncoderCacheConfig())

    with pytest.raises(NamespaceUnknown, match=r"org/tiny.*set ec\.namespace"):
        current()
    hub("hub", COMMIT)
    first = current()
    assert current() == first
    config.model_config.revision = config.model_config.tokenizer_revision = COMMIT
    assert current() == first
    hub("hub", OTHER_COMMIT)
    assert current() == first
    config.model_config.revision = config.model_config.tokenizer_revision = None
    assert current() != first

    config.load_config.download_dir = str(tmp_path / "downloads")
    hub("downloads", COMMIT, "*.safetensors")
    shutil.rmtree(tmp_path / "hub")
    hub("hub", COMMIT, "*[!s].json*")
    split = current()
    blob = tmp_path / "hub" / "models--org--tiny" / "blobs" / "tokenizer.json"
    blob.write_bytes(blob.read_bytes() + b"\n")
    assert current() != split


def test_weights_that_cannot_be_seen_have_no_namespace(checkpoint: Path) -> None:
    def unseen(section: str, field: str, value: str) -> None:
        config = vllm_config(checkpoint)
        setattr(getattr(config, section), field, value)
        with pytest.raises(NamespaceUnknown, match=r"set ec\.namespace"):
            engine_namespace(config, EncoderCacheConfig())

    unseen("model_config", "model", "s3://bucket/model")
    unseen("model_config", "model", "org/never-fetched")
    unseen("model_config", "model_weights", "s3://bucket/model")
    unseen("load_config", "load_format", "tensorizer")
    for weights in checkpoint.glob("*.safetensors"):
        weights.unlink()
    unseen("load_config", "load_format", "runai_streamer")
    assert namespace(checkpoint, load_format="dummy")


class Colour(enum.Enum):
    RED = 1


def test_values_become_text_that_a_restart_repeats() -> None:
    import numpy as np
    import torch

    value = {
        "enum": Colour.RED,
        "dtype": torch.bfloat16,
        "path": Path("/a"),
        "set": {0, 8},
        "tuple": (1, 2.5, None, True, float("inf")),
        "array": np.arange(3000),
        1: "an int is no text",
    }
    text = json.dumps(canonical(value, "field"), sort_keys=True)
    assert text == json.dumps(canonical({**value, "set": {8, 0}}, "field"), sort_keys=True)
    changed = np.arange(3000)
    changed[1500] = 0
    for other in ({**value, "array": changed}, {**value, "dtype": torch.float16}, {**value, "tuple": (1, 2.5)}):
        assert json.dumps(canonical(other, "field"), sort_keys=True) != text
    with pytest.raises(TypeError, match=r"media\.loader"):
        canonical({"loader": object()}, "media")


def test_a_value_without_stable_text_has_no_namespace() -> None:
    config = vllm_config(model_path(MODEL), mm_processor_kwargs={"hook": object()})
    with pytest.raises(NamespaceUnknown, match=r"mm_processor_kwargs\.hook.*set ec\.namespace"):
        engine_namespace(config, EncoderCacheConfig())


# ---- a checkpoint that is replaced while an engine loads it


def test_weights_that_are_replaced_while_an_engine_loads_them_have_no_namespace(checkpoint: Path, own: str) -> None:
    """The engine has the old weights, but the fingerprint would be that of the new ones."""
    config = vllm_config(checkpoint)
    note_checkpoint(config)
    weights = next(checkpoint.glob("*.safetensors"))
    other = checkpoint.parent / "other"
    other.write_bytes(bytes(reversed(weights.read_bytes())))
    other.rename(weights)
    with pytest.raises(NamespaceUnknown, match=f"{re.escape(str(weights))} was replaced while the engine loaded it"):
        engine_namespace(config, EncoderCacheConfig())
    assert engine_namespace(config, EncoderCacheConfig(namespace="vouched")) == "vouched"
    note_checkpoint(config)
    assert engine_namespace(config, EncoderCacheConfig()) != own


def test_files_that_a_download_adds_while_an_engine_loads_are_no_replacement(checkpoint: Path) -> None:
    config = vllm_config(checkpoint)
    note_checkpoint(config)
    (checkpoint / "vocab.txt").write_text("added")
    assert engine_namespace(config, EncoderCacheConfig())
