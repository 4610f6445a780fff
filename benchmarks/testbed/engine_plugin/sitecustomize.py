# SPDX-License-Identifier: Apache-2.0
"""A disk that hangs, for store processes that find this folder on their PYTHONPATH: who looks over a namespace waits
while its `.tmp` has a file `stuck` (see `benchmarks.testbed.core.stuck`), and until then nothing is written there.

No real file does that to a tier which opens nothing that could wait.
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
