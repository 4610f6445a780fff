# SPDX-License-Identifier: Apache-2.0
"""Lists a namespace in full and writes the shards of its catalog. Who owns what: see s3_catalog.py.

Every write is conditional. If one is refused, or anything fails, the compactor ends: no delta is removed, and another
one begins anew. This holds after each step, so it may die after any step.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial

from lmcache_ec.presence import KEY_BYTES, SHARDS, shard_of
from lmcache_ec.signing import SigningKey
from lmcache_ec.tiers.filter_shard import encode
from lmcache_ec.tiers.s3_catalog import CatalogFolder, Look, Pace

_LISTERS = 8
_FREE = b""
"""The content of a released lease: its length shows in a listing."""

Pages = Callable[[int], Iterator[Sequence[bytes]]]
"""The digests of a shard, as pages of its listing arrive."""


class LeaseLost(Exception):
    """Another process lists, or has removed the catalog."""


class Compactor:
    """One listing of one namespace, on its own thread (`start`) and some for the requests.

    `failure` and `entries` may be read once it has ended.
    """

    def __init__(self, folder: CatalogFolder, pages: Pages, pace: Pace, signing: SigningKey | None) -> None:
        self.failure: Exception | None = None
        self.entries = 0
        self._folder = folder
        self._pages = pages
        self._pace = pace
        self._signing = signing
        self._lease: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="s3-compact", daemon=True)

    def take(self, look: Look) -> bool:
        """Take the lease seen in `look`. False if another process was faster. Errors are obstore's."""
        try:
            self._write_lease(None if look.lease is None else look.lease["e_tag"])
        except LeaseLost:
            return False
        return True

    def start(self) -> None:
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Make it end soon; unfinished work is abandoned."""
        self._stop.set()

    def _run(self) -> None:
        try:
            self.compact()
        except LeaseLost:
            pass
        except Exception as error:
            self.failure = error

    def compact(self) -> None:
        """List, write, remove. LeaseLost if another process has taken over."""
        look = self._folder.look()  # deltas written from here on stay
        pool = ThreadPoolExecutor(_LISTERS, "s3-compact")
        try:
            pending = {pool.submit(self._replace, number, look) for number in range(SHARDS)}
            while pending:
                done, pending = wait(pending, self._pace.lease_s / 4, FIRST_EXCEPTION)
                self._renew()
                self.entries += sum(one.result() for one in done)
        finally:
            self._stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
        if self.entries < self._pace.large // 2:
            self._folder.remove([f"shard/{number:02x}" for number in range(SHARDS)])
        self._folder.remove([f"delta/{name}" for name in look.deltas])
        self._write_lease(self._lease, _FREE)

    def _replace(self, number: int, look: Look) -> int:
        """List one shard and write it: the number of its entries."""
        keys = bytearray()
        for page in self._pages(number):
            if self._stop.is_set():
                raise LeaseLost
            keys += b"".join(digest[:KEY_BYTES] for digest in page)
        name, held = f"shard/{number:02x}", look.shards.get(number)
        count = len(keys) // KEY_BYTES
        data = encode(f"{self._folder.namespace}/{name}", count, shard_of(keys), self._signing)
        self._conditionally(partial(self._folder.write, name, data, None if held is None else held["e_tag"]))
        return count

    def _renew(self) -> None:
        self._write_lease(self._lease)

    def _write_lease(self, over: str | None, body: bytes | None = None) -> None:
        """Each write has a new body, so that each has its own version."""
        data = os.urandom(16) if body is None else body
        self._lease = self._conditionally(partial(self._folder.write, "writer", data, over))

    def _conditionally(self, write: Callable[[], str | None]) -> str | None:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            return write()
        except (AlreadyExistsError, PreconditionError, FileNotFoundError):
            raise LeaseLost from None
