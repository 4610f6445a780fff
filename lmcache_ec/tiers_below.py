# SPDX-License-Identifier: Apache-2.0
"""The tiers below memory as the scheduler side knows them: their names, what they may have, news about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmcache_ec.book import Book
from lmcache_ec.channel import Enter
from lmcache_ec.complaints import Complaints
from lmcache_ec.config import EncoderCacheConfig
from lmcache_ec.engine import Engine
from lmcache_ec.presence import PresenceFilter
from lmcache_ec.weights import Home


class TiersBelow:
    """Runs only while the caller has the scheduler side's turn; no I/O. Sets of tiers are bit masks, in tier order."""

    def __init__(
        self,
        book: Book,
        complaints: Complaints,
        config: EncoderCacheConfig,
        engine: Engine,
        send: Callable[[Enter], bool],
    ) -> None:
        """`send` sends an order to the store process; False if it cannot be sent now."""
        self.names: list[str] = []
        self.presence: PresenceFilter | None = None
        """What the tiers may have; None until a store process has opened them, and after `close`."""
        self._send = send
        self._namespace = ""  # the one whose entries are looked for
        self._listed = ""  # the one that the store process lists
        self._elsewhere = False  # whether the presence filter may still be for another one
        self._book = book
        self._complaints = complaints
        self._private = 1 if config.local_disk and config.remotes else 0  # the disk is the first tier
        self._read_only = config.read_only_tiers
        self._saves = engine.saves
        self._born: dict[int, str] = {}  # tier -> the name of its content at the last check

    def adopt(self, names: list[str], presence_fd: int, replaced: bool) -> None:
        """A store process has opened the tiers. If it `replaced` another, it writes what that one had yet to write."""
        self.close()
        self.presence = PresenceFilter.attach(presence_fd, names)
        self.names = names
        self._book.tiers = (1 << len(names)) - 1
        if replaced:
            for tier in range(len(names)):
                self.back(tier)

    # ---- what they may have

    def begin(self, namespace: str) -> None:
        """A new store process lists this namespace, whose entries are looked for."""
        self._namespace, self._elsewhere = namespace, False
        self.lists(namespace)

    def lists(self, namespace: str) -> None:
        """The store process lists this namespace, even if entries of another are looked for."""
        self._listed = namespace

    def enter(self, home: Home) -> None:
        """From now on entries of this home are looked for: the store process must list its namespace."""
        self._namespace = home.namespace
        self._elsewhere = home.persists and home.namespace != self._listed
        self.advance()

    def advance(self) -> None:
        """Call once per scheduling pass: send what found the link to the store process full."""
        if self._elsewhere and self._listed != self._namespace and self._send(Enter(self._namespace)):
            self._listed = self._namespace

    def entered(self, namespace: str) -> None:
        """From now on the presence filter is for this namespace."""
        if namespace == self._namespace:
            self._elsewhere = False

    def candidates(self, digest: bytes) -> Sequence[int]:
        """The tiers, in order, that may have the entry of this key; a tier not known yet may have it."""
        presence = None if self._elsewhere else self.presence
        return range(len(self.names)) if presence is None else presence.candidates(digest)

    def may_have(self, digests: Sequence[bytes]) -> int:
        """The tiers that seem to have an entry of one of these keys, a bit each. None of them while this is unknown."""
        presence = None if self._elsewhere else self.presence
        if presence is None:
            return 0
        found = [any(presence.may_contain(digest, tier) for digest in digests) for tier in self.names]
        return sum(1 << number for number, held in enumerate(found) if held)

    def close(self) -> None:
        if self.presence is not None:
            self.presence.close()
            self.presence = None

    # ---- which of them count

    @property
    def reached(self) -> int:
        """The tiers that consumers reach. The disk counts only if there are no remotes; a tier configured as read-only
        counts only if no other is reached, since it never gets new entries."""
        reached = self._book.tiers & ~self._private
        return reached & ~self._read_only or reached

    def covers(self, tiers: int) -> bool:
        """Whether consumers find an entry in these tiers: all remotes written to or, without remotes, the disk."""
        return bool(self.reached) and tiers & self.reached == self.reached

    # ---- news about them

    def back(self, tier: int) -> None:
        """A tier that was left alone answers again."""
        if self._saves:
            self._book.tier_back(tier)

    def born(self, tier: int, name: str) -> None:
        """The name of a tier's content (see `Tier.born`): if it differs from before, the tier was emptied."""
        known, self._born[tier] = self._born.get(tier), name
        if known not in (None, name) and self._saves:
            self._complaints.warn(
                f"emptied-{tier}", f"{self.names[tier]} was emptied; what memory still holds is written to it again"
            )
            self._book.tier_emptied(tier)
