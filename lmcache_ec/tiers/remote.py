# SPDX-License-Identifier: Apache-2.0
"""A remote tier as configured, and what a kind of remote is. The existing kinds are in `kinds.py`."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from lmcache_ec.mask import masked_url
from lmcache_ec.sizes import MIB
from lmcache_ec.tiers.base import Tier

TIMEOUT_S = 2.0
"""Default for how long a remote may be silent."""

MAX_ENTRY_BYTES = 512 * MIB
"""Default for the largest entry sent to a store that has its own limit (this is a Redis server's default)."""

REFRESH_S = 300.0
"""Default for the time between two listings."""

_NO_KEY = re.compile(r"(?!)")


class Lookup(enum.StrEnum):
    """How to find out whether a tier has an entry that has not been announced."""

    AUTO = "auto"
    """By asking, as long as it answers quickly; otherwise by its listing."""
    PROBE = "probe"
    """By asking, always."""
    CATALOG = "catalog"
    """By its listing; by asking until the first listing is complete."""


class Remote(msgspec.Struct, frozen=True, array_like=True):
    """A remote tier: where it is, how it is opened, when it is asked. Immutable; passed unchanged from the
    configuration to a store process, in the first message.

    `extra_config` holds the keys of LMCache's map that the remote's kind reads. It and the URL may hold credentials:
    they are used only to open the tier.
    """

    url: str
    extra_config: dict[str, object] = {}
    ttl_s: float | None = None
    """How long an entry lives after its write; None: no limit."""
    timeout_s: float = TIMEOUT_S
    max_entry_bytes: int = MAX_ENTRY_BYTES
    lookup: Lookup = Lookup.AUTO
    refresh_s: float = REFRESH_S

    def __repr__(self) -> str:
        return f"Remote({masked_url(self.url)})"


def _always(url: str) -> bool:
    return True


def _never(remote: Remote) -> bool:
    return False


def _none(url: str) -> tuple[str, ...]:
    return ()


def _nowhere(remote: Remote) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class RemoteKind:
    """One kind of remote: what its URLs look like, and everything in which it differs from other kinds.

    Importing the module that defines one imports no client. `open` does, in the process that serves the tier.
    """

    name: str
    """The tier's name in counters and logs."""
    schemes: tuple[str, ...]
    check: Callable[[Remote], None]
    """ValueError, which holds no secret, for an invalid URL. Makes no request."""
    open: Callable[[Remote], Tier]
    """The tier, after one request that shows that it can be used. TierUnreachable if nothing answers, ValueError if
    something else is wrong; neither holds a secret."""
    lookup: Lookup = Lookup.AUTO
    """What AUTO in a configuration means for it."""
    quick: bool = False
    """Whether it usually answers within a few milliseconds, and is best asked before slower kinds."""
    lists: Callable[[str], bool] = _always
    """Whether the tier at this URL can be listed, so that its listing can serve as a catalog."""
    read_only: Callable[[Remote], bool] = _never
    """Whether it is configured never to be written to."""
    environment: tuple[str, ...] = ()
    """Prefixes of the names of environment variables that its clients read."""
    environment_for: Callable[[str], tuple[str, ...]] = _none
    """The same for one URL."""
    credentials: Callable[[Remote], str] = _nowhere
    """Where its credentials come from, without showing any; empty if the address or the kind tells it."""
    extra_keys: re.Pattern[str] = _NO_KEY
    """The keys of LMCache's `extra_config` that it reads."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Scheme of this kind -> why no encoder output can be kept there."""
    no_namespaces: str = ""
    """Why its namespaces can be neither listed nor removed; empty if they can."""
    no_probe: str = ""
    """Why it is not opened merely to test whether it answers; empty if opening changes nothing there."""

    def reads(self, key: str) -> bool:
        """Whether a key of LMCache's `extra_config` belongs to it."""
        return self.extra_keys.fullmatch(key) is not None
