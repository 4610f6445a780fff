# SPDX-License-Identifier: Apache-2.0
"""The main job on real photographs: each is encoded once, and an engine that starts after a SIGKILL encodes none.

`make demo` runs it, by default with a vision tower of ViT-B's size on all cores, so that the figures show the cost of
an encode. The same prompts run four times, with each engine in vLLM's default layout (front end, EngineCore, worker):

off      no cache
cold     a new engine with an empty cache: shared memory, and a folder on disk
repeat   the same engine, after its own encoder cache was emptied; then its processes are killed
restart  a new engine over the remaining folder

Encodes are counted by a vLLM plugin outside the package (benchmarks/testbed/engine_plugin), loads by the cache. The
time to first token is vLLM's own figure, from arrival, for one request at a time. The last line of output is one JSON
object; the exit status is 1 if the restarted engine encoded anything or if an output differed from the one without the
cache, and 2 if there was nothing to run or an engine did not run.
"""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.testbed.engine_env import Engine, Layout, Output, greedy, output_of
from benchmarks.testbed.engine_runner import Call, EngineFailed, EngineProcess, Forget
from benchmarks.testbed.models import MODELS, ROOT, model_path

FOLDER = ROOT / ".demo"
ENTRIES = FOLDER / "entries"
PHOTOGRAPHS = (
    "astronaut.png",
    "chelsea.png",
    "coffee.png",
    "rocket.jpg",
    "motorcycle_left.png",
    "hubble_deep_field.jpg",
)
DEFAULT = "gemma3_vit_b"
COSTLY = {DEFAULT, "gemma3_so400m", "gemma3_so400m_lm"}
"""Models of the testbed that benefit from several threads; the tiny ones are slower with them."""
SOUND_ONLY = {"qwen2audio", "whisper"}
CONFIGURATIONS = ("config.json", "params.json")
"""Configuration file of a checkpoint as Hugging Face's libraries write it, and as Mistral does."""

SETTLE_S = 10.0
"""Longest wait for writes that continue after the last answer."""


@dataclass(frozen=True)
class Phase:
    encodes: int
    loads: dict[str, int]
    """By tier."""
    ttft_ms_median: float
    ttft_ms: list[float]
    """One value per photograph."""
    outputs_equal: bool
    tokens_equal: bool
    """All that can be required on a GPU, where the last bits of a logit depend on the rest of the batch."""
    bytes_stored: int


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--model", default=DEFAULT, help="a name in benchmarks/testbed/models.py, or the folder of a checkpoint"
    )
    model = os.path.expanduser(parser.parse_args().model)
    if problem := what_is_wrong(model):
        print(f"make demo: {problem}", file=sys.stderr)
        return 2
    shutil.rmtree(FOLDER, ignore_errors=True)
    try:
        phases = run(model)
    except EngineFailed as error:
        print(f"{error}\nmake demo: the engine failed, see above and {FOLDER}/engine.log", file=sys.stderr)
        return 2
    show(model, phases)
    print(json.dumps({name: asdict(phase) for name, phase in phases.items()}))
    right = phases["restart"].encodes == 0 and all(phase.outputs_equal for phase in phases.values())
    return 0 if right else 1


def what_is_wrong(model: str) -> str | None:
    """Why the demo cannot run `model`, in one line; None if it can."""
    names = ", ".join(sorted(MODELS.keys() - SOUND_ONLY))
    accepted = f"accepted are {names}, or the folder of a checkpoint"
    if model in SOUND_ONLY:
        return f"MODEL={model} takes sound, and the demo shows photographs: {accepted}"
    if model in MODELS:
        return None
    folder = Path(model)
    if not model or not folder.is_dir():
        return f"MODEL={model} is neither a name that is known here nor a folder: {accepted}"
    if not any((folder / name).is_file() for name in CONFIGURATIONS):
        return f"MODEL={model} is no checkpoint, there is no {CONFIGURATIONS[0]} in this folder: {accepted}"
    return None


def run(model: str, **start_arguments: Any) -> dict[str, Phase]:
    """The four phases. Further arguments are those of `start`."""
    report(f"1/3  an engine without the cache, {len(PHOTOGRAPHS)} photographs")
    with start(model, cached=False, **start_arguments) as engine:
        reference, off = measure(engine, [])
    report("2/3  a new engine with the cache: empty, then again after vLLM forgot what it encoded")
    with start(model, cached=True, **start_arguments) as engine:
        _, cold = measure(engine, reference)
        engine.do(Forget())
        _, repeat = measure(engine, reference)
        killed = engine.processes()
        engine.kill()
    report(f"     killed with SIGKILL: {', '.join(killed)}")
    report("3/3  another engine over what is left on disk")
    with start(model, cached=True, **start_arguments) as engine:
        _, restart = measure(engine, reference)
    return {"off": off, "cold": cold, "repeat": repeat, "restart": restart}


