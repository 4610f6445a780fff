# SPDX-License-Identifier: Apache-2.0
"""Memory of each process of a started engine: without a connector, with one that does nothing, and with the cache.

`python -m benchmarks.memory [MODEL] [--engines N]`. A tiny model on a CPU, in vLLM's default layout. The figures are
proportional set sizes (PSS), in which a page mapped by several processes counts once; they include the arena as far as
it is resident. With several engines of each kind, started in turn, each process has its median and quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.engine.parties import nothing, ours
from benchmarks.testbed.engine_env import Layout
from benchmarks.testbed.engine_runner import EngineProcess
from lmcache_ec.cli.status import engines

MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description="Memory after the start, in MiB.")
    parser.add_argument("model", nargs="?", default="qwen2vl", help="a name in benchmarks/testbed/models.py")
    parser.add_argument("--engines", type=int, default=1, help="of each kind")
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(arguments.engines):
        with tempfile.TemporaryDirectory(prefix="lmcache-ec-") as folder:
            for way, connector in ways(Path(folder)).items():
                found.setdefault(way, []).append(measure(arguments.model, Path(folder), connector))
    spread = {way: {name: _spread(runs, name) for name in runs[0]} for way, runs in found.items()}
    print(json.dumps(spread, indent=1))


def ways(folder: Path) -> dict[str, dict[str, Any] | None]:
    return {
        "without a connector": None,
        "with one that does nothing": nothing(),
        "with the cache": ours({"local_disk": str(folder / "entries")}),
    }


def _spread(runs: list[dict[str, float]], name: str) -> float | list[float]:
    """The only value or, of several, the quartiles with the median between them."""
    values = [run[name] for run in runs]
    return values[0] if len(values) == 1 else [round(value, 1) for value in statistics.quantiles(values)]


def measure(model: str, folder: Path, connector: dict[str, Any] | None) -> dict[str, float]:
    """MiB of each process, by title, of an engine that has served nothing yet."""
    with EngineProcess(model, Layout.MULTI_PROCESS, folder=folder, connector=connector) as engine:
        processes = engine.processes()
        own = set(processes.values())
        for each in engines():
            if each["engine_pid"] in own:
                processes["store process"] = each["pid"]
        found = {name: round(proportional_bytes(pid) / MIB, 1) for name, pid in processes.items()}
    return {**found, "all": round(sum(found.values()), 1)}


def proportional_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


if __name__ == "__main__":
    main()
