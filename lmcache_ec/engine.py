# SPDX-License-Identifier: Apache-2.0
"""What the cache has to know of the engine that it serves."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lmcache_ec.key import at_epoch
from lmcache_ec.signing import SigningKey


@dataclass(frozen=True, slots=True)
class Engine:
    """What the cache has to know of the engine that it serves.

    `name` is one engine's on this host, the same on the scheduler side and in every rank. `largest_entry_bytes` bounds
    an entry; `ranks` is how many processes load (rank 0 saves). `namespace` is that of the weights of the start, before
    epoch and key (see `namespace_at`); with `watched` the ranks report what weights they have, and nothing is promised
    before they have done so. One that `saves` nothing, a consumer, never gives a tier again what that has lost.
    `epoch` is the configuration's; None for a namespace that was given by name: it has no epochs.
    Of several data-parallel engines each publishes at an address of its own, by its `data_parallel_rank`.
    """

    name: str
    namespace: str
    producer: str
    ranks: int
    largest_entry_bytes: int
    saves: bool = True
    watched: bool = False
    data_parallel_rank: int = 0
    epoch: int | None = 0
    signing: SigningKey | None = None

    def signing_with(self, key: SigningKey | None) -> Engine:
        """The same, in the namespace of entries that are signed with this key, if there is one."""
        return replace(self, signing=key)

    def namespace_at(self, epoch: int) -> str:
        """The namespace of this engine's entries in an epoch."""
        return namespace_at(self.namespace, epoch, self.signing)


def namespace_at(namespace: str, epoch: int, signing: SigningKey | None) -> str:
    """What a namespace is called in an epoch, for entries that are signed with this key, if there is one."""
    named = at_epoch(namespace, epoch)
    return named if signing is None else signing.namespace(named)
