# SPDX-License-Identifier: Apache-2.0
"""vLLM's own renderer code, wrapped: whatever clients send, a cache that trusts names and signatures gives each request
what it asked for. The processor and the engine behind it are stand-ins; the hashing is vLLM's."""

import asyncio
import hashlib
import itertools
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.media import MediaWithBytes
from vllm.multimodal.parse import MultiModalDataParser
from vllm.renderers.base import BaseRenderer
from vllm.v1.engine.input_processor import InputProcessor

from lmcache_ec.adapters.vllm import front_end
from lmcache_ec.adapters.vllm.identifiers import (
    CLIENT,
    COUNTER,
    Durability,
    Naming,
    client_name,
    hashed_name,
    signed_identifiers,
)
from lmcache_ec.adapters.vllm.ours import NAME
from tests.examples import examples

front_end.install()
front_end.install()

PICTURES = [Image.new("RGB", (2, 2), (seed, 0, 0)) for seed in range(3)]


class Processor:
    """Stands in for a model's processor: parses and hashes as vLLM does, but processes nothing."""

    def __init__(self) -> None:
        self.info = SimpleNamespace(parse_mm_data=MultiModalDataParser().parse_mm_data)

    def hashes(self, inputs: Any) -> dict[str, list[str]]:
        hashed: dict[str, list[str]] = inputs.get_mm_hashes("model", "blake3")
        return hashed

    def apply(self, inputs: Any, timing: Any) -> dict[str, Any]:
        return {"type": "multimodal", "prompt_token_ids": inputs.prompt, "mm_hashes": self.hashes(inputs)}


class HashesTwice(Processor):
    """Like Qwen3-VL when a request has arguments for each video."""

    def hashes(self, inputs: Any) -> dict[str, list[str]]:
        again = {"fps": 2, "named": {"deep": [None]}}
        return {
            kind: [MultiModalHasher.hash_kwargs("blake3", mm_hash={"of": [one]}, **again) for one in hashes]
            for kind, hashes in super().hashes(inputs).items()
        }


class NamesChunks(Processor):
    """Names the pieces of a video like Kimi."""

    def hashes(self, inputs: Any) -> dict[str, list[str]]:
        return {kind: [f"{one}-0" for one in hashes] for kind, hashes in super().hashes(inputs).items()}


