# SPDX-License-Identifier: Apache-2.0
"""`make fuzz`: the parsers' tests with thousands of examples each, round after round, until the time is up."""

import argparse
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="begin no round after so long (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="of the first round")
    options = parser.parse_args()
    end, seed = time.monotonic() + options.seconds, options.seed
    while time.monotonic() < end:
        print(f"seed {seed}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-x", str(Path(__file__).parent), "-m", ""]
        done = subprocess.run([*command, "--hypothesis-profile=fuzz", f"--hypothesis-seed={seed}"], check=False)
        if done.returncode:
            return done.returncode
        seed += 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
