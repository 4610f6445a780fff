# SPDX-License-Identifier: Apache-2.0
"""Where the time of a small entry goes on disk, step by step: `python -m benchmarks.bench.pieces`.

The tier's own functions are timed as it calls them. What is left of the whole is the Python around them, and the
timing itself. For comparison the same put and get without that timing, the least that the design requires (see
`least.py`) and the floor, in turn.
"""

import argparse
import mmap
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from benchmarks.bench import least
from benchmarks.bench.disk import read, write
from benchmarks.bench.sample import WIDTH, Samples, in_any_order, noise, rows_of, timed
from lmcache_ec import entry
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.tiers import disk, disk_account, disk_files, disk_folder, disk_news

_WARM_UP = 5


class Step(NamedTuple):
    """A function that a put or a get calls once, and what it is for; `owner` is the module or class that has it."""

    what: str
    owner: Any
    name: str


STEPS = {
    "put": (
        Step("see that the path still leads to the folder", disk_folder.KeptRoot, "current"),
        Step("open the entry's folder, beneath the root", disk_files.Shard, "__init__"),
        Step("see that no entry has the name", disk, "find_in"),
        Step("open the temporaries' folder, beneath the root", disk, "open_or_make"),
        Step("make a temporary and lock it", disk_files.TemporaryFile, "__init__"),
        Step("take room from the folder's account", disk_account.FolderAccount, "reserve"),
        Step("write the bytes", disk, "write_full"),
        Step("mark as used", disk, "mark_used"),
        Step("give it the entry's name", disk, "publish"),
        Step("remove the temporary's name and close it", disk_files.TemporaryFile, "__exit__"),
        Step("add a line to the log for neighbours", disk_news.FolderNews, "announce"),
    ),
    "get": (
        Step("find the folder that is kept open", disk_folder.KeptRoot, "recent"),
        Step("open the file, beneath the root", disk_files, "_opened"),
        Step("read the bytes", disk_files, "_read_full"),
        Step("mark as used", disk_files, "mark_used"),
        Step("parse the header", entry, "_decoded"),
        Step("write the header again, to compare", entry, "_padded"),
        Step("digest", entry, "_digest"),
    ),
}


@contextmanager
def _watched(steps: Sequence[Step], taken: dict[str, float]) -> Iterator[None]:
    """Add up in `taken` the seconds that each of the steps takes."""

    def timing(step: Step) -> Callable[..., Any]:
        original = getattr(step.owner, step.name)

        def timed_step(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                taken[step.what] = taken.get(step.what, 0.0) + time.perf_counter() - began

        return timed_step

    with ExitStack() as stack:
        for step in steps:
            stack.enter_context(patch.object(step.owner, step.name, timing(step)))
        yield


class Pieces:
    """Puts and gets of one size in a tier of its own. One process, one thread."""

    def __init__(self, folder: Path, megabytes: float) -> None:
        self._tier = disk.DiskTier(folder / "tier", 1 << 40)
        self._spec = entry.TensorSpec(rows_of(megabytes), WIDTH, "BF16")
        self._length = entry.entry_length("0" * 64, self._spec)
        self._place = memoryview(mmap.mmap(-1, self._length))
        self._place[:] = noise(self._length)
        self._number = 0
        for shard in range(256):
            (self._tier.root / "bench" / f"{shard:02x}").mkdir(parents=True)
        first = EncoderCacheKey("bench", "0" * 64)
        entry.seal(self._place, first, self._spec, "bench")
        self._tier.put(first, self._place)  # the namespace has its folder of temporaries from here on
        self.whole: Samples = {}
        self.steps: dict[tuple[str, str], list[float]] = {}

    def measure(self) -> None:
        """One put and one get of each kind; ours twice, once with its steps timed."""
        self._number += 1
        key = EncoderCacheKey("bench", f"{self._number:064x}")
        entry.seal(self._place, key, self._spec, "bench")
        in_any_order(
            lambda: self._ours(key), lambda: self._divided(key), lambda: self._least(key), lambda: self._floor(key)
        )

    def _ours(self, key: EncoderCacheKey) -> None:
        self._timed("put", "ours", lambda: self._tier.put(key, self._place))
        self._timed("get", "ours", lambda: self._get(key))
        self._tier.delete(key)

    def _divided(self, key: EncoderCacheKey) -> None:
        for row, work in (("put", lambda: self._tier.put(key, self._place)), ("get", lambda: self._get(key))):
            taken: dict[str, float] = {}
            with _watched(STEPS[row], taken):
                self._timed(row, "divided", work)
            rest = self.whole[row, "divided"][-1] - sum(taken.values())
            for what, seconds in (*taken.items(), ("all else", rest)):
                self.steps.setdefault((row, what), []).append(seconds)
        self._tier.delete(key)

    def _least(self, key: EncoderCacheKey) -> None:
        root = str(self._tier.root)
        self._timed("put", "least", lambda: least.put(root, key, self._place))
        self._timed("get", "least", lambda: least.get(root, key, self._place))
        (self._tier.root / key.object_name).unlink()

    def _floor(self, key: EncoderCacheKey) -> None:
        path = str(self._tier.root / key.object_name)
        self._timed("put", "floor", lambda: write(path, f"{self._tier.root}/bench/.tmp/floor", self._place))
        self._timed("get", "floor", lambda: read(path, self._place))
        Path(path).unlink()

    def _get(self, key: EncoderCacheKey) -> None:
        if self._tier.get_into(key, self._place) != self._length:
            raise RuntimeError("what was put is not there")
        entry.verify(self._place, key)

    def _timed(self, row: str, whose: str, work: Callable[[], object]) -> None:
        timed(self.whole, row, whose, work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=0.5)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--folder", type=Path, help="where the tier is made (default: TMPDIR)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lmcache-ec-bench-", dir=options.folder) as folder:
        pieces = Pieces(Path(folder), options.megabytes)
        for _ in range(options.times + _WARM_UP):
            pieces.measure()
    for row in STEPS:
        print(f"\n| {row} | µs |\n|---|---|")
        for (of, what), seconds in pieces.steps.items():
            if of == row:
                print(f"| {what} | {_us(seconds[_WARM_UP:])} |")
        for whose in ("divided", "ours", "least", "floor"):
            print(f"| **{whose}** | {_us(pieces.whole[row, whose][_WARM_UP:])} |")


def _us(seconds: Sequence[float]) -> str:
    first, middle, third = (1e6 * value for value in statistics.quantiles(seconds, n=4))
    return f"{middle:.1f} ({first:.1f}, {third:.1f})"


if __name__ == "__main__":
    main()
