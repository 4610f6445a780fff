# SPDX-License-Identifier: Apache-2.0
"""Masks values for errors, log lines and reports, so that none contains a credential.

A credential is recognized by its position (a key that sounds like one, the user part of a URL, a URL that mentions
one). When in doubt a value is masked: its author can find it by its key and where it was set.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

HIDDEN = "<hidden>"
_WORDS = ("pass", "pwd", "secret", "token", "credential", "access_key", "accesskey", "api_key", "apikey", "auth")
_PLAIN_NAME = re.compile(r"[\w.-]{1,64}")
_LONGEST = 200


def sounds_secret(name: str) -> bool:
    """Whether a key of this name may hold a credential."""
    return any(word in name.lower().replace("-", "_") for word in _WORDS)


def holds_credential(value: object) -> bool:
    """Whether a value contains a credential: in a URL, or under a map key that sounds like one."""
    if isinstance(value, str):
        return "://" in value and ("@" in value or sounds_secret(value.partition("?")[2]))
    if isinstance(value, Mapping):
        named = (bool(inner) and sounds_secret(str(name)) for name, inner in value.items())
        return any(named) or any(map(holds_credential, value.values()))
    return isinstance(value, Iterable) and not isinstance(value, bytes) and any(map(holds_credential, value))


def masked(value: object) -> str:
    """A value on one line, in YAML form, HIDDEN if it may hold a credential; of a map or list (other than of URLs) only
    its kind."""
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)[:_LONGEST]
    if isinstance(value, Path):
        return repr(str(value))  # parsed by us, so known to be a folder
    if isinstance(value, list | tuple) and all(isinstance(each, str) and "://" in each for each in value):
        return f"[{', '.join(map(masked, value))}]"
    if not isinstance(value, str):
        return f"<{_kind(value)}>"
    mistyped = "@" in value and not value.startswith("/")  # a URL without its ://, say
    return HIDDEN if holds_credential(value) or sounds_secret(value) or mistyped else repr(value)[:_LONGEST]


def masked_unknown(value: object) -> str:
    """A value under an unknown key, which may be anything: of a text, list or map only the kind."""
    return masked(value) if value is None or isinstance(value, bool | int | float) else f"<{_kind(value)}>"


def masked_name(name: str) -> str:
    """A key or the name of a variable. Text that is no valid name may be a value put there by mistake."""
    return name if _PLAIN_NAME.fullmatch(name) else HIDDEN


def masked_path(path: str) -> str:
    """The path of a file. A URL with a password may have been put there by mistake."""
    return HIDDEN if holds_credential(path) else path


def masked_address(url: str) -> str:
    """Host, port and path of a URL: neither user nor password nor parameters."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "at a URL that cannot be read"
    return f"{parts.netloc.rpartition('@')[2]}{parts.path}"


def masked_url(url: str) -> str:
    """Scheme, host, port and path of a URL: neither user nor password nor parameters."""
    return f"{url.partition('://')[0].lower()}://{masked_address(url)}"


def without_secrets(text: str, secrets: Mapping[str, str]) -> str:
    """`text` from another program, with each secret (name -> value) replaced by `<name>`."""
    for name, secret in secrets.items():
        text = text.replace(secret, f"<{name}>")
    return text


def _kind(value: object) -> str:
    name = type(value).__name__
    return {"str": "text", "dict": "map", "tuple": "list"}.get(name, name)
