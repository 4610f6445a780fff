# SPDX-License-Identifier: Apache-2.0
"""How long a forward pass is delayed, and how long an entry takes through hook, store process and next pass."""

import ctypes
import gc
import time
from pathlib import Path

import torch

from benchmarks.bench.example import Example
from benchmarks.bench.sample import BACK_TO_BACK_S, PASS_S, WIDTH, Samples, in_any_order, pause_of, timed, times_of
from benchmarks.bench.served import Engine, new_identifier
from lmcache_ec import arena


class Copies:
    """Runs in its own process, like an engine with one process: both sides of the connector on one thread.

    load_cpu         ours: bind and load. Floor: memcpy of the same bytes into a buffer allocated in the same way
    report           what the end of a step with a load adds, whatever the size of the load
    save             ours: bind, copy, hand over, report a step. Floor: memcpy
    save_on_cpu      CPU time of the thread within `save`: the rest is waiting for a core, as the store process runs too
    fetch_to_live    from the first hook to the pass that finds the entry
    fetch_on_arrival  the same from the request's arrival, 5 ms before its first pass; its passes are the deferred ones
    save_to_written  from the forward pass's copy to the pass that finds it written

    vLLM's example connector saves and loads files within the forward pass: its figures are in all four rows.
    """

    def __init__(self, folder: str, largest_rows: int) -> None:
        torch.set_num_threads(1)
        self._source = torch.randn(largest_rows, WIDTH).to(torch.bfloat16)
        self._engine = Engine(Path(folder) / "engine", 1 << 30, self._source)
        self._example = Example(folder)
        self._memory = arena.attach(arena.create(self._source.nbytes))
        self._place = torch.frombuffer(self._memory, dtype=torch.bfloat16).view_as(self._source)
        self._place.copy_(self._source)
        gc.collect()
        gc.freeze()  # as vLLM does once an engine has started

    def copies(self, rows: int, suffix: str) -> Samples:
        samples: Samples = {}
        for _ in range(times_of(rows)):
            self._copies(samples, rows, suffix)
        return samples

    def _copies(self, samples: Samples, rows: int, suffix: str) -> None:
        identifier, tensor, place = new_identifier(), self._source[:rows], self._place[:rows]
        save, load, held_up = f"save{suffix}", f"load_cpu{suffix}", Samples()

        def save_ours() -> None:
            saving = self._engine.save(identifier, rows, time.sleep, BACK_TO_BACK_S)
            samples.setdefault((save, "ours"), []).append(saving.held_up_s)
            samples.setdefault((f"save_on_cpu{suffix}", "ours"), []).append(saving.ran_s)

        def load_ours() -> None:
            loaded_s, report_s = self._engine.load(identifier, rows)
            samples.setdefault((load, "ours"), []).append(loaded_s)
            samples.setdefault((f"report{suffix}", "ours"), []).append(report_s)

        in_any_order(
            save_ours,
            lambda: timed(samples, save, "floor", lambda: copy_bytes(place, tensor)),
            lambda: timed(held_up, save, "example", lambda: self._example.save(identifier, tensor)),
        )
        stored = self._engine.stored(identifier, rows)
        in_any_order(
            load_ours,
            lambda: timed(samples, load, "floor", lambda: copy_bytes(torch.empty_like(stored), stored)),
            lambda: timed(held_up, load, "example", lambda: self._example.load(identifier, tensor)),
        )
        for row, way in ((save, f"save_to_written{suffix}"), (load, f"fetch_to_live{suffix}")):
            for name in (row, way):
                samples.setdefault((name, "example"), []).extend(held_up[row, "example"])
        self._engine.forget(identifier, everywhere=True)
        self._example.delete(identifier)

    def ways(self, rows: int, busy: bool) -> Samples:
        """With `busy` this process's main thread runs Python between its passes; otherwise it sleeps."""
        samples: Samples = {}
        pause, suffix = pause_of(busy), "_busy" if busy else ""
        for pass_s in [BACK_TO_BACK_S] * times_of(rows) + [PASS_S]:
            identifier = new_identifier()
            saving = self._engine.save(identifier, rows, pause, pass_s)
            self._engine.forget(identifier)
            live_s, fetch_passes = self._engine.fetch(identifier, rows, pause, pass_s)
            self._engine.forget(identifier)
            arrived_s, arrived_passes = self._engine.fetch(identifier, rows, pause, pass_s, step_s=PASS_S)
            self._engine.forget(identifier, everywhere=True)
            counted = pass_s == PASS_S
            whose = "passes" if counted else "ours"
            samples.setdefault((f"save_to_written{suffix}", whose), []).append(
                saving.passes if counted else saving.written_s
            )
            samples.setdefault((f"fetch_to_live{suffix}", whose), []).append(fetch_passes if counted else live_s)
            samples.setdefault((f"fetch_on_arrival{suffix}", whose), []).append(
                arrived_passes if counted else arrived_s
            )
        return samples

    def close(self) -> None:
        self._engine.close()


def copy_bytes(destination: torch.Tensor, source: torch.Tensor) -> None:
    ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.nbytes)
