# SPDX-License-Identifier: Apache-2.0
"""The catalog of an S3 remote: its cost compared with plain listings, on a real server and by simulation.

    python -m benchmarks.catalog [--entries 1000000] [--folder /tmp]    on SeaweedFS
    python -m benchmarks.catalog --simulate [--entries 100000000] [--replicas 100]

Run by hand: putting a million objects takes several minutes and 2 GiB in `--folder`, removed afterwards. Requests and
bytes are counted between tier and server. The simulation builds one real shard of the requested size, lays it 256 times
into a real filter, and then plays a day of refreshes, writes and full listings in simulated time.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import random
import re
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.million import resident_mib
from benchmarks.testbed.servers.seaweed import Seaweed, seaweed
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.presence import KEY_BYTES, SHARDS, PresenceWriter, shard_of
from lmcache_ec.tiers.lane import Habits, Lane
from lmcache_ec.tiers.remote import Lookup
from lmcache_ec.tiers.s3 import S3Tier, open_s3

NAMESPACE = "catalog"
STRANGERS = 20_000
_WRITERS = 32
_REQUEST = re.compile(rb"(GET|HEAD|PUT|POST|DELETE) (\S+) HTTP/1\.1\r\n")
_PRICES = {"LIST": 0.005 / 1000, "PUT": 0.005 / 1000, "GET": 0.0004 / 1000, "HEAD": 0.0004 / 1000}
"""Dollars per request, S3 Standard in us-east-1; DELETE requests and bytes within the region are free."""


def key(number: object) -> EncoderCacheKey:
    return EncoderCacheKey(NAMESPACE, str(number))


# ---- on a real server


class Meter:
    """A proxy between tier and server, on its own threads, that counts requests and response bytes."""

    def __init__(self, port: int) -> None:
        self.requests: Counter[str] = Counter()
        self.bytes = 0
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(("127.0.0.1", self._target))
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._pass, args=(client, server, self._asked), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, self._answered), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, count: Callable[[bytes], None]) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 18):
                count(data)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _asked(self, data: bytes) -> None:
        for method, path in _REQUEST.findall(data):
            self.requests["LIST" if b"list-type=2" in path else method.decode()] += 1

    def _answered(self, data: bytes) -> None:
        self.bytes += len(data)


class Replica:
    """A tier and its lane, refreshed explicitly."""

    def __init__(self, server: Seaweed, meter: Meter, *, catalog: bool) -> None:
        url = f"s3://{server.bucket}/bench?endpoint=http://127.0.0.1:{meter.port}"
        self.tier: S3Tier = open_s3(f"{url}&catalog=true" if catalog else url, timeout_s=10.0)
        self.presence = PresenceWriter.create(["s3"])
        self.lane = Lane(self.tier, "s3", self.presence, Habits(Lookup.CATALOG, 300.0))

    def refresh(self) -> None:
        self.lane._list_at = 0.0
        self.lane.survey(NAMESPACE)

    def wait_for_listing(self) -> None:
        while (compactor := self.tier._cataloged and self.tier._cataloged._compactor) and compactor.running:
            time.sleep(0.05)

    def put(self, name: object) -> None:
        self.tier.put(key(name), memoryview(b"x"))

    def first_hit(self) -> None:
        """The first look-up of a replica: is the store worth asking, and does it hold the entry?"""
        digest = key(0).digest
        assert self.lane.asks(digest)
        assert self.tier.get_into(key(0), memoryview(bytearray(1))) == 1


@contextmanager
def measured(meter: Meter, what: str) -> Iterator[None]:
    before, had, began = Counter(meter.requests), meter.bytes, time.perf_counter()
    yield
    took = time.perf_counter() - began
    asked = meter.requests - before
    dollars = sum(_PRICES.get(kind, 0.0) * number for kind, number in asked.items())
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(asked.items()))
    print(
        f"{what:<44} {took:8.2f} s {(meter.bytes - had) / 1e6:9.2f} MB  ${dollars:.6f}  {kinds or 'no request'}",
        flush=True,
    )


async def fill(tier: S3Tier, entries: int) -> None:
    client: Any = tier._prompt
    numbers = iter(range(entries))

    async def writer() -> None:
        for number in numbers:
            await client.put_async(key(number).object_name, b"x", use_multipart=False)

    await asyncio.gather(*(writer() for _ in range(_WRITERS)))


def on_a_server(server: Seaweed, entries: int) -> None:
    os.environ.update(server.environment)
    port = int(server.endpoint.rpartition(":")[2])
    meter = Meter(port)
    began = time.perf_counter()
    direct = open_s3(f"s3://{server.bucket}/bench?endpoint={server.endpoint}", timeout_s=60.0)
    asyncio.run(fill(direct, entries))
    print(f"{entries} objects were put in {time.perf_counter() - began:.0f} s\n", flush=True)
    with measured(meter, "plain: opened, first hit by a question"):
        plain = Replica(server, meter, catalog=False)
        plain.first_hit()
    with measured(meter, "plain: a listing, at each refresh"):
        plain.refresh()
    one = Replica(server, meter, catalog=True)
    with measured(meter, "catalog: none there, a full listing begins"):
        one.refresh()
    with measured(meter, "catalog: the full listing, by one of all"):
        one.wait_for_listing()
    one.refresh()
    resident = resident_mib()
    with measured(meter, "catalog: opened, first hit by a question"):
        other = Replica(server, meter, catalog=True)
        other.first_hit()
    with measured(meter, "catalog: read by a replica that starts"):
        other.refresh()
    print(f"  resident memory grew by {resident_mib() - resident:.0f} MiB")
    with measured(meter, "catalog: a refresh, nothing new"):
        other.refresh()
    for number in range(1000):
        one.put(f"new {number}")
    with measured(meter, "catalog: a writer's refresh, 1,000 new keys"):
        one.refresh()
    with measured(meter, "catalog: a reader's refresh after it"):
        other.refresh()
    report_on(other, entries)
    with measured(meter, "catalog: 5,000 first-seen look-ups"):
        asked = sum(other.lane.asks(key(f"unseen {number}").digest) for number in range(5000))
    print(f"  of these would be asked for: {asked}")


def report_on(replica: Replica, entries: int) -> None:
    step = max(1, entries // STRANGERS)
    denied = sum(not replica.lane.asks(key(number).digest) for number in range(0, entries, step))
    denied += sum(not replica.lane.asks(key(f"new {number}").digest) for number in range(1000))
    mistaken = sum(replica.lane.asks(key(f"stranger {number}").digest) for number in range(STRANGERS))
    print(f"  stored keys denied: {denied}; strangers asked for: {100 * mistaken / STRANGERS:.2f} %", flush=True)


# ---- by simulation


def one_shard(entries: int) -> int:
    """Returns the bytes of a shard; prints how long building and laying it takes."""
    count = entries // SHARDS
    keys = b"".join(hashlib.sha256(b"%d" % number).digest()[:KEY_BYTES] for number in range(count))
    began = time.perf_counter()
    shard = shard_of(keys)
    print(f"a shard of {count} keys: {len(shard)} bytes, built in {time.perf_counter() - began:.2f} s")
    filter_ = PresenceWriter.create(["s3"])
    began = time.perf_counter()
    with filter_.laying("s3", len(shard)) as lay:
        for number in range(SHARDS):
            lay(number, count, shard)
    took = time.perf_counter() - began
    resident = os.fstat(filter_.fd).st_blocks * 512 >> 20
    print(f"{SHARDS} of them laid into a filter in {took:.2f} s, which takes {resident} MiB")
    strangers = (hashlib.sha256(b"stranger %d" % number).digest() for number in range(200_000))
    mistaken = sum(map(filter_.may_contain, strangers)) / 200_000
    print(f"strangers asked for: {100 * mistaken:.2f} %\n")
    return len(shard) + 32


def a_day(entries: int, replicas: int, refresh_s: float, shard_bytes: int, rate: float, seed: int) -> None:
    """Each replica refreshes every `refresh_s` with its own random offset, and stores `rate` entries per hour. Twice an
    hour one dies at a random moment, losing what it has not announced; so do half of the compactors."""
    chance, day, compact_s, listing_s = random.Random(seed), 86_400.0, 3600.0, 600.0
    requests: Counter[str] = Counter()
    moved, ages = 0.0, []
    deltas: list[float] = []  # when each was written
    removed_before, rewritten, listed_at = 0.0, 0.0, 0.0
    seen = dict.fromkeys(range(replicas), 0.0)
    due = sorted(
        (chance.uniform(0, refresh_s) + turn * refresh_s, replica)
        for replica in range(replicas)
        for turn in range(int(day / refresh_s))
    )
    deaths = 0
    for now, replica in due:
        if listed_at <= now - compact_s:
            requests["LIST"] += entries // 1000 + SHARDS
            if chance.random() < 0.5:  # it dies half-way; the next one begins once its lease is stale
                listed_at = now - compact_s + 2 * refresh_s
                requests["PUT"] += SHARDS // 2
            else:
                requests["PUT"] += SHARDS + 40
                requests["DELETE"] += 1 + len(deltas) // 1000
                removed_before, listed_at, rewritten = now, now, now + listing_s
        deltas = [written for written in deltas if written > removed_before or now < rewritten]
        requests["LIST"] += 1 + (SHARDS + len(deltas)) // 1000
        unseen = sum(written > seen[replica] for written in deltas)
        changed = SHARDS if seen[replica] < rewritten <= now or seen[replica] == 0.0 else 0
        requests["GET"] += unseen + changed
        moved += changed * shard_bytes + unseen * (32 + KEY_BYTES * rate * refresh_s / 3600)
        if chance.random() < 2 / 3600 * refresh_s / replicas:
            deaths += 1
            seen[replica] = 0.0
            continue
        requests["PUT"] += 1
        deltas.append(now)
        seen[replica] = now
        written = now - chance.uniform(0, refresh_s)
        ages += [now + chance.uniform(0, refresh_s) - written]  # when another replica refreshes
    ages.sort()
    hours = day / 3600
    dollars = sum(_PRICES.get(kind, 0.0) * number for kind, number in requests.items()) / hours
    plain = replicas * 3600 / refresh_s * (entries / 1000 + SHARDS + 1) * _PRICES["LIST"]
    print(
        f"{entries} entries, {replicas} replicas, a refresh every {refresh_s:.0f} s, {rate:.0f} new an hour and replica"
    )
    print(
        f"  with the catalog: ${dollars:.3f} an hour; "
        + ", ".join(f"{number / hours:.0f} {kind}" for kind, number in sorted(requests.items()))
        + " an hour"
    )
    each = moved / day / replicas * 8 / 1e6
    print(f"  {moved / hours / 1e9:.1f} GB an hour within the region, {each:.2f} Mbit/s a replica")
    half, most = ages[len(ages) // 2], ages[int(len(ages) * 0.99)]
    print(f"  a new entry is known elsewhere after {half:.0f} s (median), {most:.0f} s (99 %), {ages[-1]:.0f} s (most)")
    latest = compact_s + listing_s + 2 * refresh_s
    print(f"  {deaths} writers died; what they had not announced is known {latest:.0f} s later at most,")
    print("  if the next full listing comes to its end")
    print(f"  plain listings: ${plain:.2f} an hour")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--refresh-s", type=float, default=300.0)
    parser.add_argument("--new-an-hour", type=float, default=1000.0, help="entries that each replica stores")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.simulate:
        entries = arguments.entries or 100_000_000
        shard_bytes = one_shard(entries)
        a_day(entries, arguments.replicas, arguments.refresh_s, shard_bytes, arguments.new_an_hour, arguments.seed)
        return
    temporary = tempfile.TemporaryDirectory(prefix="catalog-", dir=arguments.folder)
    with temporary as folder, seaweed(Path(folder) / "s3") as server:
        on_a_server(server, arguments.entries or 1_000_000)


if __name__ == "__main__":
    main()
