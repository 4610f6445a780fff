# SPDX-License-Identifier: Apache-2.0
"""Fast pickling, by position, for dataclasses that are sent with every step."""

from __future__ import annotations

import operator
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")


def positional(cls: type[T]) -> type[T]:
    """Pickle a dataclass as its type and its fields' values, at least two. Otherwise a dataclass with slots is taken
    apart and rebuilt field by field, in Python, by sender and receiver of each step."""
    values = operator.attrgetter(*(field.name for field in fields(cls)))  # type: ignore[arg-type]

    def reduce(self: T) -> tuple[type[T], tuple[Any, ...]]:
        return cls, values(self)

    cls.__reduce__ = reduce  # type: ignore[method-assign, assignment]
    return cls
