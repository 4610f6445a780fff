# SPDX-License-Identifier: Apache-2.0
"""Redis compared with a bare socket, pair by pair, over many connections: `python -m benchmarks.bench.redis_pairs`.

How fast the kernel moves bytes varies from connection to connection. So both measurements of a pair use the same
connection, and there are many pairs.
"""

import argparse
import mmap
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.bench.remotes import BareRedis, open_at, socket_of
from benchmarks.bench.sample import WIDTH, Samples, in_any_order, noise, rows_of, timed
from benchmarks.testbed.servers.redis import redis_server
from lmcache_ec import entry
from lmcache_ec.key import EncoderCacheKey

_WARM_UP = 5
_WHOSE = ("floor", "least", "ours")


def pairs(url: str, megabytes: float, count: int) -> Samples:
    """Seconds by row and party, over one new connection."""
    spec, key = entry.TensorSpec(rows_of(megabytes), WIDTH, "BF16"), EncoderCacheKey("bench", "0" * 64)
    place = memoryview(mmap.mmap(-1, entry.entry_length(key.identifier, spec)))
    place[:] = noise(len(place))
    entry.seal(place, key, spec, "bench")
    tier = open_at(url)
    bare = BareRedis(socket_of(tier))
    samples: Samples = {}

    def read() -> None:
        if tier.get_into(key, place) != len(place):
            raise RuntimeError("what was put is not there")
        entry.verify(place, key)

    def ours() -> None:
        timed(samples, "put", "ours", lambda: tier.put(key, place))
        timed(samples, "get", "ours", read)
        tier.delete(key)

    def least() -> None:
        timed(samples, "put", "least", lambda: bare.put_if_missing("floor", place))
        timed(samples, "get", "least", lambda: bare.get_digest("floor", place))
        bare.delete("floor")

    def floor() -> None:
        timed(samples, "put", "floor", lambda: bare.put("floor", place))
        timed(samples, "get", "floor", lambda: bare.get("floor", place))
        bare.delete("floor")

    for _ in range(_WARM_UP + count):
        in_any_order(ours, least, floor)
    tier.close()
    return {name: values[_WARM_UP:] for name, values in samples.items()}


def _summary(row: str, taken: Sequence[Samples]) -> str:
    """Medians and quartiles, in ms and as the ratio to the floor of the same pair."""
    cells = []
    for whose in _WHOSE:
        seconds = [second for samples in taken for second in samples[row, whose]]
        floors = [second for samples in taken for second in samples[row, "floor"]]
        first, middle, third = (1e3 * value for value in statistics.quantiles(seconds, n=4))
        low, ratio, high = statistics.quantiles([a / b for a, b in zip(seconds, floors, strict=True)], n=4)
        cells.append(f"{whose} {middle:.3f} ms ({first:.3f}, {third:.3f}), {ratio:.2f} x ({low:.2f}, {high:.2f})")
    return f"{row}: {'; '.join(cells)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=30)
    parser.add_argument("--pairs", type=int, default=20, help="over each of them")
    parser.add_argument("--megabytes", type=float, default=2.75)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder) / "redis") as server:
        taken = [pairs(server.url, options.megabytes, options.pairs) for _ in range(options.connections)]
    taken.sort(key=lambda samples: statistics.median(samples["get", "floor"]))
    third = max(1, len(taken) // 3)
    for title, some in (
        ("all connections", taken),
        ("the third that reads fastest", taken[:third]),
        ("the third that reads slowest", taken[-third:]),
    ):
        print(f"{title}\n  {_summary('get', some)}\n  {_summary('put', some)}")


if __name__ == "__main__":
    main()
