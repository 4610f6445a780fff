# SPDX-License-Identifier: Apache-2.0
"""What is read from an entry whose identifier is not known yet."""

import pytest

from benchmarks.testbed.core import VERSIONS, of_another_version
from lmcache_ec import entry
from lmcache_ec.key import EncoderCacheKey, ObjectName

SPEC = entry.TensorSpec(4, 64, "BF16")


def sealed(identifier: str, namespace: str = "ns") -> memoryview:
    key = EncoderCacheKey(namespace, identifier)
    buffer = memoryview(bytearray(entry.entry_length(identifier, SPEC)))
    entry.seal(buffer, key, SPEC, "host:1")
    return buffer


def name_of(identifier: str) -> ObjectName:
    return ObjectName("ns", EncoderCacheKey("ns", identifier).digest)


@pytest.mark.parametrize("identifier", ["picture", "ü😀" * 300, "x" * 4096])
def test_an_entry_is_verified_and_described_by_its_own_header(identifier: str) -> None:
    data = sealed(identifier)
    header = entry.verify_named(data, name_of(identifier))
    assert entry.read_header(data[: entry.header_bytes(data[:8])]) == header
    assert (header.identifier, header.namespace, header.spec, header.producer) == (identifier, "ns", SPEC, "host:1")
    assert header.length == len(data)


def test_under_another_name_or_in_another_namespace_it_does_not_verify() -> None:
    with pytest.raises(entry.EntryError, match="identifier"):
        entry.verify_named(sealed("picture"), name_of("another"))
    with pytest.raises(entry.EntryError, match="namespace"):
        entry.verify_named(sealed("picture", "other"), name_of("picture"))


def test_every_flipped_byte_and_every_length_but_its_own_is_found() -> None:
    data = sealed("picture")
    for at in (0, 7, 8, 60, 300, 4095, 4096, len(data) - 1):
        torn = memoryview(bytearray(data))
        torn[at] ^= 1
        with pytest.raises(entry.EntryError):
            entry.verify_named(torn, name_of("picture"))
    for wrong in (data[:0], data[:7], data[:100], data[:-1], memoryview(bytes(data) + b"x")):
        with pytest.raises(entry.EntryError):
            entry.verify_named(wrong, name_of("picture"))


@pytest.mark.parametrize("how", VERSIONS)
def test_an_entry_of_another_version_is_distinguished_from_damage(how: str) -> None:
    with pytest.raises(entry.OtherVersion):
        entry.verify_named(memoryview(of_another_version(bytes(sealed("picture")), how)), name_of("picture"))
