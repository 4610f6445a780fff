# SPDX-License-Identifier: Apache-2.0
"""LocalDisk with a million entries: does anything become slow, and what is the cost?

    python -m benchmarks.million [--entries 1000000] [--folder /tmp]

Run by hand (some minutes, 4 GiB and a million inodes in `--folder`; removed afterwards). A tier puts the entries, 100
bytes each; then new processes open the folder, each for one measurement. The page cache is as the puts left it.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.tiers.disk import DiskTier

LENGTH = 100


def key(number: int) -> EncoderCacheKey:
    return EncoderCacheKey("million", str(number))


def seconds(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def resident_mib() -> float:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def fill(root: Path, entries: int) -> None:
    tier, data = DiskTier(root, entries * LENGTH), memoryview(bytes(LENGTH))
    taken = seconds(lambda: [tier.put(key(number), data) for number in range(entries)])
    print(f"put                          {entries} entries in {taken:.0f} s, {taken / entries * 1e6:.0f} us each")


def look_up(root: Path, entries: int) -> None:
    opened: list[DiskTier] = []
    opening = seconds(lambda: opened.append(DiskTier(root, entries * LENGTH)))
    [tier], buffer = opened, memoryview(bytearray(LENGTH))
    first = seconds(lambda: tier.get_into(key(entries // 2), buffer))
    miss = seconds(lambda: tier.get_into(key(-1), buffer))
    print(f"open, then first look-ups    {opening * 1e3:.2f} ms, hit {first * 1e3:.2f} ms, miss {miss * 1e3:.2f} ms")


def write(root: Path, entries: int) -> None:
    """The folder is full: victims are first found by sampling, later by the survey."""
    tier, data, before = DiskTier(root, entries * LENGTH), memoryview(bytes(LENGTH)), resident_mib()
    first = seconds(lambda: tier.put(key(entries), data))
    others = seconds(lambda: [tier.put(key(entries + number), data) for number in range(1, 101)]) / 100
    print(f"first put, nothing surveyed  {first * 1e3:.1f} ms, the next {others * 1e3:.2f} ms each")
    listing = seconds(lambda: print(f"listed                       {sum(1 for _ in tier.list('million'))} entries"))
    survey = seconds(tier.maintain)
    grown = resident_mib() - before
    print(f"list and survey              {listing:.1f} s + {survey:.2f} s, {grown:.0f} MiB more than when opened")
    later = seconds(lambda: [tier.put(key(entries + number), data) for number in range(101, 1101)]) / 1000
    print(f"put, evicting one each       {later * 1e3:.2f} ms, {tier.stored_bytes} of {tier.max_bytes} bytes held")
    victims = [path for _, path in tier._victims][:1000]
    floor = seconds(lambda: replace(root, victims, data)) / len(victims)
    print(f"the same without a tier      {floor * 1e3:.2f} ms: write, rename into a shard, unlink an entry as old")


def replace(root: Path, victims: list[str], data: memoryview) -> None:
    temporary = root / "temporary"
    for number, victim in enumerate(victims):
        path = root / key(-2 - number).object_name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        temporary.rename(path)
        Path(victim).unlink()


STAGES = {stage.__name__: stage for stage in (fill, look_up, write)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stage:
        STAGES[arguments.stage](arguments.folder, arguments.entries)
        return
    with tempfile.TemporaryDirectory(prefix="million-", dir=arguments.folder) as root:
        for stage in STAGES:
            command = [sys.executable, "-m", "benchmarks.million", "--stage", stage, "--folder", root]
            subprocess.run([*command, "--entries", str(arguments.entries)], check=True)


if __name__ == "__main__":
    main()
