# SPDX-License-Identifier: Apache-2.0
"""`make reliability`: runs the tests that inject faults and a soak, and writes the result of each fault into the table
of docs/reliability.md.

A test states, with the mark `fault`, which fault it injects, where, and which consequences it asserts; the test
defines the row, which is written only if the test passed. `recovery` names the wait (`wait_until`) from the end of the
fault until everything is as before: its duration is measured. `engine` is what happened to a real engine, whose
outputs were compared unless `outputs=False`; without it there was no engine.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak.faults import FAULTS
from benchmarks.testbed import waiting
from benchmarks.testbed.models import ROOT

PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- the table: make reliability -->", "<!-- end of the table -->"
COLUMNS = ("fault", "where", "what happened", "engine", "outputs equal", "time to recover")
PLACES = {"disk": "LocalDisk", "store": "store process", "redis": "Valkey", "s3": "S3"}
SOAK_S = 240


@dataclass(frozen=True)
class Row:
    """One row of the table. `recovery_s` is None if no recovery was measured."""

    fault: str
    where: str
    outcome: str
    engine: str = ""
    outputs: bool = True
    recovery_s: float | None = None

    @property
    def named(self) -> Named:
        return self.fault, self.where

    def cells(self) -> tuple[str, ...]:
        seconds = "" if self.recovery_s is None else f"{max(0.01, self.recovery_s):.2g} s"
        equal = "yes" if self.engine and self.outputs else "-"
        return self.fault, self.where, self.outcome, self.engine or "-", equal, seconds or "-"


# ---- the faults that the suite declares


Named = tuple[str, str]
"""A fault and its location."""

_MARK = "pytest.mark.fault"


def declared() -> list[Named]:
    """The faults that tests are marked with, and those of the soak."""
    faults = [fault for path in sorted((ROOT / "tests").rglob("test_*.py")) for fault in _marked(path)]
    return faults + [_described(kind.name, "")[:2] for kind in FAULTS]


def _marked(path: Path) -> Iterator[Named]:
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if "mark.fault(" in text else ():
        if isinstance(node, ast.Call) and _marks_a_fault(node.func):
            fault, where, *_ = (str(ast.literal_eval(argument)) for argument in node.args)
            yield fault, where


def _marks_a_fault(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr == "fault" and ast.unparse(function) == _MARK


def listed() -> list[Named]:
    """The faults in the page's table."""
    lines = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]
    cells = [line.strip("| ").split(" | ") for line in lines]
    return [(fault, where) for fault, where, *_ in cells]


# ---- what a run of the tests records (called by tests/conftest.py)