class Renderer(BaseRenderer):
    def render_messages(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class FrontEnd:
    """vLLM's renderer and input processor around a stand-in for the model's processor.

    `counts`: prefix caching and processor cache are both off."""

    def __init__(self, processor: Processor | None = None, counts: bool = False, connector: str = NAME) -> None:
        config = SimpleNamespace(
            ec_transfer_config=SimpleNamespace(ec_connector=connector),
            cache_config=SimpleNamespace(enable_prefix_caching=not counts),
        )
        renderer = object.__new__(Renderer)
        numbers = itertools.count()
        renderer.__dict__.update(
            config=config,
            model_config=SimpleNamespace(
                multimodal_config=SimpleNamespace(mm_processor_cache_gb=0 if counts else 1), is_encoder_decoder=False
            ),
            api_process_rank=0,
            mm_processor=processor or Processor(),
            _mm_req_counter=SimpleNamespace(inc=lambda by: next(numbers)),
            _mm_timing_registry=SimpleNamespace(get=lambda name: None),
            _mm_processor_cache=None,
            _mm_processor_only_cache=None,
        )
        renderer.get_mm_processor = lambda: renderer.mm_processor
        renderer.update_mm_cache_stats = lambda: None

        async def in_thread(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.to_thread(renderer._process_multimodal, *args, **kwargs)

        renderer._process_multimodal_async = in_thread
        self.renderer: Any = renderer
        self.inputs = object.__new__(InputProcessor)
        vars(self.inputs).update(vllm_config=config, lora_config=SimpleNamespace(enable_tower_connector_lora=True))

    def render(self, picture: Any, how: str = "sync", **request: Any) -> dict[str, Any]:
        prompt = {"prompt_token_ids": [1], "multi_modal_data": {"image": [picture]}, **request}
        if how == "sync":
            rendered = self.renderer._process_tokens(prompt)
        else:
            rendered = asyncio.run(self.renderer._process_tokens_async(prompt))
        return dict(rendered)

    def request(self, rendered: dict[str, Any], lora: str = "") -> Any:
        """The request from `process_inputs`; vLLM code that needs a whole engine is reimplemented here."""
        adapter = SimpleNamespace(lora_name=lora) if lora else None

        def processed(processor: Any) -> Any:
            features = [
                MultiModalFeatureSpec(
                    data=None,
                    modality=kind,
                    identifier=processor._get_mm_identifier(one, adapter),
                    mm_position=PlaceholderRange(0, 1),
                    mm_hash=one,
                )
                for kind, hashes in rendered["mm_hashes"].items()
                for one in hashes
            ]
            return SimpleNamespace(
                mm_features=features,
                cache_salt=rendered.get("cache_salt"),
                trace_headers={"lmcache-ec-signature": "1.forged"},
                lora_request=adapter,
            )

        return front_end._sign(processed, self.inputs)

    def send(self, picture: Any, **request: Any) -> tuple[str, bool]:
        """Identifier of the item as EngineCore sees it, and whether it is signed."""
        return named(self.request(self.render(picture, **request)))


def named(request: Any) -> tuple[str, bool]:
    [feature] = request.mm_features
    assert type(feature.identifier) is type(feature.mm_hash) is str  # vLLM sends and hashes plain strings
    return feature.identifier, feature.identifier in signed_identifiers(request.trace_headers, [feature.identifier])


def content(picture: Any) -> str:
    """The identifier that vLLM itself computes from content."""
    return str(MultiModalHasher.hash_kwargs("blake3", model_id="model", image=picture))


@pytest.mark.parametrize("how", ["sync", "async"])
def test_content_keeps_vllms_spelling_and_is_signed(how: str) -> None:
    front = FrontEnd()
    assert front.send(PICTURES[0], how=how) == (content(PICTURES[0]), True)
    identifier, is_signed = front.send(PICTURES[0], how=how, mm_processor_kwargs={"crop": True})
    assert is_signed
    assert len(bytes.fromhex(identifier)) == 32


@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_uuid_is_marked_with_its_salt_whatever_it_looks_like(how: str) -> None:
    front = FrontEnd()
    digest = content(PICTURES[1])
    sent = front.send(PICTURES[0], how=how, multi_modal_uuids={"image": [digest]}, cache_salt="tenant")
    assert sent == (client_name(digest, "tenant"), True)
    again = client_name(digest, "tenant")  # a client that knows the format of names
    assert front.send(PICTURES[0], how=how, multi_modal_uuids={"image": again}) == (client_name(again), True)


@pytest.mark.parametrize("processor", [Processor, HashesTwice, NamesChunks])
def test_a_name_that_is_hashed_or_wrapped_stays_a_name(processor: type[Processor]) -> None:
    front = FrontEnd(processor())
    for arguments in ({}, {"mm_processor_kwargs": {"crop": True}}):
        identifier, _ = front.send(PICTURES[0], multi_modal_uuids={"image": ["cat"]}, **arguments)
        assert identifier.startswith(CLIENT)
    counting = FrontEnd(processor(), counts=True)
    for arguments in ({}, {"mm_processor_kwargs": {"crop": True}}):
        identifier, _ = counting.send(PICTURES[0], **arguments)
        assert identifier.startswith(COUNTER)
        named, _ = counting.send(PICTURES[0], multi_modal_uuids={"image": ["cat"]}, **arguments)
        assert named.startswith(CLIENT)


def test_content_that_a_model_hashes_again_is_content() -> None:
    identifier, is_signed = FrontEnd(HashesTwice()).send(PICTURES[0])
    assert is_signed
    assert len(bytes.fromhex(identifier)) == 32
    # A model with its own identifiers may not identify content: assume that it does not.
    assert FrontEnd(NamesChunks()).send(PICTURES[0])[0].startswith(CLIENT)


def test_an_image_id_in_place_of_pixels_is_a_name() -> None:
    picture = PICTURES[0].copy()
    picture.getexif()[ExifTags.Base.ImageID] = uuid.UUID(int=7)
    item = MediaWithBytes(picture, b"the picture's bytes")
    identifier, is_signed = FrontEnd().send(item)
    assert is_signed
    assert identifier == hashed_name(CLIENT, content(item)) == hashed_name(CLIENT, content(picture))
    assert FrontEnd().send(MediaWithBytes(PICTURES[0], b"the picture's bytes"))[0] == content(
        MediaWithBytes(PICTURES[0], b"the picture's bytes")
    )


def test_hashes_rendered_by_a_client_count_as_its_own_names_also_in_the_processor_cache() -> None:
    front = FrontEnd()
    digest = content(PICTURES[0])
    for lie in (digest, client_name(digest, "another tenant"), "renderer0-mm-1-image-0"):
        request = front.request({"mm_hashes": {"image": [lie]}, "cache_salt": "mine"})
        [feature] = request.mm_features
        assert feature.mm_hash == feature.identifier == client_name(lie, "mine")
        assert named(request) == (client_name(lie, "mine"), True)


def test_an_adapters_output_and_prompt_embeddings_are_not_signed() -> None:
    front = FrontEnd()
    identifier, is_signed = named(front.request(front.render(PICTURES[0]), lora="style"))
    assert identifier == f"style:{content(PICTURES[0])}"
    assert not is_signed
    assert named(front.request({"mm_hashes": {"prompt_embeds": ["d" * 64]}})) == ("d" * 64, False)


def test_an_engine_with_another_connector_sees_no_difference() -> None:
    front = FrontEnd(connector="ECExampleConnector")
    rendered = front.render(PICTURES[0], multi_modal_uuids={"image": ["cat"]}, cache_salt="tenant")
    assert rendered["mm_hashes"] == {"image": ["cat"]}
    request = front.request(rendered)
    assert named(request) == ("cat", False)
    assert request.trace_headers == {"lmcache-ec-signature": "1.forged"}


def test_a_front_end_that_differs_is_noticed_without_importing_it(tmp_path: Path) -> None:
    installed = Path(vllm.__path__[0])
    assert front_end.differs_in(installed) == front_end.problem() == ""
    for module in ("renderers/base.py", "multimodal/hasher.py", "v1/engine/input_processor.py"):
        copy = tmp_path / module
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((installed / module).read_text())
    assert front_end.differs_in(tmp_path) == ""
    base = tmp_path / "renderers/base.py"
    base.write_text(base.read_text().replace("def _process_mm_uuids(", "def _process_uuids("))
    assert "BaseRenderer._process_mm_uuids() was expected to take" in front_end.differs_in(tmp_path)
    base.unlink()
    assert "renderers/base.py" in front_end.differs_in(tmp_path)


# ---- all of it against a cache

Ask = dict[str, Any]


def asks() -> st.SearchStrategy[Ask]:
    digests = [content(picture) for picture in PICTURES]
    names = st.sampled_from(["cat", *digests, hashlib.sha256(b"url").hexdigest(), client_name("cat"), *digests])
    return st.fixed_dictionaries(
        {
            "picture": st.integers(0, len(PICTURES) - 1),
            "uuid": st.none() | names,
            "salt": st.none() | st.sampled_from(["one", "two"]),
            "crop": st.booleans(),
            "rendered": st.booleans(),
            "restart": st.booleans(),
            "counts": st.booleans(),
            "foreign": st.booleans(),
        }
    )


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(asks(), max_size=12), st.booleans())
def test_no_request_gets_an_output_that_its_own_name_never_stood_for(sequence: list[Ask], vouched: bool) -> None:
    """LocalCPU and the tiers are dictionaries. An output is (picture, arguments). With a front end without this package
    even a digest is only a name, and its entry stays in memory."""
    memory: dict[str, Any] = {}
    tiers: dict[str, Any] = {}
    given: dict[Any, set[Any]] = {}
    for ask in sequence:
        if ask["restart"]:
            memory.clear()
            given = given if vouched else {}
        right = (ask["picture"], ask["crop"])
        identifier, is_signed = sent(ask)
        naming = Naming(persist_client_ids=vouched, counts=ask["counts"])
        names = naming.names(identifier, is_signed, carries_media=True)
        held = [store[name.text] for name in names for store in (memory, tiers) if name.text in store]
        if ask["uuid"] is None and not ask["rendered"] and not ask["foreign"]:
            assert all(output == right for output in held)
        else:
            who: tuple[Any, ...] = (
                identifier,
                ask["foreign"],
            )
            if not ask["foreign"]:
                crop = ask["crop"] and not ask["rendered"]
                who = (ask["uuid"] or content(PICTURES[ask["picture"]]), ask["salt"], crop)
            stood_for = given.setdefault(who, set())
            assert all(output in stood_for for output in held)
            stood_for.add(right)
        assert not (ask["foreign"] and any(name.text in tiers for name in names))
        if not held and names:
            memory[names[0].text] = right
            if names[0].durability is Durability.PERSISTENT:
                tiers.setdefault(names[0].text, right)


def sent(ask: Ask) -> tuple[str, bool]:
    picture, name = PICTURES[ask["picture"]], ask["uuid"]
    arguments = {"mm_processor_kwargs": {"crop": True}} if ask["crop"] else {}
    front = FrontEnd(counts=ask["counts"], connector="foreign" if ask["foreign"] else NAME)
    if ask["rendered"]:
        hashes = {"image": [name or content(picture)]}
        return named(front.request({"mm_hashes": hashes, "cache_salt": ask["salt"]}))
    uuids = {} if name is None else {"multi_modal_uuids": {"image": [name]}}
    return front.send(picture, cache_salt=ask["salt"], **uuids, **arguments)
