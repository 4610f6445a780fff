# SPDX-License-Identifier: Apache-2.0
"""The facts of an engine that make its namespace: all that changes an encoder's output and is not in vLLM's identifier.

Engines that encode alike must share one namespace, regardless of role, tensor parallel size, limits and cache sizes,
and of where the checkpoint is stored. Engines that may encode differently must not share one: a field that a later vLLM
adds counts until it is listed here as one that cannot matter. Runs once, in the process that builds the scheduler.
"""

import dataclasses
import enum
import math
import re
from collections.abc import Mapping, Set
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_ec.entry import FORMAT
from lmcache_ec.fingerprint import FingerprintError, checkpoint_fingerprint, file_fingerprint
from lmcache_ec.key import check_namespace, namespace_of

from .checkpoint_files import note, replaced

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, MultiModalConfig, VllmConfig

    from lmcache_ec.config import EncoderCacheConfig

CANNOT_MATTER = frozenset(
    {
        # An engine's role and its limits: an encoder and its consumers differ here.
        "language_model_only",  # no encoder runs, so nothing wrong is stored; what others stored still fits
        "mm_encoder_only",
        "enable_mm_embeds",
        "allow_missing_mm_embeddings",
        "limit_per_prompt",
        "skip_mm_profiling",
        # How the processor's results are transported and stored, not what they are.
        "mm_processor_cache_gb",
        "mm_processor_cache_type",
        "mm_shm_cache_max_object_size_mb",
        "mm_tensor_ipc",
        "mm_ipc_gpu_memory_gb",
        # Another hash already gives other identifiers.
        "mm_hasher_algorithm",
        # Where placeholders stand in the text.
        "interleave_mm_strings",
        # Written for later runs; what a run reads is mm_encoder_fp8_scale_path.
        "mm_encoder_fp8_scale_save_path",
        "mm_encoder_fp8_scale_save_margin",
    }
)
"""Fields of vLLM's MultiModalConfig (0.30 to 0.33) that leave an encoder's output as it is."""

PROCESSOR_LIBRARIES = (
    *("transformers", "tokenizers", "mistral-common"),
    *("numpy", "scipy", "pillow", "torch", "torchvision", "torchaudio"),
    *("opencv-python-headless", "opencv-python", "av", "torchcodec", "soundfile", "soxr", "librosa"),
)
"""They decode media and turn them into the encoder's input; identifiers are made from the media before that."""

DECODER_VARIABLES = ("VLLM_VIDEO_LOADER_BACKEND", "VLLM_MEDIA_CONNECTOR")

FOLDER_LOADERS = frozenset(
    {
        *("auto", "hf", "safetensors", "pt", "npcache", "mistral", "gguf", "bitsandbytes", "sharded_state"),
        *("fastsafetensors", "instanttensor", "runai_streamer", "runai_streamer_sharded"),
    }
)
"""Load formats that read the weights in the checkpoint's folder, in any way."""

UNSEEN_LOADERS = frozenset({"ipc_cache", "modelexpress", "tensorizer"})
"""Load formats whose weights come from somewhere else: another process, a server, a URI."""

_UNSTABLE_CONFIG_KEYS = frozenset({"transformers_version", "_name_or_path", "_commit_hash"})
_MEMORY_ADDRESS = re.compile(r"\bat 0x[0-9a-f]", re.IGNORECASE)


class NamespaceUnknown(ValueError):
    """The engine's weights or settings are unknown, so no entry may outlive it: keep the cache in memory only."""

    def __init__(self, reason: object) -> None:
        text = str(reason)
        advice = "" if "ec.namespace" in text else "; set ec.namespace to name it yourself"
        super().__init__(f"{text}{advice}")


