# SPDX-License-Identifier: Apache-2.0
"""An engine in its own process, which a test drives step by step and may kill.

    with EngineProcess("gemma3", Layout.TP2, connector=..., folder=tmp_path) as engine:
        report = engine.do(Generate((Prompt(images=(1,)),)))
        engine.kill()

The process is `python -m benchmarks.testbed.engine_runner`, or whatever else calls `serve_on`; steps and reports travel
as JSON lines over a socket pair, so that what vLLM prints is only a log (`folder/engine.log`).
"""

import argparse
import importlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

import msgspec

from benchmarks.testbed.engine_env import Layout, Output, engine_environment, read_encodes
from benchmarks.testbed.media import Prompt
from benchmarks.testbed.models import ROOT


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Greedy decoding of all prompts at once, or one after another."""

    prompts: tuple[Prompt, ...]
    max_tokens: int = 8
    one_by_one: bool = False


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Empty vLLM's own encoder cache."""


class Call(msgspec.Struct, frozen=True, tag=True):
    """Call `function`, "module:name", with the `Engine` and `arguments`; its result has to be JSON."""

    function: str
    arguments: dict[str, Any] = {}


Step = Generate | Forget | Call


class Report(msgspec.Struct):
    """Result of a step. `encodes` are the identifiers encoded meanwhile, once per rank that encoded them."""

    outputs: list[Output] = []
    value: Any = None
    error: str = ""
    encodes: list[str] = []


class Start(msgspec.Struct, frozen=True):
    model: str
    layout: Layout
    connector: dict[str, Any] | None
    arguments: dict[str, Any]


class EngineFailed(Exception):
    """The step raised in the engine, or its process ended."""


class Process(Protocol):
    """The part of `subprocess.Popen` that is needed for an engine's first process."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class Begin(Protocol):
    """Starts a process that calls `serve` on a socket. `log` and `link` are descriptors; the caller closes them."""

    def __call__(self, environment: Mapping[str, str], log: int, link: int) -> Process: ...


def new_interpreter(
    environment: Mapping[str, str], log: int, link: int, *, inside: Sequence[str] = (), **popen: Any
) -> Process:
    """`inside` is the start of a command line that runs the process."""
    return subprocess.Popen(
        [*inside, sys.executable, "-m", "benchmarks.testbed.engine_runner", str(link)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[link],
        **popen,
    )


class EngineProcess:
    """The test's side, for one thread. `folder` gets `engine.log`, `encodes` and `guard`, appended to by each engine.

    `begin` starts the engine's first process. Further arguments are vLLM's engine arguments. `guard` makes every call
    of a disk tier's method, `seal` or `verify` in an engine process raise and be listed in `refused`.
    """

    def __init__(
        self,
        model: str | Path,
        layout: Layout = Layout.MULTI_PROCESS,
        *,
        folder: Path,
        connector: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        guard: bool = False,
        timeout_s: float = 180,
        begin: Begin = new_interpreter,
        **arguments: Any,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "engine.log"
        self.encode_log = folder / "encodes"
        self.guard_log = folder / "guard"
        self._seen = len(read_encodes(self.encode_log))
        own, theirs = socket.socketpair()
        child_environment = engine_environment(
            layout,
            encode_log=self.encode_log,
            guard_log=self.guard_log if guard else None,
            **(environment or {}),
        )
        with theirs, self.log.open("ab") as log:
            self.process = begin(child_environment, log.fileno(), theirs.fileno())
        own.settimeout(timeout_s)
        self._socket = own
        self._lines = own.makefile("rb")
        start = Start(str(model), layout, dict(connector) if connector is not None else None, arguments)
        try:
            self._ask(start)
        except BaseException:
            self.kill()
            raise

    def do(self, step: Step) -> Report:
        """Carry out a step; raises `EngineFailed` if it raised there."""
        return self._ask(step)

    def send(self, step: Step) -> None:
        """Start a step without waiting; `receive` waits for its report."""
        self._socket.sendall(msgspec.json.encode(step) + b"\n")

    def receive(self) -> Report:
        try:
            line = self._lines.readline()
        except TimeoutError as late:
            raise EngineFailed(f"no answer in {self._socket.gettimeout()} s\n{self.log_end()}") from late
        if not line:
            status = self.process.wait(60)
            raise EngineFailed(f"the engine's process ended with status {status}\n{self.log_end()}")
        report = msgspec.json.decode(line, type=Report)
        if report.error:
            raise EngineFailed(f"{report.error}\n{self.log_end()}")
        encodes = read_encodes(self.encode_log)
        report.encodes, self._seen = encodes[self._seen :], len(encodes)
        return report

    @property
    def refused(self) -> list[str]:
        """Calls that the guard refused, as "pid function"."""
        return self.guard_log.read_text().splitlines() if self.guard_log.exists() else []

    def log_end(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def processes(self) -> dict[str, int]:
        """vLLM's processes by title, "front end" for the first: {"front end": 10, "VLLM::EngineCore": 11, ...}."""
        named = {"front end": self.process.pid}
        for pid in descendants(self.process.pid):
            title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode().strip()
            if title.startswith("VLLM::"):
                named[title] = pid
        return named

    def kill(self) -> None:
        """SIGKILL front end, EngineCore and workers, all at once: none can clean up after another."""
        family = [self.process.pid, *descendants(self.process.pid)]
        for pid in family:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()
        self._hang_up()

    def close(self) -> None:
        """An orderly shutdown; at most a minute, then `kill`."""
        if self._socket.fileno() == -1:
            return
        self._socket.shutdown(socket.SHUT_WR)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            raise EngineFailed(f"the engine did not shut down within a minute\n{self.log_end()}") from None
        self._hang_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.close()
        elif self._socket.fileno() != -1:
            self.kill()

    def _ask(self, message: Start | Step) -> Report:
        self._socket.sendall(msgspec.json.encode(message) + b"\n")
        return self.receive()

    def _hang_up(self) -> None:
        self._lines.close()
        self._socket.close()


