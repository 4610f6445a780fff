# SPDX-License-Identifier: Apache-2.0
"""How much a folder holds, and what in it was used least recently: one walk over it."""

import os
from collections.abc import Iterator
from random import SystemRandom

from lmcache_ec.tiers.base import Listed
from lmcache_ec.tiers.disk_account import FolderAccount
from lmcache_ec.tiers.disk_files import entries_in, namespaces_in, shards_of, sweep

_VICTIMS = 16_384
"""Entries a survey remembers, about 300 bytes each."""

_chance = SystemRandom()  # not `random`'s own generator, which vLLM seeds alike on all replicas


class Survey:
    """One walk over the folder: how much it holds, and what in it was used least recently. Belongs to one thread.

    `root` is always a descriptor of the folder: a caller that continues the walk later opens it anew. Writes in
    progress are counted first: an entry published before its shard is walked is then seen in at least one of the two
    places, and the account itself knows what is reserved later.
    """

    def __init__(self, root: int, account: FolderAccount) -> None:
        self._since = account.read()
        self.unseen = set(namespaces_in(root))
        self._writing: set[tuple[int, int]] = set()
        self._least = self._most = 0
        self._found: list[tuple[int, str]] = []
        self._cutoff: int | None = None
        self._seen = 0
        self._cut = False
        for namespace in self.unseen:
            for length, status in sweep(root, namespace):
                self._writing.add((status.st_dev, status.st_ino))
                self._least += status.st_size
                self._most += max(length, status.st_size)

    def walk(self, root: int, namespace: str) -> Iterator[Listed]:
        """Everything in one namespace."""
        self.unseen.discard(namespace)
        for shard in shards_of(root, namespace):
            for name, digest, status in entries_in(root, shard):
                self._add(name, status)
                yield Listed(digest, status.st_size, status.st_mtime)

    def sample(self, root: int, at_most: int | None) -> None:
        """All namespaces, shard by shard in random order, until `at_most` entries have been seen."""
        shards = [shard for namespace in self.unseen for shard in shards_of(root, namespace)]
        _chance.shuffle(shards)
        for shard in shards:
            for name, _, status in entries_in(root, shard):
                if self._seen == at_most:
                    self._cut = True
                    return
                self._add(name, status)

    def oldest(self) -> list[tuple[int, str]]:
        """Time of last use (ns) and name of the least recently used entries, oldest first."""
        self._found.sort()
        return self._found[: max(1, self._seen // 16) if self._cut else _VICTIMS]

    def settle(self, account: FolderAccount) -> None:
        """Correct the account, if the whole folder has been seen."""
        if not self._cut:
            account.settle(self._since, self._least, self._most)

    def _add(self, name: str, status: os.stat_result) -> None:
        self._seen += 1
        if (status.st_dev, status.st_ino) in self._writing:
            return  # already counted as a write in progress
        self._least += status.st_size
        self._most += status.st_size
        used = status.st_mtime_ns
        if self._cutoff is None or used < self._cutoff:
            self._found.append((used, name))
            if len(self._found) == 2 * _VICTIMS:
                self._found.sort()
                del self._found[_VICTIMS:]
                self._cutoff = self._found[-1][0]
