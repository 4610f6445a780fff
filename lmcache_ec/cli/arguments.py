# SPDX-License-Identifier: Apache-2.0
"""What commands accept as numbers and names. Errors state what was given and what is accepted, whatever typer's do."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Annotated

import typer

from lmcache_ec.mask import masked_unknown

Extra = Annotated[
    str, typer.Option("--extra", metavar="JSON", help="The ec_connector_extra_config that vLLM is given.")
]
"""The option of a command that reads the configuration as an engine does."""

_WHOLE = re.compile(r"[+-]?[0-9]+")


def whole(least: int | None = None, most: int | None = None) -> Callable[[object], int]:
    """Reads a whole number: any, of `least` or more, or from `least` to `most`."""

    def read(given: object) -> int:
        text = str(given)
        number = int(text) if _WHOLE.fullmatch(text) and len(text) < _LONGEST else None
        if number is None or not _within(number, least, most):
            raise typer.BadParameter(f"must be a whole number{_range(least, most)}, not {text!r}")
        return number

    return read


def number(least: float, most: float | None = None) -> Callable[[object], float]:
    """Reads a finite number from `least` to `most`."""

    def read(given: object) -> float:
        try:
            found = float(str(given))
        except ValueError:
            found = math.nan
        if not math.isfinite(found) or not _within(found, least, most):
            raise typer.BadParameter(f"must be a number{_range(least, most)}, not {str(given)!r}")
        return found

    return read


def one_of(*names: str) -> Callable[[object], str]:
    """Reads one of these names."""

    def read(given: object) -> str:
        if str(given) not in names:
            raise typer.BadParameter(f"must be one of {', '.join(names)}, not {str(given)!r}")
        return str(given)

    return read


def extra_map(extra: str) -> dict[str, object]:
    """The map that `--extra` gives as JSON. An error shows only the kind of value or the position: it may hold a
    credential."""
    try:
        parsed = json.loads(extra)
    except ValueError as error:
        where = f" (character {error.pos + 1})" if isinstance(error, json.JSONDecodeError) else ""
        raise _no_map(f"is not JSON{where}") from None
    if not isinstance(parsed, dict):
        raise _no_map(f"is {masked_unknown(parsed)}")
    return parsed


def _no_map(found: str) -> typer.BadParameter:
    return typer.BadParameter(
        f'{found}: must be a map, for example \'{{"local_disk": "/data"}}\'', param_hint="--extra"
    )


_LONGEST = 32
"""Digits; Python refuses to read numbers of thousands."""


def _within(number: float, least: float | None, most: float | None) -> bool:
    return (least is None or number >= least) and (most is None or number <= most)


def _range(least: float | None, most: float | None) -> str:
    if least is None:
        return ""
    return f", {_plain(least)} or more" if most is None else f" from {_plain(least)} to {_plain(most)}"


def _plain(limit: float) -> str:
    return f"{limit:f}".rstrip("0").rstrip(".")
