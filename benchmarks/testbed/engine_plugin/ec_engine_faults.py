# SPDX-License-Identifier: Apache-2.0
"""A vLLM plugin for the tests that makes a rank's copies late or fail. Off unless EC_TEST_FAULTS names a folder.

Files in that folder are the faults, checked at each copy:

hold         while it exists, saves and later reports wait on a thread, in order, and the engine carries on: this acts
             like a device's copy stream on a machine without a device
fail-<rank>  the next load of this rank raises; the file is then removed
"""

import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ec_engine_plugin import after_import

FAULTS = "EC_TEST_FAULTS"
_GLANCE_S = 0.002


def break_copies() -> None:
    """vllm.general_plugins entry point."""
    if folder := os.environ.get(FAULTS):
        after_import("lmcache_ec.adapters.vllm.worker", lambda module: give_faults(module, Path(folder)))


def give_faults(module: ModuleType, folder: Path) -> None:
    initialize = module.WorkerSide.__init__

    def with_faults(self: Any, rank: int, copier: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, rank, FaultyCopier(copier, rank, folder), *args, **kwargs)

    module.WorkerSide.__init__ = with_faults


class FaultyCopier:
    """Wraps a rank's own copier. Calls that arrive while something is held are queued behind it, to keep their order.

    Called from the forward pass, like any copier; a separate thread carries out the held calls.
    """

    def __init__(self, copier: Any, rank: int, folder: Path) -> None:
        self._copier = copier
        self._hold = folder / "hold"
        self._fail = folder / f"fail-{rank}"
        self._late: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="late-copies", daemon=True)
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        """Everything else is the wrapped copier's."""
        return getattr(self._copier, name)

    def load(self, source: Any) -> Any:
        try:
            self._fail.unlink()
        except FileNotFoundError:
            return self._copier.load(source)
        raise RuntimeError("this load was made to fail")

    def save(self, source: Any, destination: Any) -> None:
        self._do(lambda: self._copier.save(source, destination))

    def finish(self, done: Callable[[], None]) -> None:
        self._do(lambda: self._copier.finish(done))

    def close(self) -> None:
        self._late.put(None)
        self._thread.join()
        self._copier.close()

    def _do(self, action: Callable[[], object]) -> None:
        if self._late.unfinished_tasks or self._hold.exists():
            self._late.put(action)
        else:
            action()

    def _run(self) -> None:
        import torch

        with torch.inference_mode():  # as in the forward pass, which made these views of the arena
            while (action := self._late.get()) is not None:
                while self._hold.exists():
                    time.sleep(_GLANCE_S)
                action()
                self._late.task_done()
