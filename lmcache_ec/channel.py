# SPDX-License-Identifier: Apache-2.0
"""The messages between scheduler side, store process and ranks; `link.py` carries them."""

from __future__ import annotations

import enum

import msgspec

from lmcache_ec.events.endpoints import Publishing
from lmcache_ec.signing import SigningKey
from lmcache_ec.tiers.base import Landing
from lmcache_ec.tiers.remote import Remote


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages. Places are given by their id in the book; offsets and lengths are in bytes.

    A message about an entry carries its namespace, so that it stays valid after the engine has moved to another one.
    """


# ---- scheduler side -> store process


class Start(Message, frozen=True):
    """The first message to a store process. Its descriptors came with the command line.

    `namespace` is what is listed, as after an `Enter`. `remotes` may hold credentials, and `signing` is one: only the
    two ends of a link see its messages. For an engine that `saves`, the tiers are checked every `look_s` seconds for
    having been emptied. `namespace` belongs to `epoch`; if the folder is in a later epoch, the namespace that
    `namespace_at` makes of `base` is listed instead. Without an epoch none is followed. `publishing`: where the content
    of LocalCPU is published, if at all.
    """

    incarnation: int
    engine: str
    namespace: str
    producer: str
    disk: str
    disk_bytes: int
    disk_free_bytes: int
    drain_s: float
    deadline_s: float
    remotes: list[Remote]
    saves: bool
    look_s: float
    signing: SigningKey | None = None
    publishing: Publishing | None = None
    epoch: int | None = None
    base: str = ""


class Enter(Message, frozen=True):
    """From now on the engine looks for entries of this namespace: list what the tiers hold of it. The store process
    answers `Entered`."""

    namespace: str


class Fill(Message, frozen=True):
    """Find the entry in the tiers and put it, verified, into the place. Place 0: report only its length.

    With `insist` a tier is asked even if its listing lacks the entry. Only `tiers` are asked (a bit each, in their
    order; 0: all).
    """

    place: int
    offset: int
    length: int
    namespace: str
    identifier: str
    insist: bool = False
    tiers: int = 0


class Write(Message, frozen=True):
    """Write a live entry through to all tiers, or again to those of `tiers` (a bit each, in their order)."""

    place: int
    offset: int
    length: int
    namespace: str
    identifier: str
    tiers: int = 0


class Populate(Message, frozen=True):
    """Allocate the pages of a segment that the ranks' devices are about to register, which is then cheap."""

    offset: int
    length: int


class Locate(Message, frozen=True):
    """Find out which of `tiers` (a bit each, in their order) hold an entry of this length. Nothing is moved."""

    number: int
    namespace: str
    identifier: str
    length: int
    tiers: int


class Ping(Message, frozen=True):
    number: int


class Ledger(Message, frozen=True):
    """The book's counts, for status requests to the store process."""

    counts: dict[str, int]


class CpuChanges(Message, frozen=True):
    """What was added to LocalCPU (identifier, length in bytes), and what left it; each identifier appears once.

    Only for an engine that publishes. `anew`: everything sent before is void.
    """

    namespace: str
    anew: bool
    admitted: list[tuple[str, int]]
    evicted: list[str]


Access = tuple[float, str, int, float]
"""When a request needed an output (monotonic seconds), its name, its entry's bytes, the cost of its encode (s)."""


class Accessed(Message, frozen=True):
    """What requests have needed since the last such message, while a client records it. The store process passes it on
    with a digest in place of each name.

    The encode of `guessed` of the `accesses` was never measured; `lost` more were dropped for lack of room.
    """

    accesses: list[Access]
    guessed: int
    lost: int


# ---- recorder -> store process


class Follow(Message, frozen=True):
    """From now on pass on what requests need, with names as digests with this salt of 16 to 64 bytes."""

    salt: bytes


# ---- store process -> scheduler side


class Record(Message, frozen=True):
    """From now on report what requests need, with `Accessed`; if not `on`, stop."""

    on: bool


class Hello(Message, frozen=True):
    """The store process is up. Descriptors: a pidfd of itself; once it serves, the presence filter and its tally.

    `problem` states which tier could not be opened at an engine's start; it is then left out. `tiers` are those it
    serves, `epoch` is that of the namespace it lists.
    """

    pid: int
    problem: str
    tiers: list[str]
    epoch: int = 0


class Epoch(Message, frozen=True):
    """From now on the folder is in this epoch, a later one than before."""

    number: int


class Entered(Message, frozen=True):
    """From now on the presence filter counts as complete only once it holds what the tiers have of this namespace."""

    namespace: str


class Filled(Message, frozen=True):
    """The place holds the verified entry of shape (rows, width), read from `tier` in `seconds`."""

    place: int
    rows: int
    width: int
    dtype: str
    tier: str
    seconds: float = 0.0


