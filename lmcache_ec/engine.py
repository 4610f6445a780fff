# SPDX-License-Identifier: Apache-2.0
"""What the cache needs to know about the engine that it serves."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lmcache_ec.key import at_epoch
from lmcache_ec.signing import SigningKey


@dataclass(frozen=True, slots=True)
class Engine:
    """What the cache needs to know about the engine that it serves.

    `name` is unique on this host and the same on the scheduler side and in every rank. `largest_entry_bytes` bounds an
    entry; `ranks` is how many processes load (rank 0 saves). `namespace` is that of the weights of the start, before
    epoch and key (see `namespace_at`); with `watched` the ranks report their weights, and nothing is promised before
    they have done so. An engine without `saves`, a consumer, never rewrites entries that a tier has lost.
    `epoch` is the configuration's; None for a namespace given by name, which has no epochs.
    Each of several data-parallel engines publishes at its own address, by its `data_parallel_rank`.
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
        """The same engine, in the namespace of entries signed with this key, if there is one."""
        return replace(self, signing=key)

    def namespace_at(self, epoch: int) -> str:
        """The namespace of this engine's entries in an epoch."""
        return namespace_at(self.namespace, epoch, self.signing)


def namespace_at(namespace: str, epoch: int, signing: SigningKey | None) -> str:
    """The name of a namespace in an epoch, for entries signed with this key, if there is one."""
    named = at_epoch(namespace, epoch)
    return named if signing is None else signing.namespace(named)
