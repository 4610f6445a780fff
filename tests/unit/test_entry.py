# SPDX-License-Identifier: Apache-2.0
import json
import struct

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_ec import entry
from lmcache_ec.entry import EntryError, OtherVersion, Reason, TensorSpec
from lmcache_ec.key import EncoderCacheKey

KEY = EncoderCacheKey("model-0123456789abcdef", "ab" * 32)
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def sealed(key: EncoderCacheKey, spec: TensorSpec, payload: bytes, producer: str = "test") -> bytearray:
    blob = bytearray(entry.entry_length(key.identifier, spec))
    entry.payload(memoryview(blob), key.identifier)[:] = payload
    entry.seal(memoryview(blob), key, spec, producer)
    return blob


def reason(blob: bytes | bytearray, key: EncoderCacheKey = KEY) -> Reason | None:
    """Why the entry does not verify; None if it does. Any other exception is a failure of the test."""
    try:
        entry.verify(memoryview(blob), key)
    except EntryError as error:
        return error.reason
    return None


SMALL = bytes(sealed(KEY, TensorSpec(3, 5, "BF16"), bytes(range(30))))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (7, 0), (17, 48)])
def test_safetensors_loads_what_was_sealed_bit_for_bit(dtype: str, shape: tuple[int, int]) -> None:
    tensor = torch.randn(shape).to(DTYPES[dtype])
    raw = tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    blob = sealed(KEY, spec := TensorSpec(*shape, dtype), raw)
    loaded = safetensors.torch.load(bytes(blob))
    assert list(loaded) == ["ec"]
    assert loaded["ec"].dtype == tensor.dtype
    assert loaded["ec"].shape == tensor.shape
    assert torch.equal(loaded["ec"].view(torch.uint8), tensor.view(torch.uint8))
    assert entry.verify(memoryview(blob), KEY) == spec


@given(st.text(max_size=300) | st.text('\x01\x1f"\\\U0001f600', max_size=1024), st.text(max_size=16))
def test_any_identifier_verifies_and_its_payload_is_page_aligned_and_nothing_follows(
    identifier: str, producer: str
) -> None:
    key, spec = EncoderCacheKey("n" * 80, identifier), TensorSpec(2, 3, "F32")
    blob = sealed(key, spec, bytes(24), producer)
    (header,) = struct.unpack_from("<Q", blob)
    assert (8 + header) % 4096 == 0
    assert len(blob) == 8 + header + 24 == entry.room(identifier) + 24
    assert entry.verify(memoryview(blob), key) == spec
    assert [name for name, _ in safetensors.deserialize(bytes(blob))] == ["ec"]
    metadata = json.loads(blob[8 : 8 + header])["__metadata__"]
    assert (metadata["identifier"], metadata["namespace"], metadata["producer"]) == (identifier, "n" * 80, producer)


def test_the_longest_header_fits_whatever_the_length_of_the_identifier() -> None:
    """Control characters take six bytes each in JSON; the shape is the longest possible one."""
    spec = TensorSpec(2**63 - 1, 0, "F8_E4M3")
    for count in (*range(1500), 4096):
        key = EncoderCacheKey("n" * 80, "\x01" * count)
        blob = sealed(key, spec, b"", "\x01" * 64)
        assert entry.verify(memoryview(blob), key) == spec


def test_a_layout_is_text_that_comes_back_and_changes_nothing_else() -> None:
    for count in (*range(1500), 4096):
        key = EncoderCacheKey("n" * 80, "\x01" * count)
        spec = TensorSpec(2**63 - 1, 0, "F8_E4M3", "[" * entry.MAX_LAYOUT_CHARS)
        assert entry.verify(memoryview(sealed(key, spec, b"", "\x01" * 64)), key) == spec
    with_layout = sealed(KEY, TensorSpec(3, 5, "BF16", "KV_2LTD bfloat16[3,1,5]"), bytes(range(30)))
    assert len(with_layout) == len(SMALL)
    assert torch.equal(
        safetensors.torch.load(bytes(with_layout))["ec"].view(torch.uint8),
        safetensors.torch.load(SMALL)["ec"].view(torch.uint8),
    )
    assert reason(bytes(with_layout).replace(b"KV_2LTD", b"KV_T2D_")) is Reason.DIGEST
    for text in ("\n", '"', "\\", "é", "[" * (entry.MAX_LAYOUT_CHARS + 1)):
        with pytest.raises(ValueError, match="layout"):
            TensorSpec(1, 1, "U8", text)


