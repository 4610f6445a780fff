# SPDX-License-Identifier: Apache-2.0
"""One of LMCache's own connectors: made, given memory to read into, and shared by the calls of a tier.

LMCache, and torch with it, is not imported before `connector_maker` runs: it takes seconds, and 350 MB.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import math
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_ec.tiers.base import TierError
from lmcache_ec.tiers.lmcache_url import ConnectorTraits, connector_address, plugin_name

_LONGEST_NAME = 75  # fits, with the rest of the key, into the 150 characters that `lm://` sends
_READ_FOR_NOTHING = 4 << 20  # a longer value is not read only to discard it
_STRIPES = 64
_OLD_S = 86_400
_TEMPORARY = ".lmcache-ec-"
_TEMPORARY_KEY = "fs_connector_relative_tmp_dir"


@dataclass(slots=True)
class Reading:
    """What one call wants from the connector, and what it has found: `wanted` and `found` are lengths in bytes."""

    wanted: int
    found: int | None = None
    declined: bool = False


reading_now: ContextVar[Reading | None] = ContextVar("reading_now", default=None)
"""The request of the call that runs in this context."""


class _Memory:
    """Where a connector gets its memory; replaces LMCache's LocalCPUBackend. Runs mostly on the tier's loop.

    `allocate` knows from the context which call it serves. A connector that calls from elsewhere gets what it asks for.
    """

    memory_allocator = None

    def __init__(self, config: Any, metadata: Any, traits: ConnectorTraits, limit_bytes: int) -> None:
        self.config = config
        self.metadata = metadata
        self._traits = traits
        self._limit_bytes = limit_bytes

    def allocate(self, shapes: Any, dtypes: Any, fmt: Any = None, *_: Any, **__: Any) -> Any:
        """Memory for a value that the store has; None if it is not wanted, or is longer than any may be. ValueError
        for a shape that no value has: what follows it on the connection is then unknown."""
        shapes, dtypes = ([one] if not isinstance(one, list) else one for one in (shapes, dtypes))
        if any(size < 0 for shape in shapes for size in shape):
            raise ValueError(f"a value of the shapes {shapes}")
        length = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
        reading = reading_now.get()
        if reading is not None:
            reading.found = length
            unwanted = length != reading.wanted
            reading.declined = unwanted and (self._traits.declines or length > _READ_FOR_NOTHING)
            if reading.declined:
                return None
        return _memory_object(shapes, dtypes, fmt) if 0 <= length <= self._limit_bytes else None


def _memory_object(shapes: Any, dtypes: Any, fmt: Any) -> Any:
    import torch
    from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj

    length = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    raw = torch.empty(max(1, length), dtype=torch.uint8)  # LMCache takes the address of even no bytes
    metadata = MemoryObjMetadata(shapes[0], dtypes[0], 0, length, 1, 0, fmt, shapes=shapes, dtypes=dtypes)
    return TensorMemoryObj(raw, metadata, None)


def memory_with(data: memoryview) -> Any:
    """A copy of `data` as LMCache's connectors take it; after a timeout the connector may still read it."""
    import torch
    from lmcache.v1.memory_management import MemoryFormat

    made = _memory_object([torch.Size([len(data)])], [torch.uint8], MemoryFormat.EC_TD)
    made.byte_array.cast("B")[:] = data
    return made


@dataclass(frozen=True, slots=True)
class Entry:
    """The entry that a call is about."""

    namespace: str
    digest: bytes

    @property
    def engine_key(self) -> Any:
        """Its key in LMCache."""
        import torch
        from lmcache.utils import CacheEngineKey

        return CacheEngineKey(model_name(self.namespace), 1, 0, int.from_bytes(self.digest), torch.uint8)


class Connection:
    """A connector and the locks for its use. Belongs to the tier's loop; only `sever` may be called from elsewhere."""

    def __init__(self, connector: Any, traits: ConnectorTraits) -> None:
        self.connector = connector
        self._locks = [asyncio.Lock() for _ in range(1 if traits.one_stream else _STRIPES)]
        self._socket: socket.socket | None = connector.client_socket if traits.one_stream else None
        if self._socket is not None:  # LMCache sends a put in two parts: 40 ms without this
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def turn(self, entry: Entry | None) -> asyncio.Lock:
        """The lock to hold while using the connector for an entry; one lock for all entries if there is one stream."""
        return self._locks[hash(entry) % len(self._locks)]

    async def exists(self, entry: Entry) -> bool:
        found = int(await self.connector.exists(entry.engine_key))
        if found < 0:  # mooncake's way to report that it could not look
            raise TierError(errno.EIO, f"mooncake answers {found} to whether {entry.digest.hex()} is there")
        return bool(found)

    async def get(self, entry: Entry) -> Any:
        if not self.connector.support_batched_get():
            return await self.connector.get(entry.engine_key)
        found = await self.connector.batched_get([entry.engine_key])
        return found[0] if found else None

    async def put(self, entry: Entry, carried: Any) -> None:
        await self.connector.put(entry.engine_key, carried)

    def sever(self) -> None:
        """Wake a thread that would wait forever for the other side. LMCache's sockets have no timeout."""
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def discard(self) -> None:
        if self._socket is not None:
            self._socket.close()
        for folder in _temporary_folders(self.connector):
            shutil.rmtree(folder, ignore_errors=True)


def _temporary_folders(connector: Any) -> list[Path]:
    own = getattr(connector, "relative_tmp_dir", None)
    return [path / own for path in connector.base_paths] if own is not None else []


def _sweep(connector: Any) -> None:
    """Remove what killed writers left. A living one that wrote nothing for a day makes a new folder. Our own was made
    just now, by the clock that dates the others."""
    for own in _temporary_folders(connector):
        now = own.stat().st_mtime
        for folder in own.parent.glob(f"{_TEMPORARY}*"):
            try:
                if now - folder.stat().st_mtime > _OLD_S:
                    shutil.rmtree(folder, ignore_errors=True)
            except OSError:
                pass


def connector_maker(
    url: str, extra_config: Mapping[str, object], traits: ConnectorTraits, limit_bytes: int
) -> Callable[[asyncio.AbstractEventLoop], Any]:
    """A function that makes connectors for a loop. Imports LMCache, and silences it unless it was imported before: it
    logs URLs and each miss of a file."""
    if "lmcache" not in sys.modules:
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "CRITICAL")
    import torch
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.connector import CreateConnector

    address, plugin = connector_address(url), plugin_name(url) or None
    metadata = LMCacheMetadata("lmcache-ec", 1, 1, 0, 0, torch.uint8, (1, 1, 256, 1, 1))

    def connect(loop: asyncio.AbstractEventLoop) -> Any:
        own = {"save_chunk_meta": True, _TEMPORARY_KEY: f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}"}
        config = LMCacheEngineConfig.from_defaults(
            extra_config={**extra_config, **own}, remote_storage_plugins=[plugin] if plugin else None
        )
        memory = _Memory(config, metadata, traits, limit_bytes)
        connector = CreateConnector(address, loop, memory, config, metadata, plugin).getWrappedConnector()
        _sweep(connector)
        return connector

    return connect


def model_name(namespace: str) -> str:
    """The model name in LMCache's key: no two namespaces share it, and no model has it."""
    name = f"ec.{namespace}"
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 17]}~{hashlib.sha256(namespace.encode()).hexdigest()[:16]}"
