# SPDX-License-Identifier: Apache-2.0
"""`make soak`: a server over all tiers, or with --core only the store process and the tiers, under faults.

The last line is one JSON object: requests, faults by kind, wrong, failed, restarts, and leftovers. The exit status is 1
if an answer was wrong, a request failed, or something was left over.
"""

import argparse
import asyncio
import secrets
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.soak.tally import Tally


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1200, help="in all, set-up and checks included (default 1200)")
    parser.add_argument(
        "--seed", type=int, default=secrets.randbelow(1 << 32), help="the same one repeats the same plan"
    )
    parser.add_argument("--honest", action="store_true", help="no client that lies: a name means one picture for ever")
    parser.add_argument("--steady", action="store_true", help="weights never change")
    parser.add_argument("--servers", nargs="+", default=[], help="begin with servers of these kinds (see server.py)")
    parser.add_argument("--core", action="store_true", help="without an engine: the store process and the tiers alone")
    parser.add_argument("--faults", type=int, default=10_000, help="with --core: stop after so many (default 10000)")
    parser.add_argument(
        "--keep", action="store_true", help="leave the folder with logs and entries (done if it failed)"
    )
    options = parser.parse_args()
    tally = Tally(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="lmcache-ec-soak-"))
    tally.report(f"seed {options.seed}, in {folder}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the child processes, as on Ctrl-C
    finished = False
    try:
        faults = _core(options, folder, tally) if options.core else _engines(options, folder, tally)
        finished = True
    except KeyboardInterrupt:
        return 130
    finally:
        if options.keep or not (finished and tally.good):
            tally.report(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    print(tally.line("core" if options.core else "engines", Counter(faults)))
    return 0 if tally.good else 1


def _engines(options: argparse.Namespace, folder: Path, tally: Tally) -> dict[str, int]:
    from benchmarks.soak.engines import Options, soak

    plan = Options(options.seed, options.seconds, options.honest, options.steady, options.servers, folder)
    return asyncio.run(soak(plan, tally))


def _core(options: argparse.Namespace, folder: Path, tally: Tally) -> dict[str, int]:
    from benchmarks.soak.core import soak

    return soak(options.seed, options.seconds, options.faults, folder, tally)


if __name__ == "__main__":
    sys.exit(main())
