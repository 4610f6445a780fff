# SPDX-License-Identifier: Apache-2.0
"""vLLM's own encode-prefill-decode proxy, unmodified, in front of a producer and a consumer configured as in
`configs/`: only the producer encodes, and answers equal those of a server without this package."""

import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.testbed.models import ROOT
from benchmarks.testbed.servers.epd_proxy import Proxy
from benchmarks.testbed.servers.openai import Json, OpenAIServer, Refused, ask, chat, image_part, png, post
from benchmarks.testbed.servers.pictures import Pictures
from benchmarks.testbed.servers.redis import redis_server
from benchmarks.testbed.servers.seaweed import seaweed
from lmcache_ec.adapters.vllm.identifiers import CLIENT, hashed_name
from tests.unit.test_announcement import announcement

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # up to three servers start within a test's time

MODEL = "qwen2vl"
VOUCHING = "# persist_client_ids: true"
LARGER = {"min_pixels": 200 * 200}
PATIENCE = {"LMCACHE_EC_LOAD_DEADLINE_MS": "10000", "LMCACHE_EC_START_TIMEOUT_S": "60"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAIServer]:
    """The server that gives the right answers: no connector, and no shared pictures."""
    with OpenAIServer(MODEL, tmp_path_factory.mktemp("plain")) as server:
        yield server


@pytest.fixture(scope="module")
def pictures() -> Iterator[Pictures]:
    with Pictures() as pictures:
        yield pictures


@dataclass
class Deployment:
    """`proxy` sends the consumer placeholders for the media; `media_proxy`, with --no-rewrite, sends the media."""

    producer: OpenAIServer
    consumer: OpenAIServer
    proxy: Proxy
    media_proxy: Proxy
    plain: OpenAIServer

    def asked(self, *pictures: Json, encodes: int | None, media: bool = False, **body: Any) -> None:
        """Ask through a proxy: the answer is right, the producer encodes that many (None: any number), the consumer
        none."""
        answer = ask((self.media_proxy if media else self.proxy).url, *pictures, **body)
        assert answer.equals(self.plain.ask(*pictures, **body))
        encoded = self.producer.encoded()
        assert (encoded if encodes is not None else None, self.consumer.encoded()) == (encodes, 0)


@contextmanager
def deployed(
    folder: Path, plain: OpenAIServer, remote: str, environment: Mapping[str, str], *, vouching: bool
) -> Iterator[Deployment]:
    def server(name: str, **arguments: Any) -> OpenAIServer:
        return OpenAIServer(
            MODEL,
            folder / name,
            connector={"ec_connector": "ECLMCacheConnector", "ec_role": f"ec_{name}"},
            config=configured(name, folder, remote, vouching),
            environment={**PATIENCE, **environment},
            **arguments,
        )

    with server("producer", mm_encoder_only=True) as producer, server("consumer") as consumer:
        urls = (producer.url, consumer.url)
        with Proxy(folder / "proxy", *urls) as proxy, Proxy(folder / "media", *urls, "--no-rewrite") as media_proxy:
            yield Deployment(producer, consumer, proxy, media_proxy, plain)


def configured(name: str, folder: Path, remote: str, vouching: bool) -> Path:
    """A file of `configs/`, edited as by a user: the store's address, and the line that vouches for names."""
    text = (ROOT / "configs" / f"{name}.yaml").read_text()
    text = text.replace(yaml.safe_load(text)["ec"]["remote_url"], remote)
    assert text.count(VOUCHING) == 1
    if vouching:
        text = text.replace(VOUCHING, VOUCHING.removeprefix("# "))
    assert yaml.safe_load(text)["ec"].get("persist_client_ids", False) is vouching
    file = folder / f"{name}.yaml"
    file.write_text(text)
    return file


@pytest.fixture(scope="module", params=["redis", "s3"])
def joined(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, plain: OpenAIServer
) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("joined")
    if request.param == "redis":
        with (
            redis_server(folder / "redis") as redis,
            deployed(folder, plain, redis.url, {}, vouching=True) as deployment,
        ):
            yield deployment
    else:
        with seaweed(folder / "s3") as s3:
            url = f"s3://{s3.bucket}/shared?endpoint={s3.endpoint}"
            with deployed(folder, plain, url, s3.environment, vouching=True) as deployment:
                yield deployment


def test_only_the_producer_encodes_pictures(joined: Deployment, pictures: Pictures) -> None:
    """One picture; the same one twice; three; a streamed answer; by URL and as data; named by the client."""
    urls = [image_part(pictures.put(f"{seed}.png", png(seed))) for seed in range(5)]
    joined.asked(urls[0], encodes=1)
    joined.asked(urls[1], urls[1], encodes=1)
    joined.asked(urls[2], urls[3], image_part(10), encodes=3)
    joined.asked(urls[4], encodes=1, stream=True)
    joined.asked(image_part(11, "cat"), encodes=1)
    joined.consumer.forget()
    joined.asked(urls[3], urls[0], encodes=0, stream=True)


