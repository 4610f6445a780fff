# SPDX-License-Identifier: Apache-2.0
"""Every way a request enters an engine: entries named by content are kept and shared; names that clients give their
media affect no honest request, in this engine's life or the next. Outputs equal those of an engine without a cache."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.testbed.engine_env import Layout, Output, engine_environment, read_encodes
from benchmarks.testbed.media import Prompt
from benchmarks.testbed.models import ROOT
from benchmarks.testbed.servers.openai import Headless, Json, OpenAIServer, Refused, image_part
from benchmarks.testbed.servers.redis import free_port
from tests.engine import data_parallel
from tests.engine.data_parallel import Ask
from tests.engine.drive import Request
from tests.engine.rig import Reference, Rig, wait_until

pytestmark = pytest.mark.timeout(900)  # a test starts up to four servers

MODEL = "qwen3vl"
TEXT = "what is it that is to be seen in this picture?"
"""Together with a picture, more than a block of the KV cache."""

BESIDE = {"LMCACHE_EC_LOAD_DEADLINE_MS": "30000", "LMCACHE_EC_START_TIMEOUT_S": "60"}
PREFIX = {"enable_prefix_caching": True, "block_size": 32}
FLAVOURS: dict[str, dict[str, Any]] = {
    "one process": {},
    "two processes": {"api_server_count": 2},
    "prefixes": PREFIX,
    "prefixes and shared memory": {**PREFIX, "mm_processor_cache_type": "shm"},
    "prefixes and no processor cache": {**PREFIX, "mm_processor_cache_gb": 0},
}


def served(folder: Path, disk: Path | None, **arguments: Any) -> OpenAIServer:
    keys = {"local_disk": str(disk)} if disk else arguments.pop("keys", {})
    return OpenAIServer(
        MODEL,
        folder,
        connector={"ec_connector": "ECLMCacheConnector", "ec_role": "ec_both", "ec_connector_extra_config": keys},
        environment={**BESIDE, **arguments.pop("environment", {})},
        enable_scale_out=True,
        **arguments,
    )


class Right:
    """The outputs of an engine without a cache."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference

    def __call__(self, seed: int) -> Output:
        return self._reference.outputs(MODEL, [Prompt(images=(seed,), text=TEXT)], 8)[0]


@pytest.fixture
def right(reference: Reference) -> Right:
    return Right(reference)


def ask(server: OpenAIServer, seed: int, uuid: str | None = None, **body: Any) -> Output:
    return server.ask(image_part(seed, uuid), text=TEXT, **body)


def features(server: OpenAIServer, seed: int, *, named: str | None = None, **body: Any) -> Json:
    """A request with processed media, as a disaggregated renderer sends it; `named` replaces their digest."""
    rendered = server.render(image_part(seed), text=TEXT, **body)
    if named is not None:
        rendered["features"]["mm_hashes"]["image"] = [named]
    return rendered


def digest(rendered: Json) -> str:
    [found] = rendered["features"]["mm_hashes"]["image"]
    assert len(bytes.fromhex(found)) == 32
    return str(found)


def written(server: OpenAIServer, disk: Path) -> list[str]:
    """The names of all entries on disk, once all writes are done."""
    wait_until("all is written", lambda: server.status()["jobs"] == 0)
    return sorted(file.stem for file in disk.rglob("*.safetensors"))


def lie(server: OpenAIServer, victim: str, right: Right) -> None:
    """Clients name their pictures by the digest of another one."""
    assert ask(server, 2, victim).equals(right(2))
    assert ask(server, 2, victim, mm_processor_kwargs={"do_convert_rgb": True}).equals(right(2))
    assert server.generate(features(server, 2, named=victim)).equals(right(2))
    assert server.generate(features(server, 3, named=victim, cache_salt="mine")).equals(right(3))
    assert server.generate(features(server, 4, named=f"lmcache-ec/client:-:{victim}")).equals(right(4))


