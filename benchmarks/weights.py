# SPDX-License-Identifier: Apache-2.0
"""The cost of digesting an encoder's weights, and of watching for calls that may change them.

    python -m benchmarks.weights [--rounds 5] [--device cuda]

Run by hand (a minute, 2 GiB). The tensors are those of a SigLIP-so400m tower in BF16: 0.86 GB in 437 tensors. On a
device each round ends when its digest is on the host. The computed device time follows from the bytes that its memory
moves (see adapters/vllm/tensor_digest.py).
"""

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from lmcache_ec.adapters.vllm import worker_calls
from lmcache_ec.adapters.vllm.tensor_digest import tensor_digest
from lmcache_ec.book import Book
from lmcache_ec.channel import Outcome
from lmcache_ec.entry import TensorSpec

HIDDEN, MLP, LAYERS = 1152, 4304, 27
CARDS_TB_S = {"H200": 4.8, "H100": 3.35, "A100 80 GB": 2.0, "L40S": 0.86, "L4": 0.3}
MOVED = 9.0
"""Bytes moved for each byte of weights."""


def tower(device: str) -> list[tuple[str, torch.Tensor]]:
    layer = [(3 * HIDDEN, HIDDEN), (3 * HIDDEN,), (HIDDEN, HIDDEN), (HIDDEN,), (MLP, HIDDEN), (MLP,), (HIDDEN, MLP)]
    shapes = [*layer, *[(HIDDEN,)] * 5]
    shapes = [(HIDDEN, 3, 14, 14), (HIDDEN,), (4096, HIDDEN), *shapes * LAYERS, (HIDDEN,), (HIDDEN,)]
    return [(str(n), torch.randn(shape, device=device).bfloat16()) for n, shape in enumerate(shapes)]


def median_ms(rounds: int, action: Callable[[], object]) -> float:
    taken = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        action()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[1:]) * 1e3


def digests(rounds: int, device: str) -> None:
    tensors = tower(device)
    size_gb = sum(tensor.nbytes for _, tensor in tensors) / 1e9
    print(f"{len(tensors)} tensors, {size_gb:.2f} GB, on {device}, medians of {rounds}")
    ours = median_ms(rounds, lambda: tensor_digest(tensors))
    print(f"  digest                             {ours:8.1f} ms, {ours / size_gb:7.1f} ms a GB")
    module = torch.nn.Module()
    for name, tensor in tensors:
        module.register_parameter(f"p{name}", torch.nn.Parameter(tensor, requires_grad=False))
    try:
        from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests
    except ImportError:
        return  # before 0.32
    theirs = median_ms(1, lambda: compute_tensor_digests(module))
    print(f"  vLLM's compute_tensor_digests      {theirs:8.1f} ms, {theirs / size_gb:7.1f} ms a GB")


def computed() -> None:
    print("on a device, computed")
    for card, tb_s in CARDS_TB_S.items():
        print(f"  {card:<34} {MOVED / tb_s:19.1f} ms a GB at {tb_s} TB/s")


def calls(rounds: int) -> None:
    """The cost of the watch per step: `execute_model` is a call to the workers like any other."""

    class Executor:
        def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> None:
            pass

    number = 100_000

    def steps() -> None:
        call = executor.collective_rpc
        for _ in range(number):
            call("execute_model", args=(None,))

    executor: Any = Executor()
    executor.vllm_config = SimpleNamespace(ec_transfer_config=None)
    bare = median_ms(rounds, steps)
    worker_calls.watch_class(Executor)
    watched = median_ms(rounds, steps)
    print(f"a step's call to the workers         {(watched - bare) / number * 1e6:8.0f} ns more")


def forgetting(rounds: int, entries: int = 4000) -> None:
    """The default of 4000 entries is about 2 GiB at 0.5 MB each."""
    spec = TensorSpec(1, 256, "BF16")

    def filled() -> Book:
        book = Book(64 << 20, 64 << 20, 1)
        book.open_all()
        for number in range(entries):
            place = book.reserve_save(str(number), spec, persist=False)
            assert place is not None
            book.send_save(place, number, 0)
            book.report(0, number, [(place.id, Outcome.COPIED, 1)], frozenset({1}))
            book.sealed(place.id, 1, True)
        return book

    books = [filled() for _ in range(rounds + 1)]
    taken = median_ms(rounds, lambda: books.pop().forget_all())
    print(f"to forget {entries} entries              {taken:8.1f} ms, once weights have changed")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    digests(given.rounds, given.device)
    computed()
    calls(given.rounds)
    forgetting(given.rounds)


if __name__ == "__main__":
    main()