def engine_namespace(vllm_config: "VllmConfig", config: "EncoderCacheConfig") -> str:
    """The namespace of the engine's entries, the same in every process and on every host that encodes alike.

    This is the one of epoch 0, see `at_epoch`. `ec.namespace` replaces all of it, salt and epoch included. Otherwise
    the readable part is the model's type, not its path, so that copies of a checkpoint share entries wherever they are.
    Build the multimodal processor first: it may fetch files that a model from the hub still lacks.
    NamespaceUnknown if the weights cannot be seen.
    """
    if config.namespace is not None:
        return check_namespace(config.namespace)
    hf_config = vllm_config.model_config.hf_config
    try:
        namespace = namespace_of(getattr(hf_config, "model_type", ""), engine_facts(vllm_config, config))
    except (FingerprintError, TypeError) as error:
        raise NamespaceUnknown(error) from error
    if (path := replaced(vllm_config.model_config.model, _checkpoint_folders(vllm_config))) is not None:
        raise NamespaceUnknown(f"{path} was replaced while the engine loaded it; restart the engine")
    return namespace


def note_checkpoint(vllm_config: "VllmConfig") -> None:
    """Call before the checkpoint's weights are loaded: see `checkpoint_files`."""
    note(vllm_config.model_config.model, _checkpoint_folders(vllm_config))


def engine_facts(vllm_config: "VllmConfig", config: "EncoderCacheConfig") -> dict[str, object]:
    """All facts that make the namespace, as plain JSON. FingerprintError, TypeError or NamespaceUnknown if unknown."""
    import vllm.envs as envs
    from vllm.version import __version__ as engine_version

    model, load = vllm_config.model_config, vllm_config.load_config
    facts: dict[str, object] = {
        "format": FORMAT,
        "salt": config.salt,
        "engine": ".".join(engine_version.split(".")[:2]) if config.key_by_engine_version else None,
        "libraries": _library_versions(),
        "decoders": {name: getattr(envs, name, None) for name in DECODER_VARIABLES},
        "checkpoint": _checkpoint(model, load),
        "tokenizer": _tokenizer(model, load),
        "hf_config": _stable(model.hf_config.to_dict()),
        "architecture": model.architecture,
        "multimodal": _multimodal(model.multimodal_config),
    }
    for field in (
        *("code_revision", "trust_remote_code", "tokenizer_mode", "model_impl", "model_class_overrides"),
        *("dtype", "quantization", "quantization_config"),
    ):
        facts[field] = getattr(model, field, None)
    return {field: canonical(fact, field) for field, fact in facts.items()}


def canonical(value: object, field: str) -> object:
    """`value` as plain JSON, the same in every process. TypeError naming the `field` if there is no such form."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else f"float {float(value)!r}"
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, bytes):
        return f"bytes {value.hex()}"
    if isinstance(value, Mapping):
        return {_text(key, field): canonical(item, f"{field}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(item, f"{field}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Set):
        return sorted((canonical(item, field) for item in value), key=repr)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: canonical(getattr(value, f.name), f"{field}.{f.name}") for f in dataclasses.fields(value)}
    if hasattr(value, "model_dump"):  # a pydantic model
        return canonical(value.model_dump(), field)
    if hasattr(value, "tolist"):  # tensors, arrays and their scalars: their repr leaves out the middle
        return [str(getattr(value, "dtype", "")), canonical(value.tolist(), field)]
    text = f"{type(value).__module__}.{type(value).__qualname__} {value!r}"
    if _MEMORY_ADDRESS.search(text):
        raise TypeError(f"{field} holds a {type(value).__qualname__}, whose text would differ after a restart")
    return text


def _text(key: object, field: str) -> str:
    return str(key) if isinstance(key, str) else f"{type(key).__qualname__} {canonical(key, field)}"


def _stable(hf_config: Mapping[str, object]) -> dict[str, object]:
    """The model's resolved configuration without keys that a copy in another folder or a new library would change."""
    return {
        key: _stable(value) if isinstance(value, Mapping) else value
        for key, value in hf_config.items()
        if key not in _UNSTABLE_CONFIG_KEYS
    }


