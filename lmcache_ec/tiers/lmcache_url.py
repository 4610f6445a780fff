# SPDX-License-Identifier: Apache-2.0
"""Where one of LMCache's remotes is: parses its URL, and has what is known of its connector. Imports nothing of
LMCache, and makes no request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

SCHEMES = ("lm", "fs", "mooncakestore", "plugin", "hf3fs", "eic", "infinistore", "sagemaker-hyperpod")

_KV_SHAPES = "LMCache's connector treats every value as a KV chunk of one size, which it computes"
REFUSED: Mapping[str, str] = {
    "azure": _KV_SHAPES,
    "bigtable": _KV_SHAPES,
    "hfbucket": _KV_SHAPES,
    "mock": "LMCache's connector stores lengths, but no bytes",
    "blackhole": "LMCache's connector stores nothing",
    "audit": "it wraps another remote: use that one directly",
    "external": "LMCache has replaced it by remote_storage_plugins: use plugin://<name>",
}
"""Scheme, or type of a built-in plugin -> why no encoder output can be kept there."""

_PLUGIN = "remote_storage_plugin."
_PLUGIN_NAME = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_BUILT_IN = ("fs", "mooncakestore", "hf3fs")  # plugins that need no class in extra_config
_ELSEWHERE = "use its own URL, for which this cache has a tier"
_REFUSED_PLUGINS = {**REFUSED, **dict.fromkeys(("redis", "valkey", "s3"), _ELSEWHERE)}
_MOONCAKE_MASTER = ("mooncake_master_server_addr", "mooncake_master_server_address", "master_server_address")


@dataclass(frozen=True, slots=True)
class ConnectorTraits:
    """What one of LMCache's connectors is known to do.

    `one_stream`: a single connection, on which interleaved requests would read each other's answers.
    `declines`: given no memory for a value, it leaves that unread and continues. `lists`: it can list its entries.
    `replaces`: the last put of a key counts, not the first. `reconnects`: it finds its store again by itself, and a
    new one is expensive. `proven`: it is in this tier's tests; another one has to keep a small entry when opened.
    """

    one_stream: bool = False
    declines: bool = False
    lists: bool = False
    replaces: bool = False
    reconnects: bool = False
    proven: bool = False


_TRAITS = {
    "lm": ConnectorTraits(one_stream=True, replaces=True, proven=True),
    "fs": ConnectorTraits(declines=True, lists=True, replaces=True, proven=True),
    "mooncakestore": ConnectorTraits(declines=True, reconnects=True),
}


def check_lmcache_url(url: str, extra_config: Mapping[str, object]) -> None:
    """ValueError, which holds no secret, for an invalid URL. Imports nothing of LMCache."""
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    if "@" in parts.netloc:
        raise ValueError(f"{scheme}://: LMCache's connector takes neither user nor password")
    if scheme == "lm" and not (parts.hostname and parts.port and parts.path in ("", "/")):
        raise ValueError("lm://: must be lm://<host>:<port>")
    if scheme == "fs" and (not parts.path.strip("/") or (parts.netloc and parts.port is None)):
        raise ValueError("fs://: must be fs:///<folder>, or fs://<host>:<port>/<folder>, whose host has no effect")
    if _type_of(url) == "mooncakestore" and not any(extra_config.get(key) for key in _MOONCAKE_MASTER):
        raise ValueError(f"{scheme}://: extra_config must have {_MOONCAKE_MASTER[0]}, as <host>:<port>")
    if scheme == "plugin":
        _check_plugin(plugin_name(url), extra_config)


def _check_plugin(name: str, extra_config: Mapping[str, object]) -> None:
    if not _PLUGIN_NAME.fullmatch(name):
        raise ValueError("plugin://: must be plugin://<name> or plugin://<type>.<instance>")
    if why := _REFUSED_PLUGINS.get(name.partition(".")[0]):
        raise ValueError(f"plugin://{name} cannot keep encoder outputs: {why}")
    wanted = [f"{_PLUGIN}{name}.{what}" for what in ("module_path", "class_name")]
    if name.partition(".")[0] not in _BUILT_IN and not all(extra_config.get(key) for key in wanted):
        raise ValueError(f"plugin://{name}: extra_config must have {' and '.join(wanted)}")


def plugin_name(url: str) -> str:
    """The name in `plugin://<name>`; empty for any other URL."""
    scheme, _, name = url.partition("://")
    return name.strip("/") if scheme.lower() == "plugin" else ""


def connector_address(url: str) -> str:
    """The URL as LMCache wants it: its scheme in lower case, and a host even with `fs://`, where it means nothing."""
    scheme, _, rest = url.partition("://")
    host = "localhost:0" if scheme.lower() == "fs" and rest.startswith("/") else ""
    return f"{scheme.lower()}://{host}{rest}"


def _type_of(url: str) -> str:
    """The scheme, or for a plugin the type with which its name begins."""
    return plugin_name(url).partition(".")[0] or urlsplit(url).scheme.lower()


def traits_of(url: str) -> ConnectorTraits:
    return _TRAITS.get(_type_of(url), ConnectorTraits())


def listener(url: str, extra_config: Mapping[str, object]) -> tuple[str, int] | None:
    """Host and port at which something has to listen before a connector may be made; None if that does not matter.

    It does for connectors that wait forever if nothing listens there. Mooncake's even blocks the interpreter
    meanwhile, for 90 s, and with it every other tier.
    """
    if _type_of(url) == "mooncakestore":
        named = (extra_config.get(key) for key in _MOONCAKE_MASTER)
        url = f"//{next((text for text in named if text), '')}"
    elif _type_of(url) != "lm":
        return None
    parts = urlsplit(url)
    return (parts.hostname, parts.port) if parts.hostname and parts.port else None
