# SPDX-License-Identifier: Apache-2.0
"""`make bench`: all parties in turn, round after round; then a table, a file of figures and a picture.

A bar that is missed is shown as missed, together with its floor; the exit status is still 0.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from benchmarks.bench.child import Child
from benchmarks.bench.churn import churn
from benchmarks.bench.machine import header
from benchmarks.bench.result import BUSY, Collected, bars
from benchmarks.bench.sample import BATCHED_MEGABYTES, MEGABYTES, WIDTH, rows_of
from benchmarks.bench.table import RESULTS, show
from benchmarks.testbed.engine_env import Layout, engine_environment

_ENVIRONMENT = engine_environment(
    Layout.ONE_PROCESS,
    MKL_NUM_THREADS="1",
    VLLM_LOGGING_LEVEL="ERROR",  # it warns about the number of threads in every forward pass
)
"""One thread for torch, and an engine in its caller's process."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=13, help="rounds that count; one more goes before them")
    parser.add_argument("--sizes", type=float, nargs="+", default=MEGABYTES, help="of the entries, in MB")
    parser.add_argument("--folder", type=Path, help="measure the disk that this folder is on (default: that of TMPDIR)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the figures and the picture go")
    options = parser.parse_args()
    os.environ.update(_ENVIRONMENT)
    with tempfile.TemporaryDirectory(prefix="lmcache-ec-bench-", dir=options.folder) as folder:
        about = header("benchmarks.bench", Path(folder), options.rounds)
        collected = measure(folder, options.rounds, options.sizes)
    report("the arena under churn")
    arena = churn()
    rows = collected.rows()
    verdicts = bars(rows, arena)

    from benchmarks.bench.plot import draw

    options.results.mkdir(parents=True, exist_ok=True)
    figures = {**about, "arena": asdict(arena), "bars": [asdict(bar) for bar in verdicts]}
    figures["rows"] = [asdict(row) for row in rows]
    (options.results / "latest.json").write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    draw(rows, options.results / "latest.svg")
    show(rows, verdicts)
    report(f"written to {options.results}: latest.json, latest.svg")
    return 0


def measure(folder: str, rounds: int, sizes: Sequence[float]) -> Collected:
    """Run a warm-up round, then the rounds that count."""
    collected, largest = Collected(), rows_of(max(sizes))
    with ExitStack() as stack:
        report("starting the parties")
        disk, remotes, copies, peer, hooks, *engines = children = [
            Child("benchmarks.bench.disk:Disk", f"{folder}/store", largest),
            Child("benchmarks.bench.remotes:Remotes", f"{folder}/remotes", largest),
            Child("benchmarks.bench.copies:Copies", f"{folder}/copies", largest),
            Child("benchmarks.bench.peer:Peer", f"{folder}/peer", largest),
            Child("benchmarks.bench.hooks:Hooks", f"{folder}/hooks"),
            Child("benchmarks.bench.in_engine:InEngine", folder, "ours", largest),
            Child("benchmarks.bench.in_engine:InEngine", folder, "example", largest),
        ]
        for child in children:
            stack.callback(child.end)
        for child in children:
            child.ready()
        for number in range(rounds + 1):
            began = time.monotonic()
            taken = Collected() if number == 0 else collected
            taken.add(hooks.call("measure"), 0)
            taken.add(peer.call("look_ups"), 0)
            taken.add(remotes.call("batches"), rows_of(BATCHED_MEGABYTES) * WIDTH * 2)
            for megabytes in sizes:
                rows = rows_of(megabytes)
                taken.add(remotes.call("measure", rows), rows * WIDTH * 2)
                for busy in (False, True):
                    _one_size(taken, rows, busy, disk, copies, peer, engines)
            report(f"round {number} of {rounds}: {time.monotonic() - began:.1f} s")
    return collected


def _one_size(
    collected: Collected, rows: int, busy: bool, disk: Child, copies: Child, peer: Child, engines: list[Child]
) -> None:
    """With `busy`, where the engine's thread is blocked meanwhile, this process runs Python during the measurement;
    where the engine carries on, its own main thread does."""
    suffix, size = BUSY if busy else "", rows * WIDTH * 2
    collected.add(disk.call("measure", rows, suffix, beside_python=busy), size)
    collected.add(copies.call("copies", rows, suffix, beside_python=busy), size)
    for engine in engines:
        collected.add(engine.call("measure", rows, suffix, beside_python=busy), size)
    collected.add(peer.call("calls", rows, suffix, beside_python=busy), size)
    collected.add(copies.call("ways", rows, busy), size)
    collected.add(peer.call("ways", rows, busy), size)


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
