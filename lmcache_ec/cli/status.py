# SPDX-License-Identifier: Apache-2.0
"""Ask every store process of this user on this host for its engine's counts, and print them.

An engine whose store process does not answer is not left out: its first rank is known by the socket over which it met
the scheduler side, which /proc/net/unix lists. So no request goes to the engine itself, which may be busy.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from lmcache_ec.cli.wording import counted, span
from lmcache_ec.link import STATUS_PREFIX, rank_address, same_user
from lmcache_ec.sizes import precise_size, rounded_size

_TIMEOUT_S = 2.0
_WIDEST = 132
"""Width of a table: a narrower terminal wraps its lines, which loses nothing."""
_COLUMNS = (
    *("listed", "held", "limit", "hits", "misses", "rate", "errors", "writes"),
    *("read", "ms", "written", "ms", "unsaved"),
)
_IDLE_S = 5.0
_FIRST_RANK = re.compile(r"lmcache-ec-[0-9a-f]{32}-0")
_LISTENS = 0x10000
_SILENT = {
    "starting": "is starting: its scheduler side has not come up yet",
    "replacing": "runs, but its store process does not answer: if that has ended, the engine's next scheduling pass "
    "starts another one; until then nothing is loaded from its tiers",
}
"""State -> what is printed for an engine in that state."""

_ENCODE_US, _TIER_US = "policy_encode_us_", "policy_us_"

_ABSENT: dict[str, Any] = {
    **{"pid": None, "engine": "", "namespace": "", "incarnation": 0, "engine_pid": None, "since": None},
    **{"state": "serving", "scan_complete": False, "jobs": 0, "tiers": [], "store": {}, "book": {}, "events": None},
    "book_age_s": None,
}
"""Defaults for keys that an answer lacks: an engine may have been started with another version."""


def engines() -> list[dict[str, Any]]:
    """One object for each engine that answers: `pid` of its store process, `engine`, `namespace`, and more.

    `store` and `tiers` are counts of the store process since its start; `book` is what the scheduler side handed over
    at the end of its last pass in which anything changed, `book_age_s` seconds ago. A tier's `entries` are those of
    this namespace at its last listing (for the disk, also those written since by any engine; None if it is asked
    instead), its `bytes` those of all engines on the folder (None if not counted). `engine_pid` is the process
    in which the scheduler runs (EngineCore). `state` is "serving", or "finishing" once the engine has ended.
    """
    names = sorted({each.name for each in sockets() if each.name.startswith(STATUS_PREFIX)})
    return [answer for name in names if (answer := _ask(name)) is not None]


def all_engines() -> list[dict[str, Any]]:
    """As `engines`, plus those of this user for which no store process answers: `pid` is None, `state` tells why.

    `worker_pid` is the first rank's process; what only the store process knows is empty.
    """
    ranks = [each for each in sockets() if _FIRST_RANK.fullmatch(each.name)]  # before asking: one may start meanwhile
    found = engines()
    known = {rank_address(engine["engine"], 0)[1:] for engine in found}
    silent = {each.name: each for each in ranks if each.name not in known}
    return found + [_unknown(each, pid) for each in silent.values() if (pid := _holder(each.inode))]


def show(found: list[dict[str, Any]]) -> None:
    """Print the engines as text, each with a table of its tiers."""
    console = Console(highlight=False, markup=False, soft_wrap=True, width=max(Console().width, _WIDEST))
    if not found:
        console.print("No engine with an encoder cache runs on this host under this user.")
    short = short_names([engine["engine"] for engine in found])
    for engine in found:
        if engine["pid"] is None:
            console.print(f"engine of worker process {engine['worker_pid']} {_SILENT[engine['state']]}\n")
            continue
        for line in _head(engine, short[engine["engine"]]):
            console.print(line)
        console.print(Padding(_table(engine), (0, 0, 0, 2), expand=False), soft_wrap=False)
        console.print()


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Name of an engine -> its shortest prefix that distinguishes it from the others; at least eight characters."""
    length = 8
    while len({name[:length] for name in names}) < len(set(names)):
        length += 1
    return {name: name[:length] for name in names}


def tier_state(tier: Mapping[str, Any]) -> str:
    """As in the metrics, with spaces. An engine of an earlier version does not report it; then it is less precise."""
    plain = "unreachable" if tier["rests"] else "read_only" if tier.get("read_only") else "serving"
    return str(tier.get("state", plain)).replace("_", " ")


def hit_rate(tier: Mapping[str, Any]) -> str:
    """The share of answered look-ups for which the tier had the entry."""
    asked = tier["hits"] + tier["misses"]
    return f"{100 * tier['hits'] / asked:.0f} %" if asked else ""


# ---- what is printed


