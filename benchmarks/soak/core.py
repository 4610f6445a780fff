# SPDX-License-Identifier: Apache-2.0
"""The soak without engines: store process and tiers under many faults, every load compared with what was saved.

`core_engine` looks up, loads and saves, in a process that is killed and restarted now and then. This process injects
faults into everything that `core_engine` uses.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from random import Random

import msgspec

from benchmarks.soak.breaker import Breaker
from benchmarks.soak.core_engine import Report, Settings, average_bytes
from benchmarks.soak.faults import Targets
from benchmarks.soak.leftovers import Traces, arenas, on_disk, processes_with
from benchmarks.soak.parts import ROOT
from benchmarks.soak.stores import Room, Stores, stores
from benchmarks.soak.tally import Tally

_OF_BENCH = ("max_local_cpu_size", "local_disk")
"""Keys for which the tests' `Bench` has its own arguments."""

_NAMES = 400
_FAULT_EVERY_S = 0.02
_FAULTS_A_LIFE = 250
_SILENT_S = 30.0
"""An engine's side without a report for this long counts as hanging."""

_END_S = 60.0


def soak(seed: int, seconds: float, faults: int, folder: Path, tally: Tally) -> dict[str, int]:
    """Run until `faults` faults have occurred, or the time is up. Returns faults by kind; the rest is in `tally`."""
    room = Room.below(_NAMES * average_bytes(), ttl_s=20)
    with stores(folder, room) as running:
        run = _Core(seed, running, tally)
        try:
            run.until(faults, time.monotonic() + seconds)
        finally:
            run.close()
        return dict(run.breaker.counts)


class _Core:
    """Runs on one thread, besides those of the breaker."""

    def __init__(self, seed: int, running: Stores, tally: Tally) -> None:
        self._seed = seed
        self._stores = running
        self._tally = tally
        self._chance = Random(f"{seed} lives")
        self._lives: list[_Life] = []
        self._traces: list[tuple[str, Traces]] = []
        targets = Targets(running.disk, running.redis, running.s3, lambda: self._life.store_processes())
        self.breaker = Breaker(targets, Random(f"{seed} faults"), lambda fault: fault.core_weight)

    def until(self, faults: int, deadline: float) -> None:
        self._life = self._start()
        reported = 0
        while (done := self.breaker.counts.total()) < faults and time.monotonic() < deadline:
            self.breaker.step()
            if self._life.hangs or self._chance.random() < 1 / _FAULTS_A_LIFE:
                self._replace()
            if done >= reported + 1000:
                reported = done
                self._tally.report(f"{done} faults")
            time.sleep(_FAULT_EVERY_S)
        self.breaker.calm()
        self._finish()

    def close(self) -> None:
        self.breaker.close()
        for life in self._lives:
            life.kill(store_process=True)

    def _start(self) -> _Life:
        keys = {name: value for name, value in self._stores.keys().items() if name not in _OF_BENCH}
        seed, room = f"{self._seed} requests {len(self._lives)}", self._stores.room
        life = _Life(Settings(seed, _NAMES, str(self._stores.disk), room.cpu, keys), self._stores.s3.environment)
        self._lives.append(life)
        return life

    def _replace(self) -> None:
        life, with_store = self._life, self._chance.random() < 0.5
        if life.hangs:
            self._tally.has_failed("hang", f"no report for {_SILENT_S:.0f} s, or it ended: {life.log_end()}")
        self._traces.append((f"engine {len(self._lives)}", life.traces()))
        life.kill(store_process=with_store)
        self._tally.restarts["SIGKILL of everything" + ("" if with_store else " but the store process")] += 1
        self._count(life)
        self._life = self._start()

    def _finish(self) -> None:
        life = self._life
        while not (life.serves or life.hangs):
            time.sleep(0.05)
        traces = life.traces()
        life.rest()
        self._at_rest_on_disk()
        life.end()
        self._count(life)
        if not life.report.at_rest:
            self._tally.has_failed("end", f"it did not come to rest: {life.log_end()}")
        for where, each in [*self._traces, ("the last engine", traces)]:
            self._tally.is_left(each.wait(_END_S), where)

    def _at_rest_on_disk(self) -> None:
        """Check the folder, with time for a survey, which runs every 30 s."""
        deadline = time.monotonic() + _END_S
        while (wrong := on_disk(self._stores.disk)) and time.monotonic() < deadline:
            time.sleep(0.2)
        self._tally.is_left(wrong, "on disk")

    def _count(self, life: _Life) -> None:
        report = life.report
        self._tally.requests["items"] += report.requests
        self._tally.encodes += report.encodes
        self._tally.loads.update(report.loads)
        for name in report.wrong:
            self._tally.is_wrong("load", f"{name} got other bytes than were saved")
        for text in report.failed:
            self._tally.has_failed("engine", text)
        self._tally.is_left(report.left, "at rest")


class _Life:
    """One process of `core_engine`, and its last report."""

    def __init__(self, settings: Settings, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.soak.core_engine", msgspec.json.encode(settings).decode()],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.report = Report()
        self._reported_at = time.monotonic()
        self._arenas: set[int] = set()
        self._words: list[bytes] = []
        self._readers = [threading.Thread(target=each, daemon=True) for each in (self._take_reports, self._take_errors)]
        for reader in self._readers:
            reader.start()

    @property
    def hangs(self) -> bool:
        return self._process.poll() is not None or time.monotonic() > self._reported_at + _SILENT_S

    @property
    def serves(self) -> bool:
        return bool(self.report.requests)

    def store_processes(self) -> list[int]:
        """Empty until it serves: an engine whose store process ends during the start fails to start, and reports it."""
        if not self.serves:
            return []
        self._arenas |= arenas(self._process.pid)
        return processes_with(self._arenas, b"lmcache_ec.store") if self._arenas else []

    def traces(self) -> Traces:
        return Traces.of([self._process.pid, *self.store_processes()])

    def log_end(self) -> str:
        return b"".join(self._words[-20:]).decode(errors="replace")

    def rest(self) -> None:
        """Make it stop asking; its last report then shows what it still holds."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"rest\n")
        self._process.stdin.flush()
        deadline = time.monotonic() + _END_S
        while not self.report.at_rest and not self.hangs and time.monotonic() < deadline:
            time.sleep(0.05)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._process.kill()
        self._finish()

    def kill(self, *, store_process: bool) -> None:
        for pid in [*(self.store_processes() if store_process else ()), self._process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._finish()

    def _finish(self) -> None:
        self._process.wait()
        for reader in self._readers:
            reader.join(5)

    def _take_reports(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(msgspec.DecodeError):  # the last line may be cut short
                self.report = msgspec.json.decode(line, type=Report)
                self._reported_at = time.monotonic()

    def _take_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._words.append(line)
            del self._words[:-40]
