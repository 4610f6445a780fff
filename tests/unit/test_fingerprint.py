# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's fingerprint: it changes with the content, not with path or time, and it stays cheap."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import lmcache_ec.fingerprint as fingerprint
from lmcache_ec.fingerprint import FingerprintError, checkpoint_fingerprint, file_fingerprint

MIB = 1 << 20
READ_WHOLE = ("config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer.model", "chat.jinja", "code.py")


def write_safetensors(path: Path, tensors: dict[str, int], payload: bytes | None = None) -> int:
    """`tensors` is name -> bytes; without `payload` the file is sparse. Returns where the payload begins."""
    fields, end = {}, 0
    for name, length in tensors.items():
        fields[name] = {"dtype": "U8", "shape": [length], "data_offsets": [end, end + length]}
        end += length
    header = json.dumps(fields).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        begin = file.tell()
        if payload is None:
            file.truncate(begin + end)
        else:
            file.write(payload)
    return begin


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    (folder / "vision-lora").mkdir(parents=True)
    for name in READ_WHOLE:
        (folder / name).write_bytes(b'{"name": "%s"}' % name.encode())
    write_safetensors(folder / "model.safetensors", {"a": 4 * MIB, "projector": 64 << 10, "b": 4 * MIB})
    write_safetensors(folder / "vision-lora" / "adapter_model.safetensors", {"a": 100})
    (folder / "old.bin").write_bytes(b"weights")
    return folder


