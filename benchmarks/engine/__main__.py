# SPDX-License-Identifier: Apache-2.0
"""`make bench-engine`: a request's latency by where its picture's encoder output was, through vLLM's OpenAI server,
and a server's throughput under load. Half an hour on two cores; `--parts` and the counts make it shorter.

A bar that is missed is shown as missed; the exit status is still 0. It is 1 if a request was not served in the way to
be measured, or if an answer differed from the one without the cache.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench.machine import header
from benchmarks.bench.table import RESULTS
from benchmarks.engine import hits, mixed
from benchmarks.engine.parties import stores, subjects
from benchmarks.engine.report import Row, bars, draw_hits, draw_throughput, kept, rows, show, summary

PARTS = ("hits", "overhead", "mixed", "throughput")
_TINY = "gemma3"


def main() -> int:
    models = subjects()
    parser = argparse.ArgumentParser(
        prog="make bench-engine", description=__doc__.partition("\n\n")[0] if __doc__ else ""
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--model", choices=sorted(models), default="gemma3_so400m_lm", help="of all parts but `overhead`"
    )
    parser.add_argument("--kinds", nargs="+", choices=hits.KINDS, default=hits.KINDS, help="of hits; misses are too")
    parser.add_argument("--pictures", type=int, default=12, help="of each kind of hit")
    parser.add_argument("--tiny-pictures", type=int, default=120, help="the same, for `overhead`")
    parser.add_argument("--rounds", type=int, default=8, help="over the pictures of a hit in memory")
    parser.add_argument("--restarts", type=int, default=8, help="before hits from disk")
    parser.add_argument("--misses", type=int, default=1000, help="for `overhead`, beside those of its pictures")
    parser.add_argument("--pairs", type=int, default=5, help="of servers, with and without the cache, for `overhead`")
    parser.add_argument("--requests", type=int, default=30, help="of each rate and each share")
    parser.add_argument("--folder", type=Path, help="where models and entries are put (default: TMPDIR)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where figures and pictures go")
    options = parser.parse_args()
    subject = models[options.model]
    figures: dict[str, Any] = {}
    by_model: dict[str, Sequence[Row]] = {}
    with tempfile.TemporaryDirectory(prefix="lmcache-ec-bench-", dir=options.folder) as name:
        about = header("benchmarks.engine", Path(name), options.pictures)
        for part in options.parts:
            folder = Path(name) / part
            with stores(folder) as behind:
                match part:
                    case "hits" | "overhead":
                        of, counts = {
                            "hits": (subject, hits.Counts(options.pictures, options.rounds, options.restarts, 0, 1)),
                            "overhead": (
                                models[_TINY],
                                hits.Counts(options.tiny_pictures, 1, 1, options.misses, options.pairs),
                            ),
                        }[part]

                        def keep(measured: hits.Measured, model: str = of.model, pairs: int = counts.pairs) -> None:
                            by_model[model] = rows(measured, pairs)
                            _write(options.results, {**about, "model": subject.model}, by_model, figures)

                        keep(hits.measure(of, folder, behind, counts, report, options.kinds, keep))
                    case "mixed":
                        capacity = _capacity(by_model, subject.model)
                        batches = mixed.mixed(subject, folder, behind, capacity, options.requests, report)
                        figures[part] = [summary(batch) for batch in batches]
                    case "throughput":
                        batches = mixed.throughput(subject, folder, behind, options.requests, report)
                        figures[part] = [summary(batch) for batch in batches]
            _write(options.results, {**about, "model": subject.model}, by_model, figures)
    show(figures, by_model, bars(by_model))
    report(f"written to {options.results}: engine.json and pictures")
    return 0


def _write(
    folder: Path, about: Mapping[str, Any], by_model: Mapping[str, Sequence[Row]], figures: Mapping[str, Any]
) -> None:
    """Write the results after each part, so that a run that ends early keeps what it has measured."""
    folder.mkdir(parents=True, exist_ok=True)
    all_figures = {
        **about,
        "rows": {model: [kept(row) for row in of_model] for model, of_model in by_model.items()},
        **figures,
        "bars": [vars(bar) for bar in bars(by_model)],
    }
    (folder / "engine.json").write_text(json.dumps(all_figures, indent=1, ensure_ascii=False) + "\n")
    model = about["model"]
    if model in by_model:
        draw_hits(by_model[model], folder / "engine-hits.svg", f"{model}, one picture a request")
    if batches := figures.get("throughput"):
        draw_throughput(batches, folder / "engine-throughput.svg", f"{model}, four users at once")


def _capacity(by_model: Any, model: str) -> float:
    """Requests per second, one at a time, of a server without the cache: measured in the first part, or a guess."""
    found = [row.requests_per_s for row in by_model.get(model, ()) if row.kind == "off"]
    return float(found[0]) if found else 0.3


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except hits.NotWhatItSeems as problem:
        print(f"make bench-engine: {problem}", file=sys.stderr)
        sys.exit(1)
