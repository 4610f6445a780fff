# SPDX-License-Identifier: Apache-2.0
"""Whether the files of a checkpoint stayed the same from before an engine loaded its weights until they were
fingerprinted: otherwise the fingerprint may not match the weights that were loaded.

Both checks run in EngineCore's process, on its main thread. Files fetched from a hub meanwhile do not count as changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmcache_ec.fingerprint import FingerprintError, file_names

_State = tuple[int, int, int, int]
_before: dict[str, dict[Path, _State]] = {}


def note(model: str, folders: Sequence[Path]) -> None:
    """Call before the weights of `model` are loaded from these folders."""
    _before[model] = dict(_states(folders))


def replaced(model: str, folders: Sequence[Path]) -> Path | None:
    """A file that was there at `note` and has been replaced or removed since; None if there is no such file."""
    now = dict(_states(folders))
    return next((path for path, state in _before.get(model, {}).items() if now.get(path) != state), None)


def _states(folders: Sequence[Path]) -> Iterator[tuple[Path, _State]]:
    try:
        for folder in folders:
            for name in file_names(folder):
                status = os.stat(path := folder / name)
                yield path, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    except (OSError, FingerprintError):
        pass  # the fingerprint reports what is wrong