def append(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        with open(folder / name, "ab") as file:
            file.write(b" ")

    return change


def retrain_the_projector(folder: Path) -> None:
    """64 KiB in the middle of 8 MiB: between the blocks spread over the file, but a separate tensor."""
    offset = os.path.getsize(folder / "model.safetensors") - (4 * MIB) - (64 << 10)
    overwrite(folder / "model.safetensors", offset, os.urandom(64 << 10))


def rename_tensor(path: Path, name: bytes) -> None:
    overwrite(path, path.read_bytes().index(name), b"?")


CHANGES: dict[str, Callable[[Path], object]] = {
    **{f"a byte of {name}": append(name) for name in READ_WHOLE},
    "a config of the same length": lambda folder: overwrite(folder / "config.json", 2, b"eman"),
    "the end of a weight file": append("old.bin"),
    "the size of a weight file": lambda folder: os.truncate(folder / "model.safetensors", 9 * MIB),
    "the content of a small weight file": lambda folder: (folder / "old.bin").write_bytes(b"wEights"),
    "weights in a subfolder": append("vision-lora/adapter_model.safetensors"),
    "a tensor's name": lambda folder: rename_tensor(folder / "model.safetensors", b"projector"),
    "the first weights": lambda folder: overwrite(folder / "model.safetensors", 300, os.urandom(4096)),
    "the last weights": lambda folder: overwrite(folder / "model.safetensors", 8 * MIB, os.urandom(4096)),
    "one tensor": retrain_the_projector,
    "a file more": lambda folder: (folder / "added.json").write_text(""),
    "a file less": lambda folder: (folder / "code.py").unlink(),
    "a file's name": lambda folder: (folder / "code.py").rename(folder / "codf.py"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_checkpoint_overwritten_under_the_same_path_is_another(
    checkpoint: Path, change: Callable[[Path], object]
) -> None:
    before = checkpoint_fingerprint(checkpoint)
    change(checkpoint)
    assert checkpoint_fingerprint(checkpoint) != before


def test_path_time_and_unrelated_files_do_not_count(checkpoint: Path, tmp_path: Path) -> None:
    """Nor do files that a hub download adds later, or its layout of files: links into a folder of blobs."""
    before = checkpoint_fingerprint(checkpoint)
    copy = tmp_path / "elsewhere" / "snapshot"
    shutil.copytree(checkpoint, copy)
    for i, name in enumerate(("config.json", "model.safetensors")):
        blob = tmp_path / f"blob-{i}"
        (copy / name).rename(blob)
        (copy / name).symlink_to(blob)
    (copy / "again").symlink_to(copy)
    for bystander in ("README.md", "generation_config.json", ".cache.json", "picture.png"):
        (copy / bystander).write_text("{}")
    (copy / ".git").mkdir()
    (copy / ".git" / "config.json").write_text("{}")
    os.utime(copy / "old.bin", (1, 1))
    assert checkpoint_fingerprint(copy) == before


@pytest.mark.parametrize(
    "name",
    [
        *(
            "visual.blocks.0.attn.qkv.weight",
            "vision_tower.encoder.layers.3.mlp.fc1.weight",
            "model.encoder.layers.1.w",
        ),
        *("model.connector.perceiver_resampler.layers.0.weight", "aligner.layers.0.weight", "resampler.h.0.weight"),
        *("multi_modal_projector.linear_1.weight", "audio_tower.conv1.weight", "model.mm_projector.0.weight", "odd"),
    ],
)
def test_no_bit_of_an_encoder_escapes(tmp_path: Path, name: str) -> None:
    """Wherever it is: for example in the first quarter of a fused matrix, if an adapter was merged into queries."""
    write_safetensors(tmp_path / "model.safetensors", {"model.layers.0.weight": 8 * MIB, name: 9 * MIB})
    seen = {checkpoint_fingerprint(tmp_path)}
    weights = tmp_path / "model.safetensors"
    for back in (1, MIB + 7, 4 * MIB + 4097, 9 * MIB):
        overwrite(weights, weights.stat().st_size - back, b"?")
        seen.add(checkpoint_fingerprint(tmp_path))
    assert len(seen) == 5


def test_reads_stay_bounded_however_large_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 GiB in 10 000 tensors, only the header and less than a hundredth of the rest are read."""
    write_safetensors(tmp_path / "model.safetensors", {f"layers.{i}": (4 << 30) // 10_000 for i in range(10_000)})
    (tmp_path / "unsafe.safetensors").write_bytes(b"\xff" * 8)
    os.truncate(tmp_path / "unsafe.safetensors", 1 << 30)  # claims a header of 16 EiB
    read = 0

    def counted(file: int, length: int, offset: int, pread: Callable[[int, int, int], bytes] = os.pread) -> bytes:
        nonlocal read
        read += length
        return pread(file, length, offset)

    monkeypatch.setattr(os, "pread", counted)
    seen = [checkpoint_fingerprint(tmp_path)]
    assert read < fingerprint.MAX_HEADER_BYTES + 48 * MIB
    weights = tmp_path / "model.safetensors"
    for offset in (weights.stat().st_size - 1, MIB // 2):  # the last weight, and a tensor's name deep in the header
        overwrite(weights, offset, b"?")
        seen.append(checkpoint_fingerprint(tmp_path))
    assert len(set(seen)) == 3


@pytest.mark.parametrize(
    "header",
    [b"", b"{", b"[]", b'{"a": 1}', b'{"a": {"data_offsets": [0, 99999999]}}', b'{"a": {"data_offsets": [-9, "x"]}}'],
)
def test_a_header_that_lies_is_content_like_any_other(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"payload")
    before = checkpoint_fingerprint(tmp_path)
    overwrite(tmp_path / "model.safetensors", 8 + len(header), b"PAYLOAD")
    assert checkpoint_fingerprint(tmp_path) != before


def test_a_file_that_cannot_be_read_is_named_with_a_remedy(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").symlink_to("/nowhere/config.json")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "config.json")
    for name in ("missing", "empty", "broken", "pipe", "checkpoint/config.json"):
        with pytest.raises(FingerprintError, match=r"set ec\.namespace") as caught:
            checkpoint_fingerprint(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
    with pytest.raises(FingerprintError, match=r"set ec\.namespace"):
        file_fingerprint(tmp_path / "missing")


def test_a_folder_that_only_configures_does_not_stand_for_weights(checkpoint: Path) -> None:
    assert checkpoint_fingerprint(checkpoint, weights_required=True) == checkpoint_fingerprint(checkpoint)
    for weights in ("model.safetensors", "old.bin", "vision-lora/adapter_model.safetensors"):
        (checkpoint / weights).unlink()
    checkpoint_fingerprint(checkpoint)
    with pytest.raises(FingerprintError, match="no weight file"):
        checkpoint_fingerprint(checkpoint, weights_required=True)
