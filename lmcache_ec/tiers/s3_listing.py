# SPDX-License-Identifier: Apache-2.0
"""The objects of a namespace in a bucket, a page at a time, on the listing's own threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import TYPE_CHECKING

from lmcache_ec.tiers.s3_faults import reported

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import S3Store

_PAGE = 1000  # the most that S3 returns
_LISTERS = 16


def pages(client: S3Store, namespace: str) -> Iterator[Sequence[ObjectMeta]]:
    """The objects of a namespace as pages arrive: the first alone, the others for all `<aa>` at once.

    Does not rely on any order: what was on the first page is left out of the second listing.
    """
    with reported(f"list {namespace}"):
        first = next(client.list(namespace, chunk_size=_PAGE), ())
    yield first
    if len(first) < _PAGE:
        return
    seen = {found["path"] for found in first}
    streams = (client.list(f"{namespace}/{part:02x}", chunk_size=_PAGE) for part in range(256))
    pool = ThreadPoolExecutor(_LISTERS, "s3-list")
    try:
        pending = {pool.submit(next, stream, ()): stream for stream in islice(streams, _LISTERS)}
        while pending:
            for done in wait(pending, return_when=FIRST_COMPLETED).done:
                page: Sequence[ObjectMeta] = _page(done, namespace)
                stream = pending.pop(done)
                following = stream if page else next(streams, None)
                if following is not None:
                    pending[pool.submit(next, following, ())] = following
                yield [found for found in page if found["path"] not in seen]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # do not wait for unwanted pages


def _page(done: Future[Sequence[ObjectMeta]], namespace: str) -> Sequence[ObjectMeta]:
    with reported(f"list {namespace}"):
        return done.result()
