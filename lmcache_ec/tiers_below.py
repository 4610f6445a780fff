# SPDX-License-Identifier: Apache-2.0
"""The tiers below memory as the scheduler side knows them: which there are, what they may have, news of them."""

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
    """Runs under the scheduler side's turn alone; no I/O. Sets of tiers are bits, in the order of the tiers."""

    def __init__(
        self,
        book: Book,
        complaints: Complaints,
        config: EncoderCacheConfig,
        engine: Engine,
        send: Callable[[Enter], bool],
    ) -> None:
        """`send` passes an order to the store process; False if it cannot be passed now."""
        self.names: list[str] = []
        self.presence: PresenceFilter | None = None
        """What they may have; None until a store process has opened them, and after `close`."""
        self._send = send
        self._namespace = ""  # whose entries are looked for
        self._listed = ""  # the one that the store process lists
        self._elsewhere = False  # whether the presence filter may still be about another one
        self._book = book
        self._complaints = complaints
        self._private = 1 if config.local_disk and config.remotes else 0  # the disk is the first tier
        self._read_only = config.read_only_tiers
        self._saves = engine.saves
        self._born: dict[int, str] = {}  # tier -> what it was called when it was last looked at

    def adopt(self, names: list[str], presence_fd: int, replaced: bool) -> None:
        """A store process has opened them. What one that it `replaced` had yet to write, this one writes."""
        self.close()
        self.presence = PresenceFilter.attach(presence_fd, names)
        self.names = names
        self._book.tiers = (1 << len(names)) - 1
        if replaced:
            for tier in range(len(names)):
                self.back(tier)

    # ---- what they may have

    def begin(self, namespace: str) -> None:
        """A store process begins with the listing of this namespace, whose entries are looked for."""
        self._namespace, self._elsewhere = namespace, False
        self.lists(namespace)

    def lists(self, namespace: str) -> None:
        """The store process lists this namespace, whatever is looked for."""
        self._listed = namespace

    def enter(self, home: Home) -> None:
        """Entries of this home are looked for from now on: what the tiers have of it is to be listed."""
        self._namespace = home.namespace
        self._elsewhere = home.persists and home.namespace != self._listed
        self.advance()

    def advance(self) -> None:
        """Once a scheduling pass: send what found the link to the store process full."""
        if self._elsewhere and self._listed != self._namespace and self._send(Enter(self._namespace)):
            self._listed = self._namespace

    def entered(self, namespace: str) -> None:
        """The presence filter is about this namespace from now on."""
        if namespace == self._namespace:
            self._elsewhere = False

    def candidates(self, digest: bytes) -> Sequence[int]:
        """The tiers that may have the entry of this key, as far as each is known, in their order."""
        presence = None if self._elsewhere else self.presence
        return range(len(self.names)) if presence is None else presence.candidates(digest)

    def may_have(self, digests: Sequence[bytes]) -> int:
        """The tiers that seem to have an entry of one of these keys, a bit each. None of them while that is unknown."""
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
        """The tiers that consumers reach. A disk is shared with them if nothing else is; what is configured never to be
        written counts only where nothing else is reached: it never has what is new."""
        reached = self._book.tiers & ~self._private
        return reached & ~self._read_only or reached

    def covers(self, tiers: int) -> bool:
        """Whether a consumer finds what these tiers have: the remotes, all that are written; without any, the disk."""
        return bool(self.reached) and tiers & self.reached == self.reached

    # ---- news of them

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
