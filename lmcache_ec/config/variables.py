# SPDX-License-Identifier: Apache-2.0
"""`${NAME}` in the address of a remote: an environment variable, so that no password has to be in a file."""

import re
from collections.abc import Mapping
from urllib.parse import quote

_VARIABLE = re.compile(r"\$(?:\$|\{(\w+)\}|\{?(\w+)|(\{))")


def filled(url: str, environ: Mapping[str, str]) -> str:
    """The address with its variables' values: unchanged if a variable is the whole address, else quoted as part of a
    URL. `$$` is a dollar. ValueError, which shows no value, for a variable that is not set or lacks a
    brace."""
    found = list(_VARIABLE.finditer(url))
    if bare := [match[2] for match in found if match[2] or match[3]]:
        # It may be the beginning of a password: only a variable that is set is shown.
        name = bare[0] if bare[0] in environ else "NAME"
        raise ValueError(f"a variable is written ${{{name}}}, with braces, and a dollar as $$")
    if unset := [match[1] for match in found if match[1] and match[1] not in environ]:
        raise ValueError(f"no such environment variable: {', '.join(unset)}")
    if (whole := _VARIABLE.fullmatch(url.strip())) and whole[1]:
        return environ[whole[1]]
    return _VARIABLE.sub(lambda match: quote(environ[match[1]], safe="") if match[1] else "$", url)


def without_variables(text: str) -> str:
    """The text without its variables."""
    return _VARIABLE.sub("", text)
