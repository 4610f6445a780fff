# SPDX-License-Identifier: Apache-2.0
"""What an S3 tier does with its catalog: reads it, announces its writes, and lists for all replicas when it should."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from lmcache_ec.key import EncoderCacheKey, parse_object_name
from lmcache_ec.signing import SigningKey
from lmcache_ec.tiers.base import TierUnreachable
from lmcache_ec.tiers.catalog import Catalog
from lmcache_ec.tiers.s3_catalog import CatalogFolder, S3Catalog
from lmcache_ec.tiers.s3_clock import StoreClock
from lmcache_ec.tiers.s3_compactor import Compactor
from lmcache_ec.tiers.s3_faults import reported

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import S3Store

_PAGE = 1000
_REFUSED_S = 3600.0
"""How long after a refusal no new attempt is made."""


class Cataloged:
    """Runs on the threads of its tier: `wrote` on write threads, the rest on the scan thread. A compactor has its own
    thread, so that the catalog can be read meanwhile."""

    def __init__(
        self,
        client: S3Store,
        lister: S3Store,
        clock: StoreClock,
        check_writes: Callable[[], bool],
        aged: Callable[[ObjectMeta], bool],
    ) -> None:
        self._client = client
        self._lister = lister
        self._check_writes = check_writes
        self._aged = aged
        self._signing: SigningKey | None = None
        self._namespace = ""
        self._refused_until = 0.0
        self._compactor: Compactor | None = None
        self.catalog = S3Catalog(self._folder, self._sample)
        self.catalog.now = clock.now

    def wrote(self, key: EncoderCacheKey) -> None:
        self.catalog.wrote(key.namespace, key.digest)

    def read(self, namespace: str, signing: SigningKey | None, *, writes: bool) -> Catalog | None:
        """Errors are obstore's."""
        self._namespace, self._signing = namespace, signing
        self.catalog.writes = writes and time.monotonic() >= self._refused_until
        return self.catalog.read(namespace, signing)

    def maintain(self) -> None:
        """Begin a listing for all replicas if one is due. Raises the error of the previous one, if it failed."""
        self._list_for_all()
        self._raise_failure()

    def _list_for_all(self) -> None:
        compactor = self._compactor
        if compactor is not None and not compactor.running:
            self._compactor = None
            if compactor.failure is not None:
                raise compactor.failure
        elif compactor is not None or not self.catalog.due or not self.catalog.free:
            return
        else:
            self._begin()

    def _begin(self) -> None:
        """If writes, or conditional writes, are refused, each replica keeps listing for a while."""
        namespace, self._refused_until = self._namespace, time.monotonic() + _REFUSED_S
        try:
            with reported("list for the catalog", writes=True):
                if not self._check_writes():
                    return
                compactor = Compactor(
                    self._folder(namespace), partial(self._pages, namespace), self.catalog.pace, self._signing
                )
                if compactor.take(self.catalog.look):
                    self._compactor = compactor
                    compactor.start()
        except TierUnreachable:  # it was not refused: the next refresh tries again
            self._refused_until = 0.0
            raise
        self._refused_until = 0.0

    def announce(self) -> None:
        self.catalog.announce(self._signing)
        self._raise_failure()

    def _raise_failure(self) -> None:
        """The catalog is still read, and what could not be announced is retried with the next refresh."""
        if self.catalog.failure is not None:
            with reported(f"announce in the catalog of {self._namespace} what was written here", writes=True):
                raise self.catalog.failure

    def stop(self) -> None:
        if self._compactor is not None:
            self._compactor.stop()

    def _folder(self, namespace: str) -> CatalogFolder:
        return CatalogFolder(self._client, self._lister, namespace)

    def _sample(self, namespace: str) -> int:
        return len(next(self._pages(namespace, 0), ()))

    def _pages(self, namespace: str, number: int) -> Iterator[Sequence[bytes]]:
        for page in self._lister.list(f"{namespace}/{number:02x}", chunk_size=_PAGE):
            named = ((parse_object_name(found["path"]), found) for found in page)
            yield [entry.digest for entry, found in named if entry and not self._aged(found)]
