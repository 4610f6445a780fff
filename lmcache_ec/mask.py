# SPDX-License-Identifier: Apache-2.0
"""What of a configuration may be shown: no credential reaches an error, a log line or a report.

A credential is known by where it stands (a key that sounds like one, the user part of an address, an address that
mentions one). When in doubt it is hidden: whoever wrote the value finds it by key and place.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

HIDDEN = "<hidden>"
_WORDS = ("pass", "pwd", "secret", "token", "credential", "access_key", "accesskey", "api_key", "apikey", "auth")
_PLAIN_NAME = re.compile(r"[\w.-]{1,64}")
_LONGEST = 200


def sounds_secret(name: str) -> bool:
    """Whether a key of this name may hold a credential."""
    return any(word in name.lower().replace("-", "_") for word in _WORDS)


def holds_credential(value: object) -> bool:
    """Whether there is one in this value: in an address, or under a key of a map that sounds like it."""
    if isinstance(value, str):
        return "://" in value and ("@" in value or sounds_secret(value.partition("?")[2]))
    if isinstance(value, Mapping):
        named = (bool(inner) and sounds_secret(str(name)) for name, inner in value.items())
        return any(named) or any(map(holds_credential, value.values()))
    return isinstance(value, Iterable) and not isinstance(value, bytes) and any(map(holds_credential, value))


def shown(value: object) -> str:
    """A value as it may be shown, in one line, as YAML would take it; of a map or list (not of URLs) only its kind."""
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)[:_LONGEST]
    if isinstance(value, Path):
        return repr(str(value))  # one of ours, already known to be a folder
    if isinstance(value, list | tuple) and all(isinstance(each, str) and "://" in each for each in value):
        return f"[{', '.join(map(shown, value))}]"
    if not isinstance(value, str):
        return f"<{_kind(value)}>"
    mistyped = "@" in value and not value.startswith("/")  # an address without its ://, say
    return HIDDEN if holds_credential(value) or sounds_secret(value) or mistyped else repr(value)[:_LONGEST]


def shown_shape(value: object) -> str:
    """A value that may be anything, since nobody knows its key: of a text, list or map only what it is."""
    return shown(value) if value is None or isinstance(value, bool | int | float) else f"<{_kind(value)}>"


def shown_name(name: str) -> str:
    """A key or the name of a variable. What is no such name may be a value that was put in its place."""
    return name if _PLAIN_NAME.fullmatch(name) else HIDDEN


def shown_path(path: str) -> str:
    """Where a file was asked for: an address with a password may have been put there."""
    return HIDDEN if holds_credential(path) else path


def _kind(value: object) -> str:
    name = type(value).__name__
    return {"str": "text", "dict": "map", "tuple": "list"}.get(name, name)
