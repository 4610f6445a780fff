# SPDX-License-Identifier: Apache-2.0
"""Jobs over many entries: in threads, with a progress line, and interruptible by Ctrl-C at any time."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from functools import partial
from typing import TextIO, TypeVar

import typer

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

INTERRUPTED = 130
"""The exit status after Ctrl-C, as for any program in a shell."""

_TICK_S = 0.25
_FIRST_S = 0.2
_REDRAWN_S = 0.5
_REPEATED_S = 5.0
_FINISH_S = 5.0


class Progress:
    """A progress line on standard error: redrawn in place on a terminal, elsewhere printed every five seconds. The
    first one appears after a fifth of a second. For the command's main thread."""

    def __init__(self, text: Callable[[float], str], stream: TextIO | None = None) -> None:
        """`text` makes the line from the seconds that have passed."""
        self._text = text
        self._stream = stream or sys.stderr
        self._redraws = self._stream.isatty()
        self._began = time.monotonic()
        self._due_at = self._began + _FIRST_S
        self._drawn = False

    def tick(self) -> None:
        now = time.monotonic()
        if now >= self._due_at:
            self._due_at = now + (_REDRAWN_S if self._redraws else _REPEATED_S)
            self._drawn = True
            line = self._text(now - self._began)
            self._stream.write(f"\r\033[K{line}" if self._redraws else f"{line}\n")
            self._stream.flush()

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self._began

    def clear(self) -> None:
        """Clear the terminal's line for what is printed next."""
        if self._drawn and self._redraws:
            self._stream.write("\r\033[K")
            self._stream.flush()


def results(
    items: Iterable[_Item], job: Callable[[_Item], _Result], threads: int, tick: Callable[[], None]
) -> Generator[_Result]:
    """What `job` returns for each item, as one of `threads` completes it, in no particular order.

    `items` is iterated on its own thread, not far ahead. `tick` is called on the caller's thread several times a
    second, whatever the jobs do, so that Ctrl-C acts at once. If the caller ends this early, no more jobs are begun,
    and running ones are waited for, for five seconds at most. An error of `items` or of a job ends it, too.
    """
    todo: queue.Queue[Callable[[], _Result] | None] = queue.Queue(4 * threads)
    done: queue.SimpleQueue[Future[_Result] | None] = queue.SimpleQueue()
    stopped = threading.Event()

    def feed() -> None:
        try:
            for item in items:
                if stopped.is_set():
                    return
                todo.put(partial(job, item))
        except Exception as error:
            failed: Future[_Result] = Future()
            failed.set_exception(error)
            done.put(failed)
        for _ in range(threads):
            todo.put(None)

    def work() -> None:
        while (task := todo.get()) is not None and not stopped.is_set():
            result: Future[_Result] = Future()
            try:
                result.set_result(task())
            except Exception as error:
                result.set_exception(error)
            done.put(result)
        done.put(None)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
    for thread in (threading.Thread(target=feed, daemon=True), *workers):
        thread.start()
    left = threads
    try:
        while left:
            tick()
            try:
                result = done.get(timeout=_TICK_S)
            except queue.Empty:
                continue
            if result is None:
                left -= 1
            else:
                yield result.result()
    finally:
        stopped.set()
        while not todo.empty():  # make room for the end markers, which waiting workers then get
            todo.get_nowait()
        for _ in workers:
            todo.put(None)
        deadline = time.monotonic() + _FINISH_S
        for thread in workers:
            thread.join(max(0.0, deadline - time.monotonic()))


def confirmed(question: str, otherwise: str = "Nothing was removed.") -> bool:
    """Ask, and return True for yes. Anything else prints `otherwise` and ends the command, with status 1, or with that
    of Ctrl-C."""
    try:
        yes, interrupted = typer.confirm(question), False
    except typer.Abort as abort:
        yes, interrupted = False, isinstance(abort.__context__, KeyboardInterrupt)
    if not yes:
        typer.echo(otherwise, err=True)
        raise typer.Exit(INTERRUPTED if interrupted else 1)
    return True
