# SPDX-License-Identifier: Apache-2.0
"""The presence filter with ten million keys: cost of a listing, memory, error rate and speed.

    python -m benchmarks.presence [--keys 10000000]

Takes half a minute for ten million. The keys come from a generator; a tier's own share of a listing is larger.
The first listing does not know the count; the second does, and drops a tenth of the keys, which were deleted.
"""

import argparse
import os
import random
import time
from collections.abc import Iterator
from itertools import islice

from lmcache_ec.presence import PresenceFilter, PresenceWriter

_CHUNK = 4096
_ASKED = 500_000


def digests(seed: int, count: int) -> Iterator[bytes]:
    """Cheap digests, the same for each seed."""
    chance = random.Random(seed)
    for begin in range(0, count, _CHUNK):
        chunk = chance.randbytes(32 * _CHUNK)
        for number in range(min(_CHUNK, count - begin)):
            yield chunk[32 * number : 32 * (number + 1)]


def mib(writer: PresenceWriter) -> float:
    return os.fstat(writer.fd).st_blocks * 512 / (1 << 20)


def listing(writer: PresenceWriter, what: str, count: int) -> None:
    began = time.process_time()
    for _ in digests(1, count):
        pass
    generated = time.process_time() - began
    with writer.listing("disk") as add:
        began = time.process_time()
        for key in digests(1, count):
            add(key)
        taken, most, began = time.process_time() - began - generated, mib(writer), time.process_time()
    swap = time.process_time() - began
    each = taken / max(1, count) * 1e6
    print(f"{what} {count} keys in {taken:.1f} s of CPU, {each:.2f} us each; swapped in {swap * 1e3:.0f} ms")
    print(f"  takes                {mib(writer):.1f} MiB, {most:.1f} MiB while listing")


def look_up(reader: PresenceFilter, seed: int, count: int) -> tuple[float, float]:
    """Seconds per look-up, and the share of "maybe" answers. The keys are spread over the whole memory."""
    keys = list(digests(seed, count))
    began = time.perf_counter()
    maybe = sum(map(reader.may_contain, keys))
    return (time.perf_counter() - began) / count, maybe / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=10_000_000)
    count = parser.parse_args().keys
    left = count - count // 10
    writer = PresenceWriter.create(["disk"])
    reader = PresenceFilter.attach(os.dup(writer.fd), ["disk"])
    for what, listed in (("first listing,       ", count), ("a tenth was deleted, ", left)):
        listing(writer, what, listed)
        hit, held = look_up(reader, 1, min(_ASKED, listed))
        miss, wrong = look_up(reader, 2, _ASKED)
        print(f"  a look               {hit * 1e6:.2f} us for a maybe, {miss * 1e6:.2f} us for a no")
        print(f"  maybe                {held:.2%} of what is there, {wrong:.3%} of what is not")
    deleted = list(islice(digests(1, count), left, count))
    print(f"  of what was deleted  {sum(map(reader.may_contain, deleted)) / max(1, len(deleted)):.3%} is still a maybe")


if __name__ == "__main__":
    main()