def _multimodal(config: "MultiModalConfig | None") -> dict[str, object]:
    if config is None:
        return {}
    kept: dict[str, object] = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in CANNOT_MATTER
    }
    # vLLM moves a dedicated encoder's processor to its GPU but not its consumers': this changes where, not how.
    kept["mm_processor_kwargs"] = _without_device(config.mm_processor_kwargs or {})
    media_io = {modality: _without_device(kwargs) for modality, kwargs in config.media_io_kwargs.items()}
    kept["media_io_kwargs"] = {modality: kwargs for modality, kwargs in media_io.items() if kwargs}
    if (scales := config.mm_encoder_fp8_scale_path) is not None:
        kept["mm_encoder_fp8_scale_path"] = file_fingerprint(Path(scales))
    return kept


def _without_device(kwargs: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in kwargs.items() if name != "device"}


def _library_versions() -> dict[str, str | None]:
    """Versions without the local part, which names the hardware a library was built for."""
    found: dict[str, str | None] = {}
    for name in PROCESSOR_LIBRARIES:
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            found[name] = None
    return found


def _checkpoint(model: "ModelConfig", load: "LoadConfig") -> dict[str, object]:
    """The weights and their configuration. How they are read is left out where it affects only speed."""
    load_format = str(load.load_format)
    if getattr(model, "model_weights", "") or load_format in UNSEEN_LOADERS:
        source = getattr(model, "model_weights", "") or f"load_format={load_format}"
        raise NamespaceUnknown(f"the weights of {model.model} come from {source} and cannot be read")
    dummy = load_format == "dummy"
    found = _repository(model.model, model.revision, load.download_dir, weights_required=not dummy)
    if load_format not in FOLDER_LOADERS:
        found["loader"] = [load_format, load.model_loader_extra_config, model.seed if dummy else None]
    return found


def _tokenizer(model: "ModelConfig", load: "LoadConfig") -> dict[str, object] | None:
    """The tokenizer, from which the processor is built; None if it comes with the checkpoint."""
    if model.tokenizer is None or (model.tokenizer, model.tokenizer_revision) == (model.model, model.revision):
        return None
    return _repository(model.tokenizer, model.tokenizer_revision, load.download_dir, weights_required=False)


def _repository(
    name: str, revision: str | None, download_dir: str | None, *, weights_required: bool
) -> dict[str, object]:
    """The content behind a folder, a single file in one (GGUF), or a hub name that has been fetched."""
    path = Path(name)
    if path.is_dir():
        return {"content": [checkpoint_fingerprint(path, weights_required=weights_required)], "revision": revision}
    if path.is_file():  # related files, such as a projector, are in the same folder
        return {"content": [checkpoint_fingerprint(path.parent)], "file": path.name, "revision": revision}
    found = _snapshots(name, revision, download_dir)
    prints = [
        checkpoint_fingerprint(snapshot, weights_required=weights_required and snapshot is found[0])
        for snapshot in found
    ]
    return {"content": prints, "revision": found[0].name}


def _checkpoint_folders(vllm_config: "VllmConfig") -> list[Path]:
    """The folders with the weights; empty if they are not there yet."""
    model = vllm_config.model_config
    path = Path(model.model)
    if path.exists():
        return [path if path.is_dir() else path.parent]
    try:
        return _snapshots(model.model, model.revision, vllm_config.load_config.download_dir)
    except NamespaceUnknown:
        return []


def _snapshots(name: str, revision: str | None, download_dir: str | None) -> list[Path]:
    """The folders, named after the commit, that hold a hub repository: with `download_dir` vLLM puts the weights there
    and the small files in the hub's own cache. The one with the weights comes first."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    from vllm.envs import VLLM_USE_MODELSCOPE

    if VLLM_USE_MODELSCOPE:
        raise NamespaceUnknown(f"{name} comes from ModelScope, whose cache is not supported")
    found: list[Path] = []
    for cache in dict.fromkeys((download_dir, None)):
        try:
            found.append(Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True)))
        except LocalEntryNotFoundError as error:
            if partial := getattr(error, "snapshot_path", None):  # vLLM fetches only what it needs
                found.append(Path(partial))
        except (HFValidationError, OSError) as error:
            raise NamespaceUnknown(
                f"{name} is neither a folder nor a name that the hub's cache accepts: {error}"
            ) from error
    if not found:
        raise NamespaceUnknown(f"{name} is neither a folder nor in the hub's cache")
    return found
