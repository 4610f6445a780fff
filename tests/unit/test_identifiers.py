# SPDX-License-Identifier: Apache-2.0
"""Format, signature and durability of identifiers: a client's name never passes for content."""

import hashlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmcache_ec.adapters.vllm.identifiers import (
    CLIENT,
    COUNTER,
    KEY_VARIABLE,
    SIGNATURE,
    Durability,
    Naming,
    client_name,
    client_uuid,
    counter_name,
    ensure_key,
    hashed_name,
    identifier_of,
    names_of,
    signed,
    signed_identifiers,
    stored_names,
    without_signature,
)
from lmcache_ec.config.sources import NO_KEYS

DIGEST = hashlib.sha256(b"picture").hexdigest()
VOUCHED, UNVOUCHED = Naming(persist_client_ids=True), Naming()
ensure_key()

texts = st.text(max_size=60) | st.sampled_from([DIGEST, CLIENT, COUNTER, f"{CLIENT}:-:cat", f"{CLIENT}#{DIGEST}"])
salts = st.none() | st.text(min_size=1, max_size=20)


def how(naming: Naming, identifier: str, is_signed: bool = True, media: bool = True) -> dict[str, Durability]:
    return {name.text: name.durability for name in naming.names(identifier, is_signed, media)}


@given(texts, salts, texts, salts)
def test_names_are_equal_only_for_equal_uuids_of_equal_salts(
    uuid: str, salt: str | None, other: str, other_salt: str | None
) -> None:
    one, two = client_name(uuid, salt), client_name(other, other_salt)
    assert (one == two) == ((uuid, salt) == (other, other_salt))
    assert client_uuid(one) == uuid


@given(texts, salts)
def test_a_clients_name_is_never_spelled_like_content_a_counter_or_a_hashed_name(uuid: str, salt: str | None) -> None:
    name = client_name(uuid, salt)
    assert name not in (DIGEST, counter_name(uuid), hashed_name(CLIENT, DIGEST), hashed_name(COUNTER, DIGEST))
    assert how(UNVOUCHED, name).get(name, Durability.LOCAL) is Durability.LOCAL


@given(
    texts | st.builds(client_name, texts, salts) | st.builds(counter_name, texts),
    st.builds(Naming, st.booleans(), st.booleans()),
    st.booleans(),
    st.booleans(),
)
@example(client_name(DIGEST), UNVOUCHED, True, False)
def test_every_name_that_may_leave_memory_is_one_that_tiers_are_searched_for(
    identifier: str, naming: Naming, is_signed: bool, media: bool
) -> None:
    names = how(naming, identifier, is_signed, media)
    assert {name for name, kept in names.items() if kept is Durability.PERSISTENT} <= stored_names(identifier)


@pytest.mark.parametrize("digits", [64, 128])
@pytest.mark.parametrize("naming", [VOUCHED, UNVOUCHED, Naming(counts=True)])
def test_content_goes_to_every_tier(digits: int, naming: Naming) -> None:
    identifier = "a1" * (digits // 2)
    assert how(naming, identifier) == {identifier: Durability.PERSISTENT}


@pytest.mark.parametrize("name", [client_name("cat"), client_name(DIGEST, "tenant"), hashed_name(CLIENT, DIGEST)])
def test_a_clients_name_leaves_memory_only_if_the_operator_vouches_for_it(name: str) -> None:
    assert how(UNVOUCHED, name) == {name: Durability.LOCAL}
    assert how(VOUCHED, name) == {name: Durability.PERSISTENT}


@pytest.mark.parametrize("naming", [VOUCHED, UNVOUCHED, Naming(True, True)])
@pytest.mark.parametrize("name", [counter_name("renderer0-mm-1-image-0"), hashed_name(COUNTER, DIGEST)])
@pytest.mark.parametrize("is_signed", [False, True])
@pytest.mark.parametrize("adapter", ["", "lora:"])
def test_a_counter_is_never_cached(naming: Naming, name: str, is_signed: bool, adapter: str) -> None:
    assert how(naming, f"{adapter}{name}", is_signed and not adapter) == {}


@given(texts.filter(lambda text: COUNTER not in text and text.isascii() and text != ""))
def test_without_a_signature_nothing_leaves_memory_or_meets_what_is_signed(identifier: str) -> None:
    for naming in (VOUCHED, UNVOUCHED):
        [(name, durability)] = how(naming, identifier, is_signed=False).items()
        assert durability is Durability.LOCAL
        assert name != identifier
        assert identifier_of(name) == identifier
        assert name in names_of(identifier)
    assert how(Naming(counts=True), identifier, is_signed=False) == {}  # it may be a counter, hashed


def test_an_item_without_media_may_name_content_by_its_digest() -> None:
    name = client_name(DIGEST)
    assert how(UNVOUCHED, name, media=False) == {name: Durability.LOCAL, DIGEST: Durability.PERSISTENT}
    assert how(UNVOUCHED, name, media=True) == {name: Durability.LOCAL}
    assert how(Naming(counts=True), DIGEST, is_signed=False, media=False) == {DIGEST: Durability.PERSISTENT}


@pytest.mark.parametrize("identifier", ["", "\ud800", f"lora\udfff:{DIGEST}", "x" * 4097, "é" * 2049])
def test_an_identifier_that_cannot_be_stored_is_refused(identifier: str) -> None:
    assert how(VOUCHED, identifier) == how(VOUCHED, identifier, is_signed=False) == {}


# ---- signatures

identifiers = st.lists(texts | st.just("\ud800"), max_size=5)


@given(identifiers, st.data())
def test_a_signature_covers_what_the_front_end_spelled_and_no_more(names: list[str], data: st.DataObject) -> None:
    ours = data.draw(st.lists(st.booleans(), min_size=len(names), max_size=len(names)))
    headers = signed({"traceparent": "00"}, names, ours)
    assert signed_identifiers(headers, names) == {name for name, own in zip(names, ours, strict=True) if own}
    assert signed_identifiers(headers, [*names, "added later"]) == signed_identifiers(headers, names)
    assert without_signature(headers) == {"traceparent": "00"}


@given(st.text(max_size=40) | st.from_regex(r"[01]{1,4}\.[0-9a-f]{32}"), identifiers)
def test_no_client_can_write_a_signature(forged: str, names: list[str]) -> None:
    assert signed_identifiers({SIGNATURE: forged}, names) == frozenset()
    assert SIGNATURE not in (signed({SIGNATURE: forged}, names, [False] * len(names)) or {})


def test_a_signature_is_worthless_for_other_identifiers_and_in_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = signed(None, [DIGEST, "b" * 64], [True, False])
    assert signed_identifiers(headers, ["c" * 64, "b" * 64]) == frozenset()
    assert signed_identifiers(headers, ["b" * 64, DIGEST]) == frozenset()
    assert signed_identifiers(headers, [DIGEST]) == frozenset()
    monkeypatch.setenv(KEY_VARIABLE, "0" * 64)
    assert signed_identifiers(headers, [DIGEST, "b" * 64]) == frozenset()
    monkeypatch.delenv(KEY_VARIABLE)
    assert signed(None, [DIGEST], [True]) is None
    assert signed_identifiers({SIGNATURE: "1."}, [DIGEST]) == frozenset()
    assert KEY_VARIABLE in NO_KEYS  # otherwise no engine would start with it
