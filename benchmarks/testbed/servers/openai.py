# SPDX-License-Identifier: Apache-2.0
"""vLLM's OpenAI server in its own processes, which a test uses like any client and may kill."""

import base64
import io
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from benchmarks.testbed.engine_env import Layout, Output, engine_environment, read_encodes, vllm_version
from benchmarks.testbed.engine_runner import descendants
from benchmarks.testbed.media import WORDINGS, picture
from benchmarks.testbed.models import ROOT, model_path
from benchmarks.testbed.servers.redis import free_port
from benchmarks.testbed.waiting import wait_for_server
from lmcache_ec.adapters.vllm.versions import minor
from lmcache_ec.cli.status import engines

START_S = 240.0
_ANSWER_S = 90.0

Json = dict[str, Any]


def server_flags(version: str) -> list[str]:
    """Flags for every server of this vLLM version. Before 0.31 all servers trust the arguments of requests."""
    flags = ["--enforce-eager", "--skip-mm-profiling"]
    return flags if minor(version) < (0, 31) else [*flags, "--trust-request-mm-kwargs"]


class Refused(Exception):
    """An answer with a status other than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text[:500]}")
        self.status = status


def post(url: str, body: object = None) -> Any:
    """The JSON of the answer; None for an empty one, and text where it is not JSON. Raises `Refused`."""
    request = urllib.request.Request(
        url, data=json.dumps(body or {}).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            text = answer.read().decode()
            is_json = answer.headers.get_content_type() == "application/json"
    except urllib.error.HTTPError as error:
        raise Refused(error.code, error.read().decode(errors="replace")) from None
    return json.loads(text or "null") if is_json else text


class OpenAIServer:
    """`vllm serve`. `start` after `kill` begins another life at the same address.

    `connector` is `--ec-transfer-config`; `config` is LMCache's YAML file. Further arguments are command-line options,
    with underscores for hyphens. `folder` gets `log` and `encodes`, appended to by each life.
    """

    def __init__(
        self,
        model: str,
        folder: Path,
        *,
        connector: Mapping[str, Any] | None = None,
        config: Path | None = None,
        environment: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "log"
        self.encode_log = folder / "encodes"
        self.model = model_path(model)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._connector = dict(connector) if connector is not None else None
        self._environment = {**({"LMCACHE_CONFIG_FILE": str(config)} if config else {}), **(environment or {})}
        self._arguments = {
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "seed": 0,
            "kv_cache_memory_bytes": 64 << 20,
            "mm_processor_cache_gb": 0.05,
            "enable_prefix_caching": False,
            "limit_mm_per_prompt": WORDINGS[model].limits,
            **arguments,
        }
        self._seen = 0
        self.start()

    def start(self) -> None:
        self.engine_id = f"server-{uuid.uuid4()}"
        environment = engine_environment(Layout.MULTI_PROCESS, encode_log=self.encode_log)
        environment |= {"VLLM_SERVER_DEV_MODE": "1", **self._environment}  # for /reset_encoder_cache
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.testbed.servers.vllm_serve", *self._options()],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._await_health()

    def _options(self) -> Sequence[str]:
        given: Json = {"model": self.model, "host": "127.0.0.1", "port": self.port, **self._arguments}
        if self._connector is not None:
            given["ec_transfer_config"] = {**self._connector, "engine_id": self.engine_id}
        options = server_flags(vllm_version())
        for name, value in given.items():
            option = name.replace("_", "-")
            if isinstance(value, bool):
                options.append(f"--{option}" if value else f"--no-{option}")
            else:
                options.append(f"--{option}={json.dumps(value) if isinstance(value, dict) else value}")
        return options

    def _await_health(self) -> None:
        wait_for_server("vLLM's API server", self.process, self.healthy, self.log, self.kill, START_S)

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    # ---- requests

    def ask(self, *pictures: Json, **body: Any) -> Output:
        """A chat with these pictures, each a part as of `image_part`; `body` is added to the request."""
        return ask(self.url, *pictures, **body)

    def post(self, path: str, body: object = None) -> Any:
        return post(f"{self.url}{path}", body)

    def render(self, *pictures: Json, **body: Any) -> Json:
        """A request to `generate`, which carries the processed media and their identifiers. Needs enable_scale_out."""
        rendered: Json = self.post("/v1/chat/completions/render", chat(*pictures, **body))
        return rendered

    def generate(self, rendered: Json) -> Output:
        [choice] = self.post("/inference/v1/generate", rendered)["choices"]
        return Output(choice["token_ids"], [one["logprob"] for one in choice["logprobs"]["content"]])

    def forget(self) -> None:
        """Empty vLLM's own encoder cache, so that the next request has to ask the connector."""
        self.post("/reset_encoder_cache")

    # ---- observed from outside

    def encoded(self) -> int:
        """How many items it has encoded since the last call, in all its lives. One rank only."""
        lines = len(read_encodes(self.encode_log))
        new, self._seen = lines - self._seen, lines
        return new

    def status(self) -> Json:
        """Status of its cache."""
        [status] = [status for status in engines() if status["engine"].startswith(self.engine_id)]
        return status

    def log_end(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])

    # ---- its death

    def kill(self) -> None:
        """SIGKILL all its processes at once. The store process ends by itself, after finishing its writes."""
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.kill()


class Headless(OpenAIServer):
    """EngineCore and its workers, for a front end started elsewhere: an `OpenAIServer` with data_parallel_size_local=0.
    `data_parallel_rpc_port` is the same for both."""

    def __init__(self, model: str, folder: Path, **arguments: Any) -> None:
        super().__init__(model, folder, headless=True, data_parallel_size_local=1, **arguments)

    def _await_health(self) -> None:
        """It has no address; its front end is healthy once it is."""


# ---- what a client sends, and how it reads the answer


def png(seed: int, size: tuple[int, int] = (112, 112)) -> bytes:
    file = io.BytesIO()
    picture(seed, size).save(file, "PNG")
    return file.getvalue()


def data_url(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def image_part(picture: int | str, uuid: str | None = None) -> Json:
    """A picture in a chat, from a seed (sent as a data URL) or a URL."""
    url = picture if isinstance(picture, str) else data_url(png(picture))
    part: Json = {"type": "image_url", "image_url": {"url": url}}
    return part if uuid is None else {**part, "uuid": uuid}


def chat(*pictures: Json, text: str = "hello", max_tokens: int = 8, **body: Any) -> Json:
    """A chat request with greedy decoding, whose answer has tokens and logprobs."""
    return {
        "messages": [{"role": "user", "content": [*pictures, {"type": "text", "text": text}]}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True,
        "return_token_ids": True,
        **body,
    }


def ask(url: str, *pictures: Json, **body: Any) -> Output:
    """The answer of the server or proxy at `url` to a chat. Raises `Refused`."""
    request = chat(*pictures, **body)
    answer = post(f"{url}/v1/chat/completions", request)
    if not request.get("stream"):
        return _output_of(answer["choices"])
    chunks = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    if errors := [chunk["error"] for chunk in chunks if "error" in chunk]:
        raise Refused(int(errors[0]["code"]), str(errors[0]))
    return _output_of([choice for chunk in chunks for choice in chunk["choices"]])


def _output_of(choices: Sequence[Json]) -> Output:
    tokens: list[int] = []
    logprobs: list[float] = []
    for choice in choices:
        tokens += choice.get("token_ids") or []
        logprobs += [one["logprob"] for one in (choice.get("logprobs") or {}).get("content") or []]
    return Output(tokens, logprobs)
