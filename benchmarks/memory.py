# SPDX-License-Identifier: Apache-2.0
"""What the cache costs an engine in memory once it has started: each process's own, without the cache and with it.

`python -m benchmarks.memory [MODEL]`. A tiny model on a CPU, in vLLM's default layout. Given is the proportional set
size (PSS), in which a page that several processes map counts once; the arena is among it, as far as it is resident.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.testbed.engine_env import Layout
from benchmarks.testbed.engine_runner import EngineProcess
from lmcache_ec.cli.status import engines

MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description="Memory after the start, in MiB.")
    parser.add_argument("model", nargs="?", default="qwen2vl", help="a name in benchmarks/testbed/models.py")
    model = parser.parse_args().model
    with tempfile.TemporaryDirectory(prefix="lmcache-ec-") as folder:
        print(json.dumps({way: measure(model, Path(folder), way == "with the cache") for way in WAYS}, indent=1))


WAYS = ("without the cache", "with the cache")


def measure(model: str, folder: Path, cached: bool) -> dict[str, float]:
    """MiB of each process of an engine that has served nothing yet, by its title."""
    connector = {
        "ec_connector": "ECLMCacheConnector",
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"local_disk": str(folder / "entries")},
    }
    with EngineProcess(model, Layout.MULTI_PROCESS, folder=folder, connector=connector if cached else None) as engine:
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
