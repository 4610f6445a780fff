# SPDX-License-Identifier: Apache-2.0
"""Limits on an engine that is started here, as far as `lmcache-ec doctor` can see: process 1, and `ulimit`."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from lmcache_ec.config import EncoderCacheConfig
from lmcache_ec.sizes import rounded_size

_HOSTS = {"systemd", "init"}
"""Programs that are process 1 of a host, and outlive an engine."""
_INITS = {"tini", "docker-init", "dumb-init", "catatonit"}
_SHELLS = {"sh", "bash", "dash", "ash", "zsh"}
_LIMITS = {"ulimit_v_bytes": resource.RLIMIT_AS, "ulimit_f_bytes": resource.RLIMIT_FSIZE}
_EXIT_S = 5
"""How long beyond `ec.drain_s` an engine waits for its store process."""


def seen(proc: Path = Path("/proc")) -> dict[str, str | int]:
    """The name of process 1, and the limits that are set, in bytes."""
    found: dict[str, str | int] = {"process_1": _process_1(proc)}
    for name, number in _LIMITS.items():
        soft, _ = resource.getrlimit(number)
        if soft != resource.RLIM_INFINITY:
            found[name] = soft
    return found


def notes(config: EncoderCacheConfig, proc: Path = Path("/proc")) -> Iterator[str]:
    """The consequences for an engine with this configuration. (A smaller LocalCPU is reported with memory.)"""
    first, found = _process_1(proc), seen(proc)
    writes = config.local_disk is not None or bool(config.remotes)
    if writes and first in _SHELLS:
        yield (
            f"process 1 is {first}: a container whose command is a shell may end before its engine's entries are "
            f"written; start the engine with exec, as process 1 or the only child of {', '.join(sorted(_INITS))}"
        )
    elif writes and first and first not in _HOSTS:
        grace_s = config.drain_s + _EXIT_S
        yield (
            f"this is a container (process 1 is {first}). Stopping an engine can take up to {grace_s:g} s longer than "
            f"vLLM needs (drain_s plus {_EXIT_S} s): allow for it in terminationGracePeriodSeconds or docker stop -t"
        )
    if config.local_disk is not None and (largest := found.get("ulimit_f_bytes")) is not None:
        yield f"no entry longer than {rounded_size(int(largest))} is written to local_disk: RLIMIT_FSIZE (ulimit -f)"


def _process_1(proc: Path) -> str:
    """Its name; empty if it cannot be seen."""
    try:
        return os.fsdecode((proc / "1" / "comm").read_bytes()).strip()
    except OSError:
        return ""
