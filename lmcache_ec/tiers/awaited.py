# SPDX-License-Identifier: Apache-2.0
"""A tier that could not be opened when the engine started, and is opened by the first call that reaches its store."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from lmcache_ec.key import EncoderCacheKey, EntryName
from lmcache_ec.signing import SigningKey
from lmcache_ec.tiers.base import Answers, Held, Listed, NamespaceUse, Tier, TierError, TierUnreachable
from lmcache_ec.tiers.catalog import Catalog


class AwaitedTier(Tier):
    """Stands in for a tier whose store was unreachable: each call tries to open it; until one succeeds, all fail.

    `opening` is an attempt still in progress; it has to end before another one is made.
    Runs in the store process, on the tier's own threads; `_lock` lets one of them try at a time.
    """

    def __init__(self, name: str, opener: Callable[[], Tier], opening: Future[Tier] | None = None) -> None:
        self.name = name
        self._opener = opener
        self._opening = opening
        self._tier: Tier | None = None
        self._lock = threading.Lock()

    @property
    def stored_bytes(self) -> int | None:
        return self._opened().stored_bytes

    def get_into(self, key: EntryName, buffer: memoryview) -> int | None:
        return self._opened().get_into(key, buffer)

    def get_each_into(self, wanted: Sequence[tuple[EncoderCacheKey, memoryview]]) -> Answers:
        return self._opened().get_each_into(wanted)

    def contains_each(self, keys: Sequence[EntryName]) -> Answers:
        return self._opened().contains_each(keys)

    def put(self, key: EncoderCacheKey, data: memoryview) -> bool:
        return self._opened().put(key, data)

    def contains(self, key: EntryName) -> int | None:
        return self._opened().contains(key)

    def held(self, key: EncoderCacheKey, most_bytes: int) -> Held | None:
        return self._opened().held(key, most_bytes)

    def replace(self, key: EncoderCacheKey, data: memoryview, held: Held) -> bool:
        return self._opened().replace(key, data, held)

    def check_writes(self) -> bool:
        return self._opened().check_writes()

    def delete(self, key: EntryName) -> bool:
        return self._opened().delete(key)

    def list(self, namespace: str) -> Iterator[Listed]:
        return self._opened().list(namespace)

    def catalog(self, namespace: str, signing: SigningKey | None = None) -> Catalog | None:
        return self._opened().catalog(namespace, signing)

    def announce(self) -> None:
        if self._tier is not None:
            self._tier.announce()

    def news(self, namespace: str) -> Sequence[bytes]:
        return self._opened().news(namespace)

    def namespaces(self) -> Iterator[NamespaceUse]:
        return self._opened().namespaces()

    def remove(self, namespace: str) -> int:
        return self._opened().remove(namespace)

    def born(self) -> str | None:
        return self._opened().born()

    def maintain(self) -> None:
        self._opened().maintain()

    def close(self) -> None:
        if self._tier is not None:
            self._tier.close()

    def _opened(self) -> Tier:
        with self._lock:
            if self._tier is None:
                try:
                    self._tier = self._attempt()
                except TierError:
                    raise
                except ValueError as error:
                    raise TierUnreachable(errno.EIO, str(error)) from None
            tier = self._tier
        self.batches, self.notice, self.read_only = tier.batches, tier.notice, tier.read_only  # these may change
        return tier

    def _attempt(self) -> Tier:
        if self._opening is None:
            return self._opener()
        if not self._opening.done():
            raise TierUnreachable(errno.ETIMEDOUT, "still being opened")
        opening, self._opening = self._opening, None
        return opening.result()
