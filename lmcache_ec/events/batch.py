# SPDX-License-Identifier: Apache-2.0
"""The wire format, similar to vLLM's KV events (vllm/distributed/kv_events.py).

A message has three frames: the topic, the batch's number (8 bytes, big-endian), and the batch in MessagePack. A
snapshot is requested from a DEALER or REQ socket, with an empty frame and 8 bytes that are ignored (vLLM's number to
start from). The answer is one message of the same three frames: a batch that clears all and admits what is held, with
the number of the last batch that it includes; then one with the number -1, which ends it.
"""

from __future__ import annotations

import msgspec

MEDIUM_CPU = "CPU"
END = (-1).to_bytes(8, "big", signed=True)

MAX_SNAPSHOT_BYTES = 256 << 20
"""The longest that a subscriber accepts: some two million entries."""


class EntriesAdmitted(msgspec.Struct, frozen=True, omit_defaults=True, tag=True, gc=False):
    """From now on these can be loaded without an encode. `bytes` are the entries' lengths, in the same order."""

    identifiers: list[str]
    bytes: list[int]
    medium: str = MEDIUM_CPU


class EntriesEvicted(msgspec.Struct, frozen=True, omit_defaults=True, tag=True, gc=False):
    identifiers: list[str]
    medium: str = MEDIUM_CPU


class AllEntriesCleared(msgspec.Struct, frozen=True, omit_defaults=True, tag=True, gc=False):
    """Nothing is held: forget all that was admitted before."""

    medium: str = MEDIUM_CPU


Event = EntriesAdmitted | EntriesEvicted | AllEntriesCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`ts` is its time, in seconds since the epoch. A batch without events only shows that the replica is alive.

    `session` belongs to one publisher: in another one numbers start again, and earlier state is unknown. All
    identifiers belong to `namespace`; once it changes, none of the old one are left.
    """

    ts: float
    events: list[Event]
    data_parallel_rank: int
    session: str
    namespace: str


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EventBatch)


def encode(batch: EventBatch) -> bytes:
    return _encoder.encode(batch)


def decode(payload: bytes) -> EventBatch:
    """ValueError if it is not a batch."""
    try:
        batch = _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    for event in batch.events:
        if isinstance(event, EntriesAdmitted) and len(event.identifiers) != len(event.bytes):
            raise ValueError("as many lengths as identifiers are needed")
    return batch


def number_frame(number: int) -> bytes:
    return number.to_bytes(8, "big")
