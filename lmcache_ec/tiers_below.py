# SPDX-License-Identifier: Apache-2.0
"""The tiers below memory as the scheduler side knows them: their names, which of them consumers reach, news of them."""

from __future__ import annotations

from lmcache_ec.book import Book
from lmcache_ec.complaints import Complaints
from lmcache_ec.config import EncoderCacheConfig
from lmcache_ec.engine import Engine


class TiersBelow:
    """Runs under the scheduler side's turn alone; no I/O. Sets of tiers are bits, in the order of the tiers."""

    def __init__(self, book: Book, complaints: Complaints, config: EncoderCacheConfig, engine: Engine) -> None:
        self.names: list[str] = []
        self._book = book
        self._complaints = complaints
        self._private = 1 if config.local_disk and config.remotes else 0  # the disk is the first tier
        self._read_only = config.read_only_tiers
        self._saves = engine.saves
        self._born: dict[int, str] = {}  # tier -> what it was called when it was last looked at

    def adopt(self, names: list[str], replaced: bool) -> None:
        """A store process has opened them. What one that it `replaced` had yet to write, this one writes."""
        self.names = names
        self._book.tiers = (1 << len(names)) - 1
        if replaced:
            for tier in range(len(names)):
                self.back(tier)

    @property
    def reached(self) -> int:
        """The tiers that consumers reach. A disk is shared with them if nothing else is; what is configured never to be
        written counts only where nothing else is reached: it never has what is new."""
        reached = self._book.tiers & ~self._private
        return reached & ~self._read_only or reached

    def covers(self, tiers: int) -> bool:
        """Whether a consumer finds what these tiers have: the remotes, all that are written; without any, the disk."""
        return bool(self.reached) and tiers & self.reached == self.reached

    def back(self, tier: int) -> None:
        """One that was left alone is there again."""
        if self._saves:
            self._book.tier_back(tier)

    def born(self, tier: int, name: str) -> None:
        """What is in a tier is called `name` (see `Tier.born`): another one than before says that it was emptied."""
        known, self._born[tier] = self._born.get(tier), name
        if known not in (None, name) and self._saves:
            self._complaints.warn(
                f"emptied-{tier}", f"{self.names[tier]} was emptied; what memory still holds is written to it again"
            )
            self._book.tier_emptied(tier)
