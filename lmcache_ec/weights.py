# SPDX-License-Identifier: Apache-2.0
"""Which weights the encoder runs with, as reported by its ranks, and where outputs of these weights are kept.

What is known, and when:

1. A rank counts the calls that may have changed its weights. It reports "unknown" before such a call begins and the
   digest of its weights once it is over. All ranks get the same calls in the same order, between the same steps.
2. The weights are known while the last report of every rank has a digest and all have the same number of calls.
   Otherwise they are in doubt: nothing is promised, nothing is reserved, and nothing is lost.
3. The scheduler side acts on reports only between passes. Each step states which weights it was prepared for; a rank
   with other weights copies nothing for it. So reports need not be fast: at worst a step encodes again.
4. The first known weights are those of the start. The namespace of the engine belongs to them only.
5. A new epoch changes that namespace, and with it every other one, but not the weights.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from lmcache_ec.key import MAX_NAMESPACE_CHARS
from lmcache_ec.positional import positional

Persist = Literal[False, True, "by_version"]
"""Where outputs of weights other than those of the start go: memory only, a namespace by digest, or one by version."""


@positional
@dataclass(frozen=True, slots=True)
class Held:
    """The weights of all ranks after `calls` calls: one digest per rank."""

    calls: int
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Home:
    """Where the outputs of some weights are kept: a namespace, in memory and, if it `persists`, in the tiers.

    The namespace belongs to this epoch."""

    namespace: str
    persists: bool
    epoch: int = 0


class Weights:
    """The scheduler side's knowledge of the weights of one engine. Runs on its thread only; no lock, no I/O."""

    def __init__(self, ranks: int, namespace: str, persist: Persist = False, epoch: int = 0) -> None:
        """`namespace` is that of the weights of the start, in this epoch. With 0 `ranks` no reports are expected: the
        weights never change."""
        self.moved = False
        """Whether a report, a version or an epoch has arrived that has not been acted on."""
        self.epoch = epoch
        self._namespace = namespace
        self._persist = persist
        self._reports = [(0, "")] * ranks
        self._start: tuple[str, ...] | None = None if ranks else ()
        self._version = ""
        self._versions: dict[str, tuple[str, ...]] = {}  # version -> the weights it has named, newest version last

    def report(self, rank: int, calls: int, digest: str) -> None:
        """A rank has reported, see `WeightsReport`."""
        self._reports[rank] = calls, digest
        self.moved = True
        held = self.held
        if self._start is None and held is not None:
            self._start = held.digests

    @property
    def started(self) -> bool:
        """Whether the weights of the start are known."""
        return self._start is not None

    @property
    def held(self) -> Held | None:
        """The weights by the ranks' reports; None while they are in doubt."""
        counts, digests = {calls for calls, _ in self._reports}, tuple(digest for _, digest in self._reports)
        return Held(max(counts, default=0), digests) if len(counts) < 2 and all(digests) else None

    def begin_epoch(self, epoch: int, namespace: str) -> None:
        """A new epoch: `namespace` is now that of the weights of the start."""
        self.epoch, self._namespace = epoch, namespace
        self.moved = True

    @property
    def home_of_start(self) -> Home:
        """Where outputs of the weights of the start are kept, even if these are not known yet."""
        return Home(self._namespace, True, self.epoch)

    def set_version(self, version: str) -> str:
        """The weights have this version from now on, until they change. Returns what is wrong with that, or "".

        A version names the weights known when it is set: one set before an update belongs to the old weights.
        """
        held, self._version = self.held, ""
        self.moved = True
        if held is None:
            return f"weight version {version!r} was set while the weights are not known; set it after the update"
        if self._versions.setdefault(version, held.digests) != held.digests:
            return f"weight version {version!r} was used for other weights before"
        self._version = version
        while len(self._versions) > _VERSIONS_REMEMBERED:
            del self._versions[next(iter(self._versions))]
        return ""

    def home(self, held: Held) -> Home:
        """Where outputs of these weights are kept."""
        digests = held.digests
        if digests == self._start:
            return self.home_of_start
        if self._persist is True:
            return Home(self._derived("digest", *digests), True, self.epoch)
        if self._persist == "by_version" and self._versions.get(self._version) == digests:
            return Home(self._derived("version", self._version), True, self.epoch)
        return Home(self._derived("memory", *digests), False, self.epoch)

    def _derived(self, *what: str) -> str:
        """A namespace separate from the start's, and just as readable."""
        digest = hashlib.sha256("\0".join((self._namespace, *what)).encode()).hexdigest()[:16]
        return f"{self._namespace[: MAX_NAMESPACE_CHARS - 1 - len(digest)]}-{digest}"


_VERSIONS_REMEMBERED = 1024
