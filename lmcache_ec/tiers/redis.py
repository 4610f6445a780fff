# SPDX-License-Identifier: Apache-2.0
"""Redis (or Valkey, or a compatible store): one value per entry, on a single server, behind Sentinels, or a Cluster.

An entry's key is `<prefix><object name>`. It is written with SET NX and lives until its TTL (PX, counted from the
write) expires or the server evicts it: both are plain misses. `<prefix>born` holds the store's name, without a TTL
(see `Tier.born`).
"""

import errno
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from redis.exceptions import (
    AskError,
    ClusterDownError,
    InvalidResponse,
    ReadOnlyError,
    RedisClusterException,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from lmcache_ec.key import EncoderCacheKey, EntryName, ObjectName, check_namespace, parse_object_name
from lmcache_ec.tiers.base import (
    UNREACHABLE,
    Answer,
    Answers,
    Held,
    Listed,
    NamespaceUse,
    Tier,
    TierError,
    TierNotReady,
    TierUnreachable,
    WritesRefused,
)
from lmcache_ec.tiers.redis_client import connect, disconnect, explain, fault_of, give_up, probe
from lmcache_ec.tiers.redis_commands import Command, exchange, parts
from lmcache_ec.tiers.redis_counts import Counts
from lmcache_ec.tiers.redis_url import Deployment, RedisAddress, RedisOptions, parse_redis_url
from lmcache_ec.tiers.resp import this_thread, until

_REDIRECTS = (AskError, TryAgainError, ClusterDownError)  # MOVED is an AskError
_PAGE = 1000  # keys that one SCAN looks at
_NOTHING = memoryview(bytearray())
_NO_VALUE = "WRONGTYPE"  # what a server answers where a key holds a list, a hash or the like

_Replies = list[object]
_Numbers = list[int]
_Keys = dict[bytes, ObjectName]
"""Keys of entries on a server, with their parsed names."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """An entry that a server has, and when it was last used (Unix), None if the server does not tell."""

    namespace: str
    digest: bytes
    length: int
    used: float | None


@dataclass(frozen=True, slots=True)
class _Look:
    """What `born` found: the store's name, the name that was reported, and the servers' counts."""

    marker: bytes
    reported: bytes
    counts: Counts


class _Call:
    """One call of a tier: it has a deadline, one of the slots, and raises TierError for any failure. One thread."""

    __slots__ = ("_action", "_key", "_tier", "_writes")

    def __init__(self, tier: "RedisTier", action: str, key: EntryName | None = None, *, writes: bool = False) -> None:
        self._tier, self._action, self._key, self._writes = tier, action, key, writes

    def __enter__(self) -> None:
        longest_s = 2 * self._tier.options.timeout_s
        this_thread.ends_at = time.monotonic() + longest_s
        try:
            self._tier.slots.get(timeout=longest_s)
        except Empty:
            this_thread.ends_at = float("inf")
            busy = f"all {self._tier.options.connections} connections are busy"
            raise TierError(errno.EBUSY, f"Redis tier could not {self._what()}: {busy}") from None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._tier.slots.put(None)
        this_thread.ends_at = float("inf")
        if isinstance(error, Exception) and not isinstance(error, TierError):  # redis-py raises more than it names
            raise self._tier.failure(self._what(), error, self._writes) from None

    def _what(self) -> str:
        return f"{self._action} {self._key.object_name}" if self._key else self._action


class RedisTier(Tier):
    """Entries as values of a Redis store; made by `open_redis`.

    Runs in the store process, on the tier's own threads: any number, of which `connections` are served at once. A call
    takes at most a little more than twice `timeout_s` (a listing: each step of it). If the server is full and evicts
    nothing, `put` fails with ENOSPC. Reading an entry does not extend its TTL.
    """

    name = "redis"
    batches = True

    def __init__(self, client: Any, address: RedisAddress, options: RedisOptions) -> None:
        self.address = address
        self.options = options
        self.read_only = options.read_only
        self._client = client
        self._prefix = options.prefix.encode()
        self._lifetime = () if options.ttl_s is None else ("PX", max(1, round(options.ttl_s * 1000)))
        self._last_look: _Look | None = None
        self.slots = SimpleQueue[None]()
        """One for each call that may be in progress."""
        for _ in range(options.connections):
            self.slots.put(None)
        self._fan_out = ThreadPoolExecutor(options.connections, "redis-fan-out")  # only a Cluster starts its threads

    def __repr__(self) -> str:
        return f"RedisTier({self.address.deployment.value}, {self.address})"

    def get_into(self, key: EntryName, buffer: memoryview) -> int | None:
        with _Call(self, "read", key):
            return self._length(self._ask(Command(("GET", self._name(key)), buffer)))

    def put(self, key: EncoderCacheKey, data: memoryview) -> bool:
        limit, name = self.options.max_entry_bytes, self._name(key)
        if len(data) > limit:
            raise TierError(errno.EFBIG, f"an entry of {len(data)} bytes does not fit: the Redis tier takes {limit}")
        with _Call(self, "write", key, writes=True):
            # Asked first: an entry that another engine has already stored would be sent for nothing.
            if self._taken(name):
                return False
            return bool(self._ask(Command(("SET", name, data, "NX", *self._lifetime))))

    def held(self, key: EncoderCacheKey, most_bytes: int) -> Held | None:
        """As every tier; a list or the like, which was not written here, is not a value."""
        try:
            return super().held(key, most_bytes)
        except TierError as error:
            if _NO_VALUE not in str(error):
                raise
            return Held(0, None)

    def replace(self, key: EncoderCacheKey, data: memoryview, held: Held) -> bool:
        """As every tier; whatever took the place of `held` meanwhile is overwritten, too."""
        with _Call(self, "replace", key, writes=True):
            return bool(self._ask(Command(("SET", self._name(key), data, *self._lifetime))))

    def check_writes(self) -> bool:
        """As every tier: overwriting a key that does not exist writes nothing, but is refused like any write."""
        with _Call(self, "write", writes=True):
            self._ask(Command(("SET", f"{self.options.prefix}is-anybody-there", b"", "XX")))
        return True

    def contains(self, key: EntryName) -> int | None:
        (answer,) = self.contains_each([key])
        if isinstance(answer, TierError):
            raise answer
        return answer

    def peek(self, key: EntryName, most: int) -> bytes | None:
        """As every tier; does not count as a use of the entry from Redis 7.2 and Valkey 7.2 on."""
        with _Call(self, "look at", key):
            name = self._name(key)
            look = Command(("GETRANGE", name, 0, most - 1))
            on, off = (Command(("CLIENT", "NO-TOUCH", word)) for word in ("ON", "OFF"))
            _, reply, _ = exchange(self._pool_of(name), [on, look, off])
            (found,) = self._ask_again([look], [reply])
            start: bytes = _or_raise(found)
            return start or (b"" if self._ask(Command(("EXISTS", name))) else None)

    def delete(self, key: EntryName) -> bool:
        with _Call(self, "delete", key):
            return bool(self._ask(Command(("UNLINK", self._name(key)))))

    def get_each_into(self, wanted: Sequence[tuple[EncoderCacheKey, memoryview]]) -> Answers:
        """`get_into` for several entries, within the time limit of one call.

        One round trip to each server of a Cluster, in parallel, and for each `batch_bytes` of buffers. An error is the
        answer for its entry; TierError is raised only if nothing could be requested.
        """
        action = f"read {_entries(len(wanted))}"
        with _Call(self, action):
            replies = self._ask_each([Command(("GET", self._name(key)), buffer) for key, buffer in wanted])
            return [self._answer(action, reply) for reply in replies]

    def contains_each(self, keys: Sequence[EntryName]) -> Answers:
        """`contains` for several entries, in one round trip, as `get_each_into`."""
        action, names = f"look for {_entries(len(keys))}", [self._name(key) for key in keys]
        with _Call(self, action):
            # STRLEN is also 0 for a missing key.
            replies = self._ask_each([Command((verb, name)) for name in names for verb in ("EXISTS", "STRLEN")])
            return [
                self._answer(action, self._known_length(name, there, length))
                for name, there, length in zip(names, replies[::2], replies[1::2], strict=True)
            ]

    def list(self, namespace: str) -> Iterator[Listed]:
        """As every tier; `modified` is the present if the server does not tell when an entry was last used.

        It does unless it evicts by frequency. Listing does not update that time, from Redis 7.2 and Valkey 7.2 on.
        """
        now = time.time()
        for page in self._pages(f"list {namespace}", f"{check_namespace(namespace)}/"):
            for found in page:
                yield Listed(found.digest, found.length, now if found.used is None else found.used)

    def namespaces(self) -> Iterator[NamespaceUse]:
        """As every tier; a server that evicts by frequency does not report the time. Counting does not update it from
        Redis 7.2 and Valkey 7.2 on. Scans every key of the database, in steps."""
        uses: dict[str, NamespaceUse] = {}
        for page in self._pages("list the namespaces", ""):
            for found in page:
                name, length, used = found.namespace, found.length, found.used
                before = uses.get(name, NamespaceUse(name, 0, 0))
                used = used if before.used is None else max(before.used, used or 0.0)
                uses[name] = NamespaceUse(name, before.entries + 1, before.bytes + length, used=used)
        yield from uses.values()

    def remove(self, namespace: str) -> int:
        """As every tier, a page of keys at a time; the server frees the memory in the background."""
        removed, action = 0, f"remove {namespace}"
        for pool, names in self._keys(action, f"{check_namespace(namespace)}/"):
            with _Call(self, action):
                commands = [Command(("UNLINK", name)) for name in names]
                replies = self._ask_again(commands, exchange(pool, commands))
                removed += sum(_or_raise(reply) for reply in replies)
        return removed

    def born(self) -> str | None:
        """As every tier. Needs permission for INFO; None if a server does not count evictions.

        Under a policy that evicts any key the name itself may be evicted, and is restored: the servers' counts
        distinguish this from a flush. Called by one thread. In a Cluster, the server that has the name is watched.
        """
        with _Call(self, "look whether it was emptied"):
            try:
                counts, marker = self._counts(), self._marker()
                last = self._last_look
                reported = marker if last is None else last.reported
                if last is not None and marker != last.marker:
                    counts = self._counts()  # after the name was missed: they include a flush in between
                    reported = reported if counts.explain_loss_since(last.counts) else marker
            except (KeyError, ResponseError):
                return None
        self._last_look = _Look(marker, reported, counts)
        return reported.decode(errors="replace")

    def close(self) -> None:
        self._fan_out.shutdown(wait=False)
        disconnect(self._client)

    def _marker(self) -> bytes:
        """The store's name; a store without one is given one."""
        name = f"{self.options.prefix}born".encode()
        found = self._ask(Command(("GET", name)))
        if found is None and self.read_only:
            raise KeyError("it has no name, and is given none")
        if found is None:
            self._ask(Command(("SET", name, os.urandom(8).hex(), "NX")))
            found = self._ask(Command(("GET", name)))
        if not isinstance(found, bytes):
            raise InvalidResponse("the store's name was expected")
        return found

    def _counts(self) -> Counts:
        asked = [Command(args) for args in (("INFO", "server"), ("INFO", "stats"), ("DBSIZE",))]
        servers = []
        for pool in self._masters(learn=False):
            server, stats, keys = map(_or_raise, exchange(pool, asked))
            servers.append((server + b"\n" + stats, keys))
        return Counts.of(servers)

    def failure(self, action: str, error: Exception, writes: bool = False) -> TierError:
        number, reason = explain(error, self.address, self.options)
        kind = fault_of(error)
        if kind is WritesRefused and not writes:
            kind = TierError  # a missing right to read, for example, concerns only these keys
        return kind(number, f"Redis tier at {self.address} could not {action}: {reason}")

    def _answer(self, action: str, reply: object) -> Answer:
        return self.failure(action, reply) if isinstance(reply, Exception) else self._length(reply)

    @staticmethod
    def _length(reply: object) -> int | None:
        if reply is None or isinstance(reply, int):
            return reply
        raise InvalidResponse("a length was expected")

    def _taken(self, name: bytes) -> bool:
        try:
            return bool(self._ask(Command(("STRLEN", name))))
        except ResponseError as error:
            if _NO_VALUE not in str(error):
                raise
            return True

    def _name(self, key: EntryName) -> bytes:
        return f"{self.options.prefix}{key.object_name}".encode()

    def _known_length(self, name: bytes, there: object, length: object) -> object:
        if isinstance(there, Exception) or there == 0:
            return there or None
        return length or self._ask(Command(("GET", name), _NOTHING))  # empty; or removed in between

    def _keys(self, action: str, folder: str) -> Iterator[tuple[Any, _Keys]]:
        """The names of the entries below `folder`, as each server scans them in steps; each name once."""
        prefix = f"{self.options.prefix}{folder}".encode()
        pattern = re.sub(rb"([\\*?\[\]])", rb"\\\1", prefix) + b"*"
        seen = set[bytes]()  # a key may come twice while the server's table of keys grows or shrinks
        with _Call(self, action):
            masters = self._masters()
        for pool in masters:
            cursor = None
            while cursor != b"0":
                with _Call(self, action):
                    (page,) = exchange(pool, [Command(("SCAN", cursor or b"0", "MATCH", pattern, "COUNT", _PAGE))])
                    cursor, names = _or_raise(page)
                new = {name: entry for name in {*names} - seen if (entry := self._parsed(name))}
                if new:
                    seen.update(new)
                    yield pool, new

    def _parsed(self, name: bytes) -> ObjectName | None:
        """The parsed name of a key, None if it is not an entry's."""
        if not name.startswith(self._prefix):
            return None
        return parse_object_name(name[len(self._prefix) :].decode("ascii", "replace"))

    def _pages(self, action: str, folder: str) -> Iterator[Sequence[_Stored]]:
        """What is below `folder`, as `_keys`."""
        for pool, names in self._keys(action, folder):
            with _Call(self, action):
                found = _described(pool, names)
            yield found

    def _ask(self, command: Command) -> Any:
        """One round trip; if it fails, the result of `_ask_again`."""
        (reply,) = replies = exchange(self._pool_of(command.args[1]), [command])
        if isinstance(reply, Exception):
            (reply,) = self._ask_again([command], replies)
        return _or_raise(reply)

    def _ask_by_client(self, command: Command) -> Any:
        """One round trip, through redis-py's retries and redirects."""
        options = {} if command.into is None else {"into": command.into}
        return self._client.execute_command(*command.args, **options)

    def _ask_each(self, commands: Sequence[Command]) -> _Replies:
        """The reply of each, in order; for a failed one, an exception. A Cluster's servers are asked in parallel."""
        replies: _Replies = [None] * len(commands)
        servers: dict[Any, _Numbers] = {}
        for number, command in enumerate(commands):
            servers.setdefault(self._pool_of(command.args[1]), []).append(number)
        ends_at = this_thread.ends_at

        # Raises nothing: once this call has returned, no thread may go on writing into a buffer of its caller.
        def ask(server: tuple[Any, _Numbers]) -> None:
            pool, numbers = server
            with until(ends_at):
                for part in parts(numbers, commands, self.options.batch_bytes):
                    asked = [commands[number] for number in part]
                    for number, reply in zip(part, self._ask_again(asked, exchange(pool, asked)), strict=True):
                        replies[number] = reply

        for _ in (map if len(servers) == 1 else self._fan_out.map)(ask, servers.items()):
            pass
        return replies

    def _ask_again(self, commands: Sequence[Command], replies: _Replies) -> _Replies:
        """The replies, after one retry, one by one, of those that another server has or a broken connection lost.

        A former master, now a replica, refuses a write: the connections to it are dropped, for reading as well, and the
        master is looked up again, at the same address or through the Sentinels.
        """
        clustered = self.address.deployment is Deployment.CLUSTER
        lost = (RedisConnectionError, RedisTimeoutError) if clustered else (RedisConnectionError,)
        demoted = any(isinstance(reply, ReadOnlyError) for reply in replies)
        if demoted:
            for pool in self._masters(learn=False):
                give_up(pool)
        if clustered and (demoted or isinstance(replies[-1], lost)):
            self._learn_topology()
        for number, reply in enumerate(replies):
            if isinstance(reply, (*_REDIRECTS, *lost, ReadOnlyError)):
                try:
                    replies[number] = self._ask_by_client(commands[number])
                except ResponseError as error:
                    replies[number] = error
                except Exception as error:
                    replies[number] = error
                    break  # the others would fare no better
        return replies

    def _learn_topology(self) -> None:
        try:
            self._client.nodes_manager.initialize()
        except Exception:
            pass  # the next command reports why

    def _pool_of(self, name: bytes) -> Any:
        """The connections to the server that has this key; None if no known server of a Cluster has its slot."""
        if self.address.deployment is not Deployment.CLUSTER:
            return self._client.connection_pool
        try:
            node = self._client.get_node_from_key(name)
        except RedisClusterException:
            return None
        return self._client.get_redis_connection(node).connection_pool

    def _masters(self, learn: bool = True) -> Sequence[Any]:
        """The connections to each server that has its own entries; with `learn`, a Cluster's topology is read anew."""
        if self.address.deployment is not Deployment.CLUSTER:
            return [self._client.connection_pool]
        if learn:
            self._client.nodes_manager.initialize()
        return [self._client.get_redis_connection(node).connection_pool for node in self._client.get_primaries()]


def _described(pool: Any, names: _Keys) -> list[_Stored]:
    """What a server has under `names`."""
    asked = [Command(args) for name in names for args in (("OBJECT", "IDLETIME", name), ("STRLEN", name))]
    on, off = (Command(("CLIENT", "NO-TOUCH", word)) for word in ("ON", "OFF"))
    _, *replies, _ = exchange(pool, [on, *asked, off])
    now, found = time.time(), []
    for entry, idle_s, length in zip(names.values(), replies[::2], replies[1::2], strict=True):
        if isinstance(length, ResponseError):
            continue  # it has moved to another server, or is no entry
        if _or_raise(length) or isinstance(idle_s, int):  # otherwise it was removed
            used = now - idle_s if isinstance(idle_s, int) else None
            found.append(_Stored(entry.namespace, entry.digest, _or_raise(length), used))
    return found


def _or_raise(reply: object) -> Any:
    if isinstance(reply, Exception):
        raise reply
    return reply


def _entries(number: int) -> str:
    return "1 entry" if number == 1 else f"{number} entries"


def open_redis(url: str, options: RedisOptions | None = None) -> RedisTier:
    """The tier at `url`, after a probe that only a usable store answers.

    ValueError states what is wrong: the URL, the address, the credentials, the rights, TLS, or the kind of store;
    it shows no credentials. Takes at most a little more than twice `timeout_s`.
    """
    address, options = parse_redis_url(url, options or RedisOptions())
    try:
        with until(time.monotonic() + 2 * options.timeout_s):
            client = connect(address, options)
            try:
                probe(client, address, options)
            except BaseException:
                disconnect(client)
                raise
    except Exception as error:
        number, reason = explain(error, address, options)
        text = f"Redis tier at {address}: {reason}"
        if fault_of(error) is TierNotReady:
            raise TierNotReady(number, text) from None
        raise (TierUnreachable(number, text) if number in UNREACHABLE else ValueError(text)) from None
    return RedisTier(client, address, options)
