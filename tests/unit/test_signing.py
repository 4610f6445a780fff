# SPDX-License-Identifier: Apache-2.0
"""Entries that prove who wrote them: the key file, and the signature in an entry."""

import json
import os
import struct
import sys
from pathlib import Path

import pytest
import safetensors.torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_ec import entry
from lmcache_ec.config import ConfigError, EncoderCacheConfig
from lmcache_ec.entry import EntryError, Reason, TensorSpec
from lmcache_ec.key import MAX_NAMESPACE_CHARS, EncoderCacheKey, check_namespace
from lmcache_ec.signing import SigningKey, read_key

KEY = EncoderCacheKey("model-0123456789abcdef", "ab" * 32)
SPEC = TensorSpec(3, 5, "BF16")
OURS, THEIRS = SigningKey(b"\x01" * 32, "ours"), SigningKey(b"\x02" * 32, "theirs")


def key_file(folder: Path, content: bytes = bytes(range(32)), mode: int = 0o600) -> Path:
    file = folder / "key"
    file.write_bytes(content)
    file.chmod(mode)
    return file


def sealed(signing: SigningKey | None, key: EncoderCacheKey = KEY, spec: TensorSpec = SPEC, by: str = "test") -> bytes:
    blob = bytearray(entry.entry_length(key.identifier, spec))
    entry.payload(memoryview(blob), key.identifier)[:] = bytes(spec.nbytes)
    entry.seal(memoryview(blob), key, spec, by, signing)
    return bytes(blob)


def reason(blob: bytes, signing: SigningKey | None = OURS, key: EncoderCacheKey = KEY) -> Reason | None:
    try:
        entry.verify(memoryview(blob), key, signing)
    except EntryError as error:
        return error.reason
    return None


def resealed(blob: bytes, key: EncoderCacheKey = KEY) -> bytes:
    """The entry with a right digest, as a forger without the key can make it."""
    changed = bytearray(blob)
    changed[entry._DIGEST_AT : entry._DIGEST_END] = entry._digest(memoryview(changed))
    return bytes(changed)


SIGNED = sealed(OURS)


# ---- entries


def test_a_signed_entry_is_an_entry_of_the_one_format_as_long_as_any_other() -> None:
    assert reason(SIGNED) is None
    assert reason(SIGNED, None) is None, "who has no key reads its digest as ever"
    assert len(SIGNED) == len(sealed(None))
    assert list(safetensors.torch.load(SIGNED)) == ["ec"]
    (length,) = struct.unpack_from("<Q", SIGNED)
    metadata = json.loads(SIGNED[8 : 8 + length])["__metadata__"]
    assert metadata["format"] == entry.FORMAT
    assert list(metadata)[-1] == "signature"
    assert len(metadata["signature"]) == 32


def test_an_entry_unsigned_or_signed_with_another_key_is_distinguished_from_damage() -> None:
    assert reason(sealed(None)) is Reason.SIGNATURE
    assert reason(sealed(THEIRS)) is Reason.SIGNATURE
    assert reason(SIGNED[:-1] + b"\x01") is Reason.DIGEST


def test_a_signed_entry_with_any_bit_flipped_is_refused_even_if_its_digest_is_right() -> None:
    for position in range(len(SIGNED)):
        for bit in range(8):
            flipped = bytearray(SIGNED)
            flipped[position] ^= 1 << bit
            assert reason(bytes(flipped)) is not None, (position, bit)
            if not entry._DIGEST_AT <= position < entry._DIGEST_END:
                assert reason(resealed(bytes(flipped))) is not None, (position, bit)


@given(st.binary(min_size=1, max_size=200), st.integers(0, len(SIGNED)))
def test_no_forgery_over_a_signed_entry_is_believed(forgery: bytes, at: int) -> None:
    forged = SIGNED[:at] + forgery + SIGNED[at + len(forgery) :]
    assert forged == SIGNED or reason(resealed(forged)) is not None or resealed(forged) == SIGNED


