# SPDX-License-Identifier: Apache-2.0
"""Files that do not match their names, and loads that fail: pictures are encoded again, and entries repaired."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.harness import Served, Truth

GOOD = (1, 2, 3, 4)
TRUNCATED, EMPTY, FLIPPED, MISLABELLED, SWAPPED, OTHER, DELETED = BEFORE = range(5, 12)
LATE_TRUNCATED, LATE_FLIPPED, LATE_DELETED = LATE = range(12, 15)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.fixture(scope="module")
def served(truth: Truth, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("bad")
    disk = folder / "disk"
    truth.store(disk, [*GOOD, *BEFORE, *LATE])
    path = {seed: truth.path(disk, seed) for seed in BEFORE}
    truncate(path[TRUNCATED])
    path[EMPTY].write_bytes(b"")
    flip(path[FLIPPED], -1)
    flip(path[MISLABELLED], path[MISLABELLED].read_bytes().index(truth.identifiers[MISLABELLED].encode()))
    one, other = path[SWAPPED].read_bytes(), path[OTHER].read_bytes()
    path[SWAPPED].write_bytes(other)
    path[OTHER].write_bytes(one)
    path[DELETED].unlink()
    with Served(truth, folder) as served:
        yield served.ready()


@pytest.mark.fault(
    "a file is damaged before or after a look-up finds it",
    "LocalDisk",
    "a miss; then a good file is written",
    recovery="all is written",
    engine="alive",
)
def test_a_file_damaged_before_or_after_it_was_found_is_a_miss_and_is_replaced_by_a_good_one(served: Served) -> None:
    assert served.ask(GOOD[0]) == set()
    truncate(served.truth.path(served.disk, LATE_TRUNCATED))
    flip(served.truth.path(served.disk, LATE_FLIPPED), 5000)
    served.truth.path(served.disk, LATE_DELETED).unlink()  # the presence filter still has it
    damaged = {*BEFORE, *LATE}
    assert served.ask(*sorted(damaged)) == damaged
    served.until("all is written", lambda book, _: book["writes"] == len(damaged))
    book = served.settle()
    assert book["fetch_misses"] == len(damaged - {DELETED})
    status = served.status()
    assert status is not None
    assert status["store"]["disk_corrupt"] == len(damaged - {DELETED, LATE_DELETED})
    assert served.stored() == served.truth.names({*GOOD, *damaged})
    assert served.ask(*sorted(damaged)) == set()


@pytest.mark.fault(
    "a load fails", "worker", "encoded in the same step; no pin is left", recovery="nothing is held", engine="alive"
)
def test_a_load_that_fails_is_replaced_by_an_encode_and_leaves_no_pin(served: Served) -> None:
    served.ask(*GOOD)
    before = served.settle()
    fault = served.fail_next_load()
    assert served.ask(GOOD[1]) == {GOOD[1]}
    assert not fault.exists()
    served.fail_next_load()
    assert len(served.ask(*GOOD, together=True)) == 1
    after = served.settle()
    assert after["loads_failed"] - before["loads_failed"] == 2
    assert served.ask(*GOOD) == set()