class NotFilled(Message, frozen=True):
    """The place holds nothing. `length` is that of the entry the tier has (0: none).

    `kept`: an entry of another version of the format has the name, and keeps it.
    """

    place: int
    namespace: str
    identifier: str
    length: int
    kept: bool = False


class Populated(Message, frozen=True):
    """The pages of the segment at `offset` are allocated, as far as possible."""

    offset: int


class Sealed(Message, frozen=True):
    place: int
    ok: bool


class Written(Message, frozen=True):
    """The write of the entry is over and no longer reads the place. `ok`: a tier has it."""

    place: int
    ok: bool


class Landed(Message, frozen=True):
    """A tier has answered the write of an entry from a place, or of a copy of it."""

    place: int
    identifier: str
    tier: int
    landing: Landing


class Located(Message, frozen=True):
    """The answer to `Locate`: the tiers that hold the entry now, a bit each."""

    number: int
    held: int


class Back(Message, frozen=True):
    """A tier that had been left alone because it failed answers again."""

    tier: int


class Born(Message, frozen=True):
    """The name of a tier's content (see `Tier.born`): if it differs from before, the tier was emptied."""

    tier: int
    name: str


class Pong(Message, frozen=True):
    number: int


class Notice(Message, frozen=True):
    """A fault worth a line in the engine's log. Rate limits are per `kind`."""

    kind: str
    text: str


# ---- rank -> store process


class Saved(Message, frozen=True):
    """The saving rank has copied a payload into the place: seal it, and write it through if `persist`.

    With `flush` the rank waits for `Durable`.
    """

    place: int
    offset: int
    length: int
    namespace: str
    identifier: str
    rows: int
    width: int
    dtype: str
    persist: bool
    flush: bool = False


# ---- store process -> rank


class Durable(Message, frozen=True):
    """The entry is in every tier; if not `ok`, it will not be in all of them."""

    place: int
    ok: bool


# ---- scheduler side -> rank


class Attach(Message, frozen=True):
    """The arena (descriptor: its memory). The rank answers `Attached` once it has mapped it."""

    arena: str


class StoreLink(Message, frozen=True):
    """The saving rank's end of the link to a store process (descriptor)."""

    incarnation: int


class Segment(Message, frozen=True):
    """Have the device register a segment before it is used, then answer `SegmentReady`."""

    offset: int
    length: int


class Stage(Message, frozen=True):
    """Copy the payload at `offset` to the device, ahead of the step that loads it; the rank answers `Staged`."""

    number: int
    offset: int
    rows: int
    width: int
    dtype: str


class Unstage(Message, frozen=True):
    """Release what was staged under this number: no step will load it."""

    number: int


# ---- rank -> scheduler side


class Outcome(enum.IntEnum):
    """What a rank reports about a place that a step sent it.

    An absent save may be retried; a failed one had a tensor that does not fit its place and never will.
    """

    COPIED = 0
    ABSENT = 1
    FAILED = 2


class Attached(Message, frozen=True):
    """The rank has mapped the arena. With `registers` its device needs each segment registered before it is used."""

    rank: int
    registers: bool = False


class SegmentReady(Message, frozen=True):
    """`length` bytes of the segment at `offset` can be used; `problem` is why the device registered no more.

    A rank whose device refuses the first segment uses it, and all others, unregistered: `length` is the segment's.
    """

    offset: int
    length: int
    problem: str = ""


class Staged(Message, frozen=True):
    """The device has the payload; otherwise `problem` states why not."""

    number: int
    problem: str = ""


class Report(Message, frozen=True):
    """Steps up to `step` are done; (place, outcome, incarnation handed to) for each of their places.

    `load_ns` and `save_ns`: time of its loads and saves in the forward pass; 0: it had none.
    `encode_s`: time of the encoder in this step, seconds; 0 if it was not measured.
    """

    step: int
    outcomes: list[tuple[int, Outcome, int]]
    load_ns: int = 0
    save_ns: int = 0
    encode_s: float = 0.0


class WeightsReport(Message, frozen=True):
    """The digest of the encoder's weights on this rank after `calls` calls that may have changed them.

    An empty digest: it cannot be computed at the moment. Sent before a call begins and once it is over.
    """

    calls: int
    digest: str


ToStore = Start | Enter | Fill | Write | Populate | Locate | Ping | Ledger | CpuChanges | Saved | Accessed
Answer = Filled | NotFilled | Sealed | Written | Landed | Located | Populated
FromStore = Hello | Epoch | Entered | Answer | Back | Born | Pong | Notice | Record
ToScheduler = FromStore | Attached | SegmentReady | Staged | Report | WeightsReport
ToRank = Attach | StoreLink | Segment | Stage | Unstage | Durable
AnyMessage = ToStore | ToScheduler | ToRank | Follow