def test_the_arguments_of_the_processor_are_part_of_a_pictures_name(joined: Deployment) -> None:
    one, others = image_part(20), (image_part(21), image_part(22))
    assert not joined.plain.ask(one).equals(joined.plain.ask(one, mm_processor_kwargs=LARGER))
    joined.asked(one, encodes=1)
    joined.asked(one, encodes=1, mm_processor_kwargs=LARGER)
    joined.asked(*others, encodes=2, mm_processor_kwargs=LARGER)
    joined.asked(*others, encodes=2)
    joined.consumer.forget()
    joined.asked(one, encodes=0)
    joined.asked(one, encodes=0, mm_processor_kwargs=LARGER)


def test_media_that_the_proxy_passes_on_are_not_encoded_by_the_consumer_either(joined: Deployment) -> None:
    """Neither side gets a name, so both name the picture by its content."""
    joined.asked(image_part(30), encodes=1, media=True)
    joined.asked(image_part(31), image_part(30), image_part(32), encodes=2, media=True)
    joined.asked(image_part(33), encodes=1, media=True, cache_salt="tenant")


def test_a_request_with_a_salt_fails_alone(joined: Deployment) -> None:
    """The proxy does not pass the salt on to the producer, so the two name the picture differently, and the consumer
    has nothing to encode. See `docs/security.md`."""
    with pytest.raises(Refused) as refused:
        ask(joined.proxy.url, image_part(40), cache_salt="tenant")
    assert refused.value.status == 500
    joined.producer.encoded()
    joined.asked(image_part(40), encodes=0)
    joined.asked(cache_salt="tenant", encodes=0)


def test_a_producer_that_is_killed_and_comes_back(joined: Deployment) -> None:
    joined.asked(image_part(50), encodes=1)

    def through_the_proxy(seed: int) -> bool:
        try:
            answer = ask(joined.proxy.url, image_part(seed))
        except (Refused, OSError):
            return False
        assert answer.equals(joined.plain.ask(image_part(seed)))
        return True

    with ThreadPoolExecutor(4) as clients:
        outcomes = [clients.submit(through_the_proxy, seed) for seed in range(51, 75)]
        outcomes[3].result()
        joined.producer.kill()
        served = [outcome.result() for outcome in outcomes]
    assert served[3]
    assert not served[-1]
    assert joined.consumer.encoded() == 0

    with pytest.raises(Refused) as refused:
        ask(joined.proxy.url, image_part(75))
    assert refused.value.status == 502
    assert joined.consumer.ask(image_part(76)).equals(joined.plain.ask(image_part(76)))
    assert joined.consumer.encoded() == 1

    joined.producer.start()
    joined.producer.encoded()
    joined.asked(image_part(75), encodes=1)
    joined.asked(image_part(50), encodes=0)
    joined.asked(*(image_part(seed) for seed in range(71, 74)), encodes=None)


def test_a_picture_that_is_replaced_behind_a_vouched_url_is_served_as_it_was(
    joined: Deployment, pictures: Pictures
) -> None:
    """Both files document that a picture replaced behind its URL is still served as it was."""
    url = image_part(pictures.put("vouched.png", png(80)))
    joined.asked(url, encodes=1)
    before = joined.plain.ask(url)
    pictures.put("vouched.png", png(81))
    assert ask(joined.proxy.url, url).equals(before)
    assert not joined.plain.ask(url).equals(before)
    joined.asked(url, encodes=1, media=True)  # here the content gives the name


class Answers:
    """A server that gives every request the same answer, and records the requests."""

    def __init__(self, answer: Json) -> None:
        self.asked: list[Json] = []
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                body = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()


def test_the_proxy_accepts_a_producers_announcement_of_a_video_with_its_sound(tmp_path: Path) -> None:
    """It keeps the video in the request. Both engines are stand-ins: no model that fits here accepts both together."""
    announced = announcement(("video", hashed_name(CLIENT, "1" * 64)), ("audio", hashed_name(CLIENT, "2" * 64)))
    producer, consumer = Answers({"ec_transfer_params": announced}), Answers({"choices": []})
    video = {"type": "video_url", "video_url": {"url": "http://host/video.mp4"}}
    with Proxy(tmp_path, producer.url, consumer.url) as proxy:
        request = chat(video, mm_processor_kwargs={"use_audio_in_video": True})
        assert post(f"{proxy.url}/v1/chat/completions", request) == {"choices": []}
    assert len(producer.asked) == 1
    assert consumer.asked[0]["messages"] == request["messages"]


def test_by_default_a_picture_is_no_longer_served_once_it_was_replaced_behind_its_url(
    plain: OpenAIServer, pictures: Pictures, tmp_path: Path
) -> None:
    """Entries named by the proxy stay in the producer's memory, so the consumer gets the media and encodes them. With
    --no-rewrite it does not have to."""
    with (
        redis_server(tmp_path / "redis") as redis,
        deployed(tmp_path, plain, redis.url, {}, vouching=False) as joined,
    ):
        url = image_part(pictures.put("today.png", png(90)))
        for seed in (90, 91):
            pictures.put("today.png", png(seed))
            assert ask(joined.proxy.url, url).equals(plain.ask(image_part(seed)))
            assert joined.consumer.encoded() == 1
        assert joined.producer.log.read_text().count("persist_client_ids") == 1
        joined.producer.encoded()  # so far under names that stay in its memory
        for seed in (92, 93):
            pictures.put("today.png", png(seed))
            joined.asked(url, encodes=1, media=True)