@pytest.mark.parametrize("field", ["identifier", "namespace", "created", "producer", "layout"])
def test_a_signature_is_for_one_name_and_for_all_of_the_header(field: str) -> None:
    (length,) = struct.unpack_from("<Q", SIGNED)
    header = json.loads(SIGNED[8 : 8 + length])
    metadata = header["__metadata__"]
    signature = metadata.pop("signature")
    metadata[field] = "another"
    metadata["signature"] = signature
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    forged = resealed(SIGNED[:8] + text + SIGNED[8 + length :])
    names = {"identifier": KEY.identifier, "namespace": KEY.namespace}
    asked = EncoderCacheKey(**{name: metadata[name] for name in names})
    assert reason(forged, None, asked) is None, "the forgery is a good one"
    assert reason(forged, OURS, asked) is Reason.SIGNATURE


def test_where_entries_are_signed_nothing_passes_as_one_of_another_version() -> None:
    """It would keep its name forever, without proof of who wrote it."""
    other = SIGNED.replace(b"lmcache-ec/1", b"lmcache-ec/2")
    assert reason(other, None) is Reason.VERSION
    assert reason(other) is Reason.FORMAT


def test_a_signature_fits_whatever_the_length_of_the_identifier() -> None:
    for spec in (
        TensorSpec(2**63 - 1, 0, "F8_E4M3", "[" * entry.MAX_LAYOUT_CHARS),
        TensorSpec(0, 2**63 - 1, "F8_E4M3", "[" * entry.MAX_LAYOUT_CHARS),
    ):
        for count in (*range(1500), 4096):
            key = EncoderCacheKey("n" * MAX_NAMESPACE_CHARS, "\x01" * count)
            assert reason(sealed(OURS, key, spec, "\x01" * 64), OURS, key) is None


# ---- the key


def test_a_key_is_the_bytes_of_its_file_and_shows_nothing_but_its_id(tmp_path: Path) -> None:
    key = read_key(key_file(tmp_path))
    assert key == read_key(key_file(tmp_path, mode=0o440))
    assert key.id != read_key(key_file(tmp_path, bytes(range(33)))).id
    assert repr(key) == f"SigningKey({key.id})"
    assert key.secret != bytes(range(32)), "derived, so that it is nobody else's"
    assert key.id not in key.secret.hex()


def test_a_namespace_ends_with_the_id_of_the_key_only_once(tmp_path: Path) -> None:
    key = read_key(key_file(tmp_path))
    named = check_namespace(key.namespace("model-0123456789abcdef"))
    assert named == f"model-0123456789abcdef-{key.id}" == key.namespace(named)
    with pytest.raises(ValueError, match="at most 67 characters"):
        key.namespace("n" * 68)
    assert len(key.namespace("n" * 67)) == MAX_NAMESPACE_CHARS
    with pytest.raises(ConfigError, match="at most 67 characters"):
        EncoderCacheConfig(signing_key_file=key_file(tmp_path), namespace="n" * 68).signing_key()


@pytest.mark.parametrize(
    ("content", "mode", "expected"),
    [
        (b"short", 0o600, r"holds 5 bytes: must hold 32 to .*openssl rand"),
        (b"", 0o600, "holds 0 bytes"),
        (b"x" * 70_000, 0o600, "holds more than 65536 bytes"),
        (b"x" * 32, 0o644, "mode 0644.*chmod 0600, or 0440"),
        (b"x" * 32, 0o602, "mode 0602"),
        (b"x" * 32, 0o620, "mode 0620"),
    ],
)
def test_an_invalid_key_is_an_error_with_its_path_a_remedy_and_none_of_its_bytes(
    tmp_path: Path, content: bytes, mode: int, expected: str
) -> None:
    file = key_file(tmp_path, content, mode)
    with pytest.raises(ConfigError, match=expected) as raised:
        EncoderCacheConfig(signing_key_file=file).signing_key()
    assert str(file) in str(raised.value)
    assert not content or content.decode() not in str(raised.value)


def test_a_path_that_is_not_a_key_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, expected in (
        ("pipe", "no regular file|not a regular file"),
        ("", "Is a directory|not a regular"),
        ("no", "No such"),
    ):
        with pytest.raises(ConfigError, match=expected):
            EncoderCacheConfig(signing_key_file=tmp_path / name).signing_key()


def test_a_key_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = key_file(tmp_path)
    os.chown(file, 12345, -1) if os.geteuid() == 0 else monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match=r"belongs to user .* root its owner"):
        EncoderCacheConfig(signing_key_file=file).signing_key()


def test_without_the_package_the_error_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(ConfigError, match=r"pip install 'lmcache-ec\[signing\]'"):
        EncoderCacheConfig(signing_key_file=key_file(tmp_path)).signing_key()