def test_payload_is_a_view() -> None:
    blob = bytearray(SMALL)
    entry.payload(memoryview(blob), KEY.identifier)[4] = 255
    assert blob[4096 + 4] == 255


def test_seal_refuses_what_is_not_an_entry_and_writes_nothing() -> None:
    spec = TensorSpec(1, 1, "U8")
    for length, producer in ((4096, ""), (4098, ""), (4097, "p" * 65)):
        blob = bytearray(length)
        with pytest.raises(ValueError, match="bytes"):
            entry.seal(memoryview(blob), KEY, spec, producer)
        assert not any(blob)


@pytest.mark.parametrize("args", [(-1, 2, "F16"), (2, -1, "F16"), (2**62, 2, "F16"), (1, 1, "F4"), (1, 1, "bf16")])
def test_impossible_tensors_are_refused(args: tuple[int, int, str]) -> None:
    with pytest.raises(ValueError, match=r"dtype|shape"):
        TensorSpec(*args)


def test_every_flipped_bit_is_detected() -> None:
    blob = bytearray(SMALL)
    for position in range(len(blob)):
        for bit in range(8):
            blob[position] ^= 1 << bit
            assert reason(blob) is not None, (position, bit)
            blob[position] ^= 1 << bit
    assert reason(blob) is None


def test_every_truncation_and_extension_is_detected() -> None:
    assert all(reason(SMALL[:length]) for length in range(len(SMALL)))
    assert reason(SMALL + b"\0") is Reason.LENGTH
    assert reason(SMALL + SMALL) is Reason.LENGTH


@given(st.binary(max_size=200), st.integers(0, 4200))
def test_garbage_is_an_entry_error(garbage: bytes, at: int) -> None:
    assert reason(garbage) is Reason.LENGTH
    blob = bytearray(SMALL)
    blob[at : at + len(garbage)] = garbage
    assert bytes(blob) == SMALL or reason(blob) is not None


def forged(header: bytes, payload: bytes = bytes(30)) -> bytes:
    """An entry with any header, with the right digest if the header has the digest at its usual place."""
    blob = bytearray(struct.pack("<Q", 4088) + header.ljust(4088) + payload)
    blob[entry._DIGEST_AT : entry._DIGEST_END] = entry._digest(memoryview(blob))
    return bytes(blob)


