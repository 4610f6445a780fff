# SPDX-License-Identifier: Apache-2.0
"""The identity of a checkpoint, by its content: a path identifies nothing, `/models/current` gets overwritten.

Small files (configuration, processor, tokenizer, remote code) are read whole, and so are the tensors of a safetensors
file that may be an encoder's, by their names. The language model's tensors and weight files of other formats may be
many GB. Of these the fingerprint covers the size, the header, 4 KiB from the middle of every tensor, and blocks spread
over the file. A retrained language model differs nearly everywhere, and changes no encoder output anyway.
File times and the folder's own path do not count.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import xxhash

MAX_WHOLE_FILE_BYTES = 64 << 20
MAX_HEADER_BYTES = 128 << 20
MAX_FILES = 20_000

BLOCK_BYTES = 64 << 10
BLOCKS_PER_FILE = 16
TENSOR_SAMPLE_BYTES = 4 << 10
MAX_TENSORS_PER_FILE = 8192

WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
WHOLE_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".py", ".tiktoken"})
SAMPLING_DEFAULTS = "generation_config.json"
"""Ignored: it only sets sampling defaults, and a hub download fetches it after the engine has started."""

_VERSION = b"lmcache-ec/checkpoint/2"
_CHUNK_BYTES = 8 << 20

MAX_UNKNOWN_BYTES = 2 << 30
"""Limit per file for tensors whose names show neither. More cannot belong to an encoder alone."""
_LANGUAGE = re.compile(
    r"((model|transformer|thinker)\.)*(lm_head|language_model|text_model|llm|embed_tokens|layers|h|decoder)(\.|$)"
)
"""Matched at the start of a name: `layers` further in may belong to a resampler or an aligner."""
_ENCODER = re.compile(r"vis|vit|image|img|audio|speech|video|encoder|tower|projector|mm_|multi_modal", re.IGNORECASE)

Region = tuple[int, int]
"""Offset and length, bytes."""


class FingerprintError(ValueError):
    """The checkpoint cannot be read; the message names the path and what to set instead."""

    def __init__(self, path: Path, reason: object) -> None:
        super().__init__(f"cannot fingerprint the checkpoint at {path}: {reason}; set ec.namespace to name it yourself")


def checkpoint_fingerprint(folder: Path, *, weights_required: bool = False) -> str:
    """64 hex digits over the content of the checkpoint in `folder`, subfolders included, hidden ones left out.

    Reads an encoder's tensors, and at most about 33 MiB more of a weight file beyond its header (1 MiB and 4 KiB per
    tensor). Runs once, in the process that builds the scheduler, before it serves, when these files have just been
    loaded. FingerprintError if something cannot be read, if there is nothing to read, or, with `weights_required`, if
    there is no weight file: a folder that only configures weights stored elsewhere does not identify them.
    """
    try:
        names = sorted(file_names(folder), key=os.fsencode)
        if not names:
            raise FingerprintError(folder, "it has no checkpoint file")
        if weights_required and not any(_suffix(name) in WEIGHT_SUFFIXES for name in names):
            raise FingerprintError(folder, "it has no weight file")
        digest = hashlib.sha256(_VERSION)
        for name in names:
            _feed(digest, os.fsencode(name))
            _feed(digest, _file_digest(folder / name))
    except OSError as error:
        raise FingerprintError(folder, error) from error
    return digest.hexdigest()


def file_fingerprint(path: Path) -> str:
    """64 hex digits over one file's content, read like a checkpoint file. FingerprintError if it cannot be read."""
    try:
        return _file_digest(path).hex()
    except OSError as error:
        raise FingerprintError(path, error) from error


def _feed(digest: "hashlib._Hash", part: bytes) -> None:
    """Length first, so that different lists of parts never give the same stream."""
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _is_part(base: str) -> bool:
    """Whether a file of this name belongs to a checkpoint."""
    if base.startswith(".") or base == SAMPLING_DEFAULTS:
        return False
    return _suffix(base) in WEIGHT_SUFFIXES | WHOLE_SUFFIXES or base.startswith("tokenizer")