def run_engine(
    model: str | Path,
    layout: Layout,
    *steps: Step,
    folder: Path,
    **arguments: Any,
) -> list[Report]:
    """Start an engine, carry out the steps, shut it down. Arguments are those of `EngineProcess`."""
    with EngineProcess(model, layout, folder=folder, **arguments) as engine:
        return [engine.do(step) for step in steps]


def descendants(pid: int) -> list[int]:
    """Children first, then their children. Processes reparented to init, like the store process, are not included."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(int(after_name[1]), []).append(int(stat.parent.name))
    found = children.get(pid, [])
    for child in found:
        found.extend(children.get(child, []))
    return found


def serve(lines: IO[bytes], answers: IO[bytes]) -> None:
    """The engine's side, on the main thread of its process, until the other end hangs up."""
    from benchmarks.testbed.engine_env import Engine

    def answer(report: Report) -> None:
        answers.write(msgspec.json.encode(report) + b"\n")
        answers.flush()

    start = msgspec.json.decode(lines.readline(), type=Start)
    engine = Engine(start.model, connector=start.connector, layout=start.layout, **start.arguments)
    answer(Report())
    for line in lines:
        try:
            report = carry_out(engine, msgspec.json.decode(line, type=Step))
        except Exception as error:
            report = Report(error=f"{type(error).__name__}: {error}")
        answer(report)
    engine.shut_down()


def carry_out(engine: Any, step: Step) -> Report:
    match step:
        case Generate(prompts, max_tokens, one_by_one):
            batches = [[prompt] for prompt in prompts] if one_by_one else [list(prompts)]
            return Report([output for batch in batches for output in engine.generate(batch, max_tokens)])
        case Forget():
            return Report(value=engine.forget())
        case Call(function, arguments):
            module, _, name = function.partition(":")
            return Report(value=getattr(importlib.import_module(module), name)(engine, **arguments))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.testbed.engine_runner", description="Run an engine for a test."
    )
    parser.add_argument("descriptor", type=int, help="of the socket that the test speaks through")
    serve_on(socket.socket(fileno=parser.parse_args().descriptor))


def serve_on(link: socket.socket) -> None:
    with link, link.makefile("rb") as lines, link.makefile("wb") as answers:
        serve(lines, answers)


if __name__ == "__main__":
    main()
