# SPDX-License-Identifier: Apache-2.0
"""Opens tiers in parallel; one whose store cannot be reached is opened later, in the background."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lmcache_ec.mask import masked_url
from lmcache_ec.tiers.awaited import AwaitedTier
from lmcache_ec.tiers.base import Tier, TierUnreachable, message
from lmcache_ec.tiers.journal import Report
from lmcache_ec.tiers.kinds import kind_of, open_remote
from lmcache_ec.tiers.lane import Habits, lane_names
from lmcache_ec.tiers.remote import Lookup, Remote

_TIMEOUT_S = 8.0
"""Importing LMCache for one of its remotes takes up to 6.5 s of it."""


@dataclass(frozen=True, slots=True)
class Opening:
    """A tier to open. `what` is the prefix of the error that refuses it, `where` (without credentials) is the location
    of its store, `name` is the tier's."""

    what: str
    where: str
    name: str
    open: Callable[[], Tier]
    habits: Habits

    @classmethod
    def of_disk(cls, folder: Path, max_bytes: int, min_free_bytes: int, rescan_s: float) -> Opening:
        def disk() -> Tier:
            from lmcache_ec.tiers.disk import DiskTier

            return DiskTier(folder, max_bytes, min_free_bytes)

        return cls("local_disk", str(folder), "disk", disk, Habits(Lookup.CATALOG, rescan_s, local=True))

    @classmethod
    def of_remote(cls, remote: Remote) -> Opening:
        name = kind_of(remote.url).name
        return cls(
            name, masked_url(remote.url), name, partial(open_remote, remote), Habits(remote.lookup, remote.refresh_s)
        )


def opened(
    openings: Sequence[Opening], report: Report, refuse: Callable[[str], None], *, restarted: bool = False
) -> list[tuple[Tier, Habits]]:
    """The tiers, in order. `refuse` is called as soon as one turns out to be unusable, even while others are still
    being opened; if it returns, that tier is left out.

    A remote that cannot be reached is opened later (`AwaitedTier`). If `restarted`, so is any tier that fails: the
    engine has already used it.
    """
    pool = ThreadPoolExecutor(max(1, len(openings)), "open")
    attempts = {pool.submit(opening.open): opening for opening in openings}
    names = dict(zip(attempts, lane_names([opening.name for opening in openings]), strict=True))
    pool.shutdown(wait=False)
    tiers: dict[Future[Tier], Tier] = {}
    for future in _as_they_end(attempts):
        opening = attempts[future]
        silent = f"{opening.where} did not answer within {_TIMEOUT_S:g} s"
        error = future.exception() if future.done() else TierUnreachable(errno.ETIMEDOUT, silent)
        if error is None:
            tiers[future] = future.result()
            if notice := future.result().notice:
                report(f"{names[future]}-open", notice)
        elif not restarted and (opening.habits.local or not isinstance(error, TierUnreachable)):
            refuse(f"{opening.what}: {message(error)}")
        else:
            report(f"{names[future]}-open", f"{message(error)}; retried in the background")
            tiers[future] = AwaitedTier(opening.name, opening.open, None if future.done() else future)
    return [(tiers[future], opening.habits) for future, opening in attempts.items() if future in tiers]


def _as_they_end(attempts: Collection[Future[Tier]]) -> Iterator[Future[Tier]]:
    """Each as soon as it has finished; after `_TIMEOUT_S` also those that have not."""
    waiting = dict.fromkeys(attempts)
    with suppress(TimeoutError):
        for future in as_completed(attempts, _TIMEOUT_S):
            del waiting[future]
            yield future
    yield from waiting