def test_over_http_pictures_named_by_content_are_kept_and_a_false_name_is_not(right: Right, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with served(tmp_path / "server", disk) as server:
        lie(server, digest(features(server, 1)), right)
        assert written(server, disk) == []
        server.encoded()
        for encodes in (1, 0):
            assert ask(server, 1).equals(right(1))
            assert server.encoded() == encodes
            assert len(written(server, disk)) == 1
            server.forget()


@pytest.mark.slow
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_names_given_by_clients_affect_no_honest_request(flavour: str, right: Right, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with served(tmp_path / "server", disk, **FLAVOURS[flavour]) as server:
        victim = digest(features(server, 1))
        entries: list[str] = []
        for life in range(2):
            for _ in range(2):
                lie(server, victim, right)
            server.encoded()
            assert written(server, disk) == entries
            for _ in range(2):
                assert ask(server, 1).equals(right(1))
                server.forget()
            assert server.encoded() == (life == 0)
            assert server.generate(features(server, 1, cache_salt="honest")).equals(right(1))
            entries = written(server, disk)
            assert len(entries) == 1
            server.kill()
            server.start()


@pytest.mark.slow
def test_salts_keep_names_apart(right: Right, tmp_path: Path) -> None:
    named: list[tuple[int, dict[str, Any]]] = [(1, {}), (2, {"cache_salt": "one"}), (3, {"cache_salt": "another"})]
    with served(tmp_path / "server", tmp_path / "disk") as server:
        for encodes in (len(named), 0):
            for seed, salt in named:
                assert ask(server, seed, "holiday", **salt).equals(right(seed))
            assert server.encoded() == encodes
            wait_until("all is sealed", lambda: server.status()["jobs"] == 0)
            server.forget()
        for seed, salt in named:
            assert server.generate(features(server, seed + 10, named="trip", **salt)).equals(right(seed + 10))
        assert ask(server, 4, cache_salt="one").equals(right(4))
        server.encoded()
        server.forget()
        assert ask(server, 4).equals(right(4))  # content names are shared
        assert server.encoded() == 0


@pytest.mark.slow
def test_both_api_processes_sign_the_names_that_they_make(tmp_path: Path) -> None:
    disk, seeds = tmp_path / "disk", count(1)
    logged = {"environment": {"VLLM_LOGGING_LEVEL": "INFO"}, "enable_log_requests": True}
    asked: list[int] = []

    def both_were_asked() -> bool:
        """Ask until both front ends got requests: the kernel gives each connection to one of them."""
        asked.extend(more := list(islice(seeds, 8)))
        list(clients.map(lambda seed: ask(server, seed), more))
        lines = [line for line in server.log.read_text().splitlines() if "Received request" in line]
        return {line.partition(" ")[0] for line in lines} == {"(ApiServer_0", "(ApiServer_1"}

    with served(tmp_path / "server", disk, api_server_count=2, **logged) as server, ThreadPoolExecutor(8) as clients:
        wait_until("both were asked", both_were_asked)
        assert len(written(server, disk)) == len(asked)
        assert server.status()["book"]["unsigned_items"] == 0


@pytest.mark.slow
def test_rendered_features_never_stand_in_for_another_pictures_pixels(right: Right, tmp_path: Path) -> None:
    """Memory has no room for an entry, so a picture is encoded repeatedly from vLLM's processor cache."""
    with served(tmp_path / "server", None, keys={"max_local_cpu_size": 1e-5}) as server:
        assert ask(server, 1).equals(right(1))
        victim = digest(features(server, 1))
        without_pixels = features(server, 1)
        without_pixels["features"]["kwargs_data"] = None
        server.encoded()
        for _ in range(2):
            assert server.generate(features(server, 2, named=victim)).equals(right(2))
            with pytest.raises(Refused):
                server.generate(without_pixels)
            server.forget()
            assert ask(server, 1).equals(right(1))
            assert server.encoded() == 2


@pytest.mark.slow
def test_prompts_of_tokens_and_prompts_that_were_rendered_before(tmp_path: Path, reference: Reference) -> None:
    """In Python, where a prompt rendered by this process keeps the information about its media."""
    picture, other = Prompt(images=(1,)), Prompt(images=(2,))
    with Rig(MODEL, Layout.ONE_PROCESS, tmp_path, reference) as rig:
        [victim] = rig.play(Request(picture, tokens=True)).encodes
        rig.settle()
        for _ in range(2):
            rig.play(Request(other, tokens=True, uuids=(victim,)), Request(other, hashes=(victim,)))
            rig.forget()
            for same in (Request(picture), Request(picture, tokens=True), Request(picture, hashes=())):
                assert not rig.play(same).encodes
                rig.forget()
            rig.settle()
            assert len(rig.files()) == 1
            rig.restart()
            rig.scanned()


@pytest.mark.slow
def test_data_parallel_engines_behind_one_front_end(tmp_path: Path, reference: Reference) -> None:
    log, disk = tmp_path / "encodes", tmp_path / "disk"
    picture, other = data_parallel.PROMPTS

    def serve(*rounds: list[Ask]) -> list[str]:
        """Returns the encoded identifiers. All outputs have to be right."""
        before = len(read_encodes(log))
        done = subprocess.run(
            [sys.executable, "-m", "tests.engine.data_parallel", str(disk), msgspec.json.encode(rounds).decode()],
            cwd=ROOT,
            env=engine_environment(Layout.MULTI_PROCESS, encode_log=log),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stderr
        asked = [ask.prompt for asks in rounds for ask in asks]
        expected = reference.outputs(data_parallel.MODEL, asked, data_parallel.MAX_TOKENS)
        outputs = json.loads(done.stdout.splitlines()[-1])["outputs"]
        assert all(Output(*output).equals(right) for output, right in zip(outputs, expected, strict=True))
        wait_until("the picture is on disk", lambda: len(list(disk.rglob("*.safetensors"))) == 1)
        return read_encodes(log)[before:]

    [victim] = serve([Ask(picture, 0)])
    encoded = serve([Ask(other, 0, victim), Ask(other, 1, victim)], [Ask(picture, 0), Ask(picture, 1)])
    assert len(encoded) == 2
    assert victim not in encoded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "key", "kept"),
    [(False, "", 0), (True, "", 0), (True, "5e" * 32, 1)],
    ids=["without the package", "without the key", "with both"],
)
def test_a_front_end_that_is_started_elsewhere(
    package: bool, key: str, kept: int, right: Right, tmp_path: Path
) -> None:
    """Items that it does not sign stay in memory, and one line is logged about that."""
    disk = tmp_path / "disk"
    connector = {
        "ec_connector": "ECLMCacheConnector",
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"local_disk": str(disk)},
    }
    joint: dict[str, Any] = {
        "data_parallel_size": 1,
        "data_parallel_address": "127.0.0.1",
        "data_parallel_rpc_port": free_port(),
    }
    secret = {"LMCACHE_EC_FRONT_END_KEY": key} if key else {}
    here: dict[str, Any]
    here = {"connector": connector, "environment": secret} if package else {"environment": {"VLLM_PLUGINS": ""}}
    with (
        Headless(MODEL, tmp_path / "core", connector=connector, environment={**BESIDE, **secret}, **joint) as core,
        OpenAIServer(MODEL, tmp_path / "front", data_parallel_size_local=0, **joint, **here) as front,
    ):
        for encodes in (1, 0):
            assert ask(front, 1).equals(right(1))
            assert core.encoded() == encodes
            wait_until("it is sealed", lambda: core.status()["jobs"] == 0)
            front.forget()
        assert len(written(core, disk)) == kept
        assert core.log.read_text().count("without the signature of this engine's front end") == 1 - kept
        assert bool(core.status()["book"]["unsigned_items"]) == (not kept)
