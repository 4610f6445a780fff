# SPDX-License-Identifier: Apache-2.0
"""What a folder holds, and what of it was used least recently: one walk over it."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

from lmcache_ec.tiers.base import Listed
from lmcache_ec.tiers.disk_account import FolderAccount
from lmcache_ec.tiers.disk_files import entries_in, is_namespace, scan, shards_of, sweep

_VICTIMS = 16_384
"""Entries a survey remembers, about 300 bytes each."""


class Survey:
    """One walk over the folder: how much it holds, and what of it was used least recently. Belongs to one thread.

    Writes under way are counted first: what is published before its shard is walked is then seen in one of the two
    places at least, and what is reserved later the account itself knows.
    """

    def __init__(self, root: Path, account: FolderAccount, own: str = "") -> None:
        """`own` is a namespace that is ours for certain; others may be folders of strangers that happen to fit."""
        self._root = root
        self._since = account.read()
        self.unseen = {folder.name for folder in scan(root) if is_namespace(folder.name)}
        self._writing: set[tuple[int, int]] = set()
        self._least = self._most = 0
        self._found: list[tuple[int, str]] = []
        self._cutoff: int | None = None
        self._seen = 0
        self._cut = False
        for namespace in self.unseen:
            for length, status in sweep(root / namespace / ".tmp", ours=namespace == own):
                self._writing.add((status.st_dev, status.st_ino))
                self._least += status.st_size
                self._most += max(length, status.st_size)

    def walk(self, namespace: str) -> Iterator[Listed]:
        """Everything in one namespace."""
        self.unseen.discard(namespace)
        for shard in shards_of(self._root / namespace):
            for path, digest, status in entries_in(shard):
                self._add(path, status)
                yield Listed(digest, status.st_size, status.st_mtime)

    def sample(self, at_most: int | None) -> None:
        """All namespaces, shard by shard in an order drawn by chance, until `at_most` entries have been seen."""
        shards = [shard for namespace in self.unseen for shard in shards_of(self._root / namespace)]
        random.shuffle(shards)
        for shard in shards:
            for path, _, status in entries_in(shard):
                if self._seen == at_most:
                    self._cut = True
                    return
                self._add(path, status)

    def oldest(self) -> list[tuple[int, str]]:
        """Time of last use (ns) and path of the least recently used entries, in this order."""
        self._found.sort()
        return self._found[: max(1, self._seen // 16) if self._cut else _VICTIMS]

    def settle(self, account: FolderAccount) -> None:
        """Correct the account, if the whole folder has been seen."""
        if not self._cut:
            account.settle(self._since, self._least, self._most)

    def _add(self, path: str, status: os.stat_result) -> None:
        self._seen += 1
        if (status.st_dev, status.st_ino) in self._writing:
            return  # counted as a write under way
        self._least += status.st_size
        self._most += status.st_size
        used = status.st_mtime_ns
        if self._cutoff is None or used < self._cutoff:
            self._found.append((used, path))
            if len(self._found) == 2 * _VICTIMS:
                self._found.sort()
                del self._found[_VICTIMS:]
                self._cutoff = self._found[-1][0]