def file_names(folder: Path) -> Iterator[str]:
    """The checkpoint's files, relative to `folder`. Links are followed; a folder seen before is not entered again."""
    found = 0
    seen: set[tuple[int, int]] = set()
    pending = [""]
    while pending:
        inside = pending.pop()
        status = os.stat(folder / inside)
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(folder / inside) as entries:
            for entry in sorted(entries, key=lambda entry: os.fsencode(entry.name)):
                name = os.path.join(inside, entry.name)
                if entry.is_dir():
                    if not entry.name.startswith("."):
                        pending.append(name)
                elif _is_part(entry.name):
                    found += 1
                    if found > MAX_FILES:
                        raise FingerprintError(folder, f"it has more than {MAX_FILES} files, so it is not a checkpoint")
                    yield name


def _file_digest(path: Path) -> bytes:
    """Digest of small configuration files as a whole, of others by samples."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a named pipe must not hold up the start
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a regular file")
        size = status.st_size
        digest = hashlib.sha256(size.to_bytes(8, "little"))
        suffix = path.suffix.lower()
        if suffix not in WEIGHT_SUFFIXES and size <= MAX_WHOLE_FILE_BYTES:
            _feed(digest, _read(file, 0, size))
        else:
            header = _safetensors_header(file, size) if suffix == ".safetensors" else b""
            _feed(digest, header)
            whole, sampled = _parts(_tensors(size, header))
            for offset, length in _sampled(size, sampled):
                _feed(digest, _read(file, offset, length))
            for offset, length in whole:
                _feed(digest, _region_digest(file, offset, length))
        return digest.digest()
    finally:
        os.close(file)


def _parts(tensors: list[tuple[str, Region]]) -> tuple[list[Region], list[Region]]:
    """Which tensors to read whole, as an encoder's may be, and which to sample."""
    unknown = [name for name, _ in tensors if not _ENCODER.search(name) and not _LANGUAGE.match(name)]
    lengths = {name: length for name, (_, length) in tensors}
    few = sum(lengths[name] for name in unknown) <= MAX_UNKNOWN_BYTES
    whole = {name for name in lengths if _ENCODER.search(name)} | set(unknown if few else ())
    return (
        [region for name, region in tensors if name in whole],
        [region for name, region in tensors if name not in whole],
    )


def _region_digest(file: int, offset: int, length: int) -> bytes:
    """xxh3: no cryptographic hash is needed here, and most of the time is spent reading."""
    digest = xxhash.xxh3_128()
    for begin in range(offset, offset + length, _CHUNK_BYTES):
        digest.update(_read(file, begin, min(_CHUNK_BYTES, offset + length - begin)))
    return digest.digest()


def _read(file: int, offset: int, length: int) -> bytes:
    parts = []
    while length:
        part = os.pread(file, length, offset)
        if not part:
            raise OSError("a file became shorter while it was read")
        parts.append(part)
        offset, length = offset + len(part), length - len(part)
    return b"".join(parts)


def _safetensors_header(file: int, size: int) -> bytes:
    """Length and JSON, cut at MAX_HEADER_BYTES; for a file that is not safetensors, whatever bytes are there."""
    prefix = _read(file, 0, min(8, size))
    length = min(int.from_bytes(prefix, "little"), MAX_HEADER_BYTES, size - len(prefix))
    return prefix + _read(file, len(prefix), length)


def _sampled(size: int, tensors: list[Region]) -> Iterator[Region]:
    """Regions to read of a file of `size` bytes: blocks from start to end, then the middle of each tensor."""
    last = max(size - BLOCK_BYTES, 0)
    starts = {last * i // (BLOCKS_PER_FILE - 1) for i in range(BLOCKS_PER_FILE)}
    yield from ((start, min(BLOCK_BYTES, size - start)) for start in sorted(starts))
    for offset, length in tensors[:: len(tensors) // MAX_TENSORS_PER_FILE + 1]:
        sample = min(length, TENSOR_SAMPLE_BYTES)
        yield offset + (length - sample) // 2, sample


def _tensors(size: int, header: bytes) -> list[tuple[str, Region]]:
    """Each tensor's name and region, in file order; empty if the header has no such data, or wrong data."""
    try:
        fields = json.loads(header[8:])
        spans = sorted((*map(int, fields[name]["data_offsets"]), name) for name in fields if name != "__metadata__")
        regions = [(name, (len(header) + begin, end - begin)) for begin, end, name in spans]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []
    inside = all(length >= 0 and len(header) <= offset <= size - length for _, (offset, length) in regions)
    return regions if inside and sum(length for _, (_, length) in regions) <= size else []
