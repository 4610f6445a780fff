# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check`: the worker seam on a real GPU. Correctness first, then speed; then, with --model, a vLLM engine.

Prints a table and, as the last line, one JSON object with the same content (also to --json FILE). The exit status is 0
if every byte, and every token of an engine, was right, whatever the figures; 1 if not; 2 if it cannot run the checks.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu_check.card import Card

_NEEDED = "torch with CUDA, and what this package itself needs: pip install torch; pip install ."


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make gpu-check", description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--model", default="", help="a checkpoint's folder or name: go on with vLLM's own engine (MODEL=)"
    )
    parser.add_argument("--json", type=Path, help="write the JSON object here, too")
    parser.add_argument("--card", default="", help=argparse.SUPPRESS)  # opener of a device other than the first GPU
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer samples: no figure of worth")
    options = parser.parse_args(arguments)
    options.model = os.path.expanduser(options.model)
    try:
        from benchmarks.gpu_check import model
        from benchmarks.gpu_check.card import FIRST, NoCard, open_card
    except ImportError as error:
        return _nothing_to_check(f"{error} in {sys.executable}. It needs {_NEEDED}")
    try:
        with open_card(options.card or FIRST) as card, tempfile.TemporaryDirectory(prefix="lmcache-ec-") as folder:
            if options.model and (unfit := model.what_is_wrong(options.model)):
                return _nothing_to_check(f"{unfit} (in {sys.executable})")
            return _check(card, Path(folder), options)
    except NoCard as error:
        return _nothing_to_check(f"{error} (in {sys.executable}; PYTHON= names another)")


def _nothing_to_check(why: str) -> int:
    print(f"make gpu-check: {why}", file=sys.stderr)
    return 2


def _check(card: Card, folder: Path, options: argparse.Namespace) -> int:
    from benchmarks.gpu_check import correctness, model, speed
    from benchmarks.gpu_check.report import Report

    began = time.monotonic()
    plan, effort = correctness.Plan(card, folder), speed.Effort()
    if options.quick:
        plan = correctness.Plan(card, folder, megabytes=(0.5, 2.75, 40.0), large=16.0, repeats=2)
        effort = speed.Effort(2, 6, 0.001, 96 << 20, 0.3, 1 << 20)
    report = Report(card.facts)
    report.checks = correctness.run(plan, _print)
    report.figures = speed.run(plan, effort, _print)
    print(f"\n{report.table()}\n\n{time.monotonic() - began:.0f} s", flush=True)
    if options.model:
        card.give_back()
        report.model = model.run(options.model, card.engines, _print)
        print(f"\n{model.table(report.model)}\n\n{time.monotonic() - began:.0f} s", flush=True)
    print(report.json())
    if options.json:
        options.json.write_text(report.json() + "\n")
    return 0 if report.right and (not options.model or model.is_right(report.model)) else 1


def _print(line: str) -> None:
    print(f"... {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
