# SPDX-License-Identifier: Apache-2.0
"""A disk that hangs, for store processes with this folder on their PYTHONPATH: the sweep of a namespace blocks while
its `.tmp` has a file `stuck` (see `benchmarks.testbed.core.stuck`); until the file is removed nothing is written there.

No real file could cause this, because the tier opens nothing that can block.
"""

import os
import sys
import time
from functools import wraps


def _hang_where_stuck() -> None:
    from lmcache_ec.tiers import disk_files

    sweep = disk_files.sweep

    @wraps(sweep)
    def sweep_or_hang(root: int, namespace: str) -> list[tuple[int, os.stat_result]]:
        while os.path.lexists(f"/proc/self/fd/{root}/{namespace}/.tmp/stuck"):
            time.sleep(0.01)
        return sweep(root, namespace)

    disk_files.sweep = sweep_or_hang


if sys.orig_argv[1:3] in (["-m", "lmcache_ec.store"], ["-m", "tests.warm_store"]):
    _hang_where_stuck()
