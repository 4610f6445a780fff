# SPDX-License-Identifier: Apache-2.0
"""A shape-agnostic cache of encoder outputs over memory, disk and remote stores.

This package imports no serving engine. Importing it loads nothing else until one of its names is used, so that the
store process starts fast.
"""

from typing import TYPE_CHECKING

from lmcache_ec.version import __version__

if TYPE_CHECKING:
    from lmcache_ec.config.sources import ConfigError
    from lmcache_ec.standalone.cache import Cache
    from lmcache_ec.standalone.tensor import Tensor

__all__ = ["Cache", "ConfigError", "Tensor", "__version__"]

_HOMES = {
    "Cache": "lmcache_ec.standalone.cache",
    "ConfigError": "lmcache_ec.config.sources",
    "Tensor": "lmcache_ec.standalone.tensor",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
