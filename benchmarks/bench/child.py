# SPDX-License-Identifier: Apache-2.0
"""A party in its own process, which measures on request."""

import importlib
import multiprocessing
import os
import traceback
from typing import Any

from benchmarks.bench.sample import Samples, run_python

DEADLINE_S = 300.0

_spawn = multiprocessing.get_context("spawn")


class Child:
    """Runs one party's measurements, one call at a time. Lives in the process that prints the results."""

    def __init__(self, party: str, *arguments: object) -> None:
        """Start creating a party (`module:class`, imported by the child only) without waiting for it: see `ready`."""
        self._name = party
        self._link, theirs = _spawn.Pipe()
        self._process = _spawn.Process(target=_serve, args=(theirs, party, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        self._answer()

    def call(self, method: str, *arguments: object, beside_python: bool = False) -> Samples:
        """Call a measurement. With `beside_python` this process runs Python until the answer arrives: for the child it
        acts as an engine's main thread."""
        self._link.send((method, arguments))
        while beside_python and not self._link.poll(0):
            run_python(0.0002)
        answer: Samples = self._answer()
        return answer

    def _answer(self) -> Any:
        if not self._link.poll(DEADLINE_S):
            raise TimeoutError(f"{self._name} has not answered for {DEADLINE_S:.0f} s")
        try:
            answer = self._link.recv()
        except EOFError:
            raise RuntimeError(f"{self._name} has ended without an answer") from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def end(self) -> None:
        """End the process, with SIGKILL if need be: a peer's threads may not end by themselves."""
        try:
            self._link.send(None)
            self._process.join(15)
        except OSError:
            pass
        self._process.kill()


def _serve(link: Any, name: str, arguments: tuple[object, ...]) -> None:
    try:
        module, _, attribute = name.partition(":")
        party = getattr(importlib.import_module(module), attribute)(*arguments)
        link.send(None)
        while (call := link.recv()) is not None:
            method, values = call
            link.send(getattr(party, method)(*values))
        party.close()
    except BaseException:
        link.send(RuntimeError(f"{name} failed\n{traceback.format_exc()}"))
    finally:
        link.close()
        os._exit(0)