def start(model: str, *, cached: bool, environment: Mapping[str, str] | None = None, **arguments: Any) -> EngineProcess:
    """An engine for one photograph per request. A user's own checkpoint gets vLLM's settings for dtype and memory.

    `arguments` for vLLM and `environment` of the engine are added to those set here.
    """
    own: dict[str, Any] = {"dtype": "auto", "kv_cache_memory_bytes": None, "skip_mm_profiling": False}
    connector = {
        "ec_connector": "ECLMCacheConnector",
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"local_disk": str(ENTRIES)},
    }
    engine = EngineProcess(
        model_path(model) if model in MODELS else model,
        Layout.MULTI_PROCESS,
        folder=FOLDER,
        connector=connector if cached else None,
        environment={**threads(model), **(environment or {})},
        timeout_s=600,
        limit_mm_per_prompt={"image": 1},
        **{**({} if model in MODELS else own), **arguments},
    )
    engine.do(Call("benchmarks.demo:serve_one", {}))  # costs of the first request only belong to no phase
    return engine


def threads(model: str) -> dict[str, str]:
    """Environment of an engine: all cores that this process may use, for a model that benefits from them."""
    tiny = model in MODELS.keys() - COSTLY
    return {} if tiny else {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}


def measure(engine: EngineProcess, reference: list[Output]) -> tuple[list[Output], Phase]:
    """One round of all prompts, compared with `reference` unless that is empty."""
    before = loads_of(engine)
    report = engine.do(Call("benchmarks.demo:describe_photographs", {}))
    outputs = msgspec.convert(report.value, list[Output])
    engine.do(Call("benchmarks.demo:serve_one", {}))  # the counts leave the engine with its next scheduling pass
    after = loads_of(engine)
    compared = list(zip(reference or outputs, outputs, strict=True))
    phase = Phase(
        encodes=len(report.encodes),
        loads={tier: count - before.get(tier, 0) for tier, count in after.items() if count > before.get(tier, 0)},
        ttft_ms_median=round(median(output.first_token_s for output in outputs) * 1e3, 2),
        ttft_ms=[round(output.first_token_s * 1e3, 2) for output in outputs],
        outputs_equal=all(one.equals(other) for one, other in compared),
        tokens_equal=all(one.tokens == other.tokens for one, other in compared),
        bytes_stored=settled_bytes(),
    )
    return outputs, phase


def loads_of(engine: EngineProcess) -> dict[str, int]:
    """Loads by tier so far, of this engine only; empty if it has no cache."""
    command = [str(Path(sys.executable).with_name("lmcache-ec")), "status", "--json"]
    engines = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    own = set(engine.processes().values())
    counts = {name: count for each in engines if each["engine_pid"] in own for name, count in each["book"].items()}
    return {name.removeprefix("loads_"): count for name, count in counts.items() if name.startswith("loads_")}


def settled_bytes() -> int:
    """Bytes of the entries on disk, once two consecutive readings agree."""
    last, deadline = -1, time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        now = sum(file.stat().st_size for file in ENTRIES.rglob("*.safetensors"))
        if now == last:
            break
        last = now
        time.sleep(0.3)
    return last


def describe_photographs(engine: Engine) -> Any:
    """In the engine's front end: one request after another, each with one photograph."""
    from PIL import Image

    outputs = []
    for photograph in photographs():
        image = {"type": "image_pil", "image_pil": Image.open(photograph).convert("RGB")}
        outputs.append(ask(engine, [image, {"type": "text", "text": "What is in this picture?"}]))
    return msgspec.to_builtins(outputs)


def serve_one(engine: Engine) -> None:
    """In the engine's front end: a request without any media."""
    ask(engine, [{"type": "text", "text": "Hello."}])


def ask(engine: Engine, content: list[dict[str, Any]]) -> Output:
    [output] = engine.llm.chat([{"role": "user", "content": content}], greedy(16), use_tqdm=False)
    return output_of(output)


def photographs() -> list[Path]:
    """Photographs that scikit-image's wheel ships; nothing is downloaded, and the package is not imported."""
    package = importlib.util.find_spec("skimage")
    if package is None or package.origin is None:
        raise FileNotFoundError("the demo's photographs come with scikit-image: pip install -e '.[demo]'")
    return [Path(package.origin).parent / "data" / name for name in PHOTOGRAPHS]


def show(model: str, phases: dict[str, Phase]) -> None:
    """A table with a row per photograph and a column per phase: waiting times, and below them encodes and loads."""
    from rich.console import Console
    from rich.table import Table

    off = phases["off"]
    table = Table(title=f"Time to the first token, model {Path(model).name}, one request at a time")
    table.add_column("photograph")
    for name in phases:
        table.add_column(name, justify="right")
    for position, photograph in enumerate(PHOTOGRAPHS):
        waits = (f"{phase.ttft_ms[position]:,.1f} ms" for phase in phases.values())
        table.add_row(photograph.partition(".")[0].replace("_", " "), *waits)
    table.add_section()
    summary: dict[str, Callable[[Phase], str]] = {
        "median": lambda phase: f"{phase.ttft_ms_median:,.1f} ms",
        "faster than off": lambda phase: "" if phase is off else f"{off.ttft_ms_median / phase.ttft_ms_median:.2f} x",
        "encoded": lambda phase: str(phase.encodes),
        "loaded": lambda phase: ", ".join(f"{count} {tier}" for tier, count in phase.loads.items()) or "0",
        "on disk": lambda phase: f"{phase.bytes_stored / 1024:,.0f} KiB",
        "output": lambda phase: "reference" if phase is off else "equal" if phase.outputs_equal else "DIFFERS",
    }
    for name, cell in summary.items():
        table.add_row(name, *map(cell, phases.values()), style="bold" if name == "faster than off" else None)
    Console().print(table)


def report(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
