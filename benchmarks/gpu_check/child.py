# SPDX-License-Identifier: Apache-2.0
"""A rank in its own process, on the same card."""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.gpu_check.card import Card, open_card
from benchmarks.gpu_check.payload import output, spec_of_tensor
from benchmarks.gpu_check.rig import PATIENCE_S, LocalRank
from lmcache_ec.adapters.vllm.orders import Orders
from lmcache_ec.entry import TensorSpec

_spawn = multiprocessing.get_context("spawn")


class ChildRank:
    """Receives names and shapes of a step's outputs, and generates the bytes itself (`payload.output`)."""

    def __init__(self, opener: str, engine: str, number: int) -> None:
        self._link, theirs = _spawn.Pipe()
        self.process = _spawn.Process(target=_serve, args=(theirs, opener, engine, number), daemon=True)
        self.process.start()
        theirs.close()
        self._answer()

    def step(self, orders: Orders, outputs: Mapping[str, torch.Tensor]) -> None:
        self.encode(orders, {name: spec_of_tensor(tensor) for name, tensor in outputs.items()})

    def encode(self, orders: Orders, specs: Mapping[str, TensorSpec]) -> None:
        """A step that returns once its copies are queued."""
        self._ask("step", orders, dict(specs))

    def loaded(self, identifier: str) -> torch.Tensor:
        return torch.frombuffer(bytearray(self._ask("loaded", identifier)), dtype=torch.uint8)

    def close(self) -> None:
        if self.process.is_alive():
            self._ask("close")
            self.process.join(PATIENCE_S)
        self._link.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE_S)

    def _ask(self, *question: Any) -> Any:
        self._link.send(question)
        return self._answer()

    def _answer(self) -> Any:
        if not self._link.poll(PATIENCE_S):
            raise RuntimeError(f"no answer from rank process {self.process.pid}")
        answer = self._link.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _serve(link: Any, opener: str, engine: str, number: int) -> None:
    with open_card(opener) as card:
        rank = LocalRank(card, engine, number)
        link.send(None)
        while True:
            what, *arguments = link.recv()
            try:
                link.send(_act(card, rank, what, *arguments))
            except Exception as error:
                link.send(error)
            if what == "close":
                return


def _act(card: Card, rank: LocalRank, what: str, *arguments: Any) -> Any:
    match what, arguments:
        case "step", (orders, specs):
            rank.step(orders, {name: output(card, name, spec) for name, spec in specs.items()})
        case "loaded", (identifier,):
            loaded = rank.loaded(identifier)
            return ctypes.string_at(loaded.data_ptr(), loaded.nbytes)
        case "close", ():
            rank.close()
    return None
