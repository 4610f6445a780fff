# SPDX-License-Identifier: Apache-2.0
"""Checks whether an engine's tiers can be opened, before its weights are loaded: a wrong password then shows early.

A separate process opens them as the store process will, with the same environment, and ends; so the caller imports no
client, and a store that hangs delays it by at most `_PATIENCE_S`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from lmcache_ec.store_process import environment
from lmcache_ec.tiers.base import Tier
from lmcache_ec.tiers.kinds import environment_of, kind_of
from lmcache_ec.tiers.opening import Opening, opened
from lmcache_ec.tiers.remote import Remote

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmcache_ec.config import EncoderCacheConfig

_PATIENCE_S = 5.0
"""A refusal takes a second or two. A store that takes longer is left to the store process, which waits for it."""

_NO_RESCAN_S = 3600.0

_REFUSED = 3
"""Exit status of a process that found a tier which refuses. The reason ends its output, after a zero byte: other code
in that interpreter may also have printed something."""


class _Question(msgspec.Struct):
    """The tiers to check. `remotes` may hold credentials, so it is sent through a pipe."""

    disk: str
    disk_bytes: int
    disk_free_bytes: int
    follows_epoch: bool
    remotes: list[Remote]


def why_refused(config: EncoderCacheConfig) -> str:
    """Why no engine could start with these tiers; empty if one could, or if the answer is late."""
    disk = str(config.local_disk) if config.local_disk else ""
    remotes = [remote for remote in config.remote_tiers if not kind_of(remote.url).no_probe]
    if not disk and not remotes:
        return ""
    epoch = config.namespace is None
    question = _Question(disk, config.max_local_disk_bytes, config.min_free_disk_bytes, epoch, remotes)
    try:
        answer = subprocess.run(
            [sys.executable, "-m", __name__],
            input=msgspec.msgpack.encode(question),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(environment_of(config.remotes)),
            timeout=_PATIENCE_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.rpartition(b"\0")[2].decode(errors="replace") if answer.returncode == _REFUSED else ""


def main() -> None:
    """Answer the question on standard input. Runs in the process that `why_refused` starts."""
    question = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=_Question)
    openings = list(map(Opening.of_remote, question.remotes))
    if question.disk:
        folder = Path(question.disk)
        disk = Opening.of_disk(folder, question.disk_bytes, question.disk_free_bytes, _NO_RESCAN_S)
        if question.follows_epoch:
            disk = replace(disk, open=partial(_disk_and_epoch, disk.open, folder))
        openings.insert(0, disk)
    opened(openings, lambda kind, text: None, _refused)
    os._exit(0)  # a store that does not answer may still block a thread


def _disk_and_epoch(tier: Callable[[], Tier], folder: Path) -> Tier:
    """ValueError also if the folder's file holds no epoch."""
    from lmcache_ec.tiers.disk_epoch import read_epoch

    disk = tier()
    read_epoch(folder)
    return disk


def _refused(problem: str) -> NoReturn:
    """Answer at once, without waiting for other stores."""
    sys.stdout.write(f"\0{problem}")
    sys.stdout.flush()
    os._exit(_REFUSED)


if __name__ == "__main__":
    main()