def _head(engine: dict[str, Any], name: str) -> Iterator[str]:
    book, number = Counter(engine["book"]), engine["incarnation"]
    since = engine["since"] and time.strftime(", since %Y-%m-%d %H:%M:%S", time.localtime(engine["since"]))
    yield f"engine {name}: {engine['state']}"
    changed = "; its weights have changed, and entries stay in memory" if book["memory_only"] else ""
    yield f"  namespace      {engine['namespace']}{changed}"
    if pid := engine["engine_pid"]:
        yield f"  EngineCore     process {pid}" + ("" if engine["state"] == "serving" else ", ended")
    earlier = f", {number - 1} before it ended" if number > 1 else ""
    yield f"  store process  {engine['pid']}{since or ''}{earlier}, {counted(engine['jobs'], 'job')} under way"
    if events := engine["events"]:
        state = events["problem"] or f"batch {events['number']:,}, {counted(events['snapshots'], 'snapshot')} requested"
        yield f"  events         {events['endpoint']}: {state}"
    if not book:
        yield "  no scheduling pass yet"
        return
    loads = {name.removeprefix("loads_"): value for name, value in book.items() if name.startswith("loads_")}
    failed = loads.pop("failed", 0)
    by_tier = ", ".join(f"{value:,} from {name}" for name, value in loads.items() if value)
    yield f"  loads          {sum(loads.values()):,}" + (f": {by_tier}" if by_tier else "") + f"; {failed:,} failed"
    for tier in engine["tiers"]:
        if forged := tier.get("forged"):
            yield f"  not trusted    {counted(forged, 'read')} of {tier['name']}: unsigned, or signed with another key"
    yield f"  saves          {book['saves']:,}; {book['saves_dropped']:,} dropped, {book['saves_void']:,} void"
    if (age_s := engine["book_age_s"] or 0.0) > _IDLE_S:
        yield f"  idle           no scheduling pass for {span(age_s)}: loads, saves and the row cpu are as of then"
    if waits := book["policy_waits"] + book["policy_encodes_instead"]:
        yield f"  load policy    {waits:,} weighed: {book['policy_encodes_instead']:,} encoded instead{_figures(book)}"
    for tier in engine["tiers"]:
        if notice := tier.get("notice"):
            yield f"  note           {notice}"
        if error := tier.get("last_error"):
            yield f"  last error     {span(time.time() - error['at'])} ago, {error['text']}"


def _figures(book: Mapping[str, int]) -> str:
    """What the load policy assumes: the time of an encode, by modality, and the time that each tier takes."""
    encodes = [(f"{name[len(_ENCODE_US) :]} encode", us) for name, us in book.items() if name.startswith(_ENCODE_US)]
    tiers = [(name[len(_TIER_US) :], us) for name, us in book.items() if name.startswith(_TIER_US)]
    known = ", ".join(f"{name} {us / 1000:.1f} ms" for name, us in encodes + tiers)
    return f" ({known})" if known else ""


def _table(engine: dict[str, Any]) -> Table:
    """Memory first, as counted by the scheduler side; then the tiers in the order in which they are asked."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("tier", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    if book := Counter(engine["book"]):
        counts = [f"{book['loads_cpu']:,}", "", "", f"{book['loads_failed']:,}", f"{book['saves']:,}"]
        held, limit = rounded_size(book["used_bytes"]), rounded_size(book["capacity_bytes"])
        unsaved = precise_size(book["dirty_bytes"]) if book["dirty_bytes"] else ""
        table.add_row("cpu", f"{book['places_live']:,}", held, limit, *counts, "", "", "", "", unsaved)
    for tier in engine["tiers"]:
        sizes = ["" if size is None else rounded_size(size) for size in (tier["bytes"], tier["limit_bytes"])]
        counts = [f"{tier['hits']:,}", f"{tier['misses']:,}", hit_rate(tier), f"{tier['errors']:,}"]
        counts += [f"{tier['writes']:,}", *_moved(tier)]
        name = tier["name"] if (state := tier_state(tier)) == "serving" else f"{tier['name']} ({state})"
        listed = "" if tier["entries"] is None else f"{tier['entries']:,}"
        table.add_row(name, listed, *sizes, *counts)
    return table


def _moved(tier: Mapping[str, Any]) -> list[str]:
    """Bytes read and milliseconds per read, the same for writes, and what waits to be written. An engine of an earlier
    version does not report them."""
    cells = []
    for size, mean in (("read_bytes", "read_ms"), ("written_bytes", "write_ms")):
        cells.append(precise_size(tier[size]) if tier.get(size) else "")
        cells.append(f"{tier[mean]:.1f}" if tier.get(mean) is not None else "")
    waits = f"{counted(tier['backlog'], 'write')}, {precise_size(tier['backlog_bytes'])}" if tier.get("backlog") else ""
    return [*cells, waits]


# ---- requests to store processes


@dataclass(frozen=True, slots=True)
class Socket:
    """An abstract socket of this network namespace."""

    name: str
    inode: int
    listens: bool


def sockets() -> Iterator[Socket]:
    """All that have a name."""
    for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]:
        fields = line.split(None, 7)
        if len(fields) == 8 and fields[7].startswith("@"):
            yield Socket(fields[7][1:], int(fields[6]), bool(int(fields[3], 16) & _LISTENS))


def _ask(name: str) -> dict[str, Any] | None:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect("\0" + name)
            if not same_user(connection):
                return None
            return {**_ABSENT, **json.loads(b"".join(iter(lambda: connection.recv(65536), b"")))}
    except (OSError, ValueError, TypeError):
        return None  # ended meanwhile, or not answering


def _holder(inode: int) -> int | None:
    """The process of this user that has the socket open; None for another user's, or one that has ended."""
    return min(_holders(inode), default=None)  # not a child of it that is about to become another program


def _holders(inode: int) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            descriptors = list((folder / "fd").iterdir()) if _user(folder) == os.geteuid() else []
        except OSError:
            continue  # it has ended
        if any(_target(link) == f"socket:[{inode}]" for link in descriptors):
            yield int(folder.name)


def _user(process: Path) -> int:
    """The user that it runs as. (If it gave up root, its folder in /proc is still owned by root.)"""
    lines = (process / "status").read_text().splitlines()
    return next((int(line.split()[2]) for line in lines if line.startswith("Uid:")), -1)


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""  # closed meanwhile


def _unknown(rank: Socket, worker_pid: int) -> dict[str, Any]:
    return _ABSENT | {"state": "starting" if rank.listens else "replacing", "worker_pid": worker_pid}