class Recorder:
    """A pytest plugin that writes a JSON line for each marked test that passed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waits: dict[str, float] = {}
        waiting.observers.append(self._waited)

    def _waited(self, what: str, seconds: float) -> None:
        self._waits[what] = max(seconds, self._waits.get(what, 0.0))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self._waits.clear()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        outcome: Any = yield
        report = outcome.get_result()
        for mark in item.iter_markers("fault") if report.when == "call" and report.passed else ():
            if (recovery := mark.kwargs.get("recovery", "")) in ("", *self._waits):
                self._record(*mark.args, **mark.kwargs)
            else:
                report.outcome, report.longrepr = "failed", f"never waited until {recovery!r}, as the mark requires"

    def _record(
        self, fault: str, where: str, outcome: str, *, recovery: str = "", engine: str = "", outputs: bool = True
    ) -> None:
        row = Row(fault, where, outcome, engine, outputs, self._waits[recovery] if recovery else None)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")


# ---- the soak's rows

_SOAKED = {
    "disk-flip": ("a bit of an entry is flipped", "a miss; deleted, encoded again and rewritten"),
    "disk-truncate": ("an entry is truncated", "a miss; deleted and rewritten"),
    "disk-extend": ("bytes are appended to an entry", "a miss; deleted and rewritten"),
    "disk-swap": ("two entries swap names", "both are misses, and are rewritten"),
    "disk-link": ("an entry is replaced by a link to another", "a miss; writes do not follow the link"),
    "disk-pipe": ("an entry is replaced by a pipe", "a miss; nothing waits for the pipe"),
    "disk-delete": ("an entry is deleted by hand", "a miss; rewritten"),
    "disk-folder": ("a shard, a namespace or the folder is removed", "misses; recreated by the next write"),
    "disk-account": ("the folder's account is removed or corrupted", "rebuilt by the next survey"),
    "disk-news": (
        "the logs between engines are removed or corrupted",
        "no updates; the next listing has what was missed",
    ),
    "disk-temporary": ("a killed writer leaves a temporary file", "removed"),
    "store-stop": ("stopped for up to 1.5 s", "misses meanwhile; it resumes where it was"),
    "store-stop-long": ("stopped for longer than store_timeout_s", "killed and replaced"),
    "store-kill": ("killed", "replaced; what it was reading or writing is read or written again"),
    "redis-stop": ("stopped for up to 4 s", "not used meanwhile; then read and written again"),
    "redis-kill": ("killed and restarted", "not used meanwhile; then read and written again"),
    "redis-flush": ("emptied", "misses; refilled from memory"),
    "redis-hang-up": ("all connections are cut", "calls are retried on new ones, or are misses"),
    "redis-pause": ("paused for up to 3 s", "not used meanwhile; then read and written again"),
    "redis-full": ("full, with eviction off", "still read; written again once it has room"),
    "redis-poison": ("values are altered, truncated or of another type", "misses; deleted and rewritten"),
    "redis-delete": ("keys are deleted", "misses; rewritten"),
    "s3-stop": ("the server is stopped for up to 4 s", "not used meanwhile; then read and written again"),
    "s3-kill": ("the server is killed and restarted", "not used meanwhile; then read and written again"),
    "s3-poison": ("objects are altered, truncated or extended", "misses; deleted and rewritten"),
    "s3-swap": ("two objects swap names", "both are misses, and are rewritten"),
    "s3-delete": ("some or all objects are deleted", "misses; rewritten"),
}


def _described(kind: str, times: str) -> tuple[str, str, str]:
    fault, outcome = _SOAKED[kind]
    return f"{fault} ({kind})", PLACES[kind.partition("-")[0]], outcome + times


def _soaked(lines: Sequence[str]) -> list[Row]:
    """The rows for soaks with these last lines."""
    faults, recoveries_s = Counter[str](), dict[str, float]()
    for line in lines:
        counts = json.loads(line)
        if counts["wrong"] or counts["failed"] or counts["left"]:
            raise RuntimeError(f"the soak went wrong: {line}")
        faults.update(counts["faults_by_kind"])
        for kind, seconds in counts["recovery_s_by_kind"].items():
            recoveries_s[kind] = max(seconds, recoveries_s.get(kind, 0.0))
    return [
        Row(*_described(kind, f" ({number} times)" if number > 1 else ""), "alive", True, recoveries_s.get(kind))
        for kind, number in faults.items()
    ]


# ---- the table


def write(rows: Sequence[Row]) -> None:
    """Write the table of all declared faults into the page. RuntimeError if a fault has no row."""
    known: dict[Named, Row] = {}
    for row in sorted(rows, key=lambda row: row.recovery_s or 0.0):  # of several cases keep the slowest
        known[row.named] = row
    if missing := [f"{where}: {fault}" for fault, where in declared() if (fault, where) not in known]:
        raise RuntimeError(f"nothing came of: {'; '.join(missing)}")
    cells = [COLUMNS, tuple("-" * len(column) for column in COLUMNS)]
    ordered = [known[fault] for fault in dict.fromkeys(declared())]
    cells += [row.cells() for row in sorted(ordered, key=lambda row: (row.where, not row.engine))]
    table = "\n".join(f"| {' | '.join(each)} |" for each in cells)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make reliability", description=__doc__)
    parser.add_argument("--rows", type=Path, help="rows of an earlier run, which are kept where this one has none")
    parser.add_argument("--soak-line", type=Path, help="last lines of soaks, in place of one of four minutes")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="where to look for tests (default: tests)")
    options = parser.parse_args()
    path = options.rows or Path(tempfile.mkstemp(prefix="fault-rows-")[1])
    if options.tests:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "fault", f"--fault-rows={path}", *options.tests]
        subprocess.run(command, check=True)
    lines = options.soak_line.read_text() if options.soak_line else _soak()
    rows = [Row(**json.loads(text)) for text in path.read_text().splitlines()]
    write([*rows, *_soaked([each for each in lines.splitlines() if each.startswith("{")])])
    return 0


def _soak() -> str:
    command = [sys.executable, "-m", "benchmarks.soak", "--seconds", str(SOAK_S)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