def header_of(**changes: object) -> bytes:
    """The header of SMALL with changes; None omits a field."""
    fields = json.loads(SMALL[8:4096])
    for name, value in changes.items():
        part = fields if name == "ec" else fields["ec"] if name in fields["ec"] else fields["__metadata__"]
        part[name] = value
        if value is None:
            del part[name]
    return json.dumps(fields, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (header_of(format="lmcache-ec/2"), Reason.VERSION),
        (header_of(format="lmcache-ec/x"), Reason.FORMAT),
        (header_of(format=None), Reason.HEADER),
        (header_of(identifier="cd" * 32), Reason.IDENTIFIER),
        (header_of(namespace="model-0123456789abcdee"), Reason.NAMESPACE),
        (header_of(dtype="F4"), Reason.SHAPE),
        (header_of(dtype=7), Reason.HEADER),
        (header_of(shape=[30]), Reason.HEADER),
        (header_of(shape=[3, -5]), Reason.SHAPE),
        (header_of(shape=[3.0, 5]), Reason.HEADER),
        (header_of(shape=[True, 15]), Reason.HEADER),
        (header_of(shape=[10**400, 5]), Reason.SHAPE),
        (header_of(shape=[3, 6]), Reason.HEADER),
        (header_of(shape=[3, 6], data_offsets=[0, 36]), Reason.LENGTH),
        (header_of(data_offsets=[2, 32]), Reason.HEADER),
        (header_of(ec=None), Reason.HEADER),
        (header_of(producer=None), Reason.HEADER),
        (header_of(producer=7), Reason.HEADER),
        (header_of(producer="\ud800"), Reason.HEADER),
        (header_of(created=["x"]), Reason.HEADER),
        (header_of(more="x"), Reason.VERSION),
        (header_of(more="x", producer=None), Reason.HEADER),
        (header_of(more="x", producer=7), Reason.HEADER),
        (header_of().replace(b'"shape":', b'"strides":[1],"shape":'), Reason.VERSION),
        (header_of(layout=""), Reason.HEADER),
        (header_of(layout="\n"), Reason.SHAPE),
        (header_of(layout=7), Reason.HEADER),
        (header_of()[:-1] + b',"other":' + header_of()[header_of().index(b'"ec":') + 5 :], Reason.VERSION),
        (header_of()[:-1] + b"," + header_of()[header_of().index(b'"ec":') :], Reason.HEADER),
        (header_of().replace(b'"shape":', b'"shape": '), Reason.HEADER),
        (header_of().replace(b"[3,5]", b"[3,5" + b"0" * 3000 + b"]"), Reason.SHAPE),
        (header_of().replace(b"[3,5]", b"NaN"), Reason.HEADER),
        (header_of()[:-1] + b',"deep":' + b"[" * 3000, Reason.HEADER),
        (header_of()[:-1] + b',"deep":' + b'{"a":' * 700, Reason.HEADER),
        (b"[" * 4088, Reason.HEADER),
        (b"[]", Reason.HEADER),
        (b"1" * 4088, Reason.HEADER),
        (b"\xff\xfe", Reason.HEADER),
        (b"", Reason.HEADER),
    ],
)
def test_a_header_with_any_other_content_is_named_even_if_its_digest_is_right(header: bytes, expected: Reason) -> None:
    assert reason(forged(header)) is expected


@pytest.mark.parametrize(
    "header",
    [
        header_of(format="lmcache-ec/10"),
        header_of(format="lmcache-ec/2", digest=None, shape=None, identifier=7, more={"a": [1]}),
        header_of(format="lmcache-ec/0", ec=[]),
        header_of(more="x"),
        header_of(more="x", identifier="cd" * 32),
    ],
)
@pytest.mark.parametrize("room", [0, 4088, 20_000], ids=["unpadded", "as here", "longer"])
@pytest.mark.parametrize("payload", [0, 30, 50_000])
def test_another_version_is_recognized_whatever_its_digest_and_the_length_of_its_parts(
    header: bytes, room: int, payload: int
) -> None:
    header = header.ljust(room)
    blob = struct.pack("<Q", len(header)) + header + bytes(payload)
    with pytest.raises(OtherVersion):
        entry.verify(memoryview(blob), KEY)
    assert reason(blob[: len(header)]) is not Reason.VERSION, "torn in its header it is no entry of any version"


@pytest.mark.parametrize("format_", ["pt", "", "lmcache-ec", "lmcache-ec/", "lmcache-ec/1.1", 2, None, {"a": 1}])
def test_a_format_that_is_not_ours_does_not_count_as_another_version(format_: object) -> None:
    header = header_of(format=format_)
    assert reason(struct.pack("<Q", 4088) + header.ljust(4088) + bytes(30)) in (Reason.HEADER, Reason.FORMAT)


def test_the_forgery_of_these_tests_is_good_where_nothing_is_changed() -> None:
    assert reason(forged(header_of(), bytes(range(30)))) is None


@pytest.mark.parametrize("length", [0, 4087, 4089, 2**31, 2**63, 2**64 - 1])
def test_a_wrong_header_length_is_refused_before_it_is_used(length: int) -> None:
    assert reason(struct.pack("<Q", length) + SMALL[8:]) is Reason.HEADER


def test_an_entry_under_another_key_is_refused() -> None:
    assert reason(SMALL, EncoderCacheKey(KEY.namespace, "cd" * 32)) is Reason.IDENTIFIER
    assert reason(SMALL, EncoderCacheKey("other", KEY.identifier)) is Reason.NAMESPACE
