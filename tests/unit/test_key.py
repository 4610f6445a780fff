# SPDX-License-Identifier: Apache-2.0
import hashlib
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_ec.key import (
    MAX_EPOCH,
    EncoderCacheKey,
    at_epoch,
    check_namespace,
    namespace_of,
    object_name,
    parse_object_name,
)

DIGEST = hashlib.sha256(b"picture").hexdigest()


@given(st.text(), st.text())
def test_object_names_are_distinct_and_stay_below_their_namespace(one: str, other: str) -> None:
    names = [EncoderCacheKey("ns-1", identifier).object_name for identifier in (one, other)]
    for name in names:
        assert re.fullmatch(r"ns-1/([0-9a-f]{2})/\1[0-9a-f]{62}\.safetensors", name)
    assert (names[0] == names[1]) == (one == other)


@given(st.from_regex(r"[a-z0-9_-][a-z0-9._-]{0,79}", fullmatch=True), st.binary(min_size=32, max_size=32), st.data())
def test_an_object_name_is_read_back_and_nothing_else_is_mistaken_for_one(
    namespace: str, digest: bytes, data: st.DataObject
) -> None:
    name = object_name(namespace, digest)
    assert parse_object_name(name) == (namespace, digest)
    at = data.draw(st.integers(0, len(name) - 1))
    damaged = name[:at] + data.draw(st.characters()) + name[at + 1 :]
    for other in (damaged, name[:at] + name[at + 1 :], f"{name}\n", f"/{name}", f"a/{name}", name.upper()):
        found = parse_object_name(other)
        assert found is None or object_name(*found) == other


@given(st.text(max_size=200), st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.booleans())))
def test_a_namespace_is_one_safe_folder_name_whatever_the_model_is_called(model: str, facts: dict[str, object]) -> None:
    name = namespace_of(model, facts)
    assert check_namespace(name) == name
    assert len(name) <= 48 + 1 + 16
    assert namespace_of(model, dict(reversed(facts.items()))) == name


def test_a_namespace_can_be_read_and_any_fact_changes_it() -> None:
    facts = {"dtype": "bfloat16", "processor": {"min_pixels": 3136}, "revision": None}
    name = namespace_of("Qwen/Qwen2.5-VL-7B-Instruct", facts)
    assert name.startswith("qwen-qwen2.5-vl-7b-instruct-")
    changed = [{**facts, "dtype": "float16"}, {**facts, "processor": {"min_pixels": 3137}}, {**facts, "salt": ""}]
    assert len({name, *(namespace_of("Qwen/Qwen2.5-VL-7B-Instruct", other) for other in changed)}) == 4


@given(st.text(max_size=200), st.text(), st.integers(0, MAX_EPOCH), st.integers(0, MAX_EPOCH))
def test_each_epoch_has_a_namespace_that_is_not_longer_and_still_contains_all_facts(
    model: str, salt: str, one: int, other: int
) -> None:
    name, longest = namespace_of(model, {"salt": salt}), len(namespace_of("m" * 200, {}))
    named = check_namespace(at_epoch(name, one))
    assert len(named) <= longest
    assert at_epoch(name, 0) == name
    assert (named == at_epoch(name, other)) == (one == other)
    assert name[-17:] in named


def test_every_process_computes_the_same_namespace() -> None:
    code = "from lmcache_ec.key import namespace_of; print(namespace_of('m', {'b': [1, 'é'], 'a': {'y': 1, 'x': 2}}))"
    ours = namespace_of("m", {"a": {"x": 2, "y": 1}, "b": (1, "é")})
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == ours


@pytest.mark.parametrize("fact", [object(), {1, 2}, b"bytes", float("nan"), {"deep": [object]}])
def test_facts_that_json_cannot_express_are_refused(fact: object) -> None:
    with pytest.raises(TypeError, match="namespace facts must be plain JSON"):
        namespace_of("m", {"fact": fact})


@pytest.mark.parametrize("text", ["", ".", "..", ".hidden", "a/b", "A", "a b", "a" * 81, "ä", "a\n", "a\0"])
def test_unsafe_namespaces_are_refused_with_what_is_accepted(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text)) + ": must be 1 to"):
        check_namespace(text)
    with pytest.raises(ValueError, match="namespace"):
        EncoderCacheKey(text, DIGEST)
