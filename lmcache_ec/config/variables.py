# SPDX-License-Identifier: Apache-2.0
"""`${NAME}` in the address of a remote: an environment variable, so that no password has to stand in a file."""

import re
from collections.abc import Mapping
from urllib.parse import quote

_VARIABLE = re.compile(r"\$\{(\w+)\}")


def filled(url: str, environ: Mapping[str, str]) -> str:
    """The address with the values of its variables: as they are where one is the whole address, else quoted as a part
    of one. ValueError, which shows no value, for a variable that is not set."""
    unset = [name for name in _VARIABLE.findall(url) if name not in environ]
    if unset:
        raise ValueError(f"no such environment variable: {', '.join(unset)}")
    if whole := _VARIABLE.fullmatch(url.strip()):
        return environ[whole[1]]
    return _VARIABLE.sub(lambda match: quote(environ[match[1]], safe=""), url)


def without_variables(text: str) -> str:
    """What is written out in it."""
    return _VARIABLE.sub("", text)
