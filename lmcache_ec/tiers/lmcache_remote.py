# SPDX-License-Identifier: Apache-2.0
"""Any other LMCache remote, through LMCache's own connector: an entry is one flat tensor of bytes.

    ec.<namespace>@1@0@<sha256 of the identifier>@uint8

A connector reads into memory that it requests from us, and the requested size shows the length of an entry. It never
gets the caller's own memory, because a connector cannot be stopped: what arrives after a call has timed out must not
overwrite memory that belongs to another entry by then.

What LMCache's connectors do not promise, and this tier therefore does not:

- There is no mutual exclusion. If two processes put one key at once, both write, and the later bytes stay.
- Nothing expires. Neither a server of `lm://` nor a folder of `fs://` has a size limit.
- `fs://` hides why a file cannot be read. An unreadable entry is an error, without the reason; in a folder that cannot
  be searched all entries are absent.
- A server of `lm://` neither lists nor deletes. A deleted entry is absent for this tier only, until it is put
  again. A writer that is killed in the middle of a put leaves a key there that has no value.
- `mooncakestore://` does not list, delete or replace either, and keeps no value of 0 bytes.

An entry that exists but cannot be read is an error once. After that it counts as absent, and the next put replaces it
if the store replaces anything.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import re
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from lmcache_ec.key import EncoderCacheKey, EntryName, check_namespace
from lmcache_ec.mask import masked_url, without_secrets
from lmcache_ec.tiers.base import UNREACHABLE, Listed, Tier, TierError, TierUnreachable, WritesRefused
from lmcache_ec.tiers.lmcache_connection import (
    Connection,
    Entry,
    Reading,
    connector_maker,
    memory_with,
    model_name,
    reading_now,
)
from lmcache_ec.tiers.lmcache_url import check_lmcache_url, listener, traits_of
from lmcache_ec.tiers.remote import MAX_ENTRY_BYTES, TIMEOUT_S

_LONGEST = (1 << 31) - 1  # LMCache sends a length as a C int
_SLOWEST = 4 << 20  # bytes a second; slower is a hang
_LIST_PATIENCE = 6  # how many times as long as a look-up a list may take
_PAGE = 256
_NO_LENGTH = -1
_VOID_ENTRIES = 4096

_REFUSE_WRITES = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}

_PROBE = memoryview(hashlib.shake_128(b"lmcache-ec").digest(1009))  # not a whole number of tokens of any size

_T = TypeVar("_T")


def open_lmcache_remote(
    url: str,
    extra_config: Mapping[str, object] | None = None,
    *,
    ttl_s: float | None = None,
    timeout_s: float = TIMEOUT_S,
    max_entry_bytes: int = MAX_ENTRY_BYTES,
) -> LMCacheRemoteTier:
    """The tier at a URL of LMCache, after a request that shows that it can be used.

    TierUnreachable if nothing answers, ValueError if something else is wrong, for example if its connector is not
    known to keep values unchanged and returned another one. Takes seconds if LMCache is not imported yet.
    """
    if timeout_s <= 0:
        raise ValueError(f"{masked_url(url)}: timeout_s={timeout_s} must be above 0")
    check_lmcache_url(url, extra_config or {})
    tier = LMCacheRemoteTier(url, extra_config or {}, ttl_s, timeout_s, max_entry_bytes)
    try:
        tier.check()
    except BaseException:
        tier.close()
        raise
    return tier


class _Unreadable(Exception):
    """A value exists, but could not be read."""


@dataclass(slots=True)
class _Call:
    """One call of the tier in progress: its entry, when its caller gives up, and the connection it uses."""

    entry: Entry | None
    gives_up_at: float
    connection: Connection | None = None


class LMCacheRemoteTier(Tier):
    """Entries in the store of one of LMCache's connectors; see the top of this file for what that cannot promise.

    Runs in the store process, on the tier's own threads. Its state, the connection and the entries that count as
    absent, is accessed only by one more thread, that of its asyncio loop; so there is no lock. A connector may block
    that thread: callers still give up in time. A failed connection is replaced, and the call that failed on it is
    retried once, since the connection may have ended long ago.
    """

    name = "lmcache"

    def __init__(
        self, url: str, extra_config: Mapping[str, object], ttl_s: float | None, timeout_s: float, max_entry_bytes: int
    ) -> None:
        """Use `open_lmcache_remote`."""
        self._url = url
        self._address = masked_url(url)
        self._extra_config = extra_config
        self._timeout_s = timeout_s
        self._traits = traits_of(url)
        self._limit_bytes = min(max_entry_bytes, _LONGEST)
        self._connection: Connection | None = None
        self._void: dict[Entry, None] = {}
        self._connector = connector_maker(url, extra_config, self._traits, self._limit_bytes)
        self.notice = self._limits(ttl_s)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="lmcache-loop", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"LMCacheRemoteTier({self._address})"

    def check(self) -> None:
        """Ask for an entry that does not exist; if the connector is not proven, have it store and return a small one.

        TierUnreachable if nothing answers, ValueError for anything else that is wrong.
        """
        try:
            kept = self._ask(None, self._timeout_s, "open", self._prove)
        except TierError as error:
            if isinstance(error, TierUnreachable):
                raise
            raise ValueError(error.strerror) from None
        if not kept:
            raise ValueError(
                f"{self._address} cannot keep encoder outputs: it returned another value than it was given, like a "
                f"connector that treats every value as a KV chunk of one size"
            )

    def get_into(self, key: EntryName, buffer: memoryview) -> int | None:
        entry, wanted = Entry(key.namespace, key.digest), len(buffer)
        seconds = self._timeout_s + wanted / _SLOWEST
        found = self._ask(entry, seconds, f"read {key.object_name}", lambda there: self._read(there, entry, wanted))
        if found is None:
            return None
        length, held = found
        if held is not None and length == wanted:
            buffer[:] = held.byte_array.cast("B")
        return length

    def put(self, key: EncoderCacheKey, data: memoryview) -> bool:
        entry, length = Entry(key.namespace, key.digest), len(data)
        if length > self._limit_bytes:
            raise TierError(
                errno.EFBIG, f"an entry of {length} bytes does not fit: the LMCache tier takes {self._limit_bytes}"
            )
        carried = memory_with(data)

        async def write(there: Connection) -> bool:
            if not (self._traits.replaces and entry in self._void) and await there.exists(entry):
                return False
            if self._traits.replaces:  # until it is certainly there: an interrupted write may leave anything
                self._count_as_absent(entry)
            await there.put(entry, carried)
            if not await there.exists(entry):  # no connector reports the outcome of a put
                raise TierError(errno.EIO, f"{self._address}: {key.object_name} was written, but is not there")
            self._void.pop(entry, None)
            return True

        seconds = self._timeout_s + length / _SLOWEST
        return self._ask(entry, seconds, f"write {key.object_name}, {length} bytes", write, writes=True)

    def contains(self, key: EntryName) -> int | None:
        entry = Entry(key.namespace, key.digest)
        what = f"look for {key.object_name}"
        found = self._ask(entry, self._timeout_s, what, lambda there: self._read(there, entry, _NO_LENGTH))
        return None if found is None else found[0]

    def delete(self, key: EntryName) -> bool:
        entry = Entry(key.namespace, key.digest)

        async def remove(there: Connection) -> None:
            try:  # not on the loop's thread: a connector may make it wait for the loop
                removed = await self._loop.run_in_executor(None, there.connector.remove_sync, entry.engine_key)
            except NotImplementedError:
                self._count_as_absent(entry)
                return
            if not removed and await there.exists(entry):
                raise TierError(errno.EIO, f"{self._address}: {key.object_name} was deleted, but is still there")
            self._void.pop(entry, None)

        self._ask(entry, self._timeout_s, f"delete {key.object_name}", remove)
        return True

    def list(self, namespace: str) -> Iterator[Listed]:
        """Every entry of `fs://`, with 0 for the unknown time; nothing at all for any other connector."""
        check_namespace(namespace)
        if not self._traits.lists:
            return
        ours = re.compile(rf"{re.escape(model_name(namespace))}@1@0@([0-9a-f]{{1,64}})@uint8")
        seconds, what = self._timeout_s * _LIST_PATIENCE, f"list {namespace}"
        names = self._ask(None, seconds, what, lambda there: there.connector.list())
        found = [Entry(namespace, bytes.fromhex(it[1].zfill(64))) for name in names if (it := ours.fullmatch(name))]

        async def lengths(there: Connection, page: Sequence[Entry]) -> Sequence[object]:
            reads = (self._read(there, entry, _NO_LENGTH) for entry in page)
            answers: Sequence[object] = await asyncio.gather(*reads, return_exceptions=True)
            return answers

        for start in range(0, len(found), _PAGE):
            page = found[start : start + _PAGE]
            for entry, answer in zip(page, self._ask(None, seconds, what, partial(lengths, page=page)), strict=True):
                if isinstance(answer, tuple):
                    yield Listed(entry.digest, answer[0], 0.0)

    def _unlisted(self) -> TierError:
        return TierError(errno.EOPNOTSUPP, f"{self._address}: namespaces cannot be listed through LMCache's connector")

    def close(self) -> None:
        async def end() -> None:
            if self._connection is not None:
                self._connection.discard()

        try:
            asyncio.run_coroutine_threadsafe(end(), self._loop).result(self._timeout_s)
        except TimeoutError:
            return  # a connector blocks the thread; it ends with the process
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self._timeout_s)
        if not self._thread.is_alive():
            self._loop.close()

    # ---- on the caller's thread

    def _ask(
        self,
        entry: Entry | None,
        seconds: float,
        what: str,
        use: Callable[[Connection], Awaitable[_T]],
        writes: bool = False,
    ) -> _T:
        """What `use` returns for the connection, on the loop; TierError if it fails or takes longer than `seconds`."""
        call = _Call(entry, time.monotonic() + seconds)
        future = asyncio.run_coroutine_threadsafe(self._served(call, use), self._loop)
        try:
            return future.result(seconds)
        except TierError:
            raise
        except TimeoutError:
            future.cancel()
            if (connection := call.connection) is not None:
                connection.sever()
                self._loop.call_soon_threadsafe(self._forget, connection)
            raise TierUnreachable(errno.ETIMEDOUT, f"{self._address}: {what}: no answer in time") from None
        except Exception as error:
            if isinstance(error, struct.error):  # LMCache tried to unpack a truncated answer
                error = ConnectionResetError(errno.ECONNRESET, "the connection broke")
            number = getattr(error, "errno", None) or errno.EIO
            kind = TierUnreachable if number in UNREACHABLE else TierError
            if writes and number in _REFUSE_WRITES:
                kind = WritesRefused
            raise kind(number, f"{self._address}: {what}: {self._explained(error)}") from None

    def _explained(self, error: Exception) -> str:
        """An error's text, with the key's name in place of each value of `extra_config`: one may be a secret."""
        values = {key: value for key, value in self._extra_config.items() if isinstance(value, str) and len(value) > 3}
        text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        return without_secrets(text, values)

    def _limits(self, ttl_s: float | None) -> str:
        """What a user has to know about the connector's limits."""
        limits = ["it never removes anything"]
        if ttl_s is not None:
            limits.append("ec.ttl_s has no effect")
        if not self._traits.lists:
            limits.append("it cannot be listed, so it is asked about every item, and cannot be used as a catalog")
        return f"{self._address}, through LMCache's own connector: {'; '.join(limits)}"

    # ---- on the loop's thread

    async def _served(self, call: _Call, use: Callable[[Connection], Awaitable[_T]]) -> _T:
        again = False
        while True:
            if self._connection is None:
                self._connection = self._connected()
            connection = call.connection = self._connection
            try:
                async with connection.turn(call.entry):
                    return await use(connection)
            except TierError:
                raise
            except Exception as error:
                self._forget(connection)
                if time.monotonic() > call.gives_up_at:
                    raise  # no caller waits for it: the connection was severed
                if again:
                    if isinstance(error, _Unreadable) and call.entry is not None:
                        self._count_as_absent(call.entry)
                    raise
                again = True

    def _connected(self) -> Connection:
        """A new connection. Blocks the loop, and what waits on it, for as long as LMCache takes."""
        if address := listener(self._url, self._extra_config):
            socket.create_connection(address, self._timeout_s).close()
        return Connection(self._connector(self._loop), self._traits)

    def _forget(self, connection: Connection) -> None:
        if self._connection is connection and not self._traits.reconnects:
            self._connection = None
            connection.discard()

    def _count_as_absent(self, entry: Entry) -> None:
        """Treat it as absent until it is written."""
        self._void[entry] = None
        if len(self._void) > _VOID_ENTRIES:
            del self._void[next(iter(self._void))]

    async def _read(self, there: Connection, entry: Entry, wanted: int) -> tuple[int, Any] | None:
        """Length and memory object of an entry, None for the latter if its length is not `wanted`; None if absent."""
        if entry in self._void:
            return None
        reading = Reading(wanted)
        reading_now.set(reading)
        held = await there.get(entry)
        if held is not None:
            return held.get_size(), held
        if reading.declined and reading.found is not None:
            if not self._traits.declines:
                self._forget(there)  # and with it the value that was not read
            return reading.found, None
        if reading.found is not None or (not self._traits.one_stream and await there.exists(entry)):
            raise _Unreadable("there is a value, but LMCache's connector could not read it")
        return None

    async def _prove(self, there: Connection) -> bool:
        """Whether a value whose length no KV chunk has is returned unchanged. It stays, under its own name."""
        entry = Entry("lmcache-ec-probe", hashlib.sha256(_PROBE).digest())
        kept = await there.exists(entry)
        if self._traits.proven:
            return True
        if not kept:
            await there.put(entry, memory_with(_PROBE))
        found = await self._read(there, entry, len(_PROBE))
        return found is not None and found[1] is not None and found[1].byte_array.cast("B") == _PROBE
